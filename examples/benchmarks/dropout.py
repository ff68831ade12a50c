"""Dropout beside FlashAttention-2 and cuDNN, forward and backward, and beside cuflash without it.

    python examples/benchmarks/dropout.py [--commit COMMIT] [--json FILE]

Rounds are interleaved; figures are TFLOP/s at the median time, in bfloat16, with 16384 tokens and heads * head_dim =
2048. The peers are those of torch's scaled_dot_product_attention. It needs torch and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import recording

from cuflash.tools.bench import report
from cuflash.tools.bench.cells import BACKWARD, FORWARD, Cell, Grid, cells_of, default_scale
from cuflash.tools.bench.clock import Stopwatch
from cuflash.tools.bench.inputs import DROPOUT_P, Inputs
from cuflash.tools.bench.peers import PLAIN, US, cuflash_calls, plain_calls

BACKENDS = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
HEAD_DIMS, SEQLENS = (64, 128), (1024, 4096, 16384)
Call = Callable[[], Any]


def peer_calls(inputs: Inputs, backend: str) -> dict[str, Call]:
    """Torch's calls with dropout by one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (inputs.torch(name).transpose(1, 2).detach().requires_grad_() for name in ("q", "k", "v"))
    dout = inputs.torch("dout").transpose(1, 2)
    options = {"dropout_p": DROPOUT_P, "is_causal": inputs.cell.causal, "scale": default_scale(inputs.cell)}

    def call() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    out = call()
    return {FORWARD: forward, BACKWARD: lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}


def measure(cell: Cell, stopwatch: Stopwatch, xp: Any, rounds: int) -> dict[str, Any]:
    """One cell in both directions."""
    inputs = Inputs(cell, xp)
    calls: dict[str, dict[str, Call]] = {}
    for name, prepare in ((US, cuflash_calls), (PLAIN, plain_calls)):
        own = prepare(inputs)
        calls[name] = {FORWARD: own.forward, BACKWARD: own.backward}
    calls |= {name: peer_calls(inputs, backend) for name, backend in BACKENDS.items()}
    figures: dict[str, Any] = {"cell": cell.name}
    for direction in (FORWARD, BACKWARD):
        result = report.Result(cell, direction)
        result.times = stopwatch.interleaved(
            {name: stopwatch.prepared(own[direction]) for name, own in calls.items()}, rounds
        )
        figures[direction] = {name: result.tflops(name) for name in calls} | {"of_plain": result.of_plain()}
    return figures


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS, metavar="D")
    parser.add_argument("--seqlen", nargs="+", type=int, default=SEQLENS, metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    record = recording.Recorder(args, xp, "dropout")
    stopwatch = Stopwatch(xp, 12.0)
    dense = cells_of("dense", Grid("bfloat16", args.head_dim, args.seqlen))
    measured: list[dict[str, Any]] = []
    for plain in dense:
        cell = Cell(**{**plain.describe(), "options": ("dropout",), "name": f"dropout {plain.name}"})
        measured.append(measure(cell, stopwatch, xp, args.rounds))
        line = measured[-1]
        for direction in (FORWARD, BACKWARD):
            shown = ", ".join(f"{name} {x:.0f}" for name, x in line[direction].items() if name != "of_plain")
            print(f"{line['cell']} {direction}: {shown}; {line[direction]['of_plain']:.2f} of plain", flush=True)
        record.write(measured)


if __name__ == "__main__":
    main()
