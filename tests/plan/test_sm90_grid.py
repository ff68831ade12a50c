"""Which of Hopper's forward kernels, and how many splits of keys, a grid takes by predicted times."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import times as sm90_times
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons


@pytest.fixture(autouse=True)
def _no_grid_is_full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sm90_grid, "MANY_WAVES", 7)
    monkeypatch.setattr(sm90_grid, "_FULL", math.inf)
    sm90_grid.for_grid.cache_clear()
    yield
    sm90_grid.for_grid.cache_clear()


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "parts"),
    [(1, 127, 1), (1, 1024, 8), (64, 1024, 8), (300, 300, 1), (2048, 2048, 8)],
)
def test_keys_are_split_for_few_queries_first(seqlen_q: int, seqlen_k: int, parts: int) -> None:
    problem = AttentionProblem(1, seqlen_q, seqlen_k, 1, 1, 128, 128, "float16")
    config = sm90_forward.forward(problem, ())
    assert config is not None
    assert sm90_grid.for_grid(problem, config, 132).num_splits == parts


@pytest.mark.parametrize(
    ("steps", "blocks_of_each", "us"),
    [
        ([10], 132, 12),  # each multiprocessor has one
        ([10], 133, 24),  # one has two
        ([10], 264, 24),
        ([1, 2, 3], 44, 5),  # the longest
        ([1, 2, 3], 132, 12),  # long and short ones even out
        ([9, 10], 70, 22),  # of 140, two of 9 are with one
    ],
)
def test_multiprocessors_take_whole_tiles(steps: list[int], blocks_of_each: int, us: float) -> None:
    assert sm90_times.computing_us(np.array(steps), blocks_of_each, step=1.0, tile=2.0, num_sms=132) == us


def test_splits_fill_one_round_rather_than_begin_another() -> None:
    """24 tiles with 6 splits are 144 thread blocks, 12 of which would begin when 132 end."""
    for (q, k, heads, heads_kv, d), num_splits in {
        (1448, 38201, 2, 2, 168): 5,
        (3893, 16811, 5, 1, 256): 3,
        (4096, 4096, 16, 16, 128): 1,
    }.items():
        problem = AttentionProblem(1, q, k, heads, heads_kv, d, d, "bfloat16")
        assert sm90_grid.for_grid(problem, sm90_forward.config_for(problem), 132).num_splits == num_splits


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("num_sms", [3, 80, 132])
def test_what_is_chosen_takes_the_least_predicted_time(head_dim: int, num_sms: int) -> None:
    rng = np.random.default_rng(head_dim + num_sms)
    for _ in range(40):
        seqlen_q, seqlen_k = (int(2 ** rng.uniform(7, 15)) for _ in range(2))
        heads, right = int(rng.integers(1, 33)), 0 if rng.random() < 0.5 else None
        problem = AttentionProblem(
            1, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim, "bfloat16", window_right=right
        )
        config = sm90_forward.forward(problem, ())
        assert config is not None
        chosen = sm90_grid.for_grid(problem, config, num_sms)
        most = sm90_times.predicted_us(problem, config, 1, num_sms)
        assert sm90_times.predicted_us(problem, *chosen, num_sms) <= most
        assert (
            chosen.num_splits <= sm90_times._FEW_SPLITS
            or chosen.num_splits * seqlen_q * heads <= 2 * num_sms * chosen.config.block_m + heads * 256
        )
        assert chosen.num_splits <= seqlen_k // chosen.config.block_n + 1


def test_other_layouts_and_dtypes_take_other_kernels() -> None:
    problem = AttentionProblem(1, 8, 8, 1, 1, 56, 56, "float16")
    shape = (1, 8, 1, 56)
    odd = np.zeros((1, 8, 1, 59), np.float16)[..., :56].strides
    padded = np.zeros((1, 8, 1, 64), np.float16)[..., :56].strides
    assert sm90_forward.forward(problem, ((odd, shape),) * 3) is None
    assert sm90_forward.forward(problem, ((padded, shape),) * 3) is not None
    assert "float32" in reasons.forward_sm90(AttentionProblem(1, 8, 8, 1, 1, 64, 64, "float32"))
