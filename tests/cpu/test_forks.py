"""Children of `os.fork` compute, whatever the parent's other threads were doing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from cuflash.cpu import threads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

# A child ends in one of these ways: it computed with as many threads of BLAS as the parent, with others, or hung.
PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import cuflash

SECONDS = 30  # more than any call here takes on a busy machine

def child_of(compute):
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            os._exit(0 if compute() else 1)
        finally:
            os._exit(2)
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFSIGNALED(status), "the child hung"
    assert os.WEXITSTATUS(status) == 0, f"the child ended with {os.WEXITSTATUS(status)}"

x = np.linspace(-1, 1, 4 * 8, dtype=np.float32).reshape(1, 4, 1, 8)
"""


def run(script: str) -> None:
    """Run a script in a process of its own, whose BLAS has two threads."""
    text = PRELUDE + textwrap.dedent(script)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_while_threads_compute() -> None:
    run("""
        from cuflash.cpu.threads import _blas_functions
        functions = _blas_functions()
        blas_threads = functions[0] if functions else lambda: 1
        before = blas_threads()
        expected = cuflash.attention(x, x, x)
        stop = threading.Event()

        def loop():
            while not stop.is_set():
                cuflash.attention(x, x, x)

        def compute():
            count = blas_threads()
            out, backward = cuflash.attention_vjp(x, x, x)
            return count == before == blas_threads() and (out == expected).all() and backward(out)[0].shape == x.shape

        threads = [threading.Thread(target=loop) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(40):
                child_of(compute)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert blas_threads() == before
    """)


def test_while_a_thread_is_within_a_call() -> None:
    """The child has BLAS's threads back, and the parent's call goes on with one, whichever thread forks."""
    if threads._blas_functions() is None:
        pytest.skip("NumPy's BLAS is none whose threads we can set")
    run("""
        from cuflash.cpu.threads import BLAS_THREADS, _blas_functions, run_tasks
        from cuflash.cpu.work import Work
        blas_threads = _blas_functions()[0]
        before = blas_threads()
        assert before == 2
        seen, entered, leave = [], threading.Event(), threading.Event()

        def task(number, workspace):
            entered.set()
            assert leave.wait(SECONDS)
            seen.append(blas_threads())

        thread = threading.Thread(target=run_tasks, args=(1, task, False, Work(int)))
        thread.start()
        assert entered.wait(SECONDS)

        def compute():
            count = blas_threads()
            within = []
            run_tasks(1, lambda number, workspace: within.append(blas_threads()), False, Work(int))
            return count == 2 and within == [1] and blas_threads() == 2

        child_of(compute)
        child_of(lambda: child_of(compute) is None)  # and a child's child
        leave.set()
        thread.join()
        assert seen == [1] and blas_threads() == before
    """)


def test_while_another_thread_has_its_first_call() -> None:
    """Modules that a call imports are whole in the child, or not begun."""
    run("""
        started = threading.Event()

        def first():
            started.set()
            cuflash.BlockMask
            cuflash.attention(x, x, x)

        def compute():
            return cuflash.attention(x, x, x, block_mask=cuflash.BlockMask.fixed(4, 4, 0)).shape == x.shape

        thread = threading.Thread(target=first)
        thread.start()
        assert started.wait(SECONDS)
        for _ in range(20):
            child_of(compute)
        thread.join()
    """)


def test_in_a_signal_handler() -> None:
    """The thread that forks may itself hold the lock that it takes to fork."""
    run("""
        from cuflash import forks

        with forks.LOCK:
            child_of(lambda: cuflash.attention(x, x, x).shape == x.shape)
        child_of(lambda: cuflash.attention(x, x, x).shape == x.shape)

        calls = 0

        def handler(*_):
            global calls
            calls += 1
            child_of(lambda: cuflash.attention(x, x, x).shape == x.shape)

        signal.signal(signal.SIGUSR1, handler)
        long = np.ones((1, 600, 2, 8), np.float32)
        expected = cuflash.attention(long, long, long)
        for _ in range(5):
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert (cuflash.attention(long, long, long) == expected).all()
        deadline = time.monotonic() + SECONDS
        while not calls and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls
    """)
