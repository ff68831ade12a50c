"""Keywords of other libraries: the error says what cuflash calls them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, distributed, hints
from cuflash.problem.options import OPTION_NAMES

X = np.zeros((1, 3, 2, 8), np.float32)
LSE = np.zeros((1, 2, 3), np.float32)
ROWS = np.zeros((3, 2, 8), np.float32)
CU_SEQLENS = np.array([0, 3], np.int32)
W_OUT = np.zeros((2, 8, 5), np.float32)
LENGTHS = np.array([0], np.int32)
(COMM,) = distributed.threads(1)
# Every function that takes the options of attention, on arguments that it accepts.
OF_OPTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda **x: cuflash.attention(X, X, X, **x),
    "attention_backward": lambda **x: cuflash.attention_backward(X, X, X, X, X, LSE, **x),
    "attention_vjp": lambda **x: cuflash.attention_vjp(X, X, X, **x),
    "attention_varlen": lambda **x: cuflash.attention_varlen(ROWS, ROWS, ROWS, CU_SEQLENS, CU_SEQLENS, **x),
    "attention_varlen_backward": lambda **x: cuflash.attention_varlen_backward(
        ROWS, ROWS, ROWS, ROWS, ROWS, LSE[0], CU_SEQLENS, CU_SEQLENS, **x
    ),
    "attention_varlen_vjp": lambda **x: cuflash.attention_varlen_vjp(ROWS, ROWS, ROWS, CU_SEQLENS, CU_SEQLENS, **x),
    "Step.attend": lambda **x: step().attend(0, X, **x),
    "offload.attention": lambda **x: cuflash.offload.attention(X, X, X, **x),
    "offload.attention_vjp": lambda **x: cuflash.offload.attention_vjp(X, X, X, **x),
    "ring_attention": lambda **x: distributed.ring_attention(X, X, X, COMM, **x),
    "ring_attention_backward": lambda **x: distributed.ring_attention_backward(X, X, X, X, X, LSE, COMM, **x),
    "ring_attention_vjp": lambda **x: distributed.ring_attention_vjp(X, X, X, COMM, **x),
    "ulysses_attention": lambda **x: distributed.ulysses_attention(X, X, X, COMM, **x),
    "ulysses_attention_backward": lambda **x: distributed.ulysses_attention_backward(X, X, X, X, X, LSE, COMM, **x),
    "ulysses_attention_vjp": lambda **x: distributed.ulysses_attention_vjp(X, X, X, COMM, **x),
    "attention_allreduce": lambda **x: distributed.attention_allreduce(X, X, X, W_OUT, COMM, **x),
    "attention_allreduce_vjp": lambda **x: distributed.attention_allreduce_vjp(X, X, X, W_OUT, COMM, **x),
}
OTHERS: dict[str, tuple[Callable[..., Any], hints.Hints, Callable[..., Any]]] = {
    "append_kv": (
        cuflash.append_kv,
        hints.APPEND,
        lambda **x: cuflash.append_kv(X, X, X.copy(), X.copy(), LENGTHS, **x),
    ),
    "Step.append": (cuflash.cache.Step.append, hints.APPEND, lambda **x: step().append(0, X, X, X, **x)),
    "PagedCache": (
        cuflash.PagedCache,
        hints.CACHE,
        lambda **x: cuflash.PagedCache(1, 1, 4, 2, 8, "float32", np, **x),
    ),
    "merge": (cuflash.merge, hints.PARTS, lambda **x: cuflash.merge([X], [LSE], **x)),
    "merge_backward": (
        cuflash.merge_backward,
        hints.PARTS,
        lambda **x: cuflash.merge_backward(X, LSE, [X], [LSE], X, LSE, **x),
    ),
    "quantize_fp8": (cuflash.quantize_fp8, hints.QUANTIZE, lambda **x: cuflash.quantize_fp8(X, **x)),
    "from_dense": (BlockMask.from_dense, hints.MASKS, lambda **x: BlockMask.from_dense(np.ones((3, 3), bool), **x)),
    "from_blocks": (
        BlockMask.from_blocks,
        hints.MASKS,
        lambda **x: BlockMask.from_blocks(np.ones((1, 1), bool), 3, 3, **x),
    ),
    "from_function": (
        BlockMask.from_function,
        hints.MASKS,
        lambda **x: BlockMask.from_function(lambda b, h, i, j: i >= j, 3, 3, **x),
    ),
    "sliding_window": (BlockMask.sliding_window, hints.MASKS, lambda **x: BlockMask.sliding_window(3, 3, 1, 1, **x)),
    "strided": (BlockMask.strided, hints.MASKS, lambda **x: BlockMask.strided(3, 1, 1, **x)),
    "fixed": (BlockMask.fixed, hints.MASKS, lambda **x: BlockMask.fixed(4, 2, 1, **x)),
    "longformer": (BlockMask.longformer, hints.MASKS, lambda **x: BlockMask.longformer(3, 2, 1, **x)),
    "bigbird": (BlockMask.bigbird, hints.MASKS, lambda **x: BlockMask.bigbird(300, 1, 1, 1, 0, **x)),
    "random": (BlockMask.random, hints.MASKS, lambda **x: BlockMask.random(300, 300, 0.5, 0, **x)),
}


def step() -> cuflash.cache.Step:
    cache = cuflash.PagedCache(1, 1, 4, 2, 8, "float32", np)
    return cache.step([cache.add()], 3)


@pytest.mark.parametrize("name", OF_OPTIONS)
def test_every_function_names_its_own_option(name: str) -> None:
    call = OF_OPTIONS[name]
    call()
    expected = r"^window_size: no such option; cuflash calls it window=.*None.*; see .*docs/migration\.md"
    with pytest.raises(TypeError, match=expected):
        call(window_size=(2, -1))
    with pytest.raises(TypeError, match="^nonsense: no such option; expected one of causal, window"):
        call(nonsense=1)


@pytest.mark.parametrize("name", OTHERS)
def test_functions_with_arguments_of_their_own(name: str) -> None:
    function, known, call = OTHERS[name]
    call()
    parameters = inspect.signature(function).parameters
    for keyword in known.keys() - parameters.keys():
        with pytest.raises(TypeError, match=f"^{keyword}: no such argument; cuflash (calls it|needs)"):
            call(**{keyword: 1})
    with pytest.raises(TypeError, match="nonsense"):
        call(nonsense=1)


def test_every_keyword_of_other_attentions() -> None:
    for keyword in hints.OPTIONS:
        with pytest.raises(TypeError, match=f"^{keyword}: no such option; cuflash (calls it|needs)"):
            OF_OPTIONS["attention"](**{keyword: True})
    wanted = {
        "window_size",
        "attn_mask",
        "is_causal",
        "enable_gqa",
        "max_seqlen_q",
        "max_seqlen_k",
        "scale",
        "sm_scale",
    }
    wanted |= {"key_padding_mask", "attn_bias", "cache_seqlens", "page_table", "logits_soft_cap", "return_softmax_lse"}
    assert wanted <= hints.OPTIONS.keys()


def test_a_misspelt_option() -> None:
    with pytest.raises(TypeError, match=r"^caual: no such option; did you mean causal\? expected one of causal, "):
        OF_OPTIONS["attention"](caual=True)


def test_every_option_of_others_on_the_page_has_a_hint() -> None:
    """The tables of docs/migration.md write an option as `name=`, or as a name alone, behind the first column."""
    page = (Path(__file__).parents[2] / hints.PAGE).read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\)\|", line)[2:] for line in page.splitlines() if line.startswith("| ")]
    cells = [code for row in rows for cell in row for code in re.findall(r"`([^`]+)`", cell)]
    named = {name for code in cells for name in re.findall(r"(\w+)=", code)}
    ours = {*OPTION_NAMES, "return_lse"}
    tables = (hints.OPTIONS, hints.APPEND, hints.CACHE, hints.MASKS)
    assert {name for name in named - ours if not any(name in table for table in tables)} == set()


def test_masks_of_flex_attention_and_masks_in_a_wrong_place() -> None:
    flex = type("BlockMask", (), {"__module__": "torch.nn.attention.flex_attention"})
    with pytest.raises(TypeError, match=r"cuflash\.BlockMask .*got torch\.nn\.attention\.flex_attention\.BlockMask$"):
        OF_OPTIONS["attention"](block_mask=flex())
    with pytest.raises(TypeError, match=r"BlockMask\.from_function a function of b, h, i and j\), got function"):
        OF_OPTIONS["attention"](block_mask=lambda b, h, i, j: i >= j)
    with pytest.raises(TypeError, match="got BlockMask; block_mask takes it"):
        OF_OPTIONS["attention"](mask_mod=BlockMask.sliding_window(3, 3, 1, 1))


def test_hints_name_arguments_that_exist() -> None:
    """A name before a "=" in a hint is an argument, and no hint shadows one."""
    of_attention = {*OPTION_NAMES, "return_lse", "out"}
    assert not of_attention & hints.OPTIONS.keys()
    for table, function in ((hints.APPEND, cuflash.append_kv), (hints.CACHE, cuflash.PagedCache)):
        assert not table.keys() & inspect.signature(function).parameters.keys()
    of_functions = {name for f, *_ in OTHERS.values() for name in inspect.signature(f).parameters}
    for table in (hints.OPTIONS, hints.APPEND, hints.CACHE, hints.MASKS, hints.PARTS, hints.QUANTIZE):
        for hint in table.values():
            assert set(re.findall(r"(\w+)=", hint)) <= of_attention | of_functions, hint


def test_signatures_are_those_of_the_functions() -> None:
    assert list(inspect.signature(cuflash.append_kv).parameters)[-2:] == ["k_scale", "v_scale"]
    assert list(inspect.signature(cuflash.cache.Step.append).parameters)[-1] == "v_scale"
    assert list(inspect.signature(cuflash.merge).parameters) == ["outs", "lses", "out_dtype"]
    assert list(inspect.signature(cuflash.PagedCache).parameters)[:2] == ["num_layers", "num_pages"]


def test_errors_of_known_arguments_stay_what_they_are() -> None:
    with pytest.raises(TypeError, match="out_dtype: "):
        cuflash.merge([X], [LSE], out_dtype=object())
