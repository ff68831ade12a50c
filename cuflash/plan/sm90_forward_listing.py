"""The forward kernels on 16 bits that problems of every kind take on Hopper, for compiling ahead of calls and checks.

What is listed is what the plan answers, as in `listing`: of each head dims, to problems of many and few queries and
keys, whose rows are one head's or several heads', in pages, packed, and with or without splits of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from cuflash.plan import sm90_forward, sm90_grid
from cuflash.plan.config import KNOWN_TO_ALL
from cuflash.plan.listing import Flags, problem_of
from cuflash.plan.sm90_config import Sm90ForwardConfig
from cuflash.plan.sm90_tiles import HEAD_DIMS
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.pages import Pages

_WINDOW = "has_window"
_LONG, _SHORT, _FEW = sm90_forward.LONG_QUERIES, 512, 4  # queries or keys
_FILLED, _LARGE = 1, 132  # multiprocessors of a GPU that any problem here fills, and of one that it does not fill


class _Kind(NamedTuple):
    """Problems that are alike but for their options."""

    fields: dict[str, Any]
    option_sets: tuple[Flags, ...]
    in_tiles: bool = False  # TMA loads the bias and the mask
    num_sms: int = _FILLED


def _pages(size: int) -> dict[str, Any]:
    return {"pages": Pages(_LONG // size, size, _LONG // size), "kv_lengths": True}


_PLAIN: tuple[Flags, ...] = (), (_WINDOW,)
_ALONE = {flag: (_WINDOW, flag) for flag in KNOWN_TO_ALL if flag != _WINDOW}
_BIAS, _MASK, _SOFTCAP, _DROPOUT, _ALIBI = (
    _ALONE[f"has_{name}"] for name in ("bias", "mask", "softcap", "dropout", "alibi")
)
_ROWS = sm90_forward.KNOWN_TO_ROWS
_OF_HEADS: dict[str, Any] = {"seqlen_q": _FEW, "num_heads_q": 4}
_OF_MANY_HEADS: dict[str, Any] = {"seqlen_q": 2, "num_heads_q": 128}  # a tile of few queries has no room for these
_LARGE_PAGES, _SMALL_PAGES = _pages(128), _pages(1)
_OF_LISTS: dict[str, Any] = {"packed": True, "batch": 16, "seqlen_q": 16 * _FEW, "seqlen_k": 16 * _LONG}
_KINDS = (
    _Kind({}, (*_PLAIN, *_ALONE.values(), KNOWN_TO_ALL)),
    _Kind({}, (_BIAS, _MASK, KNOWN_TO_ALL), in_tiles=True),
    _Kind({"bias_dtype": "float32"}, (_BIAS, KNOWN_TO_ALL), in_tiles=True),
    _Kind({"seqlen_k": _SHORT}, _PLAIN),
    _Kind({"seqlen_k": sm90_forward.MANY_KEYS}, ((),)),
    _Kind({"window_left": 100}, ((_WINDOW,),)),
    _Kind({"softcap": 100.0}, (_SOFTCAP,)),
    _Kind({"kv_lengths": True}, (*_PLAIN, _SOFTCAP)),
    *(_Kind({"seqlen_q": _SHORT, "seqlen_k": keys}, _PLAIN, num_sms=_LARGE) for keys in (_LONG, 4 * _LONG)),
    _Kind({"seqlen_q": _FEW}, (*_PLAIN, _ROWS)),
    _Kind({"seqlen_q": _FEW}, ((),), num_sms=_LARGE),
    _Kind(_OF_HEADS, (*_PLAIN, _BIAS, _SOFTCAP, _ROWS)),
    _Kind(_OF_HEADS, (_ROWS,), in_tiles=True, num_sms=_LARGE),
    _Kind(_OF_MANY_HEADS, ((_WINDOW,),), num_sms=_LARGE),
    _Kind(_LARGE_PAGES, ((_WINDOW,), _SOFTCAP, _ALIBI, KNOWN_TO_ALL)),
    _Kind(_OF_HEADS | _LARGE_PAGES, ((), _MASK), in_tiles=True, num_sms=_LARGE),
    _Kind(_OF_MANY_HEADS | _LARGE_PAGES, ((_WINDOW,), _DROPOUT, _BIAS, _ROWS)),
    _Kind(_SMALL_PAGES, ((_WINDOW,),)),
    _Kind(_OF_HEADS | _SMALL_PAGES, ((),), num_sms=_LARGE),
    _Kind(_OF_HEADS | _SMALL_PAGES, (_ROWS,)),
    _Kind(_OF_MANY_HEADS | _SMALL_PAGES, ((_WINDOW,),)),
    _Kind(_OF_LISTS, ((_WINDOW,),)),
    _Kind(_OF_LISTS | _LARGE_PAGES, ((_WINDOW,), _ROWS)),
    _Kind(_OF_LISTS | _LARGE_PAGES | {"seqlen_q": _LONG}, ((_WINDOW,), _ROWS), num_sms=_LARGE),
)


def kernel_of(problem: AttentionProblem, bias_tiles: bool, mask_tiles: bool, num_sms: int) -> Sm90ForwardConfig:
    """Return the kernel that a problem takes, whose result TMA can write."""
    config, num_splits = sm90_grid.for_grid(problem, sm90_forward.config_for(problem, bias_tiles, mask_tiles), num_sms)
    config = replace(sm90_forward.for_pages(problem, config), hides_queries=sm90_forward.may_hide_queries(problem))
    return config if num_splits == 1 else replace(config, splits_keys=True, staging_panels=0, pair=1)


def _kernels(dims: tuple[int, int], dtype: str) -> Iterator[Sm90ForwardConfig]:
    for kind in _KINDS:
        for flags in kind.option_sets:
            problem = replace(problem_of(dtype, *dims, flags), **kind.fields)
            bias_tiles, mask_tiles = (kind.in_tiles and flag in flags for flag in ("has_bias", "has_mask"))
            yield kernel_of(problem, bias_tiles, mask_tiles, kind.num_sms)
    for flags in _PLAIN:  # results that TMA cannot write
        yield replace(kernel_of(problem_of(dtype, *dims, flags), False, False, _FILLED), staging_panels=0, pair=1)


def table() -> Iterator[tuple[Sm90ForwardConfig, str]]:
    """Yield every kernel once, with its dtype."""
    for dims in HEAD_DIMS:
        for dtype in sm90_forward.DTYPES:
            yield from ((config, dtype) for config in dict.fromkeys(_kernels(dims, dtype)))
