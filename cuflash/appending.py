"""`append_kv` writes new keys and values into a cache of any layout, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from cuflash import hints
from cuflash.frontend.append import append
from cuflash.hints import MISSING
from cuflash.problem.checks import check_bool
from cuflash.typing import AnyArray, ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def append_kv(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    kv_lengths: AnyArray,
    *,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
) -> None: ...
@overload
def append_kv(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    kv_lengths: AnyArray,
    *,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: ArrayT,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
) -> ArrayT: ...
@hints.show_signature
def append_kv(
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    k_cache: AnyArray = MISSING,
    v_cache: AnyArray = MISSING,
    kv_lengths: AnyArray = MISSING,
    *rest: Any,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: AnyArray | None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    **others: Unpack[hints.NoOthers],
) -> Any:
    """Write new keys and values behind those that a cache has, in place, and rotate k and q by their positions.

    Row t of sequence b goes to position ``kv_lengths[b] + t``. Rows beyond the capacity are dropped, and so are rows
    whose page lies outside of the pool; nothing else is written. `kv_lengths` stays as it is: attention over the cache
    takes these lengths plus the new rows. On a GPU it is one launch, which never synchronises and may be captured.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    k : array (batch, seqlen, num_heads_kv, head_dim), with `cu_seqlens` packed (total, num_heads_kv, head_dim)
        New keys: float16, bfloat16, float32 or float64; any strides, as all arrays here.
    v : array (batch, seqlen, num_heads_kv, head_dim_v), packed (total, num_heads_kv, head_dim_v)
        New values, of k's dtype.
    k_cache, v_cache : array (batch, capacity, num_heads_kv, head_dim and head_dim_v)
        With `block_table` pools (num_pages, page_size, num_heads_kv, ...). Of k's dtype, or FP8 (uint8 codes of e4m3,
        or float8_e4m3fn): these receive numbers rounded to nearest even and saturated.
    kv_lengths : int32 array (batch,)
        Positions of each sequence that the cache already holds.
    block_table : int32 array (batch, max_pages), optional
        Entry p is the page of positions ``p * page_size`` to ``(p + 1) * page_size - 1``.
    cu_seqlens : int32 array (batch + 1,), optional
        Where the sequences begin in packed rows; rows outside of all sequences are not written.
    rotary : (cos, sin), optional
        Arrays (positions, rotary_dim / 2) of float32 or k's dtype. k and q are rotated in their first rotary_dim
        columns (Su et al., RoFormer, 2021), computed in float32 (float64 for float64); positions are clamped to the
        table.
    interleaved : bool
        Pairs are neighbouring columns; by default a column of the first half and one of the second half.
    q : array (batch, seqlen, num_heads_q, head_dim), packed (total, num_heads_q, head_dim), optional
        Queries of the same positions, of k's dtype.
    k_scale, v_scale : float32 array, optional
        Divide what an FP8 cache receives; broadcast to the new rows' (batch, seqlen, num_heads_kv), packed (total,
        num_heads_kv). Default 1.

    Returns
    -------
    array or None
        The rotated q as a new array (without `rotary` a copy; rows outside of all sequences as they were), None without
        `q`.

    Raises
    ------
    TypeError
        For a wrong kind of thing or dtype, and for caches of a library whose arrays are immutable, as JAX's are.
    ValueError
        For a wrong shape, device or value, a cache that overlaps another argument, and a scale without an FP8 cache.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> k_cache, v_cache = np.zeros((2, 1, 16, 2, 8), np.float32)
    >>> new, lengths = np.ones((1, 1, 2, 8), np.float32), np.array([5], np.int32)
    >>> cuflash.append_kv(new, new, k_cache, v_cache, lengths)
    >>> out = cuflash.attention(new, k_cache, v_cache, kv_lengths=lengths + 1)
    >>> float(k_cache[0, 5, 0, 0])
    1.0
    """
    if (
        others
        or rest
        or k is MISSING
        or v is MISSING
        or k_cache is MISSING
        or v_cache is MISSING
        or kv_lengths is MISSING
    ):
        raise hints.wrong_append(append_kv, (k, v, k_cache, v_cache, kv_lengths, *rest), others)
    interleaved = check_bool("interleaved", interleaved)
    given = {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "kv_lengths": kv_lengths,
        "block_table": block_table,
        "cu_seqlens": cu_seqlens,
        **_rotary(rotary),
        "q": q,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    optional = ("block_table", "cu_seqlens", "q", "k_scale", "v_scale")
    given = {name: x for name, x in given.items() if x is not None or name not in optional}
    return append(given, interleaved)


def _rotary(rotary: object) -> dict[str, Any]:
    if rotary is None:
        return {}
    if not isinstance(rotary, (tuple, list)):
        raise TypeError(f"rotary: expected (cos, sin), got {type(rotary).__name__}")
    if len(rotary) != 2:
        raise ValueError(f"rotary: expected two arrays (cos, sin), got {len(rotary)}")
    return dict(zip(("cos", "sin"), rotary, strict=True))
