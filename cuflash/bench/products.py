"""Matrix products by cuBLAS in the operands' own dtype.

CuPy's own ``matmul`` turns float16 into float32, without tensor cores, and knows no bfloat16.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Array = Any


class _Library(NamedTuple):
    cupy: Any
    cublas: Any
    types: dict[str, int]


@lru_cache(maxsize=1)
def _library() -> _Library:
    import cupy
    from cupy_backends.cuda.libs import cublas

    runtime = cupy.cuda.runtime
    types = {
        "bfloat16": runtime.CUDA_R_16BF,
        "float16": runtime.CUDA_R_16F,
        "float32": runtime.CUDA_R_32F,
        "float64": runtime.CUDA_R_64F,
    }
    return _Library(cupy, cublas, types)


# cuBLAS reads its factors, one and zero, from the host, in the type that it computes in.
_FACTORS: dict[str, Array] = {"float32": np.array([1, 0], np.float32), "float64": np.array([1, 0], np.float64)}


def matmul(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    """``a @ b`` of CuPy matrices or of stacks of them (count, rows, columns), into `out` or added to it.

    Sums are float32, float64 for float64. One of the last two axes of each operand is contiguous, and the last one of
    `out`, whose dtype may be that of the sums.
    """
    cupy, cublas, types = _library()
    if out is None:
        out = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    # cuBLAS is column-major: it computes out^T = b^T a^T.
    shape = (b.shape[-1], a.shape[-2], a.shape[-1])
    (b_op, b_step), (a_op, a_step) = _orientation(cublas, b), _orientation(cublas, a)
    matrices = ((b, b_step), (a, a_step), (out, out.strides[-2] // out.itemsize))
    described: list[tuple[int, ...]] = [(x.data.ptr, types[x.dtype.name], step) for x, step in matrices]
    call = cublas.gemmEx
    stack: tuple[int, ...] = ()
    if a.ndim == 3:
        described = [(*d, x.strides[0] // x.itemsize) for d, (x, _) in zip(described, matrices, strict=True)]
        call, stack = cublas.gemmStridedBatchedEx, (len(a),)
    double = a.dtype == np.float64
    factors = _FACTORS["float64" if double else "float32"]
    one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    compute = cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F
    call(
        *(cupy.cuda.device.get_cublas_handle(), b_op, a_op, *shape, one, *described[0], *described[1]),
        *(one if add else zero, *described[2], *stack, compute, cublas.CUBLAS_GEMM_DEFAULT),
    )
    return out


def _orientation(cublas: Any, x: Array) -> tuple[int, int]:
    """Whether cuBLAS has to transpose, and the distance between rows (or columns)."""
    rows, columns = (stride // x.itemsize for stride in x.strides[-2:])
    return (cublas.CUBLAS_OP_N, rows) if columns == 1 else (cublas.CUBLAS_OP_T, columns)
