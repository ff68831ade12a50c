"""The problem that a command line describes, as arguments, as metadata, and as arrays."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.masks.block_mask import BlockMask
from cuflash.problem.attention_problem import DTYPES, MAX_HEAD_DIM, Array, AttentionProblem
from cuflash.problem.operands import Operands
from cuflash.tools.arguments import positive

DEFAULTS: dict[str, Any] = {"dtype": "float32", "batch": 1, "heads": 1, "head_dim": 64, "seqlen": 4096}
OPTIONS = ("window", "softcap", "bias", "mask", "alibi", "sink", "dropout", "block-mask")
_BLOCKS = 128, 128  # a block mask's blocks
_BLOCK_DENSITY = 0.5
_SOFTCAP, _DROPOUT_P, _SEED = 30.0, 0.5, 5
_DRAWN = 1 << 20  # an array repeats so many drawn numbers
_BUILT_BY = {"float16": "float16", "bfloat16": "float16"}  # arrays that nobody reads need no bfloat16 of NumPy's
# Makes an array of a name, shape and dtype.
Make = Callable[[str, tuple[int, ...], str], Array]


def add_arguments(group: argparse._ArgumentGroup) -> list[str]:
    """Add the arguments that describe a problem, and return their names; each is None where it is not given."""
    names = []

    def add(name: str, words: str, **kind: Any) -> None:
        default = DEFAULTS.get(name.replace("-", "_"))
        words += f" (default {default})" if default is not None else ""
        names.append(group.add_argument(f"--{name}", help=words, **kind).dest)

    dims = f"1 to {MAX_HEAD_DIM}"
    add("dtype", "of all arrays", choices=DTYPES)
    add("batch", "sequences", type=positive)
    add("heads", "query heads", type=positive)
    add("heads-kv", "heads of keys and values, which divide --heads (default: --heads)", type=positive)
    add("head-dim", f"of q and k, {dims}", type=positive)
    add("head-dim-v", f"of v, {dims} (default: --head-dim)", type=positive)
    add("seqlen", "of queries and keys", type=positive)
    add("seqlen-k", "of keys (default: --seqlen)", type=positive)
    on: dict[str, Any] = {"action": "store_true", "default": None}
    add("causal", "hide the keys behind each query's own", **on)
    for option in OPTIONS:
        add(option, f"with {option}", **on)
    add("packed", "of attention_varlen, --seqlen rows in all", **on)
    add("deterministic", "gradients that repeat their bits", **on)
    add("precision", "of float32: products with TF32's error", choices=("tf32",))
    return names


def error_of(args: argparse.Namespace) -> str:
    """Say what is wrong with the sizes that were given; empty if nothing is."""
    own = _given(args)
    if not all(1 <= d <= MAX_HEAD_DIM for d in (own.head_dim, own.head_dim_v)):
        return f"head dimensions: expected 1 to {MAX_HEAD_DIM}, got {own.head_dim} and {own.head_dim_v}"
    if own.heads % own.heads_kv:
        return f"--heads-kv: expected a divisor of --heads = {own.heads}, got {own.heads_kv}"
    if own.packed and (own.block_mask or own.bias or own.mask):
        return "--packed: expected no bias, mask or block mask beside it, as packed sequences have none"
    return ""


def _given(args: argparse.Namespace) -> argparse.Namespace:
    own = {**DEFAULTS, **{name: x for name, x in vars(args).items() if x is not None}}
    for name, other in (("head_dim_v", "head_dim"), ("heads_kv", "heads"), ("seqlen_k", "seqlen")):
        own.setdefault(name, own[other])
    for name in (*OPTIONS, "packed", "causal", "deterministic", "precision"):
        own.setdefault(name.replace("-", "_"), None)
    return argparse.Namespace(**own)


def problem_of(args: argparse.Namespace) -> AttentionProblem:
    """Return the problem that the arguments describe."""
    own = _given(args)
    scores = (1, 1, 1, 1) if own.packed else (1, 1, own.seqlen, own.seqlen_k)
    return AttentionProblem(
        own.batch,
        own.seqlen,
        own.seqlen_k,
        own.heads,
        own.heads_kv,
        own.head_dim,
        own.head_dim_v,
        own.dtype,
        softmax_scale=1 / math.sqrt(own.head_dim),
        window_left=own.seqlen_k // 4 if own.window else None,
        window_right=0 if own.causal or own.window else None,
        softcap=_SOFTCAP if own.softcap else 0.0,
        bias=scores if own.bias else None,
        bias_dtype=own.dtype if own.bias else None,
        mask=scores if own.mask else None,
        alibi=(1, own.heads) if own.alibi else None,
        sink=bool(own.sink),
        dropout_p=_DROPOUT_P if own.dropout else 0.0,
        block_mask=bool(own.block_mask),
        block_size=_BLOCKS if own.block_mask else (0, 0),
        packed=bool(own.packed),
        deterministic=own.deterministic or None,
        precision=_precision_of(own.dtype, own.precision),
    )


def _precision_of(dtype: str, precision: str | None) -> str | None:
    """Return the precision of float32; other dtypes have none."""
    return precision if dtype == "float32" else None


def words_of(problem: AttentionProblem) -> str:
    """Sizes and options of a problem, for users."""
    p = problem
    heads = f"{p.num_heads_q}:{p.num_heads_kv}" if p.num_heads_q != p.num_heads_kv else f"{p.num_heads_q}"
    dims = f"{p.head_dim}/{p.head_dim_v}" if p.head_dim != p.head_dim_v else f"{p.head_dim}"
    mask = "full" if p.window_right is None else "causal" if p.window_left is None else "window"
    given: dict[str, Any] = {"softcap": p.softcap, "bias": p.bias, "mask": p.mask, "alibi": p.alibi, "sink": p.sink}
    given |= {
        str(p.precision): p.precision,
        "dropout": p.dropout_p,
        "block mask": p.block_mask,
        "packed": p.packed,
        "deterministic": p.deterministic,
    }
    options = "".join(f" {name}" for name, x in given.items() if x)
    return f"{p.dtype} b{p.batch} h{heads} {p.seqlen_q}x{p.seqlen_k} d{dims} {mask}{options}"


def shapes_of(problem: AttentionProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a problem's arrays, by their names in `Operands`, and of dout, out and lse."""
    p = problem
    batch = () if p.packed else (p.batch,)
    rows, keys = (*batch, p.seqlen_q, p.num_heads_q), (*batch, p.seqlen_k, p.num_heads_kv)
    found = {
        "q": ((*rows, p.head_dim), p.dtype),
        "k": ((*keys, p.head_dim), p.dtype),
        "v": ((*keys, p.head_dim_v), p.dtype),
        "dout": (p.out_shape, p.result_dtype),
        "out": (p.out_shape, p.result_dtype),
        "lse": (p.lse_shape, p.accum_dtype),
    }
    if p.bias is not None:
        found["bias"] = p.bias, p.bias_dtype or p.dtype
    if p.mask is not None:
        found["mask"] = p.mask, "bool"
    if p.alibi is not None:
        found["alibi_slopes"] = p.alibi, p.accum_dtype
    if p.sink:
        found["sink"] = (p.num_heads_q,), p.accum_dtype
    if p.packed:
        found |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((p.batch + 1,), "int32"))
    return found


def arrays_of(problem: AttentionProblem, make: Make) -> dict[str, Array]:
    """Return the arrays of `shapes_of`."""
    return {name: make(name, *form) for name, form in shapes_of(problem).items()}


def operands_of(problem: AttentionProblem, arrays: dict[str, Array], with_mask: bool) -> Operands:
    """Return the operands among arrays; the block mask, which is drawn, comes with them if its blocks will be read."""
    block_mask: Any = None
    if problem.block_mask and with_mask:
        lengths = problem.seqlen_q, problem.seqlen_k
        block_mask = BlockMask.random(*lengths, _BLOCK_DENSITY, seed=_SEED, block_size=problem.block_size)
    seed = _SEED if problem.dropout_p else None
    inputs = {name: x for name, x in arrays.items() if name in Operands._fields}
    return Operands(**inputs, dropout_seed=seed, block_mask=block_mask)


def stand_in(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array of that shape which has the memory of one element, for those who read metadata alone."""
    one = np.empty(1, _BUILT_BY.get(dtype, dtype))
    strides = [one.dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(one, shape, strides)


def random_arrays(problem: AttentionProblem, xp: Any, dtype_of: Callable[[str], Any]) -> Make:
    """Return what makes random arrays of a problem on a device: N(0, 1) numbers, and sequences of equal lengths."""
    numbers = np.random.default_rng(_SEED)
    totals = {"cu_seqlens_q": problem.seqlen_q, "cu_seqlens_k": problem.seqlen_k}

    def make(name: str, shape: tuple[int, ...], dtype: str) -> Array:
        if name in totals:
            return xp.asarray(np.linspace(0, totals[name], problem.batch + 1).astype(np.int32))
        drawn = numbers.standard_normal(min(math.prod(shape), _DRAWN), np.float32)
        if name == "alibi_slopes":
            drawn = abs(drawn)
        return xp.asarray(np.resize((drawn > 0) if dtype == "bool" else drawn.astype(dtype_of(dtype)), shape))

    return make


def cell_problem(cell: Any, precision: str | None) -> AttentionProblem:
    """Return the problem of a cell of the benchmarks' random suite."""
    sizes = (cell.batch, cell.seqlen_q, cell.seqlen_k, cell.num_heads_q, cell.num_heads_kv)
    problem = AttentionProblem(
        *sizes, cell.head_dim, cell.head_dim_v, cell.dtype, precision=_precision_of(cell.dtype, precision)
    )
    scale = 1 / math.sqrt(cell.head_dim)
    return replace(problem, softmax_scale=scale, window_right=0 if cell.causal else None)
