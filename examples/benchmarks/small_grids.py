"""Forward on grids that do not fill the GPU, drawn at random, beside FlashAttention-3 and cuDNN.

    python examples/benchmarks/small_grids.py [--seed N] [--cells N] [--commit COMMIT] [--json FILE]

Times are of the device alone: calls are captured into a CUDA graph, as such calls take less time than a host needs to
launch them. The first cells are those of a first sweep that nobody had tuned for; the others are drawn in log scale
with a seed. It needs a Hopper GPU, torch and FlashAttention-3.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import recording

from cuflash.tools.bench.cells import Cell
from cuflash.tools.bench.clock import GraphStopwatch
from cuflash.tools.bench.inputs import Inputs
from cuflash.tools.bench.peers import US, Peer, cuflash_calls, fa3_calls, sdpa_calls

ROUNDS, BUDGET_MS = 3, 3.0
MOST_FLOPS = 2e12
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FIRST = (
    (1, 8, 1024, 64, False),
    (1, 16, 1024, 64, False),
    (1, 16, 1024, 64, True),
    (1, 1, 2048, 64, False),
    (1, 1, 4096, 64, False),
    (1, 1, 2048, 128, True),
    (1, 1, 4096, 128, False),
    (1, 8, 4096, 128, False),
    (1, 1, 16384, 128, False),
    (1, 1, 16384, 64, True),
)
PEERS: dict[str, Peer] = {
    US: cuflash_calls,
    "fa3": fa3_calls,
    "cudnn": lambda inputs: sdpa_calls(inputs, "CUDNN_ATTENTION"),
}


def cell_of(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Cell:
    """A square problem in bfloat16."""
    name = f"b{batch} h{heads} n{seqlen} d{head_dim} {'causal' if causal else 'full'}"
    return Cell(name, "bfloat16", batch, seqlen, seqlen, heads, heads, head_dim, head_dim, causal=causal)


def cells(seed: int, count: int) -> list[Cell]:
    """The first ones, and others drawn at random."""
    rng = random.Random(seed)
    drawn = [cell_of(*numbers) for numbers in FIRST]
    while len(drawn) < count:
        batch, heads = rng.choice((1, 1, 1, 2)), rng.choice(HEADS)
        cell = cell_of(batch, heads, int(2 ** rng.uniform(9, 14)), rng.choice((64, 128)), rng.random() < 0.5)
        if cell.flops("forward") <= MOST_FLOPS:
            drawn.append(cell)
    return drawn


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=110)
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    record = recording.Recorder(args, xp, "small_grids", seed=args.seed)
    stopwatch = GraphStopwatch(xp, BUDGET_MS)
    measured: list[dict[str, Any]] = []
    for cell in cells(args.seed, args.cells):
        inputs = Inputs(cell, xp)
        with stopwatch.within():
            calls = {name: stopwatch.prepared(prepare(inputs).forward) for name, prepare in PEERS.items()}
        rounds = stopwatch.interleaved(calls, ROUNDS)
        times = {name: 1e3 * float(np.median(of_peer)) for name, of_peer in rounds.items()}
        speed = min(x for name, x in times.items() if name != US) / times[US]
        measured.append({"cell": cell.name, "us": times, "speed_of_fastest_peer": speed})
        print(f"{cell.name}: {', '.join(f'{name} {x:.1f}' for name, x in times.items())} us, {speed:.2f}", flush=True)
        record.write(measured)
    speeds = np.array([row["speed_of_fastest_peer"] for row in measured])
    mean = np.exp(np.log(speeds).mean())
    summary = f"mean {mean:.3f} of the faster peer, least {speeds.min():.2f}, below .98: {(speeds < 0.98).sum()}"
    print(f"{len(speeds)} cells: {summary}")


if __name__ == "__main__":
    main()
