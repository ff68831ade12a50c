"""Hopper's float32 gradient kernels run on the CPU device, and are as exact as float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import devices
import numpy as np
import pytest
from compiling import HOPPER, assert_compiles_well, compiled, needs_compiler, spill_nothing
from cpu_device import device, hook

import cuflash
from cuflash.gpu import launch
from cuflash.plan.entries import key_results
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
HIDDEN_BY_MASK = slice(10, 40)
EPS = 2.0**-23


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def inputs(head_dim: int = 64, head_dim_v: int = 64) -> tuple[Array, Array, Array, Array]:
    """Make dout, q, k and v."""
    q, k, v = normal(2, 150, 4, head_dim), normal(2, 200, 2, head_dim), normal(2, 200, 2, head_dim_v)
    return normal(2, 150, 4, head_dim_v), q, k, v


def widened(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in options.items()
        if name != "precision"
    }


def both(dout: Array, q: Array, k: Array, v: Array, hidden: Any = None, eps: float = 16 * EPS, **options: Any) -> None:
    """Compare gradients with the NumPy path in float64; keys `hidden` hold NaN on the device."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    out, lse = cuflash.attention(wide[0], wide[1], wide[2], return_lse=True, **widened(options))
    expected = cuflash.attention_backward(
        dout.astype(np.float64), wide[0], wide[1], wide[2], out, lse, **widened(options)
    )
    bad_k, bad_v = k.copy(), v.copy()
    if hidden is not None:
        bad_k[:, hidden], bad_v[:, hidden] = np.nan, np.inf
    devices.forget_launches()
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        found = cuflash.attention_backward(
            dout, q, bad_k, bad_v, out.astype(np.float32), lse.astype(np.float32), **options
        )
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert split_tiles.DQ in entries and any(map(key_results, entries))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=eps, atol=eps * np.abs(y).max())


@pytest.mark.parametrize("head_dims", [(64, 64), (7, 3), (40, 64), (128, 128), (70, 100), (130, 192)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(head_dims: tuple[int, int], causal: bool) -> None:
    both(*inputs(*head_dims), causal=causal)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)])
def test_tf32(head_dims: tuple[int, int]) -> None:
    """TF32 keeps eleven bits of every factor."""
    both(*inputs(*head_dims), causal=True, precision="tf32", eps=2.0**-8)


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "window": (slice(0, 20), {"window": (30, 10)}),
    "negative scale": (None, {"softmax_scale": -0.3}),
    "softcap": (None, {"softcap": 2.0, "causal": True}),
    "alibi": (None, {"alibi_slopes": RNG.random(4).astype(np.float32), "causal": True}),
    "bias": (HIDDEN_BY_MASK, {"bias": np.where(MASK, normal(150, 200), np.float32(-np.inf))}),
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


@pytest.mark.parametrize("option", [{"causal": True}, {"mask": MASK[::-1]}, {"dropout_p": 0.3, "dropout_seed": 5}])
def test_block_mask(option: dict[str, Any]) -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    both(*inputs(), hidden=HIDDEN_BY_MASK, block_mask=block_mask, **option)


@pytest.mark.parametrize(("head_dim", "precision"), [(64, None), (128, None), (192, None), (192, "tf32")])
def test_block_mask_beside_two_options(head_dim: int, precision: str | None) -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    options: dict[str, Any] = {"block_mask": block_mask, "softcap": 2.0, "mask": MASK[::-1], "precision": precision}
    eps = 2.0**-8 if precision else 16 * EPS
    both(*inputs(head_dim, head_dim), hidden=HIDDEN_BY_MASK, eps=eps, **options)


@pytest.mark.parametrize("head_dim", [64, 200])
def test_block_mask_beside_all_options(head_dim: int) -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    others = {name: x for each in ("softcap", "alibi", "bias", "dropout") for name, x in OPTIONS[each][1].items()}
    both(*inputs(head_dim, head_dim), hidden=HIDDEN_BY_MASK, block_mask=block_mask, mask=MASK[::-1], **others)


def test_block_mask_in_narrow_tiles() -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    both(*inputs(256, 256), hidden=HIDDEN_BY_MASK, block_mask=block_mask)


def test_padded_queries() -> None:
    """Padded rows of q and dout reach nothing."""
    dout, q, k, v = inputs()
    lengths = np.array([100, 31], np.int32)
    out, lse = cuflash.attention(q, k, v, q_lengths=lengths, return_lse=True)
    results = []
    for bad in (0, np.nan):
        for x in (dout, q):
            x[0, 100:], x[1, 31:] = bad, bad
        with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
            results.append(cuflash.attention_backward(dout, q, k, v, out, lse, q_lengths=lengths))
    for x, y in zip(*results, strict=True):
        assert np.array_equal(x, y) and np.isfinite(x).all()


# Tiles of keys are whole and queries are ragged: the last tile of queries reaches those of the next sequence, and
# nothing else asks for a mask.
WHOLE_TILES = [0, 64, 65, 150], [0, 64, 192, 200]
RAGGED = [3, 40, 41, 41, 147], [1, 90, 97, 130, 190]


@pytest.mark.parametrize(("begins", "causal"), [(RAGGED, True), (WHOLE_TILES, False)], ids=["ragged", "whole tiles"])
def test_packed(begins: tuple[list[int], list[int]], causal: bool) -> None:
    cu_seqlens_q, cu_seqlens_k = (np.array(x, np.int32) for x in begins)
    dout, q, k, v = (x[0] for x in inputs())
    wide = [x.astype(np.float64) for x in (q, k, v)]
    arguments = (cu_seqlens_q, cu_seqlens_k)
    out, lse = cuflash.attention_varlen(wide[0], wide[1], wide[2], *arguments, causal=causal, return_lse=True)
    expected = cuflash.attention_varlen_backward(
        dout.astype(np.float64), wide[0], wide[1], wide[2], out, lse, *arguments, causal=causal
    )
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        found = cuflash.attention_varlen_backward(
            dout, q, k, v, out.astype(np.float32), lse.astype(np.float32), *arguments, causal=causal
        )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=16 * EPS, atol=16 * EPS * np.abs(y).max())


@pytest.mark.parametrize("exponent", [-40, 40])
def test_range(exponent: int) -> None:
    """Gradients scale with dout, and with values."""
    dout, q, k, v = inputs()
    both(np.ldexp(dout, exponent), q, k, v, causal=True)
    both(dout, q, k, np.ldexp(v, exponent), causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_float32_alone_takes_these_kernels(dtype: str) -> None:
    for head_dim in (1, 64, 129, 256):
        problem = AttentionProblem(1, 8, 8, 1, 1, head_dim, 64, dtype)
        assert bool(plan_split.backward(problem)) == (dtype == "float32")


BESIDE_BLOCK_MASK: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi": (1, 1)},
    "bias": {"bias": (1, 1, 8, 8)},
    "mask": {"mask": (1, 1, 8, 8)},
    "dropout": {"dropout_p": 0.1},
}


@needs_compiler
@pytest.mark.whole
@pytest.mark.parametrize("name", BESIDE_BLOCK_MASK)
def test_a_block_mask_and_a_window_beside_one_option_and_two(name: str) -> None:
    others = list(BESIDE_BLOCK_MASK)[list(BESIDE_BLOCK_MASK).index(name) + 1 :]  # a pair is one test's, not two's
    for head_dim, precision in ((64, "tf32"), (128, None)):  # what has the fewest registers left
        problem = AttentionProblem(
            1, 8, 8, 1, 1, head_dim, head_dim, "float32", window_right=0, block_mask=True, precision=precision
        )
        problem = replace(problem, **BESIDE_BLOCK_MASK[name])
        beside = [problem, *(replace(problem, **BESIDE_BLOCK_MASK[other]) for other in others)]
        for each in beside:
            assert any(spill_nothing(HOPPER, kernels) for kernels in plan_split.backward(each)), each


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_any_options_have_candidates_with_ever_fewer_columns(precision: str | None) -> None:
    """How many registers a set of options leaves is met when it is compiled, and the last tile takes the fewest."""
    problem = AttentionProblem(1, 8, 8, 1, 1, 64, 64, "float32", block_mask=True, precision=precision)
    for options in BESIDE_BLOCK_MASK.values():
        problem = replace(problem, **options)
        for head_dim in (64, 128, 192, 256):
            passes = plan_split.backward(replace(problem, head_dim=head_dim))
            columns = [sum(c.block_m if c.of_keys else c.block_n for c in each) for each in passes]
            assert columns == sorted(set(columns), reverse=True) and columns[-1] == 16 * len(passes[-1])


@needs_compiler
@pytest.mark.parametrize(
    "entry", sorted({config.entry for config, _ in listing.kernels(sm90_listing.of_split_backward())})
)
def test_every_row_compiles_without_spills(entry: str) -> None:
    configs = {config for config, _ in listing.kernels(sm90_listing.of_split_backward()) if config.entry == entry}
    for config in compiled(HOPPER, sorted(configs, key=str)):
        assert_compiles_well(HOPPER, config)
