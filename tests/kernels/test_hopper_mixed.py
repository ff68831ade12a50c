"""Packed queries of any numbers over caches of any lengths on Hopper: lists of work, on the CPU device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import devices
import numpy as np
import pytest
from cases import Case, gaussian, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.build import Check
from cpu_device.device import CpuDevice
from devices import Device
from paging import as_paged, used_of_pool

from cuflash.gpu import launch, work_list
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import mixed as sm90_mixed
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.pages import Pages

no_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
HOST = Device("numpy", np)
DTYPE = "float16"
GROUPS = (4, 1, 7, 2)
DIMS = ((64, 64), (128, 128), (40, 72))
PAGE_SIZES = (1, 16, 64, 96)
QUERIES = (0, 1, 1, 1, 2, 5, 40)
KEYS = (0, 1, 7, 60, 130, 300)
ENTRIES = {"find_work", "forward_sm90", "merge_tiles"}


def drawn(seed: int, paged: bool) -> Case:
    """Sequences of no, one, some and many queries, over no, few and many keys; rows before and behind them."""
    rng = np.random.default_rng(seed)
    group, heads_kv, dims = GROUPS[seed % 4], int(rng.integers(1, 3)), DIMS[seed % 3]
    queries = [*rng.choice(QUERIES, int(rng.integers(2, 6))), int(rng.integers(60, 140))]
    keys = [*rng.choice(KEYS, len(queries) - 1), int(rng.integers(500, 1400))]
    orders = rng.permutation(len(queries)), rng.permutation(len(queries))
    begins = [
        np.cumsum([rng.integers(0, 3), *np.array(x)[order]]).astype(np.int32)
        for x, order in zip((queries, keys), orders, strict=True)
    ]
    batch, heads = len(queries), group * heads_kv
    rows_q, rows_k = (int(x[-1] + rng.integers(0, 4)) for x in begins)
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options["window"] = (int(rng.integers(0, 700)) if rng.random() < 0.3 else None, int(rng.integers(0, 2)) * 5)
    if rng.random() < 0.4:
        options["kv_lengths"] = rng.integers(-1, 1400, batch).astype(np.int32)
    for chance, of in (
        (0.3, {"q_lengths": rng.integers(-1, 140, batch).astype(np.int32)}),
        (0.3, {"sink": gaussian(rng, (heads,), "float32")}),
        (0.2, {"alibi_slopes": gaussian(rng, (batch, heads), "float32")}),
        (0.2, {"dropout_p": 0.3, "dropout_seed": seed}),
        (0.2, {"softcap": 20.0}),
        (0.2, {"mask": rng.random((max(queries), max(keys))) < 0.6}),
    ):
        if rng.random() < chance:
            options |= of
    q, dout = (gaussian(rng, (rows_q, heads, d), DTYPE) for d in dims)
    k, v = (gaussian(rng, (rows_k, heads_kv, d), DTYPE) for d in dims)
    case = Case(q, k, v, dout, options=options, cu_seqlens=(begins[0], begins[1]))
    return as_paged(case, int(rng.choice(PAGE_SIZES)), rng) if paged else case


def with_poison(case: Case) -> Case:
    """Put NaN where no sequence has keys in use: that must change no bit."""
    poisoned = {name: np.array(getattr(case, name)) for name in ("k", "v")}
    if "block_table" in case.options:
        used = used_of_pool(case)
    else:
        assert case.cu_seqlens is not None
        begins = case.cu_seqlens[1]
        used = np.zeros(len(case.k), bool)
        lengths = np.clip(case.options.get("kv_lengths", np.diff(begins)), 0, np.diff(begins))
        for begin, length in zip(begins, lengths, strict=False):
            used[begin : begin + length] = True
    for x in poisoned.values():
        x[~used] = np.nan
    return case.with_inputs(**poisoned)


@no_compiler
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("seed", range(6))
def test_batches_of_any_lengths_agree_with_the_reference(seed: int, paged: bool) -> None:
    """Results are written everywhere, and what nobody uses changes no bit."""
    case = drawn(seed, paged)
    devices.forget_launches()
    with hook.kernels_on(CpuDevice((9, 0), num_sms=(2, 9, 5)[seed % 3], check=Check.SHARED)):
        results = []
        for own in (case, with_poison(case)):
            target = np.full(case.out_shape, np.nan, case.dtype)
            out, lse = own.on(HOST).forward(out=target)
            assert same_bits(out, target)
            results.append((out, lse))
        assert {x.kernel.entry for x in launch._launches.values()} == ENTRIES
    case.assert_forward(*results[0])
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


class Listed(NamedTuple):
    """A list of work of one head, and what it is for."""

    problem: AttentionProblem
    config: Sm90ForwardConfig
    entries: np.ndarray  # (entries, 6): group, tile, first and last tile of keys, chunk, part
    cut: np.ndarray  # (tiles, 4): group, tile, first part, parts
    sizes: sm90_mixed.ListSize


def problem_of(queries: Any, keys: Any, heads: tuple[int, int] = (32, 8), **of: Any) -> AttentionProblem:
    """Causal attention over pages of 64 keys."""
    capacity = max(-(-int(max(keys)) // 64), 1)
    pages = Pages(sum(-(-int(n) // 64) for n in keys), 64, capacity)
    sizes = len(queries), int(sum(queries)), len(queries) * capacity * 64, *heads, 128, 128, "bfloat16"
    given: dict[str, Any] = {"packed": True, "kv_lengths": True, "pages": pages, "window_right": 0, **of}
    return AttentionProblem(*sizes, **given)


def chosen(problem: AttentionProblem, num_sms: int = 132) -> sm90_grid.Launches:
    config = sm90_forward.forward(problem, ())
    assert config is not None
    return sm90_grid.for_grid(problem, config, num_sms)


def listed(queries: Any, keys: Any, num_sms: int = 132, **of: Any) -> Listed:
    """The list of a batch, from arrays that hold nothing but lengths."""
    problem = problem_of(queries, keys, **of)
    config = chosen(problem, num_sms).config
    device = CpuDevice((9, 0), num_sms=num_sms)
    assert problem.pages is not None
    arrays = {
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        "kv_lengths": np.asarray(keys, np.int32),
        "block_table": np.zeros((len(queries), problem.pages.max_pages), np.int32),
    }

    def run(kernel: Any, given: dict[str, Any]) -> None:
        own = launch.Launch(kernel, problem, given, device)  # type: ignore[arg-type]
        own.enqueue_in_order([x.ctypes.data for x in given.values()], None, 0)

    work = SimpleNamespace(problem=problem, device=device, arrays=arrays, run=run, empty=np.zeros)
    with hook.kernels_on(device):
        found = work_list.find(work, config)  # type: ignore[arg-type]
    number, cut = found["work_entries"][0, :2]
    sizes = sm90_mixed.size_of(problem, config, work_list.slots_of(problem, config), num_sms)
    return Listed(problem, config, found["work_entries"][1 : 1 + number, :6], found["cut_tiles"][:cut, :4], sizes)


BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "prefill and decodes": ([1] * 63 + [512], [512 + 250 * i for i in range(64)]),
    "decodes of one length": ([1] * 20, [8192] * 20),
    "one giant": ([1] * 40, [100_000] + [100] * 39),
    "one sequence": ([3], [50_000]),
    "nothing": ([0, 1, 0, 5], [0, 0, 77, 0]),
    "many": ([2] * 300, [1000 + 7 * i for i in range(300)]),
    "a chunk of a prompt": ([2048] + [1] * 8, [9000] + [1500 * i for i in range(1, 9)]),
}


@no_compiler
@pytest.mark.parametrize("name", BATCHES)
def test_a_list_has_every_key_of_every_tile_once(name: str) -> None:
    queries, keys = BATCHES[name]
    found = listed(queries, keys)
    rows, block_n = found.config.queries_of_tile(found.problem), found.config.block_n
    expected: dict[tuple[int, int], list[int]] = {}
    for group, (n, length) in enumerate(zip(queries, keys, strict=True), 1):
        for tile in range(-(-n // rows)):
            seen = min(max(length - n + min((tile + 1) * rows, n), 0), length)
            expected[group, tile] = list(range(-(-seen // block_n)))
    of_tiles: dict[tuple[int, int], list[Any]] = {tile: [] for tile in expected}
    for group, tile, *rest in found.entries.tolist():
        of_tiles[group, tile].append(rest)
    cut = {(group, tile): (first, number) for group, tile, first, number in found.cut.tolist()}
    for place, chunks in of_tiles.items():
        chunks.sort()
        assert [step for begin, end, *_ in chunks for step in range(begin, end)] == expected[place]
        assert [chunk for *_, chunk, _ in chunks] == list(range(len(chunks)))
        first, number = cut.get(place, (-1, 1))
        assert [part for *_, part in chunks] == ([-1] if number == 1 else list(range(first, first + number)))
    assert all(number > 1 for _, number in cut.values())
    parts = sorted(first + i for first, number in cut.values() for i in range(number))
    assert parts == list(range(len(parts)))
    assert len(found.entries) <= found.sizes.most_entries
    assert len(cut) <= found.sizes.most_cut and len(parts) <= found.sizes.most_parts


@no_compiler
@pytest.mark.parametrize(
    ("name", "least"),
    [("prefill and decodes", 0.9), ("decodes of one length", 0.8), ("one giant", 0.85), ("many", 0.9)],
)
def test_thread_blocks_that_take_entries_as_they_become_free_end_together(name: str, least: float) -> None:
    """Against all work without that of cutting, dealt out evenly."""
    queries, keys = BATCHES[name]
    found = listed(queries, keys)
    costs = np.repeat(found.entries[:, 3] - found.entries[:, 2], found.problem.num_heads_kv)
    of_tile = sm90_mixed.steps_of_entry(found.config)
    ends = np.zeros(132)
    for cost in costs + of_tile:
        ends[np.argmin(ends)] += cost
    tiles = np.count_nonzero(found.entries[:, 4] == 0) * found.problem.num_heads_kv
    assert (costs.sum() + tiles * of_tile) / 132 / ends.max() >= least


def test_only_batches_that_need_one_have_a_list() -> None:
    decodes = [1] * 63, [8192] * 63
    mixed = [1] * 63 + [512], [8192] * 64
    assert chosen(problem_of(*decodes)).config.has_work_list
    assert chosen(problem_of(*mixed)).config.has_work_list
    assert chosen(problem_of([512], [16384])).config.has_work_list
    # These have tiles for every multiprocessor many times over.
    assert not chosen(problem_of([4096] * 8, [16384] * 8)).config.has_work_list
    for option in ({"num_splits": 2}, {"num_splits": 1}, {"block_mask": True}, {"packed": False}):
        assert not chosen(problem_of(*mixed, **option)).config.has_work_list
    # Packed batches of a training step keep the kernels that they had.
    training = AttentionProblem(8, 8192, 8192, 32, 8, 128, 128, "bfloat16", packed=True, window_right=0)
    assert not chosen(training).config.has_work_list


def test_the_tile_is_small_where_memory_decides() -> None:
    assert chosen(problem_of([1] * 64, [8192] * 64)).config.block_m == 64
    assert chosen(problem_of([1] * 63 + [512], [8192] * 64)).config.block_m == 128


@no_compiler
def test_a_list_follows_lengths_that_change_in_place() -> None:
    """A repeated call finds the lengths anew, as a replayed graph does."""
    case = as_paged(drawn(3, False), 16, np.random.default_rng(0))
    with hook.kernels_on(CpuDevice((9, 0), num_sms=5)):
        place = case.on(HOST)
        for seed in range(3):
            lengths = place.options["kv_lengths"]
            rng = np.random.default_rng(seed)
            lengths[:] = rng.permutation(np.clip(lengths, 0, 100)) if seed else lengths
            table = place.options["block_table"]
            table[:] = rng.integers(0, len(case.k), table.shape)
            own = case.with_options(kv_lengths=lengths.copy(), block_table=table.copy())
            own.assert_forward(*place.forward())
