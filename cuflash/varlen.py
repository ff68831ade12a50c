"""The public functions for packed sequences: attention, its gradient, and both together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from cuflash.frontend.run import backward_from, forward, show_options, vjp
from cuflash.hints import MISSING, wrong_options_call
from cuflash.typing import AnyArray, ArrayT, Backward

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords


@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
# NumPy's types have dtypes, and the lse of float16 arrays is float32.
@overload
def attention_varlen(
    q: NDArray[np.float16],
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: NDArray[np.float16] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[NDArray[np.float16], NDArray[np.float32]]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention_varlen(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    cu_seqlens_q: AnyArray = MISSING,
    cu_seqlens_k: AnyArray | None = MISSING,
    *others: Any,
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Attention within each of several packed sequences.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q : array (total_q, num_heads_q, head_dim)
        The sequences' rows, one sequence after the other.
    k : array (total_k, num_heads_kv, head_dim)
    v : array (total_k, num_heads_kv, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,)
        Sequence b has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``; rows before the first and beyond the
        last are padding. On q's device, and never read by the host: there each value is clamped to 0 and the number of
        rows, and a sequence that ends before it begins has no rows. Where values descend, what comes out for rows that
        several sequences have is not defined.
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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((7, 2, 8), np.float32)  # sequences of 3 and 4 rows
    >>> cu_seqlens = np.array([0, 3, 7], np.int32)
    >>> cuflash.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, causal=True).shape
    (7, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return forward((q, k, v, cu_seqlens_q, cu_seqlens_k), options, out, return_lse)


@overload
def attention_varlen_backward(
    dout: ArrayT,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    forward_out: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ...]: ...
@overload
def attention_varlen_backward(
    dout: ArrayT,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    forward_out: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: Sequence[str],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]: ...
def attention_varlen_backward(
    dout: ArrayT = MISSING,
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    forward_out: ArrayT = MISSING,
    lse: AnyArray = MISSING,
    cu_seqlens_q: AnyArray = MISSING,
    cu_seqlens_k: AnyArray | None = MISSING,
    *others: Any,
    dlse: AnyArray | None = None,
    out: Sequence[AnyArray | None] | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]:
    """Gradients of `attention_varlen`: `attention_backward` for packed sequences.

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, cu_seqlens = np.ones((7, 2, 8), np.float32), np.array([0, 3, 7], np.int32)
    >>> out, lse = cuflash.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_varlen_backward(out, q, q, q, out, lse, cu_seqlens, cu_seqlens)
    >>> dq.shape
    (7, 2, 8)
    """
    if (
        others
        or dout is MISSING
        or q is MISSING
        or k is MISSING
        or v is MISSING
        or forward_out is MISSING
        or lse is MISSING
        or cu_seqlens_q is MISSING
        or cu_seqlens_k is MISSING
    ):
        raise wrong_options_call(
            attention_varlen_backward, (dout, q, k, v, forward_out, lse, cu_seqlens_q, cu_seqlens_k, *others), options
        )
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return backward_from((dout, forward_out, lse, dlse), inputs, options, out, grads)


@overload
def attention_varlen_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, Backward[ArrayT]]: ...
@overload
def attention_varlen_vjp(
    q: NDArray[np.float16],
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: NDArray[np.float16] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[NDArray[np.float16], NDArray[np.float32]], Backward[NDArray[np.float16]]]: ...
@overload
def attention_varlen_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
@overload
def attention_varlen_vjp(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
def attention_varlen_vjp(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    cu_seqlens_q: AnyArray = MISSING,
    cu_seqlens_k: AnyArray | None = MISSING,
    *others: Any,
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward[ArrayT]]:
    """`attention_varlen` and its gradient function: `attention_vjp` for packed sequences.

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, cu_seqlens = np.ones((7, 2, 8), np.float32), np.array([0, 3, 7], np.int32)
    >>> out, backward = cuflash.attention_varlen_vjp(q, q, q, cu_seqlens, cu_seqlens)
    >>> dq, dk, dv = backward(out)
    >>> dk.shape
    (7, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen_vjp, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return vjp((q, k, v, cu_seqlens_q, cu_seqlens_k), options, out, return_lse)


show_options(attention_varlen, attention_varlen_backward, attention_varlen_vjp)
