"""The error rule holds to the letter, in both passes, on inputs that Gaussian ones say nothing about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import devices
import numpy as np
import pytest
import tolerance
from cases import DTYPES, Case, accum_dtype, gaussian, gaussian_case, np_dtype, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device
from error_rule import INPUTS, NAMES, assert_error_rule, forward_by
from numpy.typing import NDArray

from cuflash.gpu import launch, split
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles

Array = NDArray[Any]

# A right result comes without a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HOST = Device("numpy", np)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", INPUTS, ids=NAMES)
def test_error_rule(device: Device, dtype: str, causal: bool, make: Callable[[str], Case]) -> None:
    assert_error_rule(device, make(dtype).with_options(causal=causal))


# These compute float32 on the CPU device: portable kernels, float16 parts by mma.sync and by wgmma.
FAMILIES = {"sm_75": ("plain", "forward"), "sm_80": ("ampere", "parts_forward"), "sm_90": ("hopper", "split_forward")}


@contextmanager
def float32_kernels(architecture: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Give a device of that family, with its own sums."""
    sums, entry = FAMILIES[architecture]
    monkeypatch.setenv("CUFLASH_CPU_DEVICE_SUMS", sums)
    with forward_by(entry, devices.device_of(architecture)) as device:
        yield device


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", INPUTS, ids=NAMES)
def test_error_rule_of_every_float32_family(
    architecture: str, make: Callable[[str], Case], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with float32_kernels(architecture, monkeypatch) as device:
        assert_error_rule(device, make("float32").with_options(causal=causal))


def balanced(seed: int, dims: tuple[int, int] = (64, 64), **options: Any) -> Case:
    """Make a case whose channels balance: q's are large where k's are small, and v's where dout's are."""
    case = gaussian_case(seed, "float32", (100, 130), dims=dims, **options)
    of_keys, of_values = (10.0 ** np.random.default_rng(seed).uniform(-4, 4, dim) for dim in dims)
    factors = {"q": 1 / of_keys, "k": of_keys, "v": of_values, "dout": 1 / of_values}
    return case.with_inputs(**{name: (getattr(case, name) * x).astype(np.float32) for name, x in factors.items()})


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("dims", [(64, 64), (96, 128), (256, 256)], ids=str)
def test_channels_that_balance(architecture: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are ordinary, and every channel of every gradient is as exact as its own size asks."""
    with float32_kernels(architecture, monkeypatch) as device:
        case = balanced(1, dims, causal=True)
        assert_error_rule(device, case)
        on_device = case.on(device)
        out, lse = on_device.forward()
        found, exact = on_device.backward(out, lse), case.reference_backward()
        pairs = [(out, case.reference_forward()[0]), *((found[name], exact[name]) for name in ("q", "k", "v"))]
        for x, y in pairs:
            assert_channels_are_exact(x, y, axis=(0, 1, 2))


def assert_channels_are_exact(found: Array, exact: Array, axis: tuple[int, ...]) -> None:
    """Assert that errors are small against the largest number along `axis`, which lets channels stand apart."""
    error, size = (np.abs(x).max(axis=axis) for x in (found - exact, exact))
    assert (error <= 32 * np.finfo(np.float32).eps * size).all()


def balanced_heads(
    seed: int,
    dims: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    seqlens: tuple[int, int] = (100, 130),
    packed: bool = False,
    **options: Any,
) -> Case:
    """Make a case in which the channels of each KV head balance in a way of their own.

    Those of the last head are ordinary. Packed, two sequences have the same heads.
    """
    case = gaussian_case(seed, "float32", seqlens, heads, dims, 1 if packed else 2, **options)
    rng = np.random.default_rng(seed)
    of_keys, of_values = (rng.uniform(-4, 4, (len(case.q), 1, heads[1], dim)) for dim in dims)
    of_keys[-1, :, -1], of_values[-1, :, -1] = 0, 0
    exponents = {"q": -of_keys, "k": of_keys, "v": of_values, "dout": -of_values}
    inputs = {}
    for name, exponent in exponents.items():
        x = getattr(case, name)
        inputs[name] = (x * 10.0 ** np.repeat(exponent, x.shape[2] // heads[1], axis=2)).astype(np.float32)
    if not packed:
        return case.with_inputs(**inputs)
    begins_q, begins_k = (np.array([0, rows // 3, rows], np.int32) for rows in seqlens)
    packed_inputs = {name: x[0] for name, x in inputs.items()}
    assert case.dlse is not None
    return replace(case.with_inputs(**packed_inputs, dlse=case.dlse[0]), cu_seqlens=(begins_q, begins_k))


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 72), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"packed": True}], ids=str)
def test_every_head_has_its_own_channels(
    architecture: str,
    dims: tuple[int, int],
    heads: tuple[int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel multiplies its results by the factors of their own KV head, also if few gradients are wanted."""
    case = balanced_heads(3, dims, heads, **options)
    with float32_kernels(architecture, monkeypatch) as device:
        on_device = case.on(device)
        out, lse = on_device.forward()
        grads = on_device.backward(out, lse)
        some = [on_device.backward(out, lse, grads=names) for names in (("q",), ("k",), ("v",), ("q", "v"))]
    exact = {"out": case.reference_forward()[0], **case.reference_backward()}
    for name, x in {"out": out, **grads}.items():
        assert_channels_are_exact(x, exact[name], axis=(-3,))
    for each in some:
        for name, x in each.items():
            assert x is None or same_bits(x, grads[name])


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_channels_of_splits_of_the_keys() -> None:
    """Each split's result is multiplied by the factors, so that what is merged needs them no more."""
    case = balanced_heads(4, (64, 96), seqlens=(20, 700))
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((8, 0), num_sms=40)):
        out, lse = case.on(HOST).forward()
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert "parts_forward" in entries and "merge_splits" in entries
    exact_out, exact_lse = case.reference_forward()
    assert_channels_are_exact(out, exact_out, axis=(-3,))
    np.testing.assert_allclose(lse, exact_lse, rtol=32 * tolerance.EPS["float32"])


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_splits_of_one_size_have_no_factors_of_channels() -> None:
    """Nobody finds factors there, and the kernel reads none."""
    case = gaussian_case(5, "float32", (20, 700), dims=(64, 64))
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((8, 0))):
        out, lse = case.on(HOST).forward(split_size=256)
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert {"split_rows", "parts_forward"} <= entries and "split_channels" not in entries
    case.assert_forward(out, lse)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_ordinary_channels_have_no_factors(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit is as without them, also where some rows are a million times as large, or not finite."""
    case = gaussian_case(2, "float32", (100, 130), causal=True)
    case.q[0, 3] *= 1e6
    case.v[0, 5, 0] = np.nan
    results = []
    for has_channels in (True, False):
        monkeypatch.setattr(split, "_has_channels", lambda problem, has=has_channels: has)
        with float32_kernels(architecture, monkeypatch) as device:
            on_device = case.on(device)
            out, lse = on_device.forward()
            results.append([out, lse, *on_device.backward(out, lse).values()])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (128, 128), (256, 256)])
def test_error_rule_with_options(device: Device, dtype: str, dims: tuple[int, int]) -> None:
    """The rule needs no help with all options of scores at once, on enough elements."""
    rng = np.random.default_rng(9)
    accum = accum_dtype(np_dtype(dtype))
    case = gaussian_case(
        9,
        dtype,
        (140, 170),
        dims=dims,
        window=(90, 20),
        softcap=20.0,
        bias=gaussian(rng, (4, 140, 170), dtype),
        alibi_slopes=np.array([0.5, 0.1, 0.02, 0.3], accum),
        sink=np.array([0.0, 3.0, -2.0, 1.0], accum),
        kv_lengths=np.array([170, 99], np.int32),
        dropout_p=0.1,
        dropout_seed=1,
    )
    assert_error_rule(device, case)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_lse(device: Device, dtype: str, sign: int, head_dim: int) -> None:
    """All scores lie near 1e4 or -1e4, where float32 has steps of 1e-3, and many of them have weight.

    Their errors average out, unless sums are cut off instead of rounded.
    """
    assert_error_rule(device, large_scores(dtype, sign, head_dim))


def large_scores(dtype: str, sign: int, head_dim: int, **sizes: Any) -> Case:
    case = gaussian_case(14, dtype, (140, 150), dims=(head_dim, head_dim), softmax_scale=0.125, **sizes)
    q, k = case.q.copy(), case.k.copy()
    q[..., 0], k[..., 0] = sign * 283.3, 283.3  # not what float16 holds
    return replace(case, q=q, k=k)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize(("architecture", "sums"), [("sm_80", "ampere"), ("sm_90", "hopper")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_lse_with_the_sums_of_tensor_cores(
    architecture: str, sums: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds on the CPU device with sums that are cut off; it rounds plain ones."""
    monkeypatch.setenv("CUFLASH_CPU_DEVICE_SUMS", sums)
    device = devices.device_of(architecture)
    with device.active():
        assert_error_rule(device, large_scores("float32", 1, head_dim, batch=1, heads=(2, 1)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_of_slopes_is_that_of_the_given_out(device: Device, dtype: str) -> None:
    """Distances multiply the rounding of `out` that is left in delta; nothing else may be lost."""
    case = gaussian_case(
        15,
        dtype,
        (100, 200),
        dims=(64, 64),
        alibi_slopes=np.array([0.5, 0.1, 0.02, 0.3], np.float32),
        q_lengths=np.array([100, 71], np.int32),
        kv_lengths=np.array([200, 157], np.int32),
        causal=True,
    )
    out, lse = case.on(device).forward()
    found = case.on(device).backward(out, lse)["alibi_slopes"]
    np.testing.assert_allclose(found, case.reference_backward(out, lse)["alibi_slopes"], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["own", "float32"])
def test_finfo_min_is_a_score(device: Device, dtype: str, bias_dtype: str) -> None:
    """A row of finfo.min is uniform, a finfo.min among other scores has no weight, and -inf hides."""
    bias_type = np_dtype(dtype if bias_dtype == "own" else "float32")
    lowest = -float(np.nextafter(bias_type.type(np.inf), bias_type.type(0)))
    case = gaussian_case(10, dtype, (6, 40), dims=(16, 16))
    case = replace(case, q=np.zeros_like(case.q))  # scores would not vanish in a sum with float16's lowest number
    bias = np.zeros((6, 40), bias_type)
    bias[0] = lowest
    bias[1, 1:] = lowest
    bias[2, :7], bias[2, 7:] = lowest, -np.inf
    bias[3] = -np.inf
    case = case.with_options(bias=bias)
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    v = np.repeat(case.v.astype(np.float64), 2, axis=2)
    eps = tolerance.EPS[dtype]
    for row, seen in ((0, slice(None)), (1, slice(0, 1)), (2, slice(0, 7)), (4, slice(None))):
        np.testing.assert_allclose(out[:, row].astype(np.float64), v[:, seen].mean(axis=1), rtol=4 * eps, atol=4 * eps)
    assert not out[:, 3].any() and np.isneginf(lse[..., 3]).all()
    assert np.isfinite(lse[..., [0, 1, 2, 4, 5]]).all()
    grads = on_device.backward(out, lse, dlse=None)
    for name, grad in grads.items():
        assert np.isfinite(grad.astype(np.float64)).all(), f"d{name}"
    assert not grads["bias"][3].any() and not grads["q"][:, 3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0, 1e-30])
def test_any_finite_scale(device: Device, dtype: str, scale: float) -> None:
    """Negative scales reverse the order of the keys; a maximum taken before scaling would overflow."""
    case = gaussian_case(11, dtype, (65, 140), dims=(64, 64), softmax_scale=scale)
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [1e-320, 1e-40, 1e-5, 3e38, 1e300])
def test_any_positive_softcap(device: Device, dtype: str, softcap: float) -> None:
    """Softcap may be one with which float32 (float64) holds neither the bound nor scores over it, or a score 0."""
    case = gaussian_case(17, dtype, (20, 300), (2, 1), (64, 64), 1, softcap=softcap)
    q = case.q.copy()
    q[:, 3] = 0
    case = case.with_inputs(q=q)
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("softcap", [1e-20, 1e-5, 3e38])
def test_any_positive_softcap_on_hopper(dtype: str, softcap: float) -> None:
    """Other kernels run for small bounds, as weights of so small scores do not tell the derivative."""
    device = devices.device_of("sm_90")
    devices.forget_launches()
    with device.active():
        test_any_positive_softcap(device, dtype, softcap)
    taken = {x.kernel.entry for x in launch._launches.values()}
    assert "forward_sm90" in taken
    assert (sm90_backward_tiles.NARROW in taken) == (softcap > 1)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", ["alibi_slopes", "bias", "window"])
def test_smallest_softcap_beside_others_on_hopper(dtype: str, option: str) -> None:
    """Slopes in units of the smallest softcap are huge."""
    values: dict[str, Any] = {
        "alibi_slopes": np.array([0.5, 8], np.float32),
        "bias": gaussian(np.random.default_rng(18), (70, 300), dtype),
        "window": (9, 3),
    }
    case = gaussian_case(18, dtype, (70, 300), (2, 1), (64, 64), 1, softcap=1e-40, **{option: values[option]})
    device = devices.device_of("sm_90")
    devices.forget_launches()
    with device.active():
        out, lse = case.on(device).forward()
    case.assert_forward(out, lse)
    assert {x.kernel.entry for x in launch._launches.values()} == {"forward_sm90"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0, "sink": np.zeros(1, np.float32)}])
@pytest.mark.parametrize("keys", [150, 3000])  # so many are split among thread blocks on Hopper
def test_nan_of_a_query(device: Device, dtype: str, options: dict[str, Any], keys: int) -> None:
    """NaN comes out in the query's row and nowhere else, and in the gradients of all that the row saw."""
    accum = accum_dtype(np_dtype(dtype))
    options = {name: x.astype(accum) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    case = gaussian_case(16, dtype, (6, keys), (1, 1), (64, 64), 1, **options)
    q = case.q.copy()
    q[0, 4, 0, 7] = np.nan
    bad = case.with_inputs(q=q).on(device)
    (out, lse), (bad_out, bad_lse) = case.on(device).forward(), bad.forward()
    grads = bad.backward(bad_out, bad_lse)
    assert np.isnan(bad_out[0, 4, 0].astype(np.float32)).all() and np.isnan(bad_lse[0, 0, 4])
    bad_out[0, 4, 0], bad_lse[0, 0, 4] = out[0, 4, 0], lse[0, 0, 4]
    np.testing.assert_array_equal(bad_out, out)
    np.testing.assert_array_equal(bad_lse, lse)
    seen = keys - 1 if "causal" in options else keys
    for gradient in (grads["q"][0, 4, 0], grads["k"][0, :seen, 0], grads["v"][0, :seen, 0]):
        assert np.isnan(gradient.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_give_the_mean(device: Device, dtype: str) -> None:
    """Equal weights add up to 1 at any length."""
    for seqlen_k in (1, 2, 3, 100, 129, 1000):
        case = gaussian_case(12, dtype, (3, seqlen_k), dims=(8, 8))
        case = replace(case, k=np.zeros_like(case.k), v=np.ones_like(case.v))
        out, lse = case.on(device).forward()
        np.testing.assert_allclose(out.astype(np.float64), 1, rtol=tolerance.EPS[dtype])
        eps = tolerance.EPS[lse.dtype.name]
        np.testing.assert_allclose(lse, np.log(seqlen_k), rtol=4 * eps, atol=4 * eps)


def tf32(x: Array) -> Array:
    """Round float32 to TF32's ten mantissa bits, to nearest."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def plain_tf32(case: Case) -> dict[str, Array]:
    """Compute plain causal attention and its gradients, exact but for the factors of all products, which are TF32."""
    repeats = case.q.shape[2] // case.k.shape[2]
    q, dout = tf32(case.q).astype(np.float64), tf32(case.dout).astype(np.float64)
    k, v = (np.repeat(tf32(x).astype(np.float64), repeats, axis=2) for x in (case.k, case.v))
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("bihd,bjhd->bhij", q, k) * scale
    scores[..., np.tri(*scores.shape[-2:]) == 0] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    rounded_p = tf32(p).astype(np.float64)
    out = np.einsum("bhij,bjhd->bihd", rounded_p, v)
    delta = np.einsum("bihd,bihd->bhi", case.dout.astype(np.float64), out) - case.dlse
    ds = p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None])
    ds = tf32(ds).astype(np.float64)
    of_heads = {
        "k": np.einsum("bhij,bihd->bjhd", ds, q) * scale,
        "v": np.einsum("bhij,bihd->bjhd", rounded_p, dout),
    }
    summed = {name: x.reshape(*x.shape[:2], -1, repeats, x.shape[-1]).sum(axis=3) for name, x in of_heads.items()}
    return {"out": out, "q": np.einsum("bhij,bjhd->bihd", ds, k) * scale, **summed}


# Chance may move the largest of some ten thousand errors, and their mean, by so much.
LARGEST_BY_CHANCE, MEAN_BY_CHANCE = 1.25, 1.01


def assert_no_worse_than_tf32(device: Device, head_dim: int) -> None:
    case = gaussian_case(13, "float32", (300, 300), dims=(head_dim, head_dim), causal=True)
    on_device = case.with_options(precision="tf32").on(device)
    out, lse = on_device.forward()
    found = {"out": out, **on_device.backward(out, lse)}
    exact = {"out": case.reference_forward()[0], **case.reference_backward()}
    for name, x in plain_tf32(case).items():
        error, allowed = (np.abs(y - exact[name]) for y in (found[name], x))
        assert error.max() <= LARGEST_BY_CHANCE * allowed.max(), f"{name}: {error.max()}, {allowed.max()}"
        assert error.mean() <= MEAN_BY_CHANCE * allowed.mean(), f"{name}: {error.mean()}, {allowed.mean()}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tf32_is_no_worse_than_tf32_products(device: Device, head_dim: int) -> None:
    """precision="tf32" has an error no larger than that of plain attention whose products have TF32 factors."""
    assert_no_worse_than_tf32(device, head_dim)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tf32_of_every_family(architecture: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with float32_kernels(architecture, monkeypatch) as device:
        assert_no_worse_than_tf32(device, head_dim)


def test_float32_is_float32(device: Device) -> None:
    """No unit may cost float32 its digits without precision="tf32"; errors lie far below those of TF32 products."""
    case = gaussian_case(14, "float32", (300, 300), dims=(128, 128))
    exact_out, _ = case.reference_forward()
    naive_out, _ = replace(case, q=tf32(case.q), k=tf32(case.k), v=tf32(case.v)).reference_forward()
    out, _ = case.on(device).forward()
    assert np.abs(out - exact_out).max() <= 0.02 * np.abs(naive_out - exact_out).max()


# LONGEST_TILE is the most keys (or queries) of a tile, FURTHER_ROUNDINGS a result's roundings besides its sums'.
LONGEST_TILE, FURTHER_ROUNDINGS = 128, 16


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap"),
    [
        ("float32", 64, None),
        ("float32", 64, 1e3),
        ("float32", 128, None),
        ("float32", 256, 1e3),
        ("float64", 128, None),
        ("float64", 128, 1e3),
        ("float64", 256, None),
    ],
)
@pytest.mark.parametrize("walked", ["keys", "queries"])
def test_errors_grow_with_tiles(dtype: str, head_dim: int, softcap: float | None, walked: str) -> None:
    """Equal terms are rounded the same way again and again: half a unit for each term of a sum and each tile."""
    length, others = 3000, 5
    lengths = (others, length) if walked == "keys" else (length, others)
    case = gaussian_case(19, dtype, lengths, (1, 1), (head_dim, head_dim), 1, softcap=softcap)
    q, k, v, dout = (np.repeat(x[:, :1], x.shape[1], axis=1) for x in (case.q, case.k, case.v, case.dout))
    if walked == "keys":
        case = case.with_inputs(k=k, v=v, dout=np.zeros_like(dout))  # dq from dlse alone, where nothing cancels
    else:
        case = case.with_inputs(q=q, dout=dout, dlse=np.full_like(case.dlse, 0.5))
    with hook.kernels_on(cpu_device.CpuDevice((8, 6))):
        out, lse = case.on(HOST).forward()
        grads = case.on(HOST).backward(out, lse)
    work = tolerance.reference_work(dtype)
    (exact_out, _), exact = case.reference_forward(work=work), case.reference_backward(work=work)
    names = ("q",) if walked == "keys" else ("k", "v")
    pairs = [(out, exact_out), *((grads[name], exact[name]) for name in names)]
    roundings = (LONGEST_TILE + length / LONGEST_TILE + FURTHER_ROUNDINGS) / 2
    for found, right in pairs:
        assert np.abs(found - right).max() <= roundings * tolerance.EPS[dtype] * np.abs(right).max()
