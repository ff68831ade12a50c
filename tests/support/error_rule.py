"""The error rule to the letter, inputs that Gaussian ones say nothing about, and a check of the kernel that ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import devices
import numpy as np
from cases import Case, gaussian_case
from devices import Device

from cuflash.gpu import launch

# The rounding of a larger lse is several roundings of P.
LARGE_LSE = 16


def plain(dtype: str) -> Case:
    return gaussian_case(0, dtype, (140, 150), dims=(64, 64))


def massive_activations(dtype: str) -> Case:
    """Make a few channels and keys hundreds of times as large as the rest, as in trained language models."""
    case = gaussian_case(1, dtype, (150, 190), dims=(64, 64))
    q, k, v = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    k[:, [0, 77], :, 5] = 300
    k[..., 11] *= 40
    q[..., 11] *= 4
    v[:, [0, 77]] *= 0.01
    v[..., 3] *= 200
    return replace(case, q=q.astype(case.dtype), k=k.astype(case.dtype), v=v.astype(case.dtype))


def all_scores(value: float) -> Callable[[str], Case]:
    """Make every score `value`, so that exponentials without a maximum taken off are all 0 or inf."""

    def make(dtype: str) -> Case:
        case = gaussian_case(2, dtype, (70, 130), dims=(16, 48), softmax_scale=0.5)
        q, k = np.full_like(case.q, 4), np.full_like(case.k, value / (0.5 * 16 * 4))
        return replace(case, q=q, k=k)

    return make


def one_hot_keys(dtype: str) -> Case:
    """Make key j the unit vector e_(j mod dim), so each score is one element of q; some rows pick a single key."""
    case = gaussian_case(3, dtype, (100, 128), dims=(128, 32), softmax_scale=1.0)
    k = np.zeros(case.k.shape)
    k[:] = np.eye(128)[:, None]
    q = case.q.astype(np.float64)
    q[:, ::2] *= 30
    return replace(case, q=q.astype(case.dtype), k=k.astype(case.dtype))


def sparse_integers(dtype: str) -> Case:
    """Draw small integers, mostly 0: every product and score is exact in every dtype, and scores tie."""
    case = gaussian_case(4, dtype, (130, 100), dims=(40, 40), softmax_scale=0.25)
    rng = np.random.default_rng(5)
    inputs = {
        name: (rng.integers(-3, 4, x.shape) * (rng.random(x.shape) < 0.2)).astype(case.dtype)
        for name, x in (("q", case.q), ("k", case.k), ("v", case.v), ("dout", case.dout))
    }
    return case.with_inputs(**inputs)


def dense_integers(dtype: str) -> Case:
    """Draw integers with exact products, whose scores are rounded once, by a scale that is no power of two."""
    case = gaussian_case(5, dtype, (130, 150), dims=(128, 128))
    rng = np.random.default_rng(6)
    return case.with_inputs(
        **{name: rng.integers(-3, 4, getattr(case, name).shape).astype(case.dtype) for name in ("q", "k", "v", "dout")}
    )


def long_rows(dtype: str) -> Case:
    """Make few queries and thousands of keys, whose sums have many small terms and are rescaled at many tiles."""
    case = gaussian_case(6, dtype, (5, 3000), dims=(64, 64), batch=1)
    # Rising scores make every tile take a new maximum.
    ramp = np.linspace(0.2, 3, 3000)[:, None, None]
    return replace(case, k=(case.k.astype(np.float64) * ramp).astype(case.dtype))


def tiny_values(dtype: str) -> Case:
    """Make values subnormal in float16, and so small in others that products with weights stay normal."""
    case = gaussian_case(7, dtype, (64, 64), dims=(32, 32))
    factor = {"float16": 2.0**-16, "bfloat16": 2.0**-90, "float32": 2.0**-90, "float64": 2.0**-900}[dtype]
    return replace(case, v=(case.v.astype(np.float64) * factor).astype(case.dtype))


def large_softcap(dtype: str) -> Case:
    """Make scores that lie far in the flat part of tanh."""
    case = gaussian_case(8, dtype, (90, 110), dims=(64, 32), softcap=15.0)
    return replace(case, q=(case.q.astype(np.float64) * 12).astype(case.dtype))


INPUTS: list[Callable[[str], Case]] = [
    plain,
    massive_activations,
    all_scores(-120),
    all_scores(120),
    one_hot_keys,
    sparse_integers,
    dense_integers,
    long_rows,
    tiny_values,
    large_softcap,
]
NAMES = ["gaussian", "massive", "all -120", "all 120", "one-hot", "integers", "dense", "long", "tiny", "softcap"]


def assert_error_rule(device: Device, case: Case) -> None:
    """Assert the rule to the letter in both passes.

    A float32 lse of 120 is a relative error of 4e-6 in P = exp(score - lse), which plain attention does not have. There
    the backward pass may instead be held to the reference with the lse that it was given.
    """
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse, strict=True)
    grads = on_device.backward(out, lse)
    try:
        case.assert_gradients(grads, strict=True)
    except AssertionError:
        if np.abs(lse[np.isfinite(lse)]).max() < LARGE_LSE:
            raise
        case.assert_gradients(grads, out, lse, strict=True)
        case.assert_gradients(grads)


@contextmanager
def forward_by(entry: str, device: Device) -> Iterator[Device]:
    """Activate a device on which no other kernel may compute a forward result."""
    devices.forget_launches()
    with device.active():
        yield device
    assert {x.kernel.entry for x in launch._launches.values() if "forward" in x.kernel.entry} == {entry}
