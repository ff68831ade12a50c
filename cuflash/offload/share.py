"""The share of the keys that the CPU computes: as given, or by what was measured once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.kept import Kept
from cuflash.offload.call import Call
from cuflash.offload.device import Device
from cuflash.offload.stream import Chunk, num_keys
from cuflash.problem.checks import check_number

Array = Any
# While it is measured, the CPU has this share, but at most so many multiply-adds' worth: a tenth of a second.
_TRIAL = 1 / 8
_TRIAL_FLOPS = 4e9
# With fewer keys than these the CPU has too many queries to keep up with any link.
_LEAST_KEYS = 256
# A share that gains less than this is not worth a thread.
_LEAST_SHARE = 0.03
# Matrix products of each pass.
_PRODUCTS = {"forward": 2, "backward": 5}

_measured: Kept[tuple[Any, ...], float] = Kept()
_lock = threading.Lock()


def _fix(key: tuple[Any, ...], share: float) -> None:
    """The first measurement stays, whichever thread made it."""
    with _lock:
        if key not in _measured:
            _measured[key] = share


class Measurement:
    """How fast q's device gets through its chunks; the first one, which may compile kernels, does not count."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._keys = 0
        self.keys_per_second: float | None = None

    def chunk_done(self, device: Device, chunk: Chunk) -> None:
        """A chunk's work is enqueued."""
        if self._start is None:
            device.finish()
            self._start = time.perf_counter()
        else:
            self._keys += num_keys([chunk])

    def all_done(self, device: Device) -> None:
        """All chunks' work is enqueued."""
        device.finish()
        if self._start is not None and self._keys:
            self.keys_per_second = self._keys / max(time.perf_counter() - self._start, 1e-9)


class Share:
    """The CPU's share in one call, and where it is not known yet the measurement of both sides."""

    def __init__(self, of_cpu: float, key: tuple[Any, ...] | None = None) -> None:
        self.of_cpu = of_cpu
        self._key = key
        self.measurement = None if key is None else Measurement()

    def end(self, own: Sequence[Chunk], others: Sequence[Chunk], cpu_seconds: float) -> None:
        """Remember the share with which both sides would have ended at once."""
        if self._key is None or self.measurement is None or not others:
            return
        of_device = self.measurement.keys_per_second
        if of_device is None:  # there was but one chunk
            return
        of_cpu = num_keys(others) / max(cpu_seconds, 1e-9)
        share = of_cpu / (of_cpu + of_device)
        _fix(self._key, share if share >= _LEAST_SHARE else 0.0)


def check_share(share: Any) -> float | None:
    """A number from 0 to 1; None for "auto"."""
    if isinstance(share, str):
        if share == "auto":
            return None
        raise ValueError(f'share: expected "auto" or a number from 0 to 1, got {share!r}')
    value = check_number("share", share)
    if not 0 <= value <= 1:
        raise ValueError(f'share: expected "auto" or a number from 0 to 1, got {value}')
    return value


def share_of(call: Call, device: Device, share: float | None, direction: str) -> Share:
    """The share of a call; None is what was measured for such calls, or is measured in this one."""
    if share is not None:
        return Share(share)
    p = call.problem
    if device.is_host or p.split_size is not None:  # of which a row's bits would depend
        return Share(0.0)
    rows = p.batch * p.seqlen_q
    keys = sum(piece.batch_stop - piece.batch for piece in call.pieces if piece.rows) * p.seqlen_k
    if not rows or not keys:
        return Share(0.0)
    number = None if isinstance(call.q, np.ndarray) else call.q.device.id
    sizes = p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v, p.dtype, p.seqlen_q.bit_length()
    key = (direction, number, *sizes)
    known = _measured.get(key)
    if known is not None:
        return Share(known)
    # Two products forward and five backward, of a multiplication and an addition each.
    flops_per_key = _PRODUCTS[direction] * p.num_heads_q * (p.head_dim + p.head_dim_v) * p.seqlen_q
    trial = min(_TRIAL, _TRIAL_FLOPS / flops_per_key / keys)
    if trial * keys < _LEAST_KEYS:
        if flops_per_key * _LEAST_KEYS > _TRIAL_FLOPS:
            _fix(key, 0.0)
        return Share(0.0)
    return Share(trial, key)
