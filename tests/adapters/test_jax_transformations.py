"""Attention under JAX's transformations: a vmap is a loop, and what has no derivative says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuflash

jax: Any = pytest.importorskip("jax")
adapter: Any = pytest.importorskip("cuflash.adapters.jax")
Array = Any
EXAMPLES = 3


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def relative(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array, factor: Array) -> Array:
    return s * factor + table[h, np.clip(j - i, -4, 4) + 4]


def assert_is_a_loop(function: Callable[..., Any], arrays: tuple[Array, ...], axes: tuple[int | None, ...]) -> None:
    found = jax.vmap(function, in_axes=axes)(*arrays)
    for n in range(EXAMPLES):
        expected = function(*(x if axis is None else x[n] for x, axis in zip(arrays, axes, strict=True)))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours[n], theirs, rtol=1e-9, atol=1e-12)


def with_gradients(
    attention: Callable[..., tuple[Array, Array]], count: int
) -> Callable[..., tuple[Array, Array, tuple[Array, ...]]]:
    """Results, and gradients of the first `count` arguments through both of them."""

    def function(*arrays: Array) -> tuple[Array, Array, tuple[Array, ...]]:
        def loss(*varied: Array) -> tuple[Array, tuple[Array, Array]]:
            out, lse = attention(*varied, *arrays[count:])
            finite = jax.numpy.where(jax.numpy.isinf(lse), 0, lse)
            return (out**2).sum() + finite.sum(), (out, lse)

        grads, (out, lse) = jax.grad(loss, argnums=tuple(range(count)), has_aux=True)(*arrays[:count])
        return out, lse, grads

    return function


def every_option() -> tuple[Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 4, 4), (2, 6, 2, 4), (2, 6, 2, 3), (4, 5, 6), (4,), (2, 4), (4, 9), ())
    return (
        *(rng.normal(size=(EXAMPLES, *shape)) for shape in shapes),
        rng.random((EXAMPLES, 2, 1, 5, 6)) < 0.8,
        np.array([[5, 3], [0, 2], [4, 7]], np.int32),
        np.array([[6, 2], [5, 5], [0, 6]], np.int32),
    )


def attention_of_every_option(
    *arrays: Array,
) -> tuple[Array, Array]:
    q, k, v, bias, sink, slopes, table, factor, mask, q_lengths, kv_lengths = arrays
    options = {"bias": bias, "sink": sink, "alibi_slopes": slopes, "mask": mask, "causal": True}
    lengths = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    rule = {"score_mod": relative, "operands": (table, factor)}
    found: tuple[Array, Array] = adapter.attention(q, k, v, return_lse=True, **options, **lengths, **rule)
    return found


@pytest.mark.parametrize("stacked", [range(11), *[(n,) for n in range(11)], (0, 1, 2), (0, 4, 6)], ids=str)
def test_vmap_of_every_operand(stacked: Any) -> None:
    """Each operand alone, some of them and all, with the gradients of all."""
    arrays = every_option()
    axes = tuple(0 if n in stacked else None for n in range(len(arrays)))
    given = tuple(x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True))
    assert_is_a_loop(with_gradients(attention_of_every_option, 8), given, axes)


def test_gradient_of_a_vmap_under_jit() -> None:
    arrays = every_option()
    axes = (0, None, None, None, None, 0, None, None, None, None, None)
    given = tuple(x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True))

    def of_one(*arrays: Array) -> Array:
        out, _ = attention_of_every_option(*arrays)
        return (out**2).sum()

    def by_vmap(*arrays: Array) -> Array:
        return jax.vmap(of_one, in_axes=axes)(*arrays).sum()

    def by_loop(*arrays: Array) -> Array:
        return sum(of_one(arrays[0][n], *arrays[1:5], arrays[5][n], *arrays[6:]) for n in range(EXAMPLES))

    found, expected = (jax.jit(jax.grad(function, argnums=tuple(range(8))))(*given) for function in (by_vmap, by_loop))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_vmap_folds_into_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    original = cuflash.attention

    def noting(q: Array, *rest: Array, **options: Any) -> Any:
        batches.append(len(q))
        return original(q, *rest, **options)

    monkeypatch.setattr(cuflash, "attention", noting)
    q = np.ones((EXAMPLES, 2, 2, 5, 4, 8))
    sink = np.zeros((2, 4))
    nested = jax.vmap(jax.vmap(lambda q, sink: adapter.attention(q, q, q, sink=sink)), in_axes=(0, None))
    assert nested(q, sink).shape == q.shape
    assert batches == [EXAMPLES * 2 * 2]


def test_vmap_over_pages() -> None:
    rng = np.random.default_rng(0)
    q, pool = rng.normal(size=(EXAMPLES, 2, 5, 4, 4)), rng.normal(size=(EXAMPLES, 7, 2, 2, 4))
    table = np.stack([rng.permutation(7)[:6].reshape(2, 3) for _ in range(EXAMPLES)]).astype(np.int32)
    table[0, 1, 2] = 1_000_000  # is not used
    lengths = np.array([6, 3], np.int32)

    def attention(q: Array, k: Array, v: Array, table: Array) -> tuple[Array, Array]:
        found: tuple[Array, Array] = adapter.attention(
            q, k, v, block_table=table, kv_lengths=lengths, causal=True, return_lse=True
        )
        return found

    function = with_gradients(attention, 3)
    assert_is_a_loop(function, (q, pool, pool * 2, table), (0, 0, 0, 0))
    assert_is_a_loop(function, (q, pool[0], pool[1], table), (0, None, None, 0))
    assert_is_a_loop(function, (q[0], pool, pool[1], table[0]), (None, 0, None, None))


def test_vmap_where_examples_are_computed_one_by_one() -> None:
    """Packed sequences, dropout, and a block mask of several sequences."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(EXAMPLES, 2, 5, 4, 4)), rng.normal(size=(EXAMPLES, 2, 5, 2, 4))
    cu_seqlens = np.array([0, 2, 5], np.int32)
    block_mask = cuflash.BlockMask.from_dense(rng.random((2, 1, 5, 5)) < 0.7)
    keys = jax.random.split(jax.random.key(0), EXAMPLES)

    def packed(q: Array, k: Array) -> Any:
        return adapter.attention_varlen(q, k, k, cu_seqlens, cu_seqlens, causal=True, return_lse=True)

    def masked(q: Array, k: Array) -> Any:
        return adapter.attention(q, k, k, block_mask=block_mask, return_lse=True)

    def dropped(q: Array, k: Array, key: Array) -> Any:
        return adapter.attention(q, k, k, dropout_p=0.5, dropout_seed=key, return_lse=True)

    assert_is_a_loop(with_gradients(packed, 2), (q[:, 0], k[:, 0]), (0, 0))
    assert_is_a_loop(with_gradients(masked, 2), (q, k), (0, 0))
    assert_is_a_loop(with_gradients(dropped, 2), (q, k, keys), (0, 0, 0))
    assert_is_a_loop(with_gradients(dropped, 2), (q, k, keys[0]), (0, 0, None))


def test_seeds() -> None:
    """A key of JAX, one or two words of 32 bits, and 64 bits of NumPy are the seed that they hold."""
    q = np.random.default_rng(0).normal(size=(1, 8, 2, 4))

    def dropped(module: Any, seed: Any) -> Array:
        return np.asarray(module.attention(q, q, q, dropout_p=0.5, dropout_seed=seed))

    key = jax.random.key(7)
    low, high = (int(x) for x in jax.random.key_data(key))
    seed = 0x123456789ABCDEF0
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    np.testing.assert_array_equal(dropped(adapter, key), dropped(cuflash, low | high << 32))
    np.testing.assert_array_equal(dropped(adapter, words), dropped(cuflash, seed))
    np.testing.assert_array_equal(dropped(adapter, words[:1]), dropped(cuflash, int(words[0])))
    with jax.enable_x64(False):
        narrow = np.asarray(adapter.attention(q, q, q, dropout_p=0.5, dropout_seed=np.array([seed], np.uint64)))
        np.testing.assert_array_equal(narrow == 0, dropped(cuflash, seed) == 0)
    with pytest.raises(ValueError, match="dropout_seed: expected one or two elements of uint32"):
        dropped(adapter, np.zeros(3, np.uint32))


def test_errors_come_when_a_call_is_traced() -> None:
    q = jax.ShapeDtypeStruct((1, 5, 2, 4), "float32")

    def traced(**options: Any) -> Any:
        return jax.eval_shape(lambda q: adapter.attention(q, q, q, **options), q)

    assert traced().shape == (1, 5, 2, 4)
    with pytest.raises(ValueError, match=r"bias: expected a shape that broadcasts to .* got \(7, 7\)"):
        traced(bias=np.zeros((7, 7), np.float32))
    with pytest.raises(ValueError, match="softcap: expected None or 0"):
        traced(softcap=-1.0)
    with pytest.raises(TypeError, match="dropout_p: expected a value that is known"):
        jax.jit(lambda q, p: adapter.attention(q, q, q, dropout_p=p, dropout_seed=1))(np.ones((1, 5, 2, 4)), 0.5)
    with pytest.raises(TypeError, match="bias: expected an array of JAX or NumPy, got list"):
        traced(bias=[[0.0]])
    with pytest.raises(TypeError, match="mask would be lost"):
        traced(mask=np.ma.ones((5, 5), bool))
    with pytest.raises(TypeError, match="truth|bool"):
        traced(score_mod=lambda s, b, h, i, j: s if s > 0 else 0)


@pytest.mark.parametrize("name", ["causal", "window", "softmax_scale", "return_lse"])
def test_options_are_known_when_a_call_is_traced(name: str) -> None:
    x = jax.numpy.ones((1, 5, 2, 8))
    value = {"causal": True, "window": (2, 0), "softmax_scale": 0.5, "return_lse": True}[name]
    with pytest.raises(TypeError, match=f"^{name}: expected a value that is known .* static_argnames of jax.jit"):
        jax.jit(lambda x, value: adapter.attention(x, x, x, **{name: value}))(x, value)


def test_no_forward_mode_and_no_second_derivative() -> None:
    q = np.ones((1, 3, 2, 4))

    def function(q: Array) -> Array:
        return adapter.attention(q, q, q)

    def total(q: Array) -> Array:
        return function(q).sum()

    calls: tuple[Callable[[], Any], ...] = (
        lambda: jax.jvp(function, (q,), (q,)),
        lambda: jax.jacfwd(function)(q),
        lambda: jax.hessian(total)(q),
        lambda: jax.jvp(jax.jit(function), (q,), (q,)),  # here, and behind linearize, by JAX itself
        lambda: jax.linearize(function, q)[1](q),
    )
    for call in calls:
        with pytest.raises(TypeError, match="forward-mode"):
            call()
    with pytest.raises(TypeError, match=r"\(jvp, jacfwd, hessian\): use reverse mode \(grad, vjp, jacrev\)"):
        jax.jvp(function, (q,), (q,))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda q: jax.grad(total)(q).sum())(q)
    codes, scale = cuflash.quantize_fp8(q)
    with pytest.raises(NotImplementedError, match="gradients of attention with FP8 arrays"):
        jax.grad(lambda scale: adapter.attention(codes, codes, codes, q_scale=scale).astype("float32").sum())(scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(dtype: str) -> None:
    """Also where the sinks of a vmap join a result that is rounded after them."""
    rng = np.random.default_rng(0)
    q = jax.numpy.asarray(rng.normal(size=(EXAMPLES, 1, 6, 2, 8)), dtype)
    sink = rng.normal(size=(EXAMPLES, 2)).astype("float32")

    def function(q: Array, sink: Array) -> Array:
        return adapter.attention(q, q, q, sink=sink, causal=True)

    found = jax.vmap(function)(q, sink)
    assert found.dtype == dtype
    eps = float(jax.numpy.finfo(dtype).eps)
    for n in range(EXAMPLES):
        expected = np.asarray(function(q[n], sink[n]), "float64")
        np.testing.assert_allclose(np.asarray(found[n], "float64"), expected, rtol=4 * eps, atol=eps / 8)
    gradient = jax.grad(lambda q: jax.vmap(function)(q, sink).astype("float32").sum())(q)
    assert gradient.dtype == dtype and np.isfinite(np.asarray(gradient, "float32")).all()


def test_codes_of_fp8() -> None:
    rng = np.random.default_rng(0)
    arrays = [cuflash.quantize_fp8(rng.normal(size=(2, 5, 2, 8)).astype("float32"), "head") for _ in range(3)]
    scales = {f"{name}_scale": scale for name, (_, scale) in zip("qkv", arrays, strict=True)}
    attention: Any = cuflash.attention
    expected = attention(*(codes for codes, _ in arrays), **scales)
    codes = [jax.lax.bitcast_convert_type(codes, jax.numpy.float8_e4m3fn) for codes, _ in arrays]
    found = adapter.attention(*codes, **scales)
    np.testing.assert_array_equal(np.asarray(found), expected)

    def of_one(codes: Array, scale: Array) -> Array:
        return adapter.attention(codes, arrays[1][0], arrays[2][0], **{**scales, "q_scale": scale})

    stacked = np.stack([arrays[0][0]] * EXAMPLES), np.stack([arrays[0][1] * n for n in range(1, 1 + EXAMPLES)])
    for n, out in enumerate(jax.vmap(of_one)(*stacked)):
        np.testing.assert_array_equal(np.asarray(out), np.asarray(of_one(stacked[0][n], stacked[1][n])))
