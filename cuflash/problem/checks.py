"""Checks from metadata alone: TypeError for a wrong kind or dtype, ValueError for a shape or value."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from cuflash.problem.mask_metadata import MaskMetadata

Array = Any
MAX_SEED = 2**64 - 1


def _kind(x: object) -> str:
    return type(x).__name__


def _is_int(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def check_bool(name: str, x: object) -> bool:
    """Return the value of a bool of Python or NumPy; TypeError for other things, of which even "no" is true."""
    if x is True or x is False:
        return x
    if not isinstance(x, np.bool_):
        raise TypeError(f"{name}: expected a bool, got {_kind(x)}")
    return bool(x)


def check_int(name: str, x: object) -> int:
    """Return the value of an integer of Python or NumPy."""
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
        raise TypeError(f"{name}: expected an integer, got {_kind(x)}")
    return int(x)


def check_number(name: str, x: object) -> float:
    """Return a finite real number as a float."""
    if not isinstance(x, numbers.Real) or isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a real number, got {_kind(x)}")
    try:
        value = float(x)
    except OverflowError:  # an integer was too large for a float
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def check_scale(scale: object, head_dim: int, accum: str) -> float:
    """Return a scale that is finite in dtype `accum`; the default is ``1 / sqrt(head_dim)``."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = check_number("softmax_scale", scale)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.dtype(accum).type(value))
    if not is_finite:
        raise ValueError(
            f"softmax_scale: expected a number that is finite in {accum}, in which scores are computed, got {value}"
        )
    return value


def check_softcap(softcap: object, accum: str) -> float:
    """Return the bound of the scores; 0.0 is off."""
    value = 0.0 if softcap is None else check_number("softcap", softcap)
    if value < 0:
        raise ValueError(f"softcap: expected None or 0 (off) or a positive number, got {value}")
    # Beyond these limits `accum` cannot hold s / c. A larger bound leaves scores alone, a smaller one makes them 0.
    largest = 2.0 ** (1000 if accum == "float64" else 100)
    return 0.0 if value > largest or not value else max(value, 1 / largest)


def check_window(causal: object, window: object) -> tuple[int | None, int | None]:
    """Return (left, right) with `causal` folded in; None is unbounded."""
    causal = check_bool("causal", causal)
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: expected (left, right) with integers or None, got {_kind(window)}")
    if len(window) != 2:
        raise ValueError(f"window: expected two entries (left, right), got {len(window)}")
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window, strict=True):
        if side is not None and not _is_int(side):
            raise TypeError(f"window: expected {name} to be an integer or None (unbounded), got {_kind(side)}")
        if side is not None and side < 0:
            raise ValueError(f"window: expected {name} >= 0, or None for unbounded, got {side}")
        sides.append(None if side is None else int(side))
    left, right = sides
    return left, 0 if causal else right


def check_cu_seqlens(cu_q: Array, cu_k: Array | None) -> int:
    """Check that both are int32 of shape (batch + 1,), and return the batch; paged keys have no `cu_k`."""
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x is None:
            continue
        if x.dtype.name != "int32":
            raise TypeError(f"{name}: expected dtype int32, got {x.dtype.name}")
        if len(x.shape) != 1 or x.shape[0] < 1:
            raise ValueError(f"{name}: expected shape (batch + 1,), got {tuple(x.shape)}")
    if cu_k is not None and cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected as many entries as cu_seqlens_q = {cu_q.shape[0]}, got {cu_k.shape[0]}"
        )
    return int(cu_q.shape[0]) - 1


def check_extra(name: str, x: Array | None, dtype: str, shapes: list[tuple[int, ...]], form: str) -> None:
    """Check that a sink, slopes or lengths have one of `shapes`, which `form` tells in words."""
    if x is None:
        return
    if x.dtype.name != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype.name}")
    if tuple(x.shape) not in shapes:
        wanted = " or ".join(str(s) for s in dict.fromkeys((shapes[0], shapes[-1])))
        raise ValueError(f"{name}: expected {form} = {wanted}, got {tuple(x.shape)}")


def check_scores_like(
    name: str, x: Array | None, score_shape: tuple[int | None, ...], dtypes: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Check that a bias or mask broadcasts to the scores, and return its shape with four axes."""
    if x is None:
        return None
    if x.dtype.name not in dtypes:
        hint = "; to add numbers to the scores pass them as bias" if name == "mask" else ""
        hint = "; for True = may attend pass it as mask" if name == "bias" and x.dtype.name == "bool" else hint
        wanted = " or ".join(dict.fromkeys(dtypes))
        raise TypeError(f"{name}: expected dtype {wanted}, got {x.dtype.name}{hint}")
    shape = (1,) * (4 - len(x.shape)) + tuple(x.shape)
    fits = len(shape) == 4 and all(
        got == 1 or want is None or got == want for got, want in zip(shape, score_shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if want is None else str(want) for want in score_shape)
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k) = ({wanted}), "
            f"got {tuple(x.shape)}"
        )
    return shape


def _kind_of_mask(x: object) -> str:
    """FlexAttention's class has the same name."""
    return f"{type(x).__module__}.BlockMask" if _kind(x) == "BlockMask" else _kind(x)


def check_block_mask(block_mask: object, score_shape: tuple[int | None, ...]) -> None:
    """Check that the batch and heads of a BlockMask are the call's or 1."""
    if block_mask is None:
        return

    if not isinstance(block_mask, MaskMetadata):
        raise TypeError(
            f"block_mask: expected a cuflash.BlockMask (BlockMask.from_dense takes a bool array, "
            f"BlockMask.from_function a function of b, h, i and j), got {_kind_of_mask(block_mask)}"
        )
    got = block_mask.shape
    if not all(
        want is None or have == want or (axis < 2 and have == 1)
        for axis, (have, want) in enumerate(zip(got, score_shape, strict=True))
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in score_shape)
        swapped = (*got[2:], *got[:2])
        is_swapped = all(want is None or have in (want, 1) for have, want in zip(swapped, score_shape, strict=True))
        hint = ": from_function takes seqlen_q and seqlen_k before batch and heads" if is_swapped else ""
        raise ValueError(
            "block_mask: expected shape (batch or 1, num_heads_q or 1, seqlen_q, seqlen_k), where "
            f"(batch, num_heads_q, seqlen_q, seqlen_k) is ({wanted}), got {got}{hint}"
        )


def check_dropout_p(p: object) -> float:
    """Return a probability, which lies in [0, 1)."""
    value = check_number("dropout_p", p)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"dropout_p: expected 0 <= dropout_p < 1, got {value}")
    return value


def check_deterministic(deterministic: object) -> None:
    """Check that it is a bool or None."""
    if deterministic is not None and not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(f"deterministic: expected a bool or None, got {_kind(deterministic)}")


def check_precision(precision: object) -> None:
    """Check that it is None or "tf32"."""
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f'precision: expected None or "tf32", got {_kind(precision)}')
    if precision not in (None, "tf32"):
        raise ValueError(f'precision: expected None or "tf32", got {precision!r}')


def check_seed(seed: Any, dropout_p: float) -> None:
    """Check a seed, which dropout requires where its `dropout_p` is above 0."""
    form = "an int in [0, 2**64) or a uint64 array of one element"
    if seed is None:
        if dropout_p > 0:
            raise ValueError(f"dropout_seed: expected {form}, as dropout_p = {dropout_p} > 0, got None")
    elif _is_int(seed):
        if not 0 <= int(seed) <= MAX_SEED:
            raise ValueError(f"dropout_seed: expected an int in [0, 2**64), got {seed}")
    elif not hasattr(seed, "dtype") or not hasattr(seed, "shape"):
        raise TypeError(f"dropout_seed: expected {form}, got {_kind(seed)}")
    elif seed.dtype.name != "uint64":
        raise TypeError(f"dropout_seed: expected {form}, got dtype {seed.dtype.name}")
    elif math.prod(seed.shape) != 1:
        raise ValueError(f"dropout_seed: expected {form}, got shape {tuple(seed.shape)}")
