"""How long a call takes: medians of interleaved rounds, by events on a GPU and by the clock on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

Call = Callable[[], Any]

# Enough work to run ahead of: the host fills the queue behind it, so that no call waits for its launch.
HEAD_START_BYTES = 1 << 30
# A GPU call shorter than this may take less time than its launch.
SHORT_MS = 0.25
MIN_CALLS, MAX_CALLS = 3, 100


class Stopwatch:
    """Times calls on `xp`'s device.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    budget_ms : float
        How long one round of one call should last.
    """

    def __init__(self, xp: ModuleType, budget_ms: float) -> None:
        self.xp = xp
        self.budget_ms = budget_ms

    def interleaved(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """All times in ms of each call, in `rounds` rounds in which each has its turn, every round in another order."""
        counts = {name: self._count(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds):
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                times[name] += self._times(calls[name], *counts[name])
        return times

    def _count(self, call: Call) -> tuple[int, bool]:
        """How many calls fill the budget, and whether they are too short to be launched one by one."""
        call()  # compiles, and fills caches
        once = min(self._times(call, 2, False))
        return int(np.clip(self.budget_ms / once, MIN_CALLS, MAX_CALLS)), once < SHORT_MS

    def _times(self, call: Call, count: int, head_start: bool) -> list[float]:
        return self._cpu_times(call, count) if self.xp is np else self._gpu_times(call, count, head_start)

    def _cpu_times(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _gpu_times(self, call: Call, count: int, head_start: bool) -> list[float]:
        events = [(self.xp.cuda.Event(), self.xp.cuda.Event()) for _ in range(count)]
        call()  # the clocks and the caches as this call leaves them
        if head_start:
            busy = self.xp.empty(HEAD_START_BYTES, np.uint8)
            for _ in range(count):
                busy.data.memset_async(0, busy.nbytes)
        for start, end in events:
            start.record()
            call()
            end.record()
        events[-1][1].synchronize()
        return [self.xp.cuda.get_elapsed_time(start, end) for start, end in events]
