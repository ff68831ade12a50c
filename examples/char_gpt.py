"""A small character GPT on NumPy or CuPy arrays: the autodiff is ``tape.py``, the attention cuflash's.

Rotary positions, RMS norm, squared ReLU and Muon: so a minute of training on two cores gives recognisable text.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

from .generate import cache_for, generate
from .tape import (
    Array,
    Backward,
    Tape,
    add,
    cast,
    cross_entropy,
    embedding,
    linear,
    primitive,
    relu_squared,
    reshape,
    rms_norm,
)

Parameters = Mapping[str, Any]  # arrays when inferring, variables when training

PAGE_SIZE = 16  # positions of a page of the sample's cache

attention = primitive(cuflash.attention_vjp)


@dataclass(frozen=True)
class Config:
    """The defaults suit two CPU cores."""

    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    context: int = 128
    batch: int = 8
    shards: int = 2  # equal parts of a batch, each differentiated on a thread and a tape of its own
    steps: int = 1000
    attention_dtype: str = "float32"  # all else is float32
    seed: int = 0


class Corpus:
    """Python's help, each paragraph once, as character numbers; the last tenth is held out for validation."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        self.text = "\n\n".join(dict.fromkeys(paragraphs))
        self.characters = sorted(set(self.text))
        self._number = {character: i for i, character in enumerate(self.characters)}
        numbers = self.encode(self.text)
        self.train, self.validation = np.split(numbers, [len(numbers) * 9 // 10])

    def encode(self, text: str) -> Array:
        """Character numbers of `text`, int32."""
        return np.array([self._number[character] for character in text], dtype=np.int32)

    def decode(self, numbers: Array) -> str:
        """The text of character numbers."""
        return "".join(self.characters[i] for i in numbers)

    def unigram_loss(self) -> float:
        """Entropy in nats of the held-out characters: the least loss without the context."""
        counts = np.bincount(self.validation)
        p = counts[counts > 0] / len(self.validation)
        return float(-np.sum(p * np.log(p)))


@primitive
def rotate(x: Array, cos: Array, sin: Array) -> tuple[Array, Backward]:
    """Rotary position embedding (Su et al., RoFormer, 2021) of ``x`` (batch, seqlen, heads, dim).

    Components i and i + dim/2 are a plane, turned by angles of these ``cos`` and ``sin`` (seqlen, 1, dim/2).
    """
    half = x.shape[-1] // 2

    def turn(x: Array, sin: Array) -> Array:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

    return turn(x, sin), lambda dout: (turn(dout, -sin), None, None)


class CharGPT:
    """The model, on arrays of `xp`."""

    def __init__(self, config: Config, vocabulary: int, xp: Any) -> None:
        self.config = config
        self.xp = xp
        rng = np.random.default_rng(config.seed)
        d = config.width
        arrays = {"characters": rng.normal(0, 0.02, (vocabulary, d))}
        for layer in range(config.num_layers):
            for name, shape in {"query": (d, d), "key": (d, d), "value": (d, d), "expand": (4 * d, d)}.items():
                arrays[f"{name}{layer}"] = rng.normal(0, d**-0.5, shape)
            arrays[f"merge{layer}"] = np.zeros((d, d))
            arrays[f"contract{layer}"] = np.zeros((d, 4 * d))
        self.parameters = {name: xp.asarray(array, dtype=xp.float32) for name, array in arrays.items()}

    def __call__(self, parameters: Parameters, indices: Array) -> Any:
        """Logits (batch, seqlen, vocabulary) of the character after each of `indices` (batch, seqlen)."""
        w = parameters
        x = self.embed(w, indices)
        for layer in range(self.config.num_layers):
            q, k, v = (cast(x, self.config.attention_dtype) for x in self.heads(w, layer, x, indices.shape))
            heads = cast(attention(q, k, v, causal=True, deterministic=True), self.dtype)
            x = self.behind_attention(w, layer, x, heads, indices.shape)
        return linear(rms_norm(x), w["characters"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of everything but attention."""
        dtype: np.dtype[Any] = self.parameters["characters"].dtype
        return dtype

    def embed(self, w: Parameters, indices: Array) -> Any:
        """The first layer's input (batch, seqlen, width)."""
        return rms_norm(embedding(indices, w["characters"]))

    def behind_attention(self, w: Parameters, layer: int, x: Any, heads: Any, shape: tuple[int, ...]) -> Any:
        """A layer's result, out of its input and the result of its attention."""
        x = add(x, linear(reshape(heads, (*shape, self.config.width)), w[f"merge{layer}"]))
        hidden = relu_squared(linear(rms_norm(x), w[f"expand{layer}"]))
        return add(x, linear(hidden, w[f"contract{layer}"]))

    def projections(self, w: Parameters, layer: int, x: Any, shape: tuple[int, ...]) -> list[Any]:
        """Query, key and value (*shape, num_heads, head_dim) of a layer with input `x`, not yet rotated."""
        num_heads = self.config.num_heads
        dim = self.config.width // num_heads
        x = rms_norm(x)
        return [reshape(linear(x, w[f"{name}{layer}"]), (*shape, num_heads, dim)) for name in ("query", "key", "value")]

    def rotary(self, num_positions: int) -> tuple[Array, Array]:
        """cos and sin (num_positions, head_dim / 2) of the angles by which queries and keys are rotated."""
        dim = self.config.width // self.config.num_heads
        angles = np.arange(num_positions)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
        return self.xp.asarray(np.cos(angles), dtype=self.dtype), self.xp.asarray(np.sin(angles), dtype=self.dtype)

    def heads(self, w: Parameters, layer: int, x: Any, shape: tuple[int, ...]) -> list[Any]:
        """Query, key and value (batch, seqlen, num_heads, head_dim) of a layer with input `x`."""
        q, k, v = self.projections(w, layer, x, shape)
        cos, sin = (table[:, None] for table in self.rotary(shape[1]))
        return [rotate(q, cos, sin), rotate(k, cos, sin), v]

    def loss(self, parameters: Parameters, windows: Array) -> Any:
        """Mean loss in nats of the characters of `windows` (batch, seqlen + 1) but the first."""
        return cross_entropy(self(parameters, windows[:, :-1]), windows[:, 1:])

    def validate(self, characters: Array) -> float:
        """Mean loss over `characters`, in windows of the context's length."""
        context, batch = self.config.context, self.config.batch
        count = (len(characters) - 1) // context
        starts = np.arange(count)[:, None] * context
        windows = self.xp.asarray(characters[starts + np.arange(context + 1)])
        parts = [windows[i : i + batch] for i in range(0, count, batch)]
        return sum(float(self.loss(self.parameters, part)) * len(part) for part in parts) / count

    def sample(self, prompt: Array, length: int, temperature: float = 0.8) -> Array:
        """`prompt` and `length` characters that continue it, drawn one by one from a paged cache."""
        decoder = Decoder(self, len(prompt) + length)
        cache = cache_for(decoder, num_pages=-(-(len(prompt) + length) // PAGE_SIZE) + 1, page_size=PAGE_SIZE)
        texts = generate(decoder, cache, [list(prompt)], [length], temperature=temperature, seed=self.config.seed)
        drawn = [token for _, token in texts]
        return np.array([*prompt, *drawn])


class Decoder:
    """The model as ``generate.py`` wants it: its layers' attention is given from outside, with a cache behind it."""

    def __init__(self, model: CharGPT, num_positions: int) -> None:
        config = self.config = model.config
        self.model, self.xp = model, model.xp
        self.num_layers, self.num_heads = config.num_layers, config.num_heads
        self.head_dim = config.width // config.num_heads
        self.attention_dtype = config.attention_dtype
        self.rotary = model.rotary(num_positions)

    def logits(self, tokens: Array, positions: Array, wanted: Array, attend: Callable[..., Array]) -> Array:
        """Logits of the character after the wanted ones of `tokens` (total,), which see as many as in training."""
        model, w = self.model, self.model.parameters
        x = model.embed(w, tokens)
        for layer in range(self.num_layers):
            qkv = model.projections(w, layer, x, tokens.shape)
            q, k, v = (part.astype(self.attention_dtype) for part in qkv)
            heads = attend(layer, q, k, v, rotary=self.rotary, window=(self.config.context - 1, 0))
            x = model.behind_attention(w, layer, x, heads.astype(model.dtype), tokens.shape)
        return linear(rms_norm(x[wanted]), w["characters"])


class Optimizer:
    """Muon (Jordan et al., 2024) for the matrices and Adam (Kingma and Ba, 2015) for the embedding."""

    MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.04, 0.95, 0.25
    ADAM_RATE, ADAM_BETAS, ADAM_EPSILON = 0.01, (0.9, 0.98), 1e-8

    def __init__(self, parameters: dict[str, Array]) -> None:
        self.parameters = parameters
        self.first = {name: np.zeros_like(x) for name, x in parameters.items()}
        self.second = {"characters": np.zeros_like(parameters["characters"])}
        self.step = 0

    def update(self, gradients: dict[str, Array], factor: float) -> None:
        """Move all parameters in place; `factor` scales the learning rates."""
        self.step += 1
        for name, gradient in gradients.items():
            change = self._adam if name in self.second else self._muon
            self.parameters[name] -= factor * change(name, gradient)

    def _muon(self, name: str, gradient: Array) -> Array:
        momentum = self.first[name]
        momentum *= self.MUON_MOMENTUM
        momentum += gradient
        rows, columns = gradient.shape
        scale = max(1.0, rows / columns) ** 0.5
        change = scale * orthogonalised(gradient + self.MUON_MOMENTUM * momentum)
        return self.MUON_RATE * (change + self.MUON_DECAY * self.parameters[name])

    def _adam(self, name: str, gradient: Array) -> Array:
        first, second = self.first[name], self.second[name]
        beta1, beta2 = self.ADAM_BETAS
        first += (1 - beta1) * (gradient - first)
        second += (1 - beta2) * (gradient * gradient - second)
        mean, square = first / (1 - beta1**self.step), second / (1 - beta2**self.step)
        return self.ADAM_RATE * mean / (np.sqrt(square) + self.ADAM_EPSILON)


def orthogonalised(x: Array) -> Array:
    """Roughly U V^T of x = U S V^T, by Muon's quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315  # chosen there to lift small singular values fast
    wide = x if x.shape[0] <= x.shape[1] else x.T
    y = wide / (np.linalg.norm(wide) + 1e-7)
    for _ in range(5):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return y if wide is x else y.T


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up, then a cosine; `progress` is in 0..1."""
    warm_up, final = 0.05, 0.05
    return min(1.0, progress / warm_up) * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def train(model: CharGPT, characters: Array, max_seconds: float = float("inf")) -> Iterator[Array]:
    """Train until the configured steps or `max_seconds` end it; yields each step's loss, on the model's device."""
    config, xp = model.config, model.xp
    rng = np.random.default_rng(config.seed)
    optimizer = Optimizer(model.parameters)

    def loss_and_gradients(windows: Array) -> tuple[Array, ...]:
        tape = Tape()
        variables = {name: tape.variable(x) for name, x in model.parameters.items()}
        loss = model.loss(variables, windows)
        return (loss.value, *tape.gradient(loss, list(variables.values())))

    start, progress = time.monotonic(), 0.0
    with ThreadPoolExecutor(config.shards) as pool:
        while progress < 1:
            starts = rng.integers(0, len(characters) - config.context, (config.batch, 1))
            windows = xp.asarray(characters[starts + np.arange(config.context + 1)])
            of_shards = pool.map(loss_and_gradients, xp.split(windows, config.shards))
            loss, *gradients = (sum(parts) / config.shards for parts in zip(*of_shards, strict=True))
            progress = max((optimizer.step + 1) / config.steps, (time.monotonic() - start) / max_seconds)
            named = dict(zip(model.parameters, gradients, strict=True))
            optimizer.update(named, learning_rate_factor(min(progress, 1)))
            yield loss
