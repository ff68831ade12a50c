"""Random inputs of a cell, on the GPU or the CPU, seen by every library through the same memory."""

from __future__ import annotations

import copy
import math
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


# Positions in the pool are multiples of this, so that every array is aligned as TMA wants it.
ALIGNED_ELEMENTS = 128


@lru_cache(maxsize=2)
def _normal_numbers(xp: ModuleType, dtype: str, count: int) -> Array:
    numbers = np.random.default_rng(0).standard_normal(count, np.float32)
    return xp.asarray(numbers.astype(numpy_dtype(dtype)))


class Inputs:
    """q, k, v and dout of a cell: N(0, 1) numbers, as arrays of `xp` and as torch tensors over the same memory."""

    def __init__(self, cell: Cell, xp: ModuleType) -> None:
        self.cell = cell
        self.xp = xp
        shapes = cell.shapes()
        # One pool for all cells of a run: drawing the numbers would take longer than measuring the cell.
        largest = max(math.prod(shape) for shape in shapes.values())
        largest = -(-largest // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        self._pool = _normal_numbers(xp, cell.dtype, 1 << (len(shapes) * largest - 1).bit_length())
        self.arrays: dict[str, Array] = {
            name: self._pool[position * largest :][: math.prod(shape)].reshape(shape)
            for position, (name, shape) in enumerate(shapes.items())
        }

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def of(self, cell: Cell) -> Inputs:
        """The same arrays for a cell of the same shapes."""
        other = copy.copy(self)
        other.cell = cell
        return other

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Further N(0, 1) numbers; those of large arrays repeat."""
        count = math.prod(shape)
        bits = self._pool.view(f"u{self._pool.itemsize}")  # CuPy copies no bfloat16 by all of its functions
        if count > bits.size:
            bits = self.xp.tile(bits, -(-count // bits.size))
        return bits[-count:].view(self._pool.dtype).reshape(shape)

    def coins(self, shape: tuple[int, ...]) -> Array:
        """A bool array, half of it True."""
        return self.normal(shape).view(f"i{self._pool.itemsize}") >= 0  # the sign's bit

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
