"""The base of every family's kernel configuration, and the options of a problem that are compiled into a kernel.

The families' tables (the other modules of this folder) derive their configurations from `KernelConfig`; `gpu.kernels`
turns every field of one into a constant of the kernel's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from cuflash.kept import kept
from cuflash.problem.attention_problem import WHOLE, AttentionProblem, accum_of
from cuflash.rules.expression import Node, in_order
from cuflash.rules.form import NO_RULES, Rules

CPP_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
HEAD_DIM_CLASSES = (32, 64, 128, 256)
WIDEST = HEAD_DIM_CLASSES[-1]  # columns of a result that a kernel computes at once, at most
COLUMNS = 16  # half of v's columns is rounded up to a multiple of this
# Kernels for tensor cores compute up to a hundred elements of a tile one behind the other, each with the user's own
# rule: the compiler would take minutes for longer ones.
_MOST_OPERATIONS = 150
# Sines and cosines share at most so many bytes of local memory, for the digits of pi that a large number needs.
_REDUCED_BYTES = {CPP_TYPES["float32"]: 32, CPP_TYPES["float64"]: 40}


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One kernel: each field but `entry` is a constant of its source (`block_m`: `BLOCK_M`). Families add fields."""

    entry: str  # the kernel's name, by which `plan.entries` finds its files and function
    element: str  # C++ type of q, k, v and of the results
    accum: str  # C++ type of the arithmetic, of lse and delta
    bias_element: str  # C++ type of the bias and of its gradient
    head_dim: int  # columns of q and k that the kernel has room for; 0 where they do not matter
    head_dim_v: int  # columns of v that the kernel has room for; 0 where they do not matter
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    smem_bytes: int  # dynamic shared memory of a thread block, in bytes
    has_window: bool  # causal or a window is compiled in
    has_softcap: bool  # the bound of the scores, c * tanh(s / c), is compiled in
    has_bias: bool  # the bias is compiled in
    has_mask: bool  # the element-wise mask is compiled in
    has_alibi: bool  # the slopes are compiled in
    has_dropout: bool  # dropout is compiled in
    has_block_mask: bool  # the lists of visited tiles are compiled in
    has_place: bool  # positions of a part in a longer problem are compiled in, which ALiBi and dropout depend on
    has_score_mod: bool  # the user's own rule for scores is compiled in
    has_mask_mod: bool  # the user's own rule for what is visible is compiled in
    has_fp8: bool  # keys and values are e4m3 codes
    rules: Rules = NO_RULES  # these rules, whose text is a header of the source
    rule_in_blocks: bool = False  # the block mask says where a mask_mod hides anything; elsewhere it is not asked

    @property
    def flags(self) -> str:
        """Names of the options that are compiled in, separated by commas."""
        return ", ".join(f.removeprefix("has_") for f in FLAGS if getattr(self, f)) or "plain"

    @property
    def tile(self) -> str:
        """Size of a tile, as ``"queries x keys"`` without blanks."""
        return f"{self.block_m}x{self.block_n}"

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """Entry, types, head dims, tile and options, for users."""
        dims = "/".join(str(d) for d in (self.head_dim, self.head_dim_v) if d) or "any"
        return f"{self.entry} {self.element} d{dims} {self.tile} {self.flags}"

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory that a thread has by design, at most; a kernel with more spills registers."""
        has_turns = any(x.op in ("sin", "cos") for x in _operations_of(self.rules))
        return _REDUCED_BYTES[self.accum] if has_turns else 0


FLAGS = tuple(f.name for f in fields(KernelConfig) if f.name.startswith("has_"))
# The condition under which a problem has each flag. A family's HANDLES lists the flags that its kernels know. They
# would ignore any other one, so a problem with another one goes to the next family.
WANTED: dict[str, Callable[[AttentionProblem], bool]] = {
    "has_window": lambda problem: problem.window_left is not None or problem.window_right is not None,
    "has_softcap": lambda problem: problem.softcap != 0,
    "has_bias": lambda problem: problem.bias is not None,
    "has_mask": lambda problem: problem.mask is not None,
    "has_alibi": lambda problem: problem.alibi is not None,
    "has_dropout": lambda problem: problem.dropout_p != 0,
    "has_block_mask": lambda problem: problem.block_mask,
    # Rules of users' own ask for no flag here, as every kernel that knows them takes their places.
    "has_place": lambda problem: problem.place != WHOLE and (problem.alibi is not None or problem.dropout_p != 0),
    "has_score_mod": lambda problem: problem.rules.score is not None,
    "has_mask_mod": lambda problem: problem.rules.visible is not None,
    "has_fp8": lambda problem: problem.has_fp8_keys,
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
# Flags of users' own rules. How many registers a rule takes is met when it is compiled: where it spills, the plan's
# next candidate is taken (`gpu.choose`).
OF_RULES = ("has_score_mod", "has_mask_mod")


def head_dim_class(head_dim: int) -> int:
    """The smallest of `HEAD_DIM_CLASSES` that is no smaller than `head_dim`, or the widest of them."""
    return next((c for c in HEAD_DIM_CLASSES if head_dim <= c), WIDEST)


def common(
    family: type[KernelConfig], dtype: str, bias_dtype: str | None, flags: tuple[str, ...], *rows: Any
) -> dict[str, Any]:
    """Values for the fields of a `family`: the C++ types, the flags, and each field that one of `rows` has by its name.

    `rows` are the table's row and tile, as dataclasses.
    """
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
    """Return True if the scale is positive and moderate, so that kernels may multiply it by log2(e) in advance."""
    return 2.0**-64 <= problem.softmax_scale <= 2.0**64


def without_window(flags: tuple[str, ...]) -> set[str]:
    """Return the flags but the window's, which takes the tile of plain scores or one of its own."""
    return set(flags) - {"has_window"}


def are_products(flags: tuple[str, ...]) -> bool:
    """Return True if scores are products of q and k times the scale, with nothing added or applied to them."""
    return not {"has_softcap", "has_bias", "has_alibi", "has_score_mod"} & set(flags)


def has_plain_scores(problem: AttentionProblem) -> bool:
    """Return True if scores are such products, and kernels may multiply their scale by log2(e) in advance."""
    return has_plain_scale(problem) and are_products(flags_of(problem))


def flags_of(problem: AttentionProblem) -> tuple[str, ...]:
    """Flags of the options of a problem, which are compiled into its kernels."""
    return tuple(flag for flag, wanted in WANTED.items() if wanted(problem))


def unknown(handled: tuple[str, ...], problem: AttentionProblem) -> str:
    """Names of a problem's options that are missing from the flags `handled`; an empty string if none is."""
    return ", ".join(flag.removeprefix("has_") for flag in flags_of(problem) if flag not in handled)


def not_taken(handled: tuple[str, ...], problem: AttentionProblem) -> str:
    """Return what a problem has that a family's kernels, which hold whole rows, lack: `unknown` options or head dims.

    The portable kernels alone take columns of q, k and v, and of the results, in slices.
    """
    is_wide = max(problem.head_dim, problem.head_dim_v) > WIDEST
    return (
        unknown(handled, problem)
        or (f"head dims above {WIDEST}" if is_wide else "")
        or (f"a rule of more than {_MOST_OPERATIONS} operations" if _has_long_rules(problem) else "")
    )


@kept
def _has_long_rules(problem: AttentionProblem) -> bool:
    return sum(1 for _ in _operations_of(problem.rules)) > _MOST_OPERATIONS


def _operations_of(rules: Rules) -> Iterator[Node]:
    return in_order([root for root in (rules.score, rules.visible) if root is not None])


def of_half(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with the first half of v's columns alone."""
    return replace(problem, head_dim_v=math.ceil(problem.head_dim_v / 2 / COLUMNS) * COLUMNS)


def table_flags(handled: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Combinations of flags with which a family that handles these lists its kernels, for compiling and checks."""
    return (), ("has_window",), ("has_window", "has_block_mask"), handled


C = TypeVar("C", bound=KernelConfig)


def with_rules(config: C, problem: AttentionProblem) -> C:
    """Return the configuration with a problem's own rules."""
    if problem.rules == NO_RULES:
        return config
    return replace(config, rules=problem.rules, rule_in_blocks=problem.rule_in_blocks)


def without_blocks_of_rule(options: set[str]) -> set[str]:
    """Return the options without a block mask beside a mask_mod, whose blocks it has: both take registers as one."""
    return options - {"has_block_mask"} if "has_mask_mod" in options else options
