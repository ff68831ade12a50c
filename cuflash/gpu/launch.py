"""Launches of kernels of any family, with their arguments, grids and scratch memory.

The families' modules derive from `Kernel` and run kernels through a `Work`, which `replay` records for later calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.gpu.arguments import Arguments, BoundLaunch, Words
from cuflash.gpu.choose import choose
from cuflash.gpu.kernels import load_kernel, spilled_bytes
from cuflash.gpu.params import OPERAND_PARAMS, Arrays, describe_operands, fixed_params, operand_struct, word_of
from cuflash.gpu.replay import Recording
from cuflash.gpu.stores import stores
from cuflash.hardware import ALIGNMENT
from cuflash.kept import Kept
from cuflash.plan.config import KernelConfig
from cuflash.plan.entries import key_results
from cuflash.plan.record import HOPPER
from cuflash.problem.attention_problem import Array, AttentionProblem, operand_name
from cuflash.problem.operands import Operands
from cuflash.rules.form import NO_RULES, Rules

if TYPE_CHECKING:
    from cuflash.masks.block_mask import BlockMask

_SEED_WORD = word_of("dropout_key")


@dataclass(frozen=True)
class Kernel:
    """One kernel and its launch; families derive theirs."""

    entry: str  # the kernel's name; several entries may share one configuration
    config: KernelConfig  # the constants of its source
    orders_bits = True  # the kernel reads a block mask's bits in the order of its fragments

    @property
    def begins_early(self) -> bool:
        """The kernel may begin before the previous one has ended, where GPUs have programmatic stream serialization."""
        return False

    @property
    def visits_tiles(self) -> bool:
        """The kernel iterates over tiles of scores, and so reads the lists of a block mask."""
        return True

    @property
    def of_keys(self) -> bool:
        """A thread block stays with a tile of keys and iterates over queries."""
        return getattr(self.config, "of_keys", bool(key_results(self.entry)))

    @property
    def rules(self) -> Rules:
        """The user's own rules that are compiled in."""
        return self.config.rules if self.visits_tiles else NO_RULES

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return self.config.threads

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a thread block, in bytes."""
        return self.config.smem_bytes if self.visits_tiles else 0

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles: (of one head, in all)."""
        config = self.config
        if self.of_keys:
            tiles = num_tiles(problem, problem.seqlen_k, config.block_n)
            return tiles, tiles * batch_heads(problem, problem.num_heads_kv)
        tiles = num_tiles(problem, problem.seqlen_q, config.block_m)
        return tiles, tiles * batch_heads(problem, problem.num_heads_q)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Return the problem and the views of the arrays that the kernel is launched with."""
        return problem, arrays

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the values of members of the parameter struct that only this family sets."""
        return {}

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> ExtraArguments:
        """Return the arguments behind the parameter struct and the grid of thread blocks, for so many `tiles`."""
        return ExtraArguments((tiles,))

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel."""
        return load_kernel(self.config, self.entry, device, self.smem_bytes)

    def spilled_bytes(self, device: cuda_device.Device) -> int:
        """Return the bytes of registers that the compiled kernel spills, with which a plan's next candidate runs."""
        return spilled_bytes(self.config, self.entry, device, self.smem_bytes)


K = TypeVar("K", bound=Kernel)


class ExtraArguments:
    """Arguments behind the parameter struct (here: none), and the grid of thread blocks."""

    def __init__(self, grid: tuple[int, ...], values: Sequence[np.ndarray[Any, Any]] = ()) -> None:
        self.grid = grid
        self.values = tuple(values)  # initial values; `fill` brings a launch's copy up to date

    def fill(self, words: Words, begins: tuple[int, ...], stream: int) -> None:
        """Write what changes between launches into `words`, which hold the struct and, at `begins`, these arguments."""


def num_tiles(problem: AttentionProblem, rows: int, block: int) -> int:
    """Return the number of tiles of one head; of packed problems, that of tile slots (work_of in params.cuh)."""
    return rows // block + problem.batch + 2 if problem.packed else math.ceil(rows / block)


def batch_heads(problem: AttentionProblem, heads: int) -> int:
    """Return the number of (batch, head) pairs; packed sequences count as one."""
    return heads if problem.packed else heads * problem.batch


class Launch(BoundLaunch):
    """The launch of a `Kernel` of a family."""

    def __init__(self, kernel: Kernel, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device) -> None:
        problem, arrays = kernel.seen(problem, arrays)
        self.kernel = kernel
        self.params = fixed_params(problem, arrays, kernel.rules)
        self.params["num_tiles"], tiles = kernel.grid(problem, arrays)
        for name, number in kernel.numbers(problem).items():
            self.params[name] = number
        self._extra = kernel.extra_arguments(problem, arrays, device, tiles)
        values = self.params, *self._extra.values
        launch = kernel.load(device).bound(
            self._extra.grid,
            (kernel.threads,),
            [value.nbytes for value in values],
            kernel.smem_bytes,
            kernel.begins_early and device.capability >= HOPPER,
        )
        words = [word_of(name, kernel.rules) for name in arrays]
        super().__init__(values, words, None if 0 in self._extra.grid else launch)

    def _fill(self, arguments: Arguments, seed: int | None, stream: int) -> None:
        if seed is not None:
            arguments.words[_SEED_WORD] = seed
        self._extra.fill(arguments.words, arguments.begins, stream)


_launches: Kept[Any, Launch] = Kept()


class BlocksOfRule(Protocol):
    """The blocks that a user's own mask_mod hides, as `gpu.rule_blocks` finds them."""

    def arrays(self, work: Work, kernel: Kernel) -> Arrays:
        """Return the members of the parameter struct that a kernel reads of a block mask."""


class Work:
    """One pass over a problem, which runs its kernels and records them.

    Every kernel gets the operands and `arrays`; some get arrays of `others`, too.
    """

    # The operands that are plain arrays stand before the seed.
    _INPUTS = Operands._fields[: Operands._fields.index("dropout_seed")]

    def __init__(
        self,
        problem: AttentionProblem,
        operands: Operands,
        arrays: Arrays,
        device: cuda_device.Device,
        others: Arrays | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        inputs = {name: x for name, x in zip(self._INPUTS, operands, strict=False) if x is not None}
        self.arrays = inputs | arrays
        self.rule_blocks: BlocksOfRule | None = None  # what a mask_mod hides, where that was found (gpu.rule_blocks)
        # Hopper's forward kernel and its splits of the keys in place of the plan's, where a trial says so.
        self.launches: tuple[Any, int] | None = None
        self._block_mask = cast("BlockMask | None", operands.block_mask)
        self._of_rules = {operand_name(n): x for n, x in enumerate(operands.of_rules)}
        self._described: Arrays = {}  # the descriptions of these in device memory, once a kernel wants them there
        seed: Any = operands.dropout_seed
        self._seed = int(seed) if isinstance(seed, (int, np.integer)) else None
        self._seed_array = {} if seed is None or self._seed is not None else {"dropout_seed": seed}
        self._stream = device.stream()
        self.recording = Recording(
            device, {**self.arrays, **self._of_rules, **self._seed_array, **(others or {})}, self._stream
        )

    def of_values(self, columns: slice) -> Work:
        """Return the same work on some columns of v and out; no call can repeat it, as these are views."""
        part = copy(self)
        part.arrays = {name: x[..., columns] if name in ("v", "out") else x for name, x in self.arrays.items()}
        part.problem = replace(self.problem, head_dim_v=part.arrays["v"].shape[-1])
        return part

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate scratch memory, which is uninitialised."""
        return self.recording.empty(shape, dtype)

    def is_aligned(self, names: Sequence[str]) -> bool:
        """Return True if addresses and strides of the arrays are multiples of `ALIGNMENT`."""
        tensors = [self.arrays[name] for name in names]
        places = chain(map(self.device.pointer, tensors), *(x.strides[:-1] for x in tensors))
        return not any(place % ALIGNMENT for place in places)

    def layouts(self, names: Sequence[str]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None:
        """Return strides (in bytes) and shapes of arrays for the plan; None if an address forbids tensor maps."""
        tensors = [self.arrays[name] for name in names]
        if any(self.device.pointer(x) % ALIGNMENT for x in tensors):
            return None
        return tuple([(x.strides, x.shape) for x in tensors])

    @property
    def is_captured(self) -> bool:
        """The work goes into a graph."""
        return bool(self.device.capture(self._stream))

    def chosen(self, candidates: Iterable[K]) -> K:
        """Return the first kernel of a plan's candidates that spills no registers, as `choose` does."""
        (kernel,) = self.chosen_pass([(kernel,) for kernel in candidates])
        return kernel

    def chosen_or_none(self, candidates: Iterable[K]) -> K | None:
        """Do as `chosen`, but None where users' own rules spill in all candidates, as another family serves then.

        How many registers a rule takes is met only here, while the tables of the forward pass know what built-in
        options take.
        """
        has_rules = self.problem.rules != NO_RULES
        return next(iter(self.chosen_pass([(kernel,) for kernel in candidates], others_serve=has_rules)), None)

    def chosen_pass(self, candidates: Sequence[tuple[K, ...]], others_serve: bool = False) -> tuple[K, ...]:
        """Return the first pass of a plan's candidates whose kernels spill no registers, as `choose` does.

        There is none where all of them spill and another family takes the problem too (`others_serve`), as other
        families take the gradients of any options.
        """
        return choose(self.device, candidates, others_serve)

    def run(self, kernel: Kernel, arrays: Arrays) -> None:
        """Enqueue a kernel on `arrays`, which are members of the parameter struct by name, and record the launch."""
        arrays = arrays | self._seed_array
        if kernel.rules is not NO_RULES:
            arrays |= self.operands_of(kernel.rules)
        if self._block_mask is not None and kernel.visits_tiles:
            arrays |= self._block_arrays(kernel, self._block_mask)
        if self.rule_blocks is not None and kernel.visits_tiles:
            arrays |= self.rule_blocks.arrays(self, kernel)
        layout = tuple(arrays), tuple([(x.strides, x.shape) for x in arrays.values()])
        key = kernel, self.problem, self.device, *layout
        launch = _launches.get(key)
        if launch is None:
            launch = _launches[key] = Launch(kernel, self.problem, arrays, self.device)
        self.enqueue(launch, arrays)

    def enqueue(self, launch: BoundLaunch, arrays: Arrays) -> None:
        """Enqueue a launch on its arrays, in the order of its pointers, and record it."""
        launch.enqueue_in_order([self.device.pointer(x) for x in arrays.values()], self._seed, self._stream)
        self.recording.add(launch, arrays)

    def operands_of(self, rules: Rules) -> Arrays:
        """Return the operands of rules, or the memory that describes them where they are too many for parameters."""
        struct = operand_struct(rules)
        if struct is None:
            return self._of_rules
        if OPERAND_PARAMS not in self._described:
            target = self._described[OPERAND_PARAMS] = self.empty((struct.dtype.itemsize,), np.uint8)
            params = np.zeros(1, struct.dtype)
            describe_operands(params[0], self.problem, self._of_rules, rules)
            places = {name: struct.offset(name) // 8 for name in self._of_rules}
            for launch, arrays in stores(self.device, params, places, self._of_rules, target):
                self.enqueue(launch, arrays)
        return self._described

    def _block_arrays(self, kernel: Kernel, block_mask: BlockMask) -> Arrays:
        xp = self.device.namespace
        config = kernel.config
        block_n = config.block_n // getattr(config, "listed", 1)
        tile = config.block_m, block_n, kernel.of_keys if kernel.orders_bits else None
        get = partial(cuda_device.get, device=self.device)
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
