"""Texts that are generated from a paged cache are those of the whole context computed anew for each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.examples import char_gpt
from cuflash.examples.generate import cache_for, generate, main
from cuflash.examples.gpt2 import training
from cuflash.examples.gpt2.generating import Decoder
from cuflash.examples.gpt2.model import ATTENTIONS, GPT2, Config
from cuflash.examples.gpt2.ops import NumpyOps

Array = Any
SIZE = Config(width=32, num_layers=2, num_heads=2, context=64, vocabulary=40)
PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10, 11]]
LENGTHS = [7, 3, 12, 1]


@pytest.fixture(scope="module")
def model() -> GPT2:
    found = GPT2(SIZE, NumpyOps(), ATTENTIONS["cuflash"], seed=0)
    rng = np.random.default_rng(0)
    found.weights[:] += 0.2 * rng.normal(size=found.weights.shape).astype(np.float32)
    return found


def continued(model: GPT2, prompt: list[int], length: int) -> list[int]:
    """Return the likeliest tokens, each by the whole text before it."""
    tokens = list(prompt)
    for _ in range(length):
        logits, *_ = model._forward(np.array([tokens], np.int32))
        tokens.append(int(np.argmax(logits[-1])))
    return tokens[len(prompt) :]


def generated(model: GPT2, num_pages: int = 100, **options: Any) -> list[list[int]]:
    decoder = Decoder(model, SIZE.vocabulary)
    cache = cache_for(decoder, num_pages, page_size=4)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for index, token in generate(decoder, cache, PROMPTS, LENGTHS, **options):
        texts[index].append(token)
    assert cache.num_free_pages == num_pages
    return texts


@pytest.mark.parametrize("prefix", [[], [12], [12, 13, 14, 15, 16, 17]])
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_the_likeliest_tokens(model: GPT2, prefix: list[int], at_once: int) -> None:
    """The tokens are the same whichever texts are computed together, and whatever they share."""
    expected = [continued(model, prefix + p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert generated(model, prefix=prefix, at_once=at_once, temperature=0) == expected


def test_texts_wait_where_no_page_is_left(model: GPT2) -> None:
    expected = [continued(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert generated(model, num_pages=5, at_once=4, temperature=0) == expected
    with pytest.raises(ValueError, match="max_pages_per_sequence"):
        generated(model, num_pages=2)
    with pytest.raises(MemoryError, match="2 pages are wanted for this step, 1 are free"):
        generated(model, num_pages=3, prefix=[12, 13, 14, 15, 16, 17], at_once=1)


def test_draws_depend_on_the_seed_alone(model: GPT2) -> None:
    one = generated(model, temperature=1.0, seed=3)
    assert one == generated(model, temperature=1.0, seed=3, at_once=1)
    assert one != generated(model, temperature=1.0, seed=4)


def test_a_text_without_a_token(model: GPT2) -> None:
    decoder = Decoder(model, SIZE.vocabulary)
    with pytest.raises(ValueError, match="a token at least"):
        list(generate(decoder, cache_for(decoder, 4), [[]], [3]))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes text from a checkpoint that a training run has left."""
    run = ["--size", "tiny", "--context", "64", "--batch", "2", "--steps", "2", "--device", "cpu"]
    assert training.main([*run, "--out", str(tmp_path)]) == 0
    prompts = ["--prompt", "The with", "--prompt", "A", "--prefix", "Help: ", "--length", "5", "9"]
    assert main([str(tmp_path), *prompts, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "--- Help: The with" in printed.out and "--- Help: A" in printed.out
    assert "14 tokens of 2 texts" in printed.out and "tokens/s" in printed.out
    assert "14/14" in printed.err  # the bar
    for wrong, message in (
        ([str(tmp_path), "--length", "64", "--prompt", "x"], "expected at most the model's 64 tokens in all, got 65"),
        ([str(tmp_path), "--length", "1", "2"], "one for each prompt"),
        ([str(tmp_path / "none")], "checkpoint"),
        ([str(tmp_path), "--prompt", "abc", "--pages", "1", "--page-size", "2"], "expected at most"),
    ):
        assert main([*wrong, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


def test_characters() -> None:
    """The demo's sample is that of the model as it is trained, over a window of its context."""
    config = char_gpt.Config(width=16, num_layers=2, num_heads=2, context=12, attention_dtype="float32")
    model = char_gpt.CharGPT(config, 7, np)
    rng = np.random.default_rng(0)
    model.parameters = {name: rng.normal(0, 0.4, x.shape).astype(np.float32) for name, x in model.parameters.items()}
    prompt = np.array([1, 2, 3])
    text = model.sample(prompt, 9, temperature=0)
    assert len(text) == 12 and (text[:3] == prompt).all()
    for end in range(3, 12):  # as long as nothing has left the window
        assert text[end] == np.argmax(model(model.parameters, text[None, :end])[0, -1])
    assert len(model.sample(prompt, 40)) == 43
