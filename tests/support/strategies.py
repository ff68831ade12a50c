"""Hypothesis strategies for whole attention problems: sizes, strides, dtypes and every option in combination.

Shapes and options are drawn; the numbers come from a generator whose seed is drawn, so that a failing example is
small, printable and quick to shrink.

The tier says how many examples there are: the same in every run, in the quick tier one in `QUICK_SHARE`. With the
environment variable CUFLASH_TEST_PROFILE=long they are new every time and `LONG_FACTOR` times as many as in the whole
suite; that needs pytest's ``--timeout 0``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tiers
from cases import DTYPES, Case, accum_dtype, gaussian, np_dtype
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from layouts import layouts
from numpy.typing import NDArray

Array = NDArray[Any]
Test = TypeVar("Test", bound=Callable[..., Any])

# Some of the numbers that Hypothesis draws stand in the sources of the modules imported so far: "the same examples in
# every run" would depend on the tests that this process ran before, and change with every commit.
with contextlib.suppress(ImportError, AttributeError):  # versions of it that do no such thing
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = providers.Constants

LONG_FACTOR, QUICK_SHARE = 30, 5

# These are all options of the interface; a test leaves out those that its property does not allow.
OPTIONS = (
    "causal",
    "window",
    "softmax_scale",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "sink",
    "q_lengths",
    "kv_lengths",
    "dropout",
    "block_mask",
    "deterministic",
    "precision",
)
# The meaning of these options depends on where a key stands, and not only on what it holds.
POSITIONAL = ("causal", "window", "alibi_slopes", "dropout")

HEAD_DIMS = st.one_of(st.integers(1, 20), st.sampled_from([32, 33, 64, 72, 96, 128, 160, 192, 200, 255, 256]))
# Results above 256 columns are computed in slices of as many.
WIDE_HEAD_DIMS = st.sampled_from([40, 257, 264, 511, 512, 576, 700, 1024])
# Lengths lie around the edges of 16-, 32-, 64- and 128-wide tiles, or are small.
SEQLENS = st.one_of(st.integers(1, 9), st.sampled_from([16, 15, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 150, 0]))
# The number of scores, batch * heads * rows * columns, beyond which an example is thinned out: the naive reference
# takes about a second for ten million.
MAX_SCORES = 120_000


def examples(whole: int, quick: int | None = None) -> Callable[[Test], Test]:
    """Return settings of a property that is tried on `whole` examples, or on a share of them in the quick tier.

    `quick` is for properties whose every example compiles kernels.
    """
    long = tiers.PROFILE == "long"
    in_quick_tier = quick or -(-whole // QUICK_SHARE)
    return settings(
        max_examples=whole * LONG_FACTOR if long else whole if tiers.is_whole() else in_quick_tier,
        derandomize=not long,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),  # explaining a failure takes longer than finding it
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes that options must fit."""

    batch: int
    heads_q: int
    rows: int  # packed: of the longest sequence, or a few more
    columns: int
    dtype: np.dtype[Any]


def _scores_shape(draw: st.DrawFn, sizes: Sizes) -> tuple[int, ...]:
    """Draw a shape that broadcasts to (batch, heads, rows, columns), with leading axes or without."""
    full = (sizes.batch, sizes.heads_q, sizes.rows, sizes.columns)
    shape = tuple(draw(st.sampled_from([size, 1])) for size in full)
    ones = next((axis for axis, size in enumerate(shape) if size != 1), 4)
    return shape[draw(st.integers(0, ones)) :]


def _bias(draw: st.DrawFn, rng: np.random.Generator, sizes: Sizes) -> Array:
    dtype = draw(st.sampled_from([sizes.dtype, np.dtype(np.float32)]))
    bias = gaussian(rng, _scores_shape(draw, sizes), dtype)
    hidden = draw(st.sampled_from([0.0, 0.0, 0.0, 0.2, 0.5, 0.2, 1.0]))
    bias[rng.random(bias.shape) < hidden] = -np.inf
    return bias


def _mask(draw: st.DrawFn, rng: np.random.Generator, sizes: Sizes) -> Array:
    shape, density = _scores_shape(draw, sizes), draw(st.sampled_from([0.3, 0.7, 0.7, 0.95, 0.95, 1.0, 0.0]))
    return np.asarray(rng.random(shape) < density)


def _block_mask(draw: st.DrawFn, rng: np.random.Generator, sizes: Sizes, block_size: tuple[int, int]) -> Array:
    """Draw whole, empty and partial blocks, and empty rows and columns of blocks."""
    batch, heads = sizes.batch, sizes.heads_q
    leading = draw(st.sampled_from([(), (1,), (heads,), (1, 1), (batch, 1), (batch, heads)]))
    counts = [-(-size // block) for size, block in zip((sizes.rows, sizes.columns), block_size, strict=True)]
    kinds = draw(st.sampled_from([(0.5, 0.2, 0.3), (0.1, 0.3, 0.6)]))
    coarse = rng.choice([0.0, 0.5, 1.0], (*leading, *counts), p=kinds)
    density = np.repeat(np.repeat(coarse, block_size[0], axis=-2), block_size[1], axis=-1)
    mask: Array = rng.random((*leading, sizes.rows, sizes.columns)) < density[..., : sizes.rows, : sizes.columns]
    return mask


def _lengths(draw: st.DrawFn, batch: int, longest: int) -> Array:
    """Draw lengths of any kind: none, all, in between, and values that the library clamps."""
    length = st.one_of(st.integers((longest + 1) // 2, longest + 2), st.integers(-1, longest + 2))
    return np.array(draw(st.lists(length, min_size=batch, max_size=batch)), np.int32)


def _window(draw: st.DrawFn, sizes: Sizes) -> tuple[int | None, int | None]:
    side = st.one_of(st.none(), st.integers(0, 9), st.integers(0, max(sizes.rows, sizes.columns) + 2))
    return draw(side), draw(side)


def _draw_options(
    draw: st.DrawFn, rng: np.random.Generator, sizes: Sizes, chosen: list[str], block_size: tuple[int, int]
) -> dict[str, Any]:
    """Draw keyword arguments for the `chosen` options."""
    accum = accum_dtype(sizes.dtype)
    makers: dict[str, Callable[[], Any]] = {
        "causal": lambda: draw(st.booleans()),
        "window": lambda: _window(draw, sizes),
        "softmax_scale": lambda: draw(st.one_of(st.floats(-1, 1, width=16), st.sampled_from([0.0, 0, 1, -2]))),
        "softcap": lambda: draw(st.sampled_from([0.0, 0.5, 5, 30.0])),
        "bias": lambda: _bias(draw, rng, sizes),
        "mask": lambda: _mask(draw, rng, sizes),
        "alibi_slopes": lambda: rng.uniform(
            -0.1, 0.5, draw(st.sampled_from([(sizes.heads_q,), (sizes.batch, sizes.heads_q)]))
        ).astype(accum),
        "sink": lambda: gaussian(rng, (sizes.heads_q,), accum, 2.0),
        "q_lengths": lambda: _lengths(draw, sizes.batch, sizes.rows),
        "kv_lengths": lambda: _lengths(draw, sizes.batch, sizes.columns),
        "block_mask": lambda: _block_mask(draw, rng, sizes, block_size),
        "deterministic": lambda: draw(st.booleans()),
        # float32 in TF32 has an error rule of its own in test_numerics.
        "precision": lambda: None if sizes.dtype == np.float32 else draw(st.sampled_from([None, "tf32"])),
    }
    options = {name: makers[name]() for name in chosen if name != "dropout"}
    if "dropout" in chosen:
        options["dropout_p"] = draw(st.sampled_from([0.0, 0.1, 1 / 3, 0.9]))
        seed = draw(st.integers(0, 2**64 - 1))
        shape = draw(st.sampled_from([None, (), (1,)]))
        options["dropout_seed"] = seed if shape is None else np.full(shape, seed, np.uint64)
    return options


def _lay_out(draw: st.DrawFn, x: Array) -> Array:
    return draw(layouts(x.ndim)).apply(x)


def _spread(draw: st.DrawFn, x: Array) -> Array:
    """Spread lengths and offsets over every so many elements of their storage, but with no stride of 0."""
    return draw(layouts(x.ndim, writable=True)).apply(x)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    packed: bool | None = None,
    without: tuple[str, ...] = (),
    always: tuple[str, ...] = (),
    empty: bool = True,
    strided: bool = True,
    whole_vectors: bool = False,
    head_dims: st.SearchStrategy[int] = HEAD_DIMS,
    max_head_dim: int = 1024,
    max_scores: int = MAX_SCORES,
) -> Case:
    """Draw attention problems.

    Parameters
    ----------
    dtypes : names to draw from
    packed : whether sequences are packed, None for both
    without, always : options (see `OPTIONS`) that are never, always drawn
    empty : whether batch and sequence lengths may be 0
    strided : whether arrays may lie in memory in unusual ways
    whole_vectors : whether head dims are multiples of 8, so that 16-bit rows are vectors of 16 bytes
    head_dims, max_head_dim : of head_dim and head_dim_v: the values to draw from, and a bound
    max_scores : bound of the size of the whole score array
    """
    assert set(without) | set(always) <= set(OPTIONS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np_dtype(draw(st.sampled_from(dtypes)))
    heads_kv, group_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    heads_q = heads_kv * group_size
    dims = head_dims.map(lambda size: min(-(-size // 8) * 8 if whole_vectors else size, max_head_dim))
    head_dim = draw(dims)
    head_dim_v = draw(st.one_of(st.just(head_dim), dims))
    batch = draw(st.sampled_from([1, 1, 1, 2, 2, 2, 3, 3, 0] if empty else [1, 2, 3]))
    seqlen = SEQLENS if empty else SEQLENS.map(lambda size: max(size, 1))
    is_packed = draw(st.booleans()) if packed is None else packed

    cu_seqlens = None
    if is_packed:
        lengths = draw(st.lists(st.tuples(SEQLENS, SEQLENS), min_size=batch, max_size=batch))
        lengths = _thin(lengths, heads_q, max_scores)
        padding = draw(st.sampled_from([(0, 0), (0, 0), (0, 7), (2, 0), (1, 3)]))
        cu_q, cu_k = (_cumulative(padding[0], [pair[side] for pair in lengths]) for side in (0, 1))
        cu_seqlens = cu_q, cu_k
        seqlen_q, seqlen_k = int(cu_q[-1]) + padding[1], int(cu_k[-1]) + padding[1]
        longest = [max((pair[side] for pair in lengths), default=0) for side in (0, 1)]
        slack = draw(st.sampled_from([0, 0, 3]))
        sizes = Sizes(batch, heads_q, longest[0] + slack, longest[1] + slack, dtype)
        leading: tuple[int, ...] = ()
    else:
        [(seqlen_q, seqlen_k)] = _thin([(draw(seqlen), draw(seqlen))], max(batch, 1) * heads_q, max_scores)
        sizes = Sizes(batch, heads_q, seqlen_q, seqlen_k, dtype)
        leading = (batch,)

    block_size = draw(st.sampled_from([(1, 1), (16, 16), (64, 64), (128, 128), (5, 70), (64, 16)]))
    # About a quarter of the options are there at a time, as nothing is visible with more of them.
    chosen = [name for name in OPTIONS if name in always or (name not in without and draw(st.integers(0, 3)) == 3)]
    options = _draw_options(draw, rng, sizes, chosen, block_size)

    spread = draw(st.sampled_from([1.0, 1.0, 0.1, 3.0]))
    case = Case(
        q=gaussian(rng, (*leading, seqlen_q, heads_q, head_dim), dtype, spread),
        k=gaussian(rng, (*leading, seqlen_k, heads_kv, head_dim), dtype),
        v=gaussian(rng, (*leading, seqlen_k, heads_kv, head_dim_v), dtype),
        dout=gaussian(rng, (*leading, seqlen_q, heads_q, head_dim_v), dtype),
        options=options,
        cu_seqlens=cu_seqlens,
        block_size=block_size,
    )
    if draw(st.booleans()):
        case.dlse = gaussian(rng, case.lse_shape, accum_dtype(dtype))
    if not strided:
        return case
    names = ["q", "k", "v", "dout"] + (["dlse"] if case.dlse is not None else [])
    names += [name for name in ("bias", "sink", "alibi_slopes") if name in options]
    strided_case = case.with_inputs(**{name: _lay_out(draw, _input(case, name)) for name in names})
    if cu_seqlens is not None:
        strided_case.cu_seqlens = _spread(draw, cu_seqlens[0]), _spread(draw, cu_seqlens[1])
    lay_out = {"mask": _lay_out, "q_lengths": _spread, "kv_lengths": _spread}
    return strided_case.with_options(**{n: how(draw, options[n]) for n, how in lay_out.items() if n in options})


def _input(case: Case, name: str) -> Array:
    array: Array = case.options[name] if name in case.options else getattr(case, name)
    return array


def _thin(lengths: list[tuple[int, int]], heads: int, max_scores: int) -> list[tuple[int, int]]:
    """Halve the lengths, longest first, until all scores together number at most `max_scores`."""
    lengths = list(lengths)
    while heads * sum(rows * columns for rows, columns in lengths) > max_scores:
        longest = max(range(len(lengths)), key=lambda index: lengths[index][0] * lengths[index][1])
        rows, columns = lengths[longest]
        lengths[longest] = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    return lengths


def _cumulative(first: int, lengths: list[int]) -> Array:
    return (first + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)
