"""A small set of problems for compute-sanitizer: three dtypes, plain, causal and with every option at once."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

import cuflash


def main() -> None:
    """Compute forward and backward of every problem."""
    rng = np.random.default_rng(0)

    def gaussian(*shape: int, dtype: Any) -> Any:
        return cp.asarray(rng.standard_normal(shape)).astype(dtype)

    for dtype in (cp.float32, cp.float16, cp.float64):
        accum = cp.float64 if dtype == cp.float64 else cp.float32
        q, k, v = (gaussian(2, 150, 4, 40, dtype=dtype), *(gaussian(2, 130, 2, d, dtype=dtype) for d in (40, 24)))
        everything = {
            "softcap": 2.0,
            "bias": gaussian(150, 130, dtype=dtype),
            "alibi_slopes": cp.ones(4, accum),
            "sink": cp.ones(4, accum),
            "mask": cp.asarray(rng.random((150, 130)) < 0.5),
            "dropout_p": 0.2,
            "dropout_seed": 3,
            "block_mask": cuflash.BlockMask.random(150, 130, 0.5, seed=0, block_size=(16, 16)),
            "kv_lengths": cp.asarray([100, 130], dtype=cp.int32),
        }
        options: tuple[dict[str, Any], ...] = ({}, {"causal": True}, everything)
        for chosen in options:
            out, backward = cuflash.attention_vjp(q, k, v, **chosen)
            backward(out)
            cp.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
