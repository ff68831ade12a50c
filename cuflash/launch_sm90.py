"""What a launch of Hopper's kernels takes beside the parameter struct: tensor maps, and a counter of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from cuflash import kernels, plan_sm90
from cuflash.params import word_of
from cuflash.plan_sm90 import Config
from cuflash.problem import Array, AttentionProblem
from cuflash.tensor_map import ALIGNMENT, SWIZZLE_BYTES

Maps = tuple[Array, ...]
_COUNTER_WORD = word_of("tile_counter")
# A program that reuses its arrays meets few addresses; the bound keeps others from growing without end.
_MAX_MAPS = 256
# Launches take counters in turn, so that one is only met again when the launch before it is long over. A captured
# launch may run at any later time, so it has a counter of its own.
_NUM_COUNTERS = 1 << 16
_NUM_CAPTURED = 1 << 12


class PersistentLaunch:
    """The changing arguments of one kernel whose thread blocks stay and take tile after tile.

    `tiles_of` names the arrays that TMA reads, in the order of the kernel's maps, with the rows of their tiles.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        tiles_of: Sequence[tuple[str, int]],
        arrays: dict[str, Array],
        device: kernels.Device,
        tiles: int,
    ) -> None:
        self.blocks = min(tiles, device.num_sms)
        self._counter = TileCounter(device, tiles > self.blocks)
        self._device = device
        self._words = tuple(word_of(name) for name, _ in tiles_of)
        self._tiled = tuple(_tiled(problem, name, arrays[name], rows) for name, rows in tiles_of)
        self._maps: dict[tuple[int, ...], Maps] = {}

    def arguments(self, words: np.ndarray[Any, Any]) -> Maps:
        """The arguments behind the struct whose `words` have the arrays' addresses, and get the counter's."""
        self._counter.put(words)
        addresses = tuple([int(words[word]) for word in self._words])
        maps = self._maps.get(addresses)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            maps = self._maps[addresses] = tuple(
                self._device.tensor_map(address, *tiled) for address, tiled in zip(addresses, self._tiled, strict=True)
            )
        return maps


class _Tiled(NamedTuple):
    """What a tensor map says of an array beside its address; the innermost axis comes first."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # of all axes but the first
    box: tuple[int, ...]


def _tiled(problem: AttentionProblem, name: str, x: Array, rows: int) -> _Tiled:
    shape, strides = ((1, *x.shape), (0, *x.strides)) if x.ndim == 3 else (x.shape, x.strides)
    if name == "bias":  # (batch, heads, rows, columns), of which broadcast axes have one element
        dtype, order = problem.bias_dtype or problem.dtype, (3, 2, 1, 0)
        shape = tuple(1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True))
    else:  # (batch, seqlen, num_heads, head_dim)
        dtype, order = problem.dtype, (3, 1, 2, 0)
    axes = list(zip(shape[:-1], strides[:-1], strict=True))
    # The stride of an axis of size 1 means nothing, but TMA wants it well formed: that of a contiguous outermost axis.
    row_bytes = math.ceil(shape[-1] * x.dtype.itemsize / ALIGNMENT) * ALIGNMENT
    filler = max([row_bytes, *(n * s for n, s in axes if n > 1)])
    formed = [filler if n == 1 else s for n, s in axes]
    one_row = name == "bias" and shape[order[1]] == 1
    box = (SWIZZLE_BYTES // x.dtype.itemsize, 1 if one_row else rows, 1, 1)
    return _Tiled(dtype, tuple(shape[i] for i in order), tuple(formed[i] for i in order[1:]), box)


def heads_as_rows(problem: AttentionProblem, arrays: dict[str, Array]) -> tuple[AttentionProblem, dict[str, Array]]:
    """What `plan_sm90.heads_as_rows` makes of a problem, and views of the arrays as it sees them."""
    seen = plan_sm90.heads_as_rows(problem)
    if seen is problem:
        return problem, arrays
    heads, rows = seen.num_heads_kv, seen.seqlen_q
    q, out, lse = arrays["q"], arrays["out"], arrays["lse"]
    return seen, {
        **arrays,
        "q": q.reshape(len(q), heads, rows, -1).swapaxes(1, 2),
        "out": out.reshape(len(out), heads, rows, -1).swapaxes(1, 2),
        "lse": lse.reshape(len(lse), heads, rows),
    }


def results_of_parts(
    problem: AttentionProblem, config: Config, num_sms: int, empty: Callable[..., Array]
) -> dict[str, Array]:
    """Room for the results over parts of the keys, in float32; nothing where keys stay whole."""
    parts = plan_sm90.parts_of_keys(problem, config, num_sms)
    if parts == 1:
        return {}
    seen = plan_sm90.heads_as_rows(problem)
    batch, rows, heads = parts * seen.batch, seen.seqlen_q, seen.num_heads_q
    return {
        "out_parts": empty((batch, rows, heads, seen.head_dim_v), np.float32),
        "lse_parts": empty((batch, heads, rows), np.float32),
    }


class TileCounter:
    """Of the launches of one kernel, where its thread blocks have more than one tile each."""

    def __init__(self, device: kernels.Device, needed: bool) -> None:
        self._needed = needed
        self._counters = _counters_of(device)

    def put(self, words: np.ndarray[Any, Any]) -> None:
        """Write a free counter's address into the struct `words`."""
        if self._needed:
            words[_COUNTER_WORD] = self._counters.next()

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a graph."""
        return self._counters.is_capturing()


class _Counters:
    """Counters in a device's memory that are 0 between launches."""

    def __init__(self, device: kernels.Device) -> None:
        xp = device.namespace
        self._array = xp.zeros(_NUM_COUNTERS + _NUM_CAPTURED, np.uint32)
        self._runtime: Any = None
        if xp is not np:
            # Once per process and device: other streams may use the zeros, too.
            xp.cuda.get_current_stream().synchronize()
            self._current_stream = xp.cuda.get_current_stream
            self._runtime = xp.cuda.runtime
        self._address = device.pointer(self._array)
        self._launches = count()
        self._captured = count()

    def next(self) -> int:
        """Address of a free counter; 0 when there is none, and tiles are dealt instead."""
        if self.is_capturing():
            number = next(self._captured)
            return 0 if number >= _NUM_CAPTURED else self._address + 4 * (_NUM_COUNTERS + number)
        return self._address + 4 * (next(self._launches) % _NUM_COUNTERS)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a graph."""
        return self._runtime is not None and self._runtime.streamIsCapturing(self._current_stream().ptr)


_counters: dict[kernels.Device, _Counters] = {}


def _counters_of(device: kernels.Device) -> _Counters:
    if device not in _counters:
        _counters[device] = _Counters(device)
    return _counters[device]
