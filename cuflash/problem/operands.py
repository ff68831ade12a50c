"""The arrays of one call, checked and brought to full rank, and the metadata by which a repeated call is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cuflash.problem import checks
from cuflash.problem.attention_problem import Array, AttentionProblem, operand_name
from cuflash.problem.fp8 import SCALES, spread_scales
from cuflash.problem.mask_metadata import MaskMetadata
from cuflash.problem.options import Options


class Operands(NamedTuple):
    """The arrays of one call, all NumPy or all CuPy, checked and brought to full rank."""

    q: Array  # (batch, seqlen_q, num_heads_q, head_dim), packed: (total_q, num_heads_q, head_dim)
    k: Array  # (batch, seqlen_k, num_heads_kv, head_dim), packed: (total_k, ...)
    v: Array  # (batch, seqlen_k, num_heads_kv, head_dim_v), packed: (total_k, ...)
    bias: Array | None = None  # (batch | 1, num_heads_q | 1, seqlen_q | 1, seqlen_k | 1)
    mask: Array | None = None  # like bias, bool
    alibi_slopes: Array | None = None  # (batch | 1, num_heads_q)
    sink: Array | None = None  # (num_heads_q,)
    q_lengths: Array | None = None  # (batch,) int32
    kv_lengths: Array | None = None  # (batch,) int32
    cu_seqlens_q: Array | None = None  # (batch + 1,) int32
    cu_seqlens_k: Array | None = None  # (batch + 1,) int32
    block_table: Array | None = None  # (batch, max_pages) int32; k and v are pools (num_pages, page_size, ...)
    q_scale: Array | None = None  # like q without its last axis, float32; of e4m3 codes
    k_scale: Array | None = None  # like k without its last axis
    v_scale: Array | None = None  # like v without its last axis
    dropout_seed: int | Array | None = None
    block_mask: MaskMetadata | None = None
    of_rules: tuple[Array, ...] = ()  # the operands of the user's own rules, of any shapes and strides


def make_operands(problem: AttentionProblem, arrays: dict[str, Array], options: Options) -> Operands:
    """Bring checked arrays to the full rank of `Operands`, and check the seed, which is no part of the problem."""
    if len(arrays) == len(_ALWAYS) and options.dropout_seed is None and _are_as_given(problem, arrays):
        return Operands(**arrays)
    seed = arrays.get("dropout_seed", options.dropout_seed)
    checks.check_seed(seed, options.dropout_p)

    of_rules = {operand_name(n): arrays[operand_name(n)] for n in range(len(problem.operands))}
    given = {
        name: to_full_rank(name, x if name in _OF_ANY_STRIDES else with_contiguous_rows(x))
        for name, x in arrays.items()
        if name != "dropout_seed" and name not in of_rules
    }
    spread_scales(given)
    return Operands(
        **given,
        dropout_seed=seed if options.dropout_p > 0 else None,
        block_mask=options.block_mask if problem.block_mask else None,
        of_rules=tuple(of_rules.values()),
    )


_ALWAYS = ("q", "k", "v")


def _are_as_given(p: AttentionProblem, arrays: dict[str, Array]) -> bool:
    """Return True if the arrays that every call has are all that there is to know, and are used as they are."""
    if p.dropout_p or p.block_mask or p.has_fp8_keys:
        return False
    return all(with_contiguous_rows(arrays[name]) is arrays[name] for name in _ALWAYS)


# `Operands` have these ranks; the caller's array may lack leading axes.
_FULL_RANK = {"bias": 4, "mask": 4, "alibi_slopes": 2}
_OF_ANY_STRIDES = ("bias", "mask", *SCALES)


def to_full_rank(name: str, x: Array | None) -> Array | None:
    """Return a view of option or gradient `name` with all axes of `Operands`."""
    missing = 0 if x is None else _FULL_RANK.get(name, 0) - len(x.shape)
    return x[(None,) * missing + (...,)] if x is not None and missing > 0 else x


def with_contiguous_rows(x: Array) -> Array:
    """`x` itself if its last axis is contiguous, else a copy: the only one of an input."""
    if x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize:
        return x
    return x.copy(order="C")


Addresses = list[int]


class Metadata(NamedTuple):
    """A call's arguments: a key of all that is checked, and the rest, in which repetitions may differ."""

    key: tuple[Any, ...]
    addresses: Addresses
    targets: Sequence[Array | None]
    seed: int | None
    block_mask: MaskMetadata | None
