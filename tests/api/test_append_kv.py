"""append_kv keeps every clause of its meaning, against a plain loop over rows in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from append_cases import Case, numbers
from devices import Device
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts
from libraries import Exporter

import cuflash
from cuflash import e4m3

Array = Any
RNG = np.random.default_rng(0)
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(device: Device, dtype: str, rotary_dim: int, interleaved: bool) -> None:
    Case(dtype, rotary_dim=rotary_dim, interleaved=interleaved).check(device)


@pytest.mark.parametrize("counts", [None, (3, 0, 2)], ids=["padded", "packed"])
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_places(device: Device, page_size: int | None, counts: Any, rotary_dim: int | None) -> None:
    """Rows come to their places in contiguous and paged caches, padded or packed, with and without rotary and q."""
    for with_q in (True, False):
        Case(page_size=page_size, counts=counts, rotary_dim=rotary_dim, with_q=with_q).check(device)


@pytest.mark.parametrize("dims", [(1, 1), (7, 3), (6, 10), (80, 24), (300, 257)])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_head_dims(device: Device, dtype: str, dims: tuple[int, int]) -> None:
    """Head dims may be ones that no wide access divides; a rotary dim may be twice an odd number, or the head's."""
    Case(dtype, dims=dims).check(device)
    for rotary_dim in {dims[0] // 2 * 2, min(6, dims[0] // 2 * 2)}:
        for interleaved in (False, True):
            Case(dtype, dims=dims, rotary_dim=rotary_dim, interleaved=interleaved).check(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_the_keys_dtype(device: Device, dtype: str) -> None:
    Case(dtype, rotary_dim=16, table_dtype=dtype).check(device)


def test_a_table_may_have_cos_and_sin_of_either_dtype(device: Device) -> None:
    case = Case("float16", rotary_dim=16)
    cos, sin = case.options["rotary"]
    case.options["rotary"] = cos, sin.astype(np.float16)
    case.check(device)


@pytest.mark.parametrize("page_size", [None, 4])
def test_rows_beyond_the_capacity_are_dropped(device: Device, page_size: int | None) -> None:
    Case(lengths=(6, 8, 7, 2**31 - 2, -2), page_size=page_size, rotary_dim=16).check(device)


def test_rows_whose_page_lies_outside_of_the_pool_are_dropped(device: Device) -> None:
    case = Case(lengths=(2, 3, 2), seqlen=4)
    case.options["block_table"][0, 0] = -1
    case.options["block_table"][1, 1] = len(case.k_cache)
    case.options["block_table"][2] = 2**31 - 1, -(2**31)
    case.check(device)


def test_entries_that_are_not_used_may_hold_anything(device: Device) -> None:
    case = Case(lengths=(0, 1, 0))
    case.options["block_table"][:, 1] = 12345
    case.check(device)


def test_positions_are_clamped_to_the_table(device: Device) -> None:
    Case(lengths=(2, 0, 5), rotary_dim=16, positions=3).check(device)
    Case(lengths=(2, 0, 5), rotary_dim=16, positions=1).check(device)


def test_positions_behind_32_bits_of_a_cache_are_clamped_too(device: Device) -> None:
    Case(lengths=(2**31 - 1,), seqlen=3, rotary_dim=16).check(device)


@pytest.mark.parametrize("counts", [None, (2, 1, 3)], ids=["padded", "packed"])
def test_any_strides(device: Device, counts: Any) -> None:
    """Every array may have any strides, on its last axis too: fused slices, transposed and reversed views, offsets."""

    def scattered(x: Array) -> Array:
        storage = np.full((*(n + 1 for n in x.shape[:-2]), x.shape[-1], 2 * x.shape[-2] + 1), 77).astype(x.dtype)
        view = storage[tuple(slice(1, None) for _ in x.shape[:-2])].swapaxes(-1, -2)[..., 1::2, ::-1]
        view[...] = x
        return view

    case = Case(counts=counts, rotary_dim=16, dims=(16, 8))
    for name in ("k", "v", "k_cache", "v_cache"):
        setattr(case, name, scattered(getattr(case, name)))
    case.q = case.options["q"] = scattered(case.q)
    case.options["rotary"] = tuple(scattered(x[None])[0] for x in case.options["rotary"])
    for name in ("block_table", "cu_seqlens"):
        if name in case.options:
            case.options[name] = np.repeat(case.options[name], 2, axis=-1)[..., ::2]
    case.check(device)
    fused = numbers((3, 3, 8, 16), "float32", RNG)
    case = Case(heads=(4, 2), dims=(16, 16), rotary_dim=16)
    case.q = case.options["q"] = fused[:, :, :4]
    case.k, case.v = fused[:, :, 4:6], fused[:, :, 6:]
    pool = numbers((8, 4, 2, 2, 16), "float32", RNG)
    case.k_cache, case.v_cache = pool[:, :, 0], pool[:, :, 1]
    case.check(device)


def test_broadcast_rows(device: Device) -> None:
    case = Case()
    case.k = np.broadcast_to(case.k[:1, :1], case.k.shape)
    case.check(device)


@pytest.mark.parametrize("empty", ["batch", "seqlen", "capacity", "pool"])
def test_nothing_to_do(device: Device, empty: str) -> None:
    options: dict[str, Any] = {"lengths": ()} if empty == "batch" else {"seqlen": 0} if empty == "seqlen" else {}
    case = Case(**options, rotary_dim=4, capacity=0 if empty == "capacity" else 8)
    if empty == "pool":
        case.k_cache, case.v_cache = case.k_cache[:0], case.v_cache[:0]
    case.check(device)
    Case(**options, page_size=None, capacity=0 if empty == "capacity" else 8).check(device)
    if empty == "batch":  # all packed rows are padding
        Case(lengths=(), counts=(), rotary_dim=4).check(device)


def test_nothing_is_read_that_is_dropped(device: Device) -> None:
    """A number that is not finite stays in its own row and pair."""
    case = Case(rotary_dim=8)
    case.k[0, 0, 0, 0] = np.nan
    case.v[1, 1, 0, 2] = np.inf
    case.check(device)


def quantised(x: Array) -> Array:
    """Return codes of e4m3 by another library."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_codes() -> None:
    """Codes are right for all halves, which hold every code and every middle of two, for others and for infinities."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for dtype in (np.float32, np.float64):
        others = np.array([1e30, -1e30, np.inf, 1e-30], dtype), RNG.normal(size=999).astype(dtype)
        with np.errstate(invalid="ignore"):
            x = np.concatenate((halves.astype(dtype), *others))
        is_number = ~np.isnan(x)
        np.testing.assert_array_equal(e4m3.encode(x[is_number]), quantised(x[is_number]))
        assert (e4m3.encode(x[~is_number]) & 0x7F == 0x7F).all()


@pytest.mark.parametrize("counts", [None, (3, 1, 2)], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["uint8", "float8_e4m3fn"])
def test_fp8(device: Device, kind: str, dtype: str, counts: Any) -> None:
    """An FP8 cache holds the codes of x / scale bit for bit, nearest even, saturated; a scale broadcasts or is 1."""
    if kind != "uint8" and device.name == "cupy":
        pytest.skip("CuPy has no arrays of float8_e4m3fn")
    case = Case(dtype, counts=counts, rotary_dim=None)
    case.k[...] = (300 * case.k).astype(case.k.dtype)
    k_cache, v_cache = (RNG.integers(0, 256, x.shape).astype(np.uint8) for x in (case.k_cache, case.v_cache))
    shape = case.k.shape[:-1]
    k_scale = RNG.uniform(0.5, 2, (*shape[:-1], 1)).astype(np.float32)
    work = np.float64 if dtype == "float64" else np.float32
    for scales in ({}, {"k_scale": k_scale, "v_scale": RNG.uniform(0.5, 2, shape).astype(np.float32)}):
        expected = [x.copy() for x in (k_cache, v_cache)]
        for name, x, cache in (("k", case.k, expected[0]), ("v", case.v, expected[1])):
            scale = np.broadcast_to(scales.get(f"{name}_scale", np.ones((1,) * len(shape), np.float32)), shape)
            for index, b, position in case.new_rows():
                place = case.place(b, position)
                if place is not None:
                    cache[place] = quantised(x[index].astype(work) / scale[index][:, None].astype(work))
        stored = np.uint8 if kind == "uint8" else pytest.importorskip("ml_dtypes").float8_e4m3fn
        case.k_cache, case.v_cache = k_cache.copy().view(stored), v_cache.copy().view(stored)
        given = case.options
        case.options = given | scales
        _, *caches = case.run(device)
        case.options = given
        for cache, codes in zip(caches, expected, strict=True):
            np.testing.assert_array_equal(cache.view(np.uint8), codes)


def test_fp8_of_rotated_keys(device: Device) -> None:
    """Rotated keys are divided and rounded once, behind the rotation."""
    case = Case("float16", rotary_dim=16)
    expected = case.expected()[0]
    before = case.k_cache.astype(np.float64) == expected
    case.k_cache, case.v_cache = np.zeros(case.k_cache.shape, np.uint8), np.zeros(case.v_cache.shape, np.uint8)
    case.options |= {"k_scale": np.full((1, 1, 1), 0.25, np.float32)}
    _, k_cache, _ = case.run(device)
    number = k_cache.view(pytest.importorskip("ml_dtypes").float8_e4m3fn).astype(np.float64) / 4
    half_step = np.maximum(np.abs(expected) / 16, 2.0**-12)
    assert (np.abs(number - expected)[~before] <= 1.001 * half_step[~before]).all()
    assert (number[before] == 0).all()


def test_other_libraries() -> None:
    torch = pytest.importorskip("torch")
    case = Case(rotary_dim=16)
    expected = case.run(Device("numpy", np))
    convert = torch.from_numpy
    options: dict[str, Any] = {
        name: tuple(map(convert, x)) if isinstance(x, tuple) else convert(x) if isinstance(x, np.ndarray) else x
        for name, x in case.options.items()
    }
    caches = [convert(x.copy()) for x in (case.k_cache, case.v_cache)]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    q = cuflash.append_kv(convert(case.k), convert(case.v), caches[0], caches[1], lengths, **options)
    assert isinstance(q, torch.Tensor)
    for ours, theirs in zip((q, *caches), expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


def test_bare_exporters() -> None:
    case = Case(rotary_dim=16)
    expected = case.run(Device("numpy", np))
    lengths, caches = np.array(case.lengths, np.int32), [x.copy() for x in (case.k_cache, case.v_cache)]
    wrapped = [Exporter(x) for x in (case.k, case.v, *caches)]
    q = cuflash.append_kv(wrapped[0], wrapped[1], wrapped[2], wrapped[3], lengths, **case.options)
    for ours, theirs in zip((q, *caches), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_immutable_caches() -> None:
    jax = pytest.importorskip("jax")
    case = Case()
    k, v, k_cache, v_cache = (jax.numpy.asarray(x) for x in (case.k, case.v, case.k_cache, case.v_cache))
    lengths, table = (jax.numpy.asarray(x) for x in (np.array(case.lengths, np.int32), case.options["block_table"]))
    with pytest.raises(TypeError, match="k_cache: expected an array that can be written in place, got one of jax"):
        cuflash.append_kv(k, v, k_cache, v_cache, lengths, block_table=table)


def wrong(error: type[Exception], message: str, **changes: Any) -> Any:
    return pytest.param(error, message, changes, id=message)


X = np.zeros
PACKED = {"cu_seqlens": X((4, 1), np.int32), "k": X((9, 2, 16), "f4"), "v": X((9, 2, 8), "f4"), "q": None}
WRONG = [
    wrong(TypeError, "k: expected dtype float16, bfloat16, float32, float64, got int32", k=X((3, 3, 2, 16), np.int32)),
    wrong(ValueError, r"k: expected \(batch, seqlen, .*, got \(9, 2, 16\); packed rows need", k=X((9, 2, 16), "f4")),
    wrong(TypeError, "v: expected k's dtype float32, got float64", v=X((3, 3, 2, 8))),
    wrong(ValueError, r"v: expected .* = \(3, 3, 2, \*\), got \(3, 3, 1, 8\)", v=X((3, 3, 1, 8), "f4")),
    wrong(ValueError, r"q: expected .* = \(3, 3, \*, 16\), got \(3, 2, 4, 16\)", q=X((3, 2, 4, 16), "f4")),
    wrong(TypeError, "q: expected k's dtype float32, got float16", q=X((3, 3, 4, 16), "f2")),
    wrong(TypeError, "k_cache: expected k's dtype float32 or FP8", k_cache=X((8, 4, 2, 16))),
    wrong(TypeError, "v_cache: expected FP8 in both caches or in neither", v_cache=X((8, 4, 2, 8), np.uint8)),
    wrong(ValueError, r"k_cache: expected .* = \(\*, \*, 2, 16\), got", k_cache=X((8, 4, 2, 15), "f4")),
    wrong(ValueError, r"v_cache: expected .* = \(8, 4, 2, 8\), got \(7, 4", v_cache=X((7, 4, 2, 8), "f4")),
    wrong(TypeError, "kv_lengths: expected dtype int32, got int64", kv_lengths=X(3, np.int64)),
    wrong(ValueError, r"kv_lengths: expected \(batch,\) = \(3,\), got \(2,\)", kv_lengths=X(2, np.int32)),
    wrong(TypeError, "block_table: expected dtype int32, got int64", block_table=X((3, 2), np.int64)),
    wrong(ValueError, r"block_table: expected .* = \(3, \*\), got \(2, 2\)", block_table=X((2, 2), np.int32)),
    wrong(ValueError, r"cu_seqlens: expected shape \(batch \+ 1,\), got \(4, 1\)", **PACKED),
    wrong(TypeError, "rotary: expected", rotary=X((2, 5, 8), "f4")),
    wrong(ValueError, "rotary: expected two arrays", rotary=(X((5, 8), "f4"),)),
    wrong(TypeError, "cos: expected an array", rotary=(None, X((5, 8), "f4"))),
    wrong(TypeError, "rotary, cos: expected dtype float32, got float64", rotary=(X((5, 8)), X((5, 8)))),
    wrong(ValueError, "rotary, cos: .* head_dim = 16", rotary=(X((5, 9), "f4"), X((5, 9), "f4"))),
    wrong(ValueError, "rotary, cos: expected .* a position at least", rotary=(X((0, 8), "f4"), X((0, 8), "f4"))),
    wrong(ValueError, "rotary, sin: expected", rotary=(X((5, 8), "f4"), X((4, 8), "f4"))),
    wrong(TypeError, "interleaved: expected a bool, got int", interleaved=1),
    wrong(ValueError, "k_scale: expected None, as the caches are not FP8", k_scale=X((1, 1, 1), "f4")),
    wrong(TypeError, "k: expected an array of NumPy", k=None),
    wrong(TypeError, "kv_lengths: expected an array of NumPy", kv_lengths=[1, 2, 3]),
]


@pytest.mark.parametrize(("error", "message", "changes"), WRONG)
def test_wrong_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    case = Case(rotary_dim=16)
    given = {
        "k": case.k,
        "v": case.v,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "kv_lengths": np.array(case.lengths, np.int32),
        **case.options,
        **changes,
    }
    before = [given[name].copy() for name in ("k_cache", "v_cache")]
    with pytest.raises(error, match=message):
        cuflash.append_kv(**given)
    for name, x in zip(("k_cache", "v_cache"), before, strict=True):
        np.testing.assert_array_equal(given[name], x)


def test_wrong_scales_and_contiguous_caches() -> None:
    case = Case(page_size=None, with_q=False)
    lengths = np.array(case.lengths, np.int32)
    with pytest.raises(ValueError, match=r"k_cache: expected \(batch, capacity, .* = \(3, \*, 2, 16\), got \(2, 8"):
        cuflash.append_kv(case.k, case.v, case.k_cache[:2], case.v_cache, lengths)
    codes = [np.zeros(x.shape, np.uint8) for x in (case.k_cache, case.v_cache)]
    for scale, error in (
        (np.ones((3, 3, 2)), TypeError),
        (np.ones(2, "f4"), ValueError),
        (np.ones((3, 2, 2), "f4"), ValueError),
    ):
        with pytest.raises(error, match="v_scale: expected"):
            cuflash.append_kv(case.k, case.v, codes[0], codes[1], lengths, v_scale=scale)


def test_caches_that_cannot_be_written() -> None:
    case = Case(dims=(16, 16), with_q=False)
    lengths, options = np.array(case.lengths, np.int32), case.options
    read_only = case.k_cache.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache: expected a writable array"):
        cuflash.append_kv(case.k, case.v, read_only, case.v_cache, lengths, **options)
    with pytest.raises(ValueError, match="k_cache: expected no overlap .* v_cache"):
        cuflash.append_kv(case.k, case.v, case.k_cache, case.k_cache, lengths, **options)
    broadcast = np.broadcast_to(case.k_cache[:1], case.k_cache.shape)
    broadcast = np.lib.stride_tricks.as_strided(case.k_cache, broadcast.shape, broadcast.strides)
    with pytest.raises(ValueError, match="k_cache: expected distinct elements"):
        cuflash.append_kv(case.k, case.v, broadcast, case.v_cache, lengths, **options)
    with pytest.raises(TypeError, match="expected an array that masks nothing"):
        cuflash.append_kv(case.k, case.v, np.ma.array(case.k_cache), case.v_cache, lengths, **options)


def test_a_repeated_call_is_checked_by_its_addresses(device: Device) -> None:
    """Only the arrays' places tell that one of several calls of the same shapes and strides is wrong."""
    case = Case(dims=(16, 16), with_q=False)
    lengths, table = device.put((np.array(case.lengths, np.int32), case.options["block_table"]))
    k, v, pool = device.put((case.k, case.v, numbers((24, 4, 2, 16), "float32", RNG)))
    for begin in (8, 16, 9):
        cuflash.append_kv(k, v, pool[:8], pool[begin : begin + 8][:8], lengths, block_table=table)
    before = device.get(pool)
    for begin in (0, 7):
        with pytest.raises(ValueError, match="k_cache: expected no overlap .* v_cache"):
            cuflash.append_kv(k, v, pool[:8], pool[begin : begin + 8], lengths, block_table=table)
    read_only = pool[16:]
    if isinstance(read_only, np.ndarray):
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match="v_cache: expected a writable array"):
            cuflash.append_kv(k, v, pool[:8], read_only, lengths, block_table=table)
    np.testing.assert_array_equal(device.get(pool), before)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_call(device: Device, data: st.DataObject) -> None:
    """Drawn calls are right, whatever their shapes, places, tables with wild entries and layouts of arrays."""
    draw = data.draw
    page_size = draw(st.sampled_from([None, 1, 3, 4]))
    lengths = tuple(draw(st.lists(st.integers(-1, 14), min_size=1, max_size=4)))
    dims = draw(st.sampled_from([(16, 16), (8, 24), (5, 3), (64, 32)]))
    rotary_dim = draw(st.none() | st.integers(0, dims[0] // 2).map(lambda half: 2 * half))
    case = Case(
        draw(st.sampled_from(["float16", "float32", "float64"])),
        lengths=lengths,
        seqlen=draw(st.integers(1, 5)),
        counts=draw(st.none() | st.tuples(*[st.integers(0, 5)] * len(lengths))),
        heads=draw(st.sampled_from([(1, 1), (4, 2), (6, 3)])),
        dims=dims,
        page_size=page_size,
        capacity=3 * (page_size or 5),
        rotary_dim=rotary_dim,
        positions=draw(st.sampled_from([1, 6, 40])),
        interleaved=draw(st.booleans()),
        with_q=draw(st.booleans()),
    )
    if page_size is not None and draw(st.booleans()):
        table = case.options["block_table"]
        table[draw(st.integers(0, len(lengths) - 1)), draw(st.integers(0, 2))] = draw(st.sampled_from([-1, 2**31 - 1]))
    for name, writable in (("k", False), ("v", False), ("q", False), ("k_cache", True), ("v_cache", True)):
        x = getattr(case, name)
        setattr(case, name, draw(layouts(x.ndim, writable=writable)).apply(x))
    if "q" in case.options:
        case.options["q"] = case.q
    case.check(device)
