"""Rows where few keys have all the weight give the values themselves, and not values times a rounded weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import devices
import numpy as np
import pytest
import tolerance
from cases import DTYPES, Case, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import Device
from numpy.typing import NDArray

Array = NDArray[Any]
HOST = Device("numpy", np)
HALVES = ("float16", "bfloat16")


FAMILIES = [
    "numpy",
    *(pytest.param(capability, id=f"sm_{capability[0]}{capability[1]}") for capability in ((7, 0), (8, 0), (9, 0))),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=FAMILIES)
def place(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give NumPy, the kernels of each family on the CPU, and a GPU."""
    if isinstance(request.param, str):
        yield devices.device_of(request.param)
        return
    if not cpu_device.available():
        pytest.skip(cpu_device.NO_COMPILER)
    with hook.kernels_on(CpuDevice(request.param, 3, Check.NONE)):
        yield HOST


def one_key_options(rng: np.random.Generator, seqlen_q: int, seqlen_k: int) -> dict[str, dict[str, Any]]:
    """Return every option that leaves the weights of a row with one visible key alone."""
    seen = rng.integers(seqlen_k, size=seqlen_q)
    only = np.arange(seqlen_k) == seen[:, None]
    return {
        "mask": {"mask": only},
        "mask, softcap": {"mask": only, "softcap": 15.0},
        "bias": {"bias": np.where(only, rng.standard_normal(only.shape) * 9, -np.inf).astype(np.float32)},
        "alibi, mask": {"mask": only, "alibi_slopes": np.array([0.25, 1.5], np.float32)},
        "softcap, window": {"softcap": 15.0, "window": (0, 0)},
        "window": {"window": (0, 0)},
        "block mask": {"block_mask": only},
        "block mask, softcap": {"block_mask": only, "softcap": 2.0},
    }


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_key_returns_its_value(place: Device, dtype: str, softcap: float | None, head_dim: int) -> None:
    case = without_dlse(gaussian_case(3, dtype, (70, 1), (2, 1), (head_dim, head_dim), 1, softcap=softcap))
    assert_one_key(place, case, np.zeros(70, int))


@pytest.mark.parametrize("name", one_key_options(np.random.default_rng(0), 8, 8))
@pytest.mark.parametrize("dtype", HALVES)
def test_one_visible_key_among_many(place: Device, dtype: str, name: str) -> None:
    rng = np.random.default_rng(5)
    options = one_key_options(rng, 70, 200)[name]
    case = without_dlse(gaussian_case(3, dtype, (70, 200), (2, 1), (64, 64), 1, **options))
    if "mask" in options:
        seen = options["mask"].argmax(1)
    elif "bias" in options:
        seen = np.isfinite(options["bias"]).argmax(1)
    elif "block_mask" in options:
        seen = options["block_mask"].argmax(1)
    else:
        seen = np.arange(70) + 130
    assert_one_key(place, case, seen)


def without_dlse(case: Case) -> Case:
    """Take dlse away, as a softmax over one key has no gradient through lse."""
    return replace(case, dlse=None)


def assert_one_key(place: Device, case: Case, seen: Array) -> None:
    """Assert the results of queries i that see key seen[i] alone."""
    on_device = case.on(place)
    out, lse = on_device.forward()
    group = case.q.shape[2] // case.v.shape[2]
    q, k, v, dout = (x.astype(np.float64) for x in (case.q, case.k, case.v, case.dout))
    expected = np.repeat(case.v[:, seen], group, axis=2)
    if case.dtype.itemsize == 2:
        np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    else:
        eps = tolerance.EPS[case.dtype.name]
        assert (np.abs(out - expected) <= 2 * eps * np.abs(expected)).all()
    grads = on_device.backward(out, lse)
    dq, dk = grads["q"], grads["k"]
    # The terms P (dP - delta) cancel, but for the roundings of sums in float32.
    terms = np.abs(dout * np.repeat(v[:, seen], group, axis=2)).sum(-1)  # (batch, queries, heads)
    scale = case.options.get("softmax_scale") or case.q.shape[-1] ** -0.5
    eps = tolerance.EPS["float64" if case.dtype == np.float64 else "float32"]
    assert (np.abs(dq.astype(float)).max(-1) <= 64 * eps * scale * np.abs(k).max() * terms).all()
    of_keys = np.zeros(case.k.shape[:3])
    for i, j in enumerate(seen):
        of_keys[:, j] += terms[:, i].reshape(len(terms), -1, group).sum(-1)
    assert (np.abs(dk.astype(float)).max(-1) <= 64 * eps * scale * np.abs(q).max() * of_keys).all()


@pytest.mark.parametrize("softcap", [None, 40.0])
@pytest.mark.parametrize("at", [5, 299])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_key_with_all_weight_is_rounded_once(
    place: Device, dtype: str, head_dim: int, at: int, softcap: float | None
) -> None:
    case = gaussian_case(7, dtype, (70, 300), (2, 2), (head_dim, head_dim), 1, softcap=softcap)
    q = case.q.astype(np.float64)
    k = case.k.astype(np.float64)
    k[:, at] = 4 * np.sign(k[:, at])  # every query has its largest score there, 20 beyond all others
    q = np.abs(q).clip(0.5) * np.sign(k[:, at])[:, None]
    q *= 30 / (q * k[:, at][:, None]).sum(-1, keepdims=True) * head_dim**0.5 * (1.2 if softcap else 1)
    case = replace(case, q=q.astype(case.dtype), k=k.astype(case.dtype))
    out, _ = case.on(place).forward()
    exact, largest = exact_of(case)
    assert (largest > 1 - 1e-6).all()
    v = np.abs(case.v.astype(np.float64)).max()
    ulp = 2.0 ** np.floor(np.log2(np.abs(exact))) * tolerance.EPS[dtype]
    assert (np.abs(out.astype(np.float64) - exact) <= 0.5 * ulp + 1e-6 * v).all()


def exact_of(case: Case) -> tuple[Array, Array]:
    """Return the result in float64, and each row's largest weight, where all heads see all keys."""
    q, k, v = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * (case.options.get("softmax_scale") or q.shape[-1] ** -0.5)
    if softcap := case.options.get("softcap"):
        s = softcap * np.tanh(s / softcap)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", p, v), p.max(-1)


def sharp(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw scores of N(0, 81), with which a few keys have all the weight."""
    return 3 * rng.standard_normal(shape)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Make one element in a thousand ten times as large, so that some keys have much weight in flat rows."""
    return rng.standard_normal(shape) + (rng.random(shape) < 1e-3) * 10 * rng.standard_normal(shape)


def flat(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw scores of N(0, 1), with which no key has much weight and kernels may skip maxima, for 3% more mean error."""
    return rng.standard_normal(shape)


@pytest.mark.parametrize(("inputs", "mean"), [(sharp, 1.02), (outliers, 1.02), (flat, 1.05)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seed", [11, 12])
def test_errors_are_those_of_following_every_maximum(
    place: Device, seed: int, head_dim: int, inputs: Any, mean: float
) -> None:
    """Errors keep the rule for inputs that hide nothing, with FlashAttention-3's algorithm for its kernels."""
    rng = np.random.default_rng(seed)
    case = gaussian_case(1, "bfloat16", (128, 2560), (2, 2), (head_dim, head_dim), 1)
    q, k, v = (inputs(rng, x.shape).astype(case.dtype) for x in (case.q, case.k, case.v))
    case = replace(case, q=q, k=k, v=v)
    exact, _ = exact_of(case)
    error = np.abs(case.on(place).forward()[0].astype(np.float64) - exact)
    peer = np.abs(follow_every_maximum(q, k, v).astype(np.float64) - exact)
    assert error.mean() <= mean * peer.mean()
    assert error.max() <= 1.4 * peer.max()


def follow_every_maximum(q: Array, k: Array, v: Array, block_n: int = 128) -> Array:
    """Compute FlashAttention-2's algorithm 1 with weights rounded to the dtype, scores and sums in float32."""
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float32), k.astype(np.float32)) * np.float32(q.shape[-1] ** -0.5)
    m = np.full(s.shape[:3], -np.inf, np.float32)
    total = np.zeros_like(m)
    out = np.zeros((*m.shape, v.shape[-1]), np.float32)
    for start in range(0, k.shape[1], block_n):
        tile = s[..., start : start + block_n]
        larger = np.maximum(m, tile.max(-1))
        p, rescale = np.exp(tile - larger[..., None]), np.exp(m - larger)
        total = total * rescale + p.sum(-1)
        values = v[:, start : start + block_n].astype(np.float32)
        out = out * rescale[..., None] + np.einsum("bhij,bjhd->bhid", p.astype(q.dtype).astype(np.float32), values)
        m = larger
    return (out / total[..., None]).swapaxes(1, 2).astype(q.dtype)
