"""FP8 and out_dtype work over pools of pages, where codes and scales have the pools' shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import gaussian, np_dtype
from devices import Device
from fp8 import Quantized, assert_near, exact, numbers_of, quantized
from numpy.typing import NDArray

import cuflash
from cuflash import reference

Array = NDArray[Any]

RNG = np.random.default_rng(0)
NUM_PAGES, PAGE_SIZE = 9, 4
# Entries of used keys beyond the pool are clamped, the others are never read.
TABLE = np.array([[3, 1, 7, 99], [0, 99, 3, -9]], np.int32)
LENGTHS = np.array([11, 9], np.int32)


def rows_of(pool: Array) -> Array:
    """Return the logical keys of each sequence, unused ones 0."""
    pages = pool[np.clip(TABLE, 0, NUM_PAGES - 1)]
    rows = pages.reshape(len(TABLE), -1, *pool.shape[2:]).copy()
    rows[np.arange(rows.shape[1]) >= LENGTHS[:, None]] = 0
    return rows


def pools() -> list[Quantized]:
    """Return k and v, whose codes and scales of unused places are NaN."""
    used = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    for pages, length in zip(np.clip(TABLE, 0, NUM_PAGES - 1), LENGTHS, strict=True):
        for key in range(length):
            used[pages[key // PAGE_SIZE], key % PAGE_SIZE] = True
    found = []
    for dim in (24, 40):
        codes, scale, _ = quantized(RNG.standard_normal((NUM_PAGES, PAGE_SIZE, 2, dim)).astype(np.float32), "token")
        codes[~used], scale[~used] = 0x7F, np.nan
        found.append(Quantized(codes, scale, numbers_of(codes, scale)))
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("splits", [{}, {"split_size": 8}, {"num_splits": 2}], ids=["", "split_size", "num_splits"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", ["float8_e4m3fn", "float16"])
def test_codes_in_pages(device: Device, queries: str, out_dtype: str, splits: dict[str, int], packed: bool) -> None:
    k, v = pools()
    q = RNG.standard_normal((2, 3, 4, 24)).astype(np.float16)
    options: dict[str, Any] = {"k_scale": k.scale, "v_scale": v.scale, "block_table": TABLE, "kv_lengths": LENGTHS}
    given, numbers = q, q.astype(np.float64)
    if queries == "float8_e4m3fn":
        given, scale, numbers = quantized(q, "token")
        options["q_scale"] = scale.reshape(-1, 4) if packed else scale
    options |= {"causal": True, "out_dtype": out_dtype, **splits}
    arrays = numbers, rows_of(k.numbers), rows_of(v.numbers)
    expected = exact(device.name, queries, arrays, kv_lengths=LENGTHS, causal=True)
    on_device = device.put(options)
    if packed:
        rows, *pools_of, edges = device.put((given.reshape(-1, 4, 24), k.codes, v.codes, np.array([0, 3, 6], np.int32)))
        packed_out = cuflash.attention_varlen(rows, pools_of[0], pools_of[1], edges, None, **on_device)
        out = device.get(packed_out).reshape(expected.out.shape)
    else:
        out = device.get(cuflash.attention(*device.put((given, k.codes, v.codes)), **on_device))
    assert out.dtype.name == out_dtype
    assert_near(out, expected)


def test_a_scale_has_the_pool_s_axes(device: Device) -> None:
    k, v = pools()
    arrays = device.put((gaussian(RNG, (2, 3, 4, 24), "float16"), k.codes, v.codes))
    options = device.put({"block_table": TABLE, "kv_lengths": LENGTHS})
    with pytest.raises(ValueError, match=r"k_scale: .*\(9, 4, 2\)"):
        cuflash.attention(*arrays, **options, k_scale=device.put(np.ones((2, 16, 2), np.float32)))


def test_float32_results_and_gradients_of_16_bit_pools(device: Device) -> None:
    q = gaussian(RNG, (2, 3, 4, 24), "float16")
    k, v = (gaussian(RNG, (NUM_PAGES, PAGE_SIZE, 2, 24), "float16") for _ in range(2))
    options = device.put({"block_table": TABLE, "kv_lengths": LENGTHS})
    out, backward = cuflash.attention_vjp(*device.put((q, k, v)), **options, causal=True, out_dtype="float32")
    expected = reference.attention(q, rows_of(k), rows_of(v), kv_lengths=LENGTHS, causal=True)[0]
    np.testing.assert_allclose(device.get(out), expected, atol=2e-6)
    dout = gaussian(RNG, q.shape, "float32")
    grads = device.get(backward(device.put(dout)))
    of_rows = reference.attention_backward(dout, q, rows_of(k), rows_of(v), kv_lengths=LENGTHS, causal=True)
    sums = {name: np.zeros(x.shape) for name, x in (("k", k), ("v", v))}
    for name, total in sums.items():
        for batch, pages in enumerate(np.clip(TABLE, 0, NUM_PAGES - 1)):
            for key in range(LENGTHS[batch]):
                total[pages[key // PAGE_SIZE], key % PAGE_SIZE] += of_rows[name][batch, key]
    for got, want in zip(grads, (of_rows["q"], sums["k"], sums["v"]), strict=True):
        assert got.dtype == np_dtype("float16")
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-3, atol=2e-3 * np.abs(want).max())
