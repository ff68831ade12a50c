"""The main kernels of the backward pass add up the gradient of ALiBi's slopes, on the CPU as several architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, gaussian_case, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device, forget_launches

from cuflash.gpu import launch
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
# MAIN names the kernels that compute gradients of scores. An error is relative to the sum of the terms' sizes; beside
# softcap the instruction for tanh leads further from exact terms.
MAIN = {"sm_80": {sm80_backward.MAIN}, "sm_90": {sm90_backward_tiles.NARROW, sm90_backward_tiles.WIDE}}
ERROR, ERROR_OF_TANH = 4e-6, 2e-3
SLOPES = np.array([0.5, -0.1, 0.02, 0.3], np.float32)
OF_SEQUENCES = np.stack([SLOPES, 2 * SLOPES])
BLOCKS = np.kron(np.random.default_rng(0).random((5, 4)) < 0.6, np.ones((28, 50), bool))
BIAS = np.random.default_rng(1).standard_normal((1, 4, 140, 200)).astype(np.float16)


def _halved(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0.5 * s


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both sides": {"alibi_slopes": OF_SEQUENCES},
    "window, in order": {"window": (60, 20), "deterministic": True},
    "softcap": {"softcap": 2.0, "window": (90, 30)},
    "softcap, dropout": {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 7, "causal": True},
    "bias": {"bias": BIAS},
    "bias, softcap": {"bias": BIAS, "softcap": 2.0, "causal": True},
    "blocks, in order": {"block_mask": BLOCKS, "deterministic": True},
    "rule": {"score_mod": _halved, "causal": True},
    "rule, softcap": {"score_mod": _halved, "softcap": 2.0},
    "lengths, dropout": {
        "q_lengths": np.array([0, 70], np.int32),
        "kv_lengths": np.array([120, 97], np.int32),
        "dropout_p": 0.3,
        "dropout_seed": 7,
    },
}

# Each option with the head dims that are computed: Hopper has other kernels for 64, 128 and 256.
CASES = [
    *((name, 64) for name in OPTIONS),
    *((name, 128) for name in ("causal", "window, in order", "softcap")),
    *(
        (name, 256)
        for name in ("both sides", "window, in order", "softcap, dropout", "bias, softcap", "blocks, in order")
    ),
]
# Softcap's derivative comes with the weights, shared memory is full, or dq has a kernel of its own.
IN_OTHER_PASS = {
    "sm_90": {("bias, softcap", 256), ("rule, softcap", 64), ("blocks, in order", 256)},
    "sm_80": {("rule, softcap", 64), ("blocks, in order", 64), ("blocks, in order", 256)},
}


def slopes_gradient(arch: str, case: Case, **extra: Any) -> Any:
    """Return the gradient of the slopes; the kernels that compute it are kept in `launch._launches`."""
    out, lse = case.reference_forward()
    out, lse = out.astype(case.dtype), lse.astype(np.float32)
    forget_launches()
    capability = int(arch[3]), int(arch[4])
    with hook.kernels_on(cpu_device.CpuDevice(capability, num_sms=3)):
        found = case.on(Device(arch, np)).backward(out, lse, **extra)["alibi_slopes"]
    expected, terms = (case.reference_backward(out, lse, magnitudes=x)["alibi_slopes"] for x in (False, True))
    error = ERROR_OF_TANH if case.options.get("softcap") else ERROR
    np.testing.assert_array_less(abs(found - expected), error * terms + 1e-30)
    return found


def entries() -> set[str]:
    return {x.kernel.entry for x in launch._launches.values()}


def writing() -> set[bool]:
    """Say which launches of kernels that know of it add up the slopes' gradient, those that convert dq left out."""
    configs = [x.kernel.config for x in launch._launches.values() if x.kernel.entry in MAIN["sm_80"] | MAIN["sm_90"]]
    return {getattr(config, "writes_dslopes", False) for config in configs}


def assert_one_pass(arch: str) -> None:
    """No kernel but the main one has computed scores, and it has added up the slopes' gradient."""
    assert MAIN[arch] & entries() and sm80_backward.ORDERED_DQ not in entries()


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize(("name", "dim"), CASES)
def test_options(name: str, dim: int, arch: str) -> None:
    """Options act before, beside and behind the distances, and the main kernel's sums repeat their bits."""
    case = gaussian_case(3, "float16", (140, 200), dims=(dim, dim), **{"alibi_slopes": SLOPES, **OPTIONS[name]})
    found = slopes_gradient(arch, case)
    if (name, dim) not in IN_OTHER_PASS[arch]:
        assert_one_pass(arch)
    assert same_bits(found, slopes_gradient(arch, case))


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("slopes", [SLOPES, OF_SEQUENCES], ids=["shared", "of sequences"])
def test_packed_sequences(slopes: Any, arch: str) -> None:
    """Sums of tiles of keys belong to sequences, some of which are short, and rows behind the last to none."""
    case = gaussian_case(4, "float16", (300, 400), dims=(64, 64), batch=1, alibi_slopes=slopes, causal=True)
    ends = np.array([0, 7, 290], np.int32), np.array([0, 150, 333], np.int32)
    flat = {name: getattr(case, name)[0] for name in ("q", "k", "v", "dout", "dlse")}
    slopes_gradient(arch, replace(case, cu_seqlens=ends, **flat))
    assert_one_pass(arch)


@pytest.mark.parametrize("arch", MAIN)
def test_what_is_wanted(arch: str) -> None:
    """The slopes' gradient alone is the same, and kernels without it sum nothing."""
    case = gaussian_case(5, "float16", (100, 130), dims=(64, 64), alibi_slopes=SLOPES)
    alone = slopes_gradient(arch, case, grads=("alibi_slopes",))
    assert same_bits(alone, slopes_gradient(arch, case))
    assert writing() == {True}
    out, lse = case.reference_forward()
    forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((int(arch[3]), int(arch[4])), num_sms=3)):
        case.on(Device(arch, np)).backward(out.astype(case.dtype), lse.astype(np.float32), grads=("q", "k", "v"))
    assert writing() == {False}
    assert not entries() & {"reduce_slopes", sm80_backward.ORDERED_DQ}
