"""cuflash inside PyTorch's autograd: ``attention(q, k, v, ...)`` for tensors that require grad.

On the CPU or on a GPU, zero-copy, on torch's current stream. First derivatives only: differentiating twice raises an
error.
"""

from __future__ import annotations

from typing import Any

import torch

import cuflash

_DIFFERENTIABLE_EXTRAS = ("bias", "sink", "alibi_slopes")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, ...], options: dict[str, Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = cuflash.attention(**dict(zip(names, tensors, strict=True)), return_lse=True, **options)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.names, ctx.options = names, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needed]
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        gradients = _Gradients.apply(ctx.names, ctx.options, wanted, dout, dlse, out, lse, *tensors)
        return None, None, *gradients


class _Gradients(torch.autograd.Function):
    """A function of its own, so that torch records it where a second derivative may follow, and the error comes.

    The decorator once_differentiable would not do: where dout is a constant it drops the second derivative silently.
    """

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        wanted: list[str],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        inputs = dict(zip(names, tensors, strict=True))
        return cuflash.attention_backward(dout, forward_out=out, lse=lse, dlse=dlse, grads=wanted, **inputs, **options)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("attention has no second derivative: its gradient cannot be differentiated")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cuflash.attention` with gradients for q, k, v, bias, sink and alibi_slopes, through out and through lse."""
    extras = {name: options.pop(name) for name in _DIFFERENTIABLE_EXTRAS if options.get(name) is not None}
    out, lse = _Attention.apply(("q", "k", "v", *extras), options, q, k, v, *extras.values())
    return (out, lse) if return_lse else out


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.autograd.gradcheck(lambda *qkv: attention(*qkv, causal=True, return_lse=True), (q, k, v))
    print("gradcheck passed")
