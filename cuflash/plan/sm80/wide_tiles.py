"""Records of the kernels by mma.sync on wide elements, by kind of products (`kinds`). Data only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuflash.hardware import smem_limit
from cuflash.plan.record import ANY_ONE, ANYTHING, BLACKWELL, PLAIN, Record, records
from cuflash.plan.sm80.kinds import family_of
from cuflash.plan.sm80.tiles import Records, Sm80Tile

Table = dict[str, Records]


def _records(kind: str, names: tuple[str, ...], head_dims: tuple[int, int], *lines: Record[Sm80Tile]) -> Records:
    return records([f"{family_of(kind)}_{name}" for name in names], kind, head_dims, *lines)


def _forward(kind: str, head_dim: int, head_dim_v: int, *lines: Record[Sm80Tile]) -> Records:
    return _records(kind, ("forward",), (head_dim, head_dim_v), *lines)


_64X64, _64X48 = (Record(Sm80Tile(64, n, 4), PLAIN, BLACKWELL) for n in (64, 48))
_FEWER = Record(Sm80Tile(64, 32, 4)), Record(Sm80Tile(64, 16, 4))
FORWARD: Table = {
    "float32": (
        *_forward(
            "float32", 64, 64, Record(Sm80Tile(64, 64, 4, 1, 2), PLAIN), Record(Sm80Tile(64, 32, 4, 1, 2))
        ),
        *_forward("float32", 128, 128, _64X48, *_FEWER),
        *_forward("float32", 192, 128, _64X64, _64X48, *_FEWER),
        *_forward("float32", 256, 128, _64X64, *_FEWER),
    ),
    "tf32": (
        *_forward(
            "tf32", 64, 64,
            Record(Sm80Tile(128, 64, 4, 2, 2), PLAIN),
            Record(Sm80Tile(128, 64, 4, 1, 2), PLAIN),
            Record(Sm80Tile(64, 64, 4, 2, 2)),
        ),
        *_forward("tf32", 128, 128, Record(Sm80Tile(64, 64, 4, 1, 2), PLAIN), Record(Sm80Tile(64, 32, 4, 1, 2))),
        *_forward("tf32", 256, 256, Record(Sm80Tile(64, 64, 4), PLAIN), Record(Sm80Tile(64, 32, 4, 2))),
    ),
    "float64": (
        *_forward("float64", 64, 64, Record(Sm80Tile(64, 32, 4, 2, 2), PLAIN), Record(Sm80Tile(64, 32, 4))),
        *_forward("float64", 128, 128, Record(Sm80Tile(64, 16, 4, 1, 2), PLAIN), Record(Sm80Tile(64, 32, 4))),
        *_forward(
            "float64", 256, 128,
            Record(Sm80Tile(64, 16, 4), PLAIN),
            Record(Sm80Tile(32, 16, 2), PLAIN),
            Record(Sm80Tile(32, 32, 2)),
        ),
    ),
}  # fmt: skip
# Exact float32 has these on GPUs with 99 KB of shared memory, as far as they should be faster there than multiply-adds.
_FORWARD_IN_99_KB = (
    *_forward("float32", 64, 64, Record(Sm80Tile(128, 64, 8))),
    # From sm_120 on the compiler leaves too few registers for most options with 32 keys.
    *_forward("float32", 128, 128, Record(Sm80Tile(64, 32, 4), PLAIN), replace(_FEWER[0], below=(12, 0)), _FEWER[1]),
)

# A thread block of a gradient kernel stays with a tile's rows (`block_m`) and iterates over columns (`block_n`). Two
# kernels run where dk and dv together do not fit the registers.
_TOGETHER, _APART = ("dq", "dkv"), ("dq", "dk", "dv")
_SHARED = Sm80Tile(64, 32, 8, key_warps=2)  # `sm80.wide.backward` takes fewer rows where these do not fit
_PAIRS = Sm80Tile(32, 32, 4, min_blocks=2, key_warps=2)
# Four and two warps share the rows of these tiles of float64.
_SHARED_BY_FOUR, _SHARED_BY_TWO = Sm80Tile(32, 32, 8, key_warps=4), Sm80Tile(64, 16, 8, key_warps=2)
_NOT_PLAIN = replace(ANYTHING, least=1)  # portable kernels are faster without options


def _gradients(kind: str, names: tuple[str, ...], head_dim: int, *lines: Record[Sm80Tile]) -> Records:
    """Return the lines and, behind them, those with the fewest columns, which take fewer registers."""
    fewest = (
        replace(line, tile=replace(line.tile, block_n=_FEWEST_COLUMNS))
        for line in lines
        if _COLUMNS_OF_WARP * line.tile.key_warps <= _FEWEST_COLUMNS
    )
    return _records(kind, names, (head_dim, head_dim), *lines, *fewest)


_FEWEST_COLUMNS = 16
_COLUMNS_OF_WARP = 8  # mma.sync computes so many columns of scores at least
BACKWARD: Table = {
    "float32": (
        *_gradients(
            "float32", _TOGETHER, 64, Record(Sm80Tile(64, 32, 4, 1, 2), PLAIN), Record(Sm80Tile(64, 32, 4))
        ),
        *_gradients("float32", _APART, 128, Record(Sm80Tile(64, 48, 4), PLAIN), Record(Sm80Tile(64, 32, 4))),
        *_gradients("float32", _APART, 192, Record(_SHARED)),
        *_gradients("float32", _APART, 256, Record(_SHARED)),
    ),
    "tf32": (
        *_gradients(
            "tf32", _TOGETHER, 64, Record(Sm80Tile(64, 48, 4, 2, 2), PLAIN), Record(Sm80Tile(64, 32, 4, 2, 2))
        ),
        *_gradients("tf32", _TOGETHER, 128, Record(Sm80Tile(64, 32, 4, 2), PLAIN), Record(Sm80Tile(64, 16, 4, 2))),
        *_gradients("tf32", _APART, 256, Record(Sm80Tile(64, 32, 4), PLAIN), Record(Sm80Tile(64, 16, 4))),
    ),
    "float64": (
        *_gradients("float64", _APART, 64, Record(_PAIRS)),
        *_gradients("float64", _APART, 128, Record(_SHARED)),
        *_gradients("float64", _APART, 192, Record(_SHARED_BY_FOUR)),
        *_gradients("float64", _APART, 256, Record(_SHARED_BY_TWO)),
    ),
}  # fmt: skip
_BACKWARD_IN_99_KB = (
    *_gradients("float32", _TOGETHER, 64, Record(Sm80Tile(64, 32, 4, 2))),
    *_gradients("float32", _APART, 128, Record(_SHARED, _NOT_PLAIN)),
    *_gradients("float32", _APART, 192, Record(replace(_SHARED, block_n=_FEWEST_COLUMNS), _NOT_PLAIN)),
)


def _of_bias(kind: str, head_dim: int, *lines: Record[Sm80Tile]) -> Records:
    return _records(kind, ("bias",), (head_dim, head_dim), *lines)


# Records of the kernel for the gradient of a bias: options count besides the bias, and with several stages a stage is a
# chunk of columns.
_IN_CHUNKS, _FEWER_KEYS = Sm80Tile(64, 64, 4, 2, 2), Sm80Tile(64, 32, 4, 2, 2)
# float64 on sm_80 and 99 KB of shared memory take the last of these.
_IN_CHUNKS_OF_FEWER = Record(_FEWER_KEYS), Record(replace(_FEWER_KEYS, min_blocks=1))
BIAS: Table = {
    "float32": (
        *_of_bias(
            "float32", 64,
            Record(Sm80Tile(64, 64, 4, 1, 2), PLAIN),
            Record(Sm80Tile(64, 32, 4, 1, 2)),
            Record(Sm80Tile(64, 64, 4, 2)),
        ),
        *(
            record
            for d in (128, 192, 256)
            for record in _of_bias(
                "float32", d,
                Record(_IN_CHUNKS, ANY_ONE),
                Record(replace(_IN_CHUNKS, min_blocks=1), PLAIN),
                *_IN_CHUNKS_OF_FEWER,
            )
        ),
    ),
    "tf32": (
        *_of_bias(
            "tf32", 64,
            Record(Sm80Tile(64, 64, 4, 1, 3), PLAIN, BLACKWELL),
            Record(Sm80Tile(64, 64, 4, 1, 2), PLAIN),
            Record(Sm80Tile(64, 32, 4, 1, 2)),
        ),
        *_of_bias(
            "tf32", 128,
            Record(Sm80Tile(128, 64, 8, 1, 2), PLAIN),
            Record(Sm80Tile(64, 64, 4, 1, 2), PLAIN),
            Record(Sm80Tile(64, 64, 4), PLAIN),
            Record(Sm80Tile(64, 32, 4)),
        ),
        *_of_bias(
            "tf32", 256,
            Record(Sm80Tile(64, 64, 4, 2, 3), PLAIN, BLACKWELL),
            Record(Sm80Tile(64, 64, 4, 2, 2), PLAIN),
            Record(Sm80Tile(64, 32, 4)),
        ),
    ),
    "float64": (
        *_of_bias("float64", 64, Record(Sm80Tile(64, 32, 4, 1, 2), PLAIN), Record(Sm80Tile(64, 32, 4))),
        *(record for d in (128, 192, 256) for record in _of_bias("float64", d, *_IN_CHUNKS_OF_FEWER)),
    ),
}  # fmt: skip


def of_forward(kind: str, limit: int) -> Records:
    """Return the records for a kind of products on a GPU whose thread blocks may use `limit` bytes of shared memory."""
    return _in_memory(FORWARD, _FORWARD_IN_99_KB, kind, limit)


def of_backward(kind: str, limit: int) -> Records:
    """Return the records of the gradient kernels, as `of_forward` does."""
    return _in_memory(BACKWARD, _BACKWARD_IN_99_KB, kind, limit)


def of_bias(kind: str, limit: int) -> Records:
    """Return the records of the kernel for the gradient of a bias, as `of_forward` does."""
    return BIAS[kind]


def _in_memory(table: Table, in_99_kb: Any, kind: str, limit: int) -> Records:
    is_small = kind == "float32" and limit < smem_limit("sm_80")
    return in_99_kb if is_small else table[kind]
