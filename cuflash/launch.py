"""Launches of kernels of any family; the portable kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import kernels
from cuflash.params import ALIGNMENT, Arrays, fixed_params, num_splits, word_of
from cuflash.plan import KernelConfig, file_of, function_of, key_kernels, key_results, plan, types_of
from cuflash.problem import MOST_KEPT, Array, AttentionProblem, Operands
from cuflash.recording import Recording

if TYPE_CHECKING:
    from cuflash.block_mask import BlockMask

Words = memoryview  # of 8 bytes each
_SEED_WORD = word_of("dropout_key")
# Of a block of reduce.cu, and rows where a warp has one.
_SUM_THREADS = 256
SUM_ROWS = _SUM_THREADS // 32


@dataclass(frozen=True)
class Kernel:
    """One kernel and how it is launched; families derive theirs."""

    entry: str  # one configuration may serve several
    config: KernelConfig  # the constants of its source
    orders_bits = True  # takes those of a block mask in the order of fragments

    @property
    def begins_early(self) -> bool:
        """Whether it may begin before the one before it has ended."""
        return False

    @property
    def visits_tiles(self) -> bool:
        """Whether it goes through tiles of scores."""
        return True

    @property
    def of_keys(self) -> bool:
        """Whether its tiles stay with keys and walk queries."""
        return getattr(self.config, "of_keys", bool(key_results(self.entry)))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.config.threads

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.config.smem_bytes if self.visits_tiles else 0

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(tiles of one head, tiles in all)."""
        config = self.config
        if self.of_keys:
            tiles = num_tiles(problem, problem.seqlen_k, config.block_n)
            return tiles, tiles * images(problem, problem.num_heads_kv)
        tiles = num_tiles(problem, problem.seqlen_q, config.block_m)
        return tiles, tiles * images(problem, problem.num_heads_q)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """The problem and the arrays as the kernel sees them."""
        return problem, arrays

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Members of the parameter struct that are particular to the family."""
        return {}

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Further:
        """What it takes behind the parameter struct, and the grid of its thread blocks."""
        return Further((tiles,))

    def load(self, device: kernels.Device) -> kernels.LoadedKernel:
        """The kernel itself."""
        return kernels.get(file_of(self.entry), function_of(self.entry), self.config, device, self.smem_bytes)


class Further:
    """Arguments behind the parameter struct (here: none), and the grid of thread blocks."""

    def __init__(self, grid: tuple[int, ...], values: Sequence[np.ndarray[Any, Any]] = ()) -> None:
        self.grid = grid
        self.values = tuple(values)  # as they are at first

    def fill(self, words: Words, begins: tuple[int, ...], stream: int) -> None:
        """Bring those at `begins`, and members of the struct, up to date."""


def num_tiles(problem: AttentionProblem, rows: int, block: int) -> int:
    """Tiles of one head; packed: tile slots (work_of in params.cuh)."""
    return rows // block + problem.batch + 2 if problem.packed else math.ceil(rows / block)


def images(problem: AttentionProblem, heads: int) -> int:
    """Heads of all sequences; packed sequences are one."""
    return heads if problem.packed else heads * problem.batch


class _Arguments:
    """The arguments of one launch and the pointers to them."""

    __slots__ = ("address", "begins", "words")

    def __init__(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
        # Each begins a line.
        sizes = [_LINE * math.ceil(value.nbytes / _LINE) for value in values]
        begins = [sum(sizes[:i]) for i in range(len(values) + 1)]
        buffer = np.zeros(begins[-1] + 8 * len(values) + _LINE, np.uint8)
        aligned = buffer[-buffer.ctypes.data % _LINE :][: begins[-1] + 8 * len(values)]
        for begin, value in zip(begins, values, strict=False):
            aligned[begin : begin + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
        pointers = aligned[begins[-1] :].view(np.uint64)
        pointers[:] = [aligned.ctypes.data + begin for begin in begins[:-1]]
        self.words: Words = aligned.view(np.uint64).data
        self.begins = tuple([begin // 8 for begin in begins[1:-1]])  # words of those behind the first
        self.address: int = pointers.ctypes.data


_LINE = 64


class Launch:
    """A kernel's `recording.Launch`."""

    def __init__(self, kernel: Kernel, problem: AttentionProblem, arrays: Arrays, device: kernels.Device) -> None:
        problem, arrays = kernel.seen(problem, arrays)
        self.kernel = kernel
        self.params = fixed_params(problem, arrays)
        self.params["num_tiles"], tiles = kernel.grid(problem, arrays)
        for name, number in kernel.numbers(problem).items():
            self.params[name] = number
        self._further = kernel.further(problem, arrays, device, tiles)
        self.pointer_words = tuple([word_of(name) for name in arrays])
        self._is_empty = 0 in self._further.grid
        self._values = (self.params, *self._further.values)
        self._launch = kernel.load(device).bound(
            self._further.grid,
            (kernel.threads,),
            [value.nbytes for value in self._values],
            kernel.smem_bytes,
            kernel.begins_early,
        )
        # A thread that launches takes one and puts it back, each at once.
        self._free: list[_Arguments] = []

    def enqueue(
        self, addresses: Sequence[int], places: Iterable[tuple[int, int]], seed: int | None, stream: int
    ) -> None:
        """Enqueue it: `recording.Launch`."""
        if self._is_empty:
            return
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self._values)
        words = arguments.words
        for word, place in places:
            words[word] = addresses[place]
        if seed is not None:
            words[_SEED_WORD] = seed
        self._further.fill(words, arguments.begins, stream)
        self._launch(arguments.address, stream)
        self._free.append(arguments)


_launches: dict[Any, Launch] = {}


class Work:
    """One pass: `arrays` are given to every kernel beside the operands, `others` to some."""

    # The operands that are plain arrays stand first.
    _INPUTS = Operands._fields[: Operands._fields.index("dropout_seed")]

    def __init__(
        self,
        problem: AttentionProblem,
        operands: Operands,
        arrays: Arrays,
        device: kernels.Device,
        others: Arrays | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        inputs = {name: x for name, x in zip(self._INPUTS, operands, strict=False) if x is not None}
        self.arrays = inputs | arrays
        self._block_mask = operands.block_mask
        seed: Any = operands.dropout_seed
        self._seed = int(seed) if isinstance(seed, (int, np.integer)) else None
        self._seed_array = {} if seed is None or self._seed is not None else {"dropout_seed": seed}
        self._stream = device.stream()
        self.recording = Recording(device, {**self.arrays, **self._seed_array, **(others or {})}, self._stream)

    def of_values(self, columns: slice) -> Work:
        """The same work on some columns of values and results alone; it is not recorded."""
        part = copy(self)
        part.arrays = {name: x[..., columns] if name in ("v", "out") else x for name, x in self.arrays.items()}
        part.problem = replace(self.problem, head_dim_v=part.arrays["v"].shape[-1])
        return part

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory; it holds anything at first."""
        return self.recording.empty(shape, dtype)

    def is_aligned(self, names: Sequence[str]) -> bool:
        """Whether addresses and strides are multiples of `ALIGNMENT`."""
        tensors = [self.arrays[name] for name in names]
        places = chain(map(self.device.pointer, tensors), *(x.strides[:-1] for x in tensors))
        return not any(place % ALIGNMENT for place in places)

    def layouts(self, names: Sequence[str]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None:
        """Strides and shapes of arrays for the plan; None if an address forbids tensor maps."""
        tensors = [self.arrays[name] for name in names]
        if any(self.device.pointer(x) % ALIGNMENT for x in tensors):
            return None
        return tuple([(x.strides, x.shape) for x in tensors])

    def run(self, kernel: Kernel, arrays: Arrays) -> None:
        """Enqueue a kernel on arrays by name."""
        arrays = arrays | self._seed_array
        if self._block_mask is not None and kernel.visits_tiles:
            arrays |= self._block_arrays(kernel, self._block_mask)
        layout = tuple(arrays), tuple([(x.strides, x.shape) for x in arrays.values()])
        key = kernel, self.problem, self.device, *layout
        launch = _launches.get(key)
        if launch is None:
            if len(_launches) >= MOST_KEPT:
                _launches.clear()
            launch = _launches[key] = Launch(kernel, self.problem, arrays, self.device)
        addresses = [self.device.pointer(x) for x in arrays.values()]
        places = zip(launch.pointer_words, range(len(addresses)), strict=True)
        launch.enqueue(addresses, places, self._seed, self._stream)
        self.recording.add(launch, arrays)

    def _block_arrays(self, kernel: Kernel, block_mask: BlockMask) -> Arrays:
        xp = self.device.namespace
        config = kernel.config
        block_n = config.block_n // getattr(config, "listed", 1)
        tile = config.block_m, block_n, kernel.of_keys if kernel.orders_bits else None
        get = partial(kernels.get, device=self.device)
        lists = block_mask.tile_lists(*tile[:2], get, xp, of_keys=tile[2])
        slots, bits = block_mask.arrays(xp)
        self.recording.use_lists(tile, (slots, bits), lists)
        return {
            "block_list": lists.col_index if kernel.of_keys else lists.row_index,
            "block_count": lists.col_count if kernel.of_keys else lists.row_count,
            "block_slots": slots,
            "block_bits": bits,
            "fragment_bits": lists.fragment_bits,
        }


@dataclass(frozen=True)
class Tiles(Kernel):
    """A kernel with a thread block for each tile of queries or keys."""

    orders_bits = False


@dataclass(frozen=True)
class Bias(Kernel):
    """The gradient of a bias."""

    orders_bits = False

    def axes(self, problem: AttentionProblem) -> list[tuple[int, int]]:
        """(tiles, walk) of each axis of dbias, as Axis of bias_walk.cuh counts them."""
        assert problem.bias is not None
        scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
        blocks = (1, 1, self.config.block_m, self.config.block_n)
        return [
            (1, math.ceil(score / block)) if size == 1 and score != 1 else (math.ceil(size / block), 1)
            for size, score, block in zip(problem.bias, scores, blocks, strict=True)
        ]

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(no tiles of heads, tiles in all)."""
        return 0, math.prod(tiles for tiles, _ in self.axes(problem)) * num_splits(arrays)

    def splits(self, problem: AttentionProblem, at_once: int) -> int:
        """Parts of each sum, so that a small dbias fills a GPU."""
        tiles, walk = (math.prod(counts) for counts in zip(*self.axes(problem), strict=True))
        return min(max(2 * at_once // max(tiles, 1), 1), max(walk, 1))


@dataclass(frozen=True)
class WithoutTiles(Kernel):
    """A kernel that has nothing to do with scores."""

    visits_tiles = False


def constants_of_sums(config: KernelConfig) -> dict[str, str | int]:
    """The constants of reduce.cu, whose kernels know of no options."""
    types = {name: getattr(config, name) for name in ("element", "accum", "bias_element")}
    return types | {"threads": _SUM_THREADS}


@dataclass(frozen=True)
class Sum(WithoutTiles):
    """A kernel of reduce.cu."""

    threads = _SUM_THREADS

    def load(self, device: kernels.Device) -> kernels.LoadedKernel:
        """The kernel itself, one for all configurations of the same types."""
        return kernels.get("reduce", self.entry, constants_of_sums(self.config), device)


@dataclass(frozen=True)
class Rows(Sum):
    """A kernel that has a warp for each row of the queries."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(blocks of one head, blocks in all)."""
        tiles = num_tiles(problem, problem.seqlen_q, SUM_ROWS)
        return tiles, tiles * images(problem, problem.num_heads_q)


@dataclass(frozen=True)
class Reduce(Sum):
    """A sum over rows, sequences or parts."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(no tiles of heads, blocks)."""
        if "dbias" in arrays:
            return 0, math.ceil(arrays["dbias"].size / _SUM_THREADS)
        return 0, (arrays["dsink"] if "dsink" in arrays else arrays["dalibi_slopes"]).size


def forward(work: Work) -> bool:
    """Write out and lse; True."""
    work.run(Tiles("forward", plan(work.problem, "forward", work.device.smem_limit)), work.arrays)
    return True


def delta(work: Work, arrays: Arrays) -> None:
    """Write delta, of arrays that have dlse where there is one."""
    work.run(Rows("delta", types_of(work.problem)), arrays)


def gradients(work: Work, grads: Arrays) -> None:
    """Write `grads`."""
    problem, arrays, limit = work.problem, work.arrays, work.device.smem_limit
    by_rows = rows_of_slopes(work, grads) if "dslope_rows" not in arrays else {}
    if "q" in grads:
        by_rows["dq"] = grads["q"]
    if by_rows:
        work.run(Tiles("backward_dq", plan(problem, "backward_dq", limit)), arrays | by_rows)
    for entry in key_kernels(problem):
        of_keys = {name: grads[name[1:]] for name in key_results(entry) if name[1:] in grads}
        if of_keys:
            work.run(Tiles(entry, plan(problem, entry, limit)), arrays | of_keys)
    types = types_of(problem)
    if "bias" in grads:
        gradient_of_bias(work, grads["bias"], Bias("backward_bias", plan(problem, "backward_bias", limit)))
    if "sink" in grads:
        work.run(Reduce("reduce_sink", types), arrays | {"dsink": grads["sink"]})
    if "alibi_slopes" in grads:
        work.run(Reduce("reduce_slopes", types), arrays | by_rows | {"dalibi_slopes": grads["alibi_slopes"]})


def gradient_of_bias(work: Work, array: Array, kernel: Bias, blocks: int = 1) -> None:
    """Write it; a multiprocessor holds so many `blocks`."""
    dbias = {"dbias": array}
    splits = kernel.splits(work.problem, work.device.num_sms * blocks)
    if splits > 1:
        dbias["dbias_parts"] = work.empty((splits, *array.shape), work.problem.accum_dtype)
    work.run(kernel, work.arrays | dbias)
    if splits > 1:
        work.run(Reduce("reduce_bias", types_of(work.problem)), work.arrays | dbias)


def rows_of_slopes(work: Work, grads: Arrays) -> Arrays:
    """Room for each row's part of the slopes' gradient, if wanted."""
    if "alibi_slopes" not in grads:
        return {}
    return {"dslope_rows": work.empty(work.problem.lse_shape, work.problem.accum_dtype)}
