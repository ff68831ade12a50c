"""Partial results of one attention, in the accumulation's dtype, become its result in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.kernels import load
from cuflash.hardware import WARP
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
    params = np.zeros(1, _PARAMS.dtype)
    p = params[0]
    for number, part in enumerate(parts):
        own_lse = 0 if part.lse is None else device.pointer(part.lse)
        p["parts"][number] = (device.pointer(part.x), own_lse, part.first_row, part.x.shape[-3])
    p["batch"] = math.prod(result.shape[:-3])
    p["rows"], p["heads"], p["columns"] = result.shape[-3:]
    p["result"], p["lse"] = device.pointer(result), 0 if lse is None else device.pointer(lse)
    p["num_parts"] = len(parts)
    warps = math.prod(result.shape[:-1])
    if warps:
        accum = parts[0].x.dtype.name if parts else "float32"
        kernel = _kernel_of(entry, accum, result.dtype.name, device)
        kernel((math.ceil(warps / (_THREADS // WARP)),), (_THREADS,), (params,))


@kept
def _kernel_of(entry: str, accum: str, result: str, device: cuda_device.Device) -> cuda_device.LoadedKernel:
    constants: dict[str, Any] = {
        "accum": CPP_TYPES[accum],
        "result": CPP_TYPES[result],
        "max_parts": _MAX_PARTS,
        "threads": _THREADS,
    }
    return load("around/merge_parts", entry, constants, device, generated=_HEADERS)
