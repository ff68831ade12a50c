"""Hopper's forward kernel where queries see no key: their results are zeros or their sinks', all of them written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import devices
import numpy as np
import pytest
from devices import Device
from hopper_forward import PLACES, both, large_grids, place_of, rows

import cuflash
from cuflash.gpu import launch

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _large_grids() -> Iterator[None]:
    with large_grids():
        yield


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Device:
    """Give a device to run the kernel on."""
    return place_of(request.param)


RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_warpgroups_whose_rows_see_no_keys(place: Device, head_dim: int) -> None:
    """Such a warpgroup, here the first of four, does not wait for those that wait for it to clear hidden values."""
    q, k, v = (normal(2, 327, 1, head_dim) for _ in range(3))
    lengths: dict[str, Any] = {"q_lengths": np.array([20, 233], np.int32), "kv_lengths": np.array([49, 159], np.int32)}
    both(place, q, k, v, hidden=slice(159, None), window=(85, 4), **lengths)


HIDDEN_TILES: dict[str, dict[str, Any]] = {
    "causal": {},
    "sink": {"sink": np.array([0.5, -1], np.float32)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3},
    "softcap": {"softcap": 2.0, "lse_error": 2 * 2.0**-11},
    "mask": {"mask": RNG.random((700, 5)) < 0.5},
    "window": {"window": (2, 3), "causal": False},
    "lengths": {"kv_lengths": np.array([0, 3], np.int32), "q_lengths": np.array([660, 130], np.int32)},
    "no keys": {"kv_lengths": np.array([0, 0], np.int32), "causal": False, "sink": np.array([3, -1], np.float32)},
}


@pytest.mark.parametrize("name", HIDDEN_TILES)
@pytest.mark.parametrize("head_dims", [(128, 128), (40, 59), (256, 256)])
def test_tiles_of_queries_that_see_no_key(place: Device, head_dims: tuple[int, int], name: str) -> None:
    """Poisoned results are all written, by whichever warps."""
    (q, k), v = (normal(2, n, 2, head_dims[0]) for n in (700, 5)), normal(2, 5, 2, head_dims[1])
    hidden = slice(3, 5) if "kv_lengths" in HIDDEN_TILES[name] else None
    both(place, q, k, v, hidden=hidden, **{"causal": True} | HIDDEN_TILES[name])


@pytest.mark.parametrize("layout", ["whole rows", "heads apart", "rows first", "rows of 2 bytes"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 144), (1, 136), (150, 40), (5, 64), (2, 33)])
def test_zeros_of_queries_that_see_no_key(place: Device, heads: int, head_dim: int, layout: str) -> None:
    """Results are zeros in any layout, whatever share of a thread a row is, and nothing is written between rows."""
    seqlen_q = 400
    q, k, v = (normal(2, n, heads, head_dim) for n in (seqlen_q, 5, 5))
    sizes = {
        "whole rows": (2, seqlen_q, heads, head_dim),
        "heads apart": (2, seqlen_q, heads, head_dim + 8),
        "rows first": (2, heads, seqlen_q, head_dim),
        "rows of 2 bytes": (2, seqlen_q, heads, head_dim + 1),
    }[layout]
    whole = np.full(sizes, 7, q.dtype)
    out = whole.swapaxes(1, 2) if layout == "rows first" else whole[..., :head_dim]
    sink = RNG.standard_normal(heads).astype(np.float32)
    options: dict[str, Any] = {"causal": True, "sink": sink}
    devices.forget_launches()
    with place.active():
        there = place.put({"q": rows(q), "k": rows(k), "v": rows(v), "out": out, "whole": whole, **options})
        memory = there.pop("whole")
        found, lse, memory = place.get((*cuflash.attention(**there, return_lse=True), memory))
    assert next(iter(launch._launches.values())).kernel.entry == "forward_sm90"
    wide = (x.astype(np.float64) for x in (q, k, v))
    expected, expected_lse = cuflash.attention(*wide, causal=True, sink=sink.astype(np.float64), return_lse=True)
    assert not found[:, : seqlen_q - 5].any()
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=2e-5)
    assert (memory[..., head_dim:] == 7).all()


@pytest.mark.parametrize("options", [{}, {"sink": np.array([0.5, -1], np.float32)}], ids=["plain", "sink"])
def test_packed_sequences_with_more_queries_than_keys(place: Device, options: dict[str, Any]) -> None:
    lengths = {"q": np.array([3, 453, 453, 713], np.int32), "k": np.array([0, 4, 9, 150], np.int32)}
    q, k, v = normal(720, 2, 64), normal(160, 2, 64), normal(160, 2, 64)
    devices.forget_launches()
    with place.active():
        there = place.put({"q": q, "k": k, "v": v, **{f"cu_seqlens_{x}": n for x, n in lengths.items()}, **options})
        out, lse = place.get(cuflash.attention_varlen(**there, causal=True, return_lse=True))
    wide = (x.astype(np.float64) for x in (q, k, v))
    of = {f"cu_seqlens_{x}": n for x, n in lengths.items()} | {x: n.astype(np.float64) for x, n in options.items()}
    expected, expected_lse = cuflash.attention_varlen(*wide, **of, causal=True, return_lse=True)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=2e-5)
