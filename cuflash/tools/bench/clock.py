"""Times of calls: by events on a GPU, alone or in CUDA graphs, and by the clock on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

# The host fills the queue behind so much work.
HEAD_START_BYTES = 1 << 30
# Shorter calls may take less time than their launch.
SHORT_MS = 0.25
MIN_CALLS, MAX_CALLS = 3, 100
# A graph holds so many calls that it takes about as long as this, and at most so many.
GRAPH_MS, GRAPH_CALLS = 0.5, 10
# Calls whose time on the host is measured, as the least of several rounds' means.
HOST_CALLS, HOST_ROUNDS = 10, 5

Call = Callable[[], Any]


class Timed:
    """A call is timed, or the replay of a graph of several, with the arrays that these read and returned."""

    def __init__(self, call: Call, count: int = 1, kept: Any = None) -> None:
        self.call = call
        self.count = count
        self._kept = kept

    def __call__(self) -> Any:
        """Call, or replay."""
        return self.call()


class Stopwatch:
    """Times calls: by events on a GPU, by the clock on the CPU."""

    def __init__(self, xp: ModuleType, budget_ms: float) -> None:
        self.xp = xp
        self.budget_ms = budget_ms  # milliseconds of one round of one call

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which peers are prepared and called: any stream."""
        return contextlib.nullcontext()

    def prepared(self, call: Call) -> Timed:
        """Return what is timed of a call: itself."""
        return Timed(call)

    def interleaved(self, calls: dict[str, Timed], rounds: int) -> dict[str, list[Any]]:
        """Times in ms of each call, a list a round, every round in another order."""
        counts = {name: self._count(call) for name, call in calls.items()}
        times: dict[str, list[Any]] = {name: [] for name in calls}
        names = list(calls)
        for number in range(rounds):
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                of_round = self._times(calls[name], *counts[name])
                times[name].append([ms / calls[name].count for ms in of_round])
        return times

    def _count(self, call: Call) -> tuple[int, bool]:
        """Calls that fill the budget, and whether they are short."""
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


class GraphStopwatch(Stopwatch):
    """Times calls on the device alone: each is captured into a CUDA graph, and replays are timed.

    Peers are prepared and called `within` its stream.
    """

    def __init__(self, xp: ModuleType, budget_ms: float) -> None:
        super().__init__(xp, budget_ms)
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError:
            self._torch = None
        if self._torch is None:
            self._stream = xp.cuda.Stream(non_blocking=True)
        else:
            self._torch_stream = self._torch.cuda.Stream()
            self._stream = xp.cuda.ExternalStream(self._torch_stream.cuda_stream)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Make the stream that captures the current one of CuPy, and of torch where it is installed."""
        with contextlib.ExitStack() as entered:
            if self._torch is not None:
                entered.enter_context(self._torch.cuda.stream(self._torch_stream))
            entered.enter_context(self._stream)
            yield

    def prepared(self, call: Call) -> Timed:
        """Capture some calls into one graph, whose replay is what is timed."""
        call()  # compiles
        once = min(self._gpu_times(call, 2, False))
        count = int(np.clip(GRAPH_MS / once, 1, GRAPH_CALLS))
        kept = [call() for _ in range(count)]  # pools have the memory of all results then: a capture allocates none
        del kept
        self._stream.synchronize()
        if self._torch is None:
            self._stream.begin_capture()
            try:
                kept = [call() for _ in range(count)]
            except BaseException:
                with contextlib.suppress(Exception):  # of the capture, which the error may have made invalid
                    self._stream.end_capture()  # the stream would go on capturing
                raise
            graph = self._stream.end_capture()
            return Timed(graph.launch, count, (call, kept))
        torch_graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(torch_graph, stream=self._torch_stream):
            kept = [call() for _ in range(count)]
        return Timed(torch_graph.replay, count, (call, kept))

    def host_us(self, call: Call) -> float:
        """Measure the time on the host of a call that is repeated."""
        rounds = []
        for _ in range(HOST_ROUNDS):
            self._stream.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            rounds.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
        self._stream.synchronize()
        return min(rounds)
