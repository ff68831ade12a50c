"""Progress of calls on NumPy arrays: what is told, to whom, how often; and how a callback cancels the work."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from devices import threads_of_cpu_path

import cuflash
from cuflash import BlockMask, reporting
from cuflash.cpu import tiles
from cuflash.cpu.threads import BLAS_THREADS, _blas_functions

SEQLEN = 1600
SHAPE = (2, SEQLEN, 2, 8)
MASK = BlockMask.strided(SEQLEN, 100, 300, causal=True)
# Options, and the scores of the tiles that are visited where that is all of them.
OPTIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({}, 4 * SEQLEN**2),
    "causal": ({"causal": True}, None),
    "block mask": ({"block_mask": MASK}, None),
    "dropout": ({"dropout_p": 0.5, "dropout_seed": 1}, 4 * SEQLEN**2),
    "splits": ({"split_size": 500}, 4 * SEQLEN**2),
}


@pytest.fixture
def _every_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each tile that the caller computes is reported, and work is spread over threads."""
    monkeypatch.setattr(reporting, "INTERVAL", 0.0)
    monkeypatch.setattr(tiles, "TASK_WORK", 1)
    monkeypatch.setattr(tiles, "_layout_of_whole", tiles._layout_of_whole.__wrapped__)
    with threads_of_cpu_path(3):
        yield


def x() -> Any:
    return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def check(told: list[tuple[int, int]], whole: int | None, least: int = 2) -> None:
    """One pass: it grows, is told `least` times at least, and ends with all."""
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1 and done[-1] == totals[0] > 0
    assert list(done) == sorted(done) and totals[0] not in done[:-1] and len(set(done)) >= least
    assert whole is None or totals[0] == whole


@pytest.mark.usefixtures("_every_tile")
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_backward_tell_how_far_they_are(name: str) -> None:
    options, whole = OPTIONS[name]
    expected, backward = cuflash.attention_vjp(x(), x(), x(), **options)
    gradients = backward(expected)
    told: list[tuple[int, int]] = []
    threads = set()

    def callback(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    with cuflash.progress(callback):
        out, backward = cuflash.attention_vjp(x(), x(), x(), **options)
        check(told, whole)
        told.clear()
        found = backward(out)
        check(told, whole)
    assert threads == {threading.get_ident()}
    told.clear()
    for ours, theirs in zip((out, *found), (expected, *gradients), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # the same bits
    cuflash.attention(x(), x(), x())
    assert not told


@pytest.mark.usefixtures("_every_tile")
def test_the_passes_of_a_backward_are_one() -> None:
    """A bias that heads share has a second pass for its gradient; packed sequences, and heads that share keys."""
    told: list[tuple[int, int]] = []
    rows, packed = x(), x()[0]
    bias = np.zeros((SEQLEN, SEQLEN), np.float32)
    lengths = np.array([0, 900, SEQLEN], np.int32)
    with cuflash.progress(lambda *both: told.append(both)):
        out, backward = cuflash.attention_vjp(rows, rows, rows, bias=bias)
        told.clear()
        backward(out)
        check(told, 2 * 4 * SEQLEN**2)
        told.clear()
        backward(out, grads=("bias",))
        check(told, 4 * SEQLEN**2)
        told.clear()
        cuflash.attention_varlen(packed, packed[:, :1], packed[:, :1], lengths, lengths)
        check(told, 2 * (900**2 + 700**2), least=1)


def test_short_calls_report_at_their_end_and_seldom() -> None:
    short = np.zeros((1, 64, 1, 8), np.float32)
    told: list[tuple[int, int]] = []
    begin = time.monotonic()
    with cuflash.progress(lambda *both: told.append(both)):
        cuflash.attention(short, short, short)
        assert told == [(64 * 64, 64 * 64)]
        for _ in range(300):
            cuflash.attention(short, short, short)
        cuflash.attention(short[:, :0], short, short)
    assert len(told) <= 2 + (time.monotonic() - begin) / reporting.INTERVAL
    assert set(told) == {(64 * 64, 64 * 64)}


class Enough(Exception):  # no error, but what a caller may raise
    pass


@pytest.mark.usefixtures("_every_tile")
@pytest.mark.parametrize("after", [0, 5, "the end"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_exception_of_the_callback_cancels_the_call(after: int | str, direction: str) -> None:
    out, backward = cuflash.attention_vjp(x(), x(), x())
    before = _blas_threads()
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if done == total or len(calls) - 1 == after:
            raise Enough

    with cuflash.progress(stop), pytest.raises(Enough):
        cuflash.attention(x(), x(), x()) if direction == "forward" else backward(out)
    assert after == "the end" or len(calls) == int(after) + 1
    assert all(thread.name != "cuflash" for thread in threading.enumerate())
    assert _blas_threads() == before
    np.testing.assert_array_equal(cuflash.attention(x(), x(), x()), out)


def _blas_threads() -> int | None:
    with BLAS_THREADS:
        pass
    functions = _blas_functions()
    return None if functions is None else functions[0]()


@pytest.mark.usefixtures("_every_tile")
def test_the_other_threads_stop_within_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that are computed behind the callback's exception are those that other threads had begun."""
    begun: list[bool] = []
    is_cancelled = threading.Event()
    tiles_of = tiles.Tiling.tiles

    def counted(self: tiles.Tiling, block: tiles.Block) -> Iterator[tiles.Tile]:
        for tile in tiles_of(self, block):
            begun.append(is_cancelled.is_set())
            yield tile

    def stop(done: int, total: int) -> None:
        is_cancelled.set()
        raise Enough

    monkeypatch.setattr(tiles.Tiling, "tiles", counted)
    long = np.zeros((1, 40000, 1, 8), np.float32)  # a block of rows has many tiles
    with cuflash.progress(stop), pytest.raises(Enough):
        cuflash.attention(long[:, :3000], long, long)
    count = sum(begun)
    cuflash.attention(long[:, :3000], long, long)
    assert count <= 4 < 100 < sum(begun)


def test_a_context_is_its_threads_own() -> None:
    told: dict[str, list[int]] = {"outer": [], "inner": [], "copied": [], "task": []}
    long = np.zeros((1, 64, 1, 8), np.float32)

    def call() -> None:
        cuflash.attention(long, long, long)

    def in_thread(function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args)
        thread.start()
        thread.join()

    with cuflash.progress(lambda done, total: told["outer"].append(done)):
        in_thread(contextvars.Context().run, call)
        assert not told["outer"]
        with cuflash.progress(lambda done, total: told["inner"].append(done)):
            call()
        assert len(told["inner"]) == 1 and not told["outer"]
        call()
        assert len(told["outer"]) == 1
    with cuflash.progress(lambda done, total: told["copied"].append(threading.get_ident())):
        in_thread(contextvars.copy_context().run, call)
        assert len(told["copied"]) == 1 and told["copied"][0] != threading.get_ident()

    async def task() -> None:
        with cuflash.progress(lambda done, total: told["task"].append(done)):
            await asyncio.to_thread(call)

    asyncio.run(task())
    assert len(told["task"]) == 1
    call()
    assert {name: len(calls) for name, calls in told.items()} == dict.fromkeys(told, 1)


def test_a_callback_may_compute() -> None:
    short = np.zeros((1, 64, 1, 8), np.float32)
    told = []

    def callback(done: int, total: int) -> None:
        told.append(cuflash.attention(short, short, short))

    with cuflash.progress(callback):
        cuflash.attention(short, short, short)
    assert len(told) == 1


@pytest.mark.parametrize("callback", [None, 3, "show"])
def test_what_cannot_be_called(callback: Any) -> None:
    with pytest.raises(TypeError, match=r"callback: expected a callable \(done, total\), got"):
        cuflash.progress(callback)


@pytest.mark.parametrize("without_tqdm", [False, True])
def test_the_example_shows_both_passes(
    without_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuflash.examples import long_sequence

    if without_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    else:
        pytest.importorskip("tqdm")
    monkeypatch.setattr(reporting, "INTERVAL", 0.0)
    assert long_sequence.main(["--seqlen", "1k", "--heads", "1", "--head-dim", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("100%") == 2 and "forward" in printed.err and "backward" in printed.err
    assert printed.out.startswith("1024 queries and keys")


def test_the_example_spreads_a_sequence_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    from cuflash.examples import long_sequence

    small = ["--seqlen", "200", "--heads", "2", "--head-dim", "8"]
    assert long_sequence.main([*small, "--ranks", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("200 tokens, 2 heads, 3 threads: ")
    assert long_sequence.main([*small, "--ranks", "1000"]) == 2
    assert "--ranks: expected at most" in capsys.readouterr().err


def test_the_example_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cuflash.examples import long_sequence

    def interrupt(label: str) -> Any:
        def show(done: int, total: int) -> None:
            raise KeyboardInterrupt

        return show

    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(long_sequence, "_plain", interrupt)
    assert long_sequence.main(["--seqlen", "64", "--heads", "1", "--head-dim", "8"]) == 130
    assert "stopped" in capsys.readouterr().err
