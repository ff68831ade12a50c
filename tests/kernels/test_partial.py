"""Kernels compute parts of a longer problem as NumPy does, also where a window lies off the part's diagonal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from compiling import needs_compiler, source
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice

import cuflash
from cuflash import reference
from cuflash.cuda import compile as cuda_compile
from cuflash.frontend import metadata
from cuflash.frontend.partial import Part, sees_anything, sees_everything, window_of_part
from cuflash.plan.listing import families as listing
from cuflash.plan.portable import kernels as plan_portable
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90.backward_tiles import NARROW_TABLE, WIDE_TABLE
from cuflash.plan.sm90.tiles import HEAD_DIMS
from cuflash.problem.attention_problem import Place
from cuflash.problem.options import Options

SEQLEN_Q, SEQLEN_K = 37, 29
# Places (first query, first key, stride) lie below the diagonal, across it, above it, far from it, and striped.
PLACES = ((40, 0, 1), (10, 12, 1), (0, 20, 1), (0, 200, 1), (200, 0, 1), (1, 2, 3), (2, 0, 3))
WINDOWS = ((None, 0), (None, None), (5, 0), (20, 3), (0, 0), (None, 7), (30, None), (210, 0))


def visible(window: tuple[int | None, int | None], place: Place) -> Any:
    """Return which keys each query of a part sees, by their positions in the whole."""
    i = place.first_q + place.diagonal + place.stride * np.arange(SEQLEN_Q)[:, None]
    j = place.first_k + place.stride * np.arange(SEQLEN_K)
    left, right = window
    shown = np.ones((SEQLEN_Q, SEQLEN_K), bool)
    if left is not None:
        shown &= j >= i - left
    if right is not None:
        shown &= j <= i + right
    return shown


@pytest.mark.parametrize("diagonal", [0, 30, -7])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("window", WINDOWS)
def test_window_of_a_part(window: tuple[int | None, int | None], where: tuple[int, int, int], diagonal: int) -> None:
    place = Place(*where, diagonal=diagonal)
    expected = visible(window, place)
    left, right = own = window_of_part(window, SEQLEN_Q, SEQLEN_K, place)
    distance = np.arange(SEQLEN_K) - np.arange(SEQLEN_Q)[:, None] - (SEQLEN_K - SEQLEN_Q)
    shown = np.ones_like(expected)
    if left is not None:
        shown &= distance >= -left
    if right is not None:
        shown &= distance <= right
    np.testing.assert_array_equal(shown, expected)
    assert sees_anything(own, SEQLEN_Q, SEQLEN_K) == expected.any()
    assert sees_everything(own, SEQLEN_Q, SEQLEN_K) == expected.all()


def results(
    dtype: str, window: tuple[int | None, int | None], place: Place, head_dim: int, options: dict[str, Any]
) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    q, dout = (gaussian(rng, (2, SEQLEN_Q, 4, head_dim), dtype) for _ in range(2))
    k, v = (gaussian(rng, (2, SEQLEN_K, 2, head_dim), dtype) for _ in range(2))
    part = Part(q, k, v, Options(window=window, **options), place)
    out, lse = part.forward()
    names = frozenset(("q", "k", "v", "alibi_slopes"))
    grads = part.backward(dout, out.astype(q.dtype), lse, None, names)
    return {"out": out, "lse": lse, **grads}


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("window", WINDOWS[::2])
@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0)], ids=["sm_70", "sm_80", "sm_90"])
def test_kernels_agree_with_numpy(
    capability: tuple[int, int], window: tuple[int | None, int | None], where: tuple[int, int, int]
) -> None:
    place = Place(*where)
    options = {"softcap": 5.0} if where[0] % 2 else {}
    head_dim = 64 if where[2] == 1 else 40
    expected = results("float32", window, place, head_dim, options)
    with hook.kernels_on(CpuDevice(capability, 3)):
        found = results("float32", window, place, head_dim, options)
    for name, x in expected.items():
        shown = np.isfinite(x)
        np.testing.assert_array_equal(np.isfinite(found[name]), shown, err_msg=name)
        np.testing.assert_allclose(found[name][shown], x[shown], rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["alibi", "dropout", "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_options_that_need_positions(dtype: str, name: str, where: tuple[int, int, int]) -> None:
    """ALiBi and dropout of a part are those of the whole, whatever stride and first head it has."""
    place = Place(*where, first_head=3, first_batch=5)
    accum = "float64" if dtype == "float64" else "float32"
    options: dict[str, Any] = {}
    if name != "dropout":
        options["alibi_slopes"] = np.array([0.01, 0.1, -0.02, 0.3], accum)
    if name != "alibi":
        options |= {"dropout_p": 0.4, "dropout_seed": 12345678901234567}
    expected = results(dtype, (30, None), place, 16, options)
    with hook.kernels_on(CpuDevice((9, 0), 3)):
        found = results(dtype, (30, None), place, 16, options)
    limit = 1e-12 if dtype == "float64" else 2e-5 if dtype == "float32" else 2e-2
    for key, x in expected.items():
        shown = np.isfinite(x)
        np.testing.assert_array_equal(np.isfinite(found[key]), shown, err_msg=key)
        # The terms of a slope's gradient are gradients of scores times distances.
        farthest = abs(where[0] - where[1]) + where[2] * SEQLEN_Q if key == "alibi_slopes" else 1
        np.testing.assert_allclose(found[key][shown], x[shown], rtol=limit, atol=limit * farthest, err_msg=key)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 192)], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_results_of_16_bits_are_not_rounded(capability: tuple[int, int], head_dims: tuple[int, int]) -> None:
    """Partial results of bfloat16 inputs are float32 to float32's accuracy but for the weights' own rounding."""
    rng = np.random.default_rng(5)
    head_dim, head_dim_v = head_dims
    q, dout = gaussian(rng, (1, 1, 4, head_dim), "bfloat16"), gaussian(rng, (1, 1, 4, head_dim_v), "bfloat16")
    k, v = gaussian(rng, (1, 33, 2, head_dim), "bfloat16"), gaussian(rng, (1, 33, 2, head_dim_v), "bfloat16")
    place = Place(40, 0, 1)
    with hook.kernels_on(CpuDevice(capability, 3)):
        part = Part(q, k, v, Options(causal=True), place)
        out, lse = part.forward()
        names = frozenset(("q", "k", "v"))
        grads = part.backward(dout, out.astype(q.dtype), lse, None, names)
    expected = Part(q, k, v, Options(causal=True), place).forward()[0]
    for x in (out, lse, *grads.values()):
        assert x.dtype == np.float32
    # The results use more bits than bfloat16 has.
    assert not np.array_equal(out, out.astype(q.dtype).astype(np.float32))
    np.testing.assert_allclose(out, expected, rtol=0, atol=4e-3)
    for name, x in grads.items():
        assert not np.array_equal(x, x.astype(q.dtype).astype(np.float32)), name


def test_a_part_that_is_the_whole_needs_no_positions() -> None:
    """Kernels align the whole themselves, so ALiBi and dropout of such a part work on every device."""
    options: dict[str, Any] = {"alibi_slopes": np.full(4, 0.1, np.float32), "dropout_p": 0.3, "dropout_seed": 5}
    place = Place(diagonal=SEQLEN_K - SEQLEN_Q)
    expected = results("float32", (None, 0), place, 16, options)
    rng = np.random.default_rng(3)
    q, _ = (gaussian(rng, (2, SEQLEN_Q, 4, 16), "float32") for _ in range(2))
    k, v = (gaussian(rng, (2, SEQLEN_K, 2, 16), "float32") for _ in range(2))
    whole = cuflash.attention(q, k, v, causal=True, **options)
    np.testing.assert_allclose(expected["out"], whole, rtol=0, atol=1e-6)
    assert Part(q, k, v, Options(causal=True, **options), place)._problem.place == Place()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rounded_results_have_the_dtype_of_the_inputs(dtype: str) -> None:
    rng = np.random.default_rng(5)
    q, dout = (gaussian(rng, (1, 9, 4, 8), dtype) for _ in range(2))
    k, v = (gaussian(rng, (1, 12, 2, 8), dtype) for _ in range(2))
    part = Part(q, k, v, Options(), Place(first_q=2, first_k=1))
    wanted = frozenset(("q", "k", "v"))
    wide, lse = part.forward()
    out, same_lse = part.forward(rounded=True)
    assert out.dtype == q.dtype
    assert wide.dtype == lse.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(out, wide.astype(q.dtype))
    np.testing.assert_array_equal(lse, same_lse)
    grads = part.backward(dout, out, lse, None, wanted)
    for name, x in part.backward(dout, out, lse, None, wanted, rounded=True).items():
        assert x.dtype == q.dtype
        assert grads[name].dtype == lse.dtype
        np.testing.assert_array_equal(x, grads[name].astype(q.dtype), err_msg=name)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_a_repeated_part_computes_anew() -> None:
    """A part with the metadata of an earlier one repeats its launches on its own arrays."""
    rng = np.random.default_rng(6)
    names = frozenset(("q", "k", "v"))
    place = Place(20, 0, 1)
    with hook.kernels_on(CpuDevice((9, 0), 3)):
        for _ in range(3):
            q, k, v, dout = (gaussian(rng, (1, 64, 2, 64), "bfloat16") for _ in range(4))
            part = Part(q, k, v, Options(causal=True), place)
            out, lse = part.forward()
            given = dout, out.astype(q.dtype), lse, None
            grads = part.backward(*given, names)
            wide = [x.astype(np.float64) for x in (q, k, v)]
            mask = np.arange(64) <= np.arange(64)[:, None] + 20
            np.testing.assert_allclose(out, reference.attention(*wide, mask=mask)[0], rtol=0, atol=1e-2)
            exact = reference.attention_backward(dout.astype(np.float64), *wide, mask=mask)
            for name in names:
                np.testing.assert_allclose(grads[name], exact[name], rtol=0, atol=5e-2, err_msg=name)
    assert len(metadata._repeats) >= 2  # a forward pass, and gradients


@needs_compiler
@pytest.mark.parametrize("entry", ["forward", "backward_dq", "backward_dkv"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_with_places_compile_without_spills(dtype: str, entry: str) -> None:
    """The portable kernels' registers hold positions, too, which ALiBi and dropout of a part need."""
    flags = ("has_window", "has_alibi", "has_dropout")
    for head_dim in (64, 128):
        problem = listing.problem_of(dtype, head_dim, head_dim, flags, place=Place(first_k=1))
        config = plan_portable.plan(problem, entry)[0]
        assert config.has_place
        report = cuda_compile.compile_for("sm_80", source(config), entry)
        assert report.spill_bytes == 0, (head_dim, report)
        assert not report.warnings


def wide_kernels() -> list[Any]:
    """Return Hopper's kernels with float32 results of 16-bit inputs, which parts and out_dtype alone ask for."""
    found: list[Any] = []
    for head_dims in HEAD_DIMS:
        for flags in ((), ("has_window",), ("has_window", "has_softcap")):
            problem = replace(listing.problem_of("bfloat16", *head_dims, flags), seqlen_k=512)
            found.append(sm90_forward.wide_config(problem, sm90_forward.config_for(problem)))
    dims = dict.fromkeys((x.head_dim, x.head_dim_v) for x in NARROW_TABLE + WIDE_TABLE)
    for head_dim, head_dim_v in dims:
        problem = replace(listing.problem_of("bfloat16", head_dim, head_dim_v, ("has_window",)), seqlen_q=8192)
        gradients = replace(sm90_backward.backward(problem, ())[0], wide_results=True)
        found += [gradients, replace(gradients.of_rows, entry=sm90_backward.DQ)]
    return found


@needs_compiler
@pytest.mark.parametrize("config", wide_kernels(), ids=lambda c: f"{c.entry}-{c.head_dim}-{c.head_dim_v}-{c.flags}")
def test_kernels_with_wide_results_compile_without_spills(config: Any) -> None:
    report = cuda_compile.compile_for("sm_90a", source(config), config.entry)
    assert report.spill_bytes == 0
    assert not report.warnings
