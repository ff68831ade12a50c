"""Persistent kernels, whose thread blocks take tile after tile, get tensor maps and a counter of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.driver import TENSOR_MAP
from cuflash.gpu.arguments import Words
from cuflash.gpu.launch import ExtraArguments
from cuflash.gpu.params import SCORE_TENSORS, Arrays, word_of
from cuflash.hardware import ALIGNMENT, SWIZZLE_BYTES
from cuflash.kept import Kept
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.problem.attention_problem import Array, AttentionProblem

_COUNTER_WORD = word_of("tile_counter")
# A launch keeps so many sets of maps, as a program that reuses its arrays meets few addresses.
MAX_MAPS = 256
# Launches take counters one after the other, so that one is met again long after its launch has ended. A captured
# launch may run at any time and has a counter of its own.
_NUM_COUNTERS = 1 << 16
_NUM_CAPTURED = 1 << 12


class Box(NamedTuple):
    """A box is what one copy of an array's tensor map brings."""

    name: str  # of the array
    rows: int
    columns: int = 0  # 0: as many as a swizzle is wide
    heads: int = 1
    heads_first: bool = False  # in shared memory the heads of a row follow each other; else the rows of a head


class Persistent(ExtraArguments):
    """The tensor maps and the tile counter of a persistent kernel.

    `boxes` are what a copy of each map brings. Thread blocks come in clusters of `cluster`. With `takers` there are so
    many thread blocks and no counter.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        boxes: Sequence[Box],
        arrays: Arrays,
        device: cuda_device.Device,
        tiles: int,
        cluster: int = 1,
        takers: int | None = None,
    ) -> None:
        counts, takers = takers is None, takers or min(tiles, device.num_sms // cluster)
        super().__init__((takers * cluster,), [np.zeros(1, TENSOR_MAP)] * len(boxes))
        self._counter = TileCounter(device, tiles > takers and counts)
        self._device = device
        self._once = sm90_forward.has_few_queries(problem)
        self._words = tuple([word_of(box.name) for box in boxes])
        self._tiled = [_tiled(problem, box, arrays[box.name]) for box in boxes]
        self._maps = KeptMaps(self._make_maps)

    def _make_maps(self, addresses: tuple[int, ...]) -> list[Array]:
        tiled = zip(addresses, self._tiled, strict=True)
        return [self._device.tensor_map(address, *description, once=self._once) for address, description in tiled]

    def fill(self, words: Words, begins: tuple[int, ...], stream: int) -> None:
        """Write the maps and a free counter, as `ExtraArguments.fill` says."""
        self._counter.put(words, stream)
        maps = self._maps[tuple([words[word] for word in self._words])]
        words[begins[0] : begins[0] + len(maps)] = maps


class KeptMaps(Kept[Any, Words]):
    """The tensor maps of a launch, which `make` makes from a key; at most `MAX_MAPS` sets."""

    def __init__(self, make: Callable[[Any], Sequence[Array]]) -> None:
        super().__init__(MAX_MAPS)
        self._make = make

    def __missing__(self, key: Any) -> Words:
        maps = self[key] = np.concatenate(self._make(key)).view(np.uint64).data
        return maps


class _Tiled(NamedTuple):
    """The description of an array in a tensor map but for its address; the innermost axis comes first."""

    dtype: str
    extents: tuple[int, ...]  # elements along each axis
    strides: tuple[int, ...]  # bytes between elements of each axis but the first
    box: tuple[int, ...]  # elements of one copy along each axis


def _tiled(problem: AttentionProblem, box: Box, x: Array) -> _Tiled:
    name = box.name
    shape, strides = ((1, *x.shape), (0, *x.strides)) if x.ndim == 3 else (x.shape, x.strides)
    if name in SCORE_TENSORS:  # the shape is (batch, heads, rows, columns), and broadcast axes have one element
        dtype, order = "uint8" if name == "mask" else problem.bias_dtype or problem.dtype, (3, 2, 1, 0)
        shape = tuple(1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True))
        if shape[2] == 1:  # every query has the same row
            shape, strides = (*shape[:2], problem.seqlen_q, shape[3]), (*strides[:2], 0, strides[3])
        if box.heads_first and shape[1] == 1:  # every head has the same rows
            shape, strides = (shape[0], problem.num_heads_q, *shape[2:]), (strides[0], 0, *strides[2:])
    else:  # the shape is (batch, seqlen, num_heads, head_dim)
        dtype, order = "uint8" if x.dtype.itemsize == 1 else problem.dtype, (3, 1, 2, 0)
    if box.heads_first:
        order = (order[0], order[2], order[1], order[3])
    axes = list(zip(shape[:-1], strides[:-1], strict=True))
    # TMA wants an axis of size 1 to have the stride of a contiguous outermost axis.
    row_bytes = math.ceil(shape[-1] * x.dtype.itemsize / ALIGNMENT) * ALIGNMENT
    filler = max([row_bytes, *(n * s for n, s in axes if n > 1)])
    formed = [filler if n == 1 else s for n, s in axes]
    rows_and_heads = (box.heads, box.rows) if box.heads_first else (box.rows, box.heads)
    extents = (box.columns or SWIZZLE_BYTES // x.dtype.itemsize, *rows_and_heads, 1)
    return _Tiled(dtype, tuple(shape[i] for i in order), tuple(formed[i] for i in order[1:]), extents)


class TileCounter:
    """The counter by which thread blocks take tiles, where there are more tiles than thread blocks."""

    def __init__(self, device: cuda_device.Device, needed: bool) -> None:
        self._counters = _counters_of(device) if needed else None

    def put(self, words: Words, stream: int) -> None:
        """Write the address of a free counter into the parameters `words` of a launch on a stream."""
        if self._counters is not None:
            words[_COUNTER_WORD] = self._counters.next(stream)


class _Counters:
    """Pairs of counters in a device's memory that are 0 between launches."""

    def __init__(self, device: cuda_device.Device) -> None:
        xp = device.namespace
        self._array = xp.zeros(_NUM_COUNTERS + _NUM_CAPTURED, np.uint64)
        if xp is not np:
            # Other streams use the zeros, too. This wait comes once for each process and device.
            xp.cuda.get_current_stream().synchronize()
        self._capture = device.capture
        self._address = device.pointer(self._array)
        self._launches = count()
        self._captured = count()

    def next(self, stream: int) -> int:
        """Return the address of a free counter, or 0, where thread blocks take tiles by a fixed stride."""
        if self._capture(stream):
            number = next(self._captured)
            return 0 if number >= _NUM_CAPTURED else self._address + 8 * (_NUM_COUNTERS + number)
        return self._address + 8 * (next(self._launches) % _NUM_COUNTERS)


_counters: dict[cuda_device.Device, _Counters] = {}


def _counters_of(device: cuda_device.Device) -> _Counters:
    if device not in _counters:
        _counters[device] = _Counters(device)
    return _counters[device]
