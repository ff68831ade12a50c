"""Records of Hopper's backward kernels on 16 bits: tiles and registers by head dims, options and regimes. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plan.config import OF_RULES
from cuflash.plan.record import ANYTHING, Record, Takes, Word, one_of, records

# Computing warpgroups of NARROW have 64 keys each. The warpgroups of WIDE, which is for wide heads, share 64 keys, of
# which they compute dv, dk and dq.
NARROW, WIDE = "backward_sm90", "backward_sm90_wide"
# A bias that TMA cannot load, and a mask without vectors of 16 keys, are options of their own.
BIAS_BY_ELEMENTS, MASK_BY_ELEMENTS = "bias_by_elements", "mask_by_elements"
IN_ORDER = Word("in order")  # additions to dq have a fixed order
SHORT = Word("short")  # so few queries see a key, in a window, that steps at its ends count


@dataclass(frozen=True)
class Sm90BackwardTile:
    """A tile, its buffers, and the registers of a thread of each role."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    query_stages: int  # buffers of queries
    dout_stages: int  # buffers of dout
    ds_stages: int  # buffers of the scores' gradients
    producer_registers: int  # of a thread that loads
    consumer_registers: int  # of one that computes; in WIDE of one for dv, and the warpgroup for dk has the rest
    dq_registers: int = 0  # of one that computes dq, where a warpgroup does nothing else
    key_stages: int = 1  # buffers of keys; values have one
    pair: int = 1  # thread blocks of a cluster that alternate in computing dq


Records = tuple[Record[Sm90BackwardTile], ...]
_HALF = "half"
_SOFTCAP, _ALIBI, _DROPOUT, _BLOCKS = "has_softcap", "has_alibi", "has_dropout", "has_block_mask"
_BLOCKS_OF_RULE = "has_mask_mod", _BLOCKS
_BIAS, _MASK = ("has_bias", BIAS_BY_ELEMENTS), ("has_mask", MASK_BY_ELEMENTS)
_WITHOUT_ARRAYS = Takes((_SOFTCAP, _ALIBI, _DROPOUT), 3)


def _lines(tile: Sm90BackwardTile, *takes: Takes, needs: tuple[str, ...] = ()) -> Records:
    return tuple(Record(tile, each, needs=needs) for each in takes)


def _without(*options: str) -> Takes:
    return replace(ANYTHING, lacks=options)


def _free(*options: str) -> Takes:
    """Return what takes one of the options where additions to dq have no order, which would take its registers."""
    return replace(one_of(*options), lacks=(IN_ORDER,))


def _with_registers(tile: Sm90BackwardTile, producer: int, consumer: int) -> Sm90BackwardTile:
    return replace(tile, producer_registers=producer, consumer_registers=consumer)


def _with_options(tile: Sm90BackwardTile, *needs: str) -> Records:
    """Return records of NARROW for any options, whose loading warp reads arrays to find hidden keys."""
    arrays, no_bias, no_mask = (*_BIAS, *_MASK, _BLOCKS), (*_BIAS, MASK_BY_ELEMENTS), _MASK
    few = (Takes(None, 2, lacks=(*other, _BLOCKS)) for other in (no_bias, no_mask))
    several = (_without(*other) for other in (no_bias, no_mask, (_BLOCKS, MASK_BY_ELEMENTS)))
    return (
        *_lines(tile, _without(*arrays), *few, needs=needs),
        *_lines(_with_registers(tile, 40, 232), *several, needs=needs),
        Record(_with_registers(tile, 48, 224), _without(MASK_BY_ELEMENTS), needs=needs),
    )


_LARGE = Sm90BackwardTile(128, 128, 2, 2, 2, 24, 240)
_FEW_QUERIES = replace(_LARGE, block_m=64)
_TWO_OF_KEYS = replace(_FEW_QUERIES, key_stages=2)
# There is a third tile of queries where a block mask picks them, from farther away, and where half-hidden steps count.
_THREE_OF_QUERIES = replace(_FEW_QUERIES, query_stages=3, dout_stages=3)
_OF_96: Records = (
    *_lines(_TWO_OF_KEYS, one_of(_SOFTCAP, "has_bias", _ALIBI, _BLOCKS), _free("has_mask", _DROPOUT)),
    *(record for rule in OF_RULES for record in _with_options(_TWO_OF_KEYS, rule)),
)
# Up to head dim 128 a mask that is read by elements comes alone: with another option kernels by mma.sync are faster.
NARROW_TABLE: Records = (
    *records(
        (NARROW,), _HALF, (64, 64),
        *_lines(_LARGE, one_of(_ALIBI, *OF_RULES), _free(_DROPOUT, _BLOCKS)),
        Record(_with_registers(_LARGE, 40, 232), Takes(_BLOCKS_OF_RULE, 1), needs=_BLOCKS_OF_RULE),
        Record(_FEW_QUERIES, one_of(_BLOCKS, MASK_BY_ELEMENTS)),
        *_with_options(_FEW_QUERIES),
    ),
    *records((NARROW,), _HALF, (96, 96), *_OF_96),
    *records(
        (NARROW,), _HALF, (128, 128),
        Record(_THREE_OF_QUERIES, _free(_DROPOUT), needs=(SHORT,)),
        Record(_THREE_OF_QUERIES, replace(_free(_BLOCKS), least=1)),
        *_OF_96,
    ),
)  # fmt: skip
_64X64 = Sm90BackwardTile(64, 64, 2, 2, 2, 48, 200, 64)
_SEVERAL = _with_registers(_64X64, 64, 208)
# Wide heads wait for the additions of dq, which a pair halves. These leave it too few registers, or have no pairs.
_UNPAIRED = IN_ORDER, _BLOCKS, BIAS_BY_ELEMENTS
_OF_192: Records = (
    *_lines(
        _with_registers(replace(_64X64, pair=2), 64, 192),
        Takes(None, 2, lacks=(*_UNPAIRED, *OF_RULES)),
        replace(_WITHOUT_ARRAYS, lacks=_UNPAIRED),
    ),
    Record(replace(_SEVERAL, pair=2), _without(*_UNPAIRED)),
    *_lines(_64X64, Takes(None, 2, lacks=OF_RULES), _WITHOUT_ARRAYS),
    Record(_SEVERAL),
)
# WIDE cannot take these together: its warpgroups exchange weights whose sign says what dropout dropped, and a weight
# times a rule's derivative has a sign of its own.
SIGNED = {"has_score_mod", _DROPOUT}
WIDE_TABLE: Records = (
    *records(
        (WIDE,), _HALF, (128, 128),
        *_lines(_with_registers(_64X64, 96, 176), _without(MASK_BY_ELEMENTS), one_of(MASK_BY_ELEMENTS)),
    ),
    *records((WIDE,), _HALF, (192, 128), *_OF_192),
    *records((WIDE,), _HALF, (192, 192), *_OF_192),
    *records(
        (WIDE,), _HALF, (256, 256),
        *_lines(
            _64X64,
            Takes(None, 1, lacks=OF_RULES),
            Takes((_SOFTCAP, _ALIBI, _BLOCKS), 2),
        ),
        Record(_64X64, Takes((*_MASK, _BLOCKS), 2), needs=(IN_ORDER,)),
        *_lines(_with_registers(_64X64, 32, 208), _without(*_BIAS, _SOFTCAP), _without(*_BIAS, _DROPOUT)),
        Record(_with_registers(_64X64, 24, 216), _without(*_BIAS)),
        Record(_with_registers(_64X64, 32, 216)),
    ),
)  # fmt: skip
