"""The CPU path: attention and its gradients tile by tile on all cores, in NumPy alone.

A task of the forward pass writes a block of rows. Backward, a task writes dq of some rows of a few heads; its share of
other sums is added in the order of the tasks, whatever the number of cores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import at_once
from cuflash.cpu.append import append
from cuflash.cpu.forward import forward_block
from cuflash.cpu.gradients import Backward
from cuflash.cpu.own_rules import OperandSums, sizes_of
from cuflash.cpu.pages import PoolSums
from cuflash.cpu.parts import merge_parts, sum_parts
from cuflash.cpu.scores import by_query_head, like_bias, sink_rows, split_heads
from cuflash.cpu.threads import InOrder, Workspace, run_tasks
from cuflash.cpu.tiles import Block, Sequence, Tile, Tiling
from cuflash.cpu.work import Work
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.heads import Heads
from cuflash.problem.operands import Operands

Array = NDArray[Any]
__all__ = ["append", "backward", "expect_gradients", "forward", "merge_parts", "sum_parts"]  # what every backend has


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> None:
    """Write out and, if wanted, lse, which may have any strides."""
    parts = at_once.cut(problem, operands.kv_lengths)
    if parts is None:
        _forward_in_tiles(problem, operands, out, lse)
        return
    extreme = at_once.forward(problem, operands, parts, out, lse)
    if extreme is not None:
        _again_in_tiles(problem, operands, extreme, out, lse)


def _again_in_tiles(problem: AttentionProblem, operands: Operands, rows: Array, out: Array, lse: Array | None) -> None:
    """Compute all rows anew, and write those that `rows` names, an array like lse."""
    own_out = np.empty(out.shape, out.dtype)
    own_lse = None if lse is None else np.empty(lse.shape, lse.dtype)
    _forward_in_tiles(problem, operands, own_out, own_lse)
    np.copyto(out, own_out, where=rows.swapaxes(1, 2)[..., None])
    if lse is not None and own_lse is not None:
        np.copyto(lse, own_lse, where=rows)


def _forward_in_tiles(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> None:
    tiling = Tiling(problem, operands, together=True)
    if problem.packed or problem.q_lengths:  # rows beyond a length or outside every sequence
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
    blocks = tiling.blocks()

    def task(number: int, workspace: Workspace) -> None:
        forward_block(tiling, blocks[number], workspace, out, lse)

    work = Work(lambda: tiling.num_scores(blocks))
    run_tasks(len(blocks), task, tiling.num_tasks > 1, work)
    work.end()


class Task(NamedTuple):
    """Rows of some heads of one sequence."""

    sequence: Sequence
    heads: Heads
    row: int
    row_stop: int
    is_last: bool  # no later task adds to the same dk and dv


@dataclass
class Share:
    """The terms that a task adds to sums over tasks."""

    kv: dict[str, Array] = field(default_factory=dict)  # "k", "v": (KV heads, keys, dim)
    heads: dict[str, Array] = field(default_factory=dict)  # "sink", "alibi_slopes": (query heads,)
    bias: Array | None = None  # (query heads | 1, rows | 1, keys | 1), at least one of the last two 1
    operands: OperandSums = field(default_factory=lambda: OperandSums({}))


def expect_gradients(problem: AttentionProblem, operands: Operands, out: Array, lse: Array) -> None:
    """Do nothing, as NumPy's path compiles nothing."""


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
) -> None:
    """Write the wanted gradients, those of bias and slopes of the full rank of `Operands`.

    P is recomputed from lse: out and lse may come from a merge with other keys.
    """
    # No task writes padding, keys that nobody sees or sequences without rows.
    for grad in grads.values():
        grad[...] = 0
    backward_call = Backward(Tiling(problem, operands), dout, out, lse, dlse, frozenset(grads))
    grads_of_main, grad_of_panels = _split(problem, grads)
    main = _Main(backward_call, grads_of_main) if grads_of_main else None
    panels = [] if grad_of_panels is None else _panels(backward_call.tiling, grad_of_panels.shape)

    def count() -> int:
        of_main = () if main is None else main.blocks()
        return backward_call.tiling.num_scores(chain(of_main, *(panel.blocks for panel in panels)))

    work = Work(count)
    if main is not None:
        main.run(work)
    if grad_of_panels is not None:
        _bias_panels(backward_call, grad_of_panels, panels, work)
    work.end()


def _split(problem: AttentionProblem, grads: dict[str, Array]) -> tuple[dict[str, Array], Array | None]:
    """Return the gradients of the main pass, and a dbias that is summed over batch or heads, which has its own pass."""
    shape = problem.bias
    if shape is None or "bias" not in grads:
        return grads, None
    is_matrix = shape[2] > 1 and shape[3] > 1
    is_summed = (shape[0] == 1 and problem.batch > 1) or (shape[1] == 1 and problem.num_heads_q > 1)
    if not (is_matrix and is_summed):
        return grads, None
    return {name: grad for name, grad in grads.items() if name != "bias"}, grads["bias"]


class _Main:
    """The main pass computes every gradient but a dbias that has a pass of its own."""

    def __init__(self, call: Backward, grads: dict[str, Array]) -> None:
        self.call = call
        self.tiling = call.tiling
        self.tasks = self._tasks()
        self.grads = grads
        self.order = InOrder()
        self.kv_sums: dict[str, Array] = {}
        self.pool_sums: PoolSums | None = None
        problem = self.tiling.problem
        if problem.pages is not None:
            of_keys = {name: grad for name, grad in grads.items() if name in ("k", "v")}
            self.pool_sums = PoolSums(problem.pages, self.tiling.operands, of_keys, problem.accum_dtype)
        # These few numbers are sums of many terms.
        self.head_sums: dict[str, Array] = {
            name: np.zeros(grads[name].shape) for name in ("sink", "alibi_slopes") if name in grads
        }
        self.of_operands = {name: grads[name] for name in call.tiling.problem.operand_grads if name in grads}
        self.operand_sums = OperandSums.of_all_tasks(self.of_operands)
        self.bias_sum: Array | None = None
        if "bias" in grads and not self.bias_in_place:
            self.bias_sum = np.zeros(grads["bias"].shape)

    @property
    def bias_in_place(self) -> bool:
        """True if each tile of dbias is written by one task only."""
        shape = self.grads["bias"].shape
        return shape[2] > 1 and shape[3] > 1

    def _tasks(self) -> list[Task]:
        tiling = self.tiling
        head_blocks = tiling.head_blocks
        parts = -(-tiling.num_tasks // max(1, len(tiling.sequences) * len(head_blocks)))
        tasks = []
        for sequence in tiling.sequences:
            blocks = -(-sequence.rows // tiling.block_rows)
            step = max(1, -(-blocks // parts)) * tiling.block_rows
            for index, heads in enumerate(head_blocks):
                is_last_of_kv = index + 1 == len(head_blocks) or head_blocks[index + 1].first_kv != heads.first_kv
                for row in reversed(range(0, sequence.rows, step)):
                    stop = min(row + step, sequence.rows)
                    tasks.append(Task(sequence, heads, row, stop, is_last_of_kv and row == 0))
        return tasks

    def _blocks_of(self, task: Task) -> Iterator[Block]:
        step = self.tiling.block_rows
        for row in range(task.row, task.row_stop, step):
            yield Block(task.sequence, task.heads, row, min(row + step, task.row_stop))

    def blocks(self) -> Iterator[Block]:
        """The blocks of all tasks."""
        return chain.from_iterable(map(self._blocks_of, self.tasks))

    @np.errstate(all="ignore")  # casts of the sums may overflow
    def run(self, work: Work) -> None:
        run_tasks(len(self.tasks), self._task, self.tiling.num_tasks > 1, work)
        for name, total in self.head_sums.items():
            self.grads[name][...] = total
        if self.pool_sums is not None:
            self.pool_sums.write()
        if self.bias_sum is not None:
            self.grads["bias"][...] = self.bias_sum
        self.operand_sums.write(self.of_operands)

    def _task(self, number: int, workspace: Workspace) -> None:
        task = self.tasks[number]
        share = self._empty_share(task)
        for block in self._blocks_of(task):
            self._block(block, share, workspace)
        self.order.submit(number, functools.partial(self._add, task, share))

    def _empty_share(self, task: Task) -> Share:
        problem, heads, keys = self.tiling.problem, task.heads, task.sequence.keys
        kv_heads, query_heads = heads.stop_kv - heads.first_kv, heads.stop - heads.first
        share = Share(heads={name: np.zeros(query_heads) for name in self.head_sums})
        share.operands = OperandSums(sizes_of(self.of_operands))
        for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
            if name in self.grads:
                share.kv[name] = np.zeros((kv_heads, keys, dim), problem.accum_dtype)
        if self.bias_sum is not None:
            sizes = query_heads, task.sequence.rows, keys
            shape = tuple(1 if whole == 1 else size for whole, size in zip(self.bias_sum.shape[1:], sizes, strict=True))
            share.bias = np.zeros(shape)
        return share

    def _block(self, block: Block, share: Share, workspace: Workspace) -> None:
        tiling, heads = self.tiling, block.heads
        rows = self.call.load(block, workspace)
        if "sink" in share.heads:
            weight = np.exp(sink_rows(tiling, block) - rows.lse)
            if rows.norm is not None:
                weight *= rows.norm
            share.heads["sink"] -= by_query_head(weight * rows.delta, heads).sum(axis=1)
        dq = np.zeros_like(rows.q)
        for tile in workspace.work.each(tiling.tiles(block)):
            within = tile.rows_within(block)
            found = self.call.gradients(tile, rows.part(within), workspace, with_operands=bool(self.of_operands))
            if found is None:
                continue
            for stretch in found.operands:
                share.operands.add(stretch)
            if "v" in share.kv:
                share.kv["v"][:, tile.keys] += found.p @ found.dout
            if found.dproducts is not None:
                if "k" in share.kv:
                    share.kv["k"][:, tile.keys] += found.dproducts @ found.q
                if "q" in self.grads:
                    dq[:, within] += found.dproducts.swapaxes(1, 2) @ found.k
            if found.ds is not None:
                if "alibi_slopes" in share.heads and found.distance is not None:
                    terms = split_heads(found.ds, heads) * found.distance
                    share.heads["alibi_slopes"] -= terms.sum(axis=(1, 3)).ravel()
                if "bias" in self.grads:
                    self._bias_tile(tile, like_bias(found.ds, heads), share)
        if "q" in self.grads:
            dq *= tiling.problem.softmax_scale
            own = tiling.of_sequence(self.grads["q"], block.sequence)[0]
            own[block.rows, heads.query] = by_query_head(dq, heads).swapaxes(0, 1)

    def _bias_tile(self, tile: Tile, ds: Array, share: Share) -> None:
        if share.bias is None:
            target = self.grads["bias"]
            target[tile.place_in(target.shape)] = ds
            return
        summed = tuple(axis for axis in range(3) if share.bias.shape[axis] == 1)
        rows = tile.block.rows if share.bias.shape[1] > 1 else slice(None)
        keys = tile.keys if share.bias.shape[2] > 1 else slice(None)
        share.bias[:, rows, keys] += ds.sum(axis=summed, keepdims=True)

    def _add(self, task: Task, share: Share) -> None:
        sequence, heads = task.sequence, task.heads
        for name, part in share.kv.items():
            # The tasks of one sequence and KV head follow each other.
            if name in self.kv_sums:
                self.kv_sums[name] += part
            else:
                self.kv_sums[name] = part
            if not task.is_last:
                continue
            if self.pool_sums is not None:
                self.pool_sums.add(name, sequence.batch, heads.kv, self.kv_sums.pop(name))
            else:
                own = self.tiling.of_sequence(self.grads[name], sequence, is_kv=True)[0]
                own[: sequence.keys, heads.kv] = self.kv_sums.pop(name).swapaxes(0, 1)
        for name, part in share.heads.items():
            total = self.head_sums[name]
            if total.ndim == 2:
                total = total[sequence.batch if len(total) > 1 else 0]
            total[heads.query] += part
        self.operand_sums.add_all(share.operands)
        if self.bias_sum is not None and share.bias is not None:
            whole = Tile(Block(sequence, heads, 0, sequence.rows), 0, sequence.keys, False)
            self.bias_sum[whole.place_in(self.bias_sum.shape)] += share.bias


class Panel(NamedTuple):
    """Rows of dbias, and the blocks of scores that they are the sum over."""

    batch: int
    head: int
    row: int
    blocks: list[Block]


def _panels(tiling: Tiling, shape: tuple[int, ...]) -> list[Panel]:
    """The panels of a dbias of shape (batch | 1, heads | 1, rows, keys)."""
    step = tiling.block_rows
    panels = []
    for batch, head, row in product(range(shape[0]), range(shape[1]), range(0, shape[2], step)):
        sequences = tiling.sequences if shape[0] == 1 else tiling.sequences[batch : batch + 1]
        kv_head = head // tiling.problem.group_size
        all_heads = tiling.head_blocks if shape[1] == 1 else [Heads(head, head + 1, kv_head, kv_head + 1)]
        blocks = [
            Block(sequence, heads, row, min(row + step, sequence.rows))
            for sequence, heads in product(sequences, all_heads)
            if row < sequence.rows
        ]
        panels.append(Panel(batch, head, row, blocks))
    return panels


def _bias_panels(call: Backward, target: Array, panels: list[Panel], work: Work) -> None:
    """Write dbias (batch | 1, heads | 1, rows, keys), a block of rows at a time."""
    tiling = call.tiling
    step = tiling.block_rows

    def task(number: int, workspace: Workspace) -> None:
        batch, head, row, blocks = panels[number]
        panel = np.zeros((min(step, target.shape[2] - row), target.shape[3]), tiling.problem.accum_dtype)
        for block in blocks:
            rows = call.load(block, workspace)
            for tile in workspace.work.each(tiling.tiles(block)):
                found = call.gradients(tile, rows.part(tile.rows_within(block)), workspace)
                if found is not None and found.ds is not None:
                    within = slice(tile.block.row - row, tile.block.row_stop - row)
                    panel[within, tile.keys] += like_bias(found.ds, block.heads).sum(axis=0)
        target[batch, head, row : row + len(panel)] = panel

    run_tasks(len(panels), task, tiling.num_tasks > 1, work)
