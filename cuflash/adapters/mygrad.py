"""cuflash inside MyGrad: attention as nodes of its graph.

MyGrad's gradients are plain NumPy arrays outside any graph, so that a second derivative cannot be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

try:
    import mygrad
    from mygrad.operation_base import Operation
except ImportError as error:
    raise ImportError('cuflash.adapters.mygrad needs MyGrad: pip install "cuflash[mygrad]"') from error

import numpy as np
from numpy.typing import NDArray

from cuflash.adapters.form import Form, form_of
from cuflash.frontend.run import show_options
from cuflash.hints import MISSING, wrong_options_call
from cuflash.problem.checks import check_bool

__all__ = ["attention", "attention_varlen"]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)


Array = NDArray[Any]


class _Call:
    """One call, whose results are two nodes of the graph: out and lse."""

    def __init__(self, form: Form, tensors: Sequence[Any]) -> None:
        self.form = form
        self.arrays: list[Array] = [x.data if isinstance(x, mygrad.Tensor) else x for x in tensors]
        self.results = form.forward(self.arrays)


class _Node(Operation):
    """One of a call's results. Its gradients are computed together, although MyGrad asks for one after the other."""

    number: int  # of the result

    def __call__(self, *tensors: mygrad.Tensor, call: _Call) -> Array:
        """The result, which MyGrad wraps in a tensor."""
        self.variables = tensors
        self._call = call
        self._found: dict[str, Array] = {}
        return call.results[self.number]

    def backward(self, grad: Array, **kwargs: Any) -> None:
        """Add to the gradients of all tensors that need one."""
        form, arrays = self._call.form, self._call.arrays
        needed = [name for name, x in zip(form.names, self.variables, strict=True) if not x.constant]
        wanted = tuple([name for name in form.gradient_names(arrays) if name in needed])
        self._found = form.backward(wanted, self._cotangents(grad), self._call.results, arrays)
        super().backward(grad, **kwargs)
        self._found = {}

    def backward_var(self, grad: Array, index: int, **kwargs: Any) -> Array:
        """The gradient of one tensor."""
        return self._found[self._call.form.names[index]]

    def _cotangents(self, grad: Array) -> tuple[Array, Array | None]:
        raise NotImplementedError


class _Out(_Node):
    number = 0

    def _cotangents(self, grad: Array) -> tuple[Array, Array | None]:
        return grad.astype(self._call.results[0].dtype, copy=False), None


class _Lse(_Node):
    number = 1

    def _cotangents(self, grad: Array) -> tuple[Array, Array | None]:
        out, lse = self._call.results
        return np.zeros_like(out), grad.astype(lse.dtype, copy=False)


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Any) -> mygrad.Tensor: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Any
) -> tuple[mygrad.Tensor, mygrad.Tensor]: ...
def attention(
    q: Any = MISSING, k: Any = MISSING, v: Any = MISSING, *others: Any, return_lse: bool = False, **options: Any
) -> mygrad.Tensor | tuple[mygrad.Tensor, mygrad.Tensor]:
    """`cuflash.attention` of MyGrad's tensors; NumPy arrays among the arguments are constants.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, return_lse, **options
        As of `cuflash.attention`. Gradients are of q, k, v, bias, sink, alibi_slopes and floating-point operands, of
        those alone that are no constants; those through lse cost a backward pass of their own. ``out=`` is not taken.

    Returns
    -------
    out : tensor (batch, seqlen_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `cuflash.attention`.

    Examples
    --------
    >>> import mygrad, numpy as np
    >>> from cuflash.adapters.mygrad import attention
    >>> q = mygrad.tensor(np.ones((1, 6, 2, 8)))
    >>> attention(q, q, q, causal=True).sum().backward()
    >>> q.grad.shape
    (1, 6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention, (q, k, v, *others), options)
    return _apply((q, k, v), return_lse, options)


@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Any,
) -> mygrad.Tensor: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[mygrad.Tensor, mygrad.Tensor]: ...
def attention_varlen(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    cu_seqlens_q: Any = MISSING,
    cu_seqlens_k: Any = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Any,
) -> mygrad.Tensor | tuple[mygrad.Tensor, mygrad.Tensor]:
    """`cuflash.attention_varlen` of MyGrad's tensors: `attention` for packed sequences.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse, **options
        As of `cuflash.attention_varlen`; gradients as of `attention` here.

    Returns
    -------
    out : tensor (total_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` here.

    Examples
    --------
    >>> import mygrad, numpy as np
    >>> from cuflash.adapters.mygrad import attention_varlen
    >>> q, cu_seqlens = mygrad.tensor(np.ones((6, 2, 8))), np.array([0, 2, 6], np.int32)
    >>> attention_varlen(q, q, q, cu_seqlens, cu_seqlens, causal=True).sum().backward()
    >>> q.grad.shape
    (6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return _apply((q, k, v, cu_seqlens_q, cu_seqlens_k), return_lse, options)


show_options(attention, attention_varlen)


def _apply(inputs: Sequence[Any], return_lse: bool, options: Mapping[str, Any]) -> Any:
    return_lse = check_bool("return_lse", return_lse)
    form, tensors = form_of(inputs, options)
    call = _Call(form, tensors)
    nodes = (_Out, _Lse) if return_lse else (_Out,)
    results = [mygrad.execute_op(node, *tensors, op_kwargs={"call": call}) for node in nodes]
    return tuple(results) if return_lse else results[0]
