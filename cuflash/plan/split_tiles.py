"""Tiles of Hopper's float32 kernels by number of float16 parts, head dims and options; `split` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class SplitRow:
    """Tiles for head dims up to these, by options.

    No kernel spills registers. A tile is None where that leaves none, and other kernels run.
    """

    head_dim: int  # widest q and k
    head_dim_v: int  # widest v
    full: SplitTile  # tile without options
    windowed: SplitTile  # tile with causal or a window alone
    with_options: SplitTile | None  # tile with any option but a bias and a mask
    with_array: SplitTile | None  # tile with a bias or a mask alone
    with_all: SplitTile | None  # tile with a bias or a mask and any other option but a window
    # These tiles are for a block mask and more options, where the keys above are no multiple of a word's bits.
    with_blocks: SplitTile | None = None
    with_blocks_and_more: SplitTile | None = None


_SMALL, _SMALLEST = SplitTile(64, 32, 2, 1, ping_pong=False), SplitTile(64, 16, ping_pong=False)
# Keys are numbers of parts. The first row is taken whose head dims are no smaller than the problem's. `*2 * (tile,)` is
# one tile for two kinds of options.
FORWARD = {
    2: (
        SplitRow(64, 64, *2 * (SplitTile(128, 112),), *2 * (SplitTile(128, 64),), SplitTile(128, 32)),
        SplitRow(
            128,
            128,
            SplitTile(128, 64, 2, 1),
            SplitTile(128, 48),
            SplitTile(128, 32),
            *2 * (SplitTile(128, 16),),
            SplitTile(128, 32),
        ),
        SplitRow(192, 128, *3 * (SplitTile(128, 32, 1, 1),), *2 * (SplitTile(128, 16),), *2 * (_SMALL,)),
        SplitRow(192, 192, *2 * (SplitTile(128, 32, 1, 1),), None, None, None),
        SplitRow(256, 128, *4 * (_SMALL,), _SMALLEST, _SMALL, _SMALLEST),
        SplitRow(256, 256, *2 * (_SMALLEST,), None, None, None),
    ),
    1: (
        SplitRow(64, 64, *2 * (SplitTile(128, 128),), *2 * (SplitTile(128, 64),), SplitTile(128, 32)),
        SplitRow(128, 128, *2 * (SplitTile(128, 96),), SplitTile(128, 64), *2 * (SplitTile(128, 32),)),
        SplitRow(
            192, 192, *2 * (SplitTile(128, 64),), *2 * (SplitTile(128, 32),), SplitTile(128, 16), SplitTile(128, 32)
        ),
        SplitRow(256, 128, *4 * (SplitTile(128, 64),), SplitTile(128, 32)),
        SplitRow(256, 256, *3 * (SplitTile(128, 32),), None, None),
    ),
}


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
