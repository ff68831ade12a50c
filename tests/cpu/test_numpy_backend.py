"""Tests of the CPU path's own machinery: tiles and their edges, threads, BLAS, scratch memory, numbers as bits."""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, accum_dtype, assert_same_bits, gaussian, gaussian_case, np_dtype, same_bits
from devices import Device, threads_of_cpu_path
from numpy.typing import NDArray

import cuflash
from cuflash import reference
from cuflash.cpu import scores as cpu_scores
from cuflash.cpu import threads, tiles
from cuflash.cpu.dropout import keep_tile
from cuflash.cpu.threads import InOrder, Workspace, run_tasks
from cuflash.cpu.tiles import Tiling
from cuflash.cpu.work import Work
from cuflash.frontend.call import Call
from cuflash.problem.heads import Heads

Array = NDArray[Any]

CPU = Device("numpy", np)


def everything(seed: int, dtype: str, rows: int, keys: int, batch: int = 2, heads: int = 4) -> dict[str, Any]:
    """Return every option but for a third of them, which the seed chooses; dropout is always there."""
    rng = np.random.default_rng(seed)
    accum = accum_dtype(np_dtype(dtype))
    bias_shape = [(batch, heads, rows, keys), (1, heads, rows, keys), (heads, 1, keys), (batch, 1, rows, 1), (1, keys)]
    bias = gaussian(rng, bias_shape[seed % 5], dtype)
    bias[rng.random(bias.shape) < 0.05] = -np.inf
    options: dict[str, Any] = {
        "window": [(rows // 2, 3), (None, 0), (5, None)][seed % 3],
        "softcap": 5.0,
        "bias": bias,
        "mask": rng.random((batch, 1, rows, keys)[seed % 3 :]) < 0.8,
        "block_mask": rng.random((1, [1, heads][seed % 2], rows, keys)) < 0.7,
        "alibi_slopes": rng.random((batch, heads)).astype(accum),
        "sink": gaussian(rng, (heads,), accum),
        "q_lengths": np.array([rows, rows - 3], np.int32),
        "kv_lengths": np.array([keys - 5, keys], np.int32),
        "dropout_p": 0.2,
        "dropout_seed": seed,
    }
    left_out = [name for index, name in enumerate(options) if (index + seed) % 3 == 0 and "dropout" not in name]
    return {name: value for name, value in options.items() if name not in left_out}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that short sequences have many, of every kind."""
    monkeypatch.setattr(tiles, "_layout_of_whole", tiles._layout_of_whole.__wrapped__)
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 300)
    monkeypatch.setattr(tiles, "TILE_COPIED_NUMBERS", 200)
    monkeypatch.setattr(tiles, "TASK_WORK", 1)
    monkeypatch.setattr(tiles, "BLOCK_ROWS", 24)
    monkeypatch.setattr(tiles, "BLOCK_KEYS", 20)
    monkeypatch.setattr(tiles, "CUT_KEYS", 7)
    monkeypatch.setattr(tiles, "MIN_TASKS", 3)


def check(case: Case) -> None:
    on_device = case.on(CPU)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small_tiles")
def test_edges_of_small_tiles(seed: int, dtype: str) -> None:
    rows, keys = [(61, 75), (100, 49), (30, 131)][seed % 3]
    case = gaussian_case(seed, dtype, (rows, keys), dims=(9, 6), **everything(seed, dtype, rows, keys))
    check(replace(case, dlse=gaussian(np.random.default_rng(seed), case.lse_shape, accum_dtype(case.dtype))))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small_tiles")
def test_edges_of_small_tiles_packed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cu_q, cu_k = np.array([2, 50, 88], np.int32), np.array([0, 71, 110], np.int32)
    q, k, v, dout = (gaussian(rng, shape, "float32") for shape in ((90, 4, 9), (113, 2, 9), (113, 2, 6), (90, 4, 6)))
    options = everything(seed, "float32", 48, 71)
    check(Case(q, k, v, dout, gaussian(rng, (4, 90), "float32"), options, (cu_q, cu_k), block_size=(16, 16)))


@pytest.mark.parametrize(
    ("heads", "seqlens", "options"),
    [
        ((2, 2), (900, 1100), {"causal": True}),
        ((4, 1), (700, 700), {"window": (130, 40)}),
        ((8, 2), (130, 130), {"causal": True}),  # several groups in one tile
        ((6, 2), (1, 3000), {}),  # one row: decoding
        ((6, 1), (3, 800), {"causal": True, "softcap": 10.0}),
        ((1, 1), (1500, 64), {"sink": np.array([1.0], np.float32)}),
    ],
)
def test_real_tiles(heads: tuple[int, int], seqlens: tuple[int, int], options: dict[str, Any]) -> None:
    case = gaussian_case(0, "float32", seqlens, heads=heads, dims=(16, 16), batch=1, **options)
    on_device = case.on(CPU)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


def visible_pairs(tiling: Tiling) -> int:
    return sum(
        (tile.block.row_stop - tile.block.row) * (tile.key_stop - tile.key)
        for block in tiling.blocks()
        for tile in tiling.tiles(block)
    )


def tiling_of(seqlen: int, **options: Any) -> Tiling:
    x = np.zeros((1, seqlen, 1, 4), np.float32)
    call = Call(x, x, x, options)
    return Tiling(call.problem, call.operands)


def test_hidden_tiles_are_not_visited() -> None:
    """Causal costs little more than half, a window its width, lengths their product, a block mask its blocks."""
    n = 4096
    half = n * (n + 1) // 2
    assert half <= visible_pairs(tiling_of(n, causal=True)) <= 1.05 * half
    width = 400
    assert visible_pairs(tiling_of(n, window=(width, 0))) <= n * (width + tiles.CUT_KEYS + 1)
    lengths = {"q_lengths": np.array([100], np.int32), "kv_lengths": np.array([200], np.int32)}
    assert visible_pairs(tiling_of(n, **lengths)) == 100 * 200
    blocks = np.random.default_rng(0).random((n // 64, n // 64)) < 0.1
    bm = cuflash.BlockMask.from_blocks(blocks, n, n, block_size=(64, 64))
    assert visible_pairs(tiling_of(n, block_mask=bm)) == blocks.sum() * 64**2


def test_full_tiles_have_no_mask() -> None:
    tiling = tiling_of(2000, window=(700, 0))
    tiles = [tile for block in tiling.blocks() for tile in tiling.tiles(block)]
    for tile in tiles:
        rows, keys = (np.arange(x, y) for x, y in ((tile.block.row, tile.block.row_stop), (tile.key, tile.key_stop)))
        visible = (keys <= rows[:, None]) & (keys >= rows[:, None] - 700)
        assert visible.any(axis=1).all(), "every row of a tile sees something"
        assert tile.is_cut or visible.all()
    assert any(not tile.is_cut for tile in tiles)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    case = gaussian_case(1, "float32", (90, 90), heads=(4, 1), **everything(1, "float32", 90, 90))
    if packed:
        rng = np.random.default_rng(2)
        cu = np.array([0, 40, 90], np.int32)
        q, k, v, dout = (gaussian(rng, (90, heads, 16), "float32") for heads in (4, 1, 1, 4))
        case = Case(q, k, v, dout, options=everything(2, "float32", 50, 50), cu_seqlens=(cu, cu))
    results = []
    for count in (1, 2, 7, 2):
        with threads_of_cpu_path(count):
            on_device = case.on(CPU)
            out, lse = on_device.forward()
            results.append({"out": out, "lse": lse, **on_device.backward(out, lse)})
    for other in results[1:]:
        assert_same_bits(other, results[0])


def blas_threads() -> int:
    functions = threads._blas_functions()
    if functions is None:
        pytest.skip("NumPy's BLAS is none whose threads we can set")
    return functions[0]()


def test_blas_threads_are_restored() -> None:
    before = blas_threads()
    seen = []

    def task(number: int, workspace: Workspace) -> None:
        seen.append(blas_threads())
        if number == 3:
            raise KeyError("stop")
        # Tasks take some time, as empty ones could all run on one thread before the one that raises ends them.
        if number > 3:
            time.sleep(0.01)

    run_tasks(3, task, parallel=True, work=Work(int))
    with pytest.raises(KeyError, match="stop"):
        run_tasks(1000, task, parallel=True, work=Work(int))
    assert set(seen) == {1}
    assert len(seen) < 900, "nobody starts another task after an error"
    assert blas_threads() == before


def test_blas_threads_with_calls_at_the_same_time() -> None:
    before = blas_threads()
    barrier = threading.Barrier(3)
    overlapping = []

    def caller() -> None:
        barrier.wait()
        run_tasks(20, lambda number, workspace: overlapping.append(blas_threads()), parallel=True, work=Work(int))

    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(overlapping) == {1}
    assert blas_threads() == before


def test_actions_run_in_order() -> None:
    order = InOrder()
    done: list[int] = []
    for number in (2, 0, 1, 5, 4, 3, 6):
        order.submit(number, lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(7))


def test_scratch_memory_is_reused() -> None:
    workspace = Workspace(Work(int))
    first = workspace.array("scores", (4, 6), "float32")
    second = workspace.array("scores", (3, 5), "float32")
    assert np.shares_memory(first, second) and second.flags.c_contiguous
    assert not np.shares_memory(second, workspace.array("scores", (3, 5), "float64"))
    made = [workspace.remember(key, lambda key=key: np.array(key)) for key in (1, 2, 1)]  # type: ignore[misc]
    assert made[0] is made[2] and made[1] == 2


def test_float16_is_widened_exactly() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    assert same_bits(cpu_scores.widen(finite), finite.astype(np.float32))
    assert same_bits(cpu_scores.widen(every), every.astype(np.float32))
    assert cpu_scores.widen(np.zeros((3, 0), np.float16)).shape == (3, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hiding_whatever_it_hides(dtype: Any) -> None:
    heads = Heads(0, 4, 0, 2)
    values = np.array([1.5, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).min], dtype)
    rng = np.random.default_rng(0)
    scores = rng.choice(values, (2, 5, 6))  # two KV heads, five keys, two query heads of three rows
    for shape in ((2, 5, 2, 3), (1, 5, 1, 3), (1, 1, 1, 3), (2, 5, 2, 1)):
        visible = rng.random(shape) < 0.5
        whole = np.broadcast_to(visible, (2, 5, 2, 3)).reshape(scores.shape)
        for function, filler in ((cpu_scores.hide, -np.inf), (cpu_scores.zero_hidden, 0.0)):
            changed = scores.copy()
            function(changed, visible, heads)
            assert same_bits(changed, np.where(whole, scores, dtype(filler)))


@pytest.mark.parametrize("ranges", [((0, 2), (0, 40), (0, 50)), ((1, 3), (7, 9), (15, 33)), ((2, 3), (24, 25), (8, 8))])
def test_dropout_of_any_tile(ranges: tuple[tuple[int, int], ...]) -> None:
    heads, rows, keys = ranges
    whole = reference.dropout_keep(1, 3, 40, 50, 0.4, 99, first_batch=5)[0]
    tile = keep_tile(99, reference.dropout_threshold(0.4), 5, heads, rows, keys)
    assert np.array_equal(tile.swapaxes(1, 2), whole[slice(*heads), slice(*rows), slice(*keys)])


@pytest.mark.parametrize("size", [1e-9, 6e4])
def test_the_error_state_of_the_caller_is_no_matter(size: float) -> None:
    """Sums that their type does not hold become 0 or inf, as gradients that are no sums do."""
    q, dlse = np.ones((1, 40, 1, 8), np.float16), np.full((1, 1, 40), size, np.float32)
    with np.errstate(all="raise"):
        out, backward = cuflash.attention_vjp(q, q, q, bias=np.zeros((40, 1), np.float16), sink=np.zeros(1, np.float32))
        dbias = backward(np.zeros_like(out), 2 * dlse)[3]
    assert (dbias == (0 if size < 1 else np.inf)).all()


def test_no_warnings_from_hidden_values() -> None:
    """NaN, inf and overflowing scores that nobody sees give no warning."""
    case = gaussian_case(3, "float32", (40, 40), causal=True, kv_lengths=np.array([30, 20], np.int32))
    case.k[0, 30:], case.v[0, 30:], case.k[1, 20:] = np.nan, np.inf, 3e38
    on_device = case.on(CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = on_device.forward()
        on_device.backward(out, lse)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("has_sink", [False, True])
def test_values_of_rows_that_see_nothing_do_not_count(bad: float, has_sink: bool) -> None:
    rng = np.random.default_rng(6)
    q, k, v, dout = (gaussian(rng, (1, rows, 2, 8), "float32") for rows in (30, 20, 20, 30))
    sink = np.array([0.5, -1.0], np.float32) if has_sink else None
    _, backward = cuflash.attention_vjp(q, k, v, causal=True, sink=sink)
    expected = backward(dout, dlse := np.ones((1, 2, 30), np.float32))
    q, dout = q.copy(), dout.copy()
    q[:, :10], dout[:, :10] = bad, bad
    _, backward = cuflash.attention_vjp(q, k, v, causal=True, sink=sink)
    for got, want in zip(backward(dout, dlse), expected, strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gradient_of_a_row_of_the_lowest_score(dtype: str) -> None:
    """The row's lse cannot tell how many keys it counts, and its gradient is still that of uniform weights."""
    case = gaussian_case(4, dtype, (30, 500), dims=(8, 8))
    lowest = -float(np.nextafter(case.dtype.type(np.inf), case.dtype.type(0)))
    bias = np.zeros((30, 1), case.dtype)
    bias[::2] = lowest
    case = replace(case.with_options(bias=bias), q=np.zeros_like(case.q))
    on_device = case.on(CPU)
    case.assert_gradients(on_device.backward(*on_device.forward()))


def test_gradients_of_parts_with_a_large_lse() -> None:
    """Rows are scaled to sum to 1 only where they may be, and not as parts of a merge, which sum to less."""
    case = gaussian_case(5, "float32", (50, 120), dims=(16, 16))
    case = replace(case, q=case.q * 40)  # scores of hundreds
    parts = [replace(case, k=case.k[:, keys], v=case.v[:, keys]) for keys in (slice(0, 70), slice(70, 120))]
    results = [part.on(CPU).forward() for part in parts]
    out, lse = cuflash.merge([out for out, _ in results], [lse for _, lse in results])
    grads = [part.on(CPU).backward(out, lse) for part in parts]
    whole = {"q": grads[0]["q"] + grads[1]["q"]} | {
        name: np.concatenate([grad[name] for grad in grads], axis=1) for name in "kv"
    }
    case.assert_gradients({name: whole[name] for name in "qkv"})


def test_gradients_of_scores_of_hundreds() -> None:
    """A float32 lse of 500 is off by 3e-5, and so would be every probability."""
    case = gaussian_case(6, "float32", (200, 300), dims=(64, 64), softmax_scale=8.0)
    on_device = case.on(CPU)
    case.assert_gradients(on_device.backward(*on_device.forward()), strict=True)


@pytest.mark.parametrize("name", ["bias", "mask", "block_mask"])
def test_extras_must_cover_the_longest_sequence(name: str) -> None:
    x, cu = np.zeros((9, 1, 4), np.float32), np.array([0, 2, 9], np.int32)
    mask = np.ones((7, 6), bool)
    extras = {"bias": mask.astype(np.float32), "mask": mask, "block_mask": cuflash.BlockMask.from_dense(mask)}
    options: dict[str, Any] = {name: extras[name]}
    with pytest.raises(ValueError, match=rf"{name}: expected \(\.\.\., rows, columns\) of at least \(7, 7\)"):
        cuflash.attention_varlen(x, x, x, cu, cu, **options)
    cuflash.attention_varlen(x, x, x, cu, cu, **options, kv_lengths=np.array([2, 6], np.int32))


@pytest.mark.parametrize("side", [10**4, 2**63 - 1, 10**30])
def test_windows_wider_than_anything(side: int) -> None:
    case = gaussian_case(7, "float32", (70, 40), dims=(8, 8))  # the first rows are aligned to keys before the first
    plain = case.with_options(causal=True).on(CPU).forward()
    for window in ((side, 0), (0, side), (side, side)):
        out, lse = case.with_options(window=window).on(CPU).forward()
        case.with_options(window=window).assert_forward(out, lse)
        assert window[1] or same_bits(out, plain[0])
