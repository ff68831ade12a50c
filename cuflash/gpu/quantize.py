"""Launches of `cuflash.fp8`'s kernels: quantisation to e4m3 codes and the Hadamard transform."""

from __future__ import annotations

import math

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.source import Constants
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import Arguments
from cuflash.gpu.axes import CPP_TYPES, FOUR, extents, strides
from cuflash.hardware import WARP
from cuflash.problem.attention_problem import Array, accum_of

_THREADS = 256  # threads of a thread block
_COLUMNS = 8  # columns that a thread quantises
# A thread block of the transform has so many columns in shared memory, or as many as a larger block of the transform,
# which has at most so many.
_ELEMENTS, MOST_COLUMNS = 1024, 4096
_WORD = np.dtype("u8")
QUANTIZATION = Struct(
    "Quantization",
    [
        Member("source", "const Source*", _WORD),
        Member("codes", "unsigned char*", _WORD),
        Member("largest", "u64*", _WORD, "bits of the largest size of every group"),
        Member("scale", "float*", _WORD, "of every group"),
        Member("extents", "Four", FOUR),
        Member("source_strides", "Four", FOUR, "in elements"),
        Member("group_strides", "Four", FOUR, "of the rows' axes, in groups"),
    ],
)
TRANSFORM = Struct(
    "Transform",
    [
        Member("source", "const Element*", _WORD),
        Member("target", "Element*", _WORD),
        Member("extents", "Four", FOUR),
        Member("source_strides", "Four", FOUR, "in elements"),
        Member("seed", "u64", _WORD),
        Member("factor", "double", np.dtype("f8"), "of the sums"),
    ],
)


def quantize(x: Array, shared: tuple[int, ...]) -> tuple[Array, Array]:
    """Return codes of x (batch, seqlen, heads, dim), and scales (batch, seqlen, heads) of size 1 on `shared` axes."""
    device = cuda_device.device_of(x)
    xp = device.namespace
    shape = tuple([1 if axis in shared else n for axis, n in enumerate(x.shape[:3])])
    codes = xp.empty(x.shape, np.uint8)
    if not x.size:
        return codes, xp.ones(shape, np.float32)
    # The scales keep the memory of the largest values alive, as a graph that captured the launches writes it again.
    groups = math.prod(shape)
    memory = xp.zeros(groups * 12, np.uint8)
    largest, scale = memory[: groups * 8].view(np.uint64), memory[groups * 8 :].view(np.float32).reshape(shape)
    params = np.zeros(1, QUANTIZATION.dtype)
    for name, array in (("source", x), ("codes", codes), ("largest", largest), ("scale", scale)):
        params[name] = device.pointer(array)
    params["extents"], params["source_strides"] = extents(x), strides(x)
    params["group_strides"] = strides(scale[..., None])
    constants: dict[str, str | int] = {
        "source": CPP_TYPES[x.dtype.name],
        "wide": CPP_TYPES[accum_of(x.dtype.name)],
        "columns": _COLUMNS,
    }
    rows = math.prod(x.shape[:3])
    chunks = math.ceil(x.shape[3] / _COLUMNS)
    _launch(device, "around/quantize", "find_largest", constants, QUANTIZATION, params, rows * WARP)
    _launch(device, "around/quantize", "quantize", constants, QUANTIZATION, params, rows * chunks)
    return codes, scale


def transform(x: Array, seed: int, size: int) -> Array:
    """Apply the Hadamard transform to blocks of `size` columns, `MOST_COLUMNS` at most."""
    device = cuda_device.device_of(x)
    target = device.namespace.empty(x.shape, x.dtype)
    if not x.size:
        return target
    if x.ndim > 4:
        x = x.reshape(-1, x.shape[-1])
    elements = max(_ELEMENTS, size)
    params = np.zeros(1, TRANSFORM.dtype)
    params["source"], params["target"] = device.pointer(x), device.pointer(target)
    params["extents"], params["source_strides"] = extents(x), strides(x)
    params["seed"], params["factor"] = seed, size**-0.5
    constants: dict[str, str | int] = {
        "element": CPP_TYPES[x.dtype.name],
        "wide": CPP_TYPES[accum_of(x.dtype.name)],
        "size": size,
        "elements": elements,
    }
    threads = math.ceil(x.size / elements) * _THREADS
    _launch(device, "around/hadamard", "hadamard", constants, TRANSFORM, params, threads)
    return target


def _launch(
    device: cuda_device.Device,
    file: str,
    entry: str,
    constants: Constants,
    struct: Struct,
    params: np.ndarray,
    threads: int,
) -> None:
    kernel = cuda_device.get(file, entry, {**constants, "threads": _THREADS}, device, 0, struct.headers)
    enqueue = kernel.bound((math.ceil(threads / _THREADS),), (_THREADS,), [params.nbytes], 0)
    arguments = Arguments((params,))
    enqueue(arguments.address, device.stream())
