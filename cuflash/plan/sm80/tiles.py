"""Records of the kernels by mma.sync on 16 bits and on e4m3 codes: tiles by head dims, options and GPUs.

`times` predicts which is the fastest. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plan.config import OF_RULES
from cuflash.plan.record import ANY_ONE, ANYTHING, BLACKWELL, PLAIN, Record, one_of, records


@dataclass(frozen=True)
class Sm80Tile:
    """The tile of a kernel whose thread blocks stay with queries."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int  # warps of a thread block
    stages: int = 1  # buffers of keys and values
    min_blocks: int = 1  # thread blocks that share a multiprocessor
    key_warps: int = 1  # warps with the same queries; each has a share of the keys and of the result's columns
    splits_warps: bool = False  # warps have the same queries, a share of a tile's keys and a softmax of their own each
    listed: int = 1  # entries of a block mask's list whose keys are one tile, where there is no window


@dataclass(frozen=True)
class Sm80BackwardTile:
    """The tile of a kernel whose thread blocks stay with keys; fields without a comment are as in `Sm80Tile`."""

    block_m: int
    block_n: int
    num_warps: int
    dq_fragments: int  # groups of 16 queries whose dq one warp computes
    together: bool  # one kernel computes dk and dv, as both fit the registers; else each has a kernel of its own
    stages: int = 1  # buffers of queries and of the scores' gradients; with two a step has one barrier
    min_blocks: int = 1
    query_warps: int = 1  # warps with the same keys; each has a share of a tile's queries and of dk's and dv's columns
    query_passes: int = 1  # groups into which a warp's queries are cut, to be computed one after the other
    bulk_adds: bool = False  # one bulk addition adds all that a warp has of dq (from sm_90 on)
    dq_buffer: bool = False  # the bulk addition reads a buffer of its own, not that of the queries
    short: bool = False  # the tile is for few queries that see a key
    # Thread blocks of a cluster (from sm_90 on) have a KV head together: so many have a tile of its keys each, and so
    # many such groups visit other tiles of queries.
    cluster_keys: int = 1
    cluster_queries: int = 1
    adds_apart: bool = False  # these groups add up dk before dv, in the same shared memory

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster_keys * self.cluster_queries


Records = tuple[Record[Sm80Tile], ...]
HALF = "half"  # the kind of products on 16 bits
ENTRY = "forward_sm80"
FP8_ENTRY = "fp8_forward_sm80"
MAIN, ORDERED_DQ, BIAS = "backward_sm80", "ordered_dq", "bias_sm80"

_FEW = one_of("has_softcap", "has_alibi", "has_block_mask", *OF_RULES)
_MORE = one_of("has_softcap", "has_alibi", "has_dropout", "has_block_mask", *OF_RULES)
_BLOCKS, _NO_BLOCKS = one_of("has_block_mask"), replace(ANYTHING, lacks=("has_block_mask",))
_MASKS, _BIAS = (replace(one_of(*flags), least=1) for flags in (("has_mask", "has_block_mask"), ("has_bias",)))
_64X64 = (
    Record(Sm80Tile(64, 64, 4, min_blocks=3), _MASKS),
    Record(Sm80Tile(64, 64, 4, stages=2, min_blocks=2), _MORE),
    Record(Sm80Tile(64, 64, 4, min_blocks=2), ANY_ONE),
)
_SHARED = Sm80Tile(64, 64, 4, min_blocks=2, key_warps=2)
_64X32 = Record(Sm80Tile(64, 32, 4))
_TWO_OF_64X32 = Record(Sm80Tile(64, 32, 4, min_blocks=2))
FORWARD: Records = (
    *records(
        (ENTRY,), HALF, (64, 64),
        Record(Sm80Tile(128, 128, 4, stages=2, min_blocks=2), PLAIN, BLACKWELL),
        Record(Sm80Tile(128, 128, 4, stages=2, min_blocks=2, listed=2), _BLOCKS, BLACKWELL),
        Record(Sm80Tile(128, 64, 4, stages=2, min_blocks=2), _FEW),
        Record(Sm80Tile(128, 64, 4, min_blocks=2), _BIAS),
        Record(Sm80Tile(128, 64, 4), PLAIN),
        Record(Sm80Tile(64, 64, 4, min_blocks=4), _MASKS),
        *_64X64,
        _TWO_OF_64X32,
    ),
    *records(
        (ENTRY,), HALF, (96, 96),
        Record(Sm80Tile(128, 64, 4, min_blocks=2), PLAIN),
        Record(Sm80Tile(64, 64, 4), PLAIN),
        _TWO_OF_64X32,
    ),
    *records(
        (ENTRY,), HALF, (128, 128),
        Record(Sm80Tile(128, 64, 4, stages=2, min_blocks=2), _FEW),
        Record(Sm80Tile(128, 64, 4, min_blocks=2), _FEW),
        Record(Sm80Tile(128, 32, 4, min_blocks=2), PLAIN),
        Record(Sm80Tile(64, 64, 2, min_blocks=4), _BLOCKS),
        *_64X64,
        Record(Sm80Tile(64, 64, 4), PLAIN),
        _TWO_OF_64X32,
        _64X32,
    ),
    *(
        record
        for d in (128, 192)
        for record in records(
            (ENTRY,), HALF, (192, d), Record(_SHARED, _BLOCKS), Record(Sm80Tile(64, 64, 4), PLAIN), _64X32
        )
    ),
    *records(
        (ENTRY,), HALF, (256, 256),
        Record(_SHARED, PLAIN),
        Record(_SHARED, _BLOCKS, BLACKWELL),
        Record(Sm80Tile(128, 64, 8), PLAIN),
        Record(Sm80Tile(64, 64, 4), ANY_ONE),
        _64X32,
        Record(Sm80Tile(32, 32, 2)),
    ),
)  # fmt: skip
# Tiles for few rows; a step has one block of a block mask.
_FEW_ROWS, _FEW_WIDE_ROWS = (
    tuple(
        Record(Sm80Tile(16, n, 4, 2, shared, splits_warps=True), ANYTHING if n == 64 else _NO_BLOCKS)
        for n, shared in sizes
    )
    for sizes in (((128, 2), (64, 2), (128, 1), (64, 1)), ((128, 1), (64, 2), (64, 1)))
)
# The kernels on e4m3 codes load the codes of a step while they compute the one before: all tiles have two stages.
FP8: Records = tuple(
    record
    for dims, lines in (
        *((dims, _FEW_ROWS) for dims in ((64, 64), (128, 128))),
        *((dims, _FEW_WIDE_ROWS) for dims in ((192, 128), (192, 192), (256, 256))),
        *((dims, (
            Record(Sm80Tile(64, 64, 4, 2, min_blocks=2), PLAIN),
            Record(Sm80Tile(64, 64, 4, 2), PLAIN),
            Record(Sm80Tile(64, 32, 4, 2, min_blocks=2)),
        )) for dims in ((64, 64), (96, 96), (128, 128))),
        *((dims, (Record(Sm80Tile(64, 64, 4, 2), PLAIN), Record(Sm80Tile(64, 32, 4, 2))))
          for dims in ((192, 128), (192, 192))),
        ((256, 256), (Record(Sm80Tile(64, 32, 4, 2)),)),
    )
    for record in records((FP8_ENTRY,), "e4m3", dims, *lines)
)  # fmt: skip
# The kernel whose thread blocks stay with queries adds dq in the order of keys, for bits that repeat where there is a
# block mask, and each row's share of the slopes' gradient.
OF_QUERIES: Records = tuple(
    record
    for d, tiles in (
        (64, (Sm80Tile(64, 32, 4),)),
        (128, (Sm80Tile(64, 32, 4),)),
        (192, (Sm80Tile(64, 16, 4), Sm80Tile(32, 16, 2))),
        (256, (Sm80Tile(64, 16, 4, 2), Sm80Tile(32, 16, 2))),
    )
    for record in records((ORDERED_DQ,), HALF, (d, d), *map(Record, tiles))
)
# The kernel for the gradient of a bias; options count besides the bias, and several stages are chunks of columns.
_HALF_OF_KEYS = (Sm80Tile(64, 32, 4, min_blocks=2), Sm80Tile(64, 32, 4), Sm80Tile(32, 32, 2), Sm80Tile(32, 16, 2))
_OF_BIAS_ALONE = (
    Record(Sm80Tile(64, 64, 4, min_blocks=3), PLAIN, BLACKWELL),
    Record(Sm80Tile(64, 64, 4, min_blocks=2), PLAIN),
    Record(Sm80Tile(64, 64, 4), PLAIN),
)
OF_BIAS: Records = (
    *(
        record
        for d, alone in ((64, _OF_BIAS_ALONE), (128, _OF_BIAS_ALONE), (192, _OF_BIAS_ALONE[1:]))
        for record in records((BIAS,), HALF, (d, d), *alone, *map(Record, _HALF_OF_KEYS))
    ),
    *records(
        (BIAS,), HALF, (256, 256),
        *(replace(record, tile=replace(record.tile, stages=2)) for record in _OF_BIAS_ALONE),
        *map(Record, _HALF_OF_KEYS),
    ),
)  # fmt: skip

_LONG = Sm80BackwardTile(64, 128, 4, 2, True, stages=2, min_blocks=2, query_passes=2)
_HALF = Sm80BackwardTile(64, 64, 4, 2, True, min_blocks=2, query_warps=2)
_HALF_IN_BULK = replace(_HALF, bulk_adds=True, dq_buffer=True)
_WHOLE = Sm80BackwardTile(64, 128, 8, 2, True, stages=2, query_warps=2)
_OF_192 = Sm80BackwardTile(64, 64, 8, 1, True, query_warps=2)
_IN_BULK = Sm80BackwardTile(64, 64, 8, 2, True, stages=2, query_warps=4, bulk_adds=True)
BACKWARD: tuple[Record[Sm80BackwardTile], ...] = (
    *records(
        (MAIN,), HALF, (64, 64),
        Record(_LONG, _MORE, BLACKWELL),
        Record(replace(_HALF, min_blocks=3), replace(_BLOCKS, least=1), BLACKWELL),
        Record(_HALF, ANY_ONE),
        Record(replace(_HALF, min_blocks=1), PLAIN),
        Record(Sm80BackwardTile(32, 64, 4, 1, True, min_blocks=2, query_warps=2)),
        Record(Sm80BackwardTile(32, 64, 4, 1, True, query_warps=2)),
    ),
    *records(
        (MAIN,), HALF, (128, 128),
        Record(replace(_HALF_IN_BULK, short=True), PLAIN, BLACKWELL),
        Record(replace(_WHOLE, bulk_adds=True, dq_buffer=True), PLAIN, BLACKWELL),
        Record(_WHOLE, PLAIN),
        Record(_WHOLE, _MORE, BLACKWELL),
        Record(_HALF_IN_BULK, _BLOCKS, BLACKWELL),
        Record(_HALF, PLAIN),
        Record(_HALF, _BLOCKS, BLACKWELL),
        Record(Sm80BackwardTile(64, 64, 8, 2, True, query_warps=2)),
        Record(Sm80BackwardTile(32, 64, 4, 1, True, query_warps=2), PLAIN),
        Record(Sm80BackwardTile(32, 64, 4, 1, False), ANYTHING),
    ),
    *records(
        (MAIN,), HALF, (192, 192),
        Record(replace(_OF_192, stages=2, bulk_adds=True), PLAIN),
        Record(replace(_OF_192, stages=2), _BLOCKS),
        Record(_OF_192, _BLOCKS),
        Record(Sm80BackwardTile(32, 64, 4, 1, False), PLAIN),
        Record(Sm80BackwardTile(32, 32, 4, 1, True, query_warps=2), ANYTHING, BLACKWELL),
        Record(Sm80BackwardTile(16, 32, 2, 1, False), PLAIN),
        Record(Sm80BackwardTile(16, 32, 2, 1, False), ANYTHING, BLACKWELL),
        Record(Sm80BackwardTile(32, 16, 2, 1, False, query_warps=2)),
    ),
    *records(
        (MAIN,), HALF, (256, 256),
        Record(_IN_BULK, PLAIN),
        Record(_IN_BULK, _BLOCKS, BLACKWELL),
        Record(Sm80BackwardTile(64, 64, 8, 1, True, query_warps=4), PLAIN),
        Record(Sm80BackwardTile(32, 64, 4, 1, False), PLAIN),
        Record(Sm80BackwardTile(32, 64, 8, 2, True, query_warps=2), ANYTHING, BLACKWELL),
        Record(Sm80BackwardTile(16, 64, 4, 1, False)),
        Record(Sm80BackwardTile(16, 32, 2, 1, False), PLAIN),
        Record(Sm80BackwardTile(32, 16, 2, 1, False, query_warps=2)),  # fits 64 KB of shared memory
    ),
)  # fmt: skip
# A tile of these has all keys, or those of a cluster have, and no others add to dq. A thread block has few steps, whose
# latency counts: tiles with many warps are the fastest unless several thread blocks share a multiprocessor.
_SMALL = Sm80BackwardTile(32, 32, 4, 1, True, min_blocks=2, query_warps=2)
_SQUARE = Sm80BackwardTile(64, 64, 8, 1, True, query_warps=2)
ALONE: tuple[Record[Sm80BackwardTile], ...] = (
    *records((MAIN,), HALF, (64, 64), *map(Record, (_SMALL, _SQUARE, _HALF, replace(_SQUARE, block_n=128)))),
    *records(
        (MAIN,), HALF, (128, 128), Record(_SMALL), Record(_SQUARE), Record(replace(_WHOLE, stages=1), _MORE),
    ),
    *records((MAIN,), HALF, (192, 192), *map(Record, (_SMALL, _OF_192))),
    *records((MAIN,), HALF, (256, 256), *map(Record, (_SMALL, Sm80BackwardTile(64, 64, 8, 1, True, query_warps=4)))),
)  # fmt: skip
# These are for clusters, as those of `ALONE` are: of few queries, of few keys, or of many keys.
_FEW_KEYS = Record(Sm80BackwardTile(64, 32, 4, 1, True, min_blocks=2, query_warps=2))
IN_CLUSTERS: tuple[Record[Sm80BackwardTile], ...] = (
    *records(
        (MAIN,), HALF, (64, 64),
        _FEW_KEYS,
        Record(Sm80BackwardTile(32, 64, 4, 1, True, min_blocks=2)),
        Record(Sm80BackwardTile(32, 128, 4, 1, True), _MORE),
        Record(Sm80BackwardTile(64, 256, 8, 1, True, query_passes=2), _MORE),
    ),
    *records(
        (MAIN,), HALF, (128, 128),
        _FEW_KEYS,
        Record(Sm80BackwardTile(16, 64, 4, 1, True, min_blocks=2)),
        Record(Sm80BackwardTile(32, 128, 8, 1, True, query_warps=2)),
    ),
    *records((MAIN,), HALF, (256, 256), Record(Sm80BackwardTile(32, 64, 8, 1, True, query_warps=2))),
)  # fmt: skip
