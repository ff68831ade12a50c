"""``python -m cuflash demo``: trains the example ``char_gpt.py``."""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash.examples.char_gpt import CharGPT, Config, Corpus, train
from cuflash.examples.tape import Backward
from cuflash.tools.arguments import picture, positive
from cuflash.tools.bench import namespace

Array = Any

CPU_CONFIG = Config()
GPU_CONFIG = Config(
    width=256, num_layers=4, num_heads=4, context=256, batch=32, shards=1, steps=250, attention_dtype="bfloat16"
)
MAX_TRAINING_SECONDS = 125
REQUIRED_GAIN = 0.40  # validation loss below the unigram entropy
VALIDATIONS = 5
COMPARED_SEQLEN = 2048
PROMPT = "The "
SAMPLE_LENGTH = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), help="default: the GPU if there is one")
    add("--dtype", choices=("float32", "bfloat16"), help="of attention (default: float32, on a GPU bfloat16)")
    add("--steps", type=positive, help=f"training steps (default {CPU_CONFIG.steps}, on a GPU {GPU_CONFIG.steps})")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (default %(default)s)")
    add(
        "--out",
        type=picture,
        default=Path("cuflash_demo.png"),
        help="picture of the loss, as PNG, SVG or PDF (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Train and report; 1 if the validation loss missed its mark, 2 if something is missing."""
    try:
        import matplotlib  # noqa: F401  # fail now, not after the training
        import tqdm  # noqa: F401
        from threadpoolctl import threadpool_limits

        xp = _array_module(args.device)
        config = replace(CPU_CONFIG if xp is np else GPU_CONFIG, seed=args.seed)
        if args.steps is not None:
            config = replace(config, steps=args.steps)
        if args.dtype is not None:
            config = replace(config, attention_dtype=args.dtype)
        if config.attention_dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  # makes the type known by its name
    except _UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
        print(f'{error}; install it with: pip install "cuflash[demo]"', file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Each shard of a batch has a thread; BLAS's own would take its core.
    with threadpool_limits(1, user_api="blas"):
        return _demonstrate(config, xp, args.out)


def _demonstrate(config: Config, xp: Any, picture: Path) -> int:
    corpus = Corpus()
    model = CharGPT(config, len(corpus.characters), xp)
    unigram_loss = corpus.unigram_loss()
    size = sum(x.size for x in model.parameters.values())
    print(
        f"a character GPT of {size:,} parameters, attention in {config.attention_dtype}, on {_device_name(xp)}\n"
        f"text: Python's help, {len(corpus.train):,} characters to train on, {len(corpus.validation):,} held out; "
        f"unigram entropy {unigram_loss:.3f} nats; training takes {MAX_TRAINING_SECONDS} s at most"
    )
    history = _train_with_progress(model, corpus)
    gain = 1 - history.validation[-1] / unigram_loss
    reached = gain >= REQUIRED_GAIN
    print(
        f"\nvalidation loss {history.validation[-1]:.3f} nats a character, {gain:.0%} below the unigram entropy of "
        f"{unigram_loss:.3f}: {'at' if reached else 'NOT at'} least {REQUIRED_GAIN:.0%} below it"
    )
    sample = corpus.decode(model.sample(corpus.encode(PROMPT), SAMPLE_LENGTH))
    print(f"\na sample of {SAMPLE_LENGTH} characters:\n{sample}\n")
    _compare_with_naive(model, corpus)
    _draw(history, unigram_loss, picture)
    print(f"\npicture of the loss: {picture}")
    return 0 if reached else 1


class _UnavailableError(Exception):
    """An error that the user can mend."""


def _array_module(device: str | None) -> ModuleType:
    """`namespace`, able to multiply matrices."""
    cupy = namespace(device)
    if cupy is None:
        raise _UnavailableError("no GPU that CuPy can use: see python -m cuflash info")
    if cupy is np:
        return np
    try:
        cupy.ones((2, 2)) @ cupy.ones((2, 2))
    except Exception as error:  # whatever CuPy raises where a library cannot be loaded
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise _UnavailableError(
            f"CuPy cannot multiply matrices here ({error}).\nThe demo's layers need cuBLAS, which attention alone does "
            f'not: pip install "cuflash[cuda{major}-full]", or run it with --device cpu'
        ) from error
    return cupy


def _device_name(xp: Any) -> str:
    if xp is np:
        return "the CPU (NumPy)"
    properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())
    return f"{properties['name'].decode()} (CuPy)"


@dataclass
class _History:
    """Losses in nats a character."""

    training: list[Array] = field(default_factory=list)
    validated_steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)


def _train_with_progress(model: CharGPT, corpus: Corpus) -> _History:
    from tqdm import tqdm

    config = model.config
    tokens_per_step = config.batch * config.context
    history = _History()
    validating = 0.0  # seconds

    def validate() -> None:
        nonlocal validating
        start = time.perf_counter()
        history.validated_steps.append(len(history.training))
        history.validation.append(model.validate(corpus.validation))
        bar.write(f"step {len(history.training):5}: validation loss {history.validation[-1]:.3f}", file=sys.stdout)
        validating += time.perf_counter() - start

    bar = tqdm(total=config.steps * tokens_per_step, unit=" tokens", unit_scale=True, mininterval=0.5)
    start = time.perf_counter()
    with bar:
        for loss in train(model, corpus.train, MAX_TRAINING_SECONDS):
            history.training.append(loss)
            bar.update(tokens_per_step)
            if len(history.training) % 20 == 0:  # seldom: reading the loss makes the host wait for the GPU
                bar.set_postfix(loss=f"{float(loss):.3f}")
            if len(history.training) % max(1, config.steps // VALIDATIONS) == 0:
                validate()
        if len(history.training) not in history.validated_steps:
            validate()
        seconds = time.perf_counter() - start - validating
    tokens = len(history.training) * tokens_per_step
    print(f"{len(history.training)} steps, {tokens:,} tokens in {seconds:.0f} s: {tokens / seconds:,.0f} tokens/s")
    return history


def _compare_with_naive(model: CharGPT, corpus: Corpus) -> None:
    indices = model.xp.asarray(corpus.validation[None, :COMPARED_SEQLEN])
    w = model.parameters
    q, k, v = model.heads(w, 0, model.embed(w, indices), indices.shape)
    print(f"one batch {q.shape} of the first layer in {q.dtype}, forward and backward, error against float64:")
    print(f"{'':10}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}{'peak memory':>16}")
    for name, (errors, peak) in compare(q, k, v).items():
        print(f"{name:10}" + "".join(f"{error:10.1e}" for error in errors) + f"{peak / 2**20:12.1f} MiB")


def naive_attention_vjp(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
    """Causal attention of (batch, seqlen, heads, dim) arrays with whole matrices."""
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    position = np.arange(q.shape[2], like=q)
    scores = np.where(position[:, None] >= position, scale * (q @ k.swapaxes(2, 3)), -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    weights /= np.sum(weights, axis=-1, keepdims=True)
    out = weights @ v

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dout = dout.swapaxes(1, 2)
        dweights = dout @ v.swapaxes(2, 3)
        dscores = scale * weights * (dweights - np.sum(dout * out, axis=-1, keepdims=True))
        dq, dk, dv = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout
        return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)

    return out.swapaxes(1, 2), backward


def compare(q: Array, k: Array, v: Array) -> dict[str, tuple[list[float], int]]:
    """Greatest errors of out, dq, dk and dv (of out as dout) against float64, and the peak of memory in bytes."""
    out, backward = naive_attention_vjp(*(x.astype("float64") for x in (q, k, v)))
    dout = out.astype(q.dtype)
    exact = (out, *backward(dout.astype("float64")))
    del out, backward

    def forward_and_backward(vjp: Callable[..., tuple[Array, Backward]]) -> tuple[Array, ...]:
        out, backward = vjp(q, k, v)
        return (out, *backward(dout))

    ours: Callable[..., tuple[Array, Backward]] = partial(cuflash.attention_vjp, causal=True)
    report = {}
    for name, vjp in (("naive", naive_attention_vjp), ("cuflash", ours)):
        results, peak = peak_memory(partial(forward_and_backward, vjp), on_gpu=not isinstance(q, np.ndarray))
        errors = [float(np.max(abs(x.astype("float64") - y))) for x, y in zip(results, exact, strict=True)]
        report[name] = errors, peak
    return report


def peak_memory(function: Callable[[], Any], on_gpu: bool) -> tuple[Any, int]:
    """The result, and the most bytes allocated at once."""
    if on_gpu:
        import cupy

        pool = cupy.cuda.MemoryPool()  # a fresh pool's size is its high-water mark
        with cupy.cuda.using_allocator(pool.malloc):
            return function(), pool.total_bytes()
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _draw(history: _History, unigram_loss: float, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="training step", ylabel="loss (nats a character)", title="cuflash demo")
    axes.plot(range(1, len(history.training) + 1), [float(x) for x in history.training], lw=0.6, label="training")
    axes.plot(history.validated_steps, history.validation, "o-", label="validation")
    axes.axhline(unigram_loss, color="grey", ls="--", label="unigram entropy")
    axes.axhline(unigram_loss * (1 - REQUIRED_GAIN), color="grey", ls=":", label=f"{REQUIRED_GAIN:.0%} below it")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
