"""Tiles of Hopper's forward kernel on 16 bits, by head dims and options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and whether the warpgroups take turns at the tensor cores.

    Of the powers of a step, `early_eighths` are taken before the last product with values is waited for. With `exact`
    a row's reference follows its maximum, whose weight then is exactly 1; else it only does when that grows much.
    With `from_last` the keys of a window are taken from the last to the first.
    """

    block_m: int
    block_n: int
    ping_pong: bool = True
    early_eighths: int = 0
    exact: bool = False
    stages: int = 2
    alone: int = 0  # warpgroups of a second team
    from_last: bool = False
    held_steps: int = 0  # of queries, in registers
    pair: int = 1  # blocks of a tile
    early_draws: int = 0  # groups of 16 keys whose random bits are drawn while the products are computed
    late_wait: bool = False  # powers and draws come before the wait for the last product with values


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these: without a window, with one, and with other options.

    The more an option takes in registers, the smaller the tile: no kernel spills. A narrow window hides less of a small
    tile. The largest weights decide the error, so maxima are exact where they cost little: of few keys, and of very
    many, where they grow rarely.
    """

    head_dim: int
    head_dim_v: int
    full: Tile
    windowed: Tile
    with_score: Tile  # softcap or alibi
    with_dropout: Tile
    with_mask: Tile  # mask or block mask
    with_bias: Tile  # by TMA
    with_more: Tile  # several options
    many_keys: Tile | None = None
    many_windowed: Tile | None = None
    narrow_window: Tile | None = None
    few_queries: Tile | None = None
    with_blocks: Tile | None = None  # block mask
    with_mask_tiles: Tile | None = None  # mask by TMA
    bounded: Tile | None = None  # softcap by bounded scores
    exact_again: int = 1 << 30  # from so many keys on, without a window, the tile for few
    of_small_grids: tuple[Tile, ...] = ()  # more tiles for the same queries, without options but a window

    def plain_tiles(self, windowed: bool) -> list[Tile]:
        """What a problem without options but a window can take."""
        tiles = (self.windowed, self.many_windowed) if windowed else (self.full, self.many_keys)
        return [tile for tile in (*tiles, *self.of_small_grids, self.few_queries) if tile]


_TEAMS = Tile(128, 64, ping_pong=False, alone=1)
# The first row that is wide enough is taken. Tiles: full, windowed, with_score, _dropout, _mask, _bias, _more.
FORWARD = (
    Row(
        64,
        64,
        Tile(256, 64, exact=True),
        Tile(256, 64, exact=True),
        Tile(192, 128),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 64),
        many_keys=Tile(192, 128),
        many_windowed=Tile(192, 128, exact=True),
        narrow_window=Tile(256, 64),
        few_queries=Tile(64, 128, ping_pong=False, stages=3),
        with_blocks=Tile(128, 64, ping_pong=False, alone=2),
        bounded=Tile(192, 96),
        of_small_grids=(Tile(128, 128, exact=True),),
    ),
    Row(
        96,
        96,
        Tile(128, 128, early_eighths=2),
        Tile(128, 128, early_eighths=2),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 64),
        with_blocks=_TEAMS,
        bounded=Tile(192, 96),
    ),
    Row(
        128,
        128,
        Tile(128, 128, early_eighths=2, exact=True),
        Tile(128, 128, early_eighths=2, exact=True, from_last=True),
        Tile(192, 80),
        Tile(128, 128, ping_pong=False),
        Tile(128, 128),
        Tile(128, 128),
        Tile(128, 64),
        many_keys=Tile(192, 80),
        many_windowed=Tile(192, 80),
        narrow_window=Tile(192, 64),
        few_queries=Tile(64, 64, ping_pong=False, stages=3),
        with_blocks=_TEAMS,
        bounded=Tile(192, 80, ping_pong=False),
    ),
    Row(
        192,
        128,
        Tile(128, 128, early_eighths=2),
        Tile(128, 128, early_eighths=2),
        Tile(128, 96),
        Tile(128, 128),
        Tile(128, 96),
        Tile(128, 96),
        Tile(128, 32),
        with_blocks=Tile(128, 128),
        bounded=Tile(128, 128, ping_pong=False),
    ),
    Row(
        192,
        192,
        Tile(128, 112),
        Tile(128, 112),
        Tile(128, 80),
        Tile(128, 96),
        Tile(128, 64),
        Tile(128, 64),
        Tile(128, 32),
        with_mask_tiles=Tile(128, 80),
        bounded=Tile(128, 96, ping_pong=False),
    ),
    Row(
        256,
        256,
        Tile(128, 64, early_eighths=4, exact=True, held_steps=6),
        Tile(128, 64, early_eighths=4, exact=True, held_steps=6),
        Tile(128, 48),
        Tile(128, 64),
        Tile(128, 32),
        Tile(128, 32),
        Tile(64, 32, ping_pong=False),
        many_keys=Tile(128, 64, early_eighths=4, held_steps=6),
        many_windowed=Tile(128, 64, early_eighths=2, from_last=True, held_steps=6, pair=2),
        few_queries=Tile(64, 32, ping_pong=False, stages=3),
        with_blocks=Tile(128, 64),
        with_mask_tiles=Tile(128, 64),
        exact_again=4096,
        bounded=Tile(128, 64, ping_pong=False),
    ),
)
