"""What every family's configuration of a kernel has, and which options a problem compiles in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from cuflash.problem.attention_problem import WHOLE, AttentionProblem, accum_of

CPP_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
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
    # No family's kernels know positions yet.
    "has_place": lambda problem: problem.place != WHOLE and (problem.alibi is not None or problem.dropout_p != 0),
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


def head_dim_class(head_dim: int) -> int:
    """The smallest class that holds `head_dim`."""
    return next(c for c in HEAD_DIM_CLASSES if head_dim <= c)


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


def table_flags(handled: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Options with which the kernels of a family that handles these are listed."""
    return (), ("has_window",), ("has_window", "has_block_mask"), handled
