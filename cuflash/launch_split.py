"""Float32 in float16 parts: the work space that has them, and Hopper's kernels; passes of a kernel a gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import kernels, launch, plan_sm90, plan_sm90_backward, plan_split, plan_wide
from cuflash.launch import Further, Kernel, WithoutTiles, Words, Work, images
from cuflash.launch_sm90 import KeptMaps, TileCounter
from cuflash.params import SWIZZLE_BYTES, TENSOR_MAP, Arrays, whole_rows, word_of
from cuflash.plan import FLOAT_BYTES, HALF_BYTES, key_results
from cuflash.problem import Array, AttentionProblem

ROWS = "split_rows"
Config = plan_split.Config | plan_wide.Config
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
_OPERANDS = np.dtype([*((name, _TENSOR) for name in ("q", "k", "v", "dout")), ("lse", "i8"), ("delta", "i8")])
_SPACE_WORD = word_of("work_space")
# Of split_rows.cu: threads of a block, elements of a vector, most lanes of a row.
_THREADS = 256
_VECTOR = 4
_LANES = 32
# Of split_layout.cuh.
_PANEL = SWIZZLE_BYTES // HALF_BYTES
_ROW_ALIGNMENT = 4
_COLUMN_CLASSES = (64, 128, 256)
# Factors of whole tiles of keys are copied.
_FACTOR_ROWS = 128


class WorkSpace:
    """Where the parts of the operands lie."""

    def __init__(self, problem: AttentionProblem, config: Config, device: kernels.Device) -> None:
        queries, keys = (problem.seqlen_q, problem.num_heads_q), (problem.seqlen_k, problem.num_heads_kv)
        tensors = [
            ("q", queries, config.head_dim, config.key_parts),
            ("k", keys, config.head_dim, config.key_parts),
            ("v", keys, config.head_dim_v, config.parts),
        ]
        is_backward = isinstance(config, plan_split.GradientConfig | plan_wide.GradientConfig)
        if is_backward:
            tensors.append(("dout", queries, config.head_dim_v, config.parts))
        rows_of_block = _THREADS // min(_columns(config) // _VECTOR, _LANES)
        operands = np.zeros(1, _OPERANDS)
        self._device = device
        self._tensors: list[tuple[int, tuple[int, ...]]] = []
        size, blocks = whole_rows(_OPERANDS.itemsize), 0
        for name, (rows, heads), head_dim, parts in tensors:
            panels = math.ceil(head_dim / _PANEL)
            if problem.packed:
                # Sequences and the padding beside them begin at multiples: split_begin.
                rows = (rows // _ROW_ALIGNMENT + problem.batch + 3) * _ROW_ALIGNMENT
            factor_rows = (math.ceil(rows / _FACTOR_ROWS) + 1) * _FACTOR_ROWS
            count = images(problem, heads)
            factors = size + whole_rows(count * parts * panels * rows * SWIZZLE_BYTES)
            operands[name] = (size, factors, rows, factor_rows, panels, parts)
            self._tensors.append((size, (_PANEL, rows, parts * panels, count)))
            vector_bytes = whole_rows(count * factor_rows * FLOAT_BYTES)
            size = factors + vector_bytes
            blocks = max(blocks, math.ceil(factor_rows / rows_of_block) * count)
        if is_backward:
            operands["lse"], operands["delta"] = size, size + vector_bytes
            size += 2 * vector_bytes
        self.size = size
        self.operands = operands.view(f"V{_OPERANDS.itemsize}")
        self.grid = (blocks, len(tensors))
        # By the work space's address and `OnOperands.boxes`.
        self.maps = KeptMaps(self._make_maps)

    def _make_maps(self, address_and_boxes: tuple[int, Sequence[int]]) -> list[Array]:
        address, boxes = address_and_boxes
        tensors = zip(self._tensors, boxes, strict=True)
        return [self._map(address + offset, extents, rows) for (offset, extents), rows in tensors]

    def _map(self, address: int, extents: tuple[int, ...], rows: int) -> Array:
        strides = tuple(math.prod(extents[: axis + 1]) * HALF_BYTES for axis in range(3))
        return self._device.tensor_map(address, "float16", extents, strides, (_PANEL, rows, extents[2], 1))


class OnOperands(Further):
    """The operands' places in a work space, its address if `with_space`, and maps for `boxes` rows of each operand."""

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
        """`Further.fill`."""
        address = words[_SPACE_WORD]
        if self._with_space:
            words[begins[1]] = address
        if self._boxes:
            maps = self._space.maps[address, self._boxes]
            words[begins[-len(self._boxes)] : begins[-len(self._boxes)] + len(maps)] = maps
        if self._counter is not None:
            self._counter.put(words, stream)


@dataclass(frozen=True)
class Split(WithoutTiles):
    """The kernel that fills the work space."""

    config: Config
    threads = _THREADS

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> OnOperands:
        """The operands' places."""
        space = WorkSpace(problem, self.config, device)
        return OnOperands(space.grid, space, True)

    def load(self, device: kernels.Device) -> kernels.LoadedKernel:
        """The kernel itself, one for many configurations."""
        constants = launch.constants_of_sums(self.config) | {"columns": _columns(self.config), "threads": _THREADS}
        return kernels.get("sm90/split_rows", ROWS, constants, device)


@dataclass(frozen=True)
class Forward(Kernel):
    """The forward kernel."""

    config: plan_split.ForwardConfig

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """The order of tiles."""
        return {"heads_together": plan_sm90.heads_together(problem)}

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> OnOperands:
        """Maps of q, k and v."""
        m, n = self.config.block_m, self.config.block_n
        blocks = min(tiles, device.num_sms)
        space = WorkSpace(problem, self.config, device)
        return OnOperands((blocks,), space, True, (m, n, n), TileCounter(device, tiles > blocks))


@dataclass(frozen=True)
class Gradient(Kernel):
    """A gradient kernel."""

    config: plan_split.GradientConfig
    orders_bits = False

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """The order of tiles."""
        heads_together = (plan_sm90_backward if self.of_keys else plan_sm90).heads_together
        return {"heads_together": heads_together(problem)}

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> OnOperands:
        """Maps of q, k, v and dout."""
        m, n = self.config.block_m, self.config.block_n
        blocks = min(tiles, device.num_sms)
        space = WorkSpace(problem, self.config, device)
        return OnOperands((blocks,), space, False, (m, n, n, m), TileCounter(device, tiles > blocks))


def forward(work: Work) -> bool:
    """Write out and lse; False where others run."""
    config = plan_split.forward(work.problem) if work.device.has_wgmma else None
    if config is None:
        return False
    work.run(Forward(config.entry, config), split(work, config))
    return True


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv, delta and the slopes' rows; return the other gradients, None if nothing is done."""
    configs = plan_split.backward(work.problem) if work.device.has_wgmma else ()
    return run_passes(work, with_dlse, grads, [Gradient(config.entry, config) for config in configs])


def run_passes(work: Work, with_dlse: Arrays, grads: Arrays, kernels: Sequence[Kernel]) -> Arrays | None:
    """`backward` by these kernels, that for dq first."""
    if not kernels:
        return None
    launch.delta(work, with_dlse)
    work.arrays |= launch.rows_of_slopes(work, grads)
    arrays: Arrays = {}
    for kernel in kernels:
        names = key_results(kernel.entry) or ("dq",)
        wanted = {name: grads[name[1:]] for name in names if name[1:] in grads}
        if wanted or (not kernel.of_keys and "dslope_rows" in work.arrays):
            arrays = arrays or split(work, kernel.config)
            work.run(kernel, arrays | wanted)
    return {name: x for name, x in grads.items() if name not in ("q", "k", "v")}


def split(work: Work, config: Any) -> Arrays:
    """The arrays for a kernel, with the operands' parts if it takes those."""
    if not getattr(config, "parts", 0):
        return work.arrays
    size = WorkSpace(work.problem, config, work.device).size
    if "work_space" not in work.arrays or work.arrays["work_space"].size != size:  # of as many columns
        work.arrays["work_space"] = work.empty((size,), np.uint8)
        work.run(Split(ROWS, config), work.arrays)
    return work.arrays


def _columns(config: Config) -> int:
    return next(c for c in _COLUMN_CLASSES if c >= max(config.head_dim, config.head_dim_v))
