"""What a repeated small call costs the host, in all and before the first kernel is launched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash import gpu_backend, kernels, recording
from cuflash.bench.cells import Cell
from cuflash.bench.inputs import Array, Inputs
from cuflash.bench.peers import Unavailable, sdpa_calls
from cuflash.call import Call

# One small problem: its kernels take less time than their launch, so that the host never waits for the GPU.
SMALL = Cell("small", "float16", 1, 64, 64, 2, 2, 64, 64)
CALLS, CHUNKS = 100, 20


def host_costs(xp: ModuleType) -> dict[str, float]:
    """Microseconds of one repeated call: ``{forward,backward}_{before_launch,total}`` and torch's SDPA.

    ``before_launch`` is all but the launches: checks, plan, parameters, and the allocation of results. Without a GPU
    it is that of the GPU path on NumPy arrays, and there is no total.
    """
    inputs = Inputs(SMALL, xp)
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: cuflash.attention(q, k, v, causal=True),
        "backward": lambda: cuflash.attention_backward(dout, q, k, v, out, lse, causal=True),
    }
    costs: dict[str, float] = {}
    for name, call in calls.items():
        with _without_launches(q):
            call()
            costs[f"{name}_before_launch"] = _microseconds(call, xp)
        if xp is not np:
            call()
            costs[f"{name}_total"] = _microseconds(call, xp)
    if xp is not np:
        with contextlib.suppress(Unavailable):
            costs["torch_sdpa_forward_total"] = _microseconds(sdpa_calls(inputs, "default").forward, xp)
    return costs


def print_host_costs(xp: ModuleType) -> dict[str, float]:
    """Measure, print and return them."""
    costs = host_costs(xp)
    for name, cost in costs.items():
        print(f"{name:26} {cost:7.1f} us")
    return costs


class _NoLaunches:
    """A device whose kernels do nothing: else as the one of `x`, or any GPU if that is a NumPy array."""

    def __init__(self, x: Array) -> None:
        self._device: Any = _HostDevice if isinstance(x, np.ndarray) else kernels.device_of(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def load(self, *source_and_options: Any) -> _NoKernel:
        return _NoKernel()


class _NoKernel:
    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Launch nothing."""

    def bound(self, *shape: Any) -> Callable[[int, int], None]:
        return lambda arguments, stream: None


class _HostDevice:
    """What the GPU path asks of a device, with arrays in NumPy."""

    namespace = np
    num_sms = 132
    smem_limit = 163 * 1024
    capability = (8, 0)
    has_wgmma = False
    empty = staticmethod(np.empty)

    @staticmethod
    def scratch(size: int) -> tuple[int, Array]:
        return 0, np.empty(size, np.uint8)

    lasting = scratch

    @staticmethod
    def pointer(x: Array) -> int:
        return x.__array_interface__["data"][0]

    @staticmethod
    def is_current() -> bool:
        return True

    @staticmethod
    def stream() -> int:
        return 0

    @staticmethod
    def capture(stream: int) -> int:
        return 0


@contextlib.contextmanager
def _without_launches(x: Array) -> Iterator[None]:
    """Send every call to the GPU path, on a device whose kernels do nothing."""
    device: Any = _NoLaunches(x)
    device_of, backend, host_device = kernels.device_of, vars(Call)["_backend"], recording.host_device
    kernels.device_of = lambda x: device
    recording.host_device = device if isinstance(x, np.ndarray) else None
    recording._repeats.clear()
    Call._backend = property(lambda call: gpu_backend)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        kernels.device_of, recording.host_device = device_of, host_device
        recording._repeats.clear()
        Call._backend = backend  # type: ignore[method-assign]


def _microseconds(call: Callable[[], Any], xp: ModuleType) -> float:
    """Median over chunks of calls; between chunks the GPU's queue runs empty."""
    chunks = []
    for _ in range(CHUNKS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        chunks.append(1e6 * (time.perf_counter() - start) / CALLS)
        if xp is not np:
            xp.cuda.Device().synchronize()
    return float(np.median(chunks))
