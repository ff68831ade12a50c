"""The CPU test device encodes tensor maps with the rules of ``cuTensorMapEncodeTiled``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
ELEMENT_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
MAX_RANK = 5
_MARK = 0x70616D5F75706321
_LAYOUT = np.dtype(
    [
        ("mark", "u8"), ("address", "u8"), ("strides", "u8", MAX_RANK), ("extents", "u4", MAX_RANK),
        ("box", "u2", MAX_RANK), ("rank", "u1"), ("element_bytes", "u1"), ("swizzle", "u1"), ("is_float", "u1"),
    ]
)  # fmt: skip


def encode(
    address: int,
    dtype: str,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int | None = None,
) -> np.ndarray[Any, Any]:
    """Describe a tensor for TMA, as ``cuflash.cuda.driver.encode_tensor_map`` does for a GPU.

    Parameters
    ----------
    address : int
        Of the first element.
    dtype : str
        A name in ``ELEMENT_BYTES``.
    extents, box : sequence of int
        Elements of the tensor and of one copy, innermost dimension first.
    strides : sequence of int
        Bytes from one element to the next along each dimension but the innermost, which is contiguous.
    swizzle : {0, 32, 64, 128}, optional
        Bytes of a row of the pattern in shared memory; by default 128, but of bytes 0 where a box has other rows.

    Returns
    -------
    array of one ``V128``
        To be passed by value.

    Raises
    ------
    ValueError
        Where the driver would refuse too.
    """
    size, rank = ELEMENT_BYTES[dtype], len(extents)
    if swizzle is None:
        swizzle = 128 if size > 1 or box[0] == 128 else 0
    checks = {
        "1 to 5 dimensions": 1 <= rank <= MAX_RANK,
        "one stride less than dimensions": len(strides) == rank - 1,
        "as many box extents as dimensions": len(box) == rank,
        "an address that is a multiple of 16": address % 16 == 0,
        "extents of 1 to 2^32": all(1 <= n <= 2**32 for n in extents),
        "strides that are multiples of 16 below 2^40": all(s % 16 == 0 and 0 <= s < 2**40 for s in strides),
        "box extents of 1 to 256": all(1 <= n <= 256 for n in box),
        "an innermost box extent of a multiple of 16 bytes": box[0] * size % 16 == 0,
        "an innermost box extent of the swizzle's bytes": swizzle == 0 or box[0] * size == swizzle,
    }
    for rule, kept in checks.items():
        if not kept:
            raise ValueError(f"tensor map: expected {rule}, got {extents=} {strides=} {box=} {address=:#x} {swizzle=}")
    encoded = np.zeros(1, _LAYOUT)
    encoded["mark"], encoded["address"], encoded["rank"], encoded["element_bytes"] = _MARK, address, rank, size
    encoded["strides"][0, :rank] = (size, *strides)
    encoded["extents"][0, :rank] = extents
    encoded["box"][0, :rank] = box
    encoded["swizzle"] = SWIZZLES[swizzle]
    encoded["is_float"] = dtype == "float32"
    padded = np.zeros(128, np.uint8)
    padded[: _LAYOUT.itemsize] = encoded.view(np.uint8)
    return padded.view("V128")
