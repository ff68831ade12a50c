"""Head dims above 256: portable kernels compute the columns of results in slices, one thread block each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import devices
import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian, gaussian_case, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import Device
from hypothesis import given
from paging import as_paged, used_of_pool
from strategies import WIDE_HEAD_DIMS, cases, examples

import cuflash
from cuflash import e4m3
from cuflash.frontend.partial import Part
from cuflash.gpu import backend, launch
from cuflash.problem.attention_problem import Place
from cuflash.problem.options import Options

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

HOST = Device("numpy", np)
NUM_SMS = 3
SHAPE = 21, 70
RNG = np.random.default_rng(0)


@pytest.fixture
def plain() -> Iterator[None]:
    devices.forget_launches()
    with hook.kernels_on(CpuDevice((8, 0), NUM_SMS)):
        yield


def grids() -> dict[str, tuple[int, ...]]:
    """The grids of the kernels that were launched, by entry."""
    return {x.kernel.entry: x._extra.grid for x in launch._launches.values()}


def assert_agrees(case: Case) -> None:
    on_host = case.on(HOST)
    out, lse = on_host.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_host.backward(out, lse))


@pytest.mark.usefixtures("plain")
@examples(20, quick=4)
@given(case=cases(head_dims=WIDE_HEAD_DIMS, max_scores=6_000))
def test_every_option(case: Case) -> None:
    assert_agrees(case)


@examples(5, quick=1)
@given(case=cases(head_dims=WIDE_HEAD_DIMS, max_scores=1_500))
def test_no_defect_that_the_checked_mode_sees(case: Case) -> None:
    with hook.kernels_on(CpuDevice((9, 0), NUM_SMS, Check.SHARED)):
        assert_agrees(case)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_result_has_a_slice_for_256_columns(dtype: str) -> None:
    assert_agrees(gaussian_case(0, dtype, SHAPE, (4, 2), (576, 40), 1, causal=True))
    slices = {entry: grid[1] for entry, grid in grids().items() if len(grid) > 1}
    assert slices == {"backward_dq": 3, "backward_dk" if dtype == "float64" else "backward_dkv": 3}


@pytest.mark.usefixtures("plain")
def test_values_by_halves_stay_on_tensor_cores() -> None:
    case = gaussian_case(0, "float16", SHAPE, (4, 2), (64, 400), 1)
    case.assert_forward(*case.on(HOST).forward())
    assert set(grids()) == {"forward_sm80"}


@pytest.mark.usefixtures("plain")
def test_gradients_alone_have_the_bits_of_all_together() -> None:
    """Each time, as later calls repeat the launches of the first."""
    slopes = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
    for seed in range(2):
        case = gaussian_case(seed, "float32", SHAPE, (4, 2), (300, 520), 1, alibi_slopes=slopes)
        on_host = case.on(HOST)
        out, lse = on_host.forward()
        case.assert_forward(out, lse)
        together = on_host.backward(out, lse)
        case.assert_gradients(together)
        for name, x in together.items():
            alone = on_host.backward(out, lse, grads=(name,))
            assert [other for other, y in alone.items() if y is not None] == [name]
            assert same_bits(alone[name], x), name


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("in_place", [False, True], ids=["gathered", "in place"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_pages(dtype: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "fits", lambda work: not in_place)
    case = as_paged(gaussian_case(1, dtype, (17, 40), dims=(290, 576), batch=3), 3, RNG)
    poisoned = {name: np.array(getattr(case, name)) for name in ("k", "v")}
    for pool in poisoned.values():
        pool[~used_of_pool(case)] = np.nan
    on_host, dirty = case.on(HOST), case.with_inputs(**poisoned).on(HOST)
    out, lse = on_host.forward()
    case.assert_forward(out, lse)
    assert grids()["paged_forward" if in_place else "forward"][1] == 3
    for ours, theirs in zip(dirty.forward(), (out, lse), strict=True):
        assert same_bits(ours, theirs)
    grads = on_host.backward(out, lse)
    case.assert_gradients(grads)
    assert_same_bits(dirty.backward(out, lse), grads)


@pytest.mark.usefixtures("plain")
def test_fp8_has_the_bits_of_float32() -> None:
    """Codes are converted before, as in narrower heads."""
    codes, scales, wide = [], {}, []
    for name, heads, rows in (("q", 4, 21), ("k", 2, 70), ("v", 2, 70)):
        x, scales[f"{name}_scale"] = cuflash.quantize_fp8(gaussian(RNG, (1, rows, heads, 576), "float32"), per="head")
        codes.append(x)
        wide.append(e4m3.decode(x) * scales[f"{name}_scale"][..., None])
    call: Any = cuflash.attention
    found = call(*codes, **scales, out_dtype="float32", causal=True, return_lse=True)
    expected = call(*wide, causal=True, return_lse=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert same_bits(ours, theirs)


def gated(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s * 0.75 + table[h, (j - i) % 5] * np.tanh(s / 4)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("deterministic", [False, True])
def test_rules_and_a_bias(deterministic: bool) -> None:
    """Gradients of operands and of a bias have no columns, and so no slices."""
    options = {"score_mod": gated, "operands": (gaussian(RNG, (4, 5), "float32"),), "deterministic": deterministic}
    bias = gaussian(RNG, (1, 4, 1, SHAPE[1]), "float32")
    assert_agrees(gaussian_case(0, "float32", SHAPE, (4, 2), (520, 290), 1, bias=bias, **options))


def test_parts_of_a_longer_problem() -> None:
    def results() -> dict[str, Any]:
        rng = np.random.default_rng(3)
        q, dout = (gaussian(rng, (1, 21, 4, 300), "float32") for _ in range(2))
        k, v = (gaussian(rng, (1, 29, 2, 300), "float32") for _ in range(2))
        options: Any = {"alibi_slopes": np.full(4, 0.01, np.float32), "dropout_p": 0.4, "dropout_seed": 5}
        part = Part(q, k, v, Options(window=(30, None), **options), Place(10, 12, 1))
        out, lse = part.forward()
        return {"out": out, "lse": lse, **part.backward(dout, out, lse, None, frozenset(("q", "k", "v")))}

    expected = results()
    with hook.kernels_on(CpuDevice((7, 0), NUM_SMS)):
        found = results()
    for name, x in expected.items():
        np.testing.assert_array_equal(np.isfinite(found[name]), np.isfinite(x), err_msg=name)
        shown = np.isfinite(x)
        np.testing.assert_allclose(found[name][shown], x[shown], rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hidden_keys_do_not_leak(dtype: str) -> None:
    """A key that the mask hides from all queries holds NaN."""
    mask = RNG.random(SHAPE) < 0.7
    mask[:, 5] = False
    case = gaussian_case(0, dtype, SHAPE, (4, 2), (264, 520), 1, mask=mask)
    poisoned = {name: np.array(getattr(case, name)) for name in ("k", "v")}
    for x in poisoned.values():
        x[:, 5] = np.nan
    on_host, dirty = case.on(HOST), case.with_inputs(**poisoned).on(HOST)
    out, lse = on_host.forward()
    for ours, theirs in zip(dirty.forward(), (out, lse), strict=True):
        assert same_bits(ours, theirs)
    assert_same_bits(dirty.backward(out, lse), on_host.backward(out, lse))
