"""Hopper's forward kernel on 16 bits over e4m3 keys and values, on the CPU device: results, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiers
from cases import np_dtype
from compiling import HOPPER, assert_compiles_well, sampled
from compiling import needs_compiler as needs_nvrtc
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import forget_launches
from fp8 import RMS_FACTOR, Exact, assert_near, inputs, naive, numbers_of, options_for, quantized, rms
from fp8 import exact as exact_on
from numpy.typing import NDArray
from rows import options_of

import cuflash
from cuflash import reference
from cuflash.gpu import launch
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm90 import codes as sm90_codes
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.pages import Pages

Array = NDArray[Any]
needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
LENGTHS = (150, 200)
PER = ("head", "token")
ENTRY, OF_SPLITS = "forward_sm90", {"merge_splits"}


def entries() -> set[str]:
    """Return the kernels that calls have taken."""
    return {x.kernel.entry for x in launch._launches.values()}


@pytest.fixture(params=HALF_DTYPES)
def queries(request: pytest.FixtureRequest) -> Iterator[str]:
    """The queries' dtype on Hopper with few multiprocessors; its calls must have taken this kernel alone."""
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        yield request.param
    assert ENTRY in entries()
    assert entries() <= {ENTRY, *OF_SPLITS}
    assert all(x.kernel.config.has_fp8 for x in launch._launches.values() if x.kernel.entry == ENTRY)


def drawn(
    queries: str, dims: tuple[int, int] = (64, 64), per: str = "head", lengths: tuple[int, int] = LENGTHS
) -> tuple[Any, Any, Any]:
    """Queries and codes of two sequences, four query heads on two; the scales; and the numbers that all are."""
    q = RNG.standard_normal((2, lengths[0], 4, dims[0])).astype(np_dtype(queries))
    k, v = (quantized(RNG.standard_normal((2, lengths[1], 2, d)).astype(np.float32), per) for d in dims)
    return [q, k.codes, v.codes], {"k_scale": k.scale, "v_scale": v.scale}, [q.astype(np.float64), k.numbers, v.numbers]


def exact(queries: str, numbers: Any, *edges: Array, **options: Any) -> Exact:
    """Compute attention on numbers, and how far the rounding of weights may move it."""
    return exact_on("sm_90", queries, numbers, *edges, **options)


NOT_TAKEN = ("block mask", "blocks")
OPTIONS = {name: options for name, options in options_for(RNG, LENGTHS).items() if name not in NOT_TAKEN}
OPTIONS["splits"] = {"num_splits": 3, "causal": True}


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(queries: str, name: str, per: str) -> None:
    arrays, scales, numbers = drawn(queries, per=per)
    options = OPTIONS[name]
    expected = exact(queries, numbers, **{x: value for x, value in options.items() if x != "num_splits"})
    for out_dtype in (queries, "float32"):
        given = np.full((2, LENGTHS[0], 4, 64), np.nan, np_dtype(out_dtype))
        out, lse = cuflash.attention(
            *arrays, **(scales | options | {"out": given, "out_dtype": out_dtype}), return_lse=True
        )
        assert_near(out, expected)
        np.testing.assert_allclose(lse, expected.lse, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dims", [(16, 32), (80, 96), (128, 128), (144, 112), (192, 128), (192, 192), (256, 208)])
def test_head_dims(queries: str, dims: tuple[int, int], per: str) -> None:
    """Columns of q and k, and of v, that fill their panels or not."""
    arrays, scales, numbers = drawn(queries, dims, per)
    expected = exact(queries, numbers, causal=True)
    assert_near(cuflash.attention(*arrays, **scales, causal=True), expected)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values would take too much memory as elements, so that loading warps make these."""
    monkeypatch.setattr(sm90_codes, "MOST_ELEMENTS", 0)
    monkeypatch.setattr(sm90_codes, "forward", sm90_codes.forward.__wrapped__)


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(("dims", "name"), [((64, 64), "all"), ((80, 96), "plain"), ((128, 128), "lengths")])
def test_codes_that_take_much_memory(
    queries: str, dims: tuple[int, int], name: str, per: str, little_memory: None
) -> None:
    arrays, scales, numbers = drawn(queries, dims, per)
    options: Any = OPTIONS[name]
    assert_near(cuflash.attention(*arrays, **(scales | options)), exact(queries, numbers, **options))
    configs: Any = [x.kernel.config for x in launch._launches.values() if x.kernel.entry == ENTRY]
    assert all(own.copies_rows for own in configs)


@needs_compiler
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("page_size", "per"), [(1, "token"), (16, "tensor"), (80, "token"), (16, "head")])
def test_pages(queries: str, page_size: int, per: str, packed: bool) -> None:
    """Rows of no sequence, and their scales, may hold anything; a scale a head of a pool is one a page."""
    lengths, pages = np.array([200, 137], np.int32), -(-208 // page_size)
    table = RNG.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    used = np.zeros((2 * pages, page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        used[row] = (np.arange(pages * page_size) < length).reshape(pages, page_size)
    pools = []
    for dim in (64, 48):
        pool = quantized(RNG.standard_normal((2 * pages, page_size, 2, dim)).astype(np.float32), per)
        pool.codes[~used] = 0x7F
        if per == "token":
            pool.scale[~used] = np.nan
        pools.append(pool)
    scales = {name: x.scale for name, x in zip(("k_scale", "v_scale"), pools, strict=True)}
    q = RNG.standard_normal((2, 100, 4, 64)).astype(np_dtype(queries))
    rows = [x.numbers[table].reshape(2, -1, *x.numbers.shape[2:]) for x in pools]
    expected = exact(queries, (q.astype(np.float64), *rows), kv_lengths=lengths, causal=True)
    options: dict[str, Any] = {**scales, "causal": True, "block_table": table, "kv_lengths": lengths}
    if packed:
        edges = np.array([0, 100, 200], np.int32)
        flat = q.reshape(-1, *q.shape[2:])
        out = cuflash.attention_varlen(flat, pools[0].codes, pools[1].codes, edges, None, **options)
        assert_near(out.reshape(2, 100, 4, 48), expected)
    else:
        assert_near(cuflash.attention(q, pools[0].codes, pools[1].codes, **options), expected)


@needs_compiler
@pytest.mark.parametrize("per", ["tensor", "token"])
def test_packed_sequences(queries: str, per: str) -> None:
    arrays, scales, numbers = drawn(queries, per=per)
    edges_q, edges_k = np.array([0, 110, 150], np.int32), np.array([0, 130, 200], np.int32)
    packed: Any = [x[0] for x in arrays]
    packed += [edges_q, edges_k]
    own_scales: Any = {name: x[0] for name, x in scales.items()}
    out = cuflash.attention_varlen(*packed, **own_scales, causal=True)
    for sequence in (0, 1):
        rows, keys = (slice(*edges[sequence : sequence + 2]) for edges in (edges_q, edges_k))
        own = [numbers[0][:1, rows], numbers[1][:1, keys], numbers[2][:1, keys]]
        assert_near(out[None, rows], exact(queries, own, causal=True))


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "sharp"])
def test_error_is_that_of_plain_attention_with_rounded_weights(queries: str, kind: str, per: str) -> None:
    q, k, v = inputs(kind, 0)
    k8, v8 = quantized(k, per), quantized(v, per)
    given = q.astype(np_dtype(queries))
    numbers = given.astype(np.float64)
    true = reference.attention(numbers, k8.numbers, v8.numbers)[0]
    out = cuflash.attention(given, k8.codes, v8.codes, k_scale=k8.scale, v_scale=v8.scale)
    plain = naive(numbers, k8.numbers, v8, out.dtype.name, queries)
    assert rms(out.astype(np.float64) - true) <= RMS_FACTOR * rms(plain - true)


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
def test_unused_places_never_matter(queries: str, per: str, poison: float) -> None:
    """Codes and scales beyond the lengths, and of keys that a mask hides from everybody."""
    arrays, scales, numbers = drawn(queries, per=per)
    mask = np.ones((LENGTHS[1],), bool)
    mask[33] = False
    options: Any = {
        "q_lengths": np.array([150, 11], np.int32),
        "kv_lengths": np.array([140, 0], np.int32),
        "mask": mask,
    }
    expected = cuflash.attention(*arrays, **(scales | options), return_lse=True)
    assert_near(expected[0], exact(queries, numbers, **options))
    arrays[0][1, 11:] = np.nan
    for x, name in ((arrays[1], "k_scale"), (arrays[2], "v_scale")):
        x[0, 140:] = x[1] = x[:, 33] = 0xFF
        scales[name] = scales[name].copy()
        scales[name][1] = poison  # this sequence has no keys
        if per == "token":
            scales[name][0, 140:] = scales[name][:, 33] = poison
    for x, y in zip(cuflash.attention(*arrays, **(scales | options), return_lse=True), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@needs_compiler
@pytest.mark.parametrize("k_scale", [-0.3, 0.0, 1e-30, 1e-42])
@pytest.mark.parametrize("v_scale", [-2.0, 0.0, 1e9])
def test_scales_of_any_size(queries: str, k_scale: float, v_scale: float) -> None:
    arrays, _, numbers = drawn(queries, lengths=(70, 90))
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    scales = {name: np.full((1, 1, 1), x, np.float32) for name, x in scales.items()}
    own = [numbers[0], *(numbers_of(x, scale) for x, scale in zip(arrays[1:], scales.values(), strict=True))]
    assert_near(cuflash.attention(*arrays, **scales, out_dtype="float32"), exact(queries, own))
    if v_scale == 1e9:  # without scales all are 1
        plain = exact(queries, [numbers[0], *map(numbers_of, arrays[1:])])
        assert_near(cuflash.attention(*arrays, out_dtype="float32"), plain)


@needs_compiler
def test_scales_of_tokens_of_any_size(queries: str) -> None:
    """Negative ones, 0, and such as no float16 holds, beside each other."""
    arrays, scales, numbers = drawn(queries, per="token", lengths=(70, 90))
    shape = scales["v_scale"].shape
    v_scale = (10.0 ** RNG.uniform(-9, 9, shape) * RNG.choice([-1, 1], shape)).astype(np.float32)
    v_scale[:, 5] = 0
    own = [numbers[0], numbers[1], numbers_of(arrays[2], v_scale)]
    out = cuflash.attention(*arrays, **{**scales, "v_scale": v_scale}, out_dtype="float32")
    assert_near(out, exact(queries, own))
    small = np.float32(1e-12) * (1 + RNG.random(shape, np.float32))
    expected = exact(queries, [numbers[0], numbers[1], numbers_of(arrays[2], small)])
    out = cuflash.attention(*arrays, **{**scales, "v_scale": small}, out_dtype="float32")
    np.testing.assert_allclose(
        out / np.float32(1e-12), expected.out / 1e-12, atol=5e-3 * np.abs(expected.out).max() / 1e-12
    )


@needs_compiler
def test_nan_of_a_visible_key_is_seen(queries: str) -> None:
    arrays, scales, _ = drawn(queries)
    for code in (0x7F, 0xFF):
        arrays[2][0, 5, 0, 0] = code
        out = cuflash.attention(*arrays, **scales).astype(np.float32)
        assert np.isnan(out[0, :, :2, 0]).all()
        assert np.isfinite(out[..., 1:]).all()
        assert np.isfinite(out[1]).all()


@needs_compiler
def test_strides(queries: str) -> None:
    """Codes of heads before tokens, of a fused array, and at odd addresses."""
    arrays, scales, numbers = drawn(queries)
    expected = exact(queries, numbers)
    before = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    fused = np.concatenate(arrays[1:], axis=-1)
    odd = np.concatenate([arrays[1][..., :1], *arrays[1:]], axis=-1)
    at_odd_addresses = [arrays[0], odd[..., 1:65], odd[..., 65:]]
    for own in (before, [arrays[0], fused[..., :64], fused[..., 64:]], at_odd_addresses):
        assert_near(cuflash.attention(*own, **scales), expected)


@needs_compiler
@pytest.mark.parametrize("paged", [False, True])
def test_shared_memory_is_clean(queries: str, paged: bool) -> None:
    """No race, nothing uninitialised, over several tiles of keys with every kind of hidden element."""
    arrays, scales, numbers = drawn(queries, per="token", lengths=(150, 300))
    given: dict[str, Any] = {"mask": RNG.random((150, 300)) < 0.7, "causal": True}
    expected = exact(queries, numbers, **given)
    if paged:
        given |= {"block_table": np.arange(30, dtype=np.int32).reshape(2, 15), "kv_lengths": np.full(2, 300, np.int32)}
        arrays[1:] = [x.reshape(30, 20, *x.shape[2:]) for x in arrays[1:]]
        scales = {name: x.reshape(30, 20, *x.shape[2:]) for name, x in scales.items()}
    with hook.kernels_on(CpuDevice((9, 0), num_sms=2, check=Check.SHARED)):
        assert_near(cuflash.attention(*arrays, **(scales | given)), expected)


@needs_compiler
@pytest.mark.parametrize("case", ["few queries", "block mask", "split_size", "out_dtype"])
def test_other_calls_take_other_kernels(case: str) -> None:
    """Calls that the kernel does not take are right all the same."""
    arrays, scales, numbers = drawn("float16")
    options: dict[str, Any] = {}
    if case == "few queries":
        arrays[0], numbers[0] = arrays[0][:, :64], numbers[0][:, :64]
    if case == "split_size":
        options = {"split_size": 64}
    if case == "out_dtype":
        options = {"out_dtype": "bfloat16"}
    given: Any = dict(options)
    if case == "block mask":
        given["block_mask"] = cuflash.BlockMask.from_dense(RNG.random(LENGTHS) < 0.8)
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        out = cuflash.attention(*arrays, **(scales | given))
    assert entries() & {sm80_fp8.ENTRY, sm80_fp8.PAGED_ENTRY}
    assert ENTRY not in entries()
    if case == "block mask":
        options = {"mask": given["block_mask"].to_dense()}
    kept = {name: x for name, x in options.items() if name in ("mask",)}
    assert_near(out, exact("float16", numbers, **kept))


@needs_nvrtc
def test_they_compile_without_spills() -> None:
    """Records such that every option and head dim occurs; in the whole tier a sample of all of bfloat16's."""
    configs = [config for config, dtype in listing.kernels(sm90_listing.of_codes()) if dtype == "bfloat16"]
    for config in sampled(configs) if tiers.is_whole() else tiers.covering(configs, options_of):
        assert_compiles_well(HOPPER, config)


def test_which_problems_it_takes() -> None:
    problem = AttentionProblem(2, 200, 300, 8, 2, 128, 128, "bfloat16", has_fp8_keys=True, out_dtype="bfloat16")
    for batch, pages in ((2, None), (1 << 14, None), (2, Pages(100, 64, 5))):
        own = replace(problem, batch=batch, pages=pages)
        ((config, num_splits), *_) = sm90_codes.forward(own, (), num_sms=8)
        assert (config.entry, config.has_fp8, num_splits) == (ENTRY, True, 1)
        assert config.has_pages == (pages is not None)
        assert config.copies_rows == (batch > 2 or config.has_pages) != sm90_codes.makes_elements(own)
    refused: dict[str, dict[str, Any]] = {
        "few queries": {"seqlen_q": 64},
        "splits of one size": {"split_size": 64},
        "block_mask": {"block_mask": True},
        "bfloat16 queries in float16": {"out_dtype": "float16"},
        "FP8 keys": {"has_fp8_keys": False},
    }
    for reason, changes in refused.items():
        assert reason in sm90_codes.obstacle(replace(problem, **changes))
        assert not sm90_codes.forward(replace(problem, **changes), (), num_sms=8)
