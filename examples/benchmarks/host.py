"""A repeated small call costs the host so much, in all and before the first kernel is launched.

    python examples/benchmarks/host.py [--commit COMMIT] [--json FILE]

Calls of a shape seen before: plain, with results in given arrays, with dropout, and with a block mask. Without a GPU
only the part before the launch is measured: that of the GPU path on NumPy arrays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import recording

import cuflash
from cuflash.cuda import device as cuda_device
from cuflash.frontend import call as frontend_call
from cuflash.frontend import metadata
from cuflash.gpu import backend as gpu_backend
from cuflash.tools import bench
from cuflash.tools.bench.cells import Cell
from cuflash.tools.bench.inputs import Array, Inputs
from cuflash.tools.bench.peers import Unavailable, sdpa_calls

# One small problem: its kernels take less time than their launch, so that the host never waits for the GPU.
SMALL = Cell("small", "float16", 1, 64, 64, 2, 2, 64, 64)
CALLS, CHUNKS = 100, 20
VARIANTS = ("", "_out", "_dropout", "_seed_array", "_block_mask")

Work = Callable[[], Any]


def calls_of(xp: ModuleType) -> dict[str, Work]:
    """The calls that are measured, by name: ``forward`` and ``backward`` with each of `VARIANTS`."""
    inputs = Inputs(SMALL, xp)
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    targets = [xp.empty_like(x) for x in (q, q, k, v)]
    given: dict[str, dict[str, Any]] = {
        "": {},
        "_out": {},
        "_dropout": {"dropout_p": 0.1, "dropout_seed": 5},
        "_seed_array": {"dropout_p": 0.1, "dropout_seed": xp.asarray(np.array([5], np.uint64))},
        "_block_mask": {"block_mask": cuflash.BlockMask.strided(SMALL.seqlen_q, 9, 20)},
    }

    def pair(variant: str) -> tuple[Work, Work]:
        options = {"causal": True, **given[variant]}
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        in_place = variant == "_out"
        return (
            lambda: cuflash.attention(q, k, v, out=targets[0] if in_place else None, **options),
            lambda: cuflash.attention_backward(
                dout, q, k, v, out, lse, out=targets[1:] if in_place else None, **options
            ),
        )

    pairs = {variant: pair(variant) for variant in VARIANTS}
    return {
        name + variant: pairs[variant][direction]
        for direction, name in enumerate(("forward", "backward"))
        for variant in VARIANTS
    }


def host_costs(xp: ModuleType) -> dict[str, float]:
    """Microseconds of one repeated call: ``{call}_{before_launch,total}`` and torch's SDPA.

    ``before_launch`` is all but the launches: checks, plan, parameters, and the allocation of results, in the thread's
    own time. Without a GPU it is that of the GPU path on NumPy arrays, and there is no total.
    """
    costs: dict[str, float] = {}
    for name, call in calls_of(xp).items():
        if xp is not np:  # first, so that a block mask has its lists before nothing is launched
            call()
            costs[f"{name}_total"] = _microseconds(call, xp)
        with _without_launches(xp):
            call()
            costs[f"{name}_before_launch"] = _microseconds(call, xp, time.thread_time)
    if xp is not np:
        with contextlib.suppress(Unavailable):
            sdpa = sdpa_calls(Inputs(SMALL, xp), "default")
            costs["torch_sdpa_forward_total"] = _microseconds(sdpa.forward, xp)
            costs["torch_sdpa_backward_total"] = _microseconds(sdpa.backward, xp)
    return costs


class _NoLaunches:
    """A device whose kernels do nothing: else as the current one, or any GPU for NumPy arrays."""

    def __init__(self, xp: ModuleType) -> None:
        self._device: Any = _HostDevice if xp is np else cuda_device.device_of(xp.empty(1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def load(self, *source_and_options: Any) -> _NoKernel:
        return _NoKernel()


class _NoKernel:
    local_bytes = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Launch nothing."""

    def bound(self, *shape: Any) -> Callable[[int, int], None]:
        return lambda arguments, stream: None


class _HostDevice:
    """A device as the GPU path asks it, with arrays in NumPy."""

    namespace = np
    name = "NVIDIA A100"
    num_sms = 132
    smem_limit = 163 * 1024
    capability = (8, 0)
    has_wgmma = False
    compiler = ""
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
def _without_launches(xp: ModuleType) -> Iterator[None]:
    """Send every call to the GPU path, on a device whose kernels do nothing."""
    device: Any = _NoLaunches(xp)
    device_of, backend_of, host_device = cuda_device.device_of, frontend_call.backend_of, metadata.host_device
    cuda_device.device_of = lambda x: device
    metadata.host_device = device if xp is np else None
    metadata._repeats.clear()
    frontend_call.backend_of = lambda on_cpu: gpu_backend  # type: ignore[assignment]
    try:
        yield
    finally:
        cuda_device.device_of, metadata.host_device = device_of, host_device
        metadata._repeats.clear()
        frontend_call.backend_of = backend_of


def _microseconds(call: Work, xp: ModuleType, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median over chunks of calls; between chunks the GPU's queue runs empty."""
    chunks = []
    for _ in range(CHUNKS):
        start = clock()
        for _ in range(CALLS):
            call()
        chunks.append(1e6 * (clock() - start) / CALLS)
        if xp is not np:
            xp.cuda.Device().synchronize()
    return float(np.median(chunks))


def main() -> None:
    """Measure, print and record."""
    args = recording.parser_of(__doc__, "a call").parse_args()
    xp = bench.namespace(None)
    assert xp is not None
    costs = host_costs(xp)
    for name, cost in costs.items():
        print(f"{name:40} {cost:7.1f} us")
    recording.Recorder(args, xp, "host").write(({"call": name, "us": cost} for name, cost in costs.items()))


if __name__ == "__main__":
    main()
