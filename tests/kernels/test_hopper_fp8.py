"""Hopper's forward kernel on e4m3 codes, on the CPU test device: its results, and which problems it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiers
from compiling import HOPPER, assert_compiles_well, sampled
from compiling import needs_compiler as needs_nvrtc
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import forget_launches
from fp8 import CODES, RMS_FACTOR, Exact, assert_near, inputs, naive, numbers_of, options_for, quantized, rms
from fp8 import exact as exact_on
from numpy.typing import NDArray
from rows import options_of

import cuflash
from cuflash import reference
from cuflash.gpu import launch
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm90 import fp8 as sm90_fp8
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons

Array = NDArray[Any]

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
LENGTHS = (150, 200)
PER = ("tensor", "head", "token")


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on Hopper with few multiprocessors; its calls must have taken this kernel alone."""
    if "on_hopper" not in request.fixturenames:
        yield
        return
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        yield
    assert {x.kernel.entry for x in launch._launches.values()} == {sm90_fp8.ENTRY}


@pytest.fixture
def on_hopper() -> None:
    """Ask for `hopper`."""


def drawn(
    dims: tuple[int, int] = (64, 64), per: str = "token", lengths: tuple[int, int] = LENGTHS
) -> tuple[Any, dict[str, Any], Any]:
    """Codes of two sequences, four query heads on two; their scales; and the numbers that both are."""
    q, k, v = (
        quantized(RNG.standard_normal((2, n, h, d)).astype(np.float32), per)
        for n, h, d in zip((lengths[0], lengths[1], lengths[1]), (4, 2, 2), (dims[0], *dims), strict=True)
    )
    scales = {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale}
    return [q.codes, k.codes, v.codes], scales, [q.numbers, k.numbers, v.numbers]


def exact(numbers: Sequence[Array], *edges: Array, **options: Any) -> Exact:
    """Compute attention on numbers, and how far the rounding of weights may move it."""
    return exact_on("sm_90", CODES, numbers, *edges, **options)


def attend(arrays: Any, scales: dict[str, Any], **options: Any) -> tuple[Array, Array]:
    """Call attention with a result that holds NaN."""
    out = np.full((*arrays[0].shape[:-1], arrays[2].shape[-1]), np.nan, np.float32)
    given: dict[str, Any] = {**scales, **options, "out": out, "out_dtype": "float32", "return_lse": True}
    found: tuple[Array, Array] = cuflash.attention(*arrays, **given)
    return found


OPTIONS = options_for(RNG, LENGTHS)


@needs_compiler
@pytest.mark.parametrize(("name", "per"), [(name, PER[n % 2 * 2]) for n, name in enumerate(OPTIONS)])
def test_options(on_hopper: None, name: str, per: str) -> None:
    arrays, scales, numbers = drawn(per=per)
    options = OPTIONS[name]
    expected = exact(numbers, **options)
    given = dict(options)
    if "block_mask" in given:
        given["block_mask"] = cuflash.BlockMask.from_dense(given["block_mask"])
    out, lse = attend(arrays, scales, **given)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("dims", [(48, 32), (96, 80), (128, 128), (192, 128), (176, 192), (256, 240)])
@pytest.mark.parametrize("per", PER)
def test_head_dims_and_results(on_hopper: None, dims: tuple[int, int], per: str) -> None:
    arrays, scales, numbers = drawn(dims, per)
    expected = exact(numbers, causal=True)
    out_dtype = ("float16", "bfloat16", "float32")[PER.index(per)]
    out = cuflash.attention(*arrays, **scales, causal=True, out_dtype=out_dtype)
    assert out.dtype.name == out_dtype
    assert_near(out, expected)


@needs_compiler
@pytest.mark.parametrize("per", PER)
def test_packed_sequences(on_hopper: None, per: str) -> None:
    """Sequences of many lengths, 0 among them, with rows of nobody before and behind, whose codes are NaN."""
    arrays, scales, _ = drawn(per=per, lengths=(300, 300))
    edges = np.array([7, 7, 137, 140, 290], np.int32)
    flat = [x[0].copy() for x in arrays]
    its: dict[str, Any] = {name: x[0] for name, x in scales.items()}
    for x in flat:
        x[:7] = x[290:] = 0x7F
    numbers = [np.nan_to_num(numbers_of(x, its[name])) for x, name in zip(flat, scales, strict=True)]
    q, k, v = flat
    out = cuflash.attention_varlen(q, k, v, edges, edges, **its, causal=True, out_dtype="float32")
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        if begin == end:
            continue
        part = exact([x[None, begin:end] for x in numbers], causal=True)
        assert_near(out[None, begin:end], part)
    assert not out[:7].any()
    assert not out[290:].any()


@needs_compiler
@pytest.mark.parametrize(
    "options", [{"num_splits": 3, "causal": True}, {"num_splits": 2, "sink": np.ones(4, np.float32)}]
)
def test_splits_of_the_keys(options: dict[str, Any]) -> None:
    arrays, scales, numbers = drawn((64, 48), lengths=(150, 500))
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        out, lse = attend(arrays, scales, **options)
    assert {x.kernel.entry for x in launch._launches.values()} <= {sm90_fp8.ENTRY, "merge_splits"}
    expected = exact(numbers, **{name: x for name, x in options.items() if name != "num_splits"})
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)


def test_splits_fill_the_gpu() -> None:
    problem = AttentionProblem(1, 128, 65536, 4, 4, 128, 128, CODES, has_fp8_keys=True, out_dtype="bfloat16")
    config = sm90_fp8.forward(problem, ())[0]
    whole, number = sm90_fp8.with_splits(problem, config, num_sms=132)
    assert number > 8
    assert whole.splits_keys
    assert sm90_fp8.with_splits(replace(problem, batch=64), config, num_sms=132) == (config, 1)
    assert sm90_fp8.with_splits(replace(problem, num_splits=7), config, num_sms=132)[1] == 7


@needs_compiler
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "sharp"])
def test_error_is_that_of_plain_attention_with_rounded_weights(on_hopper: None, kind: str, per: str) -> None:
    q8, k8, v8 = (quantized(x, per) for x in inputs(kind, 0))
    scales: dict[str, Any] = {"q_scale": q8.scale, "k_scale": k8.scale, "v_scale": v8.scale}
    true = reference.attention(q8.numbers, k8.numbers, v8.numbers)[0]
    out = cuflash.attention(q8.codes, k8.codes, v8.codes, **scales)
    (key_tile,) = {x.kernel.config.block_n for x in launch._launches.values()}
    plain = naive(q8.numbers, k8.numbers, v8, out.dtype.name, CODES, key_tile, from_last=True)
    assert rms(out.astype(np.float64) - true) <= RMS_FACTOR * rms(plain - true)


@needs_compiler
def test_a_sink_at_the_first_key_leaves_the_others_their_weights(on_hopper: None) -> None:
    """The first key has most of the weight and no value; beside it the others' weights are too small for codes.

    That is so in its own tile of keys alone, because the kernel visits it last.
    """
    seqlen, tile = 4096, 128
    q = np.full((1, 128, 1, 64), 0x38, np.uint8)
    k = np.zeros((1, seqlen, 1, 64), np.uint8)
    k[0, 0] = 0x38  # its score is 64 with a scale of 1
    v = np.full((1, seqlen, 1, 64), 0x38, np.uint8)
    v[0, 0] = 0
    expected = (seqlen - 1) / (seqlen - 1 + np.exp(13.0))
    out = cuflash.attention(q, k, v, softmax_scale=13 / 64, num_splits=1, out_dtype="float32")
    np.testing.assert_allclose(out, expected * (seqlen - tile) / (seqlen - 1), rtol=1e-2)


@needs_compiler
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
def test_unused_places_never_matter(on_hopper: None, poison: float) -> None:
    """Codes and scales beyond the lengths, before a window, and of keys that a mask or a bias hides from everybody."""
    arrays, scales, numbers = drawn()
    mask = np.ones((LENGTHS[1],), bool)
    mask[33] = False
    bias = np.zeros((1, 1, 1, LENGTHS[1]), np.float32)
    bias[..., 33] = -np.inf
    lengths: Any = {"q_lengths": np.array([150, 11], np.int32), "kv_lengths": np.array([40, 200], np.int32)}
    windowed: Any = {"q_lengths": lengths["q_lengths"], "window": (8, 0)}
    hidden = [(0, slice(40, None)), (slice(None), 33)]
    by_window = [(1, slice(0, 200 - 11 - 8))]
    own = exact(numbers, **lengths, mask=mask)
    for options, places in (({**lengths, "mask": mask}, hidden), ({**lengths, "bias": bias}, hidden),
                            (windowed, by_window)):  # fmt: skip
        expected = attend(arrays, scales, **options)
        if options is not windowed:
            assert_near(expected[0], own)
        codes = [x.copy() for x in arrays]
        its: Any = {name: np.array(x) for name, x in scales.items()}
        codes[0][1, 11:], its["q_scale"][1, 11:] = 0x7F, poison
        for x, name in ((codes[1], "k_scale"), (codes[2], "v_scale")):
            for at in places:
                x[at], its[name][at] = 0xFF, poison
        for x, y in zip(attend(codes, its, **options), expected, strict=True):
            np.testing.assert_array_equal(x, y)


@needs_compiler
def test_scales_of_any_size(on_hopper: None) -> None:
    """Negative ones, 0, and such as no float16 holds, beside each other; without any all are 1."""
    arrays, scales, numbers = drawn()
    shape = scales["v_scale"].shape
    v_scale = (10.0 ** RNG.uniform(-9, 9, shape) * RNG.choice([-1, 1], shape)).astype(np.float32)
    v_scale[:, 5] = 0
    expected = exact((numbers[0], numbers[1], numbers_of(arrays[2], v_scale)))
    assert_near(attend(arrays, {**scales, "v_scale": v_scale})[0], expected)
    assert_near(attend(arrays, {})[0], exact([numbers_of(x) for x in arrays]))
    for factor in (-0.01, 0.0, 1e-30):
        of_all = {"k_scale": np.full((1, 1, 1), factor, np.float32), "v_scale": np.full((1, 1, 1), -2e9, np.float32)}
        own = [
            numbers_of(x, *([of_all[name]] if name in of_all else [])) for x, name in zip(arrays, scales, strict=True)
        ]
        assert_near(attend(arrays, of_all)[0], exact(own))


@needs_compiler
def test_nan_of_a_visible_key_is_seen(on_hopper: None) -> None:
    arrays, scales, _ = drawn()
    mask = np.ones(LENGTHS, bool)
    for code, options in ((0x7F, {}), (0xFF, {"mask": mask})):
        arrays[2][0, 5, 0, 0] = code
        out = attend(arrays, scales, **options)[0]
        assert np.isnan(out[0, :, :2, 0]).all()
        assert np.isfinite(out[..., 1:]).all()
        assert np.isfinite(out[1]).all()


@needs_compiler
@pytest.mark.parametrize("per", ["head", "token"])
def test_shared_memory_is_clean(per: str) -> None:
    """No race, nothing uninitialised, over several tiles of keys with every kind of hidden element."""
    arrays, scales, numbers = drawn(per=per, lengths=(150, 300))
    mask = RNG.random((150, 300)) < 0.7
    arrays[2][0, 280], mask[:, 280] = 0x7F, False
    numbers[2][0, 280] = 0
    with hook.kernels_on(CpuDevice((9, 0), num_sms=2, check=Check.SHARED)):
        out = attend(arrays, scales, mask=mask, causal=True)[0]
        wide = attend(*(wide_drawn := drawn((128, 128), per))[:2], causal=True)[0]
    assert_near(out, exact(numbers, mask=mask, causal=True))
    assert_near(wide, exact(wide_drawn[2], causal=True))


@needs_compiler
def test_sums_of_few_bits_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of tensor cores keep fewer bits than float32 and last for 512 keys at most, so that errors do not grow."""
    q8, k8, v8 = (quantized(x, "tensor") for x in inputs("gaussian", 1, (130, 2000), (1, 1)))
    scales: dict[str, Any] = {"q_scale": q8.scale, "k_scale": k8.scale, "v_scale": v8.scale}
    true = reference.attention(q8.numbers, k8.numbers, v8.numbers)[0]
    monkeypatch.setenv("CUFLASH_CPU_DEVICE_SUMS", "hopper")
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        out = cuflash.attention(q8.codes, k8.codes, v8.codes, **scales, out_dtype="float32")
    plain = naive(q8.numbers, k8.numbers, v8, "float32", CODES, from_last=True)
    assert rms(out - true) <= 1.05 * rms(plain - true)


@needs_compiler
@pytest.mark.parametrize(
    ("dims", "keys"), [((64, 64), 1600), ((96, 80), 1100), ((128, 128), 1100), ((192, 128), 1050), ((256, 256), 1050)]
)
@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("place", range(3))
def test_sums_join_totals(
    on_hopper: None, dims: tuple[int, int], per: str, keys: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind 512 keys sums join totals in shared memory, which follow maxima that grow later and those that do not.

    That is so in each candidate, whatever its place in their order.
    """
    choices = sm90_fp8.choices

    def one(*args: Any) -> tuple[tuple[sm90_fp8.Sm90Fp8Config, int], ...]:
        found = choices(*args)
        return (found[place % len(found)],)

    monkeypatch.setattr(sm90_fp8, "choices", one)
    rng = np.random.default_rng(keys)
    q, k, v = (rng.standard_normal((1, n, 1, d)) for n, d in zip((150, keys, keys), (dims[0], *dims), strict=True))
    k[:, :, :, 0] = 0
    q[:, ::2, :, 0] = np.sqrt(dims[0])
    k[:, : keys // 3, :, 0] = np.arange(keys // 3, 0, -1)[:, None] / 40  # even rows meet larger scores with every key
    q8, k8, v8 = (quantized(x.astype(np.float32), per) for x in (q, k, v))
    scales = {"q_scale": q8.scale, "k_scale": k8.scale, "v_scale": v8.scale}
    out, lse = attend([q8.codes, k8.codes, v8.codes], scales, num_splits=1)
    expected = exact([q8.numbers, k8.numbers, v8.numbers])
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)
    (config,) = {x.kernel.config for x in launch._launches.values()}
    assert config.block_n * (512 // config.block_n + 1) < keys  # a sum joined, and another followed


# Options by their flags, the most of them first.
FULLEST = {
    "all": ("has_softcap", "has_bias", "has_mask", "has_alibi", "has_dropout"),
    "bias": ("has_bias",),
    "blocks": ("has_block_mask",),
    "mask": ("has_mask",),
    "dropout": ("has_dropout",),
    "alibi": ("has_alibi",),
    "plain": (),
}


@needs_compiler
@pytest.mark.whole
@pytest.mark.parametrize("record", sm90_fp8.FORWARD, ids=lambda x: f"{x.head_dim}-{x.head_dim_v}-{x.tile.scores}")
@pytest.mark.parametrize("per", ["head", "token"])
def test_every_record_runs(record: Any, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the most options that it takes; shared memory holds what it needs, and is used in order."""
    dims, tile = (record.head_dim, record.head_dim_v), record.tile

    def own(configs: Sequence[sm90_fp8.Sm90Fp8Config]) -> list[sm90_fp8.Sm90Fp8Config]:
        wanted = tile.block_m, tile.block_n, tile.slice, *tile.registers
        return [
            c for c in configs
            if wanted == (c.block_m, c.block_n, c.slice, c.producer_registers, c.consumer_registers)
        ]  # fmt: skip

    def taken(flags: tuple[str, ...]) -> bool:
        problem = listing.problem_of(CODES, *dims, flags, has_fp8_keys=True, out_dtype="float32")
        return bool(own(sm90_fp8.forward(problem, (), per == "token")))

    names = [name for name, flags in FULLEST.items() if taken(flags)]
    if not names:
        assert sm90_fp8.TOKENS in (*record.needs, *record.takes.lacks)  # it is for the other kind of scales
        return
    choices = sm90_fp8.choices
    monkeypatch.setattr(sm90_fp8, "choices", lambda *args: [(c, 1) for c in own([c for c, _ in choices(*args)])])
    arrays, scales, numbers = drawn(dims, per)
    options = OPTIONS[names[0]]
    expected = exact(numbers, **options)
    given = dict(options)
    if "block_mask" in given:
        given["block_mask"] = cuflash.BlockMask.from_dense(given["block_mask"])
    forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3, check=Check.SHARED)):
        out, _ = attend(arrays, scales, **given)
    assert {x.kernel.entry for x in launch._launches.values()} == {sm90_fp8.ENTRY}
    assert_near(out, expected)


@pytest.mark.parametrize(("batch", "seqlen", "warpgroups"), [(1, 512, 2), (8, 8192, 3)])
def test_few_tiles_are_smaller(batch: int, seqlen: int, warpgroups: int) -> None:
    """Two warpgroups have fewer queries than three, so that more tiles run at once; many tiles take the larger ones."""
    problem = AttentionProblem(batch, seqlen, seqlen, 8, 8, 128, 128, CODES, has_fp8_keys=True, out_dtype="bfloat16")
    config, number = sm90_fp8.choices(problem, (), False, num_sms=132)[0]
    assert (config.consumers, number) == (warpgroups, 1)


@needs_nvrtc
def test_they_compile_without_spills() -> None:
    """Records such that every option and head dim occurs; in the whole tier a sample of all of them."""
    configs = list(dict.fromkeys(config for config, _ in listing.kernels(sm90_listing.of_fp8())))
    for config in sampled(configs) if tiers.is_whole() else tiers.covering(configs, options_of):
        assert_compiles_well(HOPPER, config)


def test_which_problems_it_takes() -> None:
    layouts = (((128, 128, 64, 1), (1, 100, 2, 64)),) * 3
    problem = AttentionProblem(1, 100, 100, 2, 2, 64, 64, CODES, has_fp8_keys=True, out_dtype="bfloat16")
    config = sm90_fp8.forward(problem, layouts)[0]
    assert (config.entry, config.has_fp8, config.token_scales) == (sm90_fp8.ENTRY, True, False)
    assert sm90_fp8.forward(problem, (((120, 120, 60, 1), (1, 100, 2, 60)),)) == ()
    for change, words in (
        ({"dtype": "bfloat16"}, "float8_e4m3fn queries"),
        ({"seqlen_q": 1}, "few queries"),
        ({"split_size": 64}, "splits of one size"),
        ({"head_dim": 512}, "head dims above 256"),
    ):
        other = replace(problem, **change)
        assert sm90_fp8.forward(other, layouts) == ()
        assert words in reasons.fp8_sm90(other)
        assert sm80_fp8.takes(other, (9, 0)) or change.get("head_dim") == 512
    assert "wgmma on e4m3 codes" in reasons.fp8_sm90(problem)
