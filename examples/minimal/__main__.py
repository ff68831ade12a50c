"""``python -m cuflash.examples.minimal``: the tiles in NumPy and the kernels beside plain attention in float64."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cuflash.examples.minimal import kernels, tiles

SEQLEN_Q, SEQLEN_K, HEAD_DIM = 150, 200, 64


def main() -> int:
    """Print the largest errors; 0 if all ran, 2 if the kernels cannot run here."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, HEAD_DIM)) for n in (SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    dout = rng.standard_normal((SEQLEN_Q, HEAD_DIM))
    exact, lse = tiles.forward(q, k, v, causal=True)
    gradients = tiles.backward(dout, q, k, v, exact, lse, causal=True)
    difference = np.abs(exact - tiles.naive(q, k, v, causal=True)).max()
    print(f"{SEQLEN_Q} queries, {SEQLEN_K} keys, head_dim {HEAD_DIM}, causal")
    print(f"tiles in NumPy, float64: out differs from plain attention by {difference:.1e}")
    xp, name = _array_module()
    for dtype in kernels.ELEMENTS:
        one = [xp.asarray(x[None, None], dtype) for x in (dout, q, k, v)]
        try:
            out, its_lse = kernels.forward(*one[1:], causal=True)
            found = (out, *kernels.backward(*one, out, its_lse, causal=True))
        except kernels.UnavailableError as error:
            print(error, file=sys.stderr)
            return 2
        errors = [
            float(abs(x[0, 0].astype("float64") - xp.asarray(y)).max())
            for x, y in zip(found, (exact, *gradients), strict=True)
        ]
        print(
            f"kernels on {name}, {dtype}: largest errors of "
            + ", ".join(f"{what} {error:.1e}" for what, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
        )
    return 0


def _array_module() -> tuple[Any, str]:
    try:
        import cupy
    except ImportError:
        return np, "the CPU"
    return (cupy, "the GPU") if cupy.cuda.is_available() else (np, "the CPU")


if __name__ == "__main__":
    sys.exit(main())
