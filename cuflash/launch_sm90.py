"""Both passes on Hopper, and what persistent kernels take: tensor maps, and a counter of tiles."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from cuflash import kernels, plan_sm90, plan_sm90_backward
from cuflash.launch import SUM_ROWS, Further, Kernel, Sum, WithoutTiles, Words, Work, images, num_tiles
from cuflash.params import ALIGNMENT, SCORE_TENSORS, SWIZZLE_BYTES, TENSOR_MAP, Arrays, word_of
from cuflash.plan import types_of
from cuflash.plan_sm90 import Config, Layout
from cuflash.problem import Array, AttentionProblem

_ROW_BLOCKS = 32  # that prepare rows beside the gradients, one for each lane that asks
_FEW_TILES = 1024  # the kernel before is over sooner on all multiprocessors
_COUNTER_WORD = word_of("tile_counter")
# A program that reuses its arrays meets few addresses.
MAX_MAPS = 256
# Launches take counters in turn: one is met again long after its launch. A captured one, run at any time, has its own.
_NUM_COUNTERS = 1 << 16
_NUM_CAPTURED = 1 << 12


class Persistent(Further):
    """What a kernel takes whose thread blocks stay and take tile after tile.

    `tiles_of` are the maps' arrays, with the rows (and columns, where not a swizzle's) of their tiles.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        tiles_of: Sequence[tuple[str, int] | tuple[str, int, int]],
        arrays: Arrays,
        device: kernels.Device,
        tiles: int,
        cluster: int = 1,
        takers: int | None = None,
    ) -> None:
        counts, takers = takers is None, takers or min(tiles, device.num_sms // cluster)
        super().__init__((takers * cluster,), [np.zeros(1, TENSOR_MAP)] * len(tiles_of))
        self._counter = TileCounter(device, tiles > takers and counts)
        self._device = device
        self._once = plan_sm90.has_few_queries(problem)
        self._words = tuple([word_of(name) for name, *_ in tiles_of])
        self._tiled = [_tiled(problem, name, arrays[name], *box) for name, *box in tiles_of]
        self._maps = KeptMaps(self._make_maps)

    def _make_maps(self, addresses: tuple[int, ...]) -> list[Array]:
        tiled = zip(addresses, self._tiled, strict=True)
        return [self._device.tensor_map(address, *description, once=self._once) for address, description in tiled]

    def fill(self, words: Words, begins: tuple[int, ...], stream: int) -> None:
        """`Further.fill`."""
        self._counter.put(words, stream)
        maps = self._maps[tuple([words[word] for word in self._words])]
        words[begins[0] : begins[0] + len(maps)] = maps


class KeptMaps(dict[Any, Words]):
    """The tensor maps of a launch, by what `make` makes them of; at most `MAX_MAPS`."""

    def __init__(self, make: Callable[[Any], Sequence[Array]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Words:
        if len(self) >= MAX_MAPS:
            self.clear()
        maps = self[key] = np.concatenate(self._make(key)).view(np.uint64).data
        return maps


class _Tiled(NamedTuple):
    """What a tensor map says of an array beside its address; the innermost axis comes first."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # of all axes but the first
    box: tuple[int, ...]


def _tiled(problem: AttentionProblem, name: str, x: Array, rows: int, columns: int = 0) -> _Tiled:
    shape, strides = ((1, *x.shape), (0, *x.strides)) if x.ndim == 3 else (x.shape, x.strides)
    if name in SCORE_TENSORS:  # (batch, heads, rows, columns), of which broadcast axes have one element
        dtype, order = "uint8" if name == "mask" else problem.bias_dtype or problem.dtype, (3, 2, 1, 0)
        shape = tuple(1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True))
        if shape[2] == 1:  # every query's row is that one
            shape, strides = (*shape[:2], problem.seqlen_q, shape[3]), (*strides[:2], 0, strides[3])
    else:  # (batch, seqlen, num_heads, head_dim)
        dtype, order = problem.dtype, (3, 1, 2, 0)
    axes = list(zip(shape[:-1], strides[:-1], strict=True))
    # Of an axis of size 1 TMA wants the stride of a contiguous outermost axis.
    row_bytes = math.ceil(shape[-1] * x.dtype.itemsize / ALIGNMENT) * ALIGNMENT
    filler = max([row_bytes, *(n * s for n, s in axes if n > 1)])
    formed = [filler if n == 1 else s for n, s in axes]
    box = (columns or SWIZZLE_BYTES // x.dtype.itemsize, rows, 1, 1)
    return _Tiled(dtype, tuple(shape[i] for i in order), tuple(formed[i] for i in order[1:]), box)


def heads_as_rows(problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
    """`plan_sm90.heads_as_rows`, and views of the arrays."""
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


@dataclass(frozen=True)
class Forward(Kernel):
    """The forward kernel."""

    config: Config

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(tiles of one head, tiles in all, each part of the keys by itself)."""
        tiles = num_tiles(problem, problem.seqlen_q, self.config.block_m * self.config.pair)
        total = tiles * images(problem, problem.num_heads_q)
        return tiles, total * (len(arrays["out_parts"]) // problem.batch if self.config.splits_keys else 1)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Single queries of the heads of a group are rows of a tile."""
        return heads_as_rows(problem, arrays)

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """The order of tiles."""
        return {"heads_together": plan_sm90.heads_together(problem, self.config.block_m)}

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Persistent:
        """Maps of the arrays that TMA reads and writes."""
        m, n = self.config.block_m, self.config.block_n
        bias = ("v", n)  # a map that is not read
        mask = ("mask", m, self.config.mask_row_bytes) if self.config.has_mask_tiles else bias
        if self.config.has_bias_tiles:
            x = arrays["bias"]
            bias = ("bias", m if x.shape[2] > 1 and x.strides[2] else 1)
        out = "out" if self.config.staging_panels else "v"
        tiles_of = (("q", m), ("k", n), ("v", n), bias, mask, (out, plan_sm90.ROWS_OF_WARP), (out, 1))
        return Persistent(problem, tiles_of, arrays, device, tiles, self.config.pair)


@dataclass(frozen=True)
class Merge(Sum):
    """The results over parts of the keys become one: a thread block a row, or a warp where rows are many."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(blocks of one head, blocks in all)."""
        rows = SUM_ROWS if self.entry == "merge_rows" else 1
        blocks = math.ceil(problem.seqlen_q / rows)
        return blocks, blocks * images(problem, problem.num_heads_q)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """As `Forward` does."""
        return heads_as_rows(problem, arrays)


def forward(work: Work) -> bool:
    """Write out and lse; False where others run."""
    layouts = work.layouts(("q", "k", "v")) if work.device.has_wgmma else None
    if layouts is None:
        return False
    config = plan_sm90.forward(work.problem, layouts, *(_layout(work, work.arrays.get(x)) for x in ("bias", "mask")))
    if config is None:
        return False
    config, number = plan_sm90.for_grid(work.problem, config, work.device.num_sms)
    parts = _results_of_parts(work, number)
    if parts or not _is_out_expressible(work):
        config = replace(config, splits_keys=bool(parts), staging_panels=0, pair=1)
    work.run(Forward(config.entry, config), work.arrays | parts)
    if parts:
        entry = "merge_rows" if plan_sm90.merges_by_rows(work.problem, number) else "merge_parts"
        work.run(Merge(entry, types_of(work.problem)), work.arrays | parts)
    return True


def _is_out_expressible(work: Work) -> bool:
    """Whether TMA can write the result."""
    layouts = work.layouts(("out",))
    return layouts is not None and plan_sm90.expressible(*layouts[0])


def _layout(work: Work, x: Array | None) -> Layout | None:
    """Strides and shape, unless TMA cannot take the address."""
    return None if x is None or work.device.pointer(x) % ALIGNMENT else (x.strides, x.shape)


def _results_of_parts(work: Work, parts: int) -> Arrays:
    """Room for the results over parts of the keys; nothing where keys stay whole."""
    if parts == 1:
        return {}
    seen = plan_sm90.heads_as_rows(work.problem)
    batch, rows, heads = parts * seen.batch, seen.seqlen_q, seen.num_heads_q
    return {
        "out_parts": work.empty((batch, rows, heads, seen.head_dim_v), np.float32),
        "lse_parts": work.empty((batch, heads, rows), np.float32),
    }


class TileCounter:
    """Of tiles, by which thread blocks take them if there are more than these."""

    def __init__(self, device: kernels.Device, needed: bool) -> None:
        self._counters = _counters_of(device) if needed else None

    def put(self, words: Words, stream: int) -> None:
        """Write a free counter's address into the struct `words` of a launch on a stream."""
        if self._counters is not None:
            words[_COUNTER_WORD] = self._counters.next(stream)


class _Counters:
    """Pairs of counters in a device's memory that are 0 between launches."""

    def __init__(self, device: kernels.Device) -> None:
        xp = device.namespace
        self._array = xp.zeros(_NUM_COUNTERS + _NUM_CAPTURED, np.uint64)
        if xp is not np:
            # Once per process and device: other streams may use the zeros, too.
            xp.cuda.get_current_stream().synchronize()
        self._capture = device.capture
        self._address = device.pointer(self._array)
        self._launches = count()
        self._captured = count()

    def next(self, stream: int) -> int:
        """Address of a free counter; 0 if there is none: tiles are dealt."""
        if self._capture(stream):
            number = next(self._captured)
            return 0 if number >= _NUM_CAPTURED else self._address + 8 * (_NUM_COUNTERS + number)
        return self._address + 8 * (next(self._launches) % _NUM_COUNTERS)


_counters: dict[kernels.Device, _Counters] = {}


def _counters_of(device: kernels.Device) -> _Counters:
    if device not in _counters:
        _counters[device] = _Counters(device)
    return _counters[device]


@dataclass(frozen=True)
class _OfQueries(WithoutTiles):
    """A kernel of the backward pass."""

    config: plan_sm90_backward.Config

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.config.smem_bytes

    @property
    def begins_early(self) -> bool:
        """Where dq of one head is written while others are under way."""
        return self.config.ping_pong and self.entry != plan_sm90_backward.ROWS

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """How sums of dq are laid out."""
        return {"num_query_tiles": num_tiles(problem, problem.seqlen_q, self.config.block_m)}


@dataclass(frozen=True)
class BeforeGradients(_OfQueries):
    """The kernel before: what the gradients of scores load of each query."""

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Persistent:
        """Maps of the arrays that TMA reads."""
        m, blocks = self.config.block_m, arrays["rows_done"].size if "rows_done" in arrays else device.num_sms
        return Persistent(problem, [("dout", m), ("out", m)], arrays, device, tiles, takers=blocks)


@dataclass(frozen=True)
class Dq(_OfQueries):
    """The kernel behind: dq from its sum."""

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Further:
        """As many thread blocks as run at once."""
        return Further((min(tiles, device.num_sms),))


@dataclass(frozen=True)
class Gradients(_OfQueries):
    """The gradients of scores, and all that is multiplied with them."""

    visits_tiles = of_keys = True

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """How sums of dq are laid out, the order of tiles."""
        return super().numbers(problem) | {"heads_together": plan_sm90_backward.last_heads(problem, self.config)}

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(tiles of one head, tiles in all); those of a pair of thread blocks are one."""
        tiles = num_tiles(problem, problem.seqlen_k, self.config.block_n * self.config.pair)
        return tiles, tiles * images(problem, problem.num_heads_kv)

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Persistent:
        """Maps of the arrays that TMA reads."""
        m, n = self.config.block_m, self.config.block_n
        pair = self.config.pair
        # Used or not.
        bias = ("bias", m) if self.config.has_bias_tiles else ("v", n)
        dbias = ("dbias", m) if self.config.writes_dbias else ("v", n)
        maps = (("q", m), ("k", n * pair), ("v", n), ("dout", m), bias, dbias)
        return Persistent(problem, maps, arrays, device, tiles, pair)


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv and delta; return the other gradients, None if nothing is done."""
    problem, arrays = work.problem, work.arrays
    layouts = work.layouts(("q", "k", "v", "dout", "out")) if work.device.has_wgmma else None
    if layouts is None:
        return None
    config = plan_sm90_backward.backward(
        problem, layouts, *(_layout(work, x) for x in (arrays.get("bias"), grads.get("bias"), arrays.get("mask")))
    )
    if config is None:
        return None
    tiles = images(problem, problem.num_heads_q) * num_tiles(problem, problem.seqlen_q, config.block_m)
    rows = {name: work.empty((tiles, config.block_m), problem.accum_dtype) for name in ("row_lse", "row_delta")}
    if "q" in grads:
        rows["dq_sum"] = work.empty((tiles * config.dq_sums, config.dq_tile), problem.accum_dtype)
    if config.stores_first and "q" in grads:
        words = 2 + tiles * config.dq_sums * config.dq_parts + images(problem, problem.num_heads_kv)
        rows["dq_turns"] = work.empty((words,), np.int32)
    dbias = {"dbias": grads["bias"]} if config.writes_dbias else {}
    if config.ping_pong and not dbias and not config.has_alibi and tiles > _FEW_TILES:
        rows["rows_done"] = work.empty((_ROW_BLOCKS,), np.int32)
    work.run(BeforeGradients(plan_sm90_backward.ROWS, config.of_rows), with_dlse | rows | dbias)
    of_keys = {f"d{name}": grads[name] for name in ("k", "v") if name in grads}
    work.run(Gradients(config.entry, config), _select(arrays, _MAIN_INPUTS) | rows | of_keys | dbias)
    if "q" in grads:
        sums = _select(rows, ("dq_sum", "dq_turns"))
        work.run(Dq(plan_sm90_backward.DQ, config.of_rows), _select(arrays, _LENGTHS) | sums | {"dq": grads["q"]})
    done = ("q", "k", "v", "bias") if dbias else ("q", "k", "v")
    return {name: x for name, x in grads.items() if name not in done}


_LENGTHS = ("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")
_MAIN_INPUTS = ("q", "k", "v", "dout", "alibi_slopes", *SCORE_TENSORS, *_LENGTHS)


def _select(arrays: Arrays, names: tuple[str, ...]) -> Arrays:
    return {name: x for name, x in arrays.items() if name in names}
