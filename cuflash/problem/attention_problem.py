"""The attention problem of a call, without its data.

It is known from metadata alone, so that no check synchronises a device; `make` derives it from a call's arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from cuflash.problem.pages import Pages
from cuflash.rules.form import NO_RULES, OperandType, Rules

DTYPES = ("float16", "bfloat16", "float32", "float64")
HALF_DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 1024
# Gradients that follow dq, dk, dv, in the order in which they are returned.
EXTRA_GRADS = ("bias", "sink", "alibi_slopes")
GRAD_NAMES = ("q", "k", "v", *EXTRA_GRADS, "operands")
_HALF_WORDS = 1 << 16  # values of the random bits that decide on one weight of dropout

Array = Any  # an ndarray of NumPy or CuPy, which may be absent


def accum_of(dtype: str) -> str:
    """The dtype of the arithmetic on arrays of a dtype."""
    return "float64" if dtype == "float64" else "float32"


def operand_name(number: int) -> str:
    """The name of an operand of the user's rules among the arrays of a call."""
    return f"operand_{number}"


class Place(NamedTuple):
    """The place of a part in the longer problem that it belongs to.

    Query i of the part is the whole's query ``first_q + i * stride``, key j its key ``first_k + j * stride``. ALiBi and
    dropout depend on these; windows of a part are already its own.
    """

    first_q: int = 0
    first_k: int = 0
    stride: int = 1
    first_head: int = 0  # the query head of the whole that is the part's first
    first_batch: int = 0
    # The whole's query 0 is aligned to this key: seqlen_k - seqlen_q of the whole. Windows and ALiBi count from it;
    # dropout counts from ``first_q`` alone.
    diagonal: int = 0
    # It tells a part from the whole where all numbers are those of the whole: only its first query and key are aligned.
    is_part: bool = False

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that kernels are told of it, by name."""
        return {name: value for name, value in self._asdict().items() if name != "is_part"}


WHOLE = Place()


class PartialResult(NamedTuple):
    """A result over some of the keys, or a share of a gradient, in the accumulation's dtype."""

    x: Array  # (batch, rows, heads, columns), packed without batch
    lse: Array | None  # (batch, heads, rows), packed without batch; None of gradients
    first_row: int  # the whole's row that is its first

    @property
    def rows(self) -> slice:
        """Its rows among the whole's."""
        return slice(self.first_row, self.first_row + self.x.shape[-3])


@dataclass(frozen=True)
class AttentionProblem:
    """One attention problem without its data.

    In packed problems ``seqlen_q`` and ``seqlen_k`` are the totals and ``batch`` is the number of sequences.
    ``causal`` is folded into ``window_right``, so that a causal call and ``window=(None, 0)`` are one problem. Both
    sides of a window are at least 0, unless the problem is a part of another: then it may lie off the diagonal.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int  # columns of q and k
    head_dim_v: int  # columns of v and out
    dtype: str  # of q: one of `DTYPES`, or `e4m3.NAME`
    packed: bool = False
    window_left: int | None = None  # keys before the query's own that it sees; None is unbounded
    window_right: int | None = None  # keys behind the query's own that it sees; None is unbounded
    softmax_scale: float = 1.0
    softcap: float = 0.0  # 0 is off
    bias: tuple[int, ...] | None = None  # shape, with four axes; None without a bias
    bias_dtype: str | None = None
    mask: tuple[int, ...] | None = None  # shape, with four axes; None without a mask
    alibi: tuple[int, int] | None = None  # shape of the slopes, (batch or 1, num_heads_q); None without slopes
    sink: bool = False  # a sink is given
    q_lengths: bool = False  # lengths of the queries are given
    kv_lengths: bool = False  # lengths of the keys are given
    block_mask: bool = False  # a block mask is given
    block_size: tuple[int, int] = (0, 0)  # rows and columns of its blocks
    dropout_p: float = 0.0
    deterministic: bool | None = None
    precision: str | None = None
    place: Place = WHOLE
    rules: Rules = NO_RULES  # the user's own
    operands: tuple[OperandType, ...] = ()  # shapes and dtypes of their operands
    rule_in_blocks: bool = False  # the block mask says which blocks a mask_mod hides, shows, or both
    pages: Pages | None = None  # k and v are pools of pages; seqlen_k counts logical keys
    num_splits: int | None = None  # splits of the keys where a kernel splits them
    split_size: int | None = None  # keys of a split: then a row's bits do not depend on other rows
    has_fp8_keys: bool = False  # k and v are e4m3 codes
    out_dtype: str | None = None  # of the result; None is `dtype`
    # These are computed once, as every call needs them.
    _hash: int = field(init=False, repr=False, compare=False)
    out_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # shape of the result and of dout
    lse_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # shape of lse and dlse

    def __post_init__(self) -> None:
        batch = () if self.packed else (self.batch,)
        compared = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(compared))
        object.__setattr__(self, "out_shape", (*batch, self.seqlen_q, self.num_heads_q, self.head_dim_v))
        object.__setattr__(self, "lse_shape", (*batch, self.num_heads_q, self.seqlen_q))

    def __hash__(self) -> int:
        return self._hash

    @property
    def unsplit(self) -> AttentionProblem:
        """The problem without splits of the keys, as gradients know it."""
        if self.num_splits is None and self.split_size is None:
            return self
        return replace(self, num_splits=None, split_size=None)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def is_empty(self) -> bool:
        """There are no scores."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def accum_dtype(self) -> str:
        """The dtype of lse, of sink and slopes, and of the arithmetic."""
        return accum_of(self.dtype)

    @property
    def result_dtype(self) -> str:
        """The dtype of out and dout."""
        return self.out_dtype or self.dtype

    @property
    def is_mixed(self) -> bool:
        """q, k, v and out are not all of one dtype."""
        return self.has_fp8_keys or self.out_dtype is not None

    @property
    def wide(self) -> AttentionProblem:
        """The problem with every array in the accumulation's dtype."""
        accum = self.accum_dtype
        bias_dtype = None if self.bias is None else accum
        return replace(self, dtype=accum, bias_dtype=bias_dtype, has_fp8_keys=False, out_dtype=None)

    @property
    def dropout_threshold(self) -> int:
        """The least random half word with which dropout keeps a weight."""
        return math.floor(self.dropout_p * _HALF_WORDS)

    @property
    def dropout_rescale(self) -> float:
        """The factor of the weights that dropout keeps: one over their exact share."""
        return _HALF_WORDS / (_HALF_WORDS - self.dropout_threshold)

    @property
    def extra_grads(self) -> tuple[str, ...]:
        """Names of the differentiable extras that were given, in the order of `EXTRA_GRADS`."""
        given = {"bias": self.bias is not None, "sink": self.sink, "alibi_slopes": self.alibi is not None}
        return tuple(name for name in EXTRA_GRADS if given[name])

    @property
    def operand_grads(self) -> tuple[str, ...]:
        """Names of the floating-point operands, each of which has a gradient."""
        return tuple(operand_name(n) for n, kind in enumerate(self.operands) if "float" in kind.dtype)

    @property
    def grad_names(self) -> tuple[str, ...]:
        """Names of all gradients, in the order in which they are returned."""
        return ("q", "k", "v", *self.extra_grads, *self.operand_grads)
