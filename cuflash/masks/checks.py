"""Checks of what `BlockMask` is made from: TypeError for a wrong kind, ValueError for a wrong value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuflash import interop

if TYPE_CHECKING:
    # numpy.random is slow to import.
    Seed = int | Sequence[int] | np.random.SeedSequence | np.random.BitGenerator | np.random.Generator

Array = Any
# Sizes are int32 on a GPU.
MAX_SIZE = 2**31 - 1
# A distance beyond that between any two positions; int64 holds its sum with a position.
MAX_REACH = 1 << 40


def check_count(name: str, value: Any, least: int = 0, most: int | None = MAX_SIZE) -> int:
    """An integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name}: expected an integer <= {most}, got {value}")
    return int(value)


def check_reach(name: str, value: Any, least: int = 0) -> int:
    """A distance or a number of blocks: an integer of any size, lowered to `MAX_REACH`, which reaches everything."""
    return min(check_count(name, value, least, None), MAX_REACH)


def check_side(name: str, side: Any) -> int | None:
    """One side of a window: a reach, or None."""
    if side is None:
        return None
    if isinstance(side, (int, np.integer)) and side < 0:
        raise ValueError(f"{name}: expected an integer >= 0, or None for unbounded, got {side}")
    return check_reach(name, side)


def check_block_size(block_size: Any) -> tuple[int, int]:
    """A pair of positive integers, (rows, columns)."""
    if not isinstance(block_size, (tuple, list)):
        raise TypeError(f"block_size: expected a pair (rows, columns) of integers, got {type(block_size).__name__}")
    if len(block_size) != 2:
        raise ValueError(f"block_size: expected a pair (rows, columns) of integers, got {len(block_size)} entries")
    return check_count("block_size[0]", block_size[0], 1), check_count("block_size[1]", block_size[1], 1)


def check_global_tokens(global_tokens: Any, seqlen: int) -> NDArray[np.bool_]:
    """Which tokens are global: the first so many, or those at given positions."""
    is_global = np.zeros(seqlen, bool)
    if isinstance(global_tokens, (int, np.integer)):
        is_global[: check_reach("global_tokens", global_tokens)] = True
        return is_global
    interop.refuse_masked("global_tokens", global_tokens)
    form = "an integer or a sequence of positions"
    try:
        positions = np.asarray(global_tokens)
    except (TypeError, ValueError) as error:
        raise TypeError(f"global_tokens: expected {form}, got {type(global_tokens).__name__}") from error
    if positions.size == 0:
        return is_global
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise TypeError(f"global_tokens: expected {form}, got {positions.ndim}-D {positions.dtype.name}")
    if positions.min() < 0 or positions.max() >= seqlen:
        raise ValueError(f"global_tokens: expected positions from 0 to {seqlen - 1}, got {global_tokens!r}")
    is_global[positions] = True
    return is_global


def generator_of(seed: Any) -> np.random.Generator:
    """NumPy's generator of random numbers for a seed."""
    form = "an integer >= 0, a sequence of them, or None, SeedSequence, BitGenerator or Generator of NumPy"
    interop.refuse_masked("seed", seed)
    if isinstance(seed, (bool, np.bool_)):
        raise TypeError(f"seed: expected {form}, got {type(seed).__name__}")
    try:
        return np.random.default_rng(seed)
    except TypeError as error:
        raise TypeError(f"seed: expected {form}, got {seed!r}") from error
    except ValueError as error:
        raise ValueError(f"seed: expected {form}, got {seed!r}") from error


def check_rule(function: Any) -> None:
    """A callable that takes (b, h, i, j)."""
    if not callable(function):
        raise TypeError(f"function: expected a callable (b, h, i, j), got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind("b", "h", "i", "j")
    except TypeError:
        raise TypeError(f"function: expected a callable (b, h, i, j), got one with the arguments {signature}") from None


def check_order(seqlen_q: Any, seqlen_k: Any) -> None:
    """Raise TypeError for None as a length, which stands where FlexAttention has the batch and the heads."""
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if value is None:
            raise TypeError(
                f"{name}: expected an integer, got None: lengths come first, as in "
                "from_function(function, seqlen_q, seqlen_k, batch=None, heads=None)"
            )


def adopt_bools(name: str, x: Any) -> tuple[interop.Library, Array]:
    """A bool array of any library, with two to four axes, as a NumPy or CuPy array."""
    library = interop.library_of(name, x)
    array = library.adopt(name, x)
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: expected dtype bool (True = may attend), got {array.dtype.name}")
    if not 2 <= array.ndim <= 4:
        raise ValueError(
            f"{name}: expected 2, 3 or 4 axes (rows, columns), (heads, ...) or (batch, heads, ...), "
            f"got shape {tuple(array.shape)}"
        )
    return library, array


def bools_of_rule(function: Callable[..., Any], indices: tuple[Any, ...], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """The result of a user's function as host bools of `shape`."""
    try:
        result = function(*indices)
    except ValueError as error:
        if "truth value of an array" not in str(error):
            raise
        raise TypeError(
            "function: expected conditions on arrays to be combined by &, | and ~, each in brackets, and choices to "
            "be made by np.where: i and j are arrays, of which `and`, `or`, `not`, `if` and chained comparisons would "
            "need one truth value"
        ) from error
    if isinstance(result, (bool, np.bool_)):
        return np.full(shape, result)
    library = interop.library_of("function's result", result)
    array = library.adopt("function's result", result)
    if not isinstance(array, np.ndarray):
        array = array.get()
    if array.dtype != np.bool_:
        raise TypeError(f"function: expected it to return bools (True = may attend), got dtype {array.dtype.name}")
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"function: expected a result that broadcasts to the shape of (i, j) = {shape}, got {array.shape}"
        ) from None
