"""CuPy's functions take traced values: its own tracer for fused kernels hands them over while a rule is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuflash.rules.tracing import Traced, TracedArray, call


class _History:
    """The history that CuPy calls in place of a kernel while it believes to fuse."""

    def __init__(self, local: Any) -> None:
        self._local = local

    def call_ufunc(self, function: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(x, (Traced, TracedArray)) for x in args):
            return call(function.name.removeprefix("cupy_"), args, options)
        with _set(self._local, False):
            return function(*args, **options)


def _thread_local() -> Any:
    try:
        from cupy._core._fusion_thread_local import thread_local
    except ImportError:  # another version of CuPy: its functions say themselves that they take arrays alone
        return None
    return thread_local


@contextmanager
def cupy_traces() -> Iterator[None]:
    """Let CuPy's functions take traced values within the context; nothing happens where CuPy is not imported."""
    local = _thread_local() if "cupy" in sys.modules else None
    if local is None:
        yield
        return
    before = getattr(local, "history", None)
    local.history = _History(local)
    try:
        with _set(local, True):
            yield
    finally:
        local.history = before


@contextmanager
def _set(local: Any, is_fusing: bool) -> Iterator[None]:
    before = getattr(local, "is_old_fusing", False)
    local.is_old_fusing = is_fusing
    try:
        yield
    finally:
        local.is_old_fusing = before
