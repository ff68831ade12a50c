"""The CUDA driver's own library, and the tensor maps that it encodes for TMA."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cuflash.hardware import SECTOR_BYTES, SWIZZLE_BYTES

# These are values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_DATA_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
L2_128B, L2_256B = 2, 3
TENSOR_MAP = np.dtype("V128")
_MAP_ALIGNMENT = 64


@cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver's own library."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def l2_promotion(address: int, strides: Sequence[int], once: bool) -> int:
    """Return how many bytes L2 fetches at a time for the rows of an array.

    Where rows begin within sectors each fetch of 256 bytes brings others' bytes, for up to 1.18 times the time, and
    where the array is read `once` nobody needs them. Elsewhere gradients are up to 1.6% faster by it.
    """
    has_sectors = not any(x % SECTOR_BYTES for x in (address, *strides))
    return L2_256B if has_sectors and not once else L2_128B


def encode_tensor_map(
    address: int,
    dtype: str,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    once: bool = False,
) -> np.ndarray[Any, Any]:
    """Make a map of an array, to be passed to a kernel by value; elements out of bounds are read as zeros.

    `extents` are the elements of the array along each axis and `box` those of one copy, innermost axis first; `strides`
    are bytes, for all axes but the innermost. Boxes of bytes are swizzled if they are as wide as a swizzle. The array
    may be read `once`, by few thread blocks.
    """
    rank = len(extents)
    buffer = np.zeros(TENSOR_MAP.itemsize + _MAP_ALIGNMENT, np.uint8)
    encoded = buffer[-buffer.ctypes.data % _MAP_ALIGNMENT :][: TENSOR_MAP.itemsize]
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLE_128B if dtype != "uint8" or box[0] == SWIZZLE_BYTES else _NO_SWIZZLE,
        l2_promotion(address, strides, once),
        0,  # zeros out of bounds
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} for {dtype}, {extents=}, {strides=}, {box=}, {address=:#x}"
        )
    return encoded.view(TENSOR_MAP)
