"""Records of Hopper's forward kernel on 16 bits: tiles by head dims, options and what a problem is like. Data only.

The first line that takes a problem is the fastest that keeps its registers. The more registers an option takes, the
smaller is the tile, and the lines for options alone stand before those for several. The largest weights decide the
error, so maxima are exact where that costs little: with few keys, and with very many, where maxima grow rarely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plan.config import OF_RULES, WIDEST
from cuflash.plan.record import ANYTHING, PLAIN, Record, Word, one_of, records


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
    keeps_maxima: bool = False  # rows have maxima although a softcap bounds the scores: that takes fewer registers
    stages: int = 2  # buffers of keys and values
    alone: int = 0  # warpgroups of a second team, which has tiles and shared memory of its own
    keys_in_reverse: bool = False  # the keys of a window are taken from the last to the first
    query_steps_in_registers: int = 0  # groups of 16 columns of q that are held in registers
    pair: int = 1  # thread blocks of a cluster that have tiles of one head together and share its keys
    early_draws: int = 0  # groups of 16 keys whose random bits are drawn while the products are computed
    waits_after_powers: bool = False  # powers and draws come before the wait for the last product with values


# These words say what a problem is like, besides its options.
FEW_QUERIES = Word("few queries")  # one tile has the queries of a head
MANY, VERY_MANY = Word("many keys"), Word("very many keys")
WINDOW, NARROW_WINDOW = Word("window"), Word("narrow window")  # a narrow one hides less of a small tile
PLAIN_SCORES = Word("plain scores")  # the scale is one that kernels may multiply by log2(e) in advance
BOUNDED = Word("bounded")  # a softcap's bound replaces maxima
# TMA loads tiles of a bias and a mask, or threads load elements.
BIAS_TILES, BIAS_ELEMENTS, MASK_TILES = Word("bias tiles"), Word("bias elements"), Word("mask tiles")
HEADS = Word("heads")  # a tile has the rows of several heads
PAGES, COPIED_ROWS = Word("pages"), Word("copied rows")  # keys lie in pages, and threads copy the rows of these
WIDE_RESULTS = "wide results"  # results are float32; it takes registers as options do

ENTRY = "forward_sm90"
_SOFTCAP, _BIAS, _MASK, _DROPOUT = (one_of(f"has_{name}") for name in ("softcap", "bias", "mask", "dropout"))
_SCORE = one_of("has_softcap", "has_alibi")
_BLOCKS = replace(one_of("has_block_mask"), least=1)
_BLOCKS_OF_TEAMS = replace(_BLOCKS, lacks=(PAGES,))  # one team loads pages
_BITS = one_of("has_mask", "has_block_mask", *OF_RULES)
_ANY_OF_ROWS = replace(ANYTHING, lacks=("has_block_mask", *OF_RULES))
# Each option asks for registers for each of a thread's rows, which many rows of several heads do not leave.
_OPTIONS = replace(ANYTHING, least=1)

_128X128, _128X96, _128X64, _128X32 = (Sm90Tile(128, n) for n in (128, 96, 64, 32))
_EXACT = replace(_128X128, exact=True)
_TEAMS = replace(_128X64, ping_pong=False, alone=1)
_FEW_64X128, _FEW_64X64, _FEW_64X32 = (Sm90Tile(64, n, ping_pong=False, stages=3) for n in (128, 64, 32))
_64X32 = Sm90Tile(64, 32, ping_pong=False)
_D64 = Sm90Tile(256, 64, exact=True)
_D128 = Sm90Tile(128, 128, early_eighths=2, exact=True)
_D256 = Sm90Tile(128, 64, early_eighths=4, exact=True, query_steps_in_registers=6)
FORWARD: tuple[Record[Sm90Tile], ...] = (
    *records(
        (ENTRY,), "half", (64, 64),
        Record(_FEW_64X64, _ANY_OF_ROWS, needs=(FEW_QUERIES, BIAS_ELEMENTS)),
        Record(_FEW_64X128, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X64, _OPTIONS, needs=(HEADS,)),
        Record(replace(_D64, exact=False), PLAIN, needs=(PLAIN_SCORES, NARROW_WINDOW)),
        Record(Sm90Tile(192, 128, exact=True), PLAIN, needs=(PLAIN_SCORES, MANY, WINDOW)),
        Record(Sm90Tile(192, 128), PLAIN, needs=(PLAIN_SCORES, MANY)),
        Record(_D64, PLAIN, needs=(PLAIN_SCORES,)),
        Record(Sm90Tile(192, 96), _SOFTCAP, needs=(BOUNDED,)),
        Record(Sm90Tile(192, 128), _SCORE),
        Record(_EXACT, _SCORE),
        Record(_128X128, _DROPOUT),
        Record(replace(_TEAMS, alone=2), _BLOCKS_OF_TEAMS),
        Record(_128X128, _BIAS, needs=(BIAS_TILES,)),
        Record(_128X128, _BITS),
        Record(_128X64),
        Record(_128X32),
    ),
    *records(
        (ENTRY,), "half", (96, 96),
        Record(_FEW_64X64, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X32, _OPTIONS, needs=(HEADS, PAGES)),
        Record(_128X64, _OPTIONS, needs=(HEADS,)),
        Record(Sm90Tile(192, 112), PLAIN, needs=(PLAIN_SCORES,), most_columns=80),
        Record(Sm90Tile(192, 96), PLAIN, needs=(PLAIN_SCORES,)),
        Record(replace(_128X128, early_eighths=2), PLAIN, needs=(PLAIN_SCORES,)),
        Record(Sm90Tile(192, 96), _SOFTCAP, needs=(BOUNDED,)),
        Record(_EXACT, _SOFTCAP, needs=(BOUNDED,)),
        Record(_128X128, _SCORE),
        Record(_128X128, _DROPOUT),
        Record(_TEAMS, _BLOCKS_OF_TEAMS),
        Record(_128X128, _BIAS, needs=(BIAS_TILES,)),
        Record(_128X128, _BITS),
        Record(_128X64),
        Record(_128X32),
    ),
    *records(
        (ENTRY,), "half", (128, 128),
        Record(_FEW_64X64, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X32, _OPTIONS, needs=(HEADS, PAGES)),
        Record(_128X64, _OPTIONS, needs=(HEADS,)),
        Record(Sm90Tile(192, 64), PLAIN, needs=(PLAIN_SCORES, NARROW_WINDOW)),
        Record(Sm90Tile(192, 96), PLAIN, needs=(PLAIN_SCORES, MANY), most_columns=112),
        Record(Sm90Tile(192, 80), PLAIN, needs=(PLAIN_SCORES, MANY)),
        Record(_EXACT, PLAIN, needs=(PLAIN_SCORES, MANY, HEADS)),
        Record(_EXACT, PLAIN, needs=(PLAIN_SCORES, MANY, PAGES)),
        Record(replace(_D128, keys_in_reverse=True), PLAIN, needs=(PLAIN_SCORES, WINDOW)),
        Record(_D128, PLAIN, needs=(PLAIN_SCORES,)),
        Record(Sm90Tile(192, 80, ping_pong=False), _SOFTCAP, needs=(BOUNDED,)),
        Record(Sm90Tile(192, 80), _SCORE),
        Record(_EXACT, _SCORE),
        Record(replace(_128X128, ping_pong=False), _DROPOUT),
        Record(_TEAMS, _BLOCKS_OF_TEAMS),
        Record(_128X128, _BIAS, needs=(BIAS_TILES,)),
        Record(_128X128, _BITS),
        Record(_128X64),
        Record(_128X32),
    ),
    *records(
        (ENTRY,), "half", (192, 128),
        Record(_FEW_64X64, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X32, _OPTIONS, needs=(HEADS,)),
        Record(replace(_128X128, early_eighths=2), PLAIN, needs=(PLAIN_SCORES,)),
        Record(replace(_128X128, ping_pong=False), _SOFTCAP, needs=(BOUNDED,)),
        Record(_128X96, _SCORE),
        Record(_128X128, _DROPOUT),
        Record(_128X128, _BLOCKS),
        Record(_128X96, _BIAS, needs=(BIAS_TILES,)),
        Record(_128X96, _BITS),
        Record(_128X32),
    ),
    *records(
        (ENTRY,), "half", (192, 192),
        Record(_FEW_64X32, _ANY_OF_ROWS, needs=(FEW_QUERIES, BIAS_ELEMENTS)),
        Record(_FEW_64X64, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X64, PLAIN, needs=(COPIED_ROWS,)),
        Record(_128X64, PLAIN, needs=(HEADS, PAGES)),
        Record(_128X32, _OPTIONS, needs=(HEADS,)),
        Record(Sm90Tile(192, 80), PLAIN, needs=(PLAIN_SCORES,), most_columns=144),
        Record(Sm90Tile(192, 64), PLAIN, needs=(PLAIN_SCORES,), most_columns=160),
        # A tile of 112 keys would leave no room to stage results.
        Record(replace(_128X96, early_eighths=2), PLAIN, needs=(PLAIN_SCORES,)),
        Record(replace(_128X96, ping_pong=False), _SOFTCAP, needs=(BOUNDED,)),
        Record(Sm90Tile(128, 80), _SCORE),
        Record(_128X96, _DROPOUT),
        Record(_128X64, _BIAS, needs=(BIAS_TILES,)),
        Record(Sm90Tile(128, 80), _MASK, needs=(MASK_TILES,)),
        Record(_128X64, _BITS),
        Record(_128X32),
    ),
    *records(
        (ENTRY,), "half", (256, 256),
        Record(_FEW_64X32, _ANY_OF_ROWS, needs=(FEW_QUERIES,)),
        Record(_128X32, PLAIN, needs=(COPIED_ROWS,)),
        Record(_128X32, PLAIN, needs=(HEADS, PAGES)),
        Record(_64X32, _OPTIONS, needs=(HEADS,)),
        Record(
            replace(_D256, early_eighths=2, exact=False, keys_in_reverse=True, pair=2),
            PLAIN, needs=(PLAIN_SCORES, MANY, WINDOW),
        ),
        Record(_D256, PLAIN, needs=(PLAIN_SCORES, VERY_MANY)),
        Record(replace(_D256, exact=False), PLAIN, needs=(PLAIN_SCORES, MANY)),
        Record(_D256, PLAIN, needs=(PLAIN_SCORES,)),
        Record(_128X64, PLAIN, needs=(PLAIN_SCORES, HEADS)),
        Record(_128X64, PLAIN, needs=(PLAIN_SCORES, PAGES)),
        Record(Sm90Tile(128, 64, ping_pong=False, keeps_maxima=True), _SOFTCAP, needs=(BOUNDED, PAGES)),
        Record(replace(_128X64, ping_pong=False), _SOFTCAP, needs=(BOUNDED,)),
        Record(Sm90Tile(128, 48), _SCORE),
        Record(_128X64, _DROPOUT),
        Record(_128X64, _BLOCKS),
        Record(_128X32, _BIAS, needs=(BIAS_TILES,)),
        Record(_128X64, _MASK, needs=(MASK_TILES,)),
        Record(_128X32, _BITS),
        Record(_64X32),
    ),
)  # fmt: skip
HEAD_DIMS = tuple(dict.fromkeys((line.head_dim, line.head_dim_v) for line in FORWARD))
# Head dims that have lines of their own.
OWN_COLUMNS = tuple(dict.fromkeys(line.most_columns for line in FORWARD if line.most_columns < WIDEST))
