"""The share of the keys that the CPU computes is given, or was measured once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.kept import Kept
from cuflash.offload.call import Call
from cuflash.offload.device import Device
from cuflash.offload.stream import Chunk, num_keys
from cuflash.problem.checks import check_number

Array = Any
# The CPU has this share while the share is measured, but at most so many operations, some tenth of a second.
_TRIAL = 1 / 8
_TRIAL_FLOPS = 4e9
# The CPU has too many queries to keep up with any link where its keys are fewer than these.
_LEAST_KEYS = 256
# A share that gains less than this is not worth a thread.
_LEAST_SHARE = 0.03
# Each pass has so many matrix products.
_PRODUCTS = {"forward": 2, "backward": 5}


class Known(NamedTuple):
    """The share of a kind of calls."""

    share: float
    keys_per_second: float = 0.0  # of the device alone
    is_tried: bool = True  # calls with this share are not slower than without


_measured: Kept[tuple[Any, ...], Known] = Kept()
_lock = threading.Lock()


def _fix(key: tuple[Any, ...], known: Known) -> None:
    """Keep a share unless another thread has measured one before."""
    with _lock:
        if key not in _measured:
            _measured[key] = known


class Measurement:
    """The speed of q's device on its chunks; the first one, which may compile kernels, does not count."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._keys = 0
        self.keys_per_second: float | None = None

    def chunk_done(self, device: Device, chunk: Chunk) -> None:
        """Note that a chunk's work is enqueued."""
        if self._start is None:
            device.finish()
            self._start = time.perf_counter()
        else:
            self._keys += num_keys([chunk])

    def all_done(self, device: Device) -> None:
        """Note that all chunks' work is enqueued."""
        device.finish()
        if self._start is not None and self._keys:
            self.keys_per_second = self._keys / max(time.perf_counter() - self._start, 1e-9)


class Share:
    """The CPU's share in one call, with the measurement of both sides where it is not known yet.

    The first call with a measured share is timed as a whole. Where the device alone would have been as fast, as where
    both sides share the host's memory or its cores, later calls give the CPU nothing.
    """

    def __init__(self, of_cpu: float, key: tuple[Any, ...] | None = None, known: Known | None = None) -> None:
        self.of_cpu = of_cpu
        self._key, self._known = key, known
        self.measurement = Measurement() if key is not None and known is None else None
        self._start = 0.0

    def begin(self, device: Device) -> None:
        """Note the time where the call is timed as a whole."""
        if self._known is not None:
            device.finish()
            self._start = time.perf_counter()

    def end(self, device: Device, own: Sequence[Chunk], others: Sequence[Chunk], cpu_seconds: float) -> None:
        """Remember the share with which both sides would have ended at once, or what came of it."""
        if self._key is None or not others:
            return
        if self._known is not None:
            device.finish()
            keys_per_second = num_keys((*own, *others)) / max(time.perf_counter() - self._start, 1e-9)
            gains = keys_per_second > self._known.keys_per_second
            _measured[self._key] = Known(self._known.share if gains else 0.0)
            return
        of_device = self.measurement.keys_per_second if self.measurement is not None else None
        if of_device is None:  # there was but one chunk
            return
        of_cpu = num_keys(others) / max(cpu_seconds, 1e-9)
        share = of_cpu / (of_cpu + of_device)
        _fix(self._key, Known(share, of_device, is_tried=False) if share >= _LEAST_SHARE else Known(0.0))


def check_share(share: Any) -> float | None:
    """Return a number from 0 to 1; None for "auto"."""
    if isinstance(share, str):
        if share == "auto":
            return None
        raise ValueError(f'share: expected "auto" or a number from 0 to 1, got {share!r}')
    value = check_number("share", share)
    if not 0 <= value <= 1:
        raise ValueError(f'share: expected "auto" or a number from 0 to 1, got {value}')
    return value


def share_of(call: Call, device: Device, share: float | None, direction: str) -> Share:
    """Return the share of a call; None takes what was measured for such calls, or measures it in this one."""
    if share is not None:
        return Share(share)
    p = call.problem
    if device.is_host or p.split_size is not None:  # a row's bits would depend on a measured one
        return Share(0.0)
    rows, keys = call.most_rows, call.num_keys
    if not rows or not keys:
        return Share(0.0)
    number = None if isinstance(call.q, np.ndarray) else call.q.device.id
    sizes = p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v, p.dtype, rows.bit_length()
    key = (direction, number, *sizes)
    known = _measured.get(key)
    if known is not None:
        return Share(known.share) if known.is_tried else Share(known.share, key, known)
    # Each of these products has a multiplication and an addition for every pair.
    flops_per_key = _PRODUCTS[direction] * p.num_heads_q * (p.head_dim + p.head_dim_v) * rows
    trial = min(_TRIAL, _TRIAL_FLOPS / flops_per_key / keys)
    if trial * keys < _LEAST_KEYS:
        if flops_per_key * _LEAST_KEYS > _TRIAL_FLOPS:
            _fix(key, Known(0.0))
        return Share(0.0)
    return Share(trial, key)
