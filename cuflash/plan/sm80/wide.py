"""The configurations of the kernels by mma.sync on wide elements: float64, and float32 as float16 parts (from sm_80).

It is for both passes. The kinds of products are in `kinds`, their records in `wide_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cuflash.hardware import FLOAT_BYTES
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    OF_RULES,
    common,
    flags_of,
    has_plain_scores,
    not_taken,
    with_rules,
)
from cuflash.plan.entries import key_results
from cuflash.plan.record import HOPPER, UNUSUAL_SCALE, Place, Record, asked_of_scaled, candidates, narrowest
from cuflash.plan.sm80 import times as sm80_times
from cuflash.plan.sm80.forward import SMEM_BESIDE_TILES, Sm80QueryConfig, fits
from cuflash.plan.sm80.kinds import (
    PARTS_OF,
    dtype_of,
    element_bytes,
    has_few_registers,
    kind_of,
    multiplies,
)
from cuflash.plan.sm80.tiles import Records, Sm80Tile
from cuflash.plan.sm80.wide_tiles import of_backward, of_forward
from cuflash.plan.sm80.wide_tiles import of_bias as of_bias_records
from cuflash.plan.split.kernels import KEY_PARTS
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that these kernels know
_FACTORS = 4  # floats a key takes in the forward kernel: its factor and its value's, in two buffers each
# A row of a gradient's tile takes so many bytes besides its elements: lse and delta in float64, or both and two factors
# in float32.
_NUMBERS_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class WideConfig(Sm80QueryConfig):
    """The configuration of a kernel of either pass on wide elements."""

    whole_products: bool  # float64 is multiplied by mma.sync of 16 x 8 x 8
    unroll: int  # steps of a product of queries and keys that are unrolled
    sum_columns: int  # columns of a result whose sums over one tile are in registers at once
    parts: int  # float16 parts of an element of v and dout; 0 for whole elements
    key_parts: int  # float16 parts of an element of q and k; 0 for whole elements


@dataclass(frozen=True, kw_only=True)
class WideGradientConfig(WideConfig):
    """The configuration of a gradient kernel on wide elements."""

    of_keys: bool  # thread blocks stay with keys, not with queries
    computes_dk: bool
    computes_dv: bool


@dataclass(frozen=True)
class _Pass:
    """A problem on a GPU, as the kernels of a pass see it."""

    problem: AttentionProblem
    place: Place
    kind: str  # of products
    asked: frozenset[str]  # see `record.asked_of_scaled`

    @property
    def parts(self) -> int:
        """Float16 parts of an element of v and dout; 0 for whole elements."""
        return PARTS_OF[self.kind]

    def constants(self, record: Record[Sm80Tile], tile: Sm80Tile, sum_columns: int, unroll: int) -> dict[str, Any]:
        """Values for the fields of all kernels; `sum_columns` holds for plain scores, `unroll` for all others."""
        problem, parts, flags = self.problem, self.parts, flags_of(self.problem)
        return {
            **common(WideConfig, dtype_of(self.kind), problem.bias_dtype, flags, record, tile),
            "product_depth": 16 if parts else 8,
            "async_copies": True,
            "aligned": self.place.aligned,
            "plain_scores": has_plain_scores(problem),
            "unroll": unroll if self.asked else 2 if parts else 4,
            "sum_columns": (16 if parts else 8) if self.asked else sum_columns,
            "parts": parts,
            "key_parts": KEY_PARTS[parts] if parts else 0,
        }

    def candidates(
        self, records: Records, smem_bytes: Callable[[Record[Sm80Tile]], int] | None = None
    ) -> tuple[Record[Sm80Tile], ...]:
        """Return the candidates among records of which one needs `smem_bytes`, if that is fixed."""

        def has_room(record: Record[Sm80Tile]) -> bool:
            return smem_bytes is None or fits(record.tile.min_blocks, smem_bytes(record), self.place.limit)

        lines = narrowest(records, self.problem.head_dim, self.problem.head_dim_v)
        return candidates(lines, set(self.asked), self.place.capability, has_room, sm80_times.of_queries)


def _pass_of(problem: AttentionProblem, place: Place) -> _Pass | None:
    """Return what kernels see of a problem; None where other kernels serve better."""
    kind = kind_of(problem)
    if not_taken(HANDLES, problem) or not multiplies(kind, place.capability):
        return None
    # The work space has every row of parts at a multiple of 16 bytes.
    place = place._replace(aligned=place.aligned or PARTS_OF[kind] > 0)
    return _Pass(problem, place, kind, frozenset(asked_of_scaled(problem, place)))


@kept
def forward(problem: AttentionProblem, *place: Any) -> tuple[WideConfig, ...]:
    """The candidates for the forward kernel of a problem; `place` has the fields of `Place`."""
    own = _pass_of(problem, Place(*place))
    if own is None:
        return ()
    size, size_v = element_bytes(own.kind)
    has_room = own.parts > 0 and not has_few_registers(own.kind, own.place.capability)

    def smem_bytes(record: Record[Sm80Tile]) -> int:
        tile, columns = record.tile, size * record.head_dim + size_v * record.head_dim_v
        factors = FLOAT_BYTES * (_FACTORS * tile.block_n + 2 * tile.block_m) if own.parts else 0
        elements = tile.block_m * size * record.head_dim + tile.stages * tile.block_n * columns
        return elements + factors + SMEM_BESIDE_TILES

    def config_of(record: Record[Sm80Tile]) -> WideConfig:
        sum_columns = 64 if has_room and record.head_dim <= 192 and record.tile.block_n != 32 else 32
        return WideConfig(
            entry=record.entries[0],
            whole_products=own.kind == "float64" and own.place.capability >= HOPPER and not own.asked,
            smem_bytes=smem_bytes(record),
            **own.constants(record, record.tile, sum_columns, 2 if has_room else 1),
        )

    found = own.candidates(of_forward(own.kind, own.place.limit), smem_bytes)
    return tuple(with_rules(config_of(record), problem) for record in found)


@kept
def backward(problem: AttentionProblem, *place: Any) -> tuple[tuple[WideGradientConfig, ...], ...]:
    """The candidates for the kernels for dq, dk and dv of a problem, that for dq first in each."""
    own = _pass_of(problem, Place(*place))
    if own is None:
        return ()
    found = own.candidates(of_backward(own.kind, own.place.limit))
    passes = [_gradients(own, record) for record in found]
    # The last record comes once more with loops that are unrolled less, which takes fewer registers.
    passes += [_gradients(own, record, less_unrolled=1) for record in found[-1:]]
    return tuple(tuple(with_rules(config, problem) for config in each) for each in dict.fromkeys(passes))


def _gradients(own: _Pass, record: Record[Sm80Tile], less_unrolled: int = 0) -> tuple[WideGradientConfig, ...]:
    """The configurations of the kernels of a record, with fewer rows where its tile does not fit."""
    parts, tile = own.parts, record.tile
    shares = tile.key_warps > 1
    takes_wider = not parts and own.place.capability >= HOPPER
    # A warp that has half of a result's columns holds many sums, so its loop is not unrolled.
    unroll = 1 if takes_wider and tile.key_warps == 2 else _unroll(parts) - less_unrolled
    sum_columns = 64 if parts > 1 and tile.stages > 1 else 32  # 32 columns take more registers than two stages leave
    configs = []
    size, size_v = element_bytes(own.kind)
    for entry in record.entries:
        wanted = key_results(entry)
        row_bytes = record.head_dim * (size if wanted == ("dv",) else size + size_v) + _NUMBERS_BYTES
        column_bytes = record.head_dim * (size + size_v) + _NUMBERS_BYTES
        columns_bytes = tile.stages * tile.block_n * column_bytes + SMEM_BESIDE_TILES
        fewer = tile
        if shares and not parts:
            row_bytes += tile.block_n * size  # warps exchange weights and gradients through this room
        while shares and fewer.block_m * row_bytes + columns_bytes > own.place.limit:
            # Whole elements are copied by all warps alike, so that their rows are halved.
            less = 16 if parts else fewer.block_m // 2
            num_warps = fewer.num_warps - less // 16 * tile.key_warps
            fewer = replace(fewer, block_m=fewer.block_m - less, num_warps=num_warps)
        turned = replace(fewer, block_m=fewer.block_n, block_n=fewer.block_m) if wanted else fewer
        config = WideGradientConfig(
            entry=entry,
            whole_products=takes_wider,
            of_keys=bool(wanted),
            computes_dk="dk" in wanted,
            computes_dv="dv" in wanted,
            smem_bytes=fewer.block_m * row_bytes + columns_bytes,
            **own.constants(record, turned, sum_columns, unroll),
        )
        configs.append(config)
    return tuple(configs)


def _unroll(parts: int) -> int:
    """Steps of a product that a gradient kernel with options unrolls."""
    return 2 if parts else 3


@kept
def of_bias(problem: AttentionProblem, *place: Any) -> tuple[WideGradientConfig, ...]:
    """The candidates for the gradient of a bias of any shape, whose scale may be any."""
    own = _pass_of(replace(problem, bias=None), Place(*place))
    if own is None:
        return ()
    own = replace(own, asked=own.asked - {UNUSUAL_SCALE})

    def smem_bytes(record: Record[Sm80Tile]) -> int:
        tile, sizes = record.tile, element_bytes(own.kind)
        columns = tile.stages * WideConfig.chunk * max(sizes) if tile.stages > 1 else record.head_dim * sum(sizes)
        return (tile.block_m + tile.block_n) * (columns + _NUMBERS_BYTES) + SMEM_BESIDE_TILES

    def config_of(record: Record[Sm80Tile]) -> WideGradientConfig:
        in_chunks = record.tile.stages > 1
        config = WideGradientConfig(
            entry=record.entries[0],
            whole_products=own.kind == "float64" and own.place.capability >= HOPPER and (in_chunks or not own.asked),
            of_keys=False,
            computes_dk=False,
            computes_dv=False,
            smem_bytes=smem_bytes(record),
            **replace(own, asked=own.asked | {"has_bias"}).constants(record, record.tile, 32, _unroll(own.parts)),
        )
        config = replace(config, has_bias=True, plain_scores=False)
        return replace(config, unroll=1) if in_chunks and config.parts else config

    found = own.candidates(of_bias_records(own.kind, own.place.limit), smem_bytes)
    return tuple(with_rules(config_of(record), problem) for record in found)
