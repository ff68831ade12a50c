"""A real client: MyTorch (github.com/priyammaz/MyTorch) trains GPT-2 on CuPy, its attention replaced by cuflash.

    git clone https://github.com/priyammaz/MyTorch
    python -m cuflash.examples.mytorch_client MyTorch

MyTorch is an autodiff library on NumPy and CuPy arrays. Its own attention is written in Triton, which needs PyTorch.
This script compares the two on the same tensors. To train with cuflash, put ``attention_for(mytorch)`` in the place of
``mytorch.nn.functional.scaled_dot_product_attention`` before the model is called; nothing in the checkout changes. It
needs a GPU, and what MyTorch needs: triton, torch, safetensors.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

Array = Any
Tensor = Any  # mytorch.Tensor

CALLS = 20
TOKENS = 16384  # in a call


def attention_for(mytorch: Any) -> Callable[..., Tensor]:
    """`cuflash.attention` as MyTorch's ``scaled_dot_product_attention``, on (batch, heads, seqlen, dim) tensors."""

    def scaled_dot_product_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        inputs = (q, k, v)
        arrays = (array_of(x).swapaxes(1, 2) for x in inputs)
        bias = None if attn_mask is None else array_of(attn_mask)
        out, backward = cuflash.attention_vjp(*arrays, causal=is_causal, bias=bias, softmax_scale=softmax_scale)

        def accumulate(dout: Array) -> None:
            gradients = backward(array_of(dout).swapaxes(1, 2), grads=("q", "k", "v"))
            for x, gradient in zip(inputs, gradients, strict=False):
                gradient = gradient.swapaxes(1, 2)
                x.grad = gradient if x.grad is None else x.grad + gradient

        differentiable = any(x.requires_grad for x in inputs) and mytorch.Tensor.build_graph_enabled()
        result = mytorch.Tensor(
            out.swapaxes(1, 2),
            requires_grad=differentiable,
            grad_fn=accumulate if differentiable else None,
            grad_fn_name="<CuflashBackward>" if differentiable else None,
            dtype=q.dtype,
        )
        if differentiable:
            result._add_parents(*inputs)
        return result

    return scaled_dot_product_attention


def array_of(x: Any) -> Array:
    """The CuPy or NumPy array inside MyTorch's tensors and arrays."""
    x = getattr(x, "data", x) if hasattr(x, "grad_fn") else x
    return getattr(x, "_array", x)


def compare(checkout: Path, seqlens: list[int]) -> None:
    """Agreement and time of the two on the same tensors."""
    import cupy

    mytorch = load(checkout)
    functions = {"own": mytorch.nn.functional.scaled_dot_product_attention, "cuflash": attention_for(mytorch)}
    print("attention alone, causal, float16, 12 heads of 64: ms forward and backward, and relative difference")
    for seqlen in seqlens:
        batch = max(1, TOKENS // seqlen)
        rng = np.random.default_rng(0)
        arrays = [cupy.asarray(rng.standard_normal((batch, 12, seqlen, 64)).astype(np.float16)) for _ in range(4)]
        times, results = {}, {}
        for name, function in functions.items():
            results[name] = forward_and_backward(mytorch, function, *arrays)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for _ in range(CALLS):
                forward_and_backward(mytorch, function, *arrays)
            end.record()
            end.synchronize()
            times[name] = cupy.cuda.get_elapsed_time(start, end) / CALLS
        differences = [
            float(cupy.linalg.norm((a - b).astype(np.float32)) / cupy.linalg.norm(b.astype(np.float32)))
            for a, b in zip(*results.values(), strict=True)
        ]
        words = " ".join(f"{x:.1e}" for x in differences)
        print(f"  {batch} x {seqlen}: own {times['own']:.2f}, cuflash {times['cuflash']:.2f}; out, dq, dk, dv: {words}")


def forward_and_backward(mytorch: Any, function: Callable[..., Tensor], *arrays: Array) -> list[Array]:
    """The result and the gradients of q, k and v, for q, k, v and the result's gradient."""
    *inputs, dout = arrays
    tensors = [mytorch.Tensor(x, requires_grad=True) for x in inputs]
    out = function(*tensors, is_causal=True)
    out.grad_fn(dout)
    return [array_of(out), *(array_of(x.grad) for x in tensors)]


def load(checkout: Path) -> Any:
    """The package mytorch of the checkout."""
    sys.path.insert(0, str(checkout))
    return importlib.import_module("mytorch")


def main() -> int:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of MyTorch")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], help="lengths (default 1024 4096)")
    args = parser.parse_args()
    if not (args.checkout / "mytorch").is_dir():
        print(f"{args.checkout}: expected a checkout of MyTorch", file=sys.stderr)
        return 2
    compare(args.checkout, args.contexts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
