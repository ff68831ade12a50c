"""Hopper's own kernels that are compiled ahead of calls and checked: what plans answer to problems of every kind.

Of each head dims these are problems of the forward pass with many and few queries and keys, whose rows are one head's
or several heads', in pages, packed, and with or without splits of the keys; and problems of the backward pass whose
additions to dq have an order or none, and with many queries that see a key, or few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from cuflash.hardware import num_sms
from cuflash.plan.config import KNOWN_TO_ALL
from cuflash.plan.listing.families import (
    BLOCK_MASK,
    FP8_RESULTS,
    WINDOW,
    Flags,
    Pass,
    passes_of,
    problem_of,
    problems_of,
)
from cuflash.plan.sm90 import codes as sm90_codes
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import fp8 as sm90_fp8
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90.backward import DQ, FEW_SEEN, ROWS, backward
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig, with_query_splits
from cuflash.plan.sm90.backward_tiles import NARROW_TABLE, WIDE_TABLE, Sm90BackwardTile
from cuflash.plan.sm90.config import Sm90ForwardConfig, may_split_keys
from cuflash.plan.sm90.tiles import HEAD_DIMS, OWN_COLUMNS
from cuflash.plan.split import kernels as split
from cuflash.plan.split import tiles as split_tiles
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.fp8 import FP8
from cuflash.problem.pages import Pages

Answer = tuple[Sm90BackwardConfig, ...]
_LONG, _SHORT, _FEW = sm90_forward.LONG_QUERIES, 512, 4  # queries or keys
_FILLED, _LARGE = 1, num_sms("sm_90a")  # multiprocessors of a GPU that any problem fills, and of a whole one
_PLAIN: tuple[Flags, ...] = (), (WINDOW,)
_ALONE = {flag: (WINDOW, flag) for flag in KNOWN_TO_ALL if flag != WINDOW}


def of_hopper() -> Iterator[Pass]:
    """Yield all of Hopper's own kernels, in the order in which calls ask families."""
    for family in (of_forward, of_fp8, of_codes, of_backward, of_split_forward, of_split_backward):
        yield from family()


class _Kind(NamedTuple):
    """Problems that are alike but for their options."""

    fields: dict[str, Any]
    option_sets: tuple[Flags, ...]
    in_tiles: bool = False  # TMA loads the bias and the mask
    num_sms: int = _FILLED


def _pages(size: int) -> dict[str, Any]:
    return {"pages": Pages(_LONG // size, size, _LONG // size), "kv_lengths": True}


_BIAS, _MASK, _SOFTCAP, _DROPOUT, _ALIBI = (
    _ALONE[f"has_{name}"] for name in ("bias", "mask", "softcap", "dropout", "alibi")
)
_ROWS = sm90_forward.KNOWN_TO_ROWS
_OF_HEADS: dict[str, Any] = {"seqlen_q": _FEW, "num_heads_q": 4}
_OF_MANY_HEADS: dict[str, Any] = {"seqlen_q": 2, "num_heads_q": 128}  # a tile of few queries has no room for these
_LARGE_PAGES, _SMALL_PAGES = _pages(128), _pages(1)
_MANY_SEQUENCES = {"batch": 1 << 12}  # their keys and values take much memory as elements of 16 bits
_OF_LISTS: dict[str, Any] = {"packed": True, "batch": 16, "seqlen_q": 16 * _FEW, "seqlen_k": 16 * _LONG}
_KINDS = (
    _Kind({}, (*_PLAIN, *_ALONE.values(), KNOWN_TO_ALL)),
    _Kind({}, (_BIAS, _MASK, KNOWN_TO_ALL), in_tiles=True),
    _Kind({"bias_dtype": "float32"}, (_BIAS, KNOWN_TO_ALL), in_tiles=True),
    _Kind({"seqlen_k": _SHORT}, _PLAIN),
    _Kind({"seqlen_k": sm90_forward.MANY_KEYS}, ((),)),
    _Kind({"window_left": 100}, ((WINDOW,),)),
    _Kind({"softcap": 100.0}, (_SOFTCAP,)),
    _Kind({"kv_lengths": True}, (*_PLAIN, _SOFTCAP)),
    *(_Kind({"seqlen_q": _SHORT, "seqlen_k": keys}, _PLAIN, num_sms=_LARGE) for keys in (_LONG, 4 * _LONG)),
    _Kind({"seqlen_q": _FEW}, (*_PLAIN, _ROWS)),
    _Kind({"seqlen_q": _FEW}, ((),), num_sms=_LARGE),
    _Kind(_OF_HEADS, (*_PLAIN, _BIAS, _SOFTCAP, _ROWS)),
    _Kind(_OF_HEADS, (_ROWS,), in_tiles=True, num_sms=_LARGE),
    _Kind(_OF_MANY_HEADS, ((WINDOW,),), num_sms=_LARGE),
    _Kind(_LARGE_PAGES, ((WINDOW,), _SOFTCAP, _ALIBI, KNOWN_TO_ALL)),
    _Kind(_OF_HEADS | _LARGE_PAGES, ((), _MASK), in_tiles=True, num_sms=_LARGE),
    _Kind(_OF_MANY_HEADS | _LARGE_PAGES, ((WINDOW,), _DROPOUT, _BIAS, _ROWS)),
    _Kind(_SMALL_PAGES, ((WINDOW,),)),
    _Kind(_OF_HEADS | _SMALL_PAGES, ((),), num_sms=_LARGE),
    _Kind(_OF_HEADS | _SMALL_PAGES, (_ROWS,)),
    _Kind(_OF_MANY_HEADS | _SMALL_PAGES, ((WINDOW,),)),
    _Kind(_OF_LISTS, ((WINDOW,),)),
    _Kind(_OF_LISTS | _LARGE_PAGES, ((WINDOW,), _ROWS)),
    _Kind(_OF_LISTS | _LARGE_PAGES | {"seqlen_q": _LONG}, ((WINDOW,), _ROWS), num_sms=_LARGE),
)


def _kernels_of(
    problem: AttentionProblem, bias_tiles: bool, mask_tiles: bool, num_sms: int, by_tma: bool = True
) -> tuple[Sm90ForwardConfig, ...]:
    """Return the candidates for a problem whose result TMA can write, or cannot."""
    config, num_splits = sm90_grid.for_grid(problem, sm90_forward.config_for(problem, bias_tiles, mask_tiles), num_sms)
    config = sm90_forward.for_pages(problem, config)
    if num_splits > 1 or not by_tma:
        config = replace(config, splits_keys=num_splits > 1, staging_panels=0, pair=1)
    hides = sm90_forward.may_hide_queries(problem)
    return tuple(replace(each, hides_queries=hides) for each in sm90_forward.candidates(problem, config))


def _kernels(dims: tuple[int, int], dtype: str) -> Iterator[tuple[Sm90ForwardConfig, ...]]:
    for kind in _KINDS:
        for flags in kind.option_sets:
            problem = replace(problem_of(dtype, *dims, flags), **kind.fields)
            bias_tiles, mask_tiles = (kind.in_tiles and flag in flags for flag in ("has_bias", "has_mask"))
            yield _kernels_of(problem, bias_tiles, mask_tiles, kind.num_sms)
    for flags in _PLAIN:  # results that TMA cannot write
        yield _kernels_of(problem_of(dtype, *dims, flags), False, False, _FILLED, by_tma=False)


def _group_kernels(dims: tuple[int, int], dtype: str) -> Iterator[tuple[Sm90ForwardConfig, ...]]:
    """Yield the kernels whose tiles have rows of the heads of a group, with keys whole or split."""
    for flags in _PLAIN:
        for config in sm90_grid.tiles_of_groups(replace(problem_of(dtype, *dims, flags), num_heads_q=4)):
            yield (config,)
            if may_split_keys(config):
                yield (replace(config, splits_keys=True, staging_panels=0),)


def _plain_kernels(dims: tuple[int, int], dtype: str) -> Iterator[tuple[Sm90ForwardConfig, ...]]:
    """Yield the kernels without options of a problem's own head dims, which need not be those of a class."""
    for flags, keys in product(_PLAIN, (_SHORT, _LONG)):
        yield _kernels_of(replace(problem_of(dtype, *dims, flags), seqlen_k=keys), False, False, _FILLED)


def of_forward() -> Iterator[Pass]:
    """Yield the forward kernels on 16 bits, each once; of narrower head dims than a class has only those of its own."""
    for dims, dtype in product(HEAD_DIMS, HALF_DTYPES):
        yield from passes_of(dict.fromkeys((*_kernels(dims, dtype), *_group_kernels(dims, dtype))), dtype)
    for columns, dtype in product(OWN_COLUMNS, HALF_DTYPES):
        yield from passes_of(dict.fromkeys(_plain_kernels((columns, columns), dtype)), dtype)


def of_fp8() -> Iterator[Pass]:
    """Yield the forward kernels on e4m3 codes: plain, with a window and any one option, and with all."""
    given: dict[str, Any] = {"has_fp8_keys": True}
    for dims in sm90_fp8.HEAD_DIMS:
        for n, flags in enumerate((*_PLAIN, *_ALONE.values(), KNOWN_TO_ALL)):
            for token_scales in (False, True):
                out_dtype = FP8_RESULTS[(n + token_scales) % len(FP8_RESULTS)]
                problem = problem_of(FP8, *dims, flags, out_dtype=out_dtype, **given)
                yield from passes_of([sm90_fp8.forward(problem, (), token_scales)], FP8)
        problem = problem_of(FP8, *dims, (WINDOW,), out_dtype=FP8_RESULTS[0], **given)
        yield from passes_of([sm90_fp8.forward(replace(problem, softmax_scale=-1.0), ())], FP8)
        split_keys = (replace(config, splits_keys=True) for config in sm90_fp8.forward(problem, ()))
        yield from passes_of([tuple(split_keys)], FP8)


def of_codes() -> Iterator[Pass]:
    """Yield the forward kernels on 16-bit queries over e4m3 codes: with a window and any one option, and with all."""
    flags_of_each = ((WINDOW,), *_ALONE.values(), tuple(flag for flag in KNOWN_TO_ALL if flag != BLOCK_MASK))
    ways: tuple[dict[str, Any], ...] = {}, _MANY_SEQUENCES, _SMALL_PAGES
    for dims, dtype, pages, flags in product(HEAD_DIMS, HALF_DTYPES, ways, flags_of_each):
        problem = problem_of(dtype, dims[0], dims[1], flags, has_fp8_keys=True, out_dtype=dtype)
        problem = replace(problem, seqlen_q=_LONG, num_heads_q=_LARGE, **pages)
        for token_scales in (False, True):
            launches = sm90_codes.forward(problem, (), None, None, token_scales, num_sms=_FILLED)
            yield from passes_of([tuple(config for config, _ in launches)], dtype, others_serve=True)


_EACH_OPTION: tuple[Flags, ...] = (
    *((flag,) for flag in KNOWN_TO_ALL),
    (WINDOW, BLOCK_MASK),
    (WINDOW, "has_dropout", BLOCK_MASK),
    tuple(flag for flag in KNOWN_TO_ALL if flag != BLOCK_MASK),
)


def of_split_forward() -> Iterator[Pass]:
    """Yield the forward kernels on float32 operands in float16 parts, which leave few registers to any option."""
    for precision, parts in split.PARTS.items():
        problems = problems_of(split_tiles.FORWARD[parts], "float32", also=_EACH_OPTION, precision=precision)
        yield from passes_of(map(split.forward, problems), "float32")


def of_split_backward() -> Iterator[Pass]:
    """Yield the kernels of the gradients of such operands."""
    for precision, parts in split.PARTS.items():
        problems = problems_of(split_tiles.BACKWARD[parts], "float32", also=_EACH_OPTION, precision=precision)
        yield from passes_of(map(split.backward, problems), "float32", others_serve=True)


def of_backward() -> Iterator[Pass]:
    """Yield gradients on 16 bits of problems with one option at most, and of each tile of that with the most.

    In order they are those without options, and of each tile those with the fewest and the most. Rules of users' own
    meet their registers when they are compiled.
    """
    dims = dict.fromkeys((line.head_dim, line.head_dim_v) for line in NARROW_TABLE + WIDE_TABLE)
    for dtype, (head_dim, head_dim_v), in_order in product(HALF_DTYPES, dims, (False, True)):
        of_tiles: dict[Any, list[Answer]] = {}
        for flags in _options():
            problem = problem_of(dtype, head_dim, head_dim_v, flags, deterministic=in_order)
            for answer in _answers(problem, flags):
                tile = *(getattr(answer[0], field.name) for field in fields(Sm90BackwardTile)), answer[0].dq_stages
                of_tiles.setdefault(tile, []).append(answer)
                if len(flags) <= (1 if in_order else 2):
                    yield _pass_of(answer, dtype)
                # Thread blocks that share queries have fewer random bits early.
                if flags == (WINDOW,) or (not in_order and flags in ((), (WINDOW, "has_dropout"))):
                    yield _pass_of(map(with_query_splits, answer), dtype)
                    yield _pass_of((replace(config, writes_dq=True) for config in answer), dtype, (ROWS,))
        for known in of_tiles.values():
            yield from (_pass_of(answer, dtype) for answer in ((known[0], known[-1]) if in_order else known[-1:]))


def _pass_of(answer: Iterable[Sm90BackwardConfig], dtype: str, beside: tuple[str, ...] = (ROWS, DQ)) -> Pass:
    def kernels(config: Sm90BackwardConfig) -> tuple[Sm90BackwardConfig, ...]:
        slopes = {ROWS: config.writes_dslopes, DQ: False}
        return config, *(replace(config.of_rows, entry=entry, writes_dslopes=slopes[entry]) for entry in beside)

    return Pass(tuple(map(kernels, answer)), dtype, True)


def _options() -> Iterator[Flags]:
    """Yield up to three options."""
    yield ()
    alone = [flag for flag in KNOWN_TO_ALL if flag != WINDOW]
    yield from ((WINDOW, *others) for n in range(4) for others in combinations(alone, n))


def _answers(problem: AttentionProblem, flags: Flags) -> Iterator[Answer]:
    """Yield the answers for a bias and a mask that are read by elements, and by TMA and in vectors."""
    for seqlen_q in (2 * FEW_SEEN, FEW_SEEN) if len(flags) <= 1 else (FEW_SEEN,):
        scores = 1, 1, seqlen_q, problem.seqlen_k
        given: dict[str, Any] = {x: scores for x in ("bias", "mask") if f"has_{x}" in flags}
        own = replace(problem, seqlen_q=seqlen_q, **given)
        bias, mask = (_dense(scores, size) if shape else None for shape, size in ((own.bias, 2), (own.mask, 1)))
        found = (backward(own, (), *arrays, dslopes=True) for arrays in ((None,) * 3, (bias, bias, mask)))
        yield from filter(None, dict.fromkeys(found))


def _dense(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layout of an array of elements of `size` bytes that lie side by side."""
    return tuple(math.prod(shape[axis:]) * size for axis in range(1, len(shape) + 1)), shape
