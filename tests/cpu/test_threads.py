"""The calling thread computes where threads cannot be started, and raises the errors of those that fail."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from cases import assert_same_bits, gaussian_case
from devices import Device, threads_of_cpu_path

from cuflash.cpu import tiles
from cuflash.cpu.threads import Workspace, run_tasks
from cuflash.cpu.work import Work

CPU = Device("numpy", np)
# Enough scores for several tasks and threads.
SCRIPT = """
import numpy as np
import cuflash
from cuflash.cpu import tiles
from cuflash.cpu.work import Work
from cuflash.cpu.threads import _BlasThreads

tiles.TASK_WORK = 1
x = np.linspace(-1, 1, 2 * 900 * 4 * 8, dtype=np.float32).reshape(2, 900, 4, 8)

def compute():
    out, backward = cuflash.attention_vjp(x, x, x)
    return out, *backward(out)

expected = compute()

def check():
    assert all((ours == theirs).all() for ours, theirs in zip(compute(), expected, strict=True))
"""


def run(script: str) -> str:
    text = SCRIPT + textwrap.dedent(script)
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_at_exit() -> None:
    """Calls work in handlers that were registered before and behind the first thread, and at shutdown."""
    output = run("""
        import atexit, weakref

        def last():
            check()
            print("checked")

        class Kept:
            pass

        atexit.register(last)
        kept = Kept()
        weakref.finalize(kept, last)
        check()
    """)
    assert output.split() == ["checked", "checked"]


def test_beyond_the_limit_of_the_system() -> None:
    pytest.importorskip("resource", reason="this system sets no limits")
    output = run("""
        import resource, threading

        threading.stack_size(1 << 36)
        limit = 1 << 35
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            threading.Thread(target=print).start()
        except RuntimeError:
            print("no thread")
        check()
        print("checked")
    """)
    assert output.split() == ["no", "thread", "checked"]


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_bits_with_fewer_threads_than_wanted(monkeypatch: pytest.MonkeyPatch, granted: int) -> None:
    case = gaussian_case(1, "float32", (90, 90), heads=(4, 1), causal=True)
    monkeypatch.setattr(tiles, "_layout_of_whole", tiles._layout_of_whole.__wrapped__)
    monkeypatch.setattr(tiles, "TASK_WORK", 1)

    def results() -> dict[str, object]:
        with threads_of_cpu_path(4):
            on_device = case.on(CPU)
            out, lse = on_device.forward()
            return {"out": out, "lse": lse, **on_device.backward(out, lse)}

    expected = results()
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) % 3 >= granted:
            started.append(thread)
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert_same_bits(results(), expected)
    assert started


def test_an_error_of_any_thread_reaches_the_caller() -> None:
    """No other task begins after an error of any thread, and the caller waits for those that run."""
    caller = threading.current_thread()
    for own in (True, False):
        met = threading.Event()
        done: list[int] = []

        def task(number: int, workspace: Workspace, own: bool = own, met: threading.Event = met) -> None:
            if (threading.current_thread() is caller) == own:
                met.set()
                raise KeyError("stop")
            assert met.wait(60)
            done.append(number)  # noqa: B023

        with threads_of_cpu_path(3), pytest.raises(KeyError, match="stop"):
            run_tasks(1000, task, parallel=True, work=Work(int))
        assert len(done) < 900
        assert threading.active_count() == 1 or all(x.name != "cuflash" for x in threading.enumerate())
