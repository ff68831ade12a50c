"""Helpers of tests of other libraries' arrays: a case with every array option, and a library that nobody knows."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import Case, gaussian, gaussian_case
from numpy.typing import NDArray

Array = NDArray[Any]


def all_options_case(dtype: str) -> Case:
    """Make a case with every kind of array among its options."""
    rng = np.random.default_rng(0)
    accum = np.float64 if dtype == "float64" else np.float32
    return gaussian_case(
        1,
        dtype,
        (9, 11),
        dims=(16, 8),
        bias=gaussian(rng, (4, 9, 11), dtype),
        mask=rng.random((2, 1, 9, 11)) < 0.8,
        alibi_slopes=np.full(4, 0.1, accum),
        sink=np.zeros(4, accum),
        q_lengths=np.array([9, 5], np.int32),
        kv_lengths=np.array([11, 7], np.int32),
        dropout_p=0.2,
        dropout_seed=np.array([7], np.uint64),
        block_mask=rng.random((9, 11)) < 0.9,
        deterministic=True,
    )


def convert(value: Any, to: Any) -> Any:
    """Convert every NumPy array in tuples and dicts."""
    if isinstance(value, np.ndarray):
        return to(value)
    if isinstance(value, dict):
        return {name: convert(item, to) for name, item in value.items()}
    return tuple(convert(item, to) for item in value) if isinstance(value, tuple) else value


class Exporter:
    """An array of a library that nobody knows: it speaks DLPack and nothing else."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()
