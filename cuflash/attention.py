"""The public functions: attention, its gradient, and both together; those for packed sequences are in `varlen`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from cuflash.frontend.run import backward_from, forward, show_options, vjp
from cuflash.hints import MISSING, wrong_options_call
from cuflash.typing import AnyArray, ArrayT, Backward
from cuflash.varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords


@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
# NumPy's types have dtypes, and the lse of float16 arrays is float32.
@overload
def attention(
    q: NDArray[np.float16],
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray[np.float16] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[NDArray[np.float16], NDArray[np.float32]]: ...
@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    *others: Any,
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Exact attention ``softmax(softmax_scale * q k^T) v`` without forming the score matrix.

    FlashAttention: Dao et al. 2022, Algorithm 1; the online softmax of FlashAttention-2 (Dao 2023), section 3.1. The
    page "Semantics" of the documentation (docs/semantics.md) says what every option means exactly, alone and together.

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
        The number of splits of the keys where a kernel splits them (by tensor cores, but for float32 on Hopper); no
        effect elsewhere.
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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((2, 6, 4, 8), np.float32)  # (batch, seqlen, num_heads, head_dim)
    >>> k = v = np.ones((2, 9, 2, 8), np.float32)  # two query heads share a KV head
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 6, 4, 8), (2, 4, 6))
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention, (q, k, v, *others), options)
    return forward((q, k, v), options, out, return_lse)


@overload
def attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    forward_out: ArrayT,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ...]: ...
@overload
def attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    forward_out: ArrayT,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: Sequence[str],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]: ...
def attention_backward(
    dout: ArrayT = MISSING,
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    forward_out: ArrayT = MISSING,
    lse: AnyArray = MISSING,
    *others: Any,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]:
    """Gradients of `attention` from its inputs and results alone; nothing is kept between the calls.

    FlashAttention-2 (Dao 2023), Algorithm 2: the weights are recomputed from `lse`, so a result and lse that were
    merged from several parts give each part's exact gradients.

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((1, 6, 2, 8), np.float32)
    >>> sink = np.zeros(2, np.float32)
    >>> out, lse = cuflash.attention(q, q, q, sink=sink, return_lse=True)
    >>> dq, dk, dv, dsink = cuflash.attention_backward(out, q, q, q, out, lse, sink=sink)
    >>> dsink.shape
    (2,)
    """
    if (
        others
        or dout is MISSING
        or q is MISSING
        or k is MISSING
        or v is MISSING
        or forward_out is MISSING
        or lse is MISSING
    ):
        raise wrong_options_call(attention_backward, (dout, q, k, v, forward_out, lse, *others), options)
    return backward_from((dout, forward_out, lse, dlse), (q, k, v), options, out, grads)


@overload
def attention_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, Backward[ArrayT]]: ...
@overload
def attention_vjp(
    q: NDArray[np.float16],
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray[np.float16] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[NDArray[np.float16], NDArray[np.float32]], Backward[NDArray[np.float16]]]: ...
@overload
def attention_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
@overload
def attention_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
def attention_vjp(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    *others: Any,
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward[ArrayT]]:
    """`attention` and the function that maps gradients of its results to gradients of its inputs.

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((1, 6, 2, 8), np.float32)
    >>> out, backward = cuflash.attention_vjp(q, q, q, causal=True)
    >>> dq, dk, dv = backward(np.ones_like(out))
    >>> backward(out, grads=("v",))[0] is None
    True
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention_vjp, (q, k, v, *others), options)
    return vjp((q, k, v), options, out, return_lse)


show_options(attention, attention_backward, attention_vjp)
