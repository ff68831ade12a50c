"""Records of the kernels for one query over a cache: tiles by head dims and kind of cache. Data only.

A warp has a stage of some 4 to 8 KB under way in each but one of its stages, and a multiprocessor some 100 KB: the
memory of an H200 takes about a microsecond to answer, in which it could send 36 KB to each multiprocessor. Thread
blocks of eight warps are for few sequences, where each multiprocessor has one at most.

Rows of 64 bytes (e4m3, head dim 64) come at 2.7 TB/s of an H200's 4.5 where each KV head has a thread block of its own,
at 3.6 where a read brings the whole line of 128 bytes to the L2 cache, and at 4.1 where rows lie one behind the other;
there a thread block has the two heads of a line.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.plan.record import Record, records


@dataclass(frozen=True)
class DecodeTile:
    """The tile of a thread block, whose warps have keys of their own."""

    block_m: int  # query heads
    warp_keys: int  # keys of a warp's tile
    num_warps: int
    stages: int  # tiles that a warp has room for
    min_blocks: int = 1  # thread blocks that share a multiprocessor
    kv_heads: int = 1  # KV heads of a thread block, which have as many warps each

    @property
    def block_n(self) -> int:
        """Keys of a step of the thread block."""
        return self.num_warps // self.kv_heads * self.warp_keys


Records = tuple[Record[DecodeTile], ...]
ENTRY = "decode"
HALF, CODES = "half", "e4m3"
COLUMNS = 8  # query heads of a product


# Warps, stages, thread blocks of a multiprocessor, and KV heads of a thread block.
Line = tuple[int, ...]
_SMALL: Line = (4, 2)  # fits the least shared memory


def _lines(block_m: int, warp_keys: int, *lines: Line) -> Records:
    return tuple(Record(DecodeTile(block_m, warp_keys, *line)) for line in (*lines, _SMALL))


_FULL = ((4, 3, 2), (4, 3), (8, 3))
_WIDE = ((4, 3), (8, 2))

RECORDS: Records = (
    *records((ENTRY,), CODES, (64, 64), *_lines(8, 32, (4, 3, 4), (8, 3, 2, 2), (4, 3, 2), (8, 3))),
    *records((ENTRY,), CODES, (64, 64), *_lines(16, 32, (4, 3, 3), (8, 3, 1, 2), (4, 3, 2), (8, 3))),
    *records((ENTRY,), CODES, (96, 96), *_lines(8, 32, *_FULL), *_lines(16, 32, *_FULL)),
    *records((ENTRY,), CODES, (128, 128), *_lines(8, 32, *_FULL), *_lines(16, 32, *_FULL)),
    *records((ENTRY,), CODES, (192, 128), *_lines(8, 16, (4, 4, 2), (4, 4), (8, 4))),
    *records((ENTRY,), CODES, (192, 192), *_lines(8, 16, *_FULL)),
    *records((ENTRY,), CODES, (256, 256), *_lines(8, 16, *_FULL)),
    *records((ENTRY,), HALF, (64, 64), *_lines(8, 16, (4, 3, 4), (4, 4, 3), (4, 4), (8, 4))),
    *records((ENTRY,), HALF, (64, 64), *_lines(16, 16, (4, 4, 3), (4, 4), (8, 4))),
    *records((ENTRY,), HALF, (96, 96), *_lines(8, 16, *_FULL), *_lines(16, 16, *_FULL)),
    *records((ENTRY,), HALF, (128, 128), *_lines(8, 16, *_FULL), *_lines(16, 16, *_FULL)),
    *records((ENTRY,), HALF, (192, 128), *_lines(8, 16, *_WIDE)),
    *records((ENTRY,), HALF, (192, 192), *_lines(8, 16, *_WIDE)),
    *records((ENTRY,), HALF, (256, 256), *_lines(8, 16, *_WIDE)),
)
