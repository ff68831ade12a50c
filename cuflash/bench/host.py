"""What a repeated small call costs the host, in all and before the first kernel is launched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash.bench.cells import Cell
from cuflash.bench.inputs import Inputs
from cuflash.bench.peers import Unavailable, sdpa_calls

# One small problem: its kernels take less time than their launch, so that the host never waits for the GPU.
SMALL = Cell("small", "float16", 1, 64, 64, 2, 2, 64, 64)
CALLS, CHUNKS = 100, 20


def host_costs(xp: ModuleType) -> dict[str, float]:
    """Microseconds of one repeated call: ``{forward,backward}_{checks,before_launch,total}`` and torch's SDPA.

    ``checks`` ends where the backend begins, ``before_launch`` where its first kernel is launched. On NumPy arrays,
    which launch nothing, only ``checks`` is measured.
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
        call()
        with _without(_backend(xp), name):
            costs[f"{name}_checks"] = _microseconds(call, xp)
        if xp is np:
            continue
        from cuflash import kernels

        with _without(kernels, "launch"):
            costs[f"{name}_before_launch"] = _microseconds(call, xp)
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


def _backend(xp: ModuleType) -> ModuleType:
    if xp is np:
        from cuflash import numpy_backend

        return numpy_backend
    from cuflash import gpu_backend

    return gpu_backend


@contextlib.contextmanager
def _without(module: ModuleType, function: str) -> Iterator[None]:
    """Let a module's function do nothing for a while."""
    real = getattr(module, function)
    setattr(module, function, lambda *args, **keywords: None)
    try:
        yield
    finally:
        setattr(module, function, real)


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
