"""The kernels by mma.sync on e4m3 keys and values where they lie, on the CPU test device.

sm_80 makes numbers of 16 bits of the codes; sm_89 multiplies codes where the queries are codes, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tiers
from cases import np_dtype
from compiling import sampled
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import forget_launches
from fp8 import CODES, RMS_FACTOR, Exact, Quantized, assert_near, inputs, naive, numbers_of, quantized, rms
from fp8 import exact as exact_on
from numpy.typing import NDArray
from rows import options_of

import cuflash
from cuflash import hardware, reference
from cuflash.cuda import compile as cuda_compile
from cuflash.frontend import metadata
from cuflash.gpu import kernels, launch
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons

Array = NDArray[Any]

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
QUERIES = ("float16", "bfloat16", CODES)
PLACES = {"sm_80": (8, 0), "sm_89": (8, 9)}
LENGTHS = (70, 90)
# For queries of 16 bits both are alike.
KINDS = (*(("sm_80", queries) for queries in QUERIES), ("sm_89", CODES))


@pytest.fixture(params=KINDS, ids="-".join)
def queries(request: pytest.FixtureRequest) -> Iterator[str]:
    """The queries' dtype on an architecture; its calls must have taken kernels on codes and none that converts."""
    name, dtype = request.param
    forget_launches()
    with hook.kernels_on(CpuDevice(PLACES[name], num_sms=3)):
        yield dtype
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert entries & {sm80_fp8.ENTRY, sm80_fp8.PAGED_ENTRY}
    assert entries <= {sm80_fp8.ENTRY, sm80_fp8.PAGED_ENTRY, "gather_pages", "merge_splits"}


def drawn(
    queries: str, dims: tuple[int, int] = (64, 64), per: str = "token", lengths: tuple[int, int] = LENGTHS
) -> tuple[Any, Any, Any]:
    """Arrays of two sequences, four query heads on two; their scales; and the numbers that both are."""
    q, k, v = (
        quantized(RNG.standard_normal((2, n, h, d)).astype(np.float32), per)
        for n, h, d in zip((lengths[0], lengths[1], lengths[1]), (4, 2, 2), (dims[0], *dims), strict=True)
    )
    scales: dict[str, Any] = {"k_scale": k.scale, "v_scale": v.scale}
    if queries == CODES:
        return [q.codes, k.codes, v.codes], {"q_scale": q.scale, **scales}, [x.numbers for x in (q, k, v)]
    given = q.numbers.astype(np_dtype(queries))
    return [given, k.codes, v.codes], scales, [given.astype(np.float64), k.numbers, v.numbers]


def exact(queries: str, numbers: Sequence[Array], **options: Any) -> Exact:
    """Compute attention on numbers, and how far these kernels' rounding of weights may move it."""
    return exact_on("sm_80", queries, numbers, **options)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "negative scale": {"softmax_scale": -0.2},
    "bias": {"bias": RNG.standard_normal((2, 1, *LENGTHS)).astype(np.float32)},
    "mask": {"mask": RNG.random((4, *LENGTHS)) < 0.7},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.06], np.float32)},
    "sink": {"sink": np.array([0.0, 1, -1, 2], np.float32)},
    "lengths": {"q_lengths": np.array([70, 20], np.int32), "kv_lengths": np.array([61, 90], np.int32), "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    "block mask": {"block_mask": RNG.random(LENGTHS) < 0.8},
    "rules": {
        "score_mod": lambda s, b, h, i, j, table: s + table[h] * abs(i - j),
        "mask_mod": lambda b, h, i, j, table: (7 * i + 3 * j + h) % 5 != 0,
        "operands": (np.array([0.1, -0.05, 0.02, 0.0], np.float32),),
    },
}
TOGETHER = ("bias", "mask", "alibi", "sink", "lengths", "dropout")
OPTIONS["all"] = {"softcap": 3.0} | {name: x for one in TOGETHER for name, x in OPTIONS[one].items()}


@needs_compiler
@pytest.mark.parametrize("name", OPTIONS)
def test_options(queries: str, name: str) -> None:
    arrays, scales, numbers = drawn(queries)
    options = OPTIONS[name]
    expected = exact(queries, numbers, **options)
    given: Any = dict(options)
    if "block_mask" in given:
        given["block_mask"] = cuflash.BlockMask.from_dense(given["block_mask"])
    out, lse = cuflash.attention(*arrays, **(scales | given), return_lse=True)
    assert out.dtype.name == ("bfloat16" if queries == CODES else queries)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("dims", [(24, 40), (64, 32), (96, 80), (128, 128), (192, 128), (256, 256), (33, 71)])
def test_head_dims_and_results(queries: str, dims: tuple[int, int]) -> None:
    arrays, scales, numbers = drawn(queries, dims, per="head")
    expected = exact(queries, numbers, causal=True)
    for out_dtype in ("float16", "bfloat16", "float32"):
        out = cuflash.attention(*arrays, **scales, causal=True, out_dtype=out_dtype)
        assert out.dtype.name == out_dtype
        assert_near(out, expected)


@needs_compiler
@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "sharp"])
def test_error_is_that_of_plain_attention_with_rounded_weights(queries: str, kind: str, per: str) -> None:
    q, k, v = inputs(kind, 0)
    q8, k8, v8 = (quantized(x, per) for x in (q, k, v))
    scales: dict[str, Any] = {"k_scale": k8.scale, "v_scale": v8.scale}
    if queries == CODES:
        given, numbers = q8.codes, q8.numbers
        scales["q_scale"] = q8.scale
    else:
        given = q.astype(np_dtype(queries))
        numbers = given.astype(np.float64)
    true = reference.attention(numbers, k8.numbers, v8.numbers)[0]
    out = cuflash.attention(given, k8.codes, v8.codes, **scales)
    (key_tile,) = {x.kernel.config.block_n for x in launch._launches.values()}
    plain = naive(numbers, k8.numbers, v8, out.dtype.name, queries, key_tile)
    assert rms(out.astype(np.float64) - true) <= RMS_FACTOR * rms(plain - true)


@needs_compiler
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
def test_unused_places_never_matter(queries: str, poison: float) -> None:
    """Codes and scales beyond the lengths, before a window, and of keys that a mask hides from everybody."""
    arrays, scales, numbers = drawn(queries)
    mask = np.ones((LENGTHS[1],), bool)
    mask[33] = False
    lengths: Any = {"q_lengths": np.array([70, 11], np.int32), "kv_lengths": np.array([40, 90], np.int32)}
    options: Any = {**lengths, "mask": mask, "return_lse": True}
    windowed: Any = {"q_lengths": np.array([70, 11], np.int32), "window": (8, 0), "return_lse": True}
    hidden_by_window = (1, slice(0, 79 - 8))  # the first of eleven queries is on the diagonal of key 79
    expected = cuflash.attention(*arrays, **(scales | options)), cuflash.attention(*arrays, **(scales | windowed))
    assert_near(expected[0][0], exact(queries, numbers, **lengths, mask=mask))

    def poisoned(places: list[Any]) -> tuple[Any, Any]:
        own = [x.copy() for x in arrays]
        its: Any = {name: np.array(x) for name, x in scales.items()}
        own[0][1, 11:] = 0x7F if queries == CODES else np.nan
        if queries == CODES:
            its["q_scale"][1, 11:] = poison
        for x, name in ((own[1], "k_scale"), (own[2], "v_scale")):
            for at in places:
                x[at], its[name][at] = 0xFF, poison
        return own, its

    own, its = poisoned([(0, slice(40, None)), (slice(None), 33)])
    for x, y in zip(cuflash.attention(*own, **(its | options)), expected[0], strict=True):
        np.testing.assert_array_equal(x, y)
    own, its = poisoned([hidden_by_window])
    for x, y in zip(cuflash.attention(*own, **(its | windowed)), expected[1], strict=True):
        np.testing.assert_array_equal(x, y)


@needs_compiler
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_read_in_place(queries: str, page_size: int, packed: bool) -> None:
    """Whatever unused rows and their scales hold; with splits of one size the bits are those of any batch."""
    lengths, pages = np.array([90, 37], np.int32), -(-96 // page_size)
    table = RNG.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    used = np.zeros((2 * pages, page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        used[row] = (np.arange(pages * page_size) < length).reshape(pages, page_size)
    pools = []
    for dim in (64, 48):
        codes, scale, _ = quantized(RNG.standard_normal((2 * pages, page_size, 2, dim)).astype(np.float32), "token")
        codes[~used], scale[~used] = 0x7F, np.nan
        pools.append(Quantized(codes, scale, np.nan_to_num(numbers_of(codes, np.nan_to_num(scale)))))
    q = quantized(RNG.standard_normal((2, 5, 4, 64)).astype(np.float32), "token")
    options: dict[str, Any] = {"k_scale": pools[0].scale, "v_scale": pools[1].scale, "causal": True}
    given, numbers = q.codes, q.numbers
    if queries != CODES:
        given = q.numbers.astype(np_dtype(queries))
        numbers = given.astype(np.float64)
    rows = [x.numbers[table].reshape(2, -1, *x.numbers.shape[2:]) for x in pools]
    expected = exact(queries, (numbers, *rows), kv_lengths=lengths, causal=True)

    def attend(order: list[int], **further: Any) -> Array:
        own = {**options, **further, "block_table": table[order], "kv_lengths": lengths[order]}
        if queries == CODES:
            own["q_scale"] = q.scale[order].reshape(-1, 4) if packed else q.scale[order]
        if not packed:
            return cuflash.attention(given[order], pools[0].codes, pools[1].codes, **own)
        edges = np.arange(len(order) + 1, dtype=np.int32) * 5
        flat = given[order].reshape(-1, 4, 64)
        out = cuflash.attention_varlen(flat, pools[0].codes, pools[1].codes, edges, None, **own)
        return out.reshape(len(order), 5, 4, 48)

    assert_near(attend([0, 1]), expected)
    both = attend([0, 1], split_size=48)
    assert_near(both, expected)
    np.testing.assert_array_equal(attend([1], split_size=48)[0], both[1])


@needs_compiler
def test_strides_and_addresses(queries: str) -> None:
    """Codes of heads before tokens, of a fused array, and at an odd address."""
    arrays, scales, numbers = drawn(queries, (48, 48))
    expected = exact(queries, numbers)
    before = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    fused = np.concatenate(arrays[1:], axis=-1)
    odd = np.zeros((*arrays[1].shape[:-1], 49), np.uint8)
    odd[..., 1:] = arrays[1]
    columns = [arrays[0], fused[..., :48], fused[..., 48:]]
    strided: Any = {}
    for name, x in scales.items():
        strided[name] = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    for own in (before, columns, [arrays[0], odd[..., 1:], arrays[2]]):
        assert_near(cuflash.attention(*own, **strided), expected)


@needs_compiler
def test_scales_of_any_size(queries: str) -> None:
    """Negative ones, 0, and such as no float16 holds, beside each other; without any all are 1."""
    arrays, scales, numbers = drawn(queries, lengths=(20, 90))
    shape = scales["v_scale"].shape
    v_scale = (10.0 ** RNG.uniform(-9, 9, shape) * RNG.choice([-1, 1], shape)).astype(np.float32)
    v_scale[:, 5] = 0
    v = numbers_of(arrays[2], v_scale)
    expected = exact(queries, (numbers[0], numbers[1], v))
    out = cuflash.attention(*arrays, **{**scales, "v_scale": v_scale}, out_dtype="float32")
    assert_near(out, expected)
    plain = exact(queries, [numbers_of(x) if x.dtype == np.uint8 else x.astype(np.float64) for x in arrays])
    assert_near(cuflash.attention(*arrays, out_dtype="float32"), plain)


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
def test_a_repeated_call_launches_one_kernel(queries: str) -> None:
    for _ in range(2):
        arrays, scales, numbers = drawn(queries)
        assert_near(cuflash.attention(*arrays, **scales), exact(queries, numbers))
    assert len(metadata._repeats) == 1


@needs_compiler
@pytest.mark.parametrize(("name", "dtype"), [("sm_80", "float16"), *KINDS[2:]])
def test_shared_memory_is_clean(name: str, dtype: str) -> None:
    """No race, nothing uninitialised, over several tiles of keys with every kind of hidden element."""
    arrays, scales, numbers = drawn(dtype, lengths=(70, 150))
    mask = RNG.random((70, 150)) < 0.7
    with hook.kernels_on(CpuDevice(PLACES[name], num_sms=2, check=Check.SHARED)):
        out = cuflash.attention(*arrays, **scales, mask=mask, causal=True)
    assert_near(out, exact(dtype, numbers, mask=mask, causal=True))


ARCHITECTURES = ("sm_90a", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")


def records_of(arch: str, dtypes: Sequence[str] = sm80_fp8.DTYPES) -> list[KernelConfig]:
    """Return the records for queries of these dtypes."""
    passes = listing.of_fp8(hardware.capability_of(arch), hardware.smem_limit(arch))
    return [config for config, dtype in listing.kernels(passes) if dtype in dtypes]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_they_compile_without_spills(arch: str) -> None:
    """Records such that every option, dtype and head dim occurs; in the whole tier also a sample of the rest.

    Those are records of one of the 16-bit dtypes, as in the tables of other families.
    """
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    number, configs = ARCHITECTURES.index(arch), records_of(arch)
    chosen = set(tiers.covering(configs, options_of)[number :: len(ARCHITECTURES)])  # each takes its share
    if tiers.is_whole():
        own = set(records_of(arch, sm80_fp8.DTYPES[1:])).difference(*map(records_of, ARCHITECTURES[:number]))
        chosen |= set(sampled(sorted(own, key=str)))
    for config in chosen:
        report = cuda_compile.compile_for(arch, kernels.source_of(config), config.entry)
        assert (report.spill_bytes, report.warnings) == (0, ()), f"{arch} {config}"
        assert config.smem_bytes <= hardware.smem_limit(arch)


def test_older_gpus_convert() -> None:
    problem = AttentionProblem(1, 64, 64, 2, 2, 64, 64, "float16", has_fp8_keys=True)
    assert sm80_fp8.forward(problem, True, (7, 5), hardware.smem_limit("sm_75")) == ()
    assert "converted to float32 on GPUs older than sm_80" in reasons.fp8_sm80(problem)
    assert sm80_fp8.forward(problem, True, (8, 0), hardware.smem_limit("sm_80")) != ()


FEW: dict[str, dict[str, Any]] = {
    "plain": {},
    "several options": {
        "causal": True,
        "softcap": 3.0,
        "sink": np.array([0.5, -1.0, 0.0, 2.0], np.float32),
        "mask": RNG.random((2, 1, 5, 300)) < 0.5,
        "bias": RNG.standard_normal((2, 4, 5, 300)).astype(np.float32),
        "kv_lengths": np.array([300, 0], np.int32),
    },
    "window": {"window": (100, 3)},
    "few keys": {"kv_lengths": np.array([3, 130], np.int32), "sink": np.zeros(4, np.float32), "num_splits": 2},
}


@pytest.mark.parametrize("dims", [(64, 64), (128, 100), (256, 256)])
@pytest.mark.parametrize("name", FEW)
def test_warps_share_the_keys_of_few_rows(queries: str, name: str, dims: tuple[int, int]) -> None:
    """Warps without a visible key, and rows without one, add nothing; scales of unused keys are never read."""
    options = FEW[name]
    arrays, scales, numbers = drawn(queries, dims, lengths=(5, 300))
    if "kv_lengths" in options:
        for b, length in enumerate(options["kv_lengths"]):
            scales["k_scale"][b, length:] = scales["v_scale"][b, length:] = np.nan
            numbers[1][b, length:] = numbers[2][b, length:] = 0
    given: dict[str, Any] = scales | options
    out, lse = cuflash.attention(*arrays, **given, return_lse=True)
    (config,) = [x.kernel.config for x in launch._launches.values() if isinstance(x.kernel.config, sm80_fp8.Fp8Config)]
    assert config.splits_warps or (config.multiplies_codes and dims == (256, 256)), "such a tile does not fit sm_89"
    expected = exact(queries, numbers, **{key: x for key, x in options.items() if key != "num_splits"})
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-3, rtol=1e-4)


@needs_compiler
def test_one_query_of_grouped_heads_in_pages() -> None:
    """The query heads of a KV head are rows of one tile, in pages, too, also beside an option that decoding lacks."""
    arrays, scales, numbers = drawn("bfloat16", lengths=(1, 128))
    pools = [x.reshape(2 * 8, 16, *x.shape[2:]) for x in arrays[1:]]
    of_pages = {name: x.reshape(2 * 8, 16, *x.shape[2:]) for name, x in scales.items()}
    table = np.arange(16, dtype=np.int32).reshape(2, 8)
    lengths = np.array([128, 77], np.int32)
    bias = RNG.standard_normal((1, 4, 1, 128)).astype(np.float32)
    forget_launches()
    with hook.kernels_on(CpuDevice((8, 0), num_sms=3)):
        out = cuflash.attention(arrays[0], *pools, **of_pages, block_table=table, kv_lengths=lengths, bias=bias)
    paged: list[Any] = [x.kernel for x in launch._launches.values() if x.kernel.entry == sm80_fp8.PAGED_ENTRY]
    assert [(kernel.config.splits_warps, kernel.heads_are_rows) for kernel in paged] == [(True, True)]
    assert_near(out, exact("bfloat16", numbers, kv_lengths=lengths, bias=bias))
