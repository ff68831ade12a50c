"""Partial results of one attention, in the accumulation's dtype, become its result in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.kernels import load
from cuflash.hardware import HALF_BYTES, WARP
from cuflash.kept import kept
from cuflash.plan.config import CPP_TYPES
from cuflash.problem.attention_problem import Array, PartialResult

_MAX_PARTS = 16  # one launch takes so many parts; more are merged in several launches
_THREADS = 256
_PART = np.dtype([("x", "u8"), ("lse", "u8"), ("first_row", "i8"), ("rows", "i8")])
_PARAMS = Struct(
    "MergeParams",
    [
        Member("parts", "AllParts", np.dtype((_PART, (_MAX_PARTS,)))),
        Member("result", "void*", np.dtype("u8"), "(batch, rows, heads, columns), contiguous"),
        Member("lse", "Accum*", np.dtype("u8"), "(batch, heads, rows), contiguous; null of gradients"),
        Member("batch", "i64", np.dtype("i8")),
        Member("rows", "i64", np.dtype("i8")),
        Member("heads", "int", np.dtype("i4")),
        Member("columns", "int", np.dtype("i4")),
        Member("num_parts", "int", np.dtype("i4")),
    ],
)
_HEADERS = _PARAMS.headers


def merge_parts(parts: Sequence[PartialResult], out: Array, lse: Array) -> None:
    """Merge attentions over disjoint parts of the keys into that over all of them.

    Parameters
    ----------
    parts : sequence of PartialResult
        Each with its lse, contiguous, in the accumulation's dtype.
    out : array (batch, rows, heads, columns)
        Contiguous, of any dtype. Rows that no part has become 0.
    lse : array (batch, heads, rows)
        Contiguous, of the accumulation's dtype; -inf where no part has the row.
    """
    while len(parts) > _MAX_PARTS:
        xp = cuda_device.device_of(out).namespace
        first = PartialResult(xp.empty(out.shape, lse.dtype), xp.empty_like(lse), 0)
        assert first.lse is not None
        _launch("merge_parts", parts[:_MAX_PARTS], first.x, first.lse)
        parts = [first, *parts[_MAX_PARTS:]]
    _launch("merge_parts", parts, out, lse)


def sum_parts(parts: Sequence[PartialResult], total: Array) -> None:
    """Add parts that may each have some of the rows alone; the arrays are as for `merge_parts`."""
    while len(parts) > _MAX_PARTS:
        first = PartialResult(cuda_device.device_of(total).namespace.empty(total.shape, parts[0].x.dtype), None, 0)
        _launch("sum_parts", parts[:_MAX_PARTS], first.x, None)
        parts = [first, *parts[_MAX_PARTS:]]
    _launch("sum_parts", parts, total, None)


def _launch(entry: str, parts: Sequence[PartialResult], result: Array, lse: Array | None) -> None:
    device = cuda_device.device_of(result)
    if not math.prod(result.shape[:-1]):
        return
    # Without parts lse tells; without lse either, zeros are zeros in any dtype.
    like = parts[0].x if parts else result if lse is None else lse
    accum = like.dtype.name if like.dtype.itemsize > HALF_BYTES else "float32"
    rows = tuple([(part.first_row, part.x.shape[-3]) for part in parts])
    launch = _bound(entry, accum, result.dtype.name, result.shape, rows, device)
    addresses = [device.pointer(result), 0 if lse is None else device.pointer(lse)]
    for part in parts:
        addresses += (device.pointer(part.x), 0 if part.lse is None else device.pointer(part.lse))
    launch.enqueue_in_order(addresses, None, device.stream())


@kept
def _bound(
    entry: str,
    accum: str,
    result: str,
    shape: tuple[int, ...],
    rows: tuple[tuple[int, int], ...],
    device: cuda_device.Device,
) -> BoundLaunch:
    """Return the launch for a result of a dtype and shape, and parts with a first row and so many rows each."""
    constants: dict[str, Any] = {
        "accum": CPP_TYPES[accum],
        "result": CPP_TYPES[result],
        "max_parts": _MAX_PARTS,
        "threads": _THREADS,
    }
    kernel = load("around/merge_parts", entry, constants, device, generated=_HEADERS)
    params = np.zeros(1, _PARAMS.dtype)
    p = params[0]
    for number, (first_row, count) in enumerate(rows):
        p["parts"][number] = (0, 0, first_row, count)
    p["batch"] = math.prod(shape[:-3])
    p["rows"], p["heads"], p["columns"] = shape[-3:]
    p["num_parts"] = len(rows)
    warps = math.prod(shape[:-3]) * math.ceil(shape[-3] / WARP) * shape[-2]  # one for each 32 rows of a head
    blocks = math.ceil(warps / (_THREADS // WARP))
    words = [_word("result"), _word("lse")]
    for number in range(len(rows)):
        first = _word("parts") + number * _PART.itemsize // 8
        words += [first, first + 1]  # of x and lse
    return BoundLaunch((params,), words, kernel.bound((blocks,), (_THREADS,), [params.nbytes], 0))


def _word(name: str) -> int:
    """Return the place of a pointer in the parameter struct, in words of eight bytes."""
    fields = _PARAMS.dtype.fields
    assert fields is not None
    return fields[name][1] // 8
