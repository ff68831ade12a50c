"""Tiles of Hopper's forward kernel whose rows are the query heads of a KV head, of any number of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import forget_launches

import cuflash
from cuflash.frontend.partial import Part
from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.plan.listing.families import problem_of
from cuflash.plan.sm90 import config as sm90_config
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.problem.attention_problem import AttentionProblem, Place
from cuflash.problem.options import Options

RNG = np.random.default_rng(0)
BATCH, QUERIES, KEYS, HEADS, HEADS_KV = 2, 75, 530, 10, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "lengths": {"kv_lengths": np.array([530, 41], np.int32), "q_lengths": np.array([60, 75], np.int32), "causal": True},
}


def tiles(head_dim: int, window: bool) -> tuple[sm90_config.Sm90ForwardConfig, ...]:
    flags = ("has_window",) if window else ()
    problem = problem_of("float16", head_dim, head_dim, flags)
    return sm90_grid.tiles_of_groups(with_heads(problem, HEADS))


def with_heads(problem: AttentionProblem, heads: int) -> AttentionProblem:
    return replace(problem, num_heads_q=heads, num_heads_kv=HEADS_KV, seqlen_q=QUERIES)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 112, 128, 160, 256])
def test_every_tile(head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS[name]
    shapes = (BATCH, QUERIES, HEADS, head_dim), *[(BATCH, KEYS, HEADS_KV, head_dim)] * 2
    q, k, v = (gaussian(RNG, shape, "float16") for shape in shapes)
    expected, expected_lse = cuflash.attention(*(x.astype(np.float64) for x in (q, k, v)), **options, return_lse=True)
    candidates = tiles(head_dim, window=name != "full")
    assert candidates
    for tile in candidates:
        for num_splits in (1, 3) if sm90_config.may_split_keys(tile) else (1,):
            forget_launches()
            taken = sm90_grid.Launches(tile, num_splits)
            monkeypatch.setattr(sm90_grid, "for_grid", lambda *_, taken=taken: taken)
            with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
                out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
            forward = next(x.kernel for x in launch._launches.values() if isinstance(x.kernel, gpu_sm90.Forward))
            assert (forward.config.block_m, forward.config.block_n) == (tile.block_m, tile.block_n)
            assert forward.config.packs_heads and forward.config.splits_keys == (num_splits > 1)
            np.testing.assert_allclose(out, expected, atol=4e-3, rtol=4e-3)
            np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_many_rows_of_few_queries_take_tiles_of_many_rows() -> None:
    """49 heads of 20 queries of a KV head are 980 rows, which read 7805 keys 20 times in tiles of one query."""
    problem = with_heads(problem_of("bfloat16", 168, 168, ()), 49 * HEADS_KV)
    problem = replace(problem, batch=1, seqlen_q=20, seqlen_k=7805)
    config, num_splits = sm90_grid.for_grid(problem, sm90_forward.config_for(problem), 132)
    assert config.packs_heads and config.block_m >= 128 and num_splits > 1


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_see_only_later_keys_than_a_split(head_dim: int) -> None:
    """The first split has keys before the window of all rows, whose values both warpgroups clear, and one sees none."""
    shapes = (1, 128, 1, head_dim), (1, 530, 1, head_dim), (1, 530, 1, head_dim)
    q, k, v = (gaussian(RNG, shape, "float16") for shape in shapes)
    expected = cuflash.attention(*(x.astype(np.float64) for x in (q, k, v)), window=(40, 20))
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        for num_splits in (2, 3, 4):
            out = cuflash.attention(q, k, v, window=(40, 20), num_splits=num_splits)
            np.testing.assert_allclose(out, expected, atol=4e-3, rtol=4e-3)
    assert any(isinstance(x.kernel, gpu_sm90.Forward) for x in launch._launches.values())


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "seqlen", "left"), [(64, 200, 120), (64, 200, 100), (128, 150, 60), (128, 200, 130)]
)
def test_rows_whose_window_lies_behind_all_keys(head_dim: int, seqlen: int, left: int, rounded: bool) -> None:
    """Queries behind the keys, as in a ring: the last ones' windows begin behind these, in their last tile or not."""
    q, k, v = (gaussian(RNG, (1, seqlen, 2, head_dim), "float16") for _ in range(3))
    part = q, k, v, Options(window=(left, 0)), Place(first_q=seqlen, first_k=0)
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        out, lse = Part(*part).forward(rounded=rounded)
    assert any(isinstance(x.kernel, gpu_sm90.Forward) for x in launch._launches.values())
    whole = [
        np.concatenate([np.zeros_like(x), x], axis=1) if x is q else np.concatenate([x, x], axis=1) for x in (q, k, v)
    ]
    wide = [x.astype(np.float64) for x in whole]
    mask = np.zeros((2 * seqlen, 2 * seqlen), bool)
    mask[seqlen:, :seqlen] = True
    expected, expected_lse = cuflash.attention(*wide, window=(left, 0), mask=mask, return_lse=True)
    np.testing.assert_allclose(out, expected[:, seqlen:], atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse, expected_lse[..., seqlen:], atol=1e-5, rtol=1e-5)
