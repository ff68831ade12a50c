"""What launches of Hopper's float32 kernels take: work space with the operands in float16 parts, and maps of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash import kernels, plan_split, plan_split_backward
from cuflash.launch_sm90 import TileCounter
from cuflash.params import PARAMS, word_of
from cuflash.plan_split import HALF_BYTES
from cuflash.problem import Array, AttentionProblem
from cuflash.tensor_map import SWIZZLE_BYTES

ROWS = "split_rows"
Config = plan_split.Config | plan_split_backward.Config
Arrays = dict[str, Array]
# SplitTensor and SplitOperands of cuda_src/sm90/split_layout.cuh.
_TENSOR = np.dtype(
    [
        ("halves", "i8"),
        ("factors", "i8"),
        ("rows", "i4"),
        ("factor_rows", "i4"),
        ("panels", "i4"),
        ("parts", "i4"),
    ]
)
_STRUCT = f"V{PARAMS.itemsize}"
_OPERANDS = np.dtype([*((name, _TENSOR) for name in ("q", "k", "v", "dout")), ("lse", "i8"), ("delta", "i8")])
_SPACE_WORD = word_of("work_space")
# Of cuda_src/sm90/split_rows.cu and split_layout.cuh.
_THREADS = 256
_VECTOR = 4
_LANES = 32
_PANEL = SWIZZLE_BYTES // HALF_BYTES
_ROW_ALIGNMENT = 4
_COLUMN_CLASSES = (64, 128, 256)
# Factors of a whole tile of keys, which is no larger, are copied, also beyond the last row.
_FACTOR_ROWS = 128
_FLOAT_BYTES = 4
# A program that reuses its arrays meets few addresses; the bound keeps others from growing without end.
_MAX_MAPS = 256

# Work space of captured launches: a graph may run at any later time.
_captured: list[Array] = []


class WorkSpace:
    """Where the parts of the operands lie, and the kernel that writes them."""

    def __init__(self, problem: AttentionProblem, config: Config, device: kernels.Device) -> None:
        queries, keys = (problem.seqlen_q, problem.num_heads_q), (problem.seqlen_k, problem.num_heads_kv)
        tensors = [
            ("q", queries, config.head_dim, config.key_parts),
            ("k", keys, config.head_dim, config.key_parts),
            ("v", keys, config.head_dim_v, config.parts),
        ]
        is_backward = isinstance(config, plan_split_backward.Config)
        if is_backward:
            tensors.append(("dout", queries, config.head_dim_v, config.parts))
        columns = next(c for c in _COLUMN_CLASSES if c >= max(config.head_dim, config.head_dim_v))
        rows_of_block = _THREADS // min(columns // _VECTOR, _LANES)
        operands = np.zeros(1, _OPERANDS)
        self._device = device
        self._tensors: list[tuple[int, tuple[int, ...]]] = []
        size = blocks = 0
        for name, (rows, heads), head_dim, parts in tensors:
            panels = math.ceil(head_dim / _PANEL)
            if problem.packed:
                # Sequences, and the padding before and behind them, begin at multiples: split_begin.
                rows = (rows // _ROW_ALIGNMENT + problem.batch + 3) * _ROW_ALIGNMENT
            factor_rows = (math.ceil(rows / _FACTOR_ROWS) + 1) * _FACTOR_ROWS
            images = heads * (1 if problem.packed else problem.batch)
            factors = size + _aligned(images * parts * panels * rows * SWIZZLE_BYTES)
            operands[name] = (size, factors, rows, factor_rows, panels, parts)
            self._tensors.append((size, (_PANEL, rows, parts * panels, images)))
            vector_bytes = _aligned(images * factor_rows * _FLOAT_BYTES)
            size = factors + vector_bytes
            blocks = max(blocks, math.ceil(factor_rows / rows_of_block) * images)
        if is_backward:
            operands["lse"], operands["delta"] = size, size + vector_bytes
            size += 2 * vector_bytes
        self.size = size
        self.operands = operands.view(f"V{_OPERANDS.itemsize}")
        self.grid = (blocks, len(tensors))
        self.block = (_THREADS,)
        constants = {
            "element": config.element,
            "accum": config.accum,
            "bias_element": config.element,
            "columns": columns,
        }
        self.split = kernels.get("sm90/split_rows", ROWS, constants, device)
        self._maps: dict[int, tuple[Array, ...]] = {}

    def maps(self, address: int, boxes: tuple[int, ...]) -> tuple[Array, ...]:
        """Maps of the operands in work space at `address`, for tiles of `boxes` rows."""
        maps = self._maps.get(address)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            maps = self._maps[address] = tuple(
                self._map(address + offset, extents, rows)
                for (offset, extents), rows in zip(self._tensors, boxes, strict=True)
            )
        return maps

    def _map(self, address: int, extents: tuple[int, ...], rows: int) -> Array:
        strides = tuple(math.prod(extents[: axis + 1]) * HALF_BYTES for axis in range(3))
        return self._device.tensor_map(address, "float16", extents, strides, (_PANEL, rows, extents[2], 1))


class SplitLaunch:
    """The changing arguments of the forward kernel on split operands, and the launch that splits them."""

    def __init__(
        self, problem: AttentionProblem, config: plan_split.Config, device: kernels.Device, tiles: int
    ) -> None:
        self.blocks = min(tiles, device.num_sms)
        self._counter = TileCounter(device, tiles > self.blocks)
        self._device = device
        self._space = WorkSpace(problem, config, device)
        self._boxes = (config.block_m, config.block_n, config.block_n)

    def arguments(self, words: np.ndarray[Any, Any]) -> tuple[Array, ...]:
        """Split the operands that the struct `words` names; what follows the struct. It gets the counter of tiles."""
        self._counter.put(words)
        layout = self._space
        space = self._device.empty((layout.size,), np.uint8)
        if self._counter.is_capturing():
            _captured.append(space)
        # The pool hands freed memory to later work of the same stream alone.
        layout.split(layout.grid, layout.block, (words.view(_STRUCT), layout.operands, space))
        return layout.operands, space, *layout.maps(self._device.pointer(space), self._boxes)


class SplitGradientLaunch:
    """The changing arguments of a gradient kernel on split operands in a work space, which the first one fills."""

    def __init__(
        self, problem: AttentionProblem, config: plan_split_backward.Config, device: kernels.Device, tiles: int
    ) -> None:
        self.blocks = min(tiles, device.num_sms)
        self._counter = TileCounter(device, tiles > self.blocks)
        self._space = WorkSpace(problem, config, device)
        queries, keys = config.block_m, config.block_n
        self._boxes = (queries, keys, keys, queries)

    def arguments(self, words: np.ndarray[Any, Any]) -> tuple[Array, ...]:
        """What follows the struct `words`, which gets the counter of tiles."""
        self._counter.put(words)
        return self._space.operands, *self._space.maps(int(words[_SPACE_WORD]), self._boxes)


class SplitRowsLaunch:
    """The launch that fills the work space of gradient kernels."""

    def __init__(
        self, problem: AttentionProblem, config: plan_split_backward.Config, device: kernels.Device, blocks: int
    ) -> None:
        self.blocks = blocks
        self._space = WorkSpace(problem, config, device)

    def launched(self) -> tuple[kernels.Kernel, tuple[int, ...], tuple[int, ...]]:
        """The kernel, its grid and its block."""
        return self._space.split, self._space.grid, self._space.block

    def arguments(self, words: np.ndarray[Any, Any]) -> tuple[Array, ...]:
        """What follows the struct `words`."""
        return self._space.operands, words[_SPACE_WORD]


def gradients(
    run: Callable[..., object],
    problem: AttentionProblem,
    configs: tuple[plan_split_backward.Config, ...],
    arrays: Arrays,
    by_rows: Arrays,
    of_keys: Arrays,
    empty: Callable[[tuple[int, ...], Any], Array],
    device: kernels.Device,
) -> None:
    """Write what is in `by_rows` (dq and parts of the slopes' gradient) and `of_keys` (dk and dv).

    `run` launches an entry on arrays, delta among them; `empty` makes scratch memory.
    """
    arrays = {**arrays, "work_space": empty((WorkSpace(problem, configs[0], device).size,), np.uint8)}
    run(ROWS, arrays=arrays, chosen=configs[0])
    for config in configs:
        names = plan_split_backward.KEY_KERNELS.get(config.entry)
        wanted = by_rows if names is None else {name: x for name, x in of_keys.items() if name in names}
        if wanted:
            run(config.entry, arrays={**arrays, **wanted}, chosen=config)


def _aligned(size: int) -> int:
    return math.ceil(size / SWIZZLE_BYTES) * SWIZZLE_BYTES
