"""The tiles that a user's own mask_mod hides are found on the device, so that kernels skip them as under a block mask.

A launch before the kernels finds of each 64 x 64 block whether it is hidden, shown, or both, in a plane for each batch
and head that the rule tells apart; another one makes the lists of tiles of it. Both are launches of the call, which its
repetitions and graphs repeat, and nothing waits for the host.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.gpu.arguments import Arguments, BoundLaunch
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import Kernel, Work
from cuflash.gpu.params import Arrays, fixed_params, word_of
from cuflash.hardware import WARP, WARPGROUP
from cuflash.kept import Kept
from cuflash.masks.on_device import LIST_TILES
from cuflash.masks.store import CANONICAL, num_blocks
from cuflash.plan.portable.kernels import types_of
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.rules.expression import in_order
from cuflash.rules.form import Rules

_FILE, _ENTRY, _THREADS = "around/rule_blocks", "find_rule_blocks", 256
# Fewer queries or keys have too few tiles for that to pay.
LEAST_ROWS = 1024
# Tiles may be as tall as two blocks, and as wide as one; those that straddle blocks are partial more often.
_BLOCK_SIZE = 2 * CANONICAL, CANONICAL
_POINTER = np.zeros(1, np.uint64)

_launches: Kept[Any, BoundLaunch] = Kept()


def find(work: Work) -> None:
    """Find the blocks of a work whose problem has a mask_mod, where that may pay; its problem is then as `planned`."""
    problem = planned(work.problem)
    if problem is not work.problem:
        blocks = RuleBlocks(work)
        work.problem = problem
        work.rule_blocks = blocks


def planned(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem of the kernels: one with a block mask where the blocks of its mask_mod are found before."""
    fixes_bits = problem.split_size is not None or problem.num_splits is not None
    if problem.rules.visible is None or problem.block_mask or problem.packed or problem.pages is not None or fixes_bits:
        return problem
    if min(problem.seqlen_q, problem.seqlen_k) < LEAST_ROWS or problem.is_empty:
        return problem
    return replace(problem, block_mask=True, block_size=_BLOCK_SIZE, rule_in_blocks=True)


class RuleBlocks:
    """The blocks of one work, and the lists of tiles that its kernels visit."""

    def __init__(self, work: Work) -> None:
        problem = self._problem = work.problem
        self._lists: dict[tuple[int, int], Arrays] = {}
        rules = Rules(None, problem.rules.visible, problem.rules.operands)
        assert rules.visible is not None
        told_apart = {x.value for x in in_order([rules.visible]) if x.op == "input"}
        planes = problem.batch if "b" in told_apart else 1, problem.num_heads_q if "h" in told_apart else 1
        blocks_q, blocks_k = num_blocks(problem.seqlen_q), num_blocks(problem.seqlen_k)
        bits = 1, CANONICAL, CANONICAL // 32
        own = {
            "slots": work.empty((*planes, blocks_q, blocks_k), np.int32),
            "shown": work.empty(bits, np.uint32),
            "mixed": work.empty(bits, np.uint32),
            "fragments": work.empty((1, WARPGROUP), np.uint32),
        }
        self._own = own
        of_rules = work.operands_of(rules)
        layout = tuple([(name, x.strides, x.shape) for name, x in of_rules.items()])
        key = _ENTRY, rules, problem, work.device, layout
        if key not in _launches:
            params = fixed_params(problem, of_rules, rules)
            count = planes[0] * planes[1] * blocks_q * blocks_k
            sizes = *(np.array([n], np.int32) for n in (planes[1], blocks_q, blocks_k)), np.array([count], np.int64)
            types = types_of(problem)
            constants = {name: getattr(types, name) for name in ("element", "accum", "bias_element")}
            kernel = load(_FILE, _ENTRY, {**constants, "num_threads": _THREADS}, work.device, rules=rules)
            grid = (math.ceil(count / (_THREADS // WARP)),)
            words = [word_of(name, rules) for name in of_rules]
            _launches[key] = _bound(kernel, grid, _THREADS, (params, *4 * (_POINTER,), *sizes), (1, 2, 3, 4), words)
        work.enqueue(_launches[key], {**of_rules, **own})

    def arrays(self, work: Work, kernel: Kernel) -> Arrays:
        """Return the members of the parameter struct that a kernel reads of a block mask."""
        config = kernel.config
        tile = config.block_m, config.block_n // getattr(config, "listed", 1)
        if tile not in self._lists:
            self._lists[tile] = self._list_tiles(work, *tile)
        lists = self._lists[tile]
        return {
            "block_list": lists["col_index" if kernel.of_keys else "row_index"],
            "block_count": lists["col_count" if kernel.of_keys else "row_count"],
            "block_slots": self._own["slots"],
            "block_bits": self._own["shown"],
            "fragment_bits": self._own["fragments"],
        }

    def _list_tiles(self, work: Work, block_m: int, block_n: int) -> Arrays:
        problem, slots = self._problem, self._own["slots"]
        planes = slots.shape[:2]
        num_m, num_n = num_blocks(problem.seqlen_q, block_m), num_blocks(problem.seqlen_k, block_n)
        shapes = {
            "row_index": (num_m, num_n),
            "row_count": (num_m,),
            "col_index": (num_n, num_m),
            "col_count": (num_n,),
        }
        lists = {name: work.empty((*planes, *shape), np.int32) for name, shape in shapes.items()}
        sizes = planes[0] * planes[1], problem.seqlen_q, problem.seqlen_k, block_m, block_n, num_m, num_n
        key = LIST_TILES.entry, sizes, work.device
        if key not in _launches:
            kernel = cuda_device.get(LIST_TILES.source, LIST_TILES.entry, LIST_TILES.constants, work.device)
            grid = (math.ceil(sizes[0] * (num_m + num_n) / (LIST_TILES.threads // WARP)),)
            numbers = [np.array([n], np.int32) for n in sizes]
            values = *2 * (_POINTER,), *numbers, *4 * (_POINTER,)
            pointers = 0, 1, *range(2 + len(numbers), 6 + len(numbers))
            _launches[key] = _bound(kernel, grid, LIST_TILES.threads, values, pointers)
        work.enqueue(_launches[key], {"slots": slots, "mixed": self._own["mixed"], **lists})
        return lists


def _bound(
    kernel: cuda_device.LoadedKernel,
    grid: tuple[int, ...],
    threads: int,
    values: tuple[Any, ...],
    pointers: tuple[int, ...],
    words: list[int] | None = None,
) -> BoundLaunch:
    """Return a launch of `values`, of which some are `pointers`; `words` are those of pointers in the first value."""
    begins = 0, *Arguments(values).begins
    launch = kernel.bound(grid, (threads,), [value.nbytes for value in values], 0)
    return BoundLaunch(values, [*(words or ()), *(begins[number] for number in pointers)], launch)
