"""The visible pairs of query and key, spelled out element by element from the semantics, for tests of hidden data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Case
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Sequence:
    """One sequence of a case, with its place in the arrays, its used lengths, and its visible pairs."""

    rows: tuple[Any, ...]  # index of its query rows in q, dout, out
    keys: tuple[Any, ...]  # index of its keys in k and v
    lse_rows: tuple[Any, ...]  # index of its rows in lse and dlse
    used_rows: int
    used_keys: int
    visible: Array  # bool (num_heads_q, rows, keys)


def sequences(case: Case) -> Iterator[Sequence]:
    """Yield every sequence of a padded or packed case."""
    if case.cu_seqlens is None:
        batch, seqlen_q, seqlen_k = case.q.shape[0], case.q.shape[1], case.k.shape[1]
        for b in range(batch):
            yield _sequence(case, b, (b, slice(0, seqlen_q)), (b, slice(0, seqlen_k)))
        return
    cu_q, cu_k = ([int(x) for x in cu] for cu in case.cu_seqlens)
    for b in range(len(cu_q) - 1):
        yield _sequence(case, b, (slice(cu_q[b], cu_q[b + 1]),), (slice(cu_k[b], cu_k[b + 1]),))


def _sequence(case: Case, b: int, rows: tuple[Any, ...], keys: tuple[Any, ...]) -> Sequence:
    options = case.options
    seqlen_q, seqlen_k = rows[-1].stop - rows[-1].start, keys[-1].stop - keys[-1].start
    used = []
    for name, size in (("q_lengths", seqlen_q), ("kv_lengths", seqlen_k)):
        used.append(min(max(int(options[name][b]), 0), size) if name in options else size)
    used_rows, used_keys = used

    visible = np.zeros((case.q.shape[-2], seqlen_q, seqlen_k), bool)
    visible[:, :used_rows, :used_keys] = True
    offset = np.arange(seqlen_k) - (np.arange(seqlen_q)[:, None] + used_keys - used_rows)  # 0 on the diagonal
    left, right = options.get("window") or (None, None)
    if options.get("causal"):
        visible &= offset <= 0
    if left is not None:
        visible &= offset >= -left
    if right is not None:
        visible &= offset <= right
    for extra in (options.get("mask"), options.get("block_mask")):
        if extra is not None:
            visible &= _own(extra, b, seqlen_q, seqlen_k)
    if options.get("bias") is not None:
        visible &= ~np.isneginf(_own(options["bias"], b, seqlen_q, seqlen_k).astype(np.float64))
    if options.get("mask_mod") is not None:
        h, i, j = np.ogrid[: case.q.shape[-2], :seqlen_q, :seqlen_k]
        visible &= options["mask_mod"](b, h, i, j, *options.get("operands", ()))
    return Sequence(rows, keys, (*rows[:-1], slice(None), rows[-1]), used_rows, used_keys, visible)


def _own(extra: Array, b: int, seqlen_q: int, seqlen_k: int) -> Array:
    """Return the part of a mask or bias that belongs to sequence b, (heads or 1, rows or 1, keys or 1)."""
    full = np.reshape(extra, (1,) * (4 - extra.ndim) + extra.shape)
    own = full[b if full.shape[0] > 1 else 0]
    return own[:, : seqlen_q if own.shape[1] > 1 else 1, : seqlen_k if own.shape[2] > 1 else 1]


def padded_rows(case: Case) -> Array:
    """Return bool, shaped as q without its last two axes, of query rows that are padding."""
    padded = np.ones(case.q.shape[:-2], bool)
    for sequence in sequences(case):
        padded[sequence.rows][: sequence.used_rows] = False
    return padded


def hidden_keys(case: Case) -> Array:
    """Return bool, shaped as k without its last two axes, of keys that no query may see in any head."""
    hidden = np.ones(case.k.shape[:-2], bool)
    for sequence in sequences(case):
        hidden[sequence.keys] &= ~sequence.visible.any(axis=(0, 1))
    return hidden


def blind_rows(case: Case) -> Array:
    """Return bool, shaped as lse, of rows of a head that see no key, padding included."""
    blind = np.ones(case.lse_shape, bool)
    for sequence in sequences(case):
        blind[sequence.lse_rows] = ~sequence.visible.any(axis=-1)
    return blind
