"""Pools of pages, FP8 codes and splits of one size with queries on a device: chunks are those of other calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import gaussian
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from lazy_device import LazyDevice
from numpy.typing import NDArray
from offload_cases import arrays, assert_same, results

import cuflash
from cuflash import e4m3, offload
from cuflash.offload.stream import Piece, chunks_of

Array = NDArray[Any]
RNG = np.random.default_rng(0)
SHARES = (0, 0.4, 1.0, "auto")


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[LazyDevice]:
    """Every pass runs on a lazy device of its own, as if the queries lay there; the devices, by their passes."""
    made: list[LazyDevice] = []

    def device_of(q: Array) -> LazyDevice:
        made.append(LazyDevice())
        return made[-1]

    monkeypatch.setattr(offload, "device_of", device_of)
    monkeypatch.setattr("cuflash.offload.in_place.is_in_place", lambda *_: False)
    return made


def paged(dtype: str = "float64", page_size: int = 10, **of_arrays: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return sequences that share pages, one of which stands twice in a row; entries of no use are wild."""
    given = arrays(dtype, batch=3, **of_arrays)
    max_pages = -(-given["k"].shape[1] // page_size)
    for name in ("k", "v"):
        given[name] = gaussian(RNG, (11, page_size, *given[name].shape[2:]), dtype)
    lengths = np.array([max_pages * page_size + 5, max_pages * page_size, 13], np.int32)
    table = RNG.integers(0, 11, (3, max_pages)).astype(np.int32)
    table[1, :3] = table[0, 1], 99, table[0, 1]
    table[2, 13 // page_size + 1 :] = -7
    return given, {"block_table": table, "kv_lengths": lengths}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_lengths": np.array([7, 3, 0], np.int32)},
    "extras": {
        "window": (20, 1),
        "bias": RNG.standard_normal((3, 4, 7, 60)),
        "mask": RNG.random((7, 60)) < 0.8,
        "alibi_slopes": RNG.uniform(0.01, 0.2, 4),
        "sink": RNG.standard_normal(4),
        "dropout_p": 0.3,
        "dropout_seed": 3,
        "score_mod": lambda s, b, h, i, j, t: s + t[h, j],
        "operands": (RNG.standard_normal((4, 60)),),
    },
    "block_mask": {"block_mask": cuflash.BlockMask.from_dense(RNG.random((4, 7, 60)) > 0.4)},
    "splits": {"split_size": 16},
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", OPTIONS)
def test_pages(streamed: list[LazyDevice], name: str, share: Any) -> None:
    given, options = paged()
    options |= OPTIONS[name]
    found = results(offload.attention_vjp, given, share=share, **options)
    assert_same(found, results(cuflash.attention_vjp, given, **options))
    assert len(streamed) == 2
    assert all(device.is_closed for device in streamed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_pages_are_rounded_once(dtype: str) -> None:
    given, options = paged(dtype)
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    exact = results(cuflash.attention_vjp, wide, **options)
    found = results(offload.attention_vjp, given, share=0.3, **options)
    alone = results(cuflash.attention_vjp, given, **options)
    for name, x in exact.items():
        assert x is not None
        error, its = (np.abs(np.asarray(y[name], np.float64) - x).max() for y in (found, alone))
        assert error <= 1.25 * its + 1e-6, name


def test_only_rows_in_use_are_read_and_others_never_leak(streamed: list[LazyDevice]) -> None:
    given, options = paged()
    expected = results(offload.attention_vjp, given, share=0.5, **options)
    whole = (given["k"].nbytes + given["v"].nbytes) // (11 * 10)  # bytes of a row
    offload.attention(given["q"], given["k"], given["v"], share=0, **options)
    assert streamed[-1].brought == (60 + 13 + 60) * whole
    used = np.zeros((11, 10), bool)
    for row, length in zip(options["block_table"], np.clip(options["kv_lengths"], 0, 60), strict=True):
        keys = np.arange(length)
        used[np.clip(row[keys // 10], 0, 10), keys % 10] = True
    for x in (given["k"], given["v"]):
        x[~used] = np.nan
    found = results(offload.attention_vjp, given, share=0.5, **options)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)


def test_values_that_are_columns_of_pooled_keys_come_with_them(streamed: list[LazyDevice]) -> None:
    given, options = paged()
    given["v"] = given["k"][..., :5]
    out = offload.attention(given["q"], given["k"], given["v"], share=0, **options)
    assert streamed[-1].brought == (60 + 13 + 60) * given["k"].nbytes // (11 * 10)
    np.testing.assert_allclose(out, cuflash.attention(given["q"], given["k"], given["v"], **options), atol=1e-13)


def codes(is_paged: bool) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return e4m3 codes with scales of every row."""
    lengths = np.array([60, 7, 41], np.int32)
    options: dict[str, Any]
    given, options = paged("float32") if is_paged else (arrays("float32", batch=3), {"kv_lengths": lengths})
    for name in ("q", "k", "v"):
        x: Any = given[name]
        given[name], scale = cuflash.quantize_fp8(x, per="token")
        options[f"{name}_scale"] = scale
    return given, options


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("queries", ["fp8", "bfloat16"])
def test_fp8(queries: str, is_paged: bool, share: Any) -> None:
    given, options = codes(is_paged)
    if queries != "fp8":
        given["q"] = (e4m3.decode(given["q"]) * options.pop("q_scale")[..., None]).astype(queries)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    options |= {"causal": True, "return_lse": True, "out_dtype": "float32"}
    expected = cuflash.attention(q, k, v, **options)
    for host in ((k, v), (k.view(e4m3.NAME), v.view(e4m3.NAME))):
        for x, y in zip(offload.attention(q, *host, share=share, **options), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=3e-6)
    del options["out_dtype"]
    assert offload.attention(q, k, v, share=share, **options)[0].dtype.name == "bfloat16"


def test_scales_of_one_row_and_of_none() -> None:
    given = arrays("float32")
    q, k, v = (cuflash.quantize_fp8(given[name])[0] for name in ("q", "k", "v"))
    scales: dict[str, Any] = {"k_scale": np.full((1, 1, 2), 0.5, np.float32), "q_scale": np.ones((1, 1, 1), np.float32)}
    for own in ({}, scales):
        options: dict[str, Any] = {**own, "out_dtype": "float32"}
        expected = cuflash.attention(q, k, v, **options)
        limit = 3e-6 * max(1.0, float(np.abs(expected).max()))  # values without a scale are codes of up to 448
        np.testing.assert_allclose(offload.attention(q, k, v, share=0.4, **options), expected, rtol=0, atol=limit)


def test_gradients_of_codes_are_refused() -> None:
    given, options = codes(False)
    with pytest.raises(NotImplementedError, match="gradients of attention with FP8 arrays"):
        offload.attention_vjp(given["q"], given["k"], given["v"], **options)


@pytest.mark.parametrize("share", [0, 0.5, "auto"])
def test_a_row_s_bits_with_splits_of_one_size_do_not_depend_on_other_rows(share: Any) -> None:
    given = arrays("float32", batch=3, seqlens=(2, 300))
    lengths = np.array([300, 123, 300], np.int32)
    options: dict[str, Any] = {"split_size": 24, "causal": True, "share": share, "return_lse": True}

    def call(batch: Any, kept: Array) -> tuple[Array, Array]:
        own = [given[name][batch] for name in ("q", "k", "v")]
        out, lse = offload.attention(*own, kv_lengths=kept, **options)
        return out, lse

    together = call(slice(None), lengths)
    for b in range(3):
        for x, y in zip(call(slice(b, b + 1), lengths[b : b + 1]), together, strict=True):
            np.testing.assert_array_equal(x[0], y[b])
    for x, y in zip(call(slice(2, None, -2), lengths[::2].copy()), together, strict=True):
        np.testing.assert_array_equal(x[::-1], y[::2])


@pytest.mark.parametrize(("first", "stop"), [(0, 0), (0, 1), (3, 1000), (50, 130), (48, 96)])
def test_fixed_splits_are_cut_at_their_multiples(first: int, stop: int) -> None:
    for batches in (1, 3):
        chunks = chunks_of(Piece(0, batches, 4, 1000), first, stop, 10, 1000, split_size=24)
        assert [key for chunk in chunks for key in range(chunk.first, chunk.stop)] == list(range(first, stop))
        assert all(chunk.first % 96 == 0 for chunk in chunks[1:])
        assert all(chunk.stop - chunk.first <= 96 for chunk in chunks)
    assert [c.stop for c in chunks_of(Piece(0, 1, 4, 100), 0, 50, 1000, 1, split_size=24)] == [24, 48, 50]


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("name", ["pages", "codes", "16-bit queries", "splits"])
def test_the_kernels_compute_chunks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "pages":
        monkeypatch.setattr(offload, "device_of", lambda q: LazyDevice(chunk_bytes=1 << 12))  # chunks of some keys
        given, options = paged("float32", dims=(16, 16))
        expected = results(cuflash.attention_vjp, given, **options)
        with hook.kernels_on(CpuDevice((8, 0), 3)):
            found = results(offload.attention_vjp, given, share=0, **options)
        assert_same(found, expected, 2e-5)
        return
    given, options = codes(True)
    if name == "splits":
        given, options = arrays("float16"), {"split_size": 32}
    if name == "16-bit queries":
        given["q"] = (e4m3.decode(given["q"]) * options.pop("q_scale")[..., None]).astype("float16")
    options |= {"causal": True, "out_dtype": "float32"}
    host = [given[x] for x in ("q", "k", "v")]
    expected_out = cuflash.attention(*host, **options)
    with hook.kernels_on(CpuDevice((8, 0), 3)):
        found_out = offload.attention(*host, share=0, **options)
    if name == "splits":
        np.testing.assert_allclose(found_out, expected_out, rtol=0, atol=2e-3)
        return
    # The kernels and NumPy's path both round weights, to e4m3 under FP8 queries and to the queries' 16 bits else.
    unit = 2.0**-4 if name == "codes" else 2.0**-11
    of_sizes = cuflash.attention(host[0], host[1], host[2] & 0x7F, **options)  # attention on abs(v)
    assert (np.abs(found_out - expected_out) <= 2 * unit * of_sizes + 2e-5).all()
