"""Attentions over disjoint sets of keys are one attention: their results merge exactly, and the merge has a gradient.

With the weight ``w_i = exp(lse_i - lse)`` of each part, ``out = sum_i w_i out_i`` and ``lse = log sum_i exp(lse_i)``
(Dao et al., "FlashAttention", 2022, section 3.1).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash import hints, interop
from cuflash.problem.attention_problem import DTYPES
from cuflash.problem.merging import by_row, weighted, weights_of
from cuflash.typing import ArrayT

Array = Any

_LSE_DTYPES = ("float32", "float64")


@hints.with_hints(hints.PARTS)
def merge(outs: Sequence[ArrayT], lses: Sequence[ArrayT], out_dtype: Any = None) -> tuple[ArrayT, ArrayT]:
    """Merge the results of attention over disjoint keys into that over all of them.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    outs : sequence of arrays (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q, head_dim_v)
        The parts' results, of any supported dtypes.
    lses : sequence of float32 or float64 arrays (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q)
        Their log-sum-exps, all of one dtype. A part with -inf has no weight, even where its out is NaN.
    out_dtype : dtype or its name, optional
        Of the result: float32 keeps what is to be merged again from being rounded between. The outs' own by default
        (of several, one that holds them all).

    Returns
    -------
    out, lse
        0 and -inf where every part has -inf. A sink belongs into one part only.

    Raises
    ------
    TypeError
        For things that are no arrays, or a wrong dtype.
    ValueError
        For shapes or devices that do not fit, or no parts.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 8))
    >>> parts = [cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    >>> out, lse = cuflash.merge(*zip(*parts))
    >>> np.allclose(out, cuflash.attention(q, k, v))
    True
    """
    library, parts, part_lses = _adopt_parts(outs, lses)
    dtype = _common_dtype(parts) if out_dtype is None else _dtype_of(out_dtype)
    xp = interop.namespace_of(parts[0])
    with interop.on_stream_of(library, parts[0]), np.errstate(all="ignore"):
        weights, lse = weights_of(part_lses)
        merged = xp.zeros(parts[0].shape, _work_dtype(*parts, part_lses[0]))
        for part, part_lse, weight in zip(parts, part_lses, weights, strict=True):
            merged += weighted(part.astype(merged.dtype), part_lse, weight)
        return library.release(merged.astype(dtype)), library.release(lse)


@hints.with_hints(hints.PARTS)
def merge_backward(
    dout: ArrayT, dlse: ArrayT | None, outs: Sequence[ArrayT], lses: Sequence[ArrayT], out: ArrayT, lse: ArrayT
) -> tuple[list[ArrayT], list[ArrayT]]:
    """The gradient of `merge`.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    dout : array like `out`, of its dtype
    dlse : array like `lse`, or None
    outs, lses
        What was merged.
    out, lse
        What `merge` returned.

    Returns
    -------
    douts, dlses
        ``dout_i = w_i dout`` and ``dlse_i = w_i (rowsum(dout (out_i - out)) + dlse)``, each in its part's dtype; 0
        where the part's lse is -inf.

    Raises
    ------
    TypeError, ValueError
        As for `merge`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((1, 6, 2, 8))
    >>> part, part_lse = cuflash.attention(q, q, q, return_lse=True)
    >>> outs, lses = [part, part], [part_lse, part_lse]
    >>> out, lse = cuflash.merge(outs, lses)
    >>> douts, dlses = cuflash.merge_backward(np.ones_like(out), None, outs, lses, out, lse)
    >>> round(float(douts[0][0, 0, 0, 0]), 6)  # each part has half of the weight
    0.5
    """
    library, parts, part_lses = _adopt_parts(outs, lses)
    given = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    adopted = interop.adopt_all(library, given, reference=parts[0])
    _check("out", adopted["out"], parts[0].shape, DTYPES, "outs[0]")
    _check("dout", adopted["dout"], parts[0].shape, (adopted["out"].dtype.name,), "out")
    for name in given.keys() & {"lse", "dlse"}:
        _check(name, adopted[name], part_lses[0].shape, (part_lses[0].dtype.name,), "lses[0]")

    xp = interop.namespace_of(parts[0])
    with interop.on_stream_of(library, parts[0]), np.errstate(all="ignore"):
        work = _work_dtype(*parts, adopted["out"], part_lses[0])
        wide_dout, wide_out = adopted["dout"].astype(work), adopted["out"].astype(work)
        douts, dlses = [], []
        for part, part_lse in zip(parts, part_lses, strict=True):
            empty = (part_lse == -np.inf) | (adopted["lse"] == -np.inf)
            weight = xp.where(empty, 0, xp.exp(part_lse - adopted["lse"]))
            part_dout = xp.where(by_row(empty), 0, by_row(weight) * wide_dout)
            inner = (wide_dout * (part.astype(work) - wide_out)).sum(axis=-1).swapaxes(-1, -2)
            if dlse is not None:
                inner = inner + adopted["dlse"]
            douts.append(library.release(part_dout.astype(part.dtype)))
            dlses.append(library.release(xp.where(empty, 0, weight * inner).astype(part_lse.dtype)))
        return douts, dlses


def _adopt_parts(outs: Any, lses: Any) -> tuple[interop.Library, list[Array], list[Array]]:
    for name, x in (("outs", outs), ("lses", lses)):
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"{name}: expected a list or tuple of arrays, got {type(x).__name__}")
    if not outs:
        raise ValueError("outs: expected at least one part, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses: expected one for each of the {len(outs)} outs, got {len(lses)}")
    library = interop.library_of("outs[0]", outs[0])
    names = [f"{name}[{index}]" for name in ("outs", "lses") for index in range(len(outs))]
    adopted = interop.adopt_all(library, dict(zip(names, (*outs, *lses), strict=True)))
    parts = [adopted[name] for name in names[: len(outs)]]
    part_lses = [adopted[name] for name in names[len(outs) :]]
    shape = tuple(parts[0].shape)
    if len(shape) not in (3, 4):
        raise ValueError(
            "outs[0]: expected (batch, seqlen_q, num_heads_q, head_dim_v) or (total_q, num_heads_q, head_dim_v), "
            f"got {shape}"
        )
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    for index, (out, lse) in enumerate(zip(parts, part_lses, strict=True)):
        _check(f"outs[{index}]", out, shape, DTYPES, "outs[0]")
        lse_dtypes = _LSE_DTYPES if index == 0 else (part_lses[0].dtype.name,)
        _check(f"lses[{index}]", lse, lse_shape, lse_dtypes, f"outs[0] of shape {shape}" if index == 0 else "lses[0]")
    return library, parts, part_lses


def _check(name: str, x: Array, shape: tuple[int, ...], dtypes: tuple[str, ...], like: str) -> None:
    if x.dtype.name not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {x.dtype.name}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)} to go with {like}, got {tuple(x.shape)}")


def _dtype_of(dtype: Any) -> np.dtype:
    name = interop.dtype_name(dtype)
    if name not in DTYPES:
        raise TypeError(f"out_dtype: expected None, {', '.join(DTYPES)}, got {dtype!r}")
    return interop.dtype_of(name)


def _common_dtype(arrays: list[Array]) -> Any:
    dtypes = {x.dtype.name: x.dtype for x in arrays}
    if len(dtypes) == 1:
        return arrays[0].dtype
    return np.dtype("float64" if "float64" in dtypes else "float32")  # float16 and bfloat16 hold neither the other


def _work_dtype(*arrays: Array) -> str:
    return "float64" if any(x.dtype.name == "float64" for x in arrays) else "float32"
