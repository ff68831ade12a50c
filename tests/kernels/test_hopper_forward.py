"""Hopper's forward kernel runs on the CPU device and a GPU, and its results are the NumPy path's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import devices
import numpy as np
import pytest
from cases import gaussian_case
from compiling import HOPPER, assert_compiles_well, compiled, needs_compiler
from cpu_device import device, hook
from devices import Device
from hopper_forward import PLACES, both, large_grids, no_compiler, place_of

import cuflash
from cuflash import hardware
from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.plan.decode import kernels as decode
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import tiles as sm90_tiles
from cuflash.plan.sm90.config import Sm90ForwardConfig

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _large_grids() -> Iterator[None]:
    with large_grids():
        yield


@pytest.fixture
def small_grids(_large_grids: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let problems take the kernels that are best for them."""
    monkeypatch.setattr(sm90_grid, "MANY_WAVES", 7)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Device:
    """Give a device to run the kernel on."""
    return place_of(request.param)


RNG = np.random.default_rng(0)
MASK = RNG.random((150, 200)) < 0.5
MASK[:, 10:40] = False
MASK[5] = False
HIDDEN_BY_MASK = slice(10, 40)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


def inputs(head_dim: int, head_dim_v: int) -> tuple[Array, Array, Array]:
    return normal(2, 150, 4, head_dim), normal(2, 200, 2, head_dim), normal(2, 200, 2, head_dim_v)


@pytest.mark.parametrize("head_dims", [(64, 64), (40, 72), (59, 33), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(place: Device, head_dims: tuple[int, int], causal: bool) -> None:
    head_dim, head_dim_v = head_dims
    both(place, *inputs(head_dim, head_dim_v), causal=causal)


@pytest.mark.parametrize("head_dims", [(8, 8), (72, 72), (104, 104), (136, 136), (160, 160), (184, 24), (200, 232)])
def test_kernels_have_the_columns_of_their_own_head_dims(place: Device, head_dims: tuple[int, int]) -> None:
    both(place, *inputs(*head_dims), causal=True)
    configs = [x.kernel.config for x in launch._launches.values() if x.kernel.entry == sm90_tiles.ENTRY]
    assert {(config.head_dim, config.head_dim_v) for config in configs} == {tuple(map(hardware.whole_steps, head_dims))}


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "window": (slice(0, 20), {"window": (30, 10)}),
    "negative scale": (None, {"softmax_scale": -0.3}),
    # The GPU's tanh has an error of 2^-11.
    "softcap": (None, {"softcap": 2.0, "causal": True, "lse_error": 2 * 2.0**-11}),
    "alibi": (None, {"alibi_slopes": np.array([0.5, 0.01, -0.3, 0], np.float32)}),
    "alibi, causal": (None, {"alibi_slopes": RNG.random(4).astype(np.float32), "causal": True}),
    "alibi, softcap, dropout": (
        None,
        {
            "alibi_slopes": RNG.random(4).astype(np.float32),
            "softcap": 3.0,
            "dropout_p": 0.5,
            "dropout_seed": 7,
            "lse_error": 3 * 2.0**-11,
        },
    ),
    "bias": (HIDDEN_BY_MASK, {"bias": np.where(MASK, normal(150, 200), np.float16(-np.inf))}),
    "smallest bias": (None, {"bias": np.full((150, 200), np.finfo(np.float32).min, np.float32)}),
    "mask": (HIDDEN_BY_MASK, {"mask": MASK}),
    "mask in vectors": (HIDDEN_BY_MASK, {"mask": np.pad(MASK, ((0, 0), (0, 8)))[:, :200]}),
    "mask of keys": (HIDDEN_BY_MASK, {"mask": MASK[:1]}),
    "mask of queries": (None, {"mask": np.ascontiguousarray(MASK[:, :1])}),
    "mask across": (HIDDEN_BY_MASK, {"mask": np.ascontiguousarray(MASK.T).T, "window": (90, None)}),
    "everything": (
        HIDDEN_BY_MASK,
        {
            "mask": MASK,
            "bias": normal(4, 150, 200),
            "alibi_slopes": RNG.random(4).astype(np.float32),
            "window": (90, 20),
            "block_mask": cuflash.BlockMask.random(150, 200, 0.7, 1, block_size=(64, 64)),
            "sink": RNG.standard_normal(4).astype(np.float32),
            "dropout_p": 0.3,
            "dropout_seed": 3,
        },
    ),
    "sink": (None, {"sink": RNG.standard_normal(4).astype(np.float32), "window": (3, 0)}),
    "lengths": (
        slice(120, 200),
        {"kv_lengths": np.array([120, 7], np.int32), "q_lengths": np.array([0, 70], np.int32)},
    ),
    "dropout": (None, {"dropout_p": 0.3, "dropout_seed": 1234567890123}),
    "dropout, lengths": (
        slice(140, 200),
        {"dropout_p": 0.5, "dropout_seed": 9, "kv_lengths": np.array([140, 0], np.int32), "window": (60, 30)},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(place: Device, name: str) -> None:
    hidden, options = OPTIONS[name]
    both(place, *inputs(64, 64), hidden=hidden, **options)


@pytest.mark.parametrize("name", ["dropout", "dropout, lengths"])
def test_shared_draws(place: Device, name: str) -> None:
    """A warp finds the part of draws that belongs to a column once."""
    hidden, options = OPTIONS[name]
    both(place, *inputs(128, 128), hidden=hidden, **options)


@pytest.mark.parametrize("factor", [1, 6, 40])
def test_scores_that_softcap_bounds(place: Device, factor: int) -> None:
    """Powers of bounded scores need no maximum: of small scores, of those at the bound, of far sinks, of NaN."""
    sink = np.array([1, -200, 300, 40], np.float32)
    case = gaussian_case(0, "bfloat16", (150, 200), (4, 2), softcap=50.0, sink=sink)
    case = case.with_inputs(q=case.q * case.q.dtype.type(factor))
    devices.forget_launches()
    k = case.k.copy()
    k[0, 74, 0, 3] = np.nan
    with place.active():
        out, lse = case.on(place).forward()
        bad_out, bad_lse = case.with_inputs(k=k).on(place).forward()
    case.assert_forward(out, lse)
    assert np.isnan(bad_out[0, :, :2].astype(np.float32)).all()
    assert np.isnan(bad_lse[0, :2]).all()
    np.testing.assert_array_equal(bad_out[1], out[1])
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.bounded_scores


def test_steep_softcap(place: Device) -> None:
    """Products of 0 have scores of 0, also where the cube of their scale is infinite."""
    case = gaussian_case(0, "bfloat16", (150, 400), (4, 2), softcap=50.0, softmax_scale=1e20)
    q = case.q.copy()
    q[:, ::2] = 0
    case = case.with_inputs(q=q)
    with place.active():
        out, lse = case.on(place).forward()
    case.assert_forward(out, lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steep_and_flat_slopes(place: Device, dtype: str) -> None:
    slopes = np.array([5000, -3000, 1e-6, 300], np.float32)
    case = gaussian_case(0, dtype, (150, 330), (4, 2), alibi_slopes=slopes)
    with place.active():
        out, lse = case.on(place).forward()
    case.assert_forward(out, lse)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (70, 40), "alibi_slopes": np.array([0.5, 0.01, -0.3, 0], np.float32)}],
    ids=str,
)
def test_block_mask(place: Device, options: dict[str, Any]) -> None:
    block_mask = cuflash.BlockMask.from_dense(MASK, block_size=(16, 16))
    both(place, *inputs(64, 64), hidden=HIDDEN_BY_MASK, block_mask=block_mask, **options)


def test_block_mask_of_wholly_visible_and_hidden_tiles(place: Device) -> None:
    q, k, v = normal(1, 300, 2, 64), normal(1, 700, 2, 64), normal(1, 700, 2, 64)
    blocks = RNG.random((3, 6)) < 0.4
    block_mask = cuflash.BlockMask.from_blocks(blocks, 300, 700, block_size=(128, 128))
    both(place, q, k, v, block_mask=block_mask, kv_lengths=np.array([690], np.int32))


def assert_two_teams() -> None:
    (only,) = launch._launches.values()
    assert isinstance(only.kernel.config, Sm90ForwardConfig)
    assert only.kernel.config.teams == 2


TEAMS_OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (250, 20)},
    {"kv_lengths": np.array([480, 1000], np.int32), "q_lengths": np.array([450, 70], np.int32)},
    {"sink": np.array([0.5, -1, 2, 0], np.float32)},
]


@pytest.mark.parametrize("options", TEAMS_OPTIONS, ids=lambda options: "-".join(options) or "none")
@pytest.mark.parametrize(("head_dim", "size"), [(128, 64), (96, 128), (40, 64)])
def test_teams_leave_out_what_only_others_see(place: Device, options: dict[str, Any], head_dim: int, size: int) -> None:
    """Some warpgroups see a tile of keys, others of their tile do not; keys that nobody sees hold NaN."""
    q, k, v = (normal(2, n, 4, head_dim) for n in (450, 1290, 1290))
    blocks = RNG.random((2, 1, -(-450 // size), -(-1290 // size))) < 0.4
    blocks[..., 3] = blocks[:, :, 1] = False
    blocks[:, :, 2, 8:] = True
    block_mask = cuflash.BlockMask.from_blocks(blocks, 450, 1290, block_size=(size, size))
    both(place, q, k, v, slice(3 * size, 4 * size), block_mask=block_mask, **options)
    assert_two_teams()


@pytest.mark.parametrize("head_dims", [(192, 128), (160, 160), (256, 256)])
@pytest.mark.parametrize("options", TEAMS_OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_block_masks_of_wide_heads(place: Device, options: dict[str, Any], head_dims: tuple[int, int]) -> None:
    """Keys that nobody sees hold NaN, which changes nothing."""
    (q, k), v = (normal(2, n, 4, head_dims[0]) for n in (450, 1290)), normal(2, 1290, 4, head_dims[1])
    blocks = RNG.random((2, 1, 8, 21)) < 0.4
    blocks[..., 3] = False
    block_mask = cuflash.BlockMask.from_blocks(blocks, 450, 1290, block_size=(64, 64))
    both(place, q, k, v, slice(192, 256), block_mask=block_mask, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tiles", [1, 7, 9, 23])
def test_all_rows_have_one_team(place: Device, tiles: int, head_dim: int) -> None:
    """Each warpgroup's rows have one team, as poisoned results show; the last tile has rows of one warpgroup."""
    seqlen = 128 * tiles - 70
    mask = cuflash.BlockMask.sliding_window(seqlen, seqlen, 100, 30)
    mask &= cuflash.BlockMask.from_function(lambda b, h, i, j: i + j != seqlen - 1, seqlen, seqlen)  # else a window
    q, k, v = (normal(1, seqlen, 1, head_dim) for _ in range(3))
    both(place, q, k, v, block_mask=mask)
    assert_two_teams()


def test_block_masks_of_packed_sequences(place: Device) -> None:
    cu_seqlens = np.array([0, 300, 310, 600], np.int32)
    q, k, v = (normal(600, 2, 64) for _ in range(3))
    block_mask = cuflash.BlockMask.random(300, 300, 0.4, 1, block_size=(64, 64))
    devices.forget_launches()
    with place.active():
        there = place.put({"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens})
        out = place.get([cuflash.attention_varlen(**there, block_mask=block_mask)])[0]
    assert_two_teams()
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        own = (x[None, begin:end].astype(np.float64) for x in (q, k, v))
        blocks = block_mask.to_dense()[..., : end - begin, : end - begin]
        expected = cuflash.attention(*own, block_mask=cuflash.BlockMask.from_dense(blocks))
        np.testing.assert_allclose(out[begin:end], expected[0], atol=4e-3, rtol=4e-3)


def test_strides(place: Device) -> None:
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in inputs(64, 64))
    both(place, q, k, v)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kv_lengths": np.array([0, 77], np.int32)}], ids=str)
def test_a_single_query_of_grouped_heads(
    place: Device, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "is_sooner", lambda *_: False)  # the kernel for decoding would take so few keys
    q = normal(2, 8, 1, 64).swapaxes(1, 2)
    both(place, q, normal(2, 200, 2, 64), normal(2, 200, 2, 64), **options)
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.packs_heads


@no_compiler
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"kv_lengths": np.array([1700], np.int32)},
        {"sink": RNG.standard_normal(2).astype(np.float32), "window": (1500, 0)},
        {"mask": RNG.random((70, 2500)) < 0.5},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.usefixtures("small_grids")
def test_keys_split_among_thread_blocks(options: dict[str, Any]) -> None:
    hidden = slice(1700, 2500) if "kv_lengths" in options else None
    q, k, v = normal(1, 70, 2, 64), normal(1, 2500, 1, 64), normal(1, 2500, 1, 64)
    place = Device("sm_90", np, lambda: hook.kernels_on(device.CpuDevice((9, 0), num_sms=9)))
    both(place, q, k, v, hidden, **options)
    parts = [x.params[0]["splits"] for x in launch._launches.values()]
    assert len(parts) == 2
    assert min(parts) > 1


KEYS_IN_REVERSE: dict[str, dict[str, Any]] = {
    "window": {"window": (130, 10)},
    "to the right": {"window": (0, 200)},
    "causal, lengths": {"causal": True, "q_lengths": np.array([290, 77], np.int32)},
    "window, lengths": {"window": (70, 20), "kv_lengths": np.array([290, 77], np.int32)},
}


@pytest.mark.parametrize("name", KEYS_IN_REVERSE)
def test_keys_from_the_last_to_the_first(place: Device, name: str) -> None:
    """The last warpgroup comes first in the order, as it is the first to have no more keys."""
    q, k, v = (normal(2, 300, 2, 128) for _ in range(3))
    hidden = slice(290, None) if "kv_lengths" in KEYS_IN_REVERSE[name] else None
    both(place, q, k, v, hidden=hidden, **KEYS_IN_REVERSE[name])
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.keys_in_reverse


PAIRS: dict[str, dict[str, Any]] = {
    "causal": {},
    "q_lengths": {"q_lengths": np.array([290, 77], np.int32)},
    "kv_lengths": {"kv_lengths": np.array([290, 0], np.int32)},
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seqlen_k", [300, 700])
def test_pairs_of_blocks(place: Device, name: str, seqlen_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block loads half of the keys for both; it may have no row of a tile, or rows that see no keys."""
    monkeypatch.setattr(sm90_forward, "MANY_KEYS", 1)
    monkeypatch.setattr(sm90_forward, "LONG_QUERIES", 1)
    sm90_forward.forward.cache_clear()
    q, k, v = normal(2, 600, 2, 256), normal(2, seqlen_k, 1, 256), normal(2, seqlen_k, 1, 256)
    hidden = slice(290, None) if name == "kv_lengths" else None
    both(place, q, k, v, hidden=hidden, causal=True, **PAIRS[name])
    (only,) = launch._launches.values()
    sm90_forward.forward.cache_clear()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.pair == 2


@no_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_results_at_any_address(causal: bool) -> None:
    q, k, v = inputs(64, 64)
    aligned = np.empty(q.size + 8, q.dtype)
    first, second = aligned[:-8].reshape(q.shape), aligned[1:-7].reshape(q.shape)
    results = []
    for out in (first, second):
        devices.forget_launches()
        with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
            results.append(cuflash.attention(q, k, v, out=out, causal=causal).copy())
        assert [x.kernel.entry for x in launch._launches.values()] == ["forward_sm90"]
    np.testing.assert_array_equal(results[0], results[1])


BIASES: dict[str, Any] = {
    "float16": lambda: normal(2, 4, 150, 200),
    "float32": lambda: RNG.standard_normal((2, 4, 150, 200)).astype(np.float32),
    "broadcast over heads": lambda: normal(2, 1, 150, 200),
    "broadcast over batch and queries": lambda: normal(4, 1, 200),
    "strides of 0": lambda: np.broadcast_to(normal(1, 1, 150, 200), (2, 4, 150, 200)),
    "one row of stride 0": lambda: np.broadcast_to(normal(2, 1, 1, 200), (2, 4, 150, 200)),
    "some hidden": lambda: np.where(MASK, normal(150, 200), np.float16(-np.inf)),
}


@pytest.mark.parametrize("name", BIASES)
def test_bias_by_tma(place: Device, name: str) -> None:
    bias = BIASES[name]()
    both(place, *inputs(64, 64), hidden=HIDDEN_BY_MASK if name == "some hidden" else None, bias=bias)
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.has_bias_tiles


MASKS: dict[str, Any] = {
    "one": lambda: padded(150, 200),
    "of each head": lambda: padded(2, 4, 150, 200),
    "broadcast over heads": lambda: padded(2, 1, 150, 200),
    "of keys": lambda: padded(2, 1, 1, 200),
    "every other row": lambda: padded(300, 200)[::2],
    "strides of 0": lambda: np.broadcast_to(padded(1, 1, 150, 200), (2, 4, 150, 200)),
    "bytes": lambda: (padded(150, 208) * np.uint8(64)).view(bool)[:, :200],
}


def padded(*shape: int) -> Any:
    """Make a mask whose rows begin at multiples of 16 bytes."""
    whole = RNG.random((*shape[:-1], -(-shape[-1] // 16) * 16)) < 0.6
    whole[..., HIDDEN_BY_MASK] = False
    return whole[..., : shape[-1]]


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("name", MASKS)
def test_mask_by_tma(place: Device, name: str, head_dims: tuple[int, int]) -> None:
    both(place, *inputs(*head_dims), hidden=HIDDEN_BY_MASK, mask=MASKS[name](), causal=name == "one")
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.has_mask_tiles


MASKED_OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": normal(4, 150, 200)},
    "bias of keys": {"bias": normal(1, 200)},
    "alibi, softcap": {"alibi_slopes": RNG.random(4).astype(np.float32), "softcap": 3.0, "lse_error": 3 * 2.0**-11},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3, "window": (90, 20)},
    "block mask": {"block_mask": cuflash.BlockMask.random(150, 200, 0.7, 1, block_size=(64, 64))},
    "lengths": {"kv_lengths": np.array([200, 37], np.int32), "q_lengths": np.array([70, 150], np.int32)},
}


@pytest.mark.parametrize("name", MASKED_OPTIONS)
def test_options_beside_a_mask_by_tma(place: Device, name: str) -> None:
    both(place, *inputs(64, 64), hidden=HIDDEN_BY_MASK, mask=padded(2, 1, 150, 200), **MASKED_OPTIONS[name])
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert only.kernel.config.has_mask_tiles


@pytest.mark.parametrize("offset", [0, 1])
def test_mask_of_other_layouts(place: Device, offset: int) -> None:
    """Rows of 200 bytes, or rows that do not begin at multiples of 16, are read right."""
    mask = padded(150, 216)[:, offset : 200 + offset] if offset else np.ascontiguousarray(padded(150, 200))
    both(place, *inputs(64, 64), mask=mask)
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert not only.kernel.config.has_mask_tiles


@pytest.mark.parametrize("columns", [199, 1])
def test_bias_of_other_layouts(place: Device, columns: int) -> None:
    q, k, v = inputs(64, 64)
    both(place, q, k[:, : max(columns, 2)], v[:, : max(columns, 2)], bias=normal(150, columns))
    (only,) = launch._launches.values()
    assert isinstance(only.kernel, gpu_sm90.Forward)
    assert not only.kernel.config.has_bias_tiles


@pytest.mark.gpu
def test_many_tiles_are_the_same_bits_as_few() -> None:
    """Thread blocks take several tiles, some of them twice for hidden NaN, and alone each has one."""
    import cupy

    q, k, v = (cupy.asarray(normal(24, 300, 8, 64)) for _ in range(3))
    k[::2, 100:130] = v[::2, 100:130] = np.nan
    mask = np.ones((24, 1, 300, 300), bool)
    mask[::2, ..., 100:130] = False
    masks = cupy.asarray(mask)
    together = cuflash.attention(q, k, v, mask=masks, causal=True)
    for b in range(24):
        own = slice(b, b + 1)
        alone = cuflash.attention(q[own], k[own], v[own], mask=masks[own], causal=True)
        assert cupy.isfinite(alone.astype(np.float32)).all()
        assert (alone == together[own]).all()


@needs_compiler
@pytest.mark.parametrize("head_dims", sm90_tiles.HEAD_DIMS)
def test_every_row_compiles_without_spills(head_dims: tuple[int, int]) -> None:
    table = sorted(
        {config for config, dtype in listing.kernels(sm90_listing.of_forward()) if dtype == "bfloat16"}, key=str
    )
    configs = [c for c in compiled(HOPPER, table) if (c.head_dim, c.head_dim_v) == head_dims]
    assert configs
    for config in configs:
        assert_compiles_well(HOPPER, config)
