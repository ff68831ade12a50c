"""What a call asks for, known from metadata alone: a check never synchronises a device. Those of options: `checks`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from cuflash import checks

if TYPE_CHECKING:
    from cuflash.block_mask import BlockMask

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
# Bound of what is kept by calls' metadata, for programs with ever new shapes.
MOST_KEPT = 4096
# Gradients that follow dq, dk, dv, in the order in which they are returned.
EXTRA_GRADS = ("bias", "sink", "alibi_slopes")
GRAD_NAMES = ("q", "k", "v", *EXTRA_GRADS)
_HALF_WORDS = 1 << 16  # values of the random bits that decide on one weight of dropout

Array = Any  # an ndarray of NumPy or CuPy, which may be absent


@dataclass(slots=True)
class Options:
    """The keyword arguments that every public function shares (README, "Options")."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    bias: Array | None = None
    mask: Array | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Array | None = None
    block_mask: BlockMask | None = None
    deterministic: bool | None = None
    precision: str | None = None


OPTION_NAMES = tuple(f.name for f in fields(Options))


class Operands(NamedTuple):
    """The arrays of one call, all NumPy or all CuPy, checked and brought to full rank."""

    q: Array  # (batch, seqlen_q, num_heads_q, head_dim), packed: (total_q, num_heads_q, head_dim)
    k: Array  # (batch, seqlen_k, num_heads_kv, head_dim), packed: (total_k, ...)
    v: Array  # (batch, seqlen_k, num_heads_kv, head_dim_v), packed: (total_k, ...)
    bias: Array | None = None  # (batch | 1, num_heads_q | 1, seqlen_q | 1, seqlen_k | 1)
    mask: Array | None = None  # like bias, bool
    alibi_slopes: Array | None = None  # (batch | 1, num_heads_q)
    sink: Array | None = None  # (num_heads_q,)
    q_lengths: Array | None = None  # (batch,) int32
    kv_lengths: Array | None = None  # (batch,) int32
    cu_seqlens_q: Array | None = None  # (batch + 1,) int32
    cu_seqlens_k: Array | None = None  # (batch + 1,) int32
    dropout_seed: int | Array | None = None
    block_mask: BlockMask | None = None


def accum_of(dtype: str) -> str:
    """What arrays of a dtype are computed in."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class AttentionProblem:
    """One attention problem without its data.

    In packed problems ``seqlen_q`` and ``seqlen_k`` are the totals and ``batch`` is the number of sequences.
    ``causal`` is folded into ``window_right``, so that a causal call and ``window=(None, 0)`` are one problem.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    packed: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softmax_scale: float = 1.0
    softcap: float = 0.0
    bias: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    mask: tuple[int, ...] | None = None
    alibi: tuple[int, int] | None = None
    sink: bool = False
    q_lengths: bool = False
    kv_lengths: bool = False
    block_mask: bool = False
    block_size: tuple[int, int] = (0, 0)  # of it
    dropout_p: float = 0.0
    deterministic: bool | None = None
    precision: str | None = None
    # What every call needs is computed once.
    _hash: int = field(init=False, repr=False, compare=False)
    out_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of the result and of dout
    lse_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of lse and dlse

    def __post_init__(self) -> None:
        batch = () if self.packed else (self.batch,)
        compared = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(compared))
        object.__setattr__(self, "out_shape", (*batch, self.seqlen_q, self.num_heads_q, self.head_dim_v))
        object.__setattr__(self, "lse_shape", (*batch, self.num_heads_q, self.seqlen_q))

    def __hash__(self) -> int:
        return self._hash

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def accum_dtype(self) -> str:
        """dtype of lse, of sink and slopes, and of the arithmetic."""
        return accum_of(self.dtype)

    @property
    def dropout_threshold(self) -> int:
        """Dropout keeps the weights whose random half word reaches it."""
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


def make_problem(arrays: dict[str, Array], options: Options) -> AttentionProblem:
    """Check a call's metadata and describe it."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    packed = "cu_seqlens_q" in arrays
    dtype = _check_inputs(q, k, v, packed)
    (*_, seqlen_q, num_heads_q, head_dim), (*_, seqlen_k, num_heads_kv, head_dim_v) = q.shape, v.shape
    if packed:
        batch = checks.check_cu_seqlens(arrays["cu_seqlens_q"], arrays["cu_seqlens_k"])
        score_shape: tuple[int | None, ...] = (batch, num_heads_q, None, None)
    else:
        batch = q.shape[0]
        score_shape = (batch, num_heads_q, seqlen_q, seqlen_k)

    accum = accum_of(dtype)
    o = options
    for name, lengths in (("q_lengths", o.q_lengths), ("kv_lengths", o.kv_lengths)):
        checks.check_extra(name, lengths, "int32", [(batch,)], "(batch,)")
    checks.check_extra("sink", o.sink, accum, [(num_heads_q,)], "(num_heads_q,)")
    checks.check_extra(
        "alibi_slopes",
        o.alibi_slopes,
        accum,
        [(num_heads_q,), (1, num_heads_q), (batch, num_heads_q)],
        "(num_heads_q,) or (batch, num_heads_q)",
    )
    checks.check_block_mask(o.block_mask, score_shape)
    (left, right), has_block_mask = _windows(o, packed)
    dropout_p = checks.check_dropout_p(o.dropout_p)
    checks.check_deterministic(o.deterministic)
    checks.check_precision(o.precision)
    alibi = o.alibi_slopes
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        packed=packed,
        window_left=left,
        window_right=right,
        softmax_scale=checks.check_scale(o.softmax_scale, head_dim, accum),
        softcap=checks.check_softcap(o.softcap, accum),
        bias=checks.check_scores_like("bias", o.bias, score_shape, (dtype, "float32")),
        bias_dtype=None if o.bias is None else o.bias.dtype.name,
        mask=checks.check_scores_like("mask", o.mask, score_shape, ("bool",)),
        alibi=None if alibi is None else (alibi.shape[0] if len(alibi.shape) == 2 else 1, num_heads_q),
        sink=o.sink is not None,
        q_lengths=o.q_lengths is not None,
        kv_lengths=o.kv_lengths is not None,
        block_mask=has_block_mask,
        block_size=o.block_mask.block_size if has_block_mask and o.block_mask is not None else (0, 0),
        dropout_p=dropout_p,
        deterministic=None if o.deterministic is None else bool(o.deterministic),
        precision=o.precision if dtype == "float32" else None,
    )


def _windows(o: Options, packed: bool) -> tuple[tuple[int | None, int | None], bool]:
    """The window with causal, and with a block mask that is a window; whether there is another block mask."""
    window = checks.check_window(o.causal, o.window)
    # Lengths move a window, and no mask: only without them it is looked for.
    are_whole = not packed and o.q_lengths is None and o.kv_lengths is None
    if o.block_mask is None or not are_whole or not o.block_mask.window:
        return window, o.block_mask is not None
    left, right = (
        min((x for x in pair if x is not None), default=None) for pair in zip(window, o.block_mask.window, strict=True)
    )
    return (left, right), False


def make_operands(problem: AttentionProblem, arrays: dict[str, Array], options: Options) -> Operands:
    """Bring checked arrays to the full rank of `Operands`, and check the seed, which is no part of the problem."""
    seed = arrays.get("dropout_seed", options.dropout_seed)
    checks.check_seed(seed, options.dropout_p)

    given = {
        name: to_full_rank(name, x if name in _OF_ANY_STRIDES else with_contiguous_rows(x))
        for name, x in arrays.items()
        if name != "dropout_seed"
    }
    return Operands(
        **given,
        dropout_seed=seed if options.dropout_p > 0 else None,
        block_mask=options.block_mask if problem.block_mask else None,
    )


# Ranks of `Operands`; the caller's array may lack leading axes.
_FULL_RANK = {"bias": 4, "mask": 4, "alibi_slopes": 2}
_OF_ANY_STRIDES = ("bias", "mask")


def to_full_rank(name: str, x: Array | None) -> Array | None:
    """A view of option or gradient `name` with all axes of `Operands`."""
    missing = 0 if x is None else _FULL_RANK.get(name, 0) - len(x.shape)
    return x[(None,) * missing + (...,)] if x is not None and missing > 0 else x


def with_contiguous_rows(x: Array) -> Array:
    """`x` itself if its last axis is contiguous, else a copy: the only one of an input."""
    if x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize:
        return x
    return x.copy(order="C")


def check_like(name: str, x: Array, shape: tuple[int, ...], dtype: str, what: str) -> None:
    """Check an array whose shape and dtype follow from the problem."""
    if x.dtype.name != dtype:
        raise TypeError(f"{name}: expected dtype {dtype} ({what}), got {x.dtype.name}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} ({what}), got {tuple(x.shape)}")


def check_grads(grads: Sequence[str] | None, problem: AttentionProblem) -> frozenset[str]:
    """The names of the wanted gradients; all if `grads` is None."""
    available = ("q", "k", "v", *problem.extra_grads)
    if grads is None:
        return frozenset(available)
    if isinstance(grads, str) or not isinstance(grads, (tuple, list, set, frozenset)):
        raise TypeError(f"grads: expected a tuple of names out of {available}, got {grads!r}")
    for name in grads:
        if not isinstance(name, str):
            raise TypeError(f"grads: expected names out of {available}, got {name!r}")
        if name not in GRAD_NAMES:
            raise ValueError(f"grads: expected names out of {available}, got {name!r}")
        if name not in available:
            raise ValueError(
                f"grads: {name!r} is asked for, but no {name} was given; expected names out of {available}"
            )
    return frozenset(grads)


def _check_inputs(q: Array, k: Array, v: Array, packed: bool) -> str:
    """Shapes and heads of q, k and v fit; returns their dtype."""
    q_axes, k_axes = ("total_q", "total_k") if packed else ("batch, seqlen_q", "batch, seqlen_k")
    rank = 3 if packed else 4
    q_form, k_form = f"({q_axes}, num_heads_q, head_dim)", f"({k_axes}, num_heads_kv, head_dim)"
    v_form = f"({k_axes}, num_heads_kv, head_dim_v)"
    for name, x, form in (("q", q, q_form), ("k", k, k_form), ("v", v, v_form)):
        if len(x.shape) != rank:
            raise ValueError(f"{name}: expected {form}, got {x.shape}")
    dtype = _check_dtypes(q, k, v)
    num_heads_q, head_dim = q.shape[-2:]
    num_heads_kv, head_dim_v = v.shape[-2:]
    _check_shape("k", k, k_form, (*q.shape[:-3], None, None, head_dim))
    _check_shape("v", v, v_form, (*k.shape[:-1], None))
    for name, size in (("head_dim of q", head_dim), ("head_dim_v of v", head_dim_v)):
        if not 0 < size <= MAX_HEAD_DIM:
            error = NotImplementedError if size else ValueError
            raise error(f"{name}: expected 1 to {MAX_HEAD_DIM}, got {size}")
    if num_heads_kv == 0 or num_heads_q == 0 or num_heads_q % num_heads_kv:
        raise ValueError(
            f"heads: expected num_heads_q to be a positive multiple of num_heads_kv (grouped-query attention), "
            f"got num_heads_q = {num_heads_q}, num_heads_kv = {num_heads_kv}"
        )
    return dtype


def _check_dtypes(q: Array, k: Array, v: Array) -> str:
    dtype: str = q.dtype.name
    if dtype not in DTYPES:
        raise TypeError(f"q: expected dtype {', '.join(DTYPES)}, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype.name != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype.name}")
    return dtype


def _check_shape(name: str, x: Array, form: str, expected: tuple[int | None, ...]) -> None:
    if any(want is not None and want != got for want, got in zip(expected, x.shape, strict=True)):
        wanted = ", ".join("*" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected {form} = ({wanted}), got {tuple(x.shape)}")
