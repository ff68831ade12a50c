"""Random inputs of a cell, on the GPU or the CPU, seen by every library through the same memory."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from cuflash.bench.cells import Cell
from cuflash.interop import bfloat16

Array = Any


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, bfloat16 included."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


@lru_cache(maxsize=1)
def _normal_numbers(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(count, dtype=np.float32)


class Inputs:
    """q, k, v and dout of a cell: N(0, 1) numbers, as arrays of `xp` and as torch tensors over the same memory."""

    def __init__(self, cell: Cell, xp: ModuleType) -> None:
        self.cell = cell
        self.xp = xp
        dtype = numpy_dtype(cell.dtype)
        shapes = cell.shapes()
        # One pool for all cells of a run: drawing the numbers would take longer than measuring the cell.
        largest = max(int(np.prod(shape)) for shape in shapes.values())
        pool = _normal_numbers(1 << (4 * largest - 1).bit_length())
        self.arrays: dict[str, Array] = {}
        for position, (name, shape) in enumerate(shapes.items()):
            flat = pool[position * largest :][: int(np.prod(shape))]
            self.arrays[name] = xp.asarray(flat.astype(dtype).reshape(shape))

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def torch(self, name: str) -> Any:
        """The array as a torch tensor."""
        return as_torch(self.arrays[name])


def as_torch(x: Array) -> Any:
    """A torch tensor over the memory of a NumPy or CuPy array."""
    import torch

    if x.dtype.name == "bfloat16":
        return as_torch(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)


def as_float64(x: Any) -> np.ndarray:
    """An array of any of the libraries on the host in float64."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).astype(np.float64)
