"""Float64, and float32 in parts, by mma.sync agree with the reference, on the CPU as sm_80 and as a Hopper GPU."""

from __future__ import annotations

from typing import Any

import cases
import devices
import numpy as np
import pytest
from cases import gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device

import cuflash
from cuflash.gpu import launch
from cuflash.plan.entries import key_results

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
SHAPE = (90, 110)
MASK = RNG.random(SHAPE) < 0.5
MASK[:, 10:40] = False
MASK[5] = False
TF32_EPS = 2.0**-11


def agrees(case: cases.Case, capability: tuple[int, int] = (8, 0), **extra: Any) -> None:
    """Assert that results and gradients keep the error rule, and that these kernels computed them."""
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice(capability, num_sms=3)):
        on_device = case.on(Device("cpu_device", np))
        out, lse = on_device.forward()
        gradients = on_device.backward(out, lse, **extra)
    case.assert_forward(out, lse)
    case.assert_gradients(gradients)
    entries = {x.kernel.entry for x in launch._launches.values()}
    family = "parts" if case.dtype == np.float32 else "wide"
    assert {f"{family}_forward", f"{family}_dq"} <= entries and any(map(key_results, entries))
    assert not entries & {"forward", "backward_dq", "backward_dkv", "backward_dk", "backward_dv", "backward_bias"}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])  # which multiplies float64 by 16 x 8 x 8
@pytest.mark.parametrize("dims", [(64, 64), (33, 47), (128, 128)])
def test_head_dims(capability: tuple[int, int], dims: tuple[int, int]) -> None:
    agrees(gaussian_case(0, "float64", SHAPE, (4, 2), dims, 1, causal=True), capability)


@pytest.mark.parametrize(
    ("capability", "dims"),
    [
        ((8, 0), (64, 64)),
        ((8, 0), (33, 47)),
        ((8, 0), (128, 128)),
        ((10, 0), (128, 128)),
        ((8, 0), (256, 256)),
        # These run in 99 KB of shared memory.
        ((8, 6), (64, 64)),
        ((8, 9), (33, 47)),
        ((12, 0), (40, 64)),
    ],
)
def test_float32_in_parts(capability: tuple[int, int], dims: tuple[int, int]) -> None:
    agrees(gaussian_case(0, "float32", SHAPE, (4, 2), dims, 1, causal=True), capability)


@pytest.mark.parametrize(
    ("name", "pays"),
    [
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA A10G", False),
        ("NVIDIA L40-48Q", False),
        ("NVIDIA A10", True),
        ("NVIDIA L40S", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("NVIDIA RTX 6000 Ada Generation", True),
    ],
)
def test_cards_with_half_the_rate(name: str, pays: bool) -> None:
    """Exact float32 takes multiply-adds on such cards but for gradients of small heads, and TF32 takes products."""
    device = cpu_device.CpuDevice((8, 9))
    device.name = name
    for head_dim, precision in ((32, None), (80, None), (32, "tf32")):
        q = RNG.standard_normal((1, 20, 1, head_dim)).astype(np.float32)
        devices.forget_launches()
        with hook.kernels_on(device):
            out, lse = cuflash.attention(q, q, q, return_lse=True, softcap=1.0, precision=precision)
            cuflash.attention_backward(out, q, q, q, out, lse, softcap=1.0, precision=precision)
        entries = {x.kernel.entry for x in launch._launches.values()}
        assert ("parts_forward" in entries) == ("forward" not in entries) == (pays or precision == "tf32")
        assert ("parts_dq" in entries) == ("backward_dq" not in entries) == (pays or head_dim == 32)


@pytest.mark.parametrize(("dtype", "dims"), [("float32", (200, 256)), ("float64", (40, 144))])
def test_values_by_halves(dtype: str, dims: tuple[int, int]) -> None:
    case = gaussian_case(0, dtype, SHAPE, (4, 2), dims, 1, causal=True, softcap=2.0)
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((8, 0), num_sms=3)):
        case.assert_forward(*case.on(Device("cpu_device", np)).forward())
    assert "forward" not in {x.kernel.entry for x in launch._launches.values()}


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (30, 10)},
    "softcap and slopes": {"softcap": 2.0, "alibi_slopes": RNG.random(4), "causal": True},
    "bias": {"bias": np.where(MASK, RNG.standard_normal(SHAPE), -np.inf)},
    "bias of keys": {"bias": RNG.standard_normal((2, 1, 1, 110))},
    "mask": {"mask": MASK},
    "sink": {"sink": RNG.standard_normal(4), "window": (3, 0)},
    "lengths": {"kv_lengths": np.array([90, 7], np.int32), "q_lengths": np.array([0, 70], np.int32)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 1234567890123},
    "block mask": {"block_mask": MASK, "causal": True},
}


@pytest.mark.parametrize(
    ("dtype", "capability"), [("float32", (8, 0)), ("float32", (8, 6)), ("float32", (10, 0)), ("float64", (8, 0))]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: str, capability: tuple[int, int]) -> None:
    options = {
        key: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for key, x in OPTIONS[name].items()
    }
    agrees(gaussian_case(0, dtype, SHAPE, (4, 2), (64, 64), 2, **options), capability)


# Warps share rows beyond head dim 128, in float64 always, and tell each other what each has found.
MANY: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": RNG.random(4), "mask": MASK} | OPTIONS["dropout"]
BLOCK_MASK = OPTIONS["block mask"]


@pytest.mark.parametrize(
    ("capability", "dims"),
    [((8, 0), (192, 150)), ((10, 0), (250, 256)), ((8, 6), (128, 100)), ((12, 0), (70, 128))],
)
@pytest.mark.parametrize("options", [MANY | {"alibi_slopes": MANY["alibi_slopes"].astype("f")}, BLOCK_MASK])
def test_warps_that_share_rows(options: Any, capability: tuple[int, int], dims: tuple[int, int]) -> None:
    agrees(gaussian_case(0, "float32", SHAPE, (4, 2), dims, 1, **options), capability)


@pytest.mark.parametrize("capability", [(8, 6), (12, 0)])
def test_warps_with_eight_columns_each(capability: tuple[int, int]) -> None:
    """99 KB leave tiles of 16 columns, some of them hidden from all rows."""
    case = gaussian_case(0, "float32", SHAPE, (4, 2), (192, 150), 1, softcap=2.0, mask=MASK)
    out, lse = case.on(Device("numpy", np)).forward()
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice(capability, num_sms=3)):
        case.assert_gradients(case.on(Device("cpu_device", np)).backward(out, lse))
    assert {x.kernel.entry for x in launch._launches.values()} >= {"parts_dq", "parts_dk", "parts_dv"}


@pytest.mark.parametrize(
    ("capability", "dims"), [((8, 0), (192, 150)), ((9, 0), (250, 256)), ((9, 0), (100, 128)), ((9, 0), (64, 40))]
)
@pytest.mark.parametrize("name", ["softcap and slopes", "lengths", "dropout", "block mask"])
def test_float64_of_warps_that_share_rows(name: str, capability: tuple[int, int], dims: tuple[int, int]) -> None:
    agrees(gaussian_case(0, "float64", SHAPE, (4, 2), dims, 2, **OPTIONS[name]), capability)


# The gradient of a bias has a kernel of its own.
@pytest.mark.parametrize(("capability", "dims"), [((8, 0), (256, 256)), ((9, 0), (130, 192))])
def test_float64_with_every_option(capability: tuple[int, int], dims: tuple[int, int]) -> None:
    options = MANY | OPTIONS["bias"] | OPTIONS["sink"] | BLOCK_MASK | {"window": (70, 10), "deterministic": True}
    case = gaussian_case(0, "float64", SHAPE, (4, 2), dims, 1, **options)
    agrees(case, capability, grads=("q", "k", "v", "sink", "alibi_slopes"))


def test_float64_of_packed_sequences_beyond_head_dim_128() -> None:
    normal = RNG.standard_normal
    q, k, v, dout = normal((100, 4, 150)), normal((160, 2, 150)), normal((160, 2, 200)), normal((100, 4, 200))
    cu_seqlens = np.array([0, 70, 70, 90], np.int32), np.array([0, 40, 55, 150], np.int32)
    agrees(cases.Case(q, k, v, dout, normal((4, 100)), {"causal": True}, cu_seqlens), (9, 0))


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_gradient_of_float64_beyond_head_dim_128(wanted: str) -> None:
    case = gaussian_case(0, "float64", SHAPE, (4, 2), (192, 192), 1, causal=True)
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((9, 0), num_sms=3)):
        on_device = case.on(Device("cpu_device", np))
        case.assert_gradients(on_device.backward(*on_device.forward(), grads=(wanted,)))
    assert {x.kernel.entry for x in launch._launches.values()} >= {f"wide_d{wanted}"}


# Operands come in chunks beyond head dim 64 for the gradient of a bias; each case has its shape and other options.
BIASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "of scores": ((2, 4, 90, 110), {"causal": True}),
    "of all batches": ((1, 4, 90, 110), {"window": (30, 10)}),
    "of all heads": ((1, 1, 90, 110), {}),
    "of keys": ((2, 1, 1, 110), {}),
    "of queries": ((2, 4, 90, 1), {}),
    "lengths": ((1, 4, 90, 110), OPTIONS["lengths"]),
    "many": ((1, 1, 90, 110), MANY),
    "block mask": ((2, 4, 90, 110), BLOCK_MASK),
}


def gradient_of_bias_agrees(case: cases.Case, capability: tuple[int, int]) -> None:
    out, lse = case.on(Device("numpy", np)).forward()
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice(capability, num_sms=3)):
        case.assert_gradients(case.on(Device("cpu_device", np)).backward(out, lse, grads=("bias",)))
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert ("parts_bias" if case.dtype == np.float32 else "wide_bias") in entries and "backward_bias" not in entries


@pytest.mark.parametrize(
    ("dtype", "capability", "dims"),
    [
        ("float32", (8, 0), (192, 150)),
        ("float32", (8, 6), (192, 150)),
        ("float32", (10, 0), (250, 256)),
        ("float32", (9, 0), (128, 100)),
        ("float64", (9, 0), (200, 256)),
        ("float64", (8, 0), (90, 128)),
    ],
)
@pytest.mark.parametrize("name", BIASES)
def test_gradient_of_a_bias_in_chunks(
    name: str, dtype: str, capability: tuple[int, int], dims: tuple[int, int]
) -> None:
    shape, options = BIASES[name]
    options = {
        key: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for key, x in options.items()
    }
    bias = RNG.standard_normal(shape).astype(dtype)
    gradient_of_bias_agrees(gaussian_case(0, dtype, SHAPE, (4, 2), dims, 2, bias=bias, **options), capability)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_of_a_bias_of_packed_sequences_in_chunks(dtype: str) -> None:
    padded = gaussian_case(0, dtype, (300, 280), (4, 2), (256, 130), 1)
    lengths = np.array([0, 90, 90, 131, 290], np.int32), np.array([0, 70, 100, 200, 280], np.int32)
    options = {"bias": RNG.standard_normal((1, 4, 159, 100)).astype(dtype), "causal": True}
    q, k, v, dout = (x[0] for x in (padded.q, padded.k, padded.v, padded.dout))
    gradient_of_bias_agrees(cases.Case(q, k, v, dout, options=options, cu_seqlens=lengths), (8, 0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tf32(head_dim: int) -> None:
    q, k, v, dout = (RNG.standard_normal((1, 90, 2, head_dim)).astype(np.float32) for _ in range(4))
    expected, backward = cuflash.attention_vjp(*(x.astype(np.float64) for x in (q, k, v)))
    gradients = backward(dout.astype(np.float64))
    devices.forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((8, 0), num_sms=3)):
        out, lse = cuflash.attention(q, k, v, return_lse=True, precision="tf32")
        found = cuflash.attention_backward(dout, q, k, v, out, lse, precision="tf32")
    assert "parts_forward" in {x.kernel.entry for x in launch._launches.values()}
    for x, y in zip((out, *found), (expected, *gradients), strict=True):
        np.testing.assert_allclose(x, y, atol=4 * TF32_EPS * np.abs(y).max())
        assert np.abs(x - y).max() > TF32_EPS / 64 * np.abs(y).max()  # one product each
