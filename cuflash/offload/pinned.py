"""Pinned host memory, which a GPU reads at the full speed of its link and without the host's help."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from cuflash import interop

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Array = Any
ScalarT = TypeVar("ScalarT", bound=np.generic)


@overload
def pinned_empty(shape: int | tuple[int, ...], dtype: type[ScalarT] | np.dtype[ScalarT]) -> NDArray[ScalarT]: ...
@overload
def pinned_empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]: ...
def pinned_empty(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """Make a NumPy array in pinned memory, with anything in it.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype or its name
        "bfloat16", too, with the package ml_dtypes.

    Returns
    -------
    NumPy array
        C-contiguous. Without CuPy or a GPU its memory is ordinary, as nothing is copied to a GPU there.

    Raises
    ------
    TypeError, ValueError
        For what is no shape or no dtype.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> k = cuflash.offload.pinned_empty((1, 512, 8, 64), np.float16)
    >>> k.shape, k.dtype.name
    ((1, 512, 8, 64), 'float16')
    """
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    for size in sizes:
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
            raise TypeError(f"shape: expected integers, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"shape: expected no negative size, got {sizes}")
    kind = interop.dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    num_bytes = math.prod(sizes) * kind.itemsize
    cupy = _cupy_with_gpu()
    if cupy is None or not num_bytes:
        return np.empty(sizes, kind)
    # A pool would round so large a size up to the next power of two.
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
    return np.frombuffer(memory, np.uint8, num_bytes).view(kind).reshape(sizes)


def _cupy_with_gpu() -> Any:
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.cuda.is_available() else None
