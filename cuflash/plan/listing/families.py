"""The kernels that are compiled ahead of calls and checked are those that problems of every kind of a family take.

Of each line of a table's head dims there are problems without options, with a window, with all options, and with sets
that are drawn, always the same; a line for one option stands for one of them. The chooser answers as it does in calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from cuflash.plan.config import KNOWN_TO_ALL, OF_RULES, WIDEST
from cuflash.plan.decode import kernels as decode
from cuflash.plan.decode.tiles import RECORDS as DECODE
from cuflash.plan.portable import kernels as portable
from cuflash.plan.portable.tiles import OPERAND_ENTRIES, PORTABLE
from cuflash.plan.record import HOPPER, Capability, Record
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm80 import kinds as sm80_kinds
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm80 import wide_tiles as sm80_wide_tiles
from cuflash.plan.sm80.tiles import ALONE, BACKWARD, FORWARD, FP8, IN_CLUSTERS, OF_BIAS, OF_QUERIES, Sm80BackwardTile
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem, accum_of
from cuflash.rules.form import NO_RULES, trace_rules

Listed = Iterator[tuple[Any, str]]  # configurations with their dtypes
Flags = tuple[str, ...]
_LENGTH = 4096  # queries and keys of a problem
_SHORT = 256  # queries where few see a key
_BLOCKS = 128, 64  # block sizes of masks
_DRAWN = 1  # sets of options that are drawn for each head dims and dtype
WINDOW, BLOCK_MASK = "has_window", "has_block_mask"
FP8_RESULTS = (*HALF_DTYPES, "float32")  # dtypes of results on codes
_SCORES = 1, 1, 1, 1  # a shape that is broadcast
# Rules of users' own, of which kernels are listed with the room alone: a score_mod and a mask_mod.
_RULES: Any = (lambda s, b, h, i, j: s), (lambda b, h, i, j: i >= j)


def problem_of(
    dtype: str, head_dim: int, head_dim_v: int, flags: Iterable[str], block: int = _BLOCKS[0], **others: Any
) -> AttentionProblem:
    """Return a problem with the options that flags of `KNOWN_TO_ALL` name, whose block mask has blocks of one size."""
    options: dict[str, dict[str, Any]] = {
        WINDOW: {"window_right": 0},
        "has_softcap": {"softcap": 30.0},
        "has_bias": {"bias": _SCORES, "bias_dtype": accum_of(dtype) if others.get("has_fp8_keys") else dtype},
        "has_mask": {"mask": _SCORES},
        "has_alibi": {"alibi": (1, 1)},
        "has_dropout": {"dropout_p": 0.1},
        BLOCK_MASK: {"block_mask": True, "block_size": (block, block)},
    }
    given = {name: x for flag in flags if flag in options for name, x in options[flag].items()}
    of_score, of_mask = (rule if flag in flags else None for flag, rule in zip(OF_RULES, _RULES, strict=True))
    given["rules"] = trace_rules(of_score, of_mask, (), accum_of(dtype))
    return AttentionProblem(1, _LENGTH, _LENGTH, 1, 1, head_dim, head_dim_v, dtype, **given | others)


def option_sets(name: str, lines: Sequence[Record[Any]], handled: Flags = KNOWN_TO_ALL) -> list[Flags]:
    """Return sets of options for the lines of some head dims, which are drawn for this `name`."""
    rng = random.Random(name)
    found: list[Flags] = [(), (WINDOW,), handled]
    for takes in dict.fromkeys(line.takes for line in lines):
        alone = [flag for flag in takes.options or () if flag in handled and flag != WINDOW]
        if takes.most == 1 and alone:
            flag = rng.choice(alone)
            # Where a line is for one option, a window tells whether a step takes several listed tiles.
            found += [(WINDOW, flag)] if len(alone) > 1 else [(flag,), (WINDOW, flag)]
        if takes.least > 1 and len(alone) == takes.least:  # a line for these options together
            found.append(tuple(alone))
    others = [flag for flag in handled if flag != WINDOW]
    for _ in range(_DRAWN):
        drawn = set(rng.sample(others, rng.randint(1, len(others) - 1)))
        found.append((WINDOW, *(flag for flag in others if flag in drawn)))
    return list(dict.fromkeys(found))


def _by_head_dims(table: Sequence[Record[Any]]) -> dict[tuple[int, int], list[Record[Any]]]:
    found: dict[tuple[int, int], list[Record[Any]]] = {}
    for line in table:
        found.setdefault((line.head_dim, line.head_dim_v), []).append(line)
    return found


def problems_of(
    table: Sequence[Record[Any]],
    dtype: str,
    handled: Flags = KNOWN_TO_ALL,
    also: Sequence[Flags] = (),
    **others: Any,
) -> Iterator[AttentionProblem]:
    """Yield problems of a dtype that take the lines of a table, with `option_sets` and those that are given `also`."""
    for dims, lines in _by_head_dims(table).items():
        for flags in dict.fromkeys((*option_sets(f"{lines[0].entries} {dims} {dtype}", lines, handled), *also)):
            for block in _BLOCKS if BLOCK_MASK in flags and len(flags) <= 2 else _BLOCKS[:1]:
                yield problem_of(dtype, *dims, flags, block, **others)


class Pass(NamedTuple):
    """A pass is a plan's answer to a problem of a dtype."""

    candidates: tuple[tuple[Any, ...], ...]  # the kernels of each, without users' own rules, the fastest first
    dtype: str
    others_serve: bool = False  # another family runs where all candidates spill registers


def kernels(passes: Iterable[Pass]) -> Listed:
    """Yield the kernels of the first candidates, each once."""
    found = {kernel: own.dtype for own in passes for kernel in own.candidates[0]}
    yield from found.items()


def passes_of(answers: Iterable[Any], dtype: str, others_serve: bool = False) -> Iterator[Pass]:
    """Yield the answers of a plan, each of which has candidates of one kernel or several, where it has any."""
    for answer in answers:
        each = [candidate if isinstance(candidate, tuple) else (candidate,) for candidate in answer]
        if each:
            kernels = tuple(tuple(replace(kernel, rules=NO_RULES) for kernel in own) for own in each)
            yield Pass(kernels, dtype, others_serve)


def of_forward(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield forward kernels by mma.sync on 16 bits."""
    for dtype in sm80_forward.dtypes(capability):
        problems = problems_of(FORWARD, dtype, sm80_forward.HANDLES)
        yield from passes_of(_placed(sm80_forward.forward, problems, capability, limit), dtype)


def _placed(
    plan: Callable[..., Any], problems: Iterable[AttentionProblem], capability: Capability, limit: int
) -> Iterator[Any]:
    """Yield what a plan answers on aligned arrays, and on others with all options."""
    for problem in problems:
        yield plan(problem, True, capability, limit)
        if problem.bias is not None and problem.block_mask and problem.softcap:
            yield plan(problem, False, capability, limit)


def of_backward(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield the kernels of the backward pass by mma.sync on 16 bits."""
    for dtype in sm80_forward.dtypes(capability):
        problems = list(problems_of(BACKWARD, dtype))
        problems += [replace(p, deterministic=True) for p in problems if not p.block_mask]
        problems += [replace(p, seqlen_q=_SHORT) for p in problems if p.deterministic and p.softcap == 0]
        place = capability, limit
        with_slopes = partial(sm80_backward.backward, dslopes=True)
        yield from passes_of(_placed(with_slopes, problems, *place), dtype)
        yield from passes_of(_placed(partial(sm80_backward.all_keys, num_sms=1), _alone(dtype), *place), dtype)
        if capability >= HOPPER:
            yield from passes_of(_in_clusters(dtype, *place), dtype)
        yield from passes_of(_placed(sm80_backward.of_queries, problems_of(OF_QUERIES, dtype), *place), dtype)
        yield from passes_of(_placed(sm80_backward.of_bias, _with_bias(problems_of(OF_BIAS, dtype)), *place), dtype)


def _alone(dtype: str) -> Iterator[AttentionProblem]:
    """Yield problems that one tile has all keys of: for each tile without options, for the widest heads with all."""
    by_dims = _by_head_dims(ALONE)
    for dims, lines in by_dims.items():
        for tile in (line.tile for line in lines):
            # Several thread blocks share a multiprocessor where there are more sequences than multiprocessors.
            sizes = {"batch": tile.min_blocks, "seqlen_q": tile.block_m, "seqlen_k": tile.block_n}
            yield replace(problem_of(dtype, *dims, ()), **sizes)
    options = [flag for flag in KNOWN_TO_ALL if flag != BLOCK_MASK]
    for line in by_dims[max(by_dims)]:
        with_all = problem_of(dtype, *max(by_dims), options)
        yield replace(with_all, seqlen_q=line.tile.block_m, seqlen_k=line.tile.block_n)


# Thread blocks of listed clusters: (with keys of their own, with queries of their own).
_CLUSTERS = (2, 2), (2, 1), (1, 2)


def _in_clusters(dtype: str, capability: Capability, limit: int) -> Iterator[Any]:
    """Yield the kernels of clusters: each tile in one of both kinds, without options and with as many as it takes.

    The first tile of some head dims is in clusters of all kinds.
    """
    by_dims = _by_head_dims((*ALONE, *IN_CLUSTERS))
    options = [flag for flag in KNOWN_TO_ALL if flag != BLOCK_MASK]
    for dims, lines in by_dims.items():
        plain, with_all = (problem_of(dtype, *dims, flags) for flags in ((), options))
        for number, line in enumerate(lines):
            for problem, shape in ((plain, _CLUSTERS[0]), (with_all, _CLUSTERS[0])):
                yield _in_cluster(problem, line, shape, capability, limit)
            for shape in _CLUSTERS[1:] if number == 0 else ():
                yield _in_cluster(plain, line, shape, capability, limit)


def _in_cluster(
    problem: AttentionProblem,
    line: Record[Sm80BackwardTile],
    shape: tuple[int, int],
    capability: Capability,
    limit: int,
) -> Any:
    """Return the kernel of a line in a cluster that fits, whose sums are added together or apart."""
    keys, queries = shape
    for adds_apart in (False, True):
        tile = replace(line.tile, cluster_keys=keys, cluster_queries=queries, adds_apart=adds_apart)
        found = sm80_backward.of_cluster(problem, True, capability, limit, record=replace(line, tile=tile))
        if found:
            return found
    return ()


def _with_bias(problems: Iterable[AttentionProblem]) -> Iterator[AttentionProblem]:
    return (replace(p, bias=_SCORES, bias_dtype=p.dtype) for p in problems)


def of_fp8(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield forward kernels by mma.sync on e4m3 codes, whose queries have 16 bits or are codes, too."""
    for number, dtype in enumerate(sm80_fp8.DTYPES):
        result = dtype if dtype in HALF_DTYPES else FP8_RESULTS[number % len(FP8_RESULTS)]
        of_all: dict[str, Any] = {"has_fp8_keys": True, "out_dtype": result}
        problems = [*problems_of(FP8, dtype, sm80_forward.HANDLES, **of_all), *_of_few_rows(dtype, of_all)]
        yield from passes_of(_placed(sm80_fp8.forward, problems, capability, limit), dtype)


def _of_few_rows(dtype: str, of_all: dict[str, Any]) -> Iterator[AttentionProblem]:
    """Yield problems of few rows without options, and for the widest heads, which take most registers, with all."""
    by_dims = {
        dims: [line.tile for line in lines if line.tile.splits_warps] for dims, lines in _by_head_dims(FP8).items()
    }
    for dims, tiles in by_dims.items():
        for flags in ((), KNOWN_TO_ALL) if dims == max(by_dims) else ((),):
            yield from (replace(problem_of(dtype, *dims, flags, **of_all), seqlen_q=x.block_m) for x in tiles[:1])


def of_decode(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield the kernels for one query over a cache: of numbers and of codes, in arrays and pages, whole or split."""
    for dims, group, dtype in product(_by_head_dims(DECODE), (1, 16), sm80_fp8.DTYPES):
        for has_codes in (True,) if dtype not in HALF_DTYPES else (False, True):
            result = FP8_RESULTS[group % len(FP8_RESULTS)] if has_codes else None
            of_all: dict[str, Any] = {"has_fp8_keys": has_codes, "out_dtype": result, "softmax_scale": 1.0}
            for flags in ((), decode.HANDLES):
                problem = problem_of(dtype, dims[0], dims[1], flags, **of_all)
                one = replace(problem, seqlen_q=1, num_heads_q=group)
                for own in passes_of((decode.forward(one, True, capability, limit),), dtype):
                    yield own
                    other = {"splits_keys": True, "has_pages": True}
                    yield Pass(tuple((replace(kernel, **other),) for (kernel,) in own.candidates), dtype)


def of_wide(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield the kernels of both passes by mma.sync on wide elements."""
    for kind in sm80_kinds.PARTS_OF:
        dtype = sm80_kinds.dtype_of(kind)
        precision: dict[str, Any] = {"precision": kind} if kind != dtype else {}
        for records, plan in (
            (sm80_wide_tiles.of_forward, sm80_wide.forward),
            (sm80_wide_tiles.of_backward, sm80_wide.backward),
        ):
            problems = problems_of(records(kind, limit), dtype, **precision)
            yield from passes_of((plan(p, True, capability, limit) for p in problems), dtype)
        problems = _with_bias(problems_of(sm80_wide_tiles.of_bias(kind, limit), dtype, **precision))
        yield from passes_of((sm80_wide.of_bias(p, True, capability, limit) for p in problems), dtype)


def of_splits(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield kernels that split keys: those without options but a window, whose splits pay most often."""
    for family in (of_forward, of_fp8):
        for own in family(capability, limit):
            if set(own.candidates[0][0].flags.split(", ")) <= {"plain", "window", "fp8"}:
                of_parts = tuple((replace(kernel, splits_keys=True),) for (kernel,) in own.candidates)
                yield Pass(of_parts, own.dtype)


def of_portable(limit: int) -> Iterator[Pass]:
    """Yield the portable kernels, which compute results of more columns than the widest class in slices."""
    for entry, accum, widest in dict.fromkeys((x.entries[0], x.kind, x.head_dim) for x in PORTABLE):
        widths = (WIDEST, 2 * WIDEST) if widest == WIDEST else (widest or WIDEST,)
        for dtype in (accum,) if accum == "float64" else (*HALF_DTYPES, accum):
            sets = option_sets(f"{entry} {widest} {dtype}", (), _OF_CALLS)
            problems = [
                problem_of(dtype, width, width, [flag for flag in _OF_CALLS if flag in {*flags, _ALWAYS.get(entry)}])
                for flags, width in product(sets, widths)
            ]
            yield from passes_of((portable.plan(problem, entry, limit) for problem in problems), dtype)


# Places are those of parts, which no public call has: they are compiled and checked as parts are.
_OF_CALLS = tuple(flag for flag in portable.HANDLES if flag != "has_place")
# The option that these kernels have always.
_ALWAYS = {"backward_bias": "has_bias"} | dict.fromkeys(OPERAND_ENTRIES, "has_score_mod")


def of_any_gpu(capability: Capability, limit: int) -> Iterator[Pass]:
    """Yield the kernels that a GPU may take and that are not Hopper's own, in the order in which calls ask families."""
    for family in (of_forward, of_fp8, of_decode, of_splits, of_backward, of_wide):
        yield from family(capability, limit)
    yield from of_portable(limit)
