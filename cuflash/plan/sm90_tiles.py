"""Tiles of Hopper's forward kernel on 16 bits, by head dims and options; `sm90_forward` chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

_LEAST_OF_HALVES = 64  # keys of a tile that can be halved
MOST_PLAIN_ROWS = 128  # beside tiles of more rows a thread that loads has 32 registers


@dataclass(frozen=True)
class Sm90Tile:
    """A tile, and how the kernel schedules its steps."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    ping_pong: bool = True  # the warpgroups alternate at the tensor cores
    early_eighths: int = 0  # eighths of a step's powers that come before the wait for the last product with values
    exact: bool = (
        False  # a row's reference follows its maximum, whose weight is then exactly 1; else only if it grows much
    )
    stages: int = 2  # buffers of keys and values
    alone: int = 0  # warpgroups of a second team, which has tiles and shared memory of its own
    keys_in_reverse: bool = False  # the keys of a window are taken from the last to the first
    query_steps_in_registers: int = 0  # groups of 16 columns of q that are held in registers
    pair: int = 1  # thread blocks of a cluster that have tiles of one head together and share its keys
    early_draws: int = 0  # groups of 16 keys whose random bits are drawn while the products are computed
    waits_after_powers: bool = False  # powers and draws come before the wait for the last product with values


@dataclass(frozen=True)
class Sm90Row:
    """Tiles for head dims up to these, by options.

    The more registers an option takes, the smaller is the tile, so that no kernel spills. A narrow window hides less of
    a small tile. The largest weights decide the error, so maxima are exact where that costs little: with few keys, and
    with very many, where maxima grow rarely. A tile that is None is replaced by a more general one.
    """

    head_dim: int  # widest q and k
    head_dim_v: int  # widest v
    full: Sm90Tile  # tile without options
    windowed: Sm90Tile  # tile with causal or a window alone
    with_score: Sm90Tile  # tile with softcap or alibi
    with_dropout: Sm90Tile  # tile with dropout
    with_mask: Sm90Tile  # tile with a mask or a block mask
    with_bias: Sm90Tile  # tile with a bias that TMA loads
    with_more: Sm90Tile  # tile with several options
    few_queries: Sm90Tile  # tile of few queries, with any options but a block mask
    many_keys: Sm90Tile | None = None  # tile without options and with many keys
    many_windowed: Sm90Tile | None = None  # tile with a window and many keys
    narrow_window: Sm90Tile | None = None  # tile with a window that is narrow on both sides
    with_blocks: Sm90Tile | None = None  # tile with a block mask, before `with_mask`
    with_mask_tiles: Sm90Tile | None = None  # tile with a mask that TMA loads, before `with_mask`
    few_with_bias: Sm90Tile | None = None  # tile of few queries with a bias that TMA does not load
    spare: Sm90Tile | None = None  # tile in place of those that leave no register: see `with_spare_registers`
    paged_heads: Sm90Tile | None = None  # tile of many rows of several heads with pages, before `spare`
    paged_heads_with_more: Sm90Tile | None = None  # the same with options, before `with_more`
    bounded: Sm90Tile | None = None  # tile with a softcap whose bound replaces maxima
    exact_again: int = 1 << 30  # from so many keys on a problem without a window takes the tile for few keys again
    of_small_grids: tuple[Sm90Tile, ...] = ()  # more tiles for grids that do not fill a GPU, at most with a window

    def tiles_for_rules(self, with_others: bool) -> tuple[Sm90Tile, ...]:
        """The tiles that users' own rules can take, the fastest first.

        `with_others` says that there are more options than one.
        """
        more = self.with_more
        smaller = (replace(more, block_n=more.block_n // 2),) if more.block_n >= _LEAST_OF_HALVES else ()
        return (*(() if with_others else (self.with_mask,)), more, *smaller)

    @property
    def tiles(self) -> tuple[Sm90Tile, ...]:
        """All tiles of the row."""
        return tuple(x for x in vars(self).values() if isinstance(x, Sm90Tile))

    def with_spare_registers(self, tile: Sm90Tile) -> Sm90Tile:
        """The tile that takes the place of this one with pages, and where a tile has the rows of several heads."""
        fills_registers = tile.query_steps_in_registers or tile.block_m > MOST_PLAIN_ROWS
        return replace(self.spare if self.spare and fills_registers else tile, pair=1)

    def of_heads(self, tile: Sm90Tile, has_pages: bool, has_options: bool) -> Sm90Tile:
        """The tile that takes the place of this one where it has the rows of several heads.

        Each option, but a window, asks for registers for each of a thread's rows, which many rows do not leave.
        """
        if tile.block_m > self.few_queries.block_m and has_options:
            return (has_pages and self.paged_heads_with_more) or self.with_more
        if tile.block_m > self.few_queries.block_m and has_pages and self.paged_heads:
            return self.paged_heads
        return self.with_spare_registers(tile)

    def of_few_queries(self, biases_one_by_one: bool) -> Sm90Tile:
        """The tile for few queries; `biases_one_by_one` says that TMA does not load their bias."""
        return self.few_with_bias if self.few_with_bias and biases_one_by_one else self.few_queries

    def plain_tiles(self, windowed: bool) -> list[Sm90Tile]:
        """The tiles that a problem without options, or with a window alone, can take."""
        tiles = (self.windowed, self.many_windowed) if windowed else (self.full, self.many_keys)
        return [tile for tile in (*tiles, *self.of_small_grids, self.few_queries) if tile]


_TEAMS = Sm90Tile(128, 64, ping_pong=False, alone=1)
# The first row is taken that is wide enough. Its tiles are full, windowed, with_score, _dropout, _mask, _bias, _more.
FORWARD = (
    Sm90Row(
        64,
        64,
        Sm90Tile(256, 64, exact=True),
        Sm90Tile(256, 64, exact=True),
        Sm90Tile(192, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 64),
        many_keys=Sm90Tile(192, 128),
        many_windowed=Sm90Tile(192, 128, exact=True),
        narrow_window=Sm90Tile(256, 64),
        few_queries=Sm90Tile(64, 128, ping_pong=False, stages=3),
        few_with_bias=Sm90Tile(64, 64, ping_pong=False, stages=3),
        with_blocks=Sm90Tile(128, 64, ping_pong=False, alone=2),
        spare=Sm90Tile(128, 128, exact=True),
        bounded=Sm90Tile(192, 96),
        of_small_grids=(Sm90Tile(128, 128, exact=True),),
    ),
    Sm90Row(
        96,
        96,
        Sm90Tile(128, 128, early_eighths=2),
        Sm90Tile(128, 128, early_eighths=2),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 64),
        few_queries=Sm90Tile(64, 64, ping_pong=False, stages=3),
        with_blocks=_TEAMS,
        spare=Sm90Tile(128, 128, exact=True),
        paged_heads_with_more=Sm90Tile(128, 32),
        bounded=Sm90Tile(192, 96),
    ),
    Sm90Row(
        128,
        128,
        Sm90Tile(128, 128, early_eighths=2, exact=True),
        Sm90Tile(128, 128, early_eighths=2, exact=True, keys_in_reverse=True),
        Sm90Tile(192, 80),
        Sm90Tile(128, 128, ping_pong=False),
        Sm90Tile(128, 128),
        Sm90Tile(128, 128),
        Sm90Tile(128, 64),
        many_keys=Sm90Tile(192, 80),
        many_windowed=Sm90Tile(192, 80),
        narrow_window=Sm90Tile(192, 64),
        few_queries=Sm90Tile(64, 64, ping_pong=False, stages=3),
        with_blocks=_TEAMS,
        spare=Sm90Tile(128, 128, exact=True),
        paged_heads_with_more=Sm90Tile(128, 32),
        bounded=Sm90Tile(192, 80, ping_pong=False),
    ),
    Sm90Row(
        192,
        128,
        Sm90Tile(128, 128, early_eighths=2),
        Sm90Tile(128, 128, early_eighths=2),
        Sm90Tile(128, 96),
        Sm90Tile(128, 128),
        Sm90Tile(128, 96),
        Sm90Tile(128, 96),
        Sm90Tile(128, 32),
        few_queries=Sm90Tile(64, 64, ping_pong=False, stages=3),
        with_blocks=Sm90Tile(128, 128),
        bounded=Sm90Tile(128, 128, ping_pong=False),
    ),
    Sm90Row(
        192,
        192,
        Sm90Tile(128, 112),
        Sm90Tile(128, 112),
        Sm90Tile(128, 80),
        Sm90Tile(128, 96),
        Sm90Tile(128, 64),
        Sm90Tile(128, 64),
        Sm90Tile(128, 32),
        few_queries=Sm90Tile(64, 64, ping_pong=False, stages=3),
        few_with_bias=Sm90Tile(64, 32, ping_pong=False, stages=3),
        paged_heads=Sm90Tile(128, 64),
        with_mask_tiles=Sm90Tile(128, 80),
        bounded=Sm90Tile(128, 96, ping_pong=False),
    ),
    Sm90Row(
        256,
        256,
        Sm90Tile(128, 64, early_eighths=4, exact=True, query_steps_in_registers=6),
        Sm90Tile(128, 64, early_eighths=4, exact=True, query_steps_in_registers=6),
        Sm90Tile(128, 48),
        Sm90Tile(128, 64),
        Sm90Tile(128, 32),
        Sm90Tile(128, 32),
        Sm90Tile(64, 32, ping_pong=False),
        many_keys=Sm90Tile(128, 64, early_eighths=4, query_steps_in_registers=6),
        many_windowed=Sm90Tile(128, 64, early_eighths=2, keys_in_reverse=True, query_steps_in_registers=6, pair=2),
        few_queries=Sm90Tile(64, 32, ping_pong=False, stages=3),
        spare=Sm90Tile(128, 64),
        paged_heads=Sm90Tile(128, 32),
        with_blocks=Sm90Tile(128, 64),
        with_mask_tiles=Sm90Tile(128, 64),
        exact_again=4096,
        bounded=Sm90Tile(128, 64, ping_pong=False),
    ),
)
