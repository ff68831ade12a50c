"""Problem and device -> kernels, tile sizes, shared memory: THE table, with those of `plan_<family>`. Pure, no CuPy."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

from cuflash.problem import MAX_HEAD_DIM, MOST_KEPT, AttentionProblem, accum_of

HALF_BYTES, FLOAT_BYTES = 2, 4
CPP_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_SIZES = {"float32": 4, "float64": 8}
# Threads along either side of a tile, and the padding of transposed tiles in bytes (cuda_src/tile.cuh).
_SIDE = 16
_PAD_BYTES = 16

HEAD_DIM_CLASSES = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One kernel: every field but `entry` is a constant of its source (`block_m` -> `BLOCK_M`). Families add fields."""

    entry: str
    element: str  # C++ type of q, k, v
    accum: str
    bias_element: str
    head_dim: int  # class; 0 where it does not matter
    head_dim_v: int
    block_m: int  # queries of a tile
    block_n: int  # keys
    smem_bytes: int
    has_window: bool
    has_softcap: bool
    has_bias: bool
    has_mask: bool
    has_alibi: bool
    has_dropout: bool
    has_block_mask: bool

    @property
    def flags(self) -> str:
        """The options that are compiled in, in words."""
        return ", ".join(f.removeprefix("has_") for f in FLAGS if getattr(self, f)) or "plain"

    @property
    def tile(self) -> str:
        """Queries and keys of a tile."""
        return f"{self.block_m}x{self.block_n}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError


FLAGS = tuple(f.name for f in fields(KernelConfig) if f.name.startswith("has_"))
# When a problem has each flag. A family's HANDLES has those that its kernels know: they would ignore any other one, so
# that a problem with another one is for the next family.
WANTED: dict[str, Callable[[AttentionProblem], bool]] = {
    "has_window": lambda problem: problem.window_left is not None or problem.window_right is not None,
    "has_softcap": lambda problem: problem.softcap != 0,
    "has_bias": lambda problem: problem.bias is not None,
    "has_mask": lambda problem: problem.mask is not None,
    "has_alibi": lambda problem: problem.alibi is not None,
    "has_dropout": lambda problem: problem.dropout_p != 0,
    "has_block_mask": lambda problem: problem.block_mask,
}
KNOWN_TO_ALL = (
    "has_window",
    "has_softcap",
    "has_bias",
    "has_mask",
    "has_alibi",
    "has_dropout",
    "has_block_mask",
)
HANDLES = KNOWN_TO_ALL  # of the portable kernels


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, depth of a chunk in shared memory, and how far it is unrolled."""

    block_m: int
    block_n: int
    block_k: int
    unroll: int
    sum_columns: int = 128  # of results whose sums over a tile are in registers at once; 0: no such sums


@dataclass(frozen=True)
class Row:
    """One row of the table; no kernel of it spills registers on any architecture."""

    tiles: tuple[Tile, ...]  # plain or with a window: the first whose shared memory the GPU has; the last fits all
    with_options: Tile  # any other, as they take registers


# (kernel, accumulator, head-dim class of the widest result) -> tiles, by measurement on an H200.
PORTABLE: dict[tuple[str, str, int], Row] = {
    ("forward", "float32", 32): Row((Tile(128, 128, 16, 16), Tile(128, 64, 16, 16)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 64): Row((Tile(128, 128, 16, 16), Tile(128, 64, 16, 16)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 128): Row((Tile(128, 128, 8, 4), Tile(128, 64, 16, 16, 64)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 256): Row((Tile(64, 64, 16, 16),), Tile(64, 64, 8, 8)),
    ("forward", "float64", 32): Row((Tile(128, 32, 8, 8),), Tile(64, 32, 8, 4)),
    ("forward", "float64", 64): Row((Tile(128, 32, 8, 8, 0),), Tile(64, 32, 8, 4)),
    ("forward", "float64", 128): Row((Tile(64, 32, 8, 4, 64),), Tile(32, 32, 16, 4)),
    ("forward", "float64", 256): Row((Tile(32, 64, 8, 1, 64),), Tile(32, 32, 8, 2, 64)),
    ("backward_dq", "float32", 32): Row((Tile(128, 64, 16, 16),), Tile(64, 64, 16, 16)),
    ("backward_dq", "float32", 64): Row((Tile(128, 64, 16, 16),), Tile(64, 64, 16, 16)),
    ("backward_dq", "float32", 128): Row((Tile(64, 64, 16, 16),), Tile(64, 64, 8, 8)),
    ("backward_dq", "float32", 256): Row((Tile(64, 64, 16, 16, 64),), Tile(32, 64, 16, 16)),
    ("backward_dq", "float64", 32): Row((Tile(64, 32, 16, 16),), Tile(64, 32, 8, 4)),
    ("backward_dq", "float64", 64): Row((Tile(64, 32, 16, 16),), Tile(64, 32, 8, 4)),
    ("backward_dq", "float64", 128): Row((Tile(64, 32, 8, 4, 64),), Tile(32, 32, 16, 4)),
    ("backward_dq", "float64", 256): Row((Tile(32, 64, 8, 2, 64),), Tile(32, 32, 4, 4, 64)),
    ("backward_dkv", "float32", 32): Row((Tile(64, 128, 8, 8),), Tile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 64): Row((Tile(64, 128, 8, 8),), Tile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 128): Row((Tile(64, 64, 16, 16),), Tile(32, 64, 16, 16, 0)),
    ("backward_dkv", "float32", 256): Row((Tile(64, 32, 16, 4, 0),), Tile(32, 32, 16, 4)),
    ("backward_dkv", "float64", 32): Row((Tile(32, 64, 16, 2),), Tile(32, 64, 8, 4)),
    ("backward_dkv", "float64", 64): Row((Tile(32, 64, 16, 2, 0),), Tile(32, 64, 4, 4, 0)),
    ("backward_dkv", "float64", 128): Row((Tile(64, 32, 8, 2, 64),), Tile(32, 32, 8, 2, 64)),
    # dk and dv by themselves: where both together do not fit the registers.
    ("backward_dk", "float64", 256): Row((Tile(32, 32, 8, 4, 64),), Tile(32, 32, 8, 4, 64)),
    ("backward_dv", "float64", 256): Row((Tile(32, 32, 8, 4, 64),), Tile(32, 32, 8, 4, 64)),
    ("backward_bias", "float32", 0): Row((), Tile(64, 64, 16, 16)),
    ("backward_bias", "float64", 0): Row((), Tile(64, 32, 8, 4)),
}
# Kilobytes of shared memory that a thread block may use (CUDA C++ programming guide).
_SMEM_KILOBYTES = {
    "70": 96,
    "75": 64,
    "80": 163,
    "86": 99,
    "87": 163,
    "89": 99,
    "90": 227,
    "100": 227,
    "103": 227,
    "110": 227,
    "120": 99,
    "121": 99,
}
SMALLEST_SMEM = min(_SMEM_KILOBYTES.values()) * 1024


def capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) of ``"sm_90a"``."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def smem_limit(arch: str) -> int:
    """Bytes of shared memory that a thread block may use on ``"sm_90a"``, say.

    Of a GPU that is not listed, those of the newest one of its major version, or the least of those since Ampere.
    """
    own, (major, _) = arch.removeprefix("sm_").rstrip("af"), capability_of(arch)
    kin = [number for number in _SMEM_KILOBYTES if capability_of(number)[0] == major] or ["86"]
    return _SMEM_KILOBYTES.get(own, _SMEM_KILOBYTES[kin[-1]]) * 1024


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """A portable kernel."""

    block_k: int
    unroll: int
    sum_columns: int

    @property
    def tile(self) -> str:
        """Queries, keys and depth of a tile."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _SIDE * _SIDE


# Files of another name than the entry, some behind the header that says how to multiply.
KERNEL_FILES = {
    "backward_dk": "backward_dkv",
    "backward_dv": "backward_dkv",
    "forward_sm90": "sm90/forward",
    "backward_sm90_rows": "sm90/backward_rows",
    "backward_sm90": "sm90/backward",
    "backward_sm90_wide": "sm90/backward_wide",
    "backward_sm90_dq": "sm90/backward_rows",
    "split_forward": "sm90/split_forward",
    "forward_sm80": "sm80/half_tile.cuh sm80/forward.cuh",
    "ordered_dq": "sm80/half_tile.cuh sm80/gradients.cuh",
    "bias_sm80": "sm80/half_tile.cuh sm80/bias.cuh",
    **{
        f"{family}_{name}": f"sm80/{tile}.cuh sm80/{name if name in ('forward', 'bias') else 'gradients'}.cuh"
        for family, tile in (("wide", "wide_tile"), ("parts", "split_tile"))
        for name in ("forward", "dq", "dkv", "dk", "dv", "bias")
    },
    "backward_sm80": "sm80/backward",
    "backward_sm80_rows": "sm80/backward_rows",
    "backward_sm80_dq": "sm80/backward_rows",
    **{f"split_{name}": "sm90/split_backward" for name in ("dq", "dkv", "dk", "dv")},
}
# What a file's function is called where entries are not.
_FUNCTIONS = {
    "backward_dkv": "backward_dkv",
    "sm80/bias.cuh": "backward_bias",
    "sm80/forward.cuh": "forward_sm80",
    "sm80/gradients.cuh": "gradients_sm80",
    "sm90/split_backward": "split_backward",
}

# What kernels whose tiles are keys compute, by how their names end.
_KEY_RESULTS = {"dkv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",)}


def file_of(entry: str) -> str:
    """Where a kernel stands in cuda_src, as `kernels.get` takes it."""
    return KERNEL_FILES.get(entry, entry)


def function_of(entry: str) -> str:
    """Name of the ``extern "C"`` function of a kernel."""
    return _FUNCTIONS.get(file_of(entry).split(" ")[-1], entry)


def key_results(entry: str) -> tuple[str, ...]:
    """Which of dk and dv a kernel computes; its tiles are keys if there is one."""
    return _KEY_RESULTS.get(entry.rpartition("_")[2], ())


def key_kernels(problem: AttentionProblem) -> tuple[str, ...]:
    """The kernels that compute dk and dv, together or by themselves."""
    widest = head_dim_class(max(problem.head_dim, problem.head_dim_v))
    together = ("backward_dkv", problem.accum_dtype, widest) in PORTABLE
    return ("backward_dkv",) if together else ("backward_dk", "backward_dv")


def head_dim_class(head_dim: int) -> int:
    """The smallest class that holds `head_dim`."""
    return next(c for c in HEAD_DIM_CLASSES if head_dim <= c)


def _smem_bytes(entry: str, tile: Tile, accum: str, head_dim: int, head_dim_v: int) -> int:
    """Size of SharedStorage in cuda_src/<entry>.cu, which asserts that it is enough."""
    size = _SIZES[accum]
    pad = _PAD_BYTES // size
    widest = max(head_dim, head_dim_v)
    chunk = tile.block_k * max(tile.block_m + tile.block_n + 2 * pad, widest)
    if key_results(entry):
        factor, seen = tile.block_m * (tile.block_n + pad), tile.block_m
    elif entry == "backward_bias":
        factor, seen = _SIDE * max(tile.block_m, tile.block_n), tile.block_n
    else:
        factor, seen = tile.block_n * (tile.block_m + pad), tile.block_n
    return (2 * chunk + factor) * size + math.ceil(seen / 16) * 16


def common(
    family: type[KernelConfig], dtype: str, bias_dtype: str | None, flags: tuple[str, ...], *rows: Any
) -> dict[str, Any]:
    """A family's fields: types, flags, and what rows and tiles have by that name."""
    accum = accum_of(dtype)
    names = {f.name for f in fields(family)}
    return {
        "element": CPP_TYPES[dtype],
        "accum": CPP_TYPES[accum],
        "bias_element": CPP_TYPES[bias_dtype or dtype],
        **{flag: flag in flags for flag in FLAGS},
        **{f.name: getattr(row, f.name) for row in rows for f in fields(row) if f.name in names},
    }


@cache
def config_of(
    entry: str,
    dtype: str,
    bias_dtype: str | None,
    head_dim: int,
    head_dim_v: int,
    flags: tuple[str, ...],
    smem_limit: int = SMALLEST_SMEM,
) -> Config:
    """The configuration of a portable kernel; head dims are classes, `flags` a subset of `FLAGS`."""
    accum = accum_of(dtype)
    row = PORTABLE[entry, accum, max(head_dim, head_dim_v)]
    tiles = (row.with_options,) if beside_window(flags) else row.tiles
    fitting = (t for t in tiles if _smem_bytes(entry, t, accum, head_dim, head_dim_v) <= smem_limit)
    tile = next(fitting, row.with_options)
    return Config(
        entry=entry,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        smem_bytes=_smem_bytes(entry, tile, accum, head_dim, head_dim_v),
        **common(Config, dtype, bias_dtype, flags, tile),
    )


def has_plain_scale(problem: AttentionProblem) -> bool:
    """Whether the scale may join the conversion to base 2."""
    return 2.0**-64 <= problem.softmax_scale <= 2.0**64


def beside_window(flags: tuple[str, ...]) -> set[str]:
    """The options that choose a tile: a window takes that of plain scores, or one of its own."""
    return set(flags) - {"has_window"}


def are_products(flags: tuple[str, ...]) -> bool:
    """Whether scores are products of q and k times the scale."""
    return not {"has_softcap", "has_bias", "has_alibi"} & set(flags)


def flags_of(problem: AttentionProblem) -> tuple[str, ...]:
    """The options of a problem that are compiled in."""
    return tuple(flag for flag, wanted in WANTED.items() if wanted(problem))


def unknown(handled: tuple[str, ...], problem: AttentionProblem) -> str:
    """The options of a problem, in words, that kernels do not know which handle these; empty if they know all."""
    return ", ".join(flag.removeprefix("has_") for flag in flags_of(problem) if flag not in handled)


def _result_classes(entry: str, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Head-dim classes of the results that the kernel accumulates; 0 for the others."""
    of_k = entry in ("backward_dq", "backward_dkv", "backward_dk")
    of_v = entry in ("forward", "backward_dkv", "backward_dv")
    return head_dim if of_k else 0, head_dim_v if of_v else 0


@lru_cache(maxsize=MOST_KEPT)
def plan(problem: AttentionProblem, entry: str, smem_limit: int = SMALLEST_SMEM) -> Config:
    """The kernel `entry` of `PORTABLE` for a problem."""
    if unknown(HANDLES, problem):
        raise NotImplementedError(f"{entry}: no kernel takes these inputs with {unknown(HANDLES, problem)}")
    flags = flags_of(problem)
    if entry in ("backward_dk", "backward_dv"):
        head_dim, head_dim_v = _result_classes(entry, MAX_HEAD_DIM, MAX_HEAD_DIM)
    else:
        classes = head_dim_class(problem.head_dim), head_dim_class(problem.head_dim_v)
        head_dim, head_dim_v = _result_classes(entry, *classes)
    return config_of(entry, problem.dtype, problem.bias_dtype, head_dim, head_dim_v, flags, smem_limit)


def types_of(problem: AttentionProblem) -> Config:
    """The configuration of a problem's kernels in reduce.cu, of which its types alone count: they know no options."""
    return config_of("forward", problem.dtype, problem.bias_dtype, 0, HEAD_DIM_CLASSES[0], ())


def table_flags(handled: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Options with which the kernels of a family that handles these are listed."""
    return (), ("has_window",), ("has_window", "has_block_mask"), handled


def table(smem_limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype."""
    for entry, accum, widest in PORTABLE:
        head_dim, head_dim_v = _result_classes(entry, widest, widest)
        for dtype in ("float64",) if accum == "float64" else ("float16", "bfloat16", "float32"):
            for flags in table_flags(HANDLES) if entry != "backward_bias" else (("has_bias",), HANDLES):
                yield config_of(entry, dtype, None, head_dim, head_dim_v, flags, smem_limit), dtype
