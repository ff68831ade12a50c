"""Errors on inputs that hide nothing, beside FlashAttention-3's and cuDNN's, against float64.

    python examples/benchmarks/truth.py [--commit COMMIT] [--json FILE]

On N(0, 1) inputs every row is flat: no key has much weight, and whatever a kernel does to large weights does not show.
So these are beside them: "sharp" inputs, N(0, 9), where a few keys have all the weight; and "outliers", N(0, 1) with
N(0, 100) on top of one element in a thousand. Every element of four heads and of all seeds counts. A figure is the
ratio of cuflash's error to the smaller one of the peers: of the mean, of the 99.99th percentile and of the maximum.
It needs a Hopper GPU, torch and FlashAttention-3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import recording
from errors import truth

from cuflash.interop import dtype_of
from cuflash.tools import bench
from cuflash.tools.bench.cells import BACKWARD, FORWARD, Cell, short
from cuflash.tools.bench.inputs import Inputs, as_torch
from cuflash.tools.bench.peers import US, Peer, cuflash_calls, fa3_calls, sdpa_calls

KINDS = ("normal", "outliers", "sharp")
STATISTICS = ("mean", "p99.99", "max")
BARS = {"mean": 1.02, "p99.99": 1.2, "max": 1.4}
RESULTS = ("out", "dq", "dk", "dv")
HEADS, SEEDS = 4, 4
HEAD_DIMS, SEQLENS = (64, 128, 256), (1024, 4096, 8192)
PEERS: dict[str, Peer] = {
    US: cuflash_calls,
    "fa3": fa3_calls,
    "cudnn": lambda inputs: sdpa_calls(inputs, "CUDNN_ATTENTION"),
}
Tensor = Any


def numbers(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Inputs of one kind."""
    x = rng.standard_normal(shape, np.float32)
    if kind == "sharp":
        x *= 3
    elif kind == "outliers":
        x += (rng.random(shape, np.float32) < 1e-3) * rng.standard_normal(shape, np.float32) * 10
    return x


def inputs_of(cell: Cell, kind: str, seed: int, xp: Any) -> Inputs:
    """q, k and v of a kind; dout is N(0, 1)."""
    inputs = Inputs(cell, xp)
    rng = np.random.default_rng(seed)
    for name, shape in cell.shapes().items():
        drawn = numbers("normal" if name == "dout" else kind, shape, rng)
        inputs.arrays[name] = xp.asarray(drawn.astype(dtype_of(cell.dtype)))
    return inputs


def errors_of(inputs: Inputs) -> dict[str, dict[str, list[Tensor]]]:
    """Every peer's errors of each result, a flat tensor of each head."""
    found: dict[str, dict[str, Tensor]] = {}
    for peer, prepare in PEERS.items():
        calls = prepare(inputs)
        results = (calls.forward(), *calls.backward()[:3])
        tensors = [x if hasattr(x, "double") else as_torch(x) for x in results]
        found[peer] = dict(zip(RESULTS, tensors, strict=True))
    errors: dict[str, dict[str, list[Tensor]]] = {peer: {name: [] for name in RESULTS} for peer in PEERS}
    for head in range(inputs.cell.num_heads_q):
        single = [inputs.torch(name)[0, :, head].double()[None] for name in ("q", "k", "v", "dout")]
        true = truth(inputs.cell, *single)
        for peer, tensors_of in found.items():
            for name, value in tensors_of.items():
                errors[peer][name].append((value[0, :, head].double() - true[name][0]).abs().flatten())
    return errors


def statistics(error: Tensor) -> dict[str, float]:
    """Return the statistics of all elements; inf where one is not finite."""
    if not bool(error.isfinite().all()):
        return dict.fromkeys(STATISTICS, float("inf"))
    rank = max(int(0.9999 * error.numel()), 1)
    return {"mean": float(error.mean()), "p99.99": float(error.kthvalue(rank).values), "max": float(error.max())}


def measure(cell: Cell, kind: str, xp: Any, first_seed: int = 0) -> dict[str, Any]:
    """One cell over all seeds."""
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for seed in range(first_seed, first_seed + SEEDS):
        for peer, results in errors_of(inputs_of(cell, kind, seed, xp)).items():
            for name, of_heads in results.items():
                parts.setdefault((peer, name), []).extend(of_heads)
    import torch

    figures: dict[str, Any] = {}
    for name in RESULTS:
        own = {peer: statistics(torch.cat(parts[peer, name])) for peer in PEERS}
        ratios = {s: own[US][s] / min(own[peer][s] for peer in PEERS if peer != US) for s in STATISTICS}
        figures[name] = {"errors": own, "ratios": ratios}
    return {"cell": cell.describe(), "kind": kind, "seeds": SEEDS, "first_seed": first_seed, "results": figures}


def missed(measured: dict[str, Any]) -> list[str]:
    """Return what is beyond its bar."""
    return [
        f"{name} {statistic} {ratio:.3f}"
        for name, figures in measured["results"].items()
        for statistic, ratio in figures["ratios"].items()
        if not ratio <= BARS[statistic]
    ]


def line(measured: dict[str, Any]) -> str:
    """One cell's ratios, as they are printed."""
    ratios = {name: [figures["ratios"][s] for s in STATISTICS] for name, figures in measured["results"].items()}
    figures = (f"{name} {' '.join(f'{ratio:.3f}' for ratio in own)}" for name, own in ratios.items())
    beyond = missed(measured)
    cell = measured["cell"]
    what = f"{cell['dtype']} {cell['name']} {measured['kind']}"
    return f"{what}: {', '.join(figures)}" + (f"; beyond the bar: {', '.join(beyond)}" if beyond else "")


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS, metavar="D")
    parser.add_argument("--seqlen", nargs="+", type=int, default=SEQLENS, metavar="N")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the inputs of four seeds from N on")
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    record = recording.Recorder(args, xp, "truth")
    cells = [
        Cell(f"d{d} {mask} n{short(n)}", args.dtype, 1, n, n, HEADS, HEADS, d, d, causal=mask == "causal")
        for d in args.head_dim
        for mask in ("full", "causal")
        for n in args.seqlen
    ]
    bench.compile_kernels(cells, xp, (FORWARD, BACKWARD), 8)
    all_measured: list[dict[str, Any]] = []
    for kind in args.kind:
        for cell in cells:
            all_measured.append(measure(cell, kind, xp, args.first_seed))
            print(line(all_measured[-1]), flush=True)
            record.write(all_measured)


if __name__ == "__main__":
    main()
