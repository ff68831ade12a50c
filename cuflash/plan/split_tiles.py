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


@dataclass(frozen=True)
class SplitGradientRow:
    """Kernels for head dims up to this one and their tiles, by entry.

    dk and dv have a kernel each where both together would spill registers.
    """

    head_dim: int  # widest q, k and v
    plain: dict[str, SplitGradientTile]  # tiles without options but a window
    with_options: dict[str, SplitGradientTile]  # tiles with any other option
    most_of_two: int = 16  # most columns with a block mask and two more options; with 0 other kernels run
    narrow: tuple[set[str], ...] = ()  # sets of flags with which tiles have no more columns than that
    without: tuple[set[str], ...] = ()  # sets of flags with which other kernels run


def _apart(tile: SplitGradientTile, dv_tile: SplitGradientTile | None = None) -> dict[str, SplitGradientTile]:
    return {DQ: tile, DK: tile, DV: dv_tile or tile}


_BIAS_AND_BLOCKS, _MASK_AND_BLOCKS = {"has_bias", "has_block_mask"}, {"has_mask", "has_block_mask"}
DROPOUT_AND_BLOCKS = {"has_dropout", "has_block_mask"}
_MANY = {"has_bias", "has_mask", "has_alibi", "has_dropout"}
# Keys are numbers of parts. The first row is taken that is wide enough; where none is, other kernels run.
BACKWARD = {
    2: (
        SplitGradientRow(
            64,
            {DQ: SplitGradientTile(128, 64), DKV: SplitGradientTile(128, 48)},
            {DQ: SplitGradientTile(128, 32), DKV: SplitGradientTile(128, 32)},
            narrow=(_MANY,),
        ),
        SplitGradientRow(
            128,
            _apart(SplitGradientTile(128, 32, 2, 1), SplitGradientTile(128, 64, 2, 1)),
            _apart(SplitGradientTile(128, 32, 2, 1), SplitGradientTile(128, 32)),
            narrow=(_MANY,),
        ),
        SplitGradientRow(
            192,
            _apart(SplitGradientTile(64, 32, 2, 1), SplitGradientTile(64, 48, 2, 1)),
            _apart(SplitGradientTile(64, 32, 2, 1)),
            narrow=(_BIAS_AND_BLOCKS, _MASK_AND_BLOCKS, DROPOUT_AND_BLOCKS, _MANY),
        ),
        SplitGradientRow(
            256,
            *2 * (_apart(SplitGradientTile(64, 16, 2, 1), SplitGradientTile(64, 32, 2, 1)),),
            0,
            (DROPOUT_AND_BLOCKS,),
            (
                _BIAS_AND_BLOCKS,
                _MASK_AND_BLOCKS,
                {"has_bias", "has_mask"},
                {"has_bias", "has_alibi"},
                {"has_mask", "has_alibi", "has_dropout"},
            ),
        ),
    ),
    1: (
        SplitGradientRow(
            64,
            {DQ: SplitGradientTile(128, 64), DKV: SplitGradientTile(128, 64)},
            {DQ: SplitGradientTile(128, 64), DKV: SplitGradientTile(128, 32)},
            32,
            ({"has_bias", "has_mask"}, {"has_bias", "has_alibi", "has_dropout"}),
        ),
        SplitGradientRow(
            128,
            {DQ: SplitGradientTile(128, 64), DKV: SplitGradientTile(128, 32)},
            _apart(SplitGradientTile(128, 32)),
            0,
        ),
        SplitGradientRow(
            192,
            _apart(SplitGradientTile(128, 48, 2, 1)),
            _apart(SplitGradientTile(128, 32)),
            narrow=(_BIAS_AND_BLOCKS,),
        ),
        SplitGradientRow(256, _apart(SplitGradientTile(128, 32, 2, 1)), _apart(SplitGradientTile(128, 16)), 0),
    ),
}
