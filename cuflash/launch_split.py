"""What a launch of Hopper's float32 kernels takes: work space with the operands as float16 pairs, and maps of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash import kernels
from cuflash.launch_sm90 import TileCounter
from cuflash.params import PARAMS
from cuflash.plan_split import HALF_BYTES, Config
from cuflash.problem import Array, AttentionProblem
from cuflash.tensor_map import SWIZZLE_BYTES

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
_OPERANDS = np.dtype([(name, _TENSOR) for name in ("q", "k", "v")])
# Of cuda_src/sm90/split_rows.cu and split_layout.cuh.
_THREADS = 256
_VECTOR = 4
_PANEL = SWIZZLE_BYTES // HALF_BYTES
_ROW_ALIGNMENT = 4
# Factors of a whole tile of keys, which is no larger, are copied, also beyond the last row.
_FACTOR_ROWS = 128
_FLOAT_BYTES = 4
_COLUMN_CLASSES = (64, 128, 256)
# A program that reuses its arrays meets few addresses; the bound keeps others from growing without end.
_MAX_MAPS = 256

# Work space of captured launches: a graph may run at any later time.
_captured: list[Array] = []


class SplitLaunch:
    """The changing arguments of one kernel on split operands, and the launch that splits them."""

    def __init__(self, problem: AttentionProblem, config: Config, device: kernels.Device, tiles: int) -> None:
        self.blocks = min(tiles, device.num_sms)
        self._counter = TileCounter(device, tiles > self.blocks)
        self._device = device
        batches = 1 if problem.packed else problem.batch
        tensors = (
            (problem.seqlen_q, problem.num_heads_q, config.head_dim, config.key_parts),
            (problem.seqlen_k, problem.num_heads_kv, config.head_dim, config.key_parts),
            (problem.seqlen_k, problem.num_heads_kv, config.head_dim_v, config.parts),
        )
        operands = np.zeros(1, _OPERANDS)
        self._extents: list[tuple[int, int, int, int]] = []
        self._boxes = (config.block_m, config.block_n, config.block_n)
        size = 0
        blocks = 0
        columns = next(c for c in _COLUMN_CLASSES if c >= max(config.head_dim, config.head_dim_v))
        rows_of_block = _THREADS // min(columns // _VECTOR, 32)
        for name, (rows, heads, head_dim, parts) in zip("qkv", tensors, strict=True):
            panels = math.ceil(head_dim / _PANEL)
            if problem.packed:
                # Sequences, and the padding before and behind them, begin at multiples: split_begin.
                rows = (rows // _ROW_ALIGNMENT + problem.batch + 3) * _ROW_ALIGNMENT
            factor_rows = (math.ceil(rows / _FACTOR_ROWS) + 1) * _FACTOR_ROWS
            images = batches * heads
            factors = size + _aligned(images * parts * panels * rows * SWIZZLE_BYTES)
            operands[name] = (size, factors, rows, factor_rows, panels, parts)
            size = factors + _aligned(images * factor_rows * _FLOAT_BYTES)
            self._extents.append((_PANEL, rows, parts * panels, images))
            blocks = max(blocks, math.ceil(factor_rows / rows_of_block) * images)
        self._size = size
        self._operands = operands.view(f"V{_OPERANDS.itemsize}")
        self._offsets = tuple(int(operands[name]["halves"][0]) for name in "qkv")
        self._split_grid = (blocks, len(tensors))
        self._split = kernels.get(
            "sm90/split_rows",
            "split_rows",
            {
                "element": config.element,
                "accum": config.accum,
                "bias_element": config.element,
                "columns": columns,
            },
            device,
        )
        self._maps: dict[int, tuple[Array, ...]] = {}

    def arguments(self, words: np.ndarray[Any, Any]) -> tuple[Array, ...]:
        """Split the operands that the struct `words` names; what follows the struct. It gets the counter of tiles."""
        self._counter.put(words)
        space = self._device.empty((self._size,), np.uint8)
        if self._counter.is_capturing():
            _captured.append(space)
        address = self._device.pointer(space)
        maps = self._maps.get(address)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            maps = self._maps[address] = self._maps_at(address)
        self._split(self._split_grid, (_THREADS,), (words.view(_STRUCT), self._operands, space))
        return self._operands, space, *maps

    def _maps_at(self, address: int) -> tuple[Array, ...]:
        maps = []
        for offset, extents, rows in zip(self._offsets, self._extents, self._boxes, strict=True):
            strides = tuple(math.prod(extents[: axis + 1]) * HALF_BYTES for axis in range(3))
            box = (_PANEL, rows, extents[2], 1)
            maps.append(self._device.tensor_map(address + offset, "float16", extents, strides, box))
        return tuple(maps)


def _aligned(size: int) -> int:
    return math.ceil(size / SWIZZLE_BYTES) * SWIZZLE_BYTES
