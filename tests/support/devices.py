"""The devices that a test can run on, and the way to each and back.

NumPy is always one, CuPy where there is a GPU; the environment variable CUFLASH_TEST_DEVICES names others: "sm_75",
"sm_80", "sm_89" and "sm_90", which are the CUDA kernels of these architectures on the CPU (slow), separated by commas.

A test makes its arrays on the host with NumPy, with the strides it wants, puts them on the device (which keeps
strides, offsets and the sharing of buffers), calls the library there and gets the results back as NumPy arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np


@dataclass(frozen=True)
class Device:
    """A place where the library runs, with its name in the tests' ids and the namespace of its arrays.

    Tests run within the context `active()`.
    """

    name: str
    xp: ModuleType
    active: Callable[[], AbstractContextManager[Any]] = nullcontext

    def put(self, value: Any) -> Any:
        """Copy every NumPy array in ``value`` (nested tuples, lists, dicts) to the device.

        Memory layout is kept: strides, offset in the buffer, and which arrays of this call share a buffer. Values that
        are no NumPy arrays pass through.
        """
        return self._put(value, {})

    def _put(self, value: Any, buffers: dict[int, tuple[Any, Any]]) -> Any:
        if isinstance(value, np.ndarray):
            return self._mirror(value, buffers)
        if isinstance(value, Mapping):
            return {name: self._put(item, buffers) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._put(item, buffers) for item in value)
        return value

    def _mirror(self, view: np.ndarray, buffers: dict[int, tuple[Any, Any]]) -> Any:
        owner = view
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if view.size == 0:
            return self.xp.empty(view.shape, view.dtype)
        if not owner.flags.forc:
            # This is NumPy's own result of an indexing, dense in some order of its axes, for whose layout nobody asked.
            view = owner = np.ascontiguousarray(view)
        if id(owner) not in buffers:
            bytes_of_owner = owner.reshape(-1, order="A").view(np.uint8).copy()
            buffers[id(owner)] = owner, self.xp.asarray(bytes_of_owner)  # the owner lives on, so its id stays its own
        buffer = buffers[id(owner)][1]
        offset = view.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        if self.xp is np:
            return np.ndarray(view.shape, view.dtype, buffer=buffer, offset=offset, strides=view.strides)
        return self.xp.ndarray(view.shape, view.dtype, memptr=buffer.data + offset, strides=view.strides)

    def get(self, value: Any) -> Any:
        """Bring device arrays in ``value`` (nested tuples, lists, dicts) back as NumPy arrays of the same values."""
        if isinstance(value, tuple | list):
            return type(value)(self.get(item) for item in value)
        if isinstance(value, Mapping):
            return {name: self.get(item) for name, item in value.items()}
        if value is None or isinstance(value, int | float):
            return value
        assert isinstance(value, self.xp.ndarray), f"expected an array of {self.xp.__name__}, got {type(value)}"
        return np.array(value) if self.xp is np else self.xp.asnumpy(value)


def has_gpu() -> bool:
    """Return True if CuPy is installed and sees a GPU."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def _kernels_on_the_cpu(capability: tuple[int, int]) -> AbstractContextManager[Any]:
    from cpu_device import device, hook

    return hook.kernels_on(device.CpuDevice(capability))


def available() -> list[Device]:
    """Return the devices to test on."""
    names = os.environ.get("CUFLASH_TEST_DEVICES") or ("numpy,cupy" if has_gpu() else "numpy")
    return [device_of(name) for name in names.split(",")]


def forget_launches() -> None:
    """Let the next call choose its kernels anew, so that a test sees which: no call is known or repeated."""
    from cuflash.frontend import metadata
    from cuflash.gpu import launch

    launch._launches.clear()
    metadata._repeats.clear()


@contextmanager
def threads_of_cpu_path(count: int) -> Iterator[None]:
    """Run every call of the CPU path on that many threads within the context, however many cores there are."""
    from cuflash.cpu.threads import _BlasThreads

    real = _BlasThreads.__enter__

    def enter(self: _BlasThreads) -> int:
        real(self)
        return count

    with mock.patch.object(_BlasThreads, "__enter__", enter):
        yield


@contextmanager
def one_thread_of_blas() -> Iterator[None]:
    """Give products of NumPy arrays one thread within the context, and the CPU path as many as it has without.

    BLAS's threads spin where they wait, for some time after the last product, too. On a machine whose cores other
    tests and kernels on the CPU want as well, the reference took three times as long as on one thread.
    """
    from cuflash.cpu.threads import _blas_functions

    functions = _blas_functions()
    if functions is None:
        yield
        return
    get, set_ = functions
    count = get()
    set_(1)
    try:
        with threads_of_cpu_path(count):
            yield
    finally:
        set_(count)


def device_of(name: str) -> Device:
    """Return the device of that name."""
    if name == "cupy":
        import cupy

        return Device(name, cupy)
    actives: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "numpy": nullcontext,
        "sm_75": partial(_kernels_on_the_cpu, (7, 5)),
        "sm_80": partial(_kernels_on_the_cpu, (8, 0)),
        "sm_89": partial(_kernels_on_the_cpu, (8, 9)),
        "sm_90": partial(_kernels_on_the_cpu, (9, 0)),
    }
    assert name in actives, f"CUFLASH_TEST_DEVICES: expected names out of cupy, {', '.join(actives)}, got {name}"
    return Device(name, np, actives[name])
