"""The kernels for one query a head over a cache, on the CPU test device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiers
from cases import np_dtype
from compiling import sampled
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import forget_launches
from fp8 import CODES, RMS_FACTOR, Exact, assert_near, exact, inputs, naive, numbers_of, quantized, rms
from numpy.typing import NDArray
from rows import options_of

import cuflash
from cuflash import hardware, reference
from cuflash.cuda import compile as cuda_compile
from cuflash.gpu import kernels, launch
from cuflash.plan.config import KernelConfig
from cuflash.plan.decode import kernels as decode
from cuflash.plan.decode.tiles import CODES as CODES_KIND
from cuflash.plan.decode.tiles import HALF, RECORDS, DecodeTile
from cuflash.plan.listing import families as listing
from cuflash.plan.record import Record
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.pages import Pages

Array = NDArray[Any]

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
# A kind is what a cache holds, and the dtype of the queries over it.
KINDS = (("codes", "float16"), ("codes", "bfloat16"), ("codes", CODES), ("numbers", "float16"), ("numbers", "bfloat16"))
ENTRIES = {decode.ENTRY, "merge_splits"}
NUM_SMS = 3


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A kind of cache and its queries; every call must have taken the kernel."""
    forget_launches()
    with hook.kernels_on(CpuDevice((8, 0), num_sms=NUM_SMS)):
        yield request.param
    assert decode.ENTRY in {x.kernel.entry for x in launch._launches.values()} <= ENTRIES


class Drawn:
    """One query a head of two sequences over a cache, as a call takes them and as numbers."""

    def __init__(
        self, kind: tuple[str, str], dims: tuple[int, int] = (64, 64), heads: tuple[int, int] = (4, 2),
        num_keys: int = 300, per: str = "token",
    ) -> None:  # fmt: skip
        cache, self.queries = kind
        shapes = (1, heads[0], dims[0]), (num_keys, heads[1], dims[0]), (num_keys, heads[1], dims[1])
        drawn = [RNG.standard_normal((2, *shape)).astype(np.float32) for shape in shapes]
        q, k, v = (quantized(x, per) for x in drawn)
        self.scales: dict[str, Array] = {}
        if cache == "codes":
            self.arrays, self.numbers = [q.codes, k.codes, v.codes], [q.numbers, k.numbers, v.numbers]
            self.scales = {"k_scale": k.scale, "v_scale": v.scale}
        else:
            self.arrays = [x.astype(np_dtype(self.queries)) for x in drawn]
            self.numbers = [x.astype(np.float64) for x in self.arrays]
        if self.queries == CODES:
            self.scales["q_scale"] = q.scale
        else:
            self.arrays[0] = drawn[0].astype(np_dtype(self.queries))
            self.numbers[0] = self.arrays[0].astype(np.float64)

    def exact(self, **options: Any) -> Exact:
        return exact("sm_80", self.queries, self.numbers, **options)

    def attend(self, **options: Any) -> tuple[Array, Array]:
        return cuflash.attention(*self.arrays, **(self.scales | options), return_lse=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 3)},
    "narrow window": {"window": (5, 0)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "alibi": {"alibi_slopes": np.array([0.05, 0.02, 0.01, 0.1], np.float32)},
    "sink": {"sink": np.array([0.0, 5, -1, 2], np.float32)},
    "lengths": {"kv_lengths": np.array([300, 0], np.int32), "causal": True},
    "no query": {"q_lengths": np.array([0, 1], np.int32), "sink": np.zeros(4, np.float32)},
    "few keys": {"kv_lengths": np.array([3, 130], np.int32), "sink": np.zeros(4, np.float32)},
}
OPTIONS["all"] = {
    name: x for one in ("window", "softcap", "alibi", "sink", "few keys") for name, x in OPTIONS[one].items()
}


@needs_compiler
@pytest.mark.parametrize("num_splits", [None, 1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kind: tuple[str, str], name: str, num_splits: int | None) -> None:
    drawn, options = Drawn(kind), OPTIONS[name]
    expected = drawn.exact(**options)
    out, lse = drawn.attend(**options, num_splits=num_splits)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 1), (24, 2), (20, 1)])
def test_heads_of_a_group(kind: tuple[str, str], heads: tuple[int, int]) -> None:
    """Groups of one head, of eight and sixteen, and of more than a tile has."""
    drawn = Drawn(kind, heads=heads, num_keys=150)
    sink = RNG.standard_normal(heads[0]).astype(np.float32)
    slopes = RNG.random((2, heads[0])).astype(np.float32) * 0.1
    for options in ({}, {"sink": sink, "alibi_slopes": slopes}):
        assert_near(drawn.attend(**options)[0], drawn.exact(**options))


OF_KINDS = {"codes": CODES_KIND, "numbers": HALF}
# How many thread blocks share a multiprocessor says nothing of what one computes.
ONE_BY_ONE = {replace(r, tile=replace(r.tile, min_blocks=1)) for r in RECORDS if r.head_dim == 64}
TILES = [(kind, r) for kind in KINDS for r in sorted(ONE_BY_ONE, key=str) if r.kind == OF_KINDS[kind[0]]]


@needs_compiler
@pytest.mark.parametrize(("kind", "record"), TILES, ids=range(len(TILES)), indirect=["kind"])
def test_each_tile(kind: tuple[str, str], record: Record[DecodeTile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps of a thread block share the keys of one KV head or of two, all of them or a split."""
    tile = record.tile
    monkeypatch.setattr(decode, "RECORDS", [record])
    monkeypatch.setattr(decode, "forward", decode.forward.__wrapped__)
    monkeypatch.setattr(decode, "choices", decode.choices.__wrapped__)
    drawn = Drawn(kind, heads=(12, 4), num_keys=270)
    options = {"sink": RNG.standard_normal(12).astype(np.float32), "kv_lengths": np.array([270, 33], np.int32)}
    for num_splits in (1, 2):
        out, lse = drawn.attend(**options, num_splits=num_splits)
        assert_near(out, drawn.exact(**options))
        np.testing.assert_allclose(lse, drawn.exact(**options).lse, atol=2e-5, rtol=1e-5)
    configs: Any = [x.kernel.config for x in launch._launches.values() if x.kernel.entry == decode.ENTRY]
    assert {(own.block_m, own.num_warps, own.kv_heads) for own in configs} == {
        (tile.block_m, tile.num_warps, tile.kv_heads)
    }


@needs_compiler
@pytest.mark.parametrize("dims", [(24, 40), (96, 80), (128, 128), (192, 128), (192, 192), (256, 256), (33, 71)])
def test_head_dims_and_results(kind: tuple[str, str], dims: tuple[int, int]) -> None:
    drawn = Drawn(kind, dims, per="head")
    # Rows begin at multiples of 16 bytes, and what lies between them is not a number.
    drawn.arrays = [_padded(x) for x in drawn.arrays]
    expected = drawn.exact(causal=True)
    # Over numbers other kernels write other dtypes than the inputs'.
    for out_dtype in (kind[1],) if kind[0] == "numbers" else ("float16", "bfloat16", "float32"):
        out, _ = drawn.attend(causal=True, out_dtype=out_dtype)
        assert_near(out, expected)


def _padded(x: Array) -> Array:
    whole = np.full((*x.shape[:-1], -(-x.shape[-1] // 16) * 16), 0xFF if x.dtype == np.uint8 else np.nan, x.dtype)
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


@needs_compiler
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(kind: tuple[str, str], page_size: int) -> None:
    """Pages anywhere in a pool, shared ones, entries of no use that point nowhere, and rows that nobody may read."""
    num_keys = -(-300 // page_size) * page_size
    drawn = Drawn(kind, num_keys=num_keys, per="token")
    lengths = np.array([300, 77], np.int32)
    pages = num_keys // page_size
    table = RNG.permutation(2 * pages).astype(np.int32).reshape(2, pages)
    pools: list[Array] = []
    scales: dict[str, Any] = dict(drawn.scales)
    used = np.arange(num_keys) < lengths[:, None]
    for x in drawn.arrays[1:]:
        own = x.copy()
        own[~used] = 0xFF if own.dtype == np.uint8 else np.nan
        pool = np.empty((2 * pages, page_size, *x.shape[2:]), x.dtype)
        pool[table] = own.reshape(2, pages, page_size, *x.shape[2:])
        pools.append(pool)
    for name in scales.keys() & {"k_scale", "v_scale"}:
        own = scales[name].copy()
        own[~used] = np.nan
        scales[name] = np.empty((2 * pages, page_size, own.shape[2]), np.float32)
        scales[name][table] = own.reshape(2, pages, page_size, -1)
    table[1, -(-77 // page_size) :] = -1 if page_size != 3 else 2**31 - 1
    options: dict[str, Any] = {"block_table": table, "kv_lengths": lengths, "causal": True, "window": (200, 0)}
    expected = drawn.exact(kv_lengths=lengths, causal=True, window=(200, 0))
    given: dict[str, Any] = scales | options | {"return_lse": True}
    out, lse = cuflash.attention(drawn.arrays[0], pools[0], pools[1], **given)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5, rtol=1e-5)


@needs_compiler
def test_pages_of_different_strides(kind: tuple[str, str]) -> None:
    """Pools of keys and of values that are slices of one array, with heads before rows."""
    drawn = Drawn(kind, num_keys=64, per="head")
    k, v = (x.reshape(8, 16, 2, 64).swapaxes(1, 2) for x in drawn.arrays[1:])
    both = np.ascontiguousarray(np.stack([k, v], axis=1))
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    # A pool has one scale a head for all sequences.
    scales: dict[str, Any] = {name: x[:1] for name, x in drawn.scales.items() if name != "q_scale"}
    if "q_scale" in drawn.scales:
        scales["q_scale"] = drawn.scales["q_scale"]
    if scales:
        for i, name in ((1, "k_scale"), (2, "v_scale")):
            drawn.numbers[i] = numbers_of(drawn.arrays[i], scales[name])
    pools = both[:, 0].swapaxes(1, 2), both[:, 1].swapaxes(1, 2)
    lengths = np.full(2, 64, np.int32)
    out = cuflash.attention(drawn.arrays[0], *pools, **scales, block_table=table, kv_lengths=lengths)
    assert_near(out, drawn.exact())


@needs_compiler
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
def test_unused_places_never_matter(kind: tuple[str, str], poison: float) -> None:
    """Keys behind the lengths and before a window, and their scales; the query of a sequence without one."""
    drawn = Drawn(kind)
    options: dict[str, Any] = {"kv_lengths": np.array([200, 40], np.int32), "window": (33, 0)}
    expected = drawn.attend(**options)
    assert_near(expected[0], drawn.exact(**options))
    for b, (begin, end) in enumerate(((200 - 34, 200), (40 - 34, 40))):
        hidden = np.ones(300, bool)
        hidden[begin:end] = False
        for x in drawn.arrays[1:]:
            with np.errstate(over="ignore"):  # -1e30 is an infinity of float16
                x[b, hidden] = 0xFF if x.dtype == np.uint8 else poison
        for name in drawn.scales.keys() & {"k_scale", "v_scale"}:
            drawn.scales[name][b, hidden] = poison
    for x, y in zip(drawn.attend(**options), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@needs_compiler
@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_one_visible_key_is_the_result(kind: tuple[str, str], name: str) -> None:
    """It is v itself in 16 bits, also where its scale is none that a float16 holds."""
    drawn = Drawn(kind)
    if "v_scale" in drawn.scales:
        drawn.scales["v_scale"] *= np.float32(1e-9)
        drawn.numbers[2] = numbers_of(drawn.arrays[2], drawn.scales["v_scale"])
    out, _ = drawn.attend(**OPTIONS[name], window=(0, 0), out_dtype="float32" if kind[0] == "codes" else None)
    last = np.repeat(drawn.numbers[2][:, -1:], 2, axis=2)
    np.testing.assert_allclose(out.astype(np.float64), last, rtol=3e-7 if kind[0] == "codes" else 0)


@needs_compiler
def test_sinks_of_any_size(kind: tuple[str, str]) -> None:
    """A sink is the lse of a row that sees nothing, bit for bit, also where it is too large for a score of base 2."""
    drawn = Drawn(kind)
    sink = np.array([3e38, -3e38, 7.3, -np.inf], np.float32)
    options: dict[str, Any] = {"sink": sink, "kv_lengths": np.array([200, 0], np.int32)}
    expected = drawn.exact(**options)
    out, lse = drawn.attend(**options)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(lse[1, :, 0], sink)


@needs_compiler
@pytest.mark.parametrize("kind", [one for one in KINDS if one[1] == "bfloat16"], ids="-".join, indirect=True)
def test_queries_of_any_size(kind: tuple[str, str]) -> None:
    """Rows far beyond float16's range, of which NaN stays in its head, and a row of zeros."""
    drawn = Drawn(kind)
    factors = np.array([2.0**100, 2.0**-90, 0, 1])
    q = (drawn.numbers[0] * factors[:, None]).astype(ml_dtypes.bfloat16)
    drawn.arrays[0], drawn.numbers[0] = q, q.astype(np.float64)
    for factor in (2.0**-100, 1.0):
        assert_near(drawn.attend(softmax_scale=max(factor, 2.0**-64))[0][:, :, 1:],
                    _without_first(drawn.exact(softmax_scale=max(factor, 2.0**-64))))  # fmt: skip
    q[:, :, 0, 3] = np.nan
    out, _ = drawn.attend()
    assert np.isnan(out[:, :, 0].astype(np.float32)).all()
    assert np.isfinite(out[:, :, 1:].astype(np.float32)).all()


@needs_compiler
@pytest.mark.parametrize("kind", [one for one in KINDS if one[1] == "bfloat16"], ids="-".join, indirect=True)
def test_elements_of_a_query_far_apart(kind: tuple[str, str]) -> None:
    """Small elements decide where keys are 0 beside a huge one."""
    drawn = Drawn(kind)
    for x, numbers in zip(drawn.arrays[:2], drawn.numbers[:2], strict=True):
        x[..., 0] = 0
        numbers[..., 0] = 0
    drawn.arrays[0][..., 0] = drawn.numbers[0][..., 0] = 2.0**100
    out, lse = drawn.attend()
    expected = drawn.exact()
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5, rtol=1e-5)


def _without_first(expected: Exact) -> Exact:
    return expected._replace(out=expected.out[:, :, 1:], rounding=np.asarray(expected.rounding)[:, :, 1:])


@needs_compiler
def test_scales_of_any_size() -> None:
    """Negative ones, 0, and such as no float16 holds, beside each other; without any all are 1."""
    with hook.kernels_on(CpuDevice((8, 0), num_sms=NUM_SMS)):
        for queries in ("float16", CODES):
            drawn = Drawn(("codes", queries))
            shape = drawn.scales["v_scale"].shape
            v_scale = (10.0 ** RNG.uniform(-9, 9, shape) * RNG.choice([-1, 1], shape)).astype(np.float32)
            v_scale[:, 5] = 0
            drawn.scales["v_scale"] = v_scale
            drawn.numbers[2] = numbers_of(drawn.arrays[2], v_scale)
            assert_near(drawn.attend(out_dtype="float32")[0], drawn.exact())
            drawn.scales, arrays = {}, drawn.arrays
            drawn.numbers = [numbers_of(x) if x.dtype == np.uint8 else x.astype(np.float64) for x in arrays]
            assert_near(drawn.attend(out_dtype="float32")[0], drawn.exact())


@needs_compiler
@pytest.mark.parametrize("per", ["tensor", "token"])
@pytest.mark.parametrize("size", [1e-33, 1e36])
def test_scales_near_the_ends_of_float32(size: float, per: str) -> None:
    """Results are as near as those of other scales are."""
    with hook.kernels_on(CpuDevice((8, 0), num_sms=NUM_SMS)):
        for queries in ("float16", CODES):
            drawn = Drawn(("codes", queries), per=per)
            drawn.scales["v_scale"] *= np.float32(size)
            drawn.numbers[2] = numbers_of(drawn.arrays[2], drawn.scales["v_scale"])
            expected, out = drawn.exact(), drawn.attend(out_dtype="float32")[0]
            # In units of the size, so that no constant of the tolerance hides anything.
            assert_near(
                out / np.float32(size), expected._replace(out=expected.out / size, rounding=expected.rounding / size)
            )


@needs_compiler
@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("inputs_of", ["gaussian", "outliers", "sharp"])
def test_error_is_that_of_plain_attention_with_rounded_weights(inputs_of: str, per: str) -> None:
    q, k, v = inputs(inputs_of, 0, seqlens=(1, 2000), heads=(16, 2))
    q8, k8, v8 = (quantized(x, per) for x in (q, k, v))
    scales: dict[str, Any] = {"k_scale": k8.scale, "v_scale": v8.scale}
    with hook.kernels_on(CpuDevice((8, 0), num_sms=NUM_SMS)):
        for queries in ("bfloat16", CODES):
            given = q8.codes if queries == CODES else q.astype(np_dtype(queries))
            numbers = q8.numbers if queries == CODES else given.astype(np.float64)
            of_queries: dict[str, Any] = {"q_scale": q8.scale} if queries == CODES else {}
            true = reference.attention(numbers, k8.numbers, v8.numbers)[0]
            out = cuflash.attention(given, k8.codes, v8.codes, **scales, **of_queries)
            plain = naive(numbers, k8.numbers, v8, out.dtype.name, queries)
            assert rms(out.astype(np.float64) - true) <= RMS_FACTOR * rms(plain - true)


@needs_compiler
def test_nan_of_a_visible_key_is_seen(kind: tuple[str, str]) -> None:
    drawn = Drawn(kind)
    drawn.arrays[2][0, 5, 0, 0] = 0x7F if drawn.arrays[2].dtype == np.uint8 else np.nan
    out = drawn.attend()[0].astype(np.float32)
    assert np.isnan(out[0, :, :2, 0]).all()
    assert np.isfinite(out[..., 1:]).all()
    assert np.isfinite(out[1]).all()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_shared_memory_is_clean(kind: tuple[str, str]) -> None:
    """No race and nothing uninitialised, over several rounds of the stages."""
    drawn = Drawn(kind, num_keys=700)
    with hook.kernels_on(CpuDevice((8, 0), num_sms=2, check=Check.SHARED)):
        assert_near(drawn.attend(causal=True)[0], drawn.exact(causal=True))


PROBLEM = AttentionProblem(4, 1, 8192, 16, 4, 64, 64, "bfloat16", softmax_scale=0.125, has_fp8_keys=True)
HERE = True, (9, 0), hardware.smem_limit("sm_90")


def test_what_it_leaves_to_others() -> None:
    """More queries or heads, options that hide keys one by one, splits of one size, unaligned rows and older GPUs."""
    assert decode.forward(PROBLEM, *HERE)
    for other in (
        {"seqlen_q": 2},
        {"packed": True},
        {"mask": (1, 1, 1, 1)},
        {"bias": (1, 1, 1, 1), "bias_dtype": "float32"},
        {"dropout_p": 0.1},
        {"split_size": 256},
        {"softmax_scale": -1.0},
        {"head_dim": 300},
        {"num_heads_q": 512},
    ):
        assert not decode.forward(replace(PROBLEM, **other), *HERE), other
    assert not decode.forward(PROBLEM, False, *HERE[1:])
    assert not decode.forward(PROBLEM, True, (7, 5), hardware.smem_limit("sm_75"))


def test_hopper_takes_it_where_it_is_sooner() -> None:
    """Short caches and small pages are the kernel's; long caches, options and large pages are Hopper's own kernel's."""

    def is_sooner(**other: Any) -> bool:
        return decode.is_sooner(replace(PROBLEM, **other), 132, *HERE)

    own = {"has_fp8_keys": False, "dtype": "bfloat16", "out_dtype": None, "num_heads_q": 32, "num_heads_kv": 8}
    assert is_sooner(**own, batch=8, seqlen_k=512)
    assert not is_sooner(**own, batch=64, seqlen_k=8192)
    assert not is_sooner(**own, batch=8, seqlen_k=512, softcap=30.0)
    paged = own | {"batch": 64, "seqlen_k": 8192}
    assert is_sooner(**paged, pages=Pages(64 * 512, 16, 512))
    one = own | {"batch": 1, "seqlen_k": 32768, "head_dim": 128, "head_dim_v": 128}
    assert not is_sooner(**one, pages=Pages(128, 256, 128))
    assert not is_sooner(seqlen_q=2)


def test_heads_of_a_line_share_a_thread_block() -> None:
    """Rows of 64 bytes do, where heads are pairs and thread blocks enough."""
    many = replace(PROBLEM, batch=512, num_heads_q=16, num_heads_kv=4, head_dim=64, head_dim_v=64)
    others: list[tuple[dict[str, Any], int]] = [
        ({}, 2), ({"num_heads_q": 12, "num_heads_kv": 3}, 1), ({"head_dim_v": 128}, 1)
    ]  # fmt: skip
    for other, kv_heads in others:
        assert decode.choices(replace(many, **other), 132, *HERE)[0].config.kv_heads == kv_heads, other


def test_splits_fill_the_gpu_and_no_more() -> None:
    config = decode.forward(PROBLEM, *HERE)[0]
    many = replace(PROBLEM, batch=512)
    assert decode.num_splits(many, config, 132) == 1
    few = replace(PROBLEM, batch=1, seqlen_k=1 << 17)
    assert 16 <= decode.num_splits(few, config, 132) <= 128
    assert decode.num_splits(replace(few, num_splits=7), config, 132) == 7
    assert decode.num_splits(replace(few, seqlen_k=5), config, 132) == 1


ARCHITECTURES = ("sm_90a", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")


@functools.cache
def records_of(arch: str) -> list[KernelConfig]:
    """Return the records of an architecture, those that read pages and that split keys among them."""
    place = hardware.capability_of(arch), hardware.smem_limit(arch)
    return [config for config, _ in listing.kernels(listing.of_decode(*place))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_they_compile_without_spills(arch: str) -> None:
    """Records such that every option, dtype and head dim occurs, in the whole tier on each architecture.

    That tier also has a sample of those records that none of the architectures before has.
    """
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    number, configs = ARCHITECTURES.index(arch), records_of(arch)
    some = tiers.covering(configs, options_of)
    chosen = set(some if tiers.is_whole() else some[number :: len(ARCHITECTURES)])
    if tiers.is_whole():
        chosen |= set(sampled(sorted(set(configs).difference(*map(records_of, ARCHITECTURES[:number])), key=str)))
    for config in chosen:
        report = cuda_compile.compile_for(arch, kernels.source_of(config), config.entry)
        assert (report.spill_bytes, report.warnings) == (0, ()), f"{arch} {config}"
        assert config.smem_bytes <= hardware.smem_limit(arch)
