"""Records of the portable kernels, whose tiles were chosen by measurement on an H200. Data only.

A kernel's kind is its accumulator, and its head dims are the class of its widest result, 0 where that does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plan.record import ANYTHING, PLAIN, Record, Word, records


@dataclass(frozen=True)
class PortableTile:
    """The tile of a portable kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    block_k: int  # columns of a chunk of q, k, v or dout in shared memory
    unroll: int  # steps of the loop over a chunk that are unrolled
    # Columns of a result whose sums over one tile are in registers at once; with 0 no tile is summed by itself.
    sum_columns: int = 128


Line = Record[PortableTile]
# Results of more columns than the widest class has are computed in slices, whose first column takes a register.
IN_SLICES = Word("in slices")
# The gradients of operands: by float additions, or in two passes that repeat their bits.
OPERAND_ENTRIES = ("backward_operands", "operand_maxima", "operand_words")


def _plain(*tile: int) -> Line:
    """Return a line for problems without options but a window."""
    return Record(PortableTile(*tile), PLAIN)


def _any(*tile: int) -> Line:
    return Record(PortableTile(*tile))


def _whole(*tile: int) -> Line:
    return Record(PortableTile(*tile), replace(ANYTHING, lacks=(IN_SLICES,)))


def _of(entry: str, accum: str, widest: int, *lines: Line) -> tuple[Line, ...]:
    return records((entry,), accum, (widest, widest), *lines)


_FLOAT, _DOUBLE = "float32", "float64"
# A tile with options is smaller, as options take registers. The last of a kernel's lines fits every GPU.
PORTABLE = (
    *_of("forward", _FLOAT, 32, _plain(128, 128, 16, 16), _plain(128, 64, 16, 16), _any(64, 64, 16, 16)),
    *_of("forward", _FLOAT, 64, _plain(128, 128, 16, 16), _plain(128, 64, 16, 16), _any(64, 64, 16, 16)),
    *_of("forward", _FLOAT, 128, _plain(128, 128, 8, 4), _plain(128, 64, 16, 16, 64), _any(64, 64, 16, 16)),
    *_of("forward", _FLOAT, 256, _plain(64, 64, 16, 16), _any(64, 64, 8, 8)),
    *_of("forward", _DOUBLE, 32, _plain(128, 32, 8, 8), _any(64, 32, 8, 4)),
    *_of("forward", _DOUBLE, 64, _plain(128, 32, 8, 8, 0), _any(64, 32, 8, 4)),
    *_of("forward", _DOUBLE, 128, _plain(64, 32, 8, 4, 64), _any(32, 32, 16, 4)),
    *_of("forward", _DOUBLE, 256, _plain(32, 64, 8, 1, 64), _any(32, 32, 8, 2, 64)),
    *_of("backward_dq", _FLOAT, 32, _plain(128, 64, 16, 16), _any(64, 64, 16, 16)),
    *_of("backward_dq", _FLOAT, 64, _plain(128, 64, 16, 16), _any(64, 64, 16, 16)),
    *_of("backward_dq", _FLOAT, 128, _plain(64, 64, 16, 16), _any(64, 64, 8, 8)),
    *_of("backward_dq", _FLOAT, 256, _plain(64, 64, 16, 16, 64), _any(32, 64, 16, 16)),
    *_of("backward_dq", _DOUBLE, 32, _plain(64, 32, 16, 16), _any(64, 32, 8, 4)),
    *_of("backward_dq", _DOUBLE, 64, _plain(64, 32, 16, 16), _any(64, 32, 8, 4)),
    *_of("backward_dq", _DOUBLE, 128, _plain(64, 32, 8, 4, 64), _any(32, 32, 16, 4)),
    *_of("backward_dq", _DOUBLE, 256, _plain(32, 64, 8, 2, 64), _any(32, 32, 4, 4, 64)),
    *_of("backward_dkv", _FLOAT, 32, _plain(64, 128, 8, 8), _any(64, 64, 16, 16)),
    *_of("backward_dkv", _FLOAT, 64, _plain(64, 128, 8, 8), _any(64, 64, 16, 16)),
    *_of("backward_dkv", _FLOAT, 128, _plain(64, 64, 16, 16), _any(32, 64, 16, 16, 0)),
    *_of("backward_dkv", _FLOAT, 256, _plain(64, 32, 16, 4, 0), _whole(32, 32, 16, 4), _any(32, 32, 8, 4)),
    *_of("backward_dkv", _DOUBLE, 32, _plain(32, 64, 16, 2), _any(32, 64, 8, 4)),
    *_of("backward_dkv", _DOUBLE, 64, _plain(32, 64, 16, 2, 0), _any(32, 64, 4, 4, 0)),
    *_of("backward_dkv", _DOUBLE, 128, _plain(64, 32, 8, 2, 64), _any(32, 32, 8, 2, 64)),
    # dk and dv have a kernel each where both together do not fit the registers.
    *(
        line
        for entry in ("backward_dk", "backward_dv")
        for line in _of(
            entry, _DOUBLE, 256, _plain(32, 32, 8, 4, 64), _whole(32, 32, 8, 4, 64), _any(32, 32, 8, 2, 64)
        )
    ),
    *(
        line
        for entry in ("backward_bias", *OPERAND_ENTRIES)
        for accum, tile in ((_FLOAT, (64, 64, 16, 16)), (_DOUBLE, (64, 32, 8, 4)))
        for line in _of(entry, accum, 0, _any(*tile))
    ),
)  # fmt: skip
