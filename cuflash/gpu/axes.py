"""Kernels with cuda_src/around/four.cuh see arrays as three axes of rows and one of columns, of any strides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuflash.problem.attention_problem import Array

FOUR = np.dtype((np.int64, 4))  # C++'s Four
CPP_TYPES = {
    "uint8": "unsigned char",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}


def extents(x: Array) -> list[int]:
    """Return the sizes of an array's four axes; a missing one has size 1."""
    return _four(x.shape, 1)


def strides(x: Array) -> list[int]:
    """Return the strides of an array's axes in elements; 0 on axes of size 1."""
    return _four([0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)], 0)


def _four(sizes: Sequence[int], missing: int) -> list[int]:
    return [missing] * (4 - len(sizes)) + [int(n) for n in sizes]
