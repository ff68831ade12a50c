"""cuflash inside PyTorch's autograd: attention of tensors that require grad, on the CPU or a GPU.

Tensors are not copied, and the work is enqueued on torch's current stream. There are first derivatives only: to
differentiate twice (double backward, a gradient penalty) is a NotImplementedError, never a wrong gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

try:
    import torch
except ImportError as error:
    raise ImportError('cuflash.adapters.torch needs PyTorch: pip install "cuflash[torch]"') from error

from cuflash.adapters.form import NO_SECOND_DERIVATIVE, Form, form_of
from cuflash.frontend.run import show_options
from cuflash.hints import MISSING, wrong_options_call
from cuflash.problem.checks import check_bool

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

__all__ = ["attention", "attention_varlen"]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(form: Form, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return form.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        form, *tensors = inputs
        ctx.form = form
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: torch's checkpoints compute again what is unpacked, and refuse a second time
        out, _, *tensors = saved
        differentiable = ctx.form.gradient_names(tensors)
        needed = [name for name, needs in zip(ctx.form.names, ctx.needs_input_grad[1:], strict=True) if needs]
        wanted = tuple([name for name in needed if name in differentiable])
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        return None, *_Gradients.apply(ctx.form, wanted, dout, dlse, *saved)


class _Gradients(torch.autograd.Function):
    """A function of its own, so that torch records it where a second derivative may follow, and the error comes.

    The decorator once_differentiable would not do: where dout is a constant it drops the second derivative silently.
    """

    @staticmethod
    def forward(
        form: Form,
        wanted: tuple[str, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        found = form.backward(wanted, (dout, dlse), (out, lse), tensors)
        return tuple([found.get(name) for name in form.names])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor = MISSING,
    k: torch.Tensor = MISSING,
    v: torch.Tensor = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cuflash.attention` of tensors, which may require grad.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, return_lse, **options
        As of `cuflash.attention`. Gradients, through out and through lse, are of q, k, v, bias, sink, alibi_slopes
        and floating-point operands, of those alone that require grad. ``out=`` is not taken.

    Returns
    -------
    out : tensor (batch, seqlen_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError
        As `cuflash.attention`.
    NotImplementedError
        Where the gradient itself is differentiated, and backward of FP8 tensors.

    Examples
    --------
    >>> import torch
    >>> from cuflash.adapters.torch import attention
    >>> q = torch.ones(1, 6, 2, 8, requires_grad=True)
    >>> attention(q, q, q, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 6, 2, 8])
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention, (q, k, v, *others), options)
    return _apply((q, k, v), return_lse, options)


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    q: torch.Tensor = MISSING,
    k: torch.Tensor = MISSING,
    v: torch.Tensor = MISSING,
    cu_seqlens_q: torch.Tensor = MISSING,
    cu_seqlens_k: torch.Tensor | None = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cuflash.attention_varlen` of tensors, which may require grad: `attention` for packed sequences.

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
    >>> import torch
    >>> from cuflash.adapters.torch import attention_varlen
    >>> q = torch.ones(6, 2, 8, requires_grad=True)
    >>> cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    >>> attention_varlen(q, q, q, cu_seqlens, cu_seqlens, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([6, 2, 8])
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return _apply((q, k, v, cu_seqlens_q, cu_seqlens_k), return_lse, options)


show_options(attention, attention_varlen)


def _apply(inputs: Sequence[Any], return_lse: bool, options: Any) -> Any:
    return _untraced()(inputs, return_lse, options)


def _untraced() -> Callable[..., Any]:
    """Return `_run` as torch.compile calls it: between two graphs, without looking inside.

    Where nothing has loaded the compiler yet nothing is compiled, and to load it would take longer than torch itself.
    """
    global _disabled
    if _disabled is None and "torch._dynamo" in sys.modules:
        _disabled = torch.compiler.disable(_run)
    return _disabled or _run


_disabled: Callable[..., Any] | None = None


def _run(inputs: Sequence[Any], return_lse: bool, options: Any) -> Any:
    return_lse = check_bool("return_lse", return_lse)
    form, tensors = form_of(inputs, options)
    out, lse = _Attention.apply(form, *tensors)
    return (out, lse) if return_lse else out
