"""Tiles of Hopper's float32 kernels by number of float16 parts, head dims and options; `split` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.plan.record import PLAIN, Record, Takes, one_of, records

# Entries of the gradient kernels: each computes the results that its name ends with.
DQ, DKV, DK, DV = "split_dq", "split_dkv", "split_dk", "split_dv"


@dataclass(frozen=True)
class SplitTile:
    """The tile of a forward kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    key_stages: int = 2  # buffers of keys
    value_stages: int = 2  # buffers of values
    ping_pong: bool = True  # the warpgroups alternate at the tensor cores
    producer_registers: int = 40  # registers of a thread that loads


def _forward(parts: int, head_dim: int, head_dim_v: int, *lines: Record[SplitTile]) -> tuple[Record[SplitTile], ...]:
    return records(("split_forward",), str(parts), (head_dim, head_dim_v), *lines)


def _small(block_n: int, value_stages: int = 2) -> SplitTile:
    return SplitTile(64, block_n, 2, value_stages, ping_pong=False, producer_registers=80)


# A window is an option here where there is no other.
_WINDOWED = one_of("has_window")
_WITHOUT_ARRAYS = Takes(None, 99, lacks=("has_bias", "has_mask"))
_WITHOUT_BLOCKS = Takes(None, 99, lacks=("has_block_mask",))
_ARRAY_ALONE = one_of("has_bias", "has_mask")
_WITH_BLOCKS = tuple(Takes((flag, "has_block_mask"), 2, 2) for flag in ("has_bias", "has_mask"))


def _taking(tile: SplitTile, *takes: Takes) -> tuple[Record[SplitTile], ...]:
    return tuple(Record(tile, each) for each in takes)


# Keys are numbers of parts. No kernel spills registers; where that leaves no line, other kernels run.
FORWARD = {
    2: (
        *_forward(
            2, 64, 64,
            Record(SplitTile(128, 112), _WINDOWED),
            *_taking(SplitTile(128, 64), _WITHOUT_ARRAYS, _ARRAY_ALONE),
            Record(SplitTile(128, 32)),
        ),
        *_forward(
            2, 128, 128,
            Record(SplitTile(128, 64, 2, 1), PLAIN),
            Record(SplitTile(128, 48), _WINDOWED),
            *_taking(SplitTile(128, 32), _WITHOUT_ARRAYS, *_WITH_BLOCKS),
            Record(SplitTile(128, 16), _WITHOUT_BLOCKS),
        ),
        *_forward(
            2, 192, 128,
            Record(SplitTile(128, 32, 1, 1), _WITHOUT_ARRAYS),
            Record(SplitTile(128, 16), _WITHOUT_BLOCKS),
            Record(_small(32, 1)),
        ),
        *_forward(2, 192, 192, Record(SplitTile(128, 32, 1, 1), _WINDOWED)),
        *_forward(
            2, 256, 128,
            *_taking(_small(32, 1), _WITHOUT_ARRAYS, _ARRAY_ALONE, *_WITH_BLOCKS),
            Record(_small(16)),
        ),
        *_forward(2, 256, 256, Record(_small(16), _WINDOWED)),
    ),
    1: (
        *_forward(
            1, 64, 64,
            Record(SplitTile(128, 128), _WINDOWED),
            *_taking(SplitTile(128, 64), _WITHOUT_ARRAYS, _ARRAY_ALONE),
            Record(SplitTile(128, 32)),
        ),
        *_forward(
            1, 128, 128,
            Record(SplitTile(128, 96), _WINDOWED),
            Record(SplitTile(128, 64), _WITHOUT_ARRAYS),
            Record(SplitTile(128, 32)),
        ),
        *_forward(
            1, 192, 192,
            Record(SplitTile(128, 64), _WINDOWED),
            *_taking(SplitTile(128, 32), _WITHOUT_ARRAYS, _ARRAY_ALONE, *_WITH_BLOCKS),
            Record(SplitTile(128, 16), _WITHOUT_BLOCKS),
        ),
        *_forward(
            1, 256, 128, *_taking(SplitTile(128, 64), _WITHOUT_ARRAYS, _ARRAY_ALONE), Record(SplitTile(128, 32))
        ),
        *_forward(1, 256, 256, Record(SplitTile(128, 32), _WITHOUT_ARRAYS)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SplitGradientTile:
    """The tile of a gradient kernel: a thread block stays with `rows` and iterates over tiles of `columns`.

    Rows are queries for dq and keys for dk and dv; columns are the others.
    """

    rows: int
    columns: int
    stages: int = 2  # buffers of the columns' keys or queries
    stages_v: int = 2  # buffers of the columns' values or dout


# The tiles of a pass, one for each of its kernels.
Tiles = tuple[SplitGradientTile, ...]
# dk and dv have a kernel each where both together would spill registers.
_TOGETHER, _APART = (DQ, DKV), (DQ, DK, DV)


def _tiles(*columns: int, rows: int = 128, stages_v: int = 2) -> Tiles:
    return tuple(SplitGradientTile(rows, n, stages_v=stages_v) for n in columns)


def _gradients(parts: int, head_dim: int, entries: tuple[str, ...], *lines: Record[Tiles]) -> tuple[Record[Tiles], ...]:
    return records(entries, str(parts), (head_dim, head_dim), *lines)


# Keys are numbers of parts. The last line of each has the fewest columns, which take the fewest registers.
BACKWARD = {
    2: (
        *_gradients(2, 64, _TOGETHER, Record(_tiles(64, 48), PLAIN), Record(_tiles(32, 32)), Record(_tiles(16, 16))),
        *_gradients(
            2, 128, _APART,
            Record((*_tiles(32, 32, stages_v=1), *_tiles(64, stages_v=1)), PLAIN),
            Record((*_tiles(32, 32, stages_v=1), *_tiles(32))),
            Record((*_tiles(16, 16, stages_v=1), *_tiles(16))),
        ),
        *_gradients(
            2, 192, _APART,
            Record(_tiles(32, 32, 48, rows=64, stages_v=1), PLAIN),
            Record(_tiles(32, 32, 32, rows=64, stages_v=1)),
            Record(_tiles(16, 16, 16, rows=64, stages_v=1)),
        ),
        *_gradients(
            2, 256, _APART,
            Record(_tiles(16, 16, 32, rows=64, stages_v=1)),
            Record(_tiles(16, 16, 16, rows=64, stages_v=1)),
        ),
    ),
    1: (
        *_gradients(
            1, 64, _TOGETHER,
            Record(_tiles(64, 64), PLAIN),
            Record(_tiles(64, 32), _WITHOUT_BLOCKS),
            Record(_tiles(32, 32)),
            Record(_tiles(16, 16)),
        ),
        *_gradients(1, 128, _TOGETHER, Record(_tiles(64, 32), PLAIN)),
        *_gradients(1, 128, _APART, Record(_tiles(32, 32, 32)), Record(_tiles(16, 16, 16))),
        *_gradients(
            1, 192, _APART,
            Record(_tiles(48, 48, 48, stages_v=1), PLAIN),
            Record(_tiles(32, 32, 32)),
            Record(_tiles(16, 16, 16)),
        ),
        *_gradients(
            1, 256, _APART, Record(_tiles(32, 32, 32, stages_v=1), PLAIN), Record(_tiles(16, 16, 16))
        ),
    ),
}  # fmt: skip
