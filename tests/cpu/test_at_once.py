"""Attention of few queries is computed without tiles and tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.cpu import at_once
from cuflash.interop import dtype_of
from cuflash.problem.attention_problem import AttentionProblem

SMALL = AttentionProblem(1, 1, 100, 32, 8, 64, 64, "float32", softmax_scale=0.1)


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Return N(0, 1) numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype_of(dtype))


def noted_calls(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray | None]:
    """Return what calls of `at_once.forward` return from now on."""
    calls: list[np.ndarray | None] = []
    forward = at_once.forward

    def noted(*arguments: Any) -> np.ndarray | None:
        calls.append(forward(*arguments))
        return calls[-1]

    monkeypatch.setattr(at_once, "forward", noted)
    return calls


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"window_right": 0}, True),
        ({"seqlen_q": 4, "dtype": "float64", "batch": 2}, True),
        ({"deterministic": True, "precision": "tf32", "num_splits": 2, "out_dtype": "float32"}, True),
        ({"seqlen_q": 4, "window_right": 0}, True),
        ({"window_left": 3}, True),
        ({"seqlen_q": 4, "seqlen_k": 3}, True),
        ({"seqlen_q": 4, "seqlen_k": 3, "window_right": 0}, False),
        ({"seqlen_q": 17, "window_right": 0}, False),
        ({"seqlen_q": 17, "window_right": 16}, True),
        ({"window_right": -1}, False),
        ({"batch": 64, "seqlen_k": 4096}, True),
        ({"seqlen_k": 1 << 20, "window_left": 4000}, True),
        ({"softcap": 5.0}, False),
        ({"sink": True}, False),
        ({"q_lengths": True}, False),
        ({"split_size": 64}, False),
        ({"seqlen_k": 1 << 20}, False),
        ({"seqlen_q": 4096, "seqlen_k": 4096}, False),
        ({"seqlen_k": 0}, False),
    ],
)
def test_which_problems(changes: dict[str, Any], can: bool) -> None:
    """No problem with an option but a window, with rows that see no key or with too many keys is computed so."""
    assert (at_once.cut(replace(SMALL, **changes), None) is not None) is can


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("seqlen_q", "batch"), [(1, 1), (1, 3), (5, 2)])
def test_results(dtype: str, seqlen_q: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both results are those of the path by tiles, but for roundings, and stand in the arrays that are given."""
    q, k = drawn(batch, seqlen_q, 6, 16, dtype=dtype), drawn(batch, 70, 2, 16, dtype=dtype, seed=1)
    v = drawn(batch, 70, 2, 24, dtype=dtype, seed=2)
    target = np.full((batch, seqlen_q, 12, 24), np.nan, q.dtype)[:, :, ::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_once, "cut", lambda *_: None)
        expected, expected_lse = cuflash.attention(q, k, v, return_lse=True)
    calls = noted_calls(monkeypatch)
    out, lse = cuflash.attention(q, k, v, out=target, return_lse=True)
    assert calls == [None]
    assert out is target
    tolerance = {"float64": 1e-14, "float32": 1e-6}.get(dtype, 1e-2)
    np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-14 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize(
    ("name", "value"), [*((name, x) for name in "qkv" for x in (np.nan, np.inf, -np.inf)), ("v", 3e38)]
)
def test_extreme_numbers(name: str, value: float) -> None:
    """NaN and infinities stand where they belong, and a mean of large values is finite."""
    arrays = {"q": drawn(1, 1, 2, 8), "k": drawn(1, 9, 2, 8, seed=1), "v": drawn(1, 9, 2, 8, seed=2)}
    arrays[name][0, :, 0, 3] = value
    out, lse = cuflash.attention(*arrays.values(), return_lse=True)
    expected, expected_lse = reference.attention(*arrays.values())
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_a_row_with_extreme_numbers_changes_no_other(value: float) -> None:
    """The bits of all other rows, and of other heads, are those without it."""
    q, k, v = drawn(2, 3, 4, 8), drawn(2, 9, 2, 8, seed=1), drawn(2, 9, 2, 8, seed=2)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    q[1, 2, 3, 5] = value
    own_out, own_lse = cuflash.attention(q, k, v, return_lse=True)
    assert np.isnan(own_out[1, 2, 3]).all() == np.isnan(value)
    own_out[1, 2, 3], own_lse[1, 3, 2] = out[1, 2, 3], lse[1, 3, 2]
    np.testing.assert_array_equal(own_out, out)
    np.testing.assert_array_equal(own_lse, lse)


def test_progress_is_told() -> None:
    """A call within `progress` has the same bits and reports its scores at its end."""
    q, k = drawn(1, 1, 4, 8), drawn(1, 33, 4, 8, seed=1)
    told: list[tuple[int, int]] = []
    with cuflash.progress(lambda done, total: told.append((done, total))):
        out = cuflash.attention(q, k, k)
    np.testing.assert_array_equal(out, cuflash.attention(q, k, k))
    assert told[-1] == (4 * 33, 4 * 33)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, 1), (4, 0), (0, 0), (7, 5), (1000, 1000)])
@pytest.mark.parametrize("keys", ["whole", "lengths", "pages"])
def test_windows_lengths_and_pages(
    keys: str, window: tuple[int | None, int | None], rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of the path by tiles, where only keys in use are read, and of sequences without any."""
    q, k = drawn(4, rows, 6, 16, dtype=dtype), drawn(4, 40, 2, 16, dtype=dtype, seed=1)
    v = drawn(4, 40, 2, 24, dtype=dtype, seed=2)
    options: dict[str, Any] = {"window": window, "return_lse": True}
    if keys != "whole":
        options["kv_lengths"] = np.array([40, 0, 17, rows], np.int32)
        for x in (k, v):
            for length, own in zip(options["kv_lengths"], x, strict=True):
                own[length:] = np.nan
    if keys == "pages":
        table = np.random.default_rng(0).permutation(36).reshape(4, 9).astype(np.int32)  # the last of each is not used
        pools = [np.full((36, 5, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
        for pool, x in zip(pools, (k, v), strict=True):
            pool[table[:, :8]] = x.reshape(4, 8, 5, *x.shape[2:])
        k, v = pools
        options["block_table"] = np.where(np.arange(9) * 5 < options["kv_lengths"][:, None], table, -7)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_once, "cut", lambda *_: None)
        results.append(cuflash.attention(q, k, v, **options))
    calls = noted_calls(monkeypatch)
    results.append(cuflash.attention(q, k, v, **options))
    assert calls == [None]
    tolerance = {"float64": 1e-14, "float32": 1e-6}.get(dtype, 1e-2)
    for got, expected in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)


SHAPES = [(1, 32, 100, 64), (8, 8, 300, 64), (1, 8, 256, 64), (1, 32, 1024, 128), (4, 16, 4096, 64), (2, 32, 512, 128)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_few_and_even(shape: tuple[int, int, int, int], dtype: str) -> None:
    """Parts read as many numbers as they may, and short calls have no threads."""
    batch, heads, keys, dim = shape
    problem = AttentionProblem(batch, 1, keys, heads, heads, dim, dim, dtype)
    whole = at_once.cut(problem, None)
    assert whole is not None
    numbers = batch * heads * keys * dim
    most = 1 << (20 if dtype == "float32" else 18)
    assert len(whole.parts) <= 2 * -(-numbers // most)
    sizes = [part.size * dim for part in whole.parts]
    assert max(sizes) <= most and sum(sizes) == numbers
    assert max(sizes) <= 2 * min(sizes)
    assert whole.parallel is (numbers > 1 << 23)


def test_sequences_of_one_length_share_parts() -> None:
    """Sequences one behind the other are computed together if they have as many keys, and none without keys."""
    problem = AttentionProblem(7, 1, 100, 4, 4, 8, 8, "float32", kv_lengths=True)
    whole = at_once.cut(problem, np.array([50, 50, 50, 0, 100, 1000, 7], np.int32))
    assert whole is not None
    assert [(part.batches, part.keys) for part in whole.parts] == [
        (slice(0, 3), slice(0, 50)),
        (slice(4, 6), slice(0, 100)),
        (slice(6, 7), slice(0, 7)),
    ]
    assert whole.empty == [3]


def functions_called(call: Callable[[], Any]) -> int:
    """Count the functions that a call enters, of Python and of C; NumPy's operations are none."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 60),
        ({"causal": True}, 60),
        ({"return_lse": True}, 60),
        ({"kv_lengths": np.array([64], np.int32)}, 70),
    ],
)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_a_repeated_call_does_little_else(heads: tuple[int, int], options: dict[str, Any], most: int) -> None:
    """A call that is known again enters few functions: each takes 0.1 us and more, and two short products take 30."""
    q, k, v = drawn(1, 1, heads[0], 64), drawn(1, 64, heads[1], 64, seed=1), drawn(1, 64, heads[1], 64, seed=2)
    cuflash.attention(q, k, v, **options)
    assert functions_called(lambda: cuflash.attention(q, k, v, **options)) <= most


def test_a_repeated_call_has_the_same_bits_and_its_own_arrays() -> None:
    """Calls that are known again read their own arrays, lengths and pages, and are told apart from others."""
    table, lengths = np.array([[2, 0], [1, 3]], np.int32), np.array([9, 5], np.int32)
    q, k, v = drawn(2, 2, 4, 8), drawn(4, 5, 2, 8, seed=1), drawn(4, 5, 2, 8, seed=2)
    options: dict[str, Any] = {"kv_lengths": lengths, "block_table": table, "window": (3, 0), "return_lse": True}
    first = cuflash.attention(q, k, v, **options)
    for again in (cuflash.attention(q, k, v, **options), cuflash.attention(q.copy(), k, v, **options)):
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)
    del options["return_lse"]
    changes: list[dict[str, Any]] = [
        {"block_table": table[::-1].copy()},
        {"kv_lengths": lengths - 1},
        {"window": (3, 1)},
    ]
    for changed in changes:
        own = options | changed
        out, lse = cuflash.attention(q, k, v, return_lse=True, **own)
        expected = reference.attention(q, k, v, **own)
        np.testing.assert_allclose(out, expected[0], rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(lse, expected[1], rtol=2e-6)
    options["causal"] = 0  # which equals False
    with pytest.raises(TypeError, match="causal"):
        cuflash.attention(q, k, v, **options)
    del options["causal"]
    with pytest.raises(TypeError, match="k: expected q's dtype"):
        cuflash.attention(q, k.astype(np.float64), v, **options)
    strided = np.concatenate([q, q], axis=3)[..., ::2]
    for _ in range(2):  # its rows are copied
        out = cuflash.attention(strided, k, v, **options)
        np.testing.assert_array_equal(out, cuflash.attention(strided.copy(), k, v, **options))


@pytest.mark.parametrize("spread", [3, 10, 100])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "group", "causal"),
    [(8, 64, 1, False), (16, 300, 1, True), (4, 200, 4, False), (3, 100, 2, True)],
)
def test_the_backward_pass_finds_the_same_scores(
    seqlen_q: int, seqlen_k: int, group: int, causal: bool, spread: float
) -> None:
    """The weights of a row, exp(score - lse), have the sum 1 only if its scores are those of lse, bit for bit."""
    rows = seqlen_q * group
    for seed in range(6):
        q = drawn(1, seqlen_q, 2 * group, 64, seed=seed) * np.float32(spread)
        k, v = (drawn(1, seqlen_k, 2, 64, seed=100 + seed + i) * np.float32(spread) for i in range(2))
        assert at_once.cut(replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k), None) is not None
        (_, lse), backward = cuflash.attention_vjp(q, k, v, causal=causal, return_lse=True)
        # Each row of a KV head has a channel of dv, which is then the row's weights.
        channels = np.eye(rows, 64, dtype=np.float32).reshape(seqlen_q, 1, group, 64)
        dout = np.broadcast_to(channels, (1, seqlen_q, 2, group, 64)).reshape(q.shape)
        sums = backward(dout)[2].sum(axis=1, dtype=np.float64)[0, :, :rows]
        roundings = 16 + np.minimum(np.abs(lse), 32)  # beyond these the sum is made 1
        bound = 2.0**-23 * roundings.reshape(2, group, seqlen_q).swapaxes(1, 2).reshape(2, rows)
        assert (np.abs(sums - 1) <= bound).all(), (seed, np.abs(sums - 1).max())
