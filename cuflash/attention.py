"""The public functions: attention, its gradient, and both for packed sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuflash.frontend.call import Call, Gradients, gradient_function
from cuflash.frontend.metadata import metadata_of, repeated
from cuflash.problem.attention_problem import Array
from cuflash.problem.checks import check_bool
from cuflash.problem.fp8 import refuse_gradients
from cuflash.problem.options import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Backward = Callable[..., Gradients]
Inputs = tuple[Array, ...]  # q, k, v, and of packed sequences cu_seqlens_q and cu_seqlens_k


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Exact attention ``softmax(softmax_scale * q k^T) v`` without forming the score matrix.

    FlashAttention: Dao et al. 2022, Algorithm 1; the online softmax of FlashAttention-2 (Dao 2023), section 3.1.

    Parameters
    ----------
    q : array (batch, seqlen_q, num_heads_q, head_dim)
        float16, bfloat16, float32 or float64; any strides. head_dim 1 to 1024. Or FP8: e4m3 codes,
        as uint8 or float8_e4m3fn.
    k : array (batch, seqlen_k, num_heads_kv, head_dim)
        Of q's dtype, or k and v FP8 under float16 or bfloat16 queries. ``num_heads_q % num_heads_kv == 0``:
        consecutive query heads share a KV head.
    v : array (batch, seqlen_k, num_heads_kv, head_dim_v)
        Of k's dtype.
    out : array (batch, seqlen_q, num_heads_q, head_dim_v), optional
        Receives the result; its dtype, any strides with a contiguous last axis, no overlap with an input.
    return_lse : bool
        Also return the natural logarithm of the softmax's denominator.
    causal : bool
        Query i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
    window : (left, right), optional
        Query i sees ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``; None is unbounded.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``; finite in float32 (float64 for float64).
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    bias : array, optional
        Added to the scores; broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k); q's dtype or float32. -inf hides.
    mask : bool array, optional
        True = may attend; broadcasts likewise.
    alibi_slopes : array (num_heads_q,) or (batch, num_heads_q), optional
        Adds ``-slope * abs(i + seqlen_k - seqlen_q - j)``; float32 (float64 for float64).
    sink : array (num_heads_q,), optional
        A logit per head that joins the denominator only; float32 (float64 for float64).
    q_lengths, kv_lengths : int32 array (batch,), optional
        Used lengths of each sequence; the rows beyond are padding.
    dropout_p : float
        Probability with which an attention weight is dropped, 0 <= dropout_p < 1, in steps of 1/65536 (rounded down).
    dropout_seed : int or uint64 array of one element
        Required with dropout; the kept weights are a pure function of it.
    block_mask : BlockMask, optional
        Which keys each query sees; hidden blocks cost nothing.
    deterministic : bool, optional
        Concerns gradients only: a forward pass is always bitwise repeatable.
    precision : "tf32", optional
        Allow TF32's error for float32 inputs.
    score_mod : callable, optional
        ``score_mod(s, b, h, i, j, *operands)`` gives the new score of query i and key j in batch b and query head h;
        it acts after softcap, bias and ALiBi, before masks, and hides by -inf. It is called once with symbolic
        values, and becomes part of the kernels; its derivative is found automatically.
    mask_mod : callable, optional
        ``mask_mod(b, h, i, j, *operands)`` gives a bool: whether query i may see key j.
    operands : tuple of arrays, optional
        What both functions receive: floats, integers or bools of any shape, on q's device. A function indexes all axes
        of an operand; an index is clamped to its axis.
    block_table : int32 array (batch, max_pages), optional
        k and v are pools (num_pages, page_size, num_heads_kv, head_dim or head_dim_v) of any strides, and entry p of a
        row is the page with keys ``p * page_size`` to ``(p + 1) * page_size - 1`` of that sequence. `kv_lengths` is
        required: entries beyond the keys in use are never read, used ones are clamped to the pool. seqlen_k is
        ``max_pages * page_size`` for bias, mask and block_mask; the gradients of k and v have the pools' shapes.
    num_splits : int, optional
        The number of splits of the keys where a kernel splits them (Hopper's on 16 bits); no effect elsewhere.
    split_size : int, optional
        Keys of a split: then a row's bits depend neither on the batch and its order nor on the block table's width or
        other sequences' lengths. Not with `num_splits`. Gradients ignore both.
    q_scale, k_scale, v_scale : float32 array, optional
        By what the codes of q, k or v are multiplied; of all axes of theirs but the last, to which it broadcasts.
    out_dtype : dtype or its name, optional
        Of the result: float16, bfloat16 or float32 for 16-bit queries (default: theirs) and FP8 ones (default:
        bfloat16). A float32 result is rounded once.

    Returns
    -------
    out : array (batch, seqlen_q, num_heads_q, head_dim_v)
        Of the inputs' library, and of `out_dtype` (default: q's).
    lse : array (batch, num_heads_q, seqlen_q)
        float32 (float64 for float64); only if `return_lse`.

    Raises
    ------
    TypeError
        For a wrong kind of thing or dtype.
    ValueError
        For a wrong shape, stride, device or value.
    NotImplementedError
        For a head dimension above 1024; in functions that give gradients for FP8 arrays.
    """
    return _forward((q, k, v), options, out, return_lse)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    forward_out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    out: Sequence[Array | None] | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> Gradients:
    """Gradients of `attention` from its inputs and results alone; nothing is kept between the calls.

    FlashAttention-2 (Dao 2023), Algorithm 2: the weights are recomputed from `lse`, so a result and lse that were
    merged from several parts give each part's exact gradients.

    Parameters
    ----------
    dout : array (batch, seqlen_q, num_heads_q, head_dim_v)
        Gradient of the result, of its dtype.
    q, k, v : array
        As given to `attention`.
    forward_out : array (batch, seqlen_q, num_heads_q, head_dim_v)
        The result of `attention`.
    lse : array (batch, num_heads_q, seqlen_q)
        As returned by ``attention(..., return_lse=True)``; rows of -inf have no gradient.
    dlse : array (batch, num_heads_q, seqlen_q), optional
        Gradient of the returned lse.
    out : tuple of arrays, optional
        ``(dq, dk, dv)``, or these and the extras' gradients, to be written; None where one is to be allocated or not
        wanted.
    grads : tuple of str, optional
        Names of the wanted gradients out of q, k, v, bias, sink, alibi_slopes, operands; the others come back as None.
    **options
        As given to `attention`.

    Returns
    -------
    tuple of arrays
        ``(dq, dk, dv)``, then the gradients of bias, sink and alibi_slopes, in this order, for those that were given,
        then one for each floating-point operand; each in its input's shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.
    """
    return _backward((dout, forward_out, lse, dlse), (q, k, v), options, out, grads)


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward]:
    """`attention` and the function that maps gradients of its results to gradients of its inputs.

    Parameters
    ----------
    q, k, v, out, return_lse, **options
        As in `attention`.

    Returns
    -------
    out : array, or (out, lse) if `return_lse`
        As `attention` returns it.
    backward : callable
        ``backward(dout, dlse=None, *, out=None, grads=None)`` returns what `attention_backward` does, any number of
        times. It holds the inputs and results: change none of them in place before its last call.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.
    """
    return _vjp((q, k, v), options, out, return_lse)


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    *,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Attention within each of several packed sequences.

    Parameters
    ----------
    q : array (total_q, num_heads_q, head_dim)
        The sequences' rows, one sequence after the other.
    k : array (total_k, num_heads_kv, head_dim)
    v : array (total_k, num_heads_kv, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,)
        Sequence b has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``; rows beyond the last are padding.
        On q's device; never read by the host.
        With `block_table`, of which k and v are the pools, cu_seqlens_k is None.
    out, return_lse, **options
        As in `attention`. bias, mask and block_mask are indexed (batch, num_heads_q, i, j) local to each sequence and
        cover the longest one; q_lengths and kv_lengths are used lengths inside each sequence.

    Returns
    -------
    out : array (total_q, num_heads_q, head_dim_v)
    lse : array (num_heads_q, total_q)
        Only if `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.
    """
    return _forward((q, k, v, cu_seqlens_q, cu_seqlens_k), options, out, return_lse)


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    forward_out: Array,
    lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    *,
    dlse: Array | None = None,
    out: Sequence[Array | None] | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> Gradients:
    """Gradients of `attention_varlen`: `attention_backward` for packed sequences.

    Parameters
    ----------
    dout, forward_out : array (total_q, num_heads_q, head_dim_v)
    lse, dlse : array (num_heads_q, total_q)
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As given to `attention_varlen`.
    out, grads
        As in `attention_backward`.

    Returns
    -------
    tuple of arrays
        As from `attention_backward`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.
    """
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return _backward((dout, forward_out, lse, dlse), inputs, options, out, grads)


def attention_varlen_vjp(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    *,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward]:
    """`attention_varlen` and its gradient function: `attention_vjp` for packed sequences.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, return_lse, **options
        As in `attention_varlen`.

    Returns
    -------
    out, backward
        As from `attention_vjp`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.
    """
    return _vjp((q, k, v, cu_seqlens_q, cu_seqlens_k), options, out, return_lse)


def _call(inputs: Inputs, options: Mapping[str, Any]) -> Call:
    q, k, v, *cu_seqlens = inputs
    return Call(q, k, v, options, (cu_seqlens[0], cu_seqlens[1]) if cu_seqlens else None)


def _forward(inputs: Inputs, options: Mapping[str, Any], out: Array | None, return_lse: bool) -> Any:
    return_lse = check_bool("return_lse", return_lse)
    metadata = metadata_of("forward, lse" if return_lse else "forward", inputs, options, (out,))
    results = repeated(metadata)
    if results is not None:
        return tuple(results) if return_lse else results[0]
    call = _call(inputs, options)
    result, lse = call.forward(out, return_lse, metadata)
    return result if lse is None else (result, call.release(lse))


def _backward(
    further: tuple[Array, Array, Array, Array | None],
    inputs: Inputs,
    options: Mapping[str, Any],
    out: Sequence[Array | None] | None,
    grads: Sequence[str] | None,
) -> Gradients:
    metadata = None
    if out is None or (isinstance(out, (tuple, list)) and out):
        metadata = metadata_of(f"backward, {grads!r}", (*further, *inputs), options, out or ())
    results = repeated(metadata)
    if results is not None:
        return tuple(results)
    call = _call(inputs, options)
    dout, result, lse, dlse = further
    residuals = call.adopt("out", result), call.adopt("lse", lse)
    return call.backward(call.adopt("dout", dout), *residuals, call.adopt("dlse", dlse), out, grads, metadata)


def _vjp(inputs: Inputs, options: Mapping[str, Any], out: Array | None, return_lse: bool) -> tuple[Any, Backward]:
    return_lse = check_bool("return_lse", return_lse)
    metadata = metadata_of("forward, lse", inputs, options, (out,))
    if metadata is not None:  # then these are arrays, and the same forward pass may be known
        refuse_gradients(*inputs[:3])
    results = repeated(metadata)
    if results is not None:
        result, lse = results
        return ((result, lse) if return_lse else result), gradient_function(
            lambda dout, dlse, outs, grads: _backward((dout, result, lse, dlse), inputs, options, outs, grads)
        )
    call = _call(inputs, options)
    call.refuse_gradients()
    result, lse = call.forward(out, True, metadata)
    return ((result, call.release(lse)) if return_lse else result), call.gradients_of(result, lse)


# `help` and editors show every option.
_options = [x.replace(kind=x.KEYWORD_ONLY) for x in inspect.signature(Options).parameters.values()]
for _function in (
    attention,
    attention_backward,
    attention_vjp,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
):
    *_named, _ = inspect.signature(_function).parameters.values()
    vars(_function)["__signature__"] = inspect.Signature((*_named, *_options))
