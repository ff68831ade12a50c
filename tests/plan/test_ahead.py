"""Kernels are compiled in daemon threads before calls ask for them, once each, and nothing of it reaches a call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from compiling import needs_compiler
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import forget_launches
from spilling import Nothing

import cuflash
from cuflash.cuda import ahead, refusals
from cuflash.cuda import device as cuda_device
from cuflash.gpu import ahead as gpu_ahead
from cuflash.gpu import choose, rule_blocks


class Slow(CpuDevice):
    """A GPU whose kernels run nothing, and whose compiler takes its time."""

    compiler = "slow"
    fails: tuple[str, ...] = ()  # entries that do not compile
    graph = 0

    def __init__(self, capability: tuple[int, int], seconds: float = 0.01) -> None:
        super().__init__(capability, num_sms=132)
        self.seconds = seconds
        self.loaded: Counter[tuple[str, int]] = Counter()  # by entry and source
        self.by_calls: list[str] = []  # entries that the main thread compiled
        self.most_at_once = self.at_once = 0

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        self.at_once -= 1
        self.loaded[entry, hash(source)] += 1
        if threading.current_thread() is threading.main_thread():
            self.by_calls.append(entry)
        if entry in self.fails:
            raise RuntimeError(f"kernel {entry} does not compile")
        return Nothing()

    def capture(self, stream: int) -> int:
        return self.graph

    @property
    def entries(self) -> set[str]:
        return {entry for entry, _ in self.loaded}


def forget() -> None:
    """Begin a process anew, as far as kernels are concerned."""
    ahead.wait()
    forget_launches()
    for kept in (cuda_device._kernels, cuda_device._spilled, choose._chosen, gpu_ahead._met):
        kept.clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(refusals, "folder", lambda: None)
    monkeypatch.setattr(ahead, "THREADS", 2)
    monkeypatch.setattr(ahead, "IDLE_SECONDS", 0.03)
    forget()
    yield
    forget()


def arrays(seqlen: int = 512, dtype: str = "float16", head_dim: int = 128) -> tuple[np.ndarray, ...]:
    return (np.zeros((1, seqlen, 2, head_dim), dtype),) * 3


BACKWARD = {(8, 0): {"backward_sm80_rows", "backward_sm80", "backward_sm80_dq"}}
BACKWARD[9, 0] = {"backward_sm90_rows", "backward_sm90", "backward_sm90_dq"}


@pytest.mark.parametrize("capability", BACKWARD)
def test_the_gradients_of_a_vjp_are_compiled_behind_its_forward_pass(capability: tuple[int, int]) -> None:
    device = Slow(capability)
    with hook.kernels_on(device):
        cuflash.attention(*arrays())
        ahead.wait()
        assert not device.entries & BACKWARD[capability]
        out, backward = cuflash.attention_vjp(*arrays(), causal=True)
        ahead.wait()
        assert BACKWARD[capability] <= device.entries
        loaded = device.loaded.copy()
        backward(out)
        assert device.loaded == loaded
    assert set(device.loaded.values()) == {1}


def test_other_lengths_find_their_kernels() -> None:
    device = Slow((9, 0))
    with hook.kernels_on(device):
        cuflash.attention(*arrays(512))
        ahead.wait()
        before = device.loaded.copy()
        records = [key for key in before if key[0] == "forward_sm90"]
        assert 1 < len(records) <= gpu_ahead.MOST_RECORDS
        for seqlen in (512, 8192):
            cuflash.attention(*arrays(seqlen))
        assert device.loaded == before


def test_a_call_waits_for_what_is_being_compiled_and_compiles_nothing_twice() -> None:
    device = Slow((9, 0), seconds=0.1)
    with hook.kernels_on(device):
        out, lse = cuflash.attention(*arrays(), return_lse=True)
        ahead.wait()
        device.by_calls.clear()
        q, k, v = arrays()
        cuflash.attention_backward(out, q, k, v, out, lse)
        ahead.wait()
        # The call compiles one or two of the three kernels of a backward pass, beside the other threads.
        assert set(device.loaded.values()) == {1}
        assert len(device.by_calls) < 3 and device.most_at_once > 1


def test_what_fails_in_another_thread_does_not_reach_a_call_that_does_not_need_it() -> None:
    device = Slow((8, 0))
    device.fails = ("backward_sm80",)
    with hook.kernels_on(device):
        out, backward = cuflash.attention_vjp(*arrays())
        ahead.wait()
        cuflash.attention(*arrays())
        with pytest.raises(RuntimeError, match="backward_sm80 does not compile"):
            backward(out)


@pytest.mark.parametrize("reason", ["switched off", "captured", "no compiler"])
def test_nothing_is_compiled_ahead(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Slow((9, 0))
    if reason == "switched off":
        monkeypatch.setenv(ahead.SWITCH, "0")
    elif reason == "captured":
        monkeypatch.setattr(device, "graph", 7)
    else:
        monkeypatch.setattr(device, "compiler", "")
    with hook.kernels_on(device):
        cuflash.attention_vjp(*arrays())
        ahead.wait()
    assert device.entries == {"forward_sm90"} and len(device.loaded) == 1


@pytest.mark.parametrize("name", ["bias", "mask", "packed", "rules", "hidden", "float64", "float32", "wide"])
def test_every_kind_of_call_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass needs no more than was compiled ahead of it."""
    monkeypatch.setattr(rule_blocks, "LEAST_ROWS", 64)
    q, k, v = arrays(
        96, {"float64": "float64", "float32": "float32"}.get(name, "float16"), 300 if name == "wide" else 64
    )
    every: dict[str, dict[str, Any]] = {
        "bias": {"bias": np.zeros((1, 2, 96, 96), q.dtype)},
        "mask": {"mask": np.ones((96, 96), bool), "alibi_slopes": np.ones(2, np.float32), "deterministic": True},
        "rules": {
            "score_mod": lambda s, b, h, i, j, x, y: s * x[h],
            "operands": (np.ones(2, np.float32), np.ones(1, np.int32)),
        },
        "hidden": {"mask_mod": lambda b, h, i, j: i > j + 64},
    }
    device = Slow((9, 0), 0.0)
    with hook.kernels_on(device):
        if name == "packed":
            cu_seqlens = np.array([0, 40, 96], np.int32)
            out, backward = cuflash.attention_varlen_vjp(q[0], k[0], v[0], cu_seqlens, cu_seqlens)
        else:
            out, backward = cuflash.attention_vjp(q, k, v, **every.get(name, {}))
        ahead.wait()
        loaded = device.loaded.copy()
        backward(out)
        assert device.loaded == loaded and set(loaded.values()) == {1}


def test_a_rehearsal_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launches there are besides those of kernels of families: sums of splits, stores of operands."""
    launched: list[int] = []
    monkeypatch.setattr(
        Nothing, "bound", lambda *_, **__: lambda arguments, stream: launched.append(arguments), raising=True
    )
    q, k = np.zeros((1, 4000, 8, 64), np.float16), np.zeros((1, 60, 1, 64), np.float16)
    many: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, *t: s + sum(x[h] for x in t),
        "operands": (np.ones(8, np.float32),) * 200,
    }
    none: dict[str, Any] = {}
    for options in (none, many):
        counts = []
        for is_on in ("0", "1"):
            forget()
            monkeypatch.setenv(ahead.SWITCH, is_on)
            with hook.kernels_on(Slow((9, 0), 0.0)):
                launched.clear()
                out, backward = cuflash.attention_vjp(q, k, k, **options)
                ahead.wait()
                of_forward = len(launched)
                backward(out)
                counts.append((of_forward, len(launched)))
        assert counts[0] == counts[1] and 0 < counts[0][0] < counts[0][1]


def test_what_calls_need_comes_before_what_they_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "IDLE_SECONDS", 0.5)
    device = Slow((9, 0), seconds=0.05)
    with hook.kernels_on(device):
        out, backward = cuflash.attention_vjp(*arrays())
        backward(out)
        order = [entry for entry, _ in device.loaded]
        assert sum(entry.startswith("backward") for entry in order) == 3 and order.count("forward_sm90") == 1
        ahead.wait()
        assert [entry for entry, _ in device.loaded].count("forward_sm90") > 1


def run(code: str, **environment: str) -> None:
    """Run a program in a process of its own."""
    text = re.sub(r"(?m)^ {8}", "", code)
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_compiler
def test_a_process_may_end_while_kernels_are_compiled() -> None:
    run("""
        import time
        from cuflash.cuda import ahead
        from cuflash.cuda.compile import compile_for
        from cuflash.gpu.kernels import source_of
        from cuflash.plan.listing.families import problem_of
        from cuflash.plan.portable.kernels import plan
        source = source_of(plan(problem_of("float32", 64, 64, ()), "forward")[0])
        for _ in range(100):
            ahead.submit(lambda: compile_for("sm_80", source, "forward"))
        time.sleep(0.3)
        """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_threads_of_its_own() -> None:
    run("""
        import os, threading, time, warnings
        from cuflash.cuda import ahead
        warnings.simplefilter("ignore")
        started = threading.Event()
        ahead.submit(lambda: (started.set(), time.sleep(1)))
        started.wait()
        child = os.fork()
        if not child:
            done = []
            ahead.submit(lambda: done.append(1))
            ahead.wait()
            os._exit(0 if done else 1)
        assert os.waitpid(child, 0)[1] == 0
        """)
