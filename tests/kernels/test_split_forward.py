"""Hopper's float32 forward kernel runs on the CPU device, and is as exact as float32 at any range."""

from __future__ import annotations

from typing import Any

import devices
import numpy as np
import pytest
from compiling import HOPPER, assert_compiles_well, compiled, needs_compiler
from cpu_device import device, hook

import cuflash
from cuflash.gpu import launch
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.split import kernels as plan_split
from cuflash.plan.split import tiles as split_tiles
from cuflash.problem.attention_problem import AttentionProblem

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)

RNG = np.random.default_rng(0)
MASK = RNG.random((150, 200)) < 0.5
MASK[:, 10:40] = False
MASK[5] = False
BLOCKS = RNG.random((150, 200)) < 0.6
BLOCKS[70:] |= np.arange(200) >= 128  # some blocks are visible
HIDDEN_BY_MASK = slice(10, 40)
EPS = 2.0**-23


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


ENTRIES = ["split_channels", "split_rows", "split_forward"]


def inputs(head_dim: int = 64, head_dim_v: int = 64) -> tuple[Array, Array, Array]:
    return normal(2, 150, 4, head_dim), normal(2, 200, 2, head_dim), normal(2, 200, 2, head_dim_v)


def on_device(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Compute out and lse by the kernel, into results full of NaN."""
    devices.forget_launches()
    poisoned = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        out, lse = cuflash.attention(q, k, v, out=poisoned, return_lse=True, **options)
    assert [x.kernel.entry for x in launch._launches.values()] == ENTRIES
    return out, lse


@pytest.mark.parametrize(
    ("capability", "extra", "expected"),
    [
        ((9, 0), {}, {"split_channels": False, "split_rows": True, "split_forward": True}),
        # split_rows waits for nobody where no kernel finds factors, so it may not read what others have yet to write.
        ((9, 0), {"split_size": 64}, {"split_rows": False, "parts_forward": False}),
        ((8, 0), {}, {"split_channels": False, "split_rows": False, "parts_forward": False}),
    ],
)
def test_kernels_begin_early_behind_one_that_does_not(
    capability: tuple[int, int], extra: dict[str, Any], expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = {}
    bound = device.CpuKernel.bound

    def noting(kernel: device.CpuKernel, *arguments: Any) -> Any:
        early[kernel._entry] = arguments[-1]
        return bound(kernel, *arguments)

    monkeypatch.setattr(device.CpuKernel, "bound", noting)
    devices.forget_launches()
    with hook.kernels_on(device.CpuDevice(capability)):
        cuflash.attention(*inputs(), **extra)
    renamed = {"forward_sm80": "parts_forward"}  # several kernels share this function
    assert {renamed.get(entry, entry): value for entry, value in early.items()} == expected


def widened(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in options.items()
        if name != "precision"
    }


def both(q: Array, k: Array, v: Array, hidden: Any = None, eps: float = 8 * EPS, **options: Any) -> None:
    """Compare out and lse with the NumPy path in float64; keys `hidden` hold NaN on the device."""
    bad_k, bad_v = k.copy(), v.copy()
    if hidden is not None:
        bad_k[:, hidden], bad_v[:, hidden] = np.nan, np.inf
    out, lse = on_device(q, bad_k, bad_v, **options)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True, **widened(options))
    np.testing.assert_allclose(out, expected, rtol=eps, atol=eps * np.abs(expected).max())
    np.testing.assert_allclose(lse, expected_lse, atol=20 * eps, rtol=eps)


@pytest.mark.parametrize("head_dims", [(64, 64), (7, 3), (40, 72), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(head_dims: tuple[int, int], causal: bool) -> None:
    both(*inputs(*head_dims), causal=causal)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (200, 256)])
def test_tf32(head_dims: tuple[int, int]) -> None:
    """TF32 keeps eleven bits of every factor."""
    both(*inputs(*head_dims), causal=True, precision="tf32", eps=2.0**-9)


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "window": (slice(0, 20), {"window": (30, 10)}),
    "negative scale": (None, {"softmax_scale": -0.3}),
    "softcap": (None, {"softcap": 2.0, "causal": True}),
    "alibi": (None, {"alibi_slopes": RNG.random(4).astype(np.float32), "causal": True}),
    "bias": (HIDDEN_BY_MASK, {"bias": np.where(MASK, normal(150, 200), np.float32(-np.inf))}),
    "smallest bias": (None, {"bias": np.full((150, 200), np.finfo(np.float32).min, np.float32)}),
    "mask": (HIDDEN_BY_MASK, {"mask": MASK}),
    "sink": (None, {"sink": RNG.standard_normal(4).astype(np.float32), "window": (3, 0)}),
    "lengths": (
        slice(120, 200),
        {"kv_lengths": np.array([120, 7], np.int32), "q_lengths": np.array([0, 70], np.int32)},
    ),
    "dropout": (None, {"dropout_p": 0.3, "dropout_seed": 1234567890123}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    hidden, options = OPTIONS[name]
    both(*inputs(), hidden=hidden, **options)


@pytest.mark.parametrize("head_dims", [(192, 160), (256, 256)])
def test_values_by_halves(head_dims: tuple[int, int]) -> None:
    both(*inputs(*head_dims), hidden=HIDDEN_BY_MASK, mask=MASK, softcap=2.0)


def test_block_mask() -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    both(*inputs(), hidden=HIDDEN_BY_MASK, block_mask=block_mask, causal=True)


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_block_mask_beside_an_array(name: str, head_dims: tuple[int, int]) -> None:
    block_mask = cuflash.BlockMask.from_dense(BLOCKS)
    both(*inputs(*head_dims), hidden=HIDDEN_BY_MASK, block_mask=block_mask, window=(100, 30), **OPTIONS[name][1])


@pytest.mark.parametrize(
    ("head_dims", "precision"), [((192, 128), None), ((256, 256), None), ((128, 128), "tf32"), ((256, 128), "tf32")]
)
def test_a_block_mask_beside_an_array_and_another_option(head_dims: tuple[int, int], precision: str | None) -> None:
    options: dict[str, Any] = {"mask": MASK, "softcap": 2.0, "block_mask": cuflash.BlockMask.from_dense(BLOCKS)}
    eps = 2.0**-9 if precision else 8 * EPS
    both(*inputs(*head_dims), hidden=HIDDEN_BY_MASK, precision=precision, eps=eps, **options)


@pytest.mark.parametrize(("name", "head_dim_v"), [("softcap", 256), ("dropout", 256), ("mask", 100)])
def test_tf32_of_wide_heads(name: str, head_dim_v: int) -> None:
    hidden, options = OPTIONS[name]
    both(*inputs(200, head_dim_v), hidden=hidden, precision="tf32", eps=2.0**-9, **options)


def test_any_strides() -> None:
    """The kernel that splits operands reads them where they lie, also where TMA could not."""
    q, k, v = (np.full((*x.shape[:3], x.shape[3] + 3), np.nan, x.dtype) for x in inputs())
    views = tuple(x[..., 1:65] for x in (q, k, v))
    for view, x in zip(views, inputs(), strict=True):
        view[...] = x
    both(views[0], views[1], views[2], causal=True)


def test_packed() -> None:
    """Sequences begin at multiples of a few rows in work space, with padding before, between and behind them."""
    cu_seqlens_q, cu_seqlens_k = np.array([3, 40, 41, 41, 147], np.int32), np.array([1, 90, 97, 130, 190], np.int32)
    q, k, v = (x[0] for x in inputs())
    k[:1], v[190:] = np.nan, np.nan
    devices.forget_launches()
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        out, lse = cuflash.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, return_lse=True)
    assert [x.kernel.entry for x in launch._launches.values()] == ENTRIES
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    expected = cuflash.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, return_lse=True)
    np.testing.assert_allclose(out, expected[0], rtol=8 * EPS, atol=8 * EPS)
    np.testing.assert_allclose(lse, expected[1], rtol=8 * EPS, atol=100 * EPS)


@pytest.mark.parametrize("exponent", [-120, -60, 60, 110])
def test_scores_do_not_depend_on_how_factors_share_their_range(exponent: int) -> None:
    q, k, v = inputs()
    expected = on_device(q, k, v)
    scaled = on_device(np.ldexp(q, exponent), np.ldexp(k, -exponent), v)
    for x, y in zip(scaled, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=EPS, atol=EPS)


@pytest.mark.parametrize("exponent", [-146, -126, -100, 120, 125])
def test_range_of_values(exponent: int) -> None:
    """Values may be subnormal, or would overflow if they were added up before weights are normalised."""
    q, k, v = inputs()
    v = np.ldexp(np.clip(v, -2, 2), exponent)
    out, _ = on_device(q, k, v)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    expected = cuflash.attention(q, k, v)
    tolerance = 8 * EPS * np.abs(expected).max() + np.finfo(np.float32).smallest_subnormal
    assert np.abs(out - expected).max() <= tolerance


def test_rows_keep_their_own_range() -> None:
    """A huge key or value changes no digit of rows that do not see it; columns of values lose what float32 loses."""
    q, k, v = inputs()
    k[:, 150:], v[:, 150:] = np.float32(1e30), np.float32(3e38)
    out, _ = on_device(q, k, v, window=(None, 0), q_lengths=np.array([90, 90], np.int32))
    expected, _ = on_device(q[:, :90], k[:, :140], v[:, :140], causal=True, kv_lengths=np.array([140, 140], np.int32))
    assert expected.shape[1] == 90 and np.isfinite(expected).all()
    visible = out[:, :40]  # these see keys up to 149
    alone, _ = on_device(q[:, :40], k[:, :150], v[:, :150], causal=True)
    assert np.array_equal(visible, alone)


def test_not_finite() -> None:
    """NaN comes out where it is seen; from values it may reach other queries of the tile, but no other column."""
    q, k, v = inputs()
    k[:, 199, 0, 3] = np.nan
    v[:, 198, 1, 5] = np.nan
    out, _ = on_device(q, k, v, causal=True)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    expected = cuflash.attention(q, k, v, causal=True)
    assert np.array_equal(np.isnan(out[:, 149, :2]), np.isnan(expected[:, 149, :2]))
    assert np.isnan(out[:, 148:, 2:, 5]).all()
    assert np.isfinite(out[:, :128, :2]).all() and np.isfinite(np.delete(out[..., 2:, :], 5, axis=-1)).all()


def test_what_is_no_float32_takes_other_kernels() -> None:
    for dtype in ("float16", "float64"):
        assert plan_split.forward(AttentionProblem(1, 8, 8, 1, 1, 64, 64, dtype)) == ()
    assert plan_split.forward(AttentionProblem(1, 8, 0, 1, 1, 64, 64, "float32")) == ()


@needs_compiler
@pytest.mark.parametrize(
    ("parts", "head_dims"),
    dict.fromkeys(
        (parts, (row.head_dim, row.head_dim_v)) for parts, rows in split_tiles.FORWARD.items() for row in rows
    ),
)
def test_every_row_compiles_without_spills(parts: int, head_dims: tuple[int, int]) -> None:
    table = [config for config, _ in listing.kernels(sm90_listing.of_split_forward())]
    configs = [
        config
        for config in compiled(HOPPER, table)
        if isinstance(config, plan_split.SplitConfig)
        and (config.parts, config.head_dim, config.head_dim_v) == (parts, *head_dims)
    ]
    assert configs
    for config in configs:
        assert_compiles_well(HOPPER, config)
