"""The libraries that are measured: cuflash and its peers."""

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash.tools.bench.cells import default_scale
from cuflash.tools.bench.inputs import WITH_PEERS, Array, Inputs, arguments, as_torch, backward_arguments

US = "cuflash"
# cuflash on `Cell.plain`: what the rest costs.
PLAIN = "plain"


class Calls(NamedTuple):
    """The calls that are timed. Results have the layout of cuflash's: (batch, seqlen, heads, dim), or packed."""

    forward: Callable[[], Any]  # -> out
    backward: Callable[[], tuple[Any, ...]]  # -> dq, dk, dv, and dbias if it is asked for


class Unavailable(Exception):
    """Why a peer does not compute a cell."""


Peer = Callable[[Inputs], Calls]


def cuflash_results(inputs: Inputs, given: dict[str, Any]) -> tuple[Array, Array]:
    """Cuflash's out and lse."""
    forward, _, where = _entry_points(inputs)
    out, lse = forward(*(inputs[name] for name in "qkv"), *where, return_lse=True, **given)
    return out, lse


def cuflash_calls(inputs: Inputs) -> Calls:
    """Cuflash itself."""
    forward, backward, where = _entry_points(inputs)
    given = arguments(inputs)
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    out, lse = cuflash_results(inputs, given)
    of_backward = {**given, **backward_arguments(inputs)}

    def gradients() -> tuple[Array, ...]:
        return tuple(x for x in backward(dout, q, k, v, out, lse, *where, **of_backward) if x is not None)

    return Calls(lambda: forward(q, k, v, *where, **given), gradients)


def plain_calls(inputs: Inputs) -> Calls:
    """Cuflash on `Cell.plain`."""
    plain = inputs.cell.plain
    if plain == inputs.cell:
        raise Unavailable("the cell is plain")
    return cuflash_calls(inputs.of(plain))


def _entry_points(inputs: Inputs) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]:
    if not inputs.cell.lengths:
        return cuflash.attention, cuflash.attention_backward, ()
    return cuflash.attention_varlen, cuflash.attention_varlen_backward, _cu_seqlens(inputs)


def _cu_seqlens(inputs: Inputs) -> tuple[Array, Array]:
    """The first rows of each sequence's queries and keys."""
    of_queries, of_keys = (
        inputs.xp.asarray(np.cumsum((0, *lengths)).astype(np.int32))
        for lengths in (inputs.cell.lengths, inputs.cell.keys)
    )
    return of_queries, of_keys


def naive_calls(inputs: Inputs) -> Calls:
    """By matrix products, with the whole score matrix."""
    cell, xp = inputs.cell, inputs.xp
    if cell.lengths:
        raise Unavailable("one padded batch would measure the padding")
    needed = 16 * cell.batch * cell.num_heads_q * cell.seqlen_q * cell.seqlen_k
    # The limit is what a laptop can spare, or what is free on the GPU.
    if needed > (4 << 30 if xp is np else xp.cuda.runtime.memGetInfo()[0]):
        raise Unavailable(f"its score matrices need {needed >> 30} GiB")
    multiply = _products(xp)
    dtype = inputs["q"].dtype
    accum = np.dtype("float64" if cell.dtype == "float64" else "float32")
    scale = default_scale(cell)
    group = cell.num_heads_q // cell.num_heads_kv

    def stack(x: Array) -> Array:  # (batch * heads, seqlen, dim), a copy that is not timed
        return xp.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, x.shape[1], x.shape[3])

    def unstack(x: Array) -> Array:
        return x.reshape(cell.batch, -1, *x.shape[1:]).swapaxes(1, 2)

    q, dout = stack(inputs["q"]), stack(inputs["dout"])
    k, v = (stack(xp.repeat(inputs[name], group, axis=2)) for name in "kv")
    scores_shape = (len(q), cell.seqlen_q, cell.seqlen_k)
    hidden = None
    if cell.causal or cell.restricted:
        hidden = xp.asarray(~cell.visible(np.arange(cell.seqlen_q)))

    def probabilities() -> Array:
        scores = multiply(q, k.swapaxes(1, 2), out=xp.empty(scores_shape, accum))
        scores *= scale
        if hidden is not None:
            xp.copyto(scores, -np.inf, where=hidden)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores.astype(dtype)

    def forward() -> Array:
        return unstack(multiply(probabilities(), v))

    p = probabilities()

    def backward() -> tuple[Array, Array, Array]:
        weights = p.astype(accum)
        dp = multiply(dout, v.swapaxes(1, 2), out=xp.empty(scores_shape, accum))
        dp -= (weights * dp).sum(axis=-1, keepdims=True)
        weights *= dp
        ds = (weights * scale).astype(dtype)
        dq, dk, dv = multiply(ds, k), multiply(ds.swapaxes(1, 2), q), multiply(p.swapaxes(1, 2), dout)
        if group > 1:
            dk, dv = (x.reshape(-1, group, *x.shape[1:]).astype(accum).sum(axis=1).astype(dtype) for x in (dk, dv))
        return unstack(dq), unstack(dk), unstack(dv)

    return Calls(forward, backward)


def _products(xp: ModuleType) -> Callable[..., Array]:
    if xp is np:
        return np.matmul
    try:
        xp.cuda.device.get_cublas_handle()
    except ImportError as error:
        raise Unavailable(
            f"it needs cuBLAS (extra cuda13-full or cuda12-full): {str(error).splitlines()[0]}"
        ) from error
    return matmul


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any, dict[str, int]]:
    import cupy
    from cupy_backends.cuda.libs import cublas

    runtime = cupy.cuda.runtime
    types = {
        "bfloat16": runtime.CUDA_R_16BF,
        "float16": runtime.CUDA_R_16F,
        "float32": runtime.CUDA_R_32F,
        "float64": runtime.CUDA_R_64F,
    }
    return cupy, cublas, types


# The factors alpha and beta that cuBLAS reads from the host, in the type that it computes in.
_FACTORS: dict[str, Array] = {"float32": np.array([1, 0], np.float32), "float64": np.array([1, 0], np.float64)}


def matmul(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    """``a @ b`` of CuPy matrices or stacks of them by cuBLAS, into `out` or added to it.

    One of the last two axes of each operand is contiguous, and the last of `out`, whose dtype may be that of the sums:
    float32, float64 for float64.
    """
    cupy, cublas, types = _library()
    if out is None:
        out = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    # cuBLAS is column-major: it computes out^T = b^T a^T.
    shape = (b.shape[-1], a.shape[-2], a.shape[-1])
    (b_op, b_step), (a_op, a_step) = _orientation(cublas, b), _orientation(cublas, a)
    matrices = ((b, b_step), (a, a_step), (out, out.strides[-2] // out.itemsize))
    described: list[tuple[int, ...]] = [(x.data.ptr, types[x.dtype.name], step) for x, step in matrices]
    call = cublas.gemmEx
    stack: tuple[int, ...] = ()
    if a.ndim == 3:
        described = [(*d, x.strides[0] // x.itemsize) for d, (x, _) in zip(described, matrices, strict=True)]
        call, stack = cublas.gemmStridedBatchedEx, (len(a),)
    double = a.dtype == np.float64
    factors = _FACTORS["float64" if double else "float32"]
    one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    compute = cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F
    call(
        *(cupy.cuda.device.get_cublas_handle(), b_op, a_op, *shape, one, *described[0], *described[1]),
        *(one if add else zero, *described[2], *stack, compute, cublas.CUBLAS_GEMM_DEFAULT),
    )
    return out


def _orientation(cublas: Any, x: Array) -> tuple[int, int]:
    rows, columns = (stride // x.itemsize for stride in x.strides[-2:])
    return (cublas.CUBLAS_OP_N, rows) if columns == 1 else (cublas.CUBLAS_OP_T, columns)


def sdpa_calls(inputs: Inputs, backend: str) -> Calls:
    """torch.nn.functional.scaled_dot_product_attention with one of its backends, or its own choice."""
    torch = _import("torch")
    _import("torch.nn.attention")
    cell = inputs.cell
    if cell.lengths:
        raise Unavailable("torch's SDPA takes no packed sequences without a padded copy")
    if cell.causal and not cell.restricted and cell.seqlen_q != cell.seqlen_k:
        raise Unavailable("torch's SDPA aligns a causal mask to the first key")
    attention, attend = torch.nn.attention, torch.nn.functional.scaled_dot_product_attention
    q, k, v = (inputs.torch(name).transpose(1, 2).requires_grad_() for name in ("q", "k", "v"))
    dout = inputs.torch("dout").transpose(1, 2)
    options: dict[str, Any] = {"is_causal": cell.causal, "enable_gqa": cell.num_heads_q != cell.num_heads_kv}
    if cell.restricted:
        visible = cell.visible(np.arange(cell.seqlen_q))
        options.update(is_causal=False, attn_mask=torch.from_numpy(visible).to(q.device))

    def call() -> Any:
        if backend == "default":
            return attend(q, k, v, **options)
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return attend(q, k, v, **options)

    def forward() -> Any:
        with torch.no_grad():
            return call().transpose(1, 2)

    out = call()

    def backward() -> tuple[Any, ...]:
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in gradients)

    return Calls(forward, backward)


def fa3_calls(inputs: Inputs) -> Calls:
    """FlashAttention-3 for Hopper."""
    fa3 = _import("flash_attn_interface")
    torch = _import("torch")
    cell = inputs.cell
    if cell.dtype not in ("float16", "bfloat16"):
        raise Unavailable("FlashAttention-3 takes 16-bit inputs")
    if cell.density is not None:
        raise Unavailable("FlashAttention-3 has no block masks")
    deterministic = "deterministic" in cell.options
    q, k, v, dout = (inputs.torch(name) for name in ("q", "k", "v", "dout"))
    if cell.lengths:
        return _fa3_packed_calls(torch, inputs)
    options = {"causal": cell.causal, "window_size": tuple(-1 if side is None else side for side in cell.window)}
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]
    return Calls(
        lambda: fa3.flash_attn_func(q, k, v, **options),
        lambda: fa3.flash_attn_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options),
    )


def _fa3_packed_calls(torch: Any, inputs: Inputs) -> Calls:
    """By the registered operators: releases' Python wrappers differ."""
    cell = inputs.cell
    ops = torch.ops.flash_attn_3
    q, k, v, dout = (inputs.torch(name) for name in ("q", "k", "v", "dout"))
    of_queries, of_keys = map(as_torch, _cu_seqlens(inputs))
    options = {
        "cu_seqlens_q": of_queries,
        "cu_seqlens_k": of_keys,
        "max_seqlen_q": max(cell.lengths),
        "max_seqlen_k": max(cell.keys),
        "softmax_scale": default_scale(cell),
        "is_causal": cell.causal,
    }
    out, lse = ops.fwd(q, k, v, **options)[:2]
    return Calls(
        lambda: ops.fwd(q, k, v, **options)[0],
        lambda: ops.bwd(dout, q, k, v, out, lse, **options)[:3],
    )


def torch_varlen_calls(inputs: Inputs) -> Calls:
    """FlashAttention-2 over packed sequences, torch's."""
    torch = _import("torch")
    varlen = _import("torch.nn.attention.varlen")
    cell = inputs.cell
    q, k, v = (inputs.torch(name).requires_grad_() for name in ("q", "k", "v"))
    dout = inputs.torch("dout")
    of_sequences = *map(as_torch, _cu_seqlens(inputs)), max(cell.lengths), max(cell.keys)
    options = {"window_size": (-1, 0)} if cell.causal else {}

    def call() -> Any:
        return varlen.varlen_attn(q, k, v, *of_sequences, **options)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    out = call()
    return Calls(forward, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported") from error


def _on_equal_terms(prepare: Peer, options: tuple[str, ...] = WITH_PEERS) -> Peer:
    """A peer that computes no cell with other options."""

    def checked(inputs: Inputs) -> Calls:
        unknown = set(inputs.cell.options) - set(options)
        if unknown:
            raise Unavailable(f"not measured with {', '.join(sorted(unknown))}")
        return prepare(inputs)

    return checked


def gpu_peers() -> dict[str, Peer]:
    """On a GPU, cuflash first."""
    free_order = tuple(name for name in WITH_PEERS if name != "deterministic")
    return {
        US: cuflash_calls,
        PLAIN: plain_calls,
        "fa3": _on_equal_terms(fa3_calls),
        "cudnn": _on_equal_terms(lambda inputs: sdpa_calls(inputs, "CUDNN_ATTENTION"), free_order),
        "flash": _on_equal_terms(
            lambda inputs: torch_varlen_calls(inputs) if inputs.cell.lengths else sdpa_calls(inputs, "FLASH_ATTENTION"),
            free_order,
        ),
        "efficient": _on_equal_terms(lambda inputs: sdpa_calls(inputs, "EFFICIENT_ATTENTION"), free_order),
        "naive": _on_equal_terms(naive_calls, free_order),
    }


def cpu_peers() -> dict[str, Peer]:
    """On the CPU, cuflash first."""
    return {US: cuflash_calls, "torch": lambda inputs: sdpa_calls(inputs, "default"), "naive": naive_calls}
