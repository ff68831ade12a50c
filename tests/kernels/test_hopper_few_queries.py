"""Few queries and paged keys on Hopper: heads as rows of a tile, splits of keys, pages in place, on the CPU device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import devices
import numpy as np
import pytest
from cases import Case, gaussian, gaussian_case, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device
from paging import as_paged, used_of_pool

import cuflash
from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.record import ANYTHING, PLAIN
from cuflash.plan.sm90 import few_queries as sm90_few_queries
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import tiles as sm90_tiles
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.pages import Pages

no_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
HOST = Device("numpy", np)
DTYPE = "float16"
GROUPS = (1, 2, 3, 4, 7, 16)
DIMS = ((64, 64), (128, 128), (96, 96), (40, 72), (192, 128), (256, 256))
PAGE_SIZES = (1, 3, 16, 32, 96, 256)


def chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def mask_shape(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    shapes = [(queries, keys), (heads, queries, keys), (batch, 1, queries, keys), (batch, 1, 1, keys), (queries, 1)]
    return shapes[int(rng.integers(len(shapes)))]


def with_aligned_rows(x: Any, unit: int) -> Any:
    """The array with rows of a multiple of so many elements, which TMA takes."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % unit)])[..., : x.shape[-1]]


def drawn(seed: int, paged: bool) -> Case:
    """Few queries of grouped heads with any options but a block mask, padded or packed."""
    rng = np.random.default_rng(seed)
    group, heads_kv, batch = GROUPS[seed % len(GROUPS)], int(rng.integers(1, 3)), int(rng.integers(1, 4))
    queries, keys = int(2 ** rng.uniform(0, 6)), int(rng.integers(1, 330))
    heads = group * heads_kv
    options: dict[str, Any] = {}
    if chance(rng, 0.6):
        right = int(rng.integers(0, 30)) if chance(rng, 0.5) else 0
        options["window"] = (int(rng.integers(0, 100)) if chance(rng, 0.5) else None, right)
    if chance(rng, 0.2):
        options["softcap"] = 20.0
    if chance(rng, 0.2):
        bias = gaussian(rng, mask_shape(rng, batch, heads, queries, keys), "float32" if chance(rng, 0.3) else DTYPE)
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        options["bias"] = with_aligned_rows(bias, 8) if chance(rng, 0.5) and bias.shape[-1] > 1 else bias
    if chance(rng, 0.35):
        mask = rng.random(mask_shape(rng, batch, heads, queries, keys)) < 0.6
        options["mask"] = with_aligned_rows(mask, 16) if chance(rng, 0.7) and mask.shape[-1] > 1 else mask
    if chance(rng, 0.2):
        options["alibi_slopes"] = gaussian(rng, (heads,) if chance(rng, 0.5) else (batch, heads), "float32")
    if chance(rng, 0.25):
        options["sink"] = gaussian(rng, (heads,), "float32")
    if chance(rng, 0.25):
        options |= {"dropout_p": 0.3, "dropout_seed": seed}
    if chance(rng, 0.3):
        options["q_lengths"] = rng.integers(-1, queries + 2, batch).astype(np.int32)
    if chance(rng, 0.4):
        options["num_splits"] = int(rng.integers(2, 5))
    case = gaussian_case(seed, DTYPE, (queries, keys), (heads, heads_kv), DIMS[seed // 2 % len(DIMS)], batch, **options)
    is_packed = chance(rng, 0.3) and not {"bias", "mask"} & options.keys()
    if paged:
        case = as_paged(case, int(rng.choice(PAGE_SIZES)), rng)
    elif chance(rng, 0.4):
        case = case.with_options(kv_lengths=rng.integers(-1, keys + 2, batch).astype(np.int32))
    if not is_packed:
        return case
    begins = [np.sort(rng.integers(0, batch * n + 1, batch + 1)).astype(np.int32) for n in (queries, keys)]
    names = ("q", "dout") if paged else ("q", "k", "v", "dout")
    flat = {name: getattr(case, name).reshape(-1, *getattr(case, name).shape[2:]) for name in names}
    packed = case.with_inputs(**flat)
    packed.cu_seqlens = begins[0], None if paged else begins[1]  # type: ignore[assignment]
    return packed


def forward_of(launches: Any) -> gpu_sm90.Forward:
    (kernel,) = [x.kernel for x in launches if isinstance(x.kernel, gpu_sm90.Forward)]
    assert isinstance(kernel, gpu_sm90.Forward)
    return kernel


@no_compiler
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("seed", range(24))
def test_few_queries_of_any_options_agree_with_the_reference(seed: int, paged: bool) -> None:
    """Unused rows of pools hold NaN, which changes no bit, and nothing is gathered."""
    case = drawn(seed, paged)
    devices.forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=(2, 9)[seed % 2])):
        out, lse = case.on(HOST).forward()
        launches = list(launch._launches.values())
        if paged:
            unused = ~used_of_pool(case)
            poisoned = {name: np.array(getattr(case, name)) for name in ("k", "v")}
            for pool in poisoned.values():
                pool[unused] = np.nan
            again = case.with_inputs(**poisoned).on(HOST).forward()
            assert all(same_bits(x, y) for x, y in zip(again, (out, lse), strict=True))
    case.assert_forward(out, lse)
    config = forward_of(launches).config
    assert config.packs_heads == (case.packed or case.q.shape[-2] != case.k.shape[-2])
    assert config.has_pages == paged
    others = {"find_work", "merge_tiles"} if config.has_work_list else {"merge_splits"}
    assert {x.kernel.entry for x in launches} <= {"forward_sm90", *others}
    assert config.has_work_list == (case.packed and "num_splits" not in case.options)


@no_compiler
def test_a_table_that_is_much_wider_than_its_pool_is_read_in_place() -> None:
    """Many queries take pages in place, too; a block mask's lists are of logical keys."""
    case = gaussian_case(0, DTYPE, (200, 300), (2, 1), (128, 128), causal=True, mask=np.ones((200, 300), bool))
    rng = np.random.default_rng(0)
    for options in ({}, {"block_mask": rng.random((200, 304)) < 0.5}):
        paged = as_paged(case.with_options(**options), 16, rng)
        devices.forget_launches()
        with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
            out, lse = paged.on(HOST).forward()
            assert forward_of(launch._launches.values()).config.has_pages
        paged.assert_forward(out, lse)


@no_compiler
def test_pools_that_tma_does_not_take_are_gathered() -> None:
    case = as_paged(gaussian_case(0, DTYPE, (3, 50), (2, 1), (32, 32)), 16, np.random.default_rng(0))
    odd = np.zeros((*case.k.shape[:3], 33), case.dtype)[..., 1:]
    odd[...] = case.k
    devices.forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
        out, lse = case.with_inputs(k=odd).on(HOST).forward()
        assert "gather_pages" in {x.kernel.entry for x in launch._launches.values()}
    case.assert_forward(out, lse)


def problem(seqlen_q: int, seqlen_k: int, heads: int = 32, heads_kv: int = 8, **of: Any) -> AttentionProblem:
    return AttentionProblem(of.pop("batch", 1), seqlen_q, seqlen_k, heads, heads_kv, 128, 128, "bfloat16", **of)


def chosen(asked: AttentionProblem, num_sms: int = 132) -> sm90_grid.Launches:
    config = sm90_forward.forward(asked, ())
    assert config is not None
    return sm90_grid.for_grid(asked, config, num_sms)


def test_heads_are_rows_of_a_tile_where_queries_are_few() -> None:
    for options in ({}, {"sink": True}, {"window_left": 3, "window_right": 0}, {"alibi": (1, 32)}, {"dropout_p": 0.5}):
        assert chosen(problem(4, 8192, **options)).config.packs_heads
    assert not chosen(problem(128, 8192)).config.packs_heads
    assert not chosen(problem(4, 8192, block_mask=True)).config.packs_heads
    assert not chosen(problem(4, 8192, heads=8)).config.packs_heads
    assert chosen(problem(64 * 9, 8192 * 9, batch=9, packed=True)).config.packs_heads
    assert not chosen(problem(65 * 9, 8192 * 9, batch=9, packed=True)).config.packs_heads
    # The heads of one query need a tile with room for all of them.
    assert chosen(problem(1, 8192, heads=71, heads_kv=1)).config.block_m == 128
    assert not chosen(problem(1, 8192, heads=200, heads_kv=1)).config.packs_heads


def test_heads_are_rows_of_a_tile_where_tiles_of_one_head_would_be_nearly_empty() -> None:
    """The second tile of each head would have 8 rows; with options, or where tiles are full, heads stay apart."""

    def wide(heads_kv: int, batch: int, **options: Any) -> AttentionProblem:
        asked = problem(136, 891, 23, heads_kv, batch=batch, **options)
        return replace(asked, head_dim=192, head_dim_v=192)

    assert chosen(wide(1, 10)).config.queries_of_tile(wide(1, 10)) == 128 // 23
    assert not chosen(wide(1, 10, alibi=(1, 23))).config.packs_heads
    assert chosen(wide(1, 40)).config.packs_heads
    assert not chosen(replace(wide(1, 40), seqlen_q=250)).config.packs_heads
    assert not chosen(wide(23, 10)).config.packs_heads


def test_results_of_several_heads_are_staged() -> None:
    """Else threads store them, an element at a time."""
    for head_dims in sm90_tiles.HEAD_DIMS:
        for window_right in (None, 0):
            asked = AttentionProblem(46, 42, 93, 10, 2, *head_dims, "bfloat16", window_right=window_right)
            assert sm90_forward.config_for(asked, few_queries=False).packs_heads
            assert sm90_forward.config_for(asked, few_queries=False).staging_panels > 0


@no_compiler
@pytest.mark.parametrize("dims", [(128, 128), (192, 192), (40, 72)])
def test_many_queries_with_their_heads_agree_with_the_reference(dims: tuple[int, int]) -> None:
    masks: tuple[dict[str, Any], ...] = {}, {"causal": True}, {"window": (50, 3)}
    for seed, options in enumerate(masks):
        case = gaussian_case(seed, DTYPE, (70, 300), (6, 1), dims, 1, **options)
        devices.forget_launches()
        with hook.kernels_on(CpuDevice((9, 0), num_sms=4)):
            out, lse = case.on(HOST).forward()
            assert forward_of(launch._launches.values()).config.packs_heads
        case.assert_forward(out, lse)


@no_compiler
@pytest.mark.parametrize("columns", [40, 37, 1])
def test_splits_of_any_number_of_columns_are_merged(columns: int) -> None:
    """A pair of columns is one store only where rows are aligned to it."""
    for queries in (3, 70):
        case = gaussian_case(columns, DTYPE, (queries, 300), (3, 1), (40, columns), 2, num_splits=2, causal=True)
        whole = np.zeros((*case.v.shape[:3], 40), case.dtype)
        whole[..., :columns] = case.v
        devices.forget_launches()
        with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
            out, lse = case.with_inputs(v=whole[..., :columns]).on(HOST).forward()
            assert forward_of(launch._launches.values()).config.splits_keys
        case.assert_forward(out, lse)


def test_an_only_query_needs_no_causal_mask() -> None:
    assert chosen(problem(1, 8192, window_right=0)) == chosen(problem(1, 8192))
    assert chosen(problem(1, 8192, window_right=-1)).config.has_window
    assert chosen(problem(2, 8192, window_right=0)).config.has_window


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("queries", [1, 4, 16, 64])
def test_splits_fill_the_gpu_and_no_more(batch: int, queries: int) -> None:
    config, num_splits = chosen(problem(queries, 32768, batch=batch))
    tiles = sm90_few_queries._tiles(problem(queries, 32768, batch=batch), config)
    assert num_splits == 1 or tiles * num_splits <= 2 * 132
    assert tiles * num_splits >= 64 or num_splits * 128 > 32768 // 2


def test_every_row_has_a_tile_of_few_queries() -> None:
    for head_dims in sm90_tiles.HEAD_DIMS:
        assert sm90_forward.config_for(AttentionProblem(1, 4, 8192, 1, 1, *head_dims, "bfloat16")).block_m == 64


@pytest.mark.parametrize(
    ("page_size", "copies"), [(1, True), (8, True), (24, True), (16, False), (48, False), (257, True)]
)
def test_boxes_of_few_rows_are_copied_row_by_row(page_size: int, copies: bool) -> None:
    paged = problem(1, 8192, pages=Pages(8192, page_size, 8192))
    assert sm90_forward.for_pages(paged, chosen(paged).config).copies_rows == copies
    masked = sm90_forward.for_pages(replace(paged, block_mask=True), chosen(replace(paged, block_mask=True)).config)
    assert not masked.copies_rows
    assert not sm90_forward.for_pages(problem(1, 8192), chosen(problem(1, 8192)).config).copies_rows


def test_keys_in_pages_are_as_many_as_the_pool_can_hold() -> None:
    """Splits are chosen for these, not for a table's width."""
    wide = problem(1, 1 << 20, batch=8, pages=Pages(512, 16, 1 << 16))
    assert chosen(wide).num_splits == chosen(problem(1, 1024, batch=8)).num_splits


@pytest.mark.parametrize("heads", [71, 128])
def test_many_rows_of_several_heads_leave_registers_to_options_and_pages(heads: int) -> None:
    """Such tiles are smaller: with those of many queries of one head the kernels spilled."""
    pages = Pages(512, 16, 512)
    for head_dims in sm90_tiles.HEAD_DIMS:
        lines = [line for line in sm90_tiles.FORWARD if (line.head_dim, line.head_dim_v) == head_dims]
        of_pages = [x.tile for x in lines if x.needs == (sm90_tiles.HEADS, sm90_tiles.PAGES) and x.takes == PLAIN]
        of_anything = next(line.tile for line in lines if line.takes == ANYTHING)
        sizes = (1, 2, 8192, heads, 1, *head_dims, "bfloat16")
        plain = sm90_forward.config_for(AttentionProblem(*sizes, pages=pages))
        assert not of_pages or plain.block_n == of_pages[0].block_n
        with_option = sm90_forward.config_for(AttentionProblem(*sizes, dropout_p=0.5))
        assert (with_option.block_m, with_option.block_n) == (of_anything.block_m, of_anything.block_n)
        assert with_option.packs_heads == (heads <= of_anything.block_m)


def test_no_warpgroup_waits_for_registers_that_a_launch_does_not_have() -> None:
    for config, _ in listing.kernels(sm90_listing.of_forward()):
        of_launch = min(2**16 // config.threads // 8 * 8, 255)
        taken = config.producer_registers + config.consumers * config.consumer_registers
        assert taken <= of_launch * (config.consumers + 1), config


@no_compiler
def test_results_beside_each_other_are_written_in_any_layout() -> None:
    """TMA stores the rows of a tile one by one; where it cannot, threads do."""
    case = gaussian_case(5, DTYPE, (5, 70), (6, 2), (64, 64), 2, causal=True)
    results = []
    for odd in (False, True):
        whole = np.full((2, 5, 6, 65 if odd else 64), np.nan, case.dtype)
        out = whole[..., 1:] if odd else whole
        with hook.kernels_on(CpuDevice((9, 0), num_sms=3)):
            cuflash.attention(case.q, case.k, case.v, causal=True, out=out)
        results.append(out)
    assert same_bits(*results)
    case.assert_forward(results[0], case.on(HOST).forward()[1])
