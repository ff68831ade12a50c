"""cuflash inside HIPS autograd: attention as a primitive with a vector-Jacobian product.

There are first derivatives only: the gradient is a primitive too, whose derivative is a NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

try:
    from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
except ImportError as error:
    raise ImportError('cuflash.adapters.autograd needs HIPS autograd: pip install "cuflash[autograd]"') from error

import numpy as np
from numpy.typing import NDArray

from cuflash.adapters.form import NO_SECOND_DERIVATIVE, Form, form_of
from cuflash.frontend.run import show_options
from cuflash.hints import MISSING, wrong_options_call
from cuflash.problem.checks import check_bool
from cuflash.typing import AnyArray, ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

__all__ = ["attention", "attention_varlen"]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)


Array = NDArray[Any]


@primitive
def _attention(form: Form, *arrays: Array) -> tuple[Array, Array]:
    return form.forward(arrays)


@primitive
def _gradients(
    form: Form, wanted: tuple[str, ...], dout: Array, dlse: Array, out: Array, lse: Array, *arrays: Array
) -> tuple[Array, ...]:
    found = form.backward(wanted, (dout, dlse), (out, lse), arrays)
    return tuple([found[name] for name in wanted])


def _attention_vjp(
    argnums: Sequence[int], ans: tuple[Array, Array], args: tuple[Any, ...], _: Any
) -> Callable[[Any], tuple[Array, ...]]:
    form, *arrays = args
    names = [form.names[number - 1] for number in argnums]
    differentiable = form.gradient_names(arrays)
    wanted = tuple([name for name in names if name in differentiable])

    def vjp(cotangents: tuple[Array, Array]) -> tuple[Array, ...]:
        found = dict(zip(wanted, _gradients(form, wanted, *cotangents, *ans, *arrays), strict=True))
        # Masks, lengths and integers may be variables, too; nothing depends on them smoothly.
        return tuple(
            [found[name] if name in found else np.zeros(arrays[form.names.index(name)].shape) for name in names]
        )

    return vjp


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


def _no_jvp(*_: Any) -> Any:
    raise NotImplementedError(
        "attention has no forward-mode derivative (make_jvp): use reverse mode (grad, make_vjp, jacobian)"
    )


defvjp_argnums(_attention, _attention_vjp)
defjvp_argnums(_attention, _no_jvp)
defvjp_argnums(_gradients, _no_second_derivative)
defjvp_argnums(_gradients, _no_second_derivative)


@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, return_lse: Literal[False] = False, **options: Unpack[OptionKeywords]
) -> ArrayT: ...
# NumPy's types have dtypes, and the lse of float16 arrays is float32.
@overload
def attention(
    q: NDArray[np.float16], k: AnyArray, v: AnyArray, *, return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> tuple[NDArray[np.float16], NDArray[np.float32]]: ...
@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> tuple[ArrayT, ArrayT]: ...
def attention(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """`cuflash.attention` of arrays, which autograd may differentiate.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, return_lse, **options
        As of `cuflash.attention`. Gradients, through out and through lse, are of q, k, v, bias, sink, alibi_slopes
        and floating-point operands, of those alone that are variables. ``out=`` is not taken.

    Returns
    -------
    out : array (batch, seqlen_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError
        As `cuflash.attention`.
    NotImplementedError
        Where the gradient itself is differentiated, for forward mode, and for gradients of FP8 arrays.

    Examples
    --------
    >>> import autograd, autograd.numpy as np
    >>> from cuflash.adapters.autograd import attention
    >>> q = np.ones((1, 6, 2, 8))
    >>> autograd.grad(lambda q: np.sum(attention(q, q, q, causal=True)))(q).shape
    (1, 6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention, (q, k, v, *others), options)
    return _apply((q, k, v), return_lse, options)


@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: NDArray[np.float16],
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None,
    *,
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
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
def attention_varlen(
    q: ArrayT = MISSING,
    k: AnyArray = MISSING,
    v: AnyArray = MISSING,
    cu_seqlens_q: AnyArray = MISSING,
    cu_seqlens_k: AnyArray | None = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """`cuflash.attention_varlen` of arrays, which autograd may differentiate: `attention` for packed sequences.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse, **options
        As of `cuflash.attention_varlen`; gradients as of `attention` here.

    Returns
    -------
    out : array (total_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` here.

    Examples
    --------
    >>> import autograd, autograd.numpy as np
    >>> from cuflash.adapters.autograd import attention_varlen
    >>> q, cu_seqlens = np.ones((6, 2, 8)), np.array([0, 2, 6], np.int32)
    >>> autograd.grad(lambda q: np.sum(attention_varlen(q, q, q, cu_seqlens, cu_seqlens)))(q).shape
    (6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return _apply((q, k, v, cu_seqlens_q, cu_seqlens_k), return_lse, options)


show_options(attention, attention_varlen)


def _apply(inputs: Sequence[Any], return_lse: bool, options: Any) -> Any:
    return_lse = check_bool("return_lse", return_lse)
    form, arrays = form_of(inputs, options)
    results = _attention(form, *arrays)
    return (results[0], results[1]) if return_lse else results[0]
