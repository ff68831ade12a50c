"""A real client: MyTorch (github.com/priyammaz/MyTorch) trains GPT-2 on CuPy, its attention replaced by cuflash.

    git clone https://github.com/priyammaz/MyTorch
    python examples/clients/mytorch_client.py MyTorch

MyTorch is an autodiff library on NumPy and CuPy arrays. Its own attention is written in Triton, which needs PyTorch.
This script compares the two on the same tensors, then runs MyTorch's own training script with each, on the same batches
from the same parameters: ``attention_for(mytorch)`` stands in the place of
``mytorch.nn.functional.scaled_dot_product_attention``, and nothing in the checkout changes. It needs a GPU, and what
MyTorch needs: triton, torch, safetensors, tqdm.
"""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash.tools.bench import records
from cuflash.tools.bench.report import environment

Array = Any
Tensor = Any  # mytorch.Tensor

CALLS = 20
TOKENS = 16384  # in a call
TRAINER = Path("gpt2_trainer") / "train_gpt2.py"
WARM_UP_STEPS, STEPS = 3, 12
SEED = 0
ATTENTIONS = ["own", "cuflash"]


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
            for x, of_x in zip(inputs, gradients, strict=False):
                assert of_x is not None  # it was asked for
                gradient = of_x.swapaxes(1, 2)
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


def compare(mytorch: Any, seqlens: list[int]) -> Iterator[dict[str, Any]]:
    """Agreement and time of the two on the same tensors."""
    import cupy

    print("attention alone, causal, float16, 12 heads of 64: ms forward and backward, and relative difference")
    for seqlen in seqlens:
        batch = max(1, TOKENS // seqlen)
        rng = np.random.default_rng(SEED)
        arrays = [cupy.asarray(rng.standard_normal((batch, 12, seqlen, 64)).astype(np.float16)) for _ in range(4)]
        times, results = {}, {}
        for name, function in both(mytorch).items():
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
        yield {"compared": "attention", "context": seqlen, "batch": batch, "ms": times, "differences": differences}


def both(mytorch: Any) -> dict[str, Callable[..., Tensor]]:
    """Its own attention and ours."""
    own = mytorch.nn.functional.scaled_dot_product_attention
    return dict(zip(ATTENTIONS, (own, attention_for(mytorch)), strict=True))


def forward_and_backward(mytorch: Any, function: Callable[..., Tensor], *arrays: Array) -> list[Array]:
    """The result and the gradients of q, k and v, for q, k, v and the result's gradient."""
    *inputs, dout = arrays
    tensors = [mytorch.Tensor(x, requires_grad=True) for x in inputs]
    out = function(*tensors, is_causal=True)
    out.grad_fn(dout)
    return [array_of(out), *(array_of(x.grad) for x in tensors)]


def load(checkout: Path) -> Any:
    """The package mytorch of the checkout."""
    sys.path[:0] = [str(checkout / TRAINER.parent), str(checkout)]
    return importlib.import_module("mytorch")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is `value` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def train(
    mytorch: Any, checkout: Path, names: list[str], size: str, context: int, batch: int
) -> Iterator[dict[str, Any]]:
    """MyTorch's training script with each attention, on the bytes of Python's help: time of a step, and the losses."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n\n".join(topics.values()).encode(), np.uint8).astype(np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train.bin", "val.bin"):
            text.tofile(Path(folder) / name)
        arguments = ["--path_to_data", folder, "--working_directory", folder, "--fused", "--mixed_precision"]
        arguments += ["--model_size", size, "--context_length", str(context), "--batch_size_per_gpu", str(batch)]
        arguments += ["--gradient_accumulation_steps", "1", "--train_iterations", str(WARM_UP_STEPS + STEPS)]
        arguments += ["--warmup_steps", "10", "--log_iter", "1", "--num_workers", "0"]
        attentions = both(mytorch)
        for name in names:
            with replaced(mytorch.nn.functional, "scaled_dot_product_attention", attentions[name]):
                milliseconds, losses = run_script(mytorch, checkout / TRAINER, arguments)
            tokens = 1e3 * batch * context / milliseconds
            words = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"  {name:8} {milliseconds:7.1f} ms a step, {tokens:9,.0f} tokens/s, losses {words}", flush=True)
            figures = {"ms_a_step": milliseconds, "tokens_per_second": tokens, "losses": losses}
            yield {"compared": "training", "attention": name, **figures}


def run_script(mytorch: Any, script: Path, arguments: list[str]) -> tuple[float, list[float]]:
    """Run it in this process: the median of the times between its optimizer's steps, and the losses that it printed."""
    import cupy

    events: list[Any] = []
    step = mytorch.optim.AdamW.step

    def timed_step(self: Any) -> None:
        step(self)
        events.append(cupy.cuda.get_current_stream().record())

    np.random.seed(SEED)  # noqa: NPY002 (the script draws its batches and parameters from the global generators)
    cupy.random.seed(SEED)
    printed = StringIO()
    with replaced(mytorch.optim.AdamW, "step", timed_step), replaced(sys, "argv", [str(script), *arguments]):
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            print(printed.getvalue(), file=sys.stderr)
            raise
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    between = zip(events[WARM_UP_STEPS:-1], events[WARM_UP_STEPS + 1 :], strict=True)
    spans = [cupy.cuda.get_elapsed_time(a, b) for a, b in between]
    return float(np.median(spans)), [float(x) for x in re.findall(r"Loss: *([\d.]+)", printed.getvalue())]


def main() -> int:
    """Compare, then train with each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of MyTorch")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096], help="lengths (default 1024 4096)")
    parser.add_argument("--train", choices=ATTENTIONS, nargs="*", default=ATTENTIONS, help="with these (default both)")
    parser.add_argument("--size", default="base", help="of the model that is trained (default base: GPT-2's 124M)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 in a training step (default 8)")
    parser.add_argument("--json", type=Path, help="file for the figures, one line each comparison")
    parser.add_argument("--commit", help="of cuflash, where the checkout does not tell")
    args = parser.parse_args()
    if not (args.checkout / TRAINER).is_file():
        print(f"{args.checkout}: expected a checkout of MyTorch, with {TRAINER}", file=sys.stderr)
        return 2
    try:
        mytorch = load(args.checkout)
    except ImportError as error:
        print(f"error: {error}: MyTorch needs cupy, triton, torch, safetensors and tqdm", file=sys.stderr)
        return 2
    facts = environment(importlib.import_module("cupy"), args.commit, "mytorch_client")
    facts |= {"size": args.size, "batch": args.batch}
    cells: list[dict[str, Any]] = []

    def keep(cell: dict[str, Any]) -> None:  # as they come: a run that is cut short leaves what it had
        cells.append(cell)
        if args.json:
            records.write(args.json, facts, cells)

    for cell in compare(mytorch, args.contexts):
        keep(cell)
    print(f"MyTorch's training script, {args.size}, {args.batch} x 1024 tokens a step, --fused --mixed_precision")
    for cell in train(mytorch, args.checkout, args.train, args.size, 1024, args.batch):
        keep(cell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
