"""Arrays are prepared for attention in FP8 here: quantisation to e4m3 codes with scales, and the Hadamard transform.

QuaRot (Ashkboos et al., 2024) and FlashAttention-3 (Shah et al., 2024), section 3.3, call a random orthogonal
transform of queries and keys incoherent processing: it leaves their products alone and spreads outliers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from cuflash import e4m3, hints, interop
from cuflash.problem.attention_problem import DTYPES, accum_of
from cuflash.problem.checks import MAX_SEED
from cuflash.typing import ArrayT

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = Any

# The axes of (batch, seqlen, heads) over which a largest value is taken; packed arrays lack the first.
_SHARED_AXES = {"tensor": (0, 1, 2), "head": (1,), "token": ()}
# The constants of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
_STEP, _MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


# NumPy's types have dtypes, which those of the results are not.
@overload
def quantize_fp8(
    x: NDArray[np.floating[Any]], per: str = "tensor"
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]: ...
@overload
def quantize_fp8(x: ArrayT, per: str = "tensor") -> tuple[ArrayT, ArrayT]: ...
@hints.with_hints(hints.QUANTIZE)
def quantize_fp8(x: Any, per: str = "tensor") -> Any:
    """Quantise an array for attention in FP8: ``x`` is about ``codes * scale``.

    Parameters
    ----------
    x : array (batch, seqlen, num_heads, head_dim), packed (total, num_heads, head_dim)
        float16, bfloat16, float32 or float64; any strides.
    per : "tensor", "head" or "token"
        What shares a scale: everything, each head of each sequence (packed: each head), or nothing but the numbers of
        one head of one token.

    Returns
    -------
    codes : uint8 array like `x`
        e4m3 numbers (ml_dtypes' float8_e4m3fn): ``x / scale`` rounded to nearest even. Beyond 448, which inf is, it is
        448; NaN is NaN.
    scale : float32 array
        (1, 1, 1), (batch, 1, num_heads) or (batch, seqlen, num_heads); packed (1, 1), (1, num_heads) or (total,
        num_heads). The largest finite magnitude that shares it over 448; 1 where that is 0, or so small that float32
        holds no normal scale.

    Raises
    ------
    TypeError
        For a wrong kind of thing or dtype.
    ValueError
        For a wrong shape or `per`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(1, 6, 2, 8)
    >>> codes, scale = cuflash.quantize_fp8(x, per="head")
    >>> codes.dtype.name, scale.shape
    ('uint8', (1, 1, 2))
    >>> out = cuflash.attention(codes, codes, codes, q_scale=scale, k_scale=scale, v_scale=scale, out_dtype="float32")
    """
    library = interop.library_of("x", x)
    array = library.adopt("x", x)
    _check_dtype(array)
    if array.ndim not in (3, 4):
        raise ValueError(
            "x: expected (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim), "
            f"got shape {tuple(array.shape)}"
        )
    if not isinstance(per, str):
        raise TypeError(f'per: expected "tensor", "head" or "token", got {type(per).__name__}')
    if per not in _SHARED_AXES:
        raise ValueError(f'per: expected "tensor", "head" or "token", got {per!r}')
    full = array if array.ndim == 4 else array[None]
    with interop.on_stream_of(library, array):
        quantize = _quantized_by_numpy if isinstance(array, np.ndarray) else _kernels().quantize
        codes, scale = quantize(full, _SHARED_AXES[per])
        scale = scale.reshape(scale.shape[4 - array.ndim :])
        return library.release(codes.reshape(array.shape)), library.release(scale)


def hadamard(x: ArrayT, seed: int) -> ArrayT:
    """Multiply the last axis by random signs and an orthonormal Hadamard matrix.

    Queries and keys that are transformed with one seed have the products that they had, and no outliers in single
    columns: quantised, they lose less.

    Parameters
    ----------
    x : array (..., head_dim)
        float16, bfloat16, float32 or float64; any strides.
    seed : int
        In [0, 2**64). A column's sign is a function of it and the column alone.

    Returns
    -------
    array like `x`
        Every block of columns, as many as the largest power of two that divides head_dim, times Sylvester's matrix
        over the square root of its size; computed in float32 (float64 for float64), then rounded to x's dtype.

    Raises
    ------
    TypeError
        For a wrong kind of thing or dtype.
    ValueError
        For a seed out of its range, or an array without axes.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.random.default_rng(0).normal(size=(2, 1, 6, 2, 8))
    >>> np.allclose(np.sum(cuflash.hadamard(q, seed=7) * cuflash.hadamard(k, seed=7), -1), np.sum(q * k, -1))
    True
    """
    library = interop.library_of("x", x)
    array = library.adopt("x", x)
    _check_dtype(array)
    if not array.ndim:
        raise ValueError("x: expected (..., head_dim), got an array without axes")
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise TypeError(f"seed: expected an int in [0, 2**64), got {type(seed).__name__}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed: expected an int in [0, 2**64), got {seed}")
    with interop.on_stream_of(library, array):
        size = array.shape[-1] & -array.shape[-1]
        if isinstance(array, np.ndarray) or size > _kernels().MOST_COLUMNS:
            return library.release(_transformed(interop.namespace_of(array), array, int(seed), size))
        return library.release(_kernels().transform(array, int(seed), size))


@cache
def _kernels() -> ModuleType:
    return import_module("cuflash.gpu.quantize")


def _check_dtype(x: Array) -> None:
    if x.dtype.name not in DTYPES:
        raise TypeError(f"x: expected dtype {', '.join(DTYPES)}, got {x.dtype.name}")


@np.errstate(all="ignore")
def _quantized_by_numpy(x: Array, shared: tuple[int, ...]) -> tuple[Array, Array]:
    """Codes and the scales (batch, seqlen, heads), of which those over the `shared` axes are one."""
    wide = x.astype(accum_of(x.dtype.name), copy=False)
    size = np.abs(wide)
    largest = np.where(np.isfinite(size), size, 0).max(axis=(*shared, 3), keepdims=True, initial=0)
    limits = np.finfo(np.float32)
    scale = np.minimum(largest / wide.dtype.type(e4m3.LARGEST), limits.max).astype(np.float32)
    scale[scale < limits.smallest_normal] = 1
    return e4m3.encode(wide / scale), scale[..., 0]


@np.errstate(all="ignore")
def _transformed(xp: Any, x: Array, seed: int, size: int) -> Array:
    """The transform of blocks of `size` columns, by operations of NumPy or CuPy on whole arrays."""
    columns = x.shape[-1]
    wide = x.astype(accum_of(x.dtype.name)) * _signs(xp, columns, seed).astype(accum_of(x.dtype.name))
    if size > 1:
        step = 1
        while step < size:
            pairs = wide.reshape(*x.shape[:-1], columns // (2 * step), 2, step)
            upper, lower = pairs[..., 0, :], pairs[..., 1, :]
            wide = xp.stack((upper + lower, upper - lower), axis=-2).reshape(x.shape)
            step *= 2
        wide *= wide.dtype.type(size**-0.5)
    return wide.astype(x.dtype)


def _signs(xp: Any, columns: int, seed: int) -> Array:
    """1 or -1 for every column: the top bit of SplitMix64's numbers."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + xp.arange(1, columns + 1, dtype=np.uint64) * np.uint64(_STEP)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[0])
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[1])
        state ^= state >> np.uint64(31)
    return xp.where(state >> np.uint64(63), -1, 1)
