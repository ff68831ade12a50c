"""Tests of the demo: its autodiff, its model, and the command from end to end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.examples import char_gpt, tape
from cuflash.examples.char_gpt import CharGPT, Config, Corpus

Array = Any
TINY = Config(width=16, num_layers=2, num_heads=2, context=12, batch=4, steps=3, attention_dtype="float64")
RNG = np.random.default_rng(0)
ANGLES = RNG.normal(size=(3, 1, 2))
INDICES = np.array([[0, 2, 1], [2, 2, 3]])

# Each primitive as a function of the float arrays that follow it.
PRIMITIVES: dict[str, tuple[Any, ...]] = {
    "add": (tape.add, RNG.normal(size=(2, 3)), RNG.normal(size=(2, 3))),
    "reshape": (lambda x: tape.reshape(x, (3, 2)), RNG.normal(size=(2, 3))),
    "linear": (tape.linear, RNG.normal(size=(2, 3, 4)), RNG.normal(size=(5, 4))),
    "embedding": (lambda table: tape.embedding(INDICES, table), RNG.normal(size=(5, 4))),
    "rms_norm": (tape.rms_norm, RNG.normal(size=(3, 5))),
    "relu_squared": (tape.relu_squared, RNG.normal(size=(3, 5))),
    "cast": (lambda x: tape.cast(x, "float64"), RNG.normal(size=(2, 3))),
    "cross_entropy": (lambda x: tape.cross_entropy(x, INDICES), RNG.normal(size=(2, 3, 4))),
    "rotate": (lambda x: char_gpt.rotate(x, np.cos(ANGLES), np.sin(ANGLES)), RNG.normal(size=(2, 3, 2, 4))),
    "attention": (lambda *qkv: char_gpt.attention(*qkv, causal=True), *RNG.normal(size=(3, 1, 4, 2, 3))),
}


def assert_gradients(function: Callable[..., Any], arrays: list[Array]) -> None:
    """Compare the tape's gradients of a random weighting of the result with central differences."""
    weights = np.random.default_rng(1).normal(size=np.shape(function(*arrays)))

    @tape.primitive
    def weighted_sum(x: Array) -> Any:
        return np.sum(x * weights), lambda dout: (dout * weights,)

    record = tape.Tape()
    variables = [record.variable(x) for x in arrays]
    gradients = record.gradient(weighted_sum(function(*variables)), variables)
    step = 1e-6
    for position, (x, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        direction = np.random.default_rng(2).normal(size=x.shape)
        above, below = (
            weighted_sum(function(*arrays[:position], x + h * direction, *arrays[position + 1 :]))
            for h in (step, -step)
        )
        difference = (above - below) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(difference, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive_by_finite_differences(name: str) -> None:
    function, *arrays = PRIMITIVES[name]
    assert_gradients(function, arrays)


def test_model_by_finite_differences() -> None:
    model = CharGPT(TINY, 7, np)
    # Parameters are float64, and none is zero: the blocks' last matrices, zero at first, would hide the other ones.
    model.parameters = {name: RNG.normal(0, 0.3, x.shape) for name, x in model.parameters.items()}
    windows = RNG.integers(0, 7, (2, 9))
    assert_gradients(
        lambda *arrays: model.loss(dict(zip(model.parameters, arrays, strict=True)), windows),
        list(model.parameters.values()),
    )


def test_tape_adds_up_all_uses_and_knows_unused_variables() -> None:
    record = tape.Tape()
    x, unused = record.variable(np.array(3.0)), record.variable(np.ones(2))
    doubled = tape.add(x, x)
    gradients = record.gradient(tape.add(doubled, x), [x, unused])
    assert gradients[0] == 3
    np.testing.assert_array_equal(gradients[1], [0, 0])


def test_plain_arrays_are_not_recorded() -> None:
    assert isinstance(tape.add(np.ones(2), np.ones(2)), np.ndarray)


def test_model_sees_no_future_character() -> None:
    model = CharGPT(TINY, 7, np)
    parameters = {name: RNG.normal(0, 0.3, x.shape) for name, x in model.parameters.items()}
    indices = RNG.integers(0, 7, (1, 10))
    changed = indices.copy()
    changed[0, 6:] = (changed[0, 6:] + 1) % 7
    before, after = model(parameters, indices), model(parameters, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(before[:, 6:] != after[:, 6:], axis=-1))


def test_no_held_out_paragraph_was_trained_on() -> None:
    corpus = Corpus()
    train, validation = (corpus.decode(part).split("\n\n") for part in (corpus.train, corpus.validation))
    assert not set(train[:-1]) & set(validation[1:])
    np.testing.assert_array_equal(corpus.encode(corpus.text), np.concatenate((corpus.train, corpus.validation)))


def test_orthogonalised_has_singular_values_near_one() -> None:
    for shape in ((8, 8), (4, 16), (16, 4)):
        singular = np.linalg.svd(char_gpt.orthogonalised(RNG.normal(size=shape)), compute_uv=False)
        assert np.all((singular > 0.3) & (singular < 1.3))


def test_training_repeats_and_ends_in_time() -> None:
    characters = RNG.integers(0, 7, 500)

    def losses(max_seconds: float = float("inf")) -> list[float]:
        return [float(x) for x in char_gpt.train(CharGPT(TINY, 7, np), characters, max_seconds)]

    first = losses()
    assert len(first) == TINY.steps
    assert first == losses()
    assert len(losses(max_seconds=1e-9)) == 1


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cuflash", "demo", "--device", "cpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_demo_reaches_its_mark(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "300", "--out", "loss.png")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("unigram entropy", "validation loss", "tokens/s", "a sample of", "naive", "peak memory"):
        assert part in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_demo_fails_where_it_misses_its_mark(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT" in done.stdout
