"""The number of thread blocks that share a tile's keys in the forward kernels by mma.sync."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cuflash.hardware import smem_limit
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm80.splits import predicted_us, with_splits
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.fp8 import FP8

NUM_SMS = 132


def config_of(problem: AttentionProblem) -> sm80_forward.Sm80QueryConfig:
    family = sm80_fp8.forward if problem.has_fp8_keys else sm80_forward.forward
    return family(problem, True, (9, 0), smem_limit("sm_90"))[0]


def drawn(rng: random.Random) -> AttentionProblem:
    """Draw a problem in log scale."""
    has_codes = rng.random() < 0.5
    heads_kv, group = 2 ** rng.randrange(4), 2 ** rng.randrange(4)
    return AttentionProblem(
        batch=2 ** rng.randrange(7),
        seqlen_q=round(2 ** rng.uniform(0, 13)),
        seqlen_k=round(2 ** rng.uniform(0, 16)),
        num_heads_q=heads_kv * group,
        num_heads_kv=heads_kv,
        head_dim=(d := rng.choice([64, 96, 128, 192, 256])),
        head_dim_v=d,
        dtype=rng.choice([FP8, "bfloat16"]) if has_codes else "float16",
        has_fp8_keys=has_codes,
        out_dtype="bfloat16" if has_codes else None,
        window_right=rng.choice([None, 0]),
        softcap=rng.choice([0.0, 30.0]),
    )


def test_keys_stay_whole_where_tiles_fill_the_gpu() -> None:
    """Splits are predicted to be faster where they are taken, and then tiles alone leave multiprocessors idle."""
    rng = random.Random(0)
    num_split = 0
    for _ in range(1000):
        problem = drawn(rng)
        config = config_of(problem)
        chosen, num_splits = with_splits(problem, config, NUM_SMS)
        tiles = -(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch
        if tiles >= NUM_SMS * config.min_blocks:
            assert num_splits == 1
        assert chosen == (config if num_splits == 1 else replace(config, splits_keys=True))
        if num_splits > 1:
            num_split += 1
            assert num_splits * config.block_n < problem.seqlen_k
            whole, split = (predicted_us(problem, config, n, NUM_SMS) for n in (1, num_splits))
            assert split < whole
    assert 100 < num_split < 500


DECODE = AttentionProblem(1, 1, 32768, 32, 8, 128, 128, "bfloat16", has_fp8_keys=True, out_dtype="bfloat16")


@pytest.mark.parametrize("num_splits", [1, 7, 40])
def test_a_given_number_is_kept(num_splits: int) -> None:
    """It is so many splits, but no more than there are tiles of keys."""
    problem = replace(DECODE, num_splits=num_splits)
    assert with_splits(problem, config_of(problem), NUM_SMS)[1] == num_splits
    short = replace(problem, seqlen_k=129)
    assert (config_of(short).block_n, config_of(replace(short, split_size=1)).block_n) == (128, 64)
    assert with_splits(short, config_of(short), NUM_SMS)[1] == min(num_splits, 2)


def test_splits_of_one_size_leave_keys_whole_whatever_the_batch() -> None:
    """Packed calls cannot tell a sequence's queries, and give a row the same bits."""
    problems = [
        replace(DECODE, split_size=256, batch=batch, seqlen_k=seqlen_k)
        for batch in (1, 3, 64)
        for seqlen_k in (1, 300, 1 << 20)
    ]
    chosen = {with_splits(p, config_of(p), n) for p in problems for n in (16, NUM_SMS)}
    assert len(chosen) == 1
    assert chosen.pop()[1] == 1
