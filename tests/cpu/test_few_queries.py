"""Few queries on the CPU path share blocks over heads and sequences, with every option, and a call costs little."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, accum_dtype, gaussian, gaussian_case, np_dtype, same_bits
from devices import Device
from numpy.typing import NDArray

import cuflash
from cuflash.cpu import scores as cpu_scores
from cuflash.cpu.threads import BLAS_THREADS
from cuflash.cpu.tiles import Layout, Tiling
from cuflash.frontend.call import Call

Array = NDArray[Any]

CPU = Device("numpy", np)
BATCH, HEADS = 5, 4
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def layout_of(case: Case) -> Layout:
    call = Call(case.q, case.k, case.v, case.library_options())
    tiling = Tiling(call.problem, call.operands, together=True)
    return Layout(tiling.sequences, tiling.num_tasks, tiling.block_rows, tiling.head_blocks)


def options_of(seed: int, dtype: str, rows: int, keys: int) -> dict[str, Any]:
    """Draw options of many shapes, which each batch entry and head has by itself or shares; some are left out."""
    rng = np.random.default_rng(seed)
    accum = accum_dtype(np_dtype(dtype))
    shapes = [(BATCH, HEADS, rows, keys), (1, HEADS, rows, keys), (BATCH, 1, 1, keys), (HEADS, 1, keys), (rows, 1)]
    bias = gaussian(rng, shapes[seed % 5], dtype)
    bias[rng.random(bias.shape) < 0.05] = -np.inf
    options: dict[str, Any] = {
        "window": [(keys // 2, 3), (None, 0), (5, None), (keys, keys)][seed % 4],
        "softcap": 5.0,
        "bias": bias,
        "mask": rng.random(shapes[(seed + 2) % 5]) < 0.8,
        "alibi_slopes": rng.random([(BATCH, HEADS), (HEADS,), (1, HEADS)][seed % 3]).astype(accum),
        "sink": gaussian(rng, (HEADS,), accum),
        "dropout_p": 0.2,
        "dropout_seed": seed,
    }
    return {name: x for i, (name, x) in enumerate(options.items()) if (i + seed) % 3 or "dropout" in name}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_options(seed: int, dtype: str) -> None:
    rows, keys = [(1, 70), (2, 9), (8, 131), (3, 1), (5, 300)][seed % 5]
    options = options_of(seed, dtype, rows, keys)
    case = gaussian_case(seed, dtype, (rows, keys), (HEADS, [1, 2, 4][seed % 3]), (9, 6), batch=BATCH, **options)
    assert [sequence.alike for sequence in layout_of(case).sequences] == [BATCH]
    assert len(layout_of(case).head_blocks) == 1
    on_device = case.on(CPU)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_alone_and_together(dtype: str) -> None:
    """Each batch entry alone gives what all of them give together, with strided arrays too."""
    for rows, keys, heads in ((1, 400, (8, 2)), (4, 37, (4, 4)), (7, 90, (6, 1))):
        case = gaussian_case(rows, dtype, (rows, keys), heads, (32, 16), batch=6, causal=True)
        strided = replace(case, q=np.ascontiguousarray(case.q.swapaxes(1, 2)).swapaxes(1, 2), v=case.v[:, ::-1])
        assert layout_of(strided).sequences[0].alike == 6
        together = strided.on(CPU).forward()
        strided.assert_forward(*together)
        for b in range(6):
            alone = replace(
                strided, q=strided.q[b : b + 1], k=strided.k[b : b + 1], v=strided.v[b : b + 1], dout=case.dout[:1]
            )
            out, lse = alone.on(CPU).forward()
            eps = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-14}[dtype]
            np.testing.assert_allclose(out[0].astype(float), together[0][b].astype(float), rtol=eps, atol=eps)
            np.testing.assert_allclose(lse[0], together[1][b], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_one_sequence_hides_another_may_see(bad: float) -> None:
    """A key that no query of its own batch entry sees changes no bit, though the others see theirs in its place."""
    case = gaussian_case(0, "float32", (2, 40), (4, 2), (8, 8), batch=3)
    mask = np.ones((3, 1, 1, 40), bool)
    mask[1, ..., 7:19] = False
    case = case.with_options(mask=mask)
    assert layout_of(case).sequences[0].alike == 3
    expected = case.on(CPU).forward()
    k, v = case.k.copy(), case.v.copy()
    k[1, 7:19], v[1, 7:19] = bad, bad
    for got, want in zip(replace(case, k=k, v=v).on(CPU).forward(), expected, strict=True):
        assert same_bits(got, want)


def test_blocks_of_few_queries() -> None:
    """Blocks have enough to do, and tiles are no larger than they may, with few and many, short and long sequences."""

    def layout(batch: int, rows: int, heads: tuple[int, int], keys: int, dtype: Any = np.float32) -> Layout:
        dim = 64
        q, k = np.empty((batch, rows, heads[0], dim), dtype), np.empty((batch, keys, heads[1], dim), dtype)
        tiling = Tiling((call := Call(q, k, k, {})).problem, call.operands, together=True)
        for block in tiling.blocks():
            for tile in tiling.tiles(block):
                pairs = (block.heads.stop_kv - block.heads.first_kv) * block.sequence.alike
                assert pairs * (tile.key_stop - tile.key) * dim <= 1 << (18 if dtype == np.float16 else 20)
        return Layout(tiling.sequences, tiling.num_tasks, tiling.block_rows, tiling.head_blocks)

    assert layout(1, 1, (32, 32), 100).num_tasks == 1
    assert len(layout(1, 1, (32, 32), 100).head_blocks) == 1
    assert [x.alike for x in layout(64, 1, (8, 8), 10).sequences] == [64]
    assert [x.alike for x in layout(70, 2, (8, 8), 60).sequences] == [34, 34, 2]
    assert [x.alike for x in layout(20, 2, (8, 8), 60, np.float16).sequences] == [8, 8, 4]
    long = layout(1, 1, (32, 8), 20000)
    assert long.num_tasks > 1 and len(long.head_blocks) == 8  # groups stay whole
    layout(1, 1, (32, 8), 20000, np.float16)


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 31, 63, 64, 70])
def test_tops_of_any_shape(columns: int) -> None:
    """Tops are the largest over keys, NaN too, however many keys are looked at at once, and are subtracted."""
    rng = np.random.default_rng(columns)
    for heads, keys in ((1, 1), (3, 1), (70, 1), (2, 2), (40, 7), (9, 64), (5, 129), (3, 2000)):
        scores = rng.standard_normal((heads, keys, columns)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.01] = -np.inf
        scores[0, keys // 2, 0] = np.nan
        tops = cpu_scores.column_tops(scores)
        np.testing.assert_array_equal(tops, scores.max(axis=1))
        assert not np.shares_memory(tops, scores)
        shift = np.where(np.isfinite(tops), tops, 0)
        expected = scores - shift[:, None]
        cpu_scores.subtract_tops(scores, shift)
        np.testing.assert_array_equal(scores, expected)


# A call may cost so much besides its products, and so many times theirs. A thread's start has no part in it.
OWN_SECONDS, PRODUCTS_SHARE = 300e-6, 2.0


def fastest(*calls: Callable[[], Any]) -> list[float]:
    """Return the processor's least time for each of alternating calls, so that other work hardly counts."""
    least = [np.inf] * len(calls)
    end = time.monotonic() + 20
    for turn in range(400):
        for index, call in enumerate(calls):
            start = time.process_time()
            call()
            least[index] = min(least[index], time.process_time() - start)
        if turn > 20 and time.monotonic() > end:
            break
    return least


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "keys", "dim"),
    [
        (1, 1, (32, 32), 100, 128),
        (8, 1, (8, 8), 300, 64),
        (1, 1, (1, 1), 10, 64),
        (38, 1, (4, 1), 25, 64),
        (1, 4, (16, 16), 49, 128),
        (14, 5, (2, 2), 9, 32),
        (4, 8, (32, 4), 581, 64),
        (1, 1, (32, 8), 1000, 128),
    ],
)
def test_time_over_that_of_two_products(batch: int, rows: int, heads: tuple[int, int], keys: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    shapes = (batch, rows, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim)
    q, k, v = (gaussian(rng, shape, "float32") for shape in shapes)
    by_head = q.reshape(batch, rows, heads[1], -1, dim).transpose(0, 2, 3, 1, 4).reshape(batch, heads[1], -1, dim)

    def products() -> Array:
        result: Array = np.matmul(np.matmul(by_head, k.transpose(0, 2, 3, 1)), v.swapaxes(1, 2))
        return result

    with BLAS_THREADS:
        products_time, own_time = fastest(products, lambda: cuflash.attention(q, k, v))
    assert own_time <= OWN_SECONDS + PRODUCTS_SHARE * products_time, (
        f"{own_time * 1e6:.0f} us, two products {products_time * 1e6:.0f} us"
    )
