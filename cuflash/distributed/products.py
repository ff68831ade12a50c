"""Matrix products of 16-bit numbers with float32 sums, which neither NumPy nor CuPy's operator gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import interop
from cuflash.problem.attention_problem import accum_of

Array = Any


def product(a: Array, b: Array, *, transposed: str = "", out: Array | None = None) -> Array:
    """Compute ``a @ b`` of C-contiguous matrices, of which `transposed` names those that are taken transposed.

    The sums of 16-bit numbers are float32, and are rounded once. The result has the inputs' dtype, and is written into
    `out`, a C-contiguous matrix of this dtype, if it is given.
    """
    accum = accum_of(a.dtype.name)
    if isinstance(a, np.ndarray) or a.dtype.name == accum:
        wide = [x.astype(accum, copy=False) for x in (a, b)]
        left, right = (x.T if name in transposed else x for name, x in zip("ab", wide, strict=True))
        if out is None:
            return (left @ right).astype(a.dtype, copy=False)
        out[...] = left @ right
        return out
    return _gemm(a, b, transposed, out)


def _gemm(a: Array, b: Array, transposed: str, out: Array | None) -> Array:
    """Compute the product by cuBLAS, whose matrices are column-major, so that both sides are transposed."""
    import cupy
    from cupy.cuda import cublas, device, runtime

    rows, inner = a.shape[::-1] if "a" in transposed else a.shape
    columns = b.shape[0] if "b" in transposed else b.shape[1]
    out = interop.namespace_of(a).empty((rows, columns), a.dtype) if out is None else out
    if not out.size:
        return out
    if not inner:
        out.fill(0)
        return out
    kind = runtime.CUDA_R_16BF if a.dtype.name == "bfloat16" else runtime.CUDA_R_16F
    flags = [cublas.CUBLAS_OP_T if name in transposed else cublas.CUBLAS_OP_N for name in "ba"]
    one, zero = np.float32(1), np.float32(0)
    numbers = [np.asarray(x) for x in (one, zero)]
    handle = device.get_cublas_handle()
    mode = cublas.getPointerMode(handle)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    try:
        cublas.gemmEx(
            handle,
            *flags,
            columns,
            rows,
            inner,
            numbers[0].ctypes.data,
            b.data.ptr,
            kind,
            b.shape[1],
            a.data.ptr,
            kind,
            a.shape[1],
            numbers[1].ctypes.data,
            out.data.ptr,
            kind,
            columns,
            cublas.CUBLAS_COMPUTE_32F,
            cublas.CUBLAS_GEMM_DEFAULT,
        )
    finally:
        cublas.setPointerMode(handle, mode)
    assert isinstance(out, cupy.ndarray)
    return out
