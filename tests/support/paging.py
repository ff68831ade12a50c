"""Cases whose keys lie in pools of pages, made of cases whose keys do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cases import Case, gaussian
from hypothesis import strategies as st
from layouts import layouts
from numpy.typing import NDArray
from strategies import cases

from cuflash.reference.pages import used_rows

Array = NDArray[Any]
PAGE_SIZES = (1, 3, 16)
# These entries point nowhere, and are clamped to the pool where they are used.
WILD = (-(2**31), -1, 2**31 - 1)


@st.composite
def paged_cases(draw: st.DrawFn, **of_cases: Any) -> Case:
    """Draw attention over pages with every other option; the arguments are those of `cases`.

    Sequences may share pages, a page may stand twice in a row of the table, and entries of no use are wild.
    """
    without = (*of_cases.pop("without", ()), "kv_lengths")
    case: Case = draw(cases(without=without, **of_cases))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size = draw(st.sampled_from(PAGE_SIZES))
    paged = as_paged(case, page_size, rng, num_spare=draw(st.sampled_from([0, 3])), wild=draw(st.booleans()))
    lay_out = {name: draw(layouts(4)).apply(getattr(paged, name)) for name in ("k", "v")}
    table = draw(layouts(2, writable=True)).apply(paged.options["block_table"])
    return paged.with_inputs(**lay_out).with_options(block_table=table)


def as_paged(case: Case, page_size: int, rng: np.random.Generator, num_spare: int = 3, wild: bool = True) -> Case:
    """Make a case like another one, whose keys are pools of random pages, with lengths of every kind."""
    columns = _columns(case)
    max_pages = -(-columns // page_size)
    capacity = max_pages * page_size
    batch = len(case.cu_seqlens[0]) - 1 if case.cu_seqlens is not None else len(case.q)
    num_pages = max(batch * max_pages * 2 // 3, 1) + num_spare
    lengths = rng.integers(-1, capacity + 3, batch).astype(np.int32)
    table = rng.integers(0, num_pages, (batch, max_pages)).astype(np.int32)
    if wild and table.size:
        table[rng.random(table.shape) < 0.1] = rng.choice(WILD)
    used = np.clip(lengths, 0, capacity)[:, None] > np.arange(max_pages) * page_size
    table[~used] = rng.choice(WILD, np.count_nonzero(~used))
    pools = {
        name: gaussian(rng, (num_pages, page_size, *getattr(case, name).shape[-2:]), case.dtype) for name in ("k", "v")
    }
    extras = {name: _as_wide(name, case.options[name], capacity, rng) for name in _MATRICES if name in case.options}
    cu_seqlens: Any = None if case.cu_seqlens is None else (case.cu_seqlens[0], None)
    paged = replace(case, k=pools["k"], v=pools["v"], cu_seqlens=cu_seqlens)
    return paged.with_options(block_table=table, kv_lengths=lengths, **extras)


def used_of_pool(case: Case) -> Array:
    """Return bool (num_pages, page_size) of the rows of the pools that some sequence uses."""
    used = np.zeros(case.k.shape[:2], bool)
    for at in used_rows(case.k, case.options["block_table"], case.options["kv_lengths"]):
        used[at] = True
    return used


_MATRICES = ("bias", "mask", "block_mask")


def _columns(case: Case) -> int:
    """Return the keys of a sequence, or as many as its extras have."""
    widths = [case.options[name].shape[-1] for name in _MATRICES if np.ndim(case.options.get(name, 0))]
    if case.cu_seqlens is None:
        return max(case.k.shape[1], *widths, 0)
    return max(*np.diff(case.cu_seqlens[1]), *widths, 0, 0)


def _as_wide(name: str, x: Array, capacity: int, rng: np.random.Generator) -> Array:
    """Give an extra a column for each key of a sequence, unless one column stands for all, which no BlockMask has."""
    if np.ndim(x) == 0 or x.shape[-1] == capacity or (x.shape[-1] == 1 and name != "block_mask"):
        return x
    more = rng.random((*x.shape[:-1], capacity)) < 0.5
    wide = np.where(more, 1, 0).astype(x.dtype)
    wide[..., : x.shape[-1]] = x[..., :capacity]
    return wide
