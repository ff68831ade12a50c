"""Records of the kernels for one query over a cache: tiles by head dims and kind of cache. Data only.

A warp has a stage of some 4 to 8 KB under way in each but one of its stages, and a multiprocessor some 100 KB: the
memory of an H200 takes about a microsecond to answer, in which it could send 36 KB to each multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plan.record import Record, records


@dataclass(frozen=True)
class DecodeTile:
    """The tile of a thread block, whose warps have keys of their own."""

    block_m: int  # query heads
    warp_keys: int  # keys of a warp's tile
    num_warps: int
    stages: int  # tiles that a warp has room for
    min_blocks: int = 1  # thread blocks that share a multiprocessor

    @property
    def block_n(self) -> int:
        """Keys of a step of the thread block."""
        return self.num_warps * self.warp_keys


Records = tuple[Record[DecodeTile], ...]
ENTRY = "decode"
HALF, CODES = "half", "e4m3"


def _lines(warp_keys: int, stages: int, *min_blocks: int, most_rows: int = 16) -> Records:
    """Return tiles for groups of up to 16 and of up to 8 query heads, the most thread blocks first."""
    tiles = [DecodeTile(16, warp_keys, 4, stages, shared) for shared in min_blocks]
    tiles.append(DecodeTile(16, warp_keys, 4, 2))  # fits the least shared memory
    by_eights = [replace(tile, block_m=8) for tile in tiles]
    return tuple(map(Record, [*(tiles if most_rows == 16 else ()), *by_eights]))


RECORDS: Records = (
    *records((ENTRY,), CODES, (64, 64), *_lines(32, 4, 3, 2, 1)),
    *records((ENTRY,), CODES, (96, 96), *_lines(32, 3, 2, 1)),
    *records((ENTRY,), CODES, (128, 128), *_lines(32, 3, 2, 1)),
    *records((ENTRY,), CODES, (192, 128), *_lines(16, 4, 2, 1, most_rows=8)),
    *records((ENTRY,), CODES, (192, 192), *_lines(16, 3, 2, 1, most_rows=8)),
    *records((ENTRY,), CODES, (256, 256), *_lines(16, 3, 2, 1, most_rows=8)),
    *records((ENTRY,), HALF, (64, 64), *_lines(16, 4, 3, 2, 1)),
    *records((ENTRY,), HALF, (96, 96), *_lines(16, 3, 2, 1)),
    *records((ENTRY,), HALF, (128, 128), *_lines(16, 3, 2, 1)),
    *records((ENTRY,), HALF, (192, 128), *_lines(16, 3, 1, most_rows=8)),
    *records((ENTRY,), HALF, (192, 192), *_lines(16, 3, 1, most_rows=8)),
    *records((ENTRY,), HALF, (256, 256), *_lines(16, 3, 1, most_rows=8)),
)
