"""Attention with FP8 arrays and out_dtype keeps every clause of their meaning, on every device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import gaussian, np_dtype
from devices import Device
from fp8 import CODES, Quantized, assert_near, exact, numbers_of, quantized
from libraries import Exporter
from numpy.typing import NDArray
from tolerance import EPS

import cuflash
from cuflash import reference

Array = NDArray[Any]

RNG = np.random.default_rng(0)
RESULTS = ("float16", "bfloat16", "float32")
SCALES = ("q_scale", "k_scale", "v_scale")


def problem(per: str = "token", seqlens: tuple[int, int] = (37, 53), packed: bool = False) -> list[Quantized]:
    """Make q, k, v in FP8, of two sequences and four query heads on two."""
    shapes = [
        (2, n, h, d) for n, h, d in zip((seqlens[0], seqlens[1], seqlens[1]), (4, 2, 2), (24, 24, 40), strict=True)
    ]
    arrays = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [quantized(x.reshape(-1, *x.shape[2:]) if packed else x, per) for x in arrays]


def attend(device: Device, arrays: list[Quantized], **options: Any) -> Any:
    """Compute attention on the codes and scales of q, k, v."""
    scales: dict[str, Any] = {name: x.scale for name, x in zip(SCALES, arrays, strict=True)}
    inputs = [x.codes for x in arrays]
    return device.get(cuflash.attention(*device.put(inputs), **device.put(scales | options)))


@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("out_dtype", [None, *RESULTS])
def test_it_is_attention_on_the_dequantised_inputs(device: Device, per: str, out_dtype: str | None) -> None:
    arrays = problem(per)
    out, lse = attend(device, arrays, causal=True, return_lse=True, out_dtype=out_dtype)
    assert out.dtype.name == (out_dtype or "bfloat16")
    expected = exact(device.name, CODES, [x.numbers for x in arrays], causal=True)
    assert_near(out, expected)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, expected.lse, atol=1e-5)


def options_of(name: str) -> dict[str, Any]:
    """Return a forward option, or several, for problems of `problem`."""
    lengths = {"q_lengths": np.array([37, 20], np.int32), "kv_lengths": np.array([53, 31], np.int32)}
    options: dict[str, dict[str, Any]] = {
        "window": {"window": (9, 3)},
        "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
        "bias": {"bias": gaussian(RNG, (2, 1, 37, 53), "float32")},
        "mask": {"mask": RNG.random((4, 37, 53)) < 0.7},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.06], np.float32)},
        "sink": {"sink": np.array([0.0, 1, -1, 2], np.float32)},
        "lengths": lengths | {"causal": True},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "block mask": {"block_mask": RNG.random((37, 53)) < 0.8},
        "precision": {"precision": "tf32"},
    }
    return options[name]


OPTIONS = ("window", "softcap", "bias", "mask", "alibi", "sink", "lengths", "dropout", "block mask", "precision")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries", [CODES, "float16", "bfloat16"])
def test_with_every_option(device: Device, name: str, queries: str) -> None:
    options = options_of(name)
    q, k, v = problem()
    scales = {"k_scale": k.scale, "v_scale": v.scale}
    codes, numbers = q.codes, q.numbers
    if queries != CODES:
        codes = q.numbers.astype(np_dtype(queries))
        numbers = codes.astype(np.float64)
    else:
        scales["q_scale"] = q.scale
    expected = exact(device.name, queries, (numbers, k.numbers, v.numbers), **options)
    if name == "block mask":
        options = {"block_mask": cuflash.BlockMask.from_dense(options["block_mask"])}
    arrays = device.put((codes, k.codes, v.codes))
    out = device.get(cuflash.attention(*arrays, **device.put(scales | options), out_dtype="float32"))
    assert_near(out, expected)


@pytest.mark.parametrize("out_dtype", RESULTS)
def test_packed(device: Device, out_dtype: str) -> None:
    q, k, v = problem(packed=True)
    edges = np.array([0, 30, 70], np.int32), np.array([0, 50, 97], np.int32)
    scales: dict[str, Any] = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
    for x in (q.codes, k.codes, v.codes):
        x[-9 if x is not q.codes else -4 :] = 0x7F  # beyond the last sequence
    for x in (k.scale, v.scale):
        x[97:] = np.nan
    arrays = device.put((q.codes, k.codes, v.codes, *edges))
    out = device.get(cuflash.attention_varlen(*arrays, **device.put(scales), causal=True, out_dtype=out_dtype))
    numbers = [np.nan_to_num(numbers_of(x.codes, np.nan_to_num(x.scale))) for x in (q, k, v)]
    assert out.dtype.name == out_dtype
    assert_near(out, exact(device.name, CODES, numbers, *edges, causal=True))
    assert not out[70:].any()


def test_16_bit_queries_have_their_own_result(device: Device) -> None:
    _, k, v = problem()
    for dtype in ("float16", "bfloat16"):
        q = gaussian(RNG, (2, 37, 4, 24), dtype)
        for out_dtype in (None, *RESULTS):
            scales = device.put({"k_scale": k.scale, "v_scale": v.scale})
            out = device.get(cuflash.attention(*device.put((q, k.codes, v.codes)), **scales, out_dtype=out_dtype))
            assert out.dtype.name == (out_dtype or dtype)
            assert_near(out, exact(device.name, dtype, (q.astype(np.float64), k.numbers, v.numbers)))


def test_scales_are_1_by_default_and_broadcast(device: Device) -> None:
    arrays = problem()
    plain = device.get(cuflash.attention(*device.put([x.codes for x in arrays]), out_dtype="float32"))
    assert_near(plain, exact(device.name, CODES, [numbers_of(x.codes) for x in arrays]))
    shapes = [(2, 1, 1), (1, 53, 1), (1, 1, 2)]
    spread = [
        Quantized(x.codes, scale, numbers_of(x.codes, np.broadcast_to(scale, x.codes.shape[:-1])))
        for x, shape in zip(arrays, shapes, strict=True)
        for scale in (RNG.uniform(0.5, 2, shape).astype(np.float32),)
    ]
    of_spread = exact(device.name, CODES, [x.numbers for x in spread])
    assert_near(attend(device, spread, out_dtype="float32"), of_spread)
    # Any strides, the last axis' too.
    wide = [x._replace(scale=np.broadcast_to(x.scale, x.codes.shape[:-1]).copy()) for x in spread]
    strided = [x._replace(scale=np.ascontiguousarray(x.scale.swapaxes(1, 2)).swapaxes(1, 2)) for x in wide]
    expected = attend(device, wide, out_dtype="float32")
    np.testing.assert_array_equal(attend(device, strided, out_dtype="float32"), expected)


def test_float8_of_ml_dtypes_is_uint8() -> None:
    q, k, v = problem()
    scales: dict[str, Any] = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
    expected = cuflash.attention(q.codes, k.codes, v.codes, **scales)
    for kinds in ((True, True, True), (False, True, False), (True, False, False)):
        arrays = [
            x.codes.view(ml_dtypes.float8_e4m3fn) if is_float else x.codes
            for x, is_float in zip((q, k, v), kinds, strict=True)
        ]
        np.testing.assert_array_equal(cuflash.attention(*arrays, **scales), expected, strict=True)


@pytest.mark.parametrize("strides", ["every second row", "heads first", "fused"])
def test_strides_of_codes(device: Device, strides: str) -> None:
    arrays = problem()
    expected = attend(device, arrays, out_dtype="float32")
    if strides == "every second row":
        moved = [np.repeat(x.codes, 2, axis=1)[:, ::2] for x in arrays]
    elif strides == "heads first":
        moved = [np.ascontiguousarray(x.codes.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    else:
        fused = np.concatenate([x.codes for x in arrays[1:]], axis=-1)
        moved = [arrays[0].codes, fused[..., :24], fused[..., 24:]]
    got = attend(device, [x._replace(codes=y) for x, y in zip(arrays, moved, strict=True)], out_dtype="float32")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e30])
@pytest.mark.parametrize("queries", ["float8_e4m3fn", "float16"])
def test_unused_places_never_matter(device: Device, scale: float, queries: str) -> None:
    """Codes and scales beyond the lengths, and of keys that a mask hides from everybody, never matter."""
    arrays = problem()
    mask = np.ones((53,), bool)
    mask[3] = False
    lengths = {"q_lengths": np.array([37, 11], np.int32), "kv_lengths": np.array([40, 53], np.int32)}
    options = {**lengths, "mask": mask, "return_lse": True}
    if queries == "float16":
        arrays[0] = arrays[0]._replace(codes=arrays[0].numbers.astype(np.float16))

    def run() -> Any:
        scales = {f"{name}_scale": x.scale for name, x in zip("qkv", arrays, strict=True)}
        if queries == "float16":
            del scales["q_scale"]
        codes = device.put([x.codes for x in arrays])
        return device.get(cuflash.attention(*codes, **device.put(scales | options)))

    expected = run()
    poison = 0x7F if queries == "float8_e4m3fn" else np.nan
    arrays[0].codes[1, 11:], arrays[0].scale[1, 11:] = poison, scale
    for x in arrays[1:]:
        for place in ((0, slice(40, None)), (slice(None), 3)):
            x.codes[place], x.scale[place] = 0xFF, scale
    for x, y in zip(run(), expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(expected[0].astype(np.float32)).all()


def test_nan_of_a_visible_key_is_seen(device: Device) -> None:
    q, k, v = problem()
    v.codes[0, 5, 0, 0] = 0x7F
    out = attend(device, [q, k, v])
    assert np.isnan(out[0, :, :2, 0].astype(np.float32)).all()


@pytest.mark.parametrize("direction", ["backward", "vjp"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("queries", ["float8_e4m3fn", "float16"])
def test_gradients_are_refused_before_anything_is_computed(
    device: Device, monkeypatch: pytest.MonkeyPatch, direction: str, packed: bool, queries: str
) -> None:
    q, k, v = problem(packed=packed)
    edges = (np.array([0, 74], np.int32), np.array([0, 106], np.int32)) if packed else ()
    out = np.zeros((*q.codes.shape[:-1], 40), np_dtype("bfloat16"))
    lse = np.zeros((4, 74) if packed else (2, 4, 37), np.float32)
    codes = q.codes if queries == "float8_e4m3fn" else q.numbers.astype(np.float16)
    scales = device.put({"k_scale": k.scale, "v_scale": v.scale})
    arrays, further, edges = device.put(((codes, k.codes, v.codes), (out, lse), edges))
    family = "attention_varlen" if packed else "attention"
    getattr(cuflash, family)(*arrays, *edges, **scales, return_lse=True)  # so that this forward pass is known

    def nothing_is_computed(*_: Any) -> Any:
        raise AssertionError

    given = (*arrays, *edges) if direction == "vjp" else (further[0], *arrays, *further, *edges)
    function = getattr(cuflash, f"{family}_{direction}")
    with monkeypatch.context() as patch:  # which ends before the device's
        patch.setattr("cuflash.frontend.call.backend_of", nothing_is_computed)
        # A pass that is known would be computed here; NumPy's are never known, and ask, too.
        if direction == "vjp" and device.name != "numpy":
            patch.setattr("cuflash.frontend.partial.repeated", nothing_is_computed)
        with pytest.raises(NotImplementedError, match="gradients .* FP8 .*uint8"):
            function(*given, **scales)


def codes(*shape: int) -> Array:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_out_dtype_may_name_ones_own(device: Device, dtype: str) -> None:
    arrays = device.put([gaussian(RNG, (1, 4, 2, 8), dtype) for _ in range(3)])
    own = device.get(cuflash.attention(*arrays))
    for name in (dtype, np_dtype(dtype), np_dtype(dtype).type):
        np.testing.assert_array_equal(device.get(cuflash.attention(*arrays, out_dtype=name)), own, strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_results_of_16_bits_are_never_rounded_between(device: Device, dtype: str) -> None:
    q, k, v = (gaussian(RNG, (2, 30, 4 if x == "q" else 2, 32), dtype) for x in "qkv")
    out, lse = device.get(cuflash.attention(*device.put((q, k, v)), causal=True, out_dtype="float32", return_lse=True))
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    assert out.dtype == np.float32
    # Kernels on 16 bits round the weights, as for a result of 16 bits, but not the result.
    np.testing.assert_allclose(out, expected, rtol=0, atol=EPS[dtype])
    assert (out != out.astype(q.dtype)).mean() > 0.9
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float16", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_gradients_of_other_results(device: Device, dtype: str, out_dtype: str, packed: bool) -> None:
    """dout and out have the result's dtype, gradients those of their inputs."""
    shape = (30,) if packed else (2, 15)
    q, k, v = (gaussian(RNG, (*shape, heads, 16), dtype) for heads in (4, 2, 2))
    bias = gaussian(RNG, (4, 15, 15), dtype)
    sink = np.zeros(4, np.float32)
    dout = gaussian(RNG, q.shape, out_dtype)
    edges = (np.array([0, 15, 30], np.int32),) * 2 if packed else ()
    options: dict[str, Any] = {"bias": bias, "sink": sink, "causal": True}
    of_device = device.put(((q, k, v, *edges), options, dout))
    vjp = cuflash.attention_varlen_vjp if packed else cuflash.attention_vjp
    (out, lse), backward = vjp(*of_device[0], **of_device[1], out_dtype=out_dtype, return_lse=True)
    grads = backward(of_device[2])
    assert str(out.dtype) == out_dtype
    reference_backward = reference.attention_varlen_backward if packed else reference.attention_backward
    expected = reference_backward(dout, q, k, v, *edges, **options)
    names = ("q", "k", "v", "bias", "sink")
    for name, got, like in zip(names, device.get(grads), (q, k, v, bias, sink), strict=True):
        assert got.dtype == like.dtype
        atol = (8e-3 if "bfloat16" in (dtype, out_dtype) else 1e-3) * np.abs(expected[name]).max()
        np.testing.assert_allclose(got.astype(np.float64), expected[name], rtol=EPS[dtype], atol=atol)
    stateless_backward: Any = cuflash.attention_varlen_backward if packed else cuflash.attention_backward
    q_k_v, of_edges = of_device[0][:3], of_device[0][3:]
    stateless = stateless_backward(of_device[2], *q_k_v, out, lse, *of_edges, **of_device[1], out_dtype=out_dtype)
    for got, same in zip(stateless, grads, strict=True):
        np.testing.assert_array_equal(device.get(got), device.get(same))
    with pytest.raises(TypeError, match="dout: expected dtype"):
        backward(device.put(dout.astype(np_dtype(dtype if dtype != out_dtype else "float32"))))


def test_float32_gradients_are_not_rounded_through_16_bits(device: Device) -> None:
    """The parts of dout below 16 bits decide here, because the values of a key add up to 0."""
    q, k, v = (gaussian(RNG, (1, 6, 1, 16), "float16") for _ in range(3))
    v[..., 8:] = -v[..., :8]
    dout = (1 + RNG.uniform(-1, 1, v.shape) * 2.0**-14).astype(np.float32)
    _, backward = cuflash.attention_vjp(*device.put((q, k, v)), out_dtype="float32")
    got = device.get(backward(device.put(dout)))
    expected = reference.attention_backward(dout.astype(np.float64), q, k, v)
    rounded = reference.attention_backward(dout.astype(np.float16).astype(np.float64), q, k, v)
    error, rounded_error = (np.abs(x.astype(np.float64) - expected["q"]).max() for x in (got[0], rounded["q"]))
    assert error < rounded_error / 4


@pytest.mark.parametrize("queries", ["float8_e4m3fn", "float16"])
def test_out_has_the_result_s_dtype(device: Device, queries: str) -> None:
    q, k, v = problem()
    given = q.codes if queries == "float8_e4m3fn" else q.numbers.astype(np.float16)
    arrays = device.put((given, k.codes, v.codes))
    scales = device.put({"k_scale": k.scale, "v_scale": v.scale})
    expected = device.get(cuflash.attention(*arrays, **scales, out_dtype="float32"))
    storage = np.full((2, 37, 4, 90), 7, np.float32)
    target = device.put(storage)[..., 10:50]
    assert cuflash.attention(*arrays, **scales, out_dtype="float32", out=target) is target
    np.testing.assert_array_equal(device.get(target), expected)
    with pytest.raises(TypeError, match="out: expected dtype float32"):
        cuflash.attention(*arrays, **scales, out_dtype="float32", out=device.put(expected.astype(np.float16)))


def test_out_must_not_share_memory(device: Device) -> None:
    """A scale is an input like any other."""
    arrays = device.put([codes(1, 4, 1, 8)] * 3)
    memory = device.put(np.ones((1, 4, 1, 8), np.float32))
    with pytest.raises(ValueError, match="memory shared with k_scale"):
        cuflash.attention(*arrays, k_scale=memory[..., 0], out_dtype="float32", out=memory)


def test_repeated_calls_see_new_values(device: Device) -> None:
    for _ in range(3):
        arrays = problem()
        out = attend(device, arrays, kv_lengths=np.array([53, 20], np.int32), out_dtype="float16")
        assert_near(out, exact(device.name, CODES, [x.numbers for x in arrays], kv_lengths=np.array([53, 20])))


def test_forward_bits_repeat_whatever_is_asked_for(device: Device) -> None:
    arrays = problem()
    plain = attend(device, arrays)
    np.testing.assert_array_equal(attend(device, arrays, return_lse=True)[0], plain)
    np.testing.assert_array_equal(attend(device, arrays, deterministic=True), plain)
    causal = attend(device, arrays, causal=True)
    np.testing.assert_array_equal(attend(device, arrays, window=(None, 0)), causal)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (1, 1)])
def test_empty_and_single_rows(device: Device, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (codes(1, n, 2, 8) + np.uint8(0x38) for n in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = device.get(cuflash.attention(*device.put((q, k, v)), return_lse=True, out_dtype="float32"))
    assert out.shape == (1, seqlen_q, 2, 8)
    assert (out == (1 if seqlen_k else 0)).all()
    assert np.isfinite(lse).all() == bool(seqlen_k or not seqlen_q)


def test_bare_exporters() -> None:
    arrays = problem()
    scales: dict[str, Any] = {name: x.scale for name, x in zip(SCALES, arrays, strict=True)}
    expected = cuflash.attention(*(x.codes for x in arrays), **scales, out_dtype="float32")
    wrapped: dict[str, Any] = {name: Exporter(x) for name, x in scales.items()}
    got = cuflash.attention(*(Exporter(x.codes) for x in arrays), **wrapped, out_dtype="float32")
    np.testing.assert_array_equal(got, expected, strict=True)
