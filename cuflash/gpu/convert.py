"""Arrays of problems of mixed dtypes (FP8 inputs, an out_dtype) are converted around the families' kernels.

The families compute in the accumulation's dtype, so that results are rounded once. This is right on every GPU; it takes
as much memory as copies of the arrays in that dtype.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.axes import CPP_TYPES, FOUR, extents, strides
from cuflash.gpu.launch import Work
from cuflash.gpu.params import Arrays
from cuflash.kept import Kept
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.fp8 import SCALES

_FILE, _ENTRY = "around/convert", "convert"
_THREADS = 256  # threads of a thread block
_COLUMNS = 16  # columns that a thread converts
CONVERSION = Struct(
    "Conversion",
    [
        Member("source", "const Source*", np.dtype("u8")),
        Member("target", "Target*", np.dtype("u8")),
        Member("scale", "const float*", np.dtype("u8"), "of the rows, or null"),
        Member("lengths", "const int*", np.dtype("u8"), "rows of each sequence that are used, or null"),
        Member("extents", "Four", FOUR),
        Member("source_strides", "Four", FOUR, "in elements, as the others"),
        Member("target_strides", "Four", FOUR),
        Member("scale_strides", "Four", FOUR, "of the rows' axes"),
    ],
)
_INPUTS = ("q", "k", "v", "bias")
_RESIDUALS = ("dout", "out")
_LENGTHS = {"q": "q_lengths", "k": "kv_lengths", "v": "kv_lengths", "dout": "q_lengths", "out": "q_lengths"}


class _Launch(BoundLaunch):
    """A conversion's `replay.Launch`; `arrays` are those of its pointers that are not null."""

    def __init__(self, device: cuda_device.Device, arrays: Arrays) -> None:
        source, target = arrays["source"], arrays["target"]
        params = np.zeros(1, CONVERSION.dtype)
        p = params[0]
        p["extents"] = extents(source)
        p["source_strides"], p["target_strides"] = strides(source), strides(target)
        if "scale" in arrays:
            p["scale_strides"] = strides(arrays["scale"][..., None])
        rows, columns = math.prod(source.shape[:-1]), source.shape[-1]
        blocks = math.ceil(rows * math.ceil(columns / _COLUMNS) / _THREADS)
        constants: dict[str, str | int] = {
            "source": CPP_TYPES[source.dtype.name],
            "target": CPP_TYPES[target.dtype.name],
            "threads": _THREADS,
            "columns": _COLUMNS,
        }
        kernel = cuda_device.get(_FILE, _ENTRY, constants, device, 0, CONVERSION.headers)
        launch = kernel.bound((blocks,), (_THREADS,), [params.nbytes], 0)
        words = [CONVERSION.offset(name) // 8 for name in arrays]
        super().__init__((params,), words, launch if source.size else None)


_launches: Kept[Any, _Launch] = Kept()


def _convert(work: Work, **named: tuple[str, Array]) -> None:
    """Enqueue a conversion; each of its pointers has an array and the array's name in the recording."""
    arrays = {pointer: x for pointer, (_, x) in named.items()}
    key = work.device, tuple([(pointer, x.dtype, x.shape, x.strides) for pointer, x in arrays.items()])
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _Launch(work.device, arrays)
    work.enqueue(launch, dict(named.values()))


def widened(work: Work, is_backward: bool = False) -> Work:
    """Return work on arrays of the accumulation's dtype: inputs are converted, and `out` of a forward pass is new."""
    problem: AttentionProblem = work.problem
    accum = problem.accum_dtype
    wide = copy(work)
    wide.problem = problem.wide
    wide.arrays = {name: x for name, x in work.arrays.items() if name not in SCALES}
    for name in (*_INPUTS, *(_RESIDUALS if is_backward else ())):
        x = work.arrays.get(name)
        if x is None or x.dtype.name == accum:
            continue
        wide.arrays[name] = work.empty(x.shape, accum)
        others = {"scale": f"{name}_scale", "lengths": _LENGTHS.get(name, "")}
        if problem.packed or "block_table" in work.arrays:
            del others["lengths"]  # rows are no positions in sequences
        given = {pointer: (own, work.arrays[own]) for pointer, own in others.items() if own in work.arrays}
        _convert(work, source=(name, x), target=(f"wide_{name}", wide.arrays[name]), **given)
    if not is_backward:
        wide.arrays |= wide_results(work, {"out": work.arrays["out"]})
    return wide


def elements_of_codes(work: Work) -> Work:
    """Return work whose keys and values are 16-bit elements, each a code's number without its scale."""
    own = copy(work)
    own.arrays = dict(work.arrays)
    kv_lengths = None if work.problem.packed else work.arrays.get("kv_lengths")
    given = {} if kv_lengths is None else {"lengths": ("kv_lengths", kv_lengths)}
    for name in ("k", "v"):
        codes = work.arrays[name]
        columns = codes.shape[-1]
        whole = math.ceil(columns / _COLUMNS) * _COLUMNS  # rows begin at multiples of 32 bytes; TMA asks for 16
        own.arrays[name] = work.empty((*codes.shape[:-1], whole), work.problem.dtype)[..., :columns]
        _convert(work, source=(name, codes), target=(f"{name}_elements", own.arrays[name]), **given)
    return own


def wide_results(work: Work, results: Arrays) -> Arrays:
    """Return arrays of the accumulation's dtype for results, which `narrow` converts unless they have it themselves."""
    accum = work.problem.accum_dtype
    return {name: x if x.dtype.name == accum else work.empty(x.shape, accum) for name, x in results.items()}


def narrow(work: Work, wide: Arrays, results: Arrays) -> None:
    """Convert the arrays of `wide_results` to `results`, which are by their names in the recording."""
    for (name, result), x in zip(results.items(), wide.values(), strict=True):
        if x is not result:
            _convert(work, source=(f"wide_{name}", x), target=(name, result))
