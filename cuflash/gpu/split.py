"""Launches on float32 operands in float16 parts, with the work space that holds the parts, and Hopper's kernels.

`sm80` uses the same work space for its kernels on parts, and `run_passes` for all that have a kernel for each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.driver import TENSOR_MAP
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu.arguments import Words
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import ExtraArguments, Kernel, Work, batch_heads
from cuflash.gpu.params import Arrays, word_of
from cuflash.gpu.persistent import KeptMaps, TileCounter
from cuflash.gpu.portable import WithoutTiles
from cuflash.gpu.split_layout import OPERANDS, ROW_ALIGNMENT
from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, PANEL, SWIZZLE_BYTES, whole_rows
from cuflash.plan.entries import file_of, key_results
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm90 import order as sm90_order
from cuflash.plan.split import kernels as plan_split
from cuflash.problem.attention_problem import Array, AttentionProblem

ROWS, CHANNELS = "split_rows", "split_channels"
PartsConfig = plan_split.SplitConfig | sm80_wide.WideConfig
_SPACE_WORD = word_of("work_space")
# These are numbers of split/rows.cu and split/channels.cu.
_THREADS = 256  # threads of a thread block
_VECTOR = 4  # elements of a vector
_LANES = 32  # most lanes of a row
_COLUMN_CLASSES = (64, 128, 256)
_TABLES = "key_channels", "value_channels"  # factors of channels, as members of OPERANDS
# The factors of a tile of keys are copied as a whole, so their rows are padded to a multiple of this number.
_FACTOR_ROWS = 128


class WorkSpace:
    """The places of the operands' parts in work space, its size, and tensor maps of it."""

    def __init__(self, problem: AttentionProblem, config: PartsConfig, device: cuda_device.Device) -> None:
        queries, keys = (problem.seqlen_q, problem.num_heads_q), (problem.seqlen_k, problem.num_heads_kv)
        tensors = [
            ("q", queries, config.head_dim, config.key_parts),
            ("k", keys, config.head_dim, config.key_parts),
            ("v", keys, config.head_dim_v, config.parts),
        ]
        is_backward = _is_backward(config)
        if is_backward:
            tensors.append(("dout", queries, config.head_dim_v, config.parts))
        rows_of_block = _THREADS // min(_columns(config) // _VECTOR, _LANES)
        operands = np.zeros(1, OPERANDS.dtype)
        self._device = device
        self._tensors: list[tuple[int, tuple[int, ...]]] = []
        size, blocks = whole_rows(OPERANDS.dtype.itemsize), 0
        for name, (rows, heads), head_dim, parts in tensors:
            panels = math.ceil(head_dim / PANEL)
            if problem.packed:
                # Sequences, and the padding between them, begin at multiples of rows: split_begin.
                rows = (rows // ROW_ALIGNMENT + problem.batch + 3) * ROW_ALIGNMENT
            factor_rows = (math.ceil(rows / _FACTOR_ROWS) + 1) * _FACTOR_ROWS
            count = batch_heads(problem, heads)
            factors = size + whole_rows(count * parts * panels * rows * SWIZZLE_BYTES)
            operands[name] = (size, factors, rows, factor_rows, panels, parts)
            self._tensors.append((size, (PANEL, rows, parts * panels, count)))
            vector_bytes = whole_rows(count * factor_rows * FLOAT_BYTES)
            size = factors + vector_bytes
            blocks = max(blocks, math.ceil(factor_rows / rows_of_block) * count)
        if is_backward:
            operands["lse"], operands["delta"] = size, size + vector_bytes
            size += 2 * vector_bytes
        count = batch_heads(problem, problem.num_heads_kv)
        if _has_channels(problem):
            columns = _columns(config)
            operands["channel_columns"] = columns
            for name in _TABLES:
                operands[name] = size
                size += whole_rows(count * (columns + _VECTOR) * FLOAT_BYTES)
        self.channels_grid = (count, len(_TABLES))
        self.size = size
        self.operands = operands.view(f"V{OPERANDS.dtype.itemsize}")
        self.grid = (blocks, len(tensors))
        # The maps' keys are the work space's address and the boxes of `OnOperands`.
        self.maps = KeptMaps(self._make_maps)

    def _make_maps(self, address_and_boxes: tuple[int, Sequence[int]]) -> list[Array]:
        address, boxes = address_and_boxes
        tensors = zip(self._tensors, boxes, strict=True)
        return [self._map(address + offset, extents, rows) for (offset, extents), rows in tensors]

    def _map(self, address: int, extents: tuple[int, ...], rows: int) -> Array:
        strides = tuple(math.prod(extents[: axis + 1]) * HALF_BYTES for axis in range(3))
        return self._device.tensor_map(address, "float16", extents, strides, (PANEL, rows, extents[2], 1))


class OnOperands(ExtraArguments):
    """The arguments of the operands' places in a work space, its address if `with_space`, and tensor maps.

    `boxes` are the rows of a copy of each operand; without them there are no maps.
    """

    def __init__(
        self,
        grid: tuple[int, ...],
        space: WorkSpace,
        with_space: bool,
        boxes: tuple[int, ...] = (),
        counter: TileCounter | None = None,
    ) -> None:
        maps = [np.zeros(1, TENSOR_MAP)] * len(boxes)
        super().__init__(grid, [space.operands, *([np.zeros(1, np.uint64)] if with_space else []), *maps])
        self._space, self._with_space, self._boxes, self._counter = space, with_space, boxes, counter

    def fill(self, words: Words, begins: tuple[int, ...], stream: int) -> None:
        """Write the address, the maps and a free counter, as `ExtraArguments.fill` says."""
        address = words[_SPACE_WORD]
        if self._with_space:
            words[begins[1]] = address
        if self._boxes:
            maps = self._space.maps[address, self._boxes]
            words[begins[-len(self._boxes)] : begins[-len(self._boxes)] + len(maps)] = maps
        if self._counter is not None:
            self._counter.put(words, stream)


@dataclass(frozen=True)
class OfWorkSpace(WithoutTiles):
    """A kernel that fills the work space."""

    config: PartsConfig
    threads = _THREADS

    def grid_of(self, problem: AttentionProblem, space: WorkSpace) -> tuple[int, ...]:
        """Return the grid of thread blocks."""
        raise NotImplementedError

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> OnOperands:
        """Return the operands' places in work space."""
        space = WorkSpace(problem, self.config, device)
        return OnOperands(self.grid_of(problem, space), space, True)

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which many configurations share."""
        constants = gpu_portable.constants_of_sums(self.config) | {
            "columns": _columns(self.config),
            "threads": self.threads,
        }
        return load(file_of(self.entry), self.entry, constants, device)


class FindChannels(OfWorkSpace):
    """The kernel that finds the factors of channels."""

    def grid_of(self, problem: AttentionProblem, space: WorkSpace) -> tuple[int, ...]:
        """Return a thread block for each table of each KV head."""
        return space.channels_grid


@dataclass(frozen=True)
class Split(OfWorkSpace):
    """The kernel that splits operands into parts.

    It may begin while `FindChannels` runs, and only then, as it reads its rows before it waits.
    """

    begins_early: bool = False

    def grid_of(self, problem: AttentionProblem, space: WorkSpace) -> tuple[int, ...]:
        """Return groups of rows of each operand."""
        return space.grid


@dataclass(frozen=True)
class Forward(Kernel):
    """The forward kernel."""

    config: plan_split.SplitForwardConfig
    begins_early = True

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the number of heads whose tiles are mixed, which gives the order of tiles."""
        return {"num_grouped_heads": sm90_order.of_queries(problem)}

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> OnOperands:
        """Return tensor maps of q, k and v."""
        m, n = self.config.block_m, self.config.block_n
        blocks = min(tiles, device.num_sms)
        space = WorkSpace(problem, self.config, device)
        return OnOperands((blocks,), space, True, (m, n, n), TileCounter(device, tiles > blocks))


@dataclass(frozen=True)
class Gradient(Kernel):
    """The kernel of one gradient."""

    config: plan_split.SplitGradientConfig
    orders_bits = False
    begins_early = True

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the number of heads whose tiles are mixed, which gives the order of tiles."""
        number_of = sm90_order.of_keys if self.of_keys else sm90_order.of_queries
        return {"num_grouped_heads": number_of(problem)}

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> OnOperands:
        """Return tensor maps of q, k, v and dout."""
        m, n = self.config.block_m, self.config.block_n
        blocks = min(tiles, device.num_sms)
        space = WorkSpace(problem, self.config, device)
        return OnOperands((blocks,), space, False, (m, n, n, m), TileCounter(device, tiles > blocks))


def forward(work: Work) -> bool:
    """Write out and lse; False where another family runs."""
    configs = plan_split.forward(work.problem) if work.device.has_wgmma else ()
    kernel = work.chosen_or_none(Forward(config.entry, config) for config in configs)
    if kernel is None:
        return False
    work.run(kernel, split(work, kernel.config))
    return True


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv, delta and the slopes' rows; return the gradients left, None where another family runs."""
    passes = plan_split.backward(work.problem) if work.device.has_wgmma else ()
    candidates = [tuple(Gradient(config.entry, config) for config in each) for each in passes]
    return run_passes(work, with_dlse, grads, work.chosen_pass(candidates, others_serve=True))


def run_passes(work: Work, with_dlse: Arrays, grads: Arrays, kernels: Sequence[Kernel]) -> Arrays | None:
    """Do as `backward` does, by these kernels, of which that for dq is the first."""
    if not kernels:
        return None
    gpu_portable.delta(work, with_dlse)
    work.arrays |= gpu_portable.rows_of_slopes(work, grads)
    arrays: Arrays = {}
    for kernel in kernels:
        names = key_results(kernel.entry) or ("dq",)
        wanted = {name: grads[name[1:]] for name in names if name[1:] in grads}
        if wanted or (not kernel.of_keys and "dslope_rows" in work.arrays):
            arrays = arrays or split(work, kernel.config)
            work.run(kernel, arrays | wanted)
    return {name: x for name, x in grads.items() if name not in ("q", "k", "v")}


def split(work: Work, config: Any) -> Arrays:
    """Return the arrays for a kernel; where it takes the operands' parts, fill the work space first."""
    if not getattr(config, "parts", 0):
        return work.arrays
    size = WorkSpace(work.problem, config, work.device).size
    if (
        "work_space" not in work.arrays or work.arrays["work_space"].size != size
    ):  # parts of as many columns serve again
        work.arrays["work_space"] = work.empty((size,), np.uint8)
        has_channels = _has_channels(work.problem)
        if has_channels:
            work.run(FindChannels(CHANNELS, config), work.arrays)
        work.run(Split(ROWS, config, begins_early=has_channels), work.arrays)
    return work.arrays


def _has_channels(problem: AttentionProblem) -> bool:
    """Return True if channels have factors, which follow from all queries of a head.

    With splits of one size a row's bits may depend on nothing but its own sequence.
    """
    return problem.split_size is None


def _is_backward(config: PartsConfig) -> bool:
    return isinstance(config, plan_split.SplitGradientConfig | sm80_wide.WideGradientConfig)


def _columns(config: PartsConfig) -> int:
    return next(c for c in _COLUMN_CLASSES if c >= max(config.head_dim, config.head_dim_v))
