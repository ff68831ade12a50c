"""Users' own rules, score_mod and mask_mod with operands, agree with the reference and with built-in options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import Device

import cuflash
from cuflash import reference

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
RNG = np.random.default_rng(33)
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 21, 37, 16
ROUNDINGS = {"float64": 1e-7, "float32": 2e-4, "float16": 2e-2}


def normal(*shape: int, dtype: Any = "float64") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def inputs(dtype: Any = "float64", rows: int = ROWS, keys: int = KEYS) -> tuple[np.ndarray, ...]:
    """Make q, k, v and dout."""
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    lengths = rows, keys, keys, rows
    return tuple(normal(BATCH, n, h, DIM, dtype=dtype) for n, h in zip(lengths, heads, strict=True))


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, np.clip(j - i, -8, 8) + 8]


def every_operation(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, slopes: Any, kind: Any, scale: Any) -> Any:
    x = s * scale + table[h, (j - i) % 17]
    x = np.where(kind[b, j] == 1, np.tanh(x / 3) * 3, np.minimum(x, 2.5)) - slopes[h] * abs(i - j)
    x = x + np.sin(x) * 0.25 + np.cos(x) / 4 - np.exp2(-np.abs(x)) + np.sqrt(x * x + 0.5) + np.log(x**2 + 1)
    x = x + np.maximum(x, 0.125) % 1.75 - 0.5 * (x // 2.3) + np.floor(x / 3.1) + np.ceil(x / 2.9) - np.sign(x - 0.37)
    for power in range(1, 3):
        x = x - 0.01 * np.clip(x, -2, 2) ** power + np.exp(-abs(x)) + np.log2(2 + x * x)
    return x + 0.125 * ((i & 3) | (j ^ 1)) - (~i % 5) / 8 + (j // 3).astype(np.float32) * 0.01


def operands_of(dtype: Any = "float64") -> tuple[np.ndarray, ...]:
    kind = RNG.integers(0, 2, (BATCH, KEYS)).astype("int64")
    return normal(HEADS, 17, dtype=dtype), normal(HEADS, dtype=dtype), kind, np.array(0.75, dtype)


def dilated(b: Any, h: Any, i: Any, j: Any, *operands: Any) -> Any:
    return ((i - j) % 3 != 1) | (j == h)


def assert_agrees(device: Device, dtype: Any = "float64", **options: Any) -> None:
    """Assert that results and all gradients are the reference's."""
    q, k, v, dout = inputs(dtype)
    dlse = normal(BATCH, HEADS, ROWS, dtype="float64" if dtype == "float64" else "float32")
    arrays: dict[str, Any] = {
        name: device.put(x) if name in ("operands", "bias", "mask", "alibi_slopes", "sink") else x
        for name, x in options.items()
    }
    (out, lse), backward = cuflash.attention_vjp(*device.put((q, k, v)), return_lse=True, **arrays)
    grads = device.get(backward(*device.put((dout, dlse))))
    expected, expected_lse = reference.attention(q, k, v, **options)
    wanted = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    close: dict[str, Any] = {"rtol": ROUNDINGS[np.dtype(dtype).name], "atol": ROUNDINGS[np.dtype(dtype).name]}
    np.testing.assert_allclose(device.get(out), expected, **close)
    np.testing.assert_allclose(device.get(lse), expected_lse, **close)
    names = ["q", "k", "v", *(name for name in ("bias", "sink", "alibi_slopes") if name in options)]
    names += [name for name in wanted if name.startswith("operand_")]
    assert len(grads) == len(names)
    for name, grad in zip(names, grads, strict=True):
        scale = max(1.0, float(np.abs(wanted[name]).max()))
        np.testing.assert_allclose(grad / scale, wanted[name] / scale, err_msg=name, **close)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("deterministic", [None, True])
def test_a_table_of_relative_positions(device: Device, dtype: str, deterministic: bool | None) -> None:
    table = normal(HEADS, 17, dtype=dtype)
    assert_agrees(device, dtype, score_mod=relative, operands=(table,), causal=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [None, True])
def test_every_operation_and_its_derivative(device: Device, deterministic: bool | None) -> None:
    options: dict[str, Any] = {"score_mod": every_operation, "mask_mod": dilated, "operands": operands_of()}
    assert_agrees(device, deterministic=deterministic, **options)


def test_all_options_together(device: Device) -> None:
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, table: 0.5 * s + np.tanh(s) * table[h, (i + j) % 17],
        "mask_mod": dilated,
        "operands": (normal(HEADS, 17),),
        "window": (20, 3),
        "softcap": 4.0,
        "bias": normal(1, HEADS, ROWS, KEYS),
        "mask": RNG.random((BATCH, 1, ROWS, KEYS)) < 0.8,
        "alibi_slopes": normal(HEADS) ** 2,
        "sink": normal(HEADS),
        "dropout_p": 0.25,
        "dropout_seed": 7,
    }
    assert_agrees(device, **options)


def test_a_block_mask_beside_rules(device: Device) -> None:
    q, k, v, dout = inputs("float32", 70, 150)
    shown = RNG.random((HEADS, 70, 150)) < 0.5
    block_mask = cuflash.BlockMask.from_dense(device.put(shown), block_size=(32, 32))
    rules: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s * 0.5 - 0.01 * abs(i - j), "mask_mod": dilated}
    out, backward = cuflash.attention_vjp(*device.put((q, k, v)), block_mask=block_mask, **rules)
    expected = reference.attention(q, k, v, block_mask=shown, **rules)[0]
    np.testing.assert_allclose(device.get(out), expected, rtol=1e-4, atol=1e-4)
    wanted = reference.attention_backward(dout, q, k, v, block_mask=shown, **rules)
    for name, grad in zip("qkv", device.get(backward(device.put(dout))), strict=True):
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-3, atol=1e-3, err_msg=name)


def test_a_dense_bias_and_its_gradient(device: Device) -> None:
    """An operand with an element for each score has the gradient of a bias; so has one with an element a key."""
    q, k, v, dout = inputs()
    dense, of_keys = normal(BATCH, HEADS, ROWS, KEYS), normal(BATCH, KEYS)
    put = device.put
    _, by_bias = cuflash.attention_vjp(*put((q, k, v)), bias=put(dense + of_keys[:, None, None]))
    own: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, dense, of_keys: s + dense[b, h, i, j] + of_keys[b, j],
        "operands": put((dense, of_keys)),
    }
    _, by_rule = cuflash.attention_vjp(*put((q, k, v)), **own)
    *_, dbias = device.get(by_bias(put(dout)))
    *_, ddense, dkeys = device.get(by_rule(put(dout)))
    np.testing.assert_allclose(ddense, dbias, atol=1e-12)
    np.testing.assert_allclose(dkeys, dbias.sum(axis=(1, 2)), atol=1e-12)


def test_learned_slopes_are_alibi(device: Device) -> None:
    q, k, v, dout = inputs()
    slopes = normal(HEADS)
    offset = KEYS - ROWS

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
        return s - slopes[h] * abs(i + offset - j)

    put = device.put
    out, backward = cuflash.attention_vjp(*put((q, k, v)), alibi_slopes=put(slopes))
    own, own_backward = cuflash.attention_vjp(*put((q, k, v)), score_mod=alibi, operands=(put(slopes),))
    np.testing.assert_allclose(device.get(own), device.get(out), atol=1e-12)
    for a, b in zip(device.get(own_backward(put(dout))), device.get(backward(put(dout))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


def test_finite_differences_of_a_temperature(device: Device) -> None:
    """Differences agree for a 0-d operand, and for one of each head."""
    q, k, v, dout = inputs()
    temperature, bend = normal(HEADS), np.array(0.3)

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any, temperature: Any, bend: Any) -> Any:
        return s * temperature[h] + bend * np.sin(bend * s)

    def loss(*operands: np.ndarray) -> float:
        given = device.put(tuple(map(np.asarray, operands)))  # sums of 0-d arrays are scalars
        out = cuflash.attention(*device.put((q, k, v)), score_mod=rule, operands=given)
        return float((device.get(out) * dout).sum())

    _, backward = cuflash.attention_vjp(
        *device.put((q, k, v)), score_mod=rule, operands=device.put((temperature, bend))
    )
    *_, dtemperature, dbend = device.get(backward(device.put(dout)))
    step = 1e-5
    for h in range(HEADS):
        moved = np.eye(HEADS)[h] * step
        difference = (loss(temperature + moved, bend) - loss(temperature - moved, bend)) / (2 * step)
        np.testing.assert_allclose(dtemperature[h], difference, rtol=1e-5, atol=1e-7)
    difference = (loss(temperature, bend + step) - loss(temperature, bend - step)) / (2 * step)
    assert dbend.shape == ()
    np.testing.assert_allclose(dbend, difference, rtol=1e-5)


def test_packed_rules_are_local(device: Device) -> None:
    lengths_q, lengths_k = (9, 0, 14), (11, 5, 14)
    cu_q, cu_k = (np.cumsum((0, *x)).astype(np.int32) for x in (lengths_q, lengths_k))
    q, k, v, dout = (normal(n, h, DIM) for n, h in ((25, 4), (30, 2), (30, 2), (25, 4)))
    table = normal(3, HEADS, 7)
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, table: s + table[b, h, (i - j) % 7] * i,
        "mask_mod": lambda b, h, i, j, table: (i + j + b) % 4 != 0,
        "operands": (table,),
    }
    put = device.put
    on_device: dict[str, Any] = {**options, "operands": put((table,))}
    out, backward = cuflash.attention_varlen_vjp(*put((q, k, v, cu_q, cu_k)), **on_device)
    expected, _ = reference.attention_varlen(q, k, v, cu_q, cu_k, **options)
    np.testing.assert_allclose(device.get(out), expected, atol=1e-10)
    wanted = reference.attention_varlen_backward(dout, q, k, v, cu_q, cu_k, **options)
    grads = device.get(backward(put(dout)))
    for name, grad in zip(("q", "k", "v", "operand_0"), grads, strict=True):
        np.testing.assert_allclose(grad, wanted[name], atol=1e-6, err_msg=name)


def test_lengths_keep_the_indices_absolute(device: Device) -> None:
    q, k, v, dout = inputs()
    table = normal(HEADS, 17)
    lengths: dict[str, Any] = {"q_lengths": np.array([ROWS, 5], np.int32), "kv_lengths": np.array([30, 12], np.int32)}
    options: dict[str, Any] = {"score_mod": relative, "operands": (table,), "causal": True}
    put = device.put
    on_device: dict[str, Any] = {**options, "operands": put((table,)), **put(lengths)}
    out, backward = cuflash.attention_vjp(*put((q, k, v)), **on_device)
    expected, _ = reference.attention(q, k, v, **options, **lengths)
    np.testing.assert_allclose(device.get(out), expected, atol=1e-10)
    wanted = reference.attention_backward(dout, q, k, v, **options, **lengths)
    for name, grad in zip(("q", "k", "v", "operand_0"), device.get(backward(put(dout))), strict=True):
        np.testing.assert_allclose(grad, wanted[name], atol=1e-6, err_msg=name)


def test_a_rule_that_hides_all_gives_zeros(device: Device) -> None:
    q, k, v, dout = inputs("float32")
    k[...], v[...] = np.nan, np.inf
    hide_all: Callable[..., Any] = lambda b, h, i, j, *_: i < 0  # noqa: E731
    by_score: Callable[..., Any] = lambda s, b, h, i, j, x: np.where(i < 0, s + x[h], -np.inf)  # noqa: E731
    operand = normal(HEADS, dtype="float32")
    both: tuple[dict[str, Any], ...] = ({"mask_mod": hide_all}, {"score_mod": by_score})
    for rules in both:
        put = device.put
        (out, lse), backward = cuflash.attention_vjp(
            *put((q, k, v)), return_lse=True, operands=(put(operand),), **rules
        )
        assert not device.get(out).any()
        assert np.isneginf(device.get(lse)).all()
        assert all(not grad.any() for grad in device.get(backward(put(dout))))


def test_hidden_keys_do_not_leak(device: Device) -> None:
    """Keys that a rule hides from all may hold anything."""
    q, k, v, dout = inputs("float32")
    put = device.put
    both: tuple[dict[str, Any], ...] = (
        {"mask_mod": lambda b, h, i, j: j % 5 != 2},
        {"score_mod": lambda s, b, h, i, j: np.where(j % 5 != 2, s * 2, -np.inf)},
    )
    for rules in both:
        expected, backward = cuflash.attention_vjp(*put((q, k, v)), **rules)
        wanted = device.get(backward(put(dout)))
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, 2::5], bad_v[:, 2::5] = np.nan, np.inf
        out, backward = cuflash.attention_vjp(*put((q, bad_k, bad_v)), **rules)
        assert (device.get(out) == device.get(expected)).all()
        for a, b in zip(device.get(backward(put(dout))), wanted, strict=True):
            assert (a == b).all()
        assert not wanted[1][:, 2::5].any() and not wanted[2][:, 2::5].any()


def test_nan_propagates(device: Device) -> None:
    q, k, v, _ = inputs("float32")
    out = cuflash.attention(*device.put((q, k, v)), score_mod=lambda s, b, h, i, j: s / (i - 3) * (i - 3))
    rows = np.isnan(device.get(out)).all(axis=(0, 2, 3))
    assert rows[3] and rows.sum() == 1


def test_a_bias_of_minus_infinity_hides_whatever_the_rule_makes_of_it(device: Device) -> None:
    q, k, v, _ = inputs("float32")
    bias = np.where(np.arange(KEYS) % 4 == 0, -np.inf, 0).astype("float32")
    put = device.put
    out = cuflash.attention(*put((q, k, v)), bias=put(bias), score_mod=lambda s, b, h, i, j: np.exp(np.minimum(s, 1)))
    expected = reference.attention(q, k, v, bias=bias, score_mod=lambda s, b, h, i, j: np.exp(np.minimum(s, 1)))[0]
    np.testing.assert_allclose(device.get(out), expected, atol=1e-5)


def test_indices_are_clamped(device: Device) -> None:
    q, k, v, _ = inputs("float32")
    table = normal(5, dtype="float32")
    put = device.put
    out = cuflash.attention(*put((q, k, v)), score_mod=lambda s, b, h, i, j, t: s + t[j - 7], operands=(put(table),))
    bias = table[np.clip(np.arange(KEYS) - 7, 0, 4)]
    np.testing.assert_allclose(
        device.get(out), device.get(cuflash.attention(*put((q, k, v)), bias=put(bias))), atol=1e-5
    )


def test_gradients_of_operands_in_order(device: Device) -> None:
    """Each floating operand has a gradient, 0 where only mask_mod reads it; grads= and out= know these, too."""
    q, k, v, dout = inputs("float32")
    put = device.put
    operands = (normal(HEADS, dtype="float16"), np.arange(3), normal(BATCH, KEYS), np.zeros(2, bool))
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, scale, number, floor, flag: s * scale[h] + number[2],
        "mask_mod": lambda b, h, i, j, scale, number, floor, flag: floor[b, j] > -1,
        "operands": put(operands),
        "alibi_slopes": put(normal(HEADS, dtype="float32")),
    }
    out, lse = cuflash.attention(*put((q, k, v)), return_lse=True, **options)
    arguments = (put(dout), *put((q, k, v)), out, lse)
    dq, dk, dv, dslopes, dscale, dfloor = device.get(cuflash.attention_backward(*arguments, **options))
    assert (dscale.dtype, dscale.shape) == (np.float16, (HEADS,)) and dscale.any()
    assert (dfloor.dtype, dfloor.shape) == (np.float64, (BATCH, KEYS)) and not dfloor.any()
    only = device.get(cuflash.attention_backward(*arguments, grads=("operands",), **options))
    assert [x is None for x in only] == [True] * 4 + [False] * 2
    # Atomic additions leave the order of sums free.
    np.testing.assert_allclose(only[4].astype(float), dscale.astype(float), rtol=4e-3)
    into = put(np.zeros(HEADS, np.float16))
    given = cuflash.attention_backward(*arguments, out=(None, None, None, None, into, None), **options)
    assert given[4] is into
    np.testing.assert_allclose(device.get(into).astype(float), dscale.astype(float), rtol=4e-3)
    without = cuflash.attention_backward(*arguments, grads=("q",), **options)
    assert without[4] is None and without[5] is None
    assert dq.any() and dk.any() and dv.any() and dslopes.any()


def test_deterministic_gradients_repeat_their_bits(device: Device) -> None:
    q, k, v, dout = inputs("float32")
    put = device.put
    options: dict[str, Any] = {
        "score_mod": every_operation,
        "operands": put(operands_of("float32")),
        "deterministic": True,
    }
    _, backward = cuflash.attention_vjp(*put((q, k, v)), **options)
    first, second = (device.get(backward(put(dout))) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_strides_and_layouts_of_operands(device: Device) -> None:
    """Operands may have any strides, negative ones and 0 too, and a gradient may be written to a slice."""
    q, k, v, dout = inputs("float32")
    table = normal(17, 2 * HEADS, dtype="float32")[::-1, ::2].T
    put = device.put
    options: dict[str, Any] = {"score_mod": relative, "operands": (put(table),)}
    whole: dict[str, Any] = {"score_mod": relative, "operands": (put(np.ascontiguousarray(table)),)}
    out, backward = cuflash.attention_vjp(*put((q, k, v)), **options)
    same, same_backward = cuflash.attention_vjp(*put((q, k, v)), **whole)
    assert (device.get(out) == device.get(same)).all()
    into = put(np.zeros((HEADS, 20), "float32"))
    grads = backward(put(dout), out=(None, None, None, into[:, 2:19]))
    np.testing.assert_allclose(device.get(into)[:, 2:19], device.get(same_backward(put(dout)))[3], atol=1e-5)
    assert not device.get(into)[:, :2].any() and not device.get(into)[:, 19:].any()
    assert grads[3].shape == (HEADS, 17)


def test_empty_problems_and_operands(device: Device) -> None:
    put = device.put
    for batch, rows, keys in ((0, 3, 4), (1, 0, 4), (1, 3, 0)):
        q, k = np.zeros((batch, rows, 2, 8), "float32"), np.zeros((batch, keys, 2, 8), "float32")
        operand = np.ones((batch, 2), "float32")
        rule: Callable[..., Any] = lambda s, b, h, i, j, x: s * x[b, h]  # noqa: E731
        out, backward = cuflash.attention_vjp(*put((q, k, k)), score_mod=rule, operands=(put(operand),))
        grads = device.get(backward(put(np.zeros_like(q))))
        assert out.shape == q.shape and not device.get(out).any()
        assert grads[3].shape == operand.shape and not grads[3].any()


def test_heads_and_batches_that_share_blocks(device: Device) -> None:
    """Short sequences are computed together; each has its own b and h."""
    q, k, v = (normal(5, 1, n, 8) for n in (6, 3, 3))
    per_head = normal(5, 6)
    put = device.put
    rule: Callable[..., Any] = lambda s, b, h, i, j, x: s + x[b, h] * j  # noqa: E731
    k, v = (np.repeat(x, 9, axis=1) for x in (k, v))
    v += normal(*v.shape)
    out = cuflash.attention(*put((q, k, v)), score_mod=rule, operands=(put(per_head),))
    expected = reference.attention(q, k, v, score_mod=rule, operands=(per_head,))[0]
    np.testing.assert_allclose(device.get(out), expected, atol=1e-12)
