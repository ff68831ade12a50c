"""Errors of all heads beside FlashAttention-3's, against float64.

    python examples/benchmarks/errors.py [--commit COMMIT] [--json FILE]

`python -m cuflash bench` checks one head, whose largest errors fall either way by chance. Here every head of every
sequence counts: the mean error over all elements, and the mean over heads of each head's largest error, as multiples of
FlashAttention-3's, each with its standard error over heads. It needs a Hopper GPU, torch and FlashAttention-3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import recording

from cuflash.tools import bench
from cuflash.tools.bench.cells import BACKWARD, FORWARD, Cell, Grid, cells_of, default_scale
from cuflash.tools.bench.inputs import Inputs, as_torch
from cuflash.tools.bench.peers import US, cuflash_calls, fa3_calls

FA3 = "fa3"
DTYPES = ("bfloat16", "float16")
SEQLENS = (512, 1024)  # longer ones take long in float64, and their errors are alike
COMPILE_JOBS = 8  # cells whose kernels are compiled at once
KINDS = ("mean", "max")  # of a head
Tensor = Any
# By the result's name: a head's errors, ``{kind: (heads of all sequences,)}``.
HeadErrors = dict[str, dict[str, np.ndarray]]


def truth(cell: Cell, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The results of one sequence in float64; all tensors are (heads, seqlen, dim)."""
    scale = default_scale(cell)
    scores = scale * (q @ k.mT)
    if cell.causal:
        scores.masked_fill_(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -np.inf)
    weights = scores.softmax(-1)
    out = weights @ v
    dscores = scale * weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return {"out": out, "dq": dscores @ k, "dk": dscores.mT @ q, "dv": weights.mT @ dout}


def head_errors(inputs: Inputs, found: dict[str, dict[str, Tensor]]) -> dict[str, HeadErrors]:
    """Return the errors of all `found`, ``{peer: {result: tensor}}``."""
    heads: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for sequence in range(inputs.cell.batch):
        true = truth(inputs.cell, *(_double(inputs.torch(name), sequence) for name in ("q", "k", "v", "dout")))
        for peer, results in found.items():
            for name, value in results.items():
                error = (_double(value, sequence) - true[name]).abs()
                for kind, figures in zip(KINDS, (error.mean((-2, -1)), error.amax((-2, -1))), strict=True):
                    of_heads = figures.cpu().numpy()
                    of_heads[~np.isfinite(of_heads)] = np.inf
                    heads.setdefault((peer, name, kind), []).append(of_heads)
    return {
        peer: {name: {kind: np.concatenate(heads[peer, name, kind]) for kind in KINDS} for name in results}
        for peer, results in found.items()
    }


def _double(x: Tensor, sequence: int) -> Tensor:
    return x[sequence].transpose(0, 1).double()


def ratio(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """The ratio of two means over heads, and its standard error.

    Heads are drawn together: what counts is how much of a head's own figure differs from the ratio times the other's.
    """
    with np.errstate(invalid="ignore"):  # of results that are not finite
        value = ours.mean() / theirs.mean()
        rest = (ours - value * theirs) / theirs.mean()
        return {"ratio": float(value), "se": float(rest.std(ddof=1) / len(rest) ** 0.5)}


def compare(ours: HeadErrors, theirs: HeadErrors) -> dict[str, dict[str, dict[str, float]]]:
    """By result and kind: both means over heads, their ratio and its standard error."""
    return {
        name: {
            kind: {US: float(x.mean()), FA3: float(theirs[name][kind].mean()), **ratio(x, theirs[name][kind])}
            for kind, x in kinds.items()
        }
        for name, kinds in ours.items()
    }


def measure(inputs: Inputs) -> dict[str, Any]:
    """One cell."""
    found = {}
    for peer, prepare in ((US, cuflash_calls), (FA3, fa3_calls)):
        calls = prepare(inputs)
        results = (calls.forward(), *calls.backward()[:3])
        tensors = (x if hasattr(x, "double") else as_torch(x) for x in results)
        found[peer] = dict(zip(("out", "dq", "dk", "dv"), tensors, strict=True))
    errors = head_errors(inputs, found)
    heads = len(errors[US]["out"]["mean"])
    return {"cell": inputs.cell.describe(), "heads": heads, "results": compare(errors[US], errors[FA3])}


def line(measured: dict[str, Any]) -> str:
    """One cell's ratios, as they are printed."""
    figures = (
        f"{name} {kind} {found['ratio']:.4f} +- {found['se']:.4f}"
        for name, kinds in measured["results"].items()
        for kind, found in kinds.items()
    )
    return f"{measured['cell']['dtype']} {measured['cell']['name']}: {', '.join(figures)}"


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--head-dim", nargs="+", type=int, default=Grid().head_dims, metavar="D")
    parser.add_argument("--seqlen", nargs="+", type=int, default=SEQLENS, metavar="N")
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    record = recording.Recorder(args, xp, "errors")
    measured: list[dict[str, Any]] = []
    cells = [cell for dtype in args.dtype for cell in cells_of("dense", Grid(dtype, args.head_dim, args.seqlen))]
    bench.compile_kernels(cells, xp, (FORWARD, BACKWARD), COMPILE_JOBS)
    for cell in cells:
        measured.append(measure(Inputs(cell, xp)))
        print(line(measured[-1]), flush=True)
        record.write(measured)


if __name__ == "__main__":
    main()
