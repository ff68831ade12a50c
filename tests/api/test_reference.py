"""The oracle itself agrees with scalar loops, with differences of its own results, and with PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuflash import reference

Array = NDArray[Any]

BATCH, ROWS, KEYS, HEADS, KV_HEADS, DIM, DIM_V = 2, 9, 12, 4, 2, 6, 5


def inputs(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((BATCH, ROWS, HEADS, DIM)),
        "k": rng.standard_normal((BATCH, KEYS, KV_HEADS, DIM)),
        "v": rng.standard_normal((BATCH, KEYS, KV_HEADS, DIM_V)),
    }


def everything(seed: int = 1) -> dict[str, Any]:
    """Return every option at once, on top of `inputs`."""
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal((BATCH, 1, ROWS, KEYS))
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return {
        "window": (6, 2),
        "softmax_scale": 0.7,
        "softcap": 3.0,
        "bias": bias,
        "mask": rng.random((HEADS, ROWS, KEYS)) < 0.8,
        "block_mask": rng.random((1, HEADS, ROWS, KEYS)) < 0.9,
        "alibi_slopes": rng.random((BATCH, HEADS)),
        "sink": rng.standard_normal(HEADS),
        "q_lengths": np.array([ROWS, 5], np.int32),
        "kv_lengths": np.array([7, KEYS], np.int32),
        "dropout_p": 0.3,
        "dropout_seed": 2**40 + 17,
    }


def scalar_attention(q: Array, k: Array, v: Array, o: dict[str, Any]) -> tuple[Array, Array]:
    """Compute the semantics element by element, in Python's numbers."""
    out, lse = np.zeros((BATCH, ROWS, HEADS, DIM_V)), np.full((BATCH, HEADS, ROWS), -np.inf)
    keep = reference.dropout_keep(BATCH, HEADS, ROWS, KEYS, o["dropout_p"], o["dropout_seed"])
    for b, h, i in np.ndindex(BATCH, HEADS, ROWS):
        q_length, kv_length = int(o["q_lengths"][b]), int(o["kv_lengths"][b])
        if i >= q_length:
            continue
        aligned = i + kv_length - q_length
        weights = {}
        for j in range(kv_length):
            left, right = o["window"]
            if not aligned - left <= j <= aligned + right:
                continue
            if not (o["mask"][h, i, j] and o["block_mask"][0, h, i, j]) or o["bias"][b, 0, i, j] == -math.inf:
                continue
            score = o["softmax_scale"] * float(q[b, i, h] @ k[b, j, h // (HEADS // KV_HEADS)])
            score = o["softcap"] * math.tanh(score / o["softcap"])
            weights[j] = math.exp(score + o["bias"][b, 0, i, j] - o["alibi_slopes"][b, h] * abs(aligned - j))
        total = sum(weights.values()) + math.exp(o["sink"][h])
        lse[b, h, i] = math.log(total)
        for j, weight in weights.items():
            if keep[b, h, i, j]:
                out[b, i, h] += (
                    weight / total * reference.dropout_rescale(o["dropout_p"]) * v[b, j, h // (HEADS // KV_HEADS)]
                )
    return out, lse


def test_agrees_with_scalar_loops() -> None:
    arrays, options = inputs(), everything()
    out, lse = reference.attention(**arrays, **options)
    expected_out, expected_lse = scalar_attention(**arrays, o=options)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def differences(arrays: dict[str, Any], options: dict[str, Any], packed: bool) -> None:
    """Compare every gradient, along a random direction, with a central difference of the result."""
    rng = np.random.default_rng(3)
    forward = reference.attention_varlen if packed else reference.attention
    backward = reference.attention_varlen_backward if packed else reference.attention_backward
    out, lse = forward(**arrays, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)

    def objective(**moved: Array) -> float:
        own_out, own_lse = forward(**{**arrays, **options, **moved})
        return float((own_out * dout).sum() + np.where(np.isfinite(own_lse), own_lse * dlse, 0).sum())

    grads = backward(dout, **arrays, **options, dlse=dlse)
    assert set(grads) == {"q", "k", "v", *({"bias", "sink", "alibi_slopes"} & set(options))}
    step = 1e-5
    for name, grad in grads.items():
        x = {**arrays, **options}[name]
        assert grad.shape == x.shape
        direction = rng.standard_normal(x.shape)
        change = objective(**{name: x + step * direction}) - objective(**{name: x - step * direction})
        assert (grad * direction).sum() == pytest.approx(change / (2 * step), rel=1e-7, abs=1e-7), name


def test_gradients_are_differences() -> None:
    differences(inputs(), everything(), packed=False)


@pytest.mark.parametrize("shape", [(), (KEYS,), (ROWS, 1), (HEADS, 1, 1), (HEADS, ROWS, KEYS), (BATCH, 1, 1, KEYS)])
def test_bias_gradient_has_the_shape_of_bias(shape: tuple[int, ...]) -> None:
    differences(inputs(), {"bias": np.random.default_rng(4).standard_normal(shape), "causal": True}, packed=False)


def packed_inputs() -> tuple[dict[str, Array], list[int], list[int]]:
    rng = np.random.default_rng(5)
    cu_q, cu_k = [1, 5, 5, 12], [0, 6, 9, 16]
    arrays = {
        "q": rng.standard_normal((14, HEADS, DIM)),
        "k": rng.standard_normal((17, KV_HEADS, DIM)),
        "v": rng.standard_normal((17, KV_HEADS, DIM_V)),
    }
    return arrays, cu_q, cu_k


def test_packed_gradients_are_differences() -> None:
    arrays, cu_q, cu_k = packed_inputs()
    rng = np.random.default_rng(6)
    options = {
        "cu_seqlens_q": np.array(cu_q, np.int32),
        "cu_seqlens_k": np.array(cu_k, np.int32),
        "causal": True,
        "bias": rng.standard_normal((3, 1, 7, 7)),
        "mask": rng.random((1, HEADS, 7, 7)) < 0.9,
        "alibi_slopes": rng.random((3, HEADS)),
        "sink": rng.standard_normal(HEADS),
        "kv_lengths": np.array([5, 9, 6], np.int32),
        "dropout_p": 0.2,
        "dropout_seed": 3,
    }
    differences(arrays, options, packed=True)


def test_packed_is_each_sequence_alone() -> None:
    arrays, cu_q, cu_k = packed_inputs()
    bias = np.random.default_rng(7).standard_normal((3, HEADS, 7, 7))
    out, lse = reference.attention_varlen(**arrays, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=bias, window=(3, 1))
    assert not out[[0, 12, 13]].any() and np.isneginf(lse[:, [0, 12, 13]]).all()
    for b, (first, last, key, key_stop) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        own = bias[b, :, : last - first, : key_stop - key]
        q, k, v = arrays["q"][None, first:last], arrays["k"][None, key:key_stop], arrays["v"][None, key:key_stop]
        own_out, own_lse = reference.attention(q, k, v, bias=own, window=(3, 1))
        np.testing.assert_array_equal(out[first:last], own_out[0])
        np.testing.assert_array_equal(lse[:, first:last], own_lse[0])


def test_hidden_data_and_empty_rows() -> None:
    """Padding may hold anything; a row that sees nothing is 0, -inf, with gradients 0, and its sink gets dlse."""
    arrays = inputs()
    q_lengths, kv_lengths = np.array([7, 0]), np.array([5, KEYS])  # causal: the first two rows of the first see nothing
    options: dict[str, Any] = {"causal": True, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    clean = reference.attention(**arrays, **options)
    arrays["q"][0, 7:], arrays["q"][1] = np.nan, np.inf
    arrays["k"][0, 5:], arrays["v"][0, 5:], arrays["v"][1] = np.nan, -np.inf, np.nan
    poisoned = reference.attention(**arrays, **options)
    for x, y in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not poisoned[0][0, :2].any() and np.isneginf(poisoned[1][0, :, :2]).all()

    sink = np.array([-1.0, 0.0, 2.0, -np.inf])
    out, lse = reference.attention(**arrays, **options, sink=sink)
    assert not out[0, :2].any() and (lse[0, :, 0] == sink).all() and np.isneginf(lse[0, :, 7:]).all()
    dlse = np.zeros(lse.shape)
    dlse[0, :, 0] = [1.0, 2.0, 3.0, 4.0]
    grads = reference.attention_backward(np.zeros(out.shape), **arrays, **options, sink=sink, dlse=dlse)
    np.testing.assert_array_equal(grads["sink"], [1.0, 2.0, 3.0, 0.0])
    assert not any(grads[name].any() for name in "qkv")


def test_whole_row_of_the_lowest_score_is_uniform() -> None:
    arrays = inputs()
    lowest = np.finfo(np.float32).min
    bias = np.full((ROWS, KEYS), lowest)
    out, lse = reference.attention(**arrays, bias=bias)
    np.testing.assert_allclose(out, np.repeat(arrays["v"].mean(axis=1, keepdims=True), 2, axis=2).repeat(ROWS, axis=1))
    assert (lse == lowest).all()
    grads = reference.attention_backward(np.ones(out.shape), **arrays, bias=bias)
    np.testing.assert_allclose(grads["v"], np.full(grads["v"].shape, ROWS * HEADS / KV_HEADS / KEYS))


def test_merged_lse_gives_each_parts_gradients() -> None:
    arrays = inputs()
    out, lse = reference.attention(**arrays)
    dout = np.random.default_rng(8).standard_normal(out.shape)
    whole = reference.attention_backward(dout, **arrays)
    first, second = (
        reference.attention_backward(dout, arrays["q"], arrays["k"][:, keys], arrays["v"][:, keys], out=out, lse=lse)
        for keys in (slice(0, 5), slice(5, None))
    )
    np.testing.assert_allclose(first["q"] + second["q"], whole["q"], atol=1e-13)
    for name in "kv":
        np.testing.assert_allclose(np.concatenate([first[name], second[name]], axis=1), whole[name], atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_naive_is_rounded(dtype: str) -> None:
    """`round_to` gives results that the type holds, about one rounding away from the exact ones."""
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = {name: x.astype(kind) for name, x in inputs().items()}
    out, _ = reference.attention(**arrays, round_to=dtype)
    np.testing.assert_array_equal(out, out.astype(kind).astype(out.dtype))
    assert out.dtype == (np.float64 if dtype == "float64" else np.float32)
    error = np.abs(out - reference.attention(**arrays, work=np.longdouble)[0]).max()
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    assert eps / 50 < error < 10 * eps


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(causal: bool) -> None:
    """Both agree where options coincide: square causal, bool mask or bias, grouped heads, scale; gradients, too."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(9)
    shapes = {"q": (BATCH, KEYS, HEADS, DIM), "k": (BATCH, KEYS, KV_HEADS, DIM), "v": (BATCH, KEYS, KV_HEADS, DIM_V)}
    arrays: dict[str, Any] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    bias = None if causal else rng.standard_normal((1, HEADS, KEYS, KEYS))
    tensors = {name: torch.tensor(x).requires_grad_() for name, x in arrays.items()}
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors.values()),
        attn_mask=None if bias is None else torch.tensor(bias),
        is_causal=causal,
        scale=0.3,
        enable_gqa=True,
    ).transpose(1, 2)
    dout = rng.standard_normal(attended.shape)
    attended.backward(torch.tensor(dout))
    out, _ = reference.attention(**arrays, causal=causal, bias=bias, softmax_scale=0.3)
    np.testing.assert_allclose(out, attended.detach().numpy(), atol=1e-12)
    grads = reference.attention_backward(dout, **arrays, causal=causal, bias=bias, softmax_scale=0.3)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(grads[name], tensor.grad.numpy(), atol=1e-12)
