"""The kernels around FP8 run on the CPU test device: conversions, quantisation, the Hadamard transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import np_dtype
from cpu_device import device as cpu_device
from devices import device_of
from fp8 import assert_near, exact, numbers_of
from numpy.typing import NDArray

import cuflash
from cuflash import fp8
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import source as cuda_source
from cuflash.frontend import metadata
from cuflash.gpu import axes, convert
from cuflash.gpu import quantize as gpu_quantize

Array = NDArray[Any]

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
DTYPES = ("float16", "bfloat16", "float32", "float64")


def drawn(dtype: str, shape: tuple[int, ...]) -> Array:
    """Draw numbers of many sizes, some of them not finite, some 0."""
    x = (RNG.standard_normal(shape) * 10.0 ** RNG.uniform(-3, 3, shape)).astype(np_dtype(dtype))
    x[RNG.random(shape) < 0.02] = np.nan
    x[RNG.random(shape) < 0.02] = -np.inf
    x[RNG.random(shape) < 0.1] = 0
    return x


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", fp8._SHARED_AXES.values(), ids=fp8._SHARED_AXES)
def test_quantize_has_numpy_s_bits(dtype: str, shared: tuple[int, ...]) -> None:
    x = drawn(dtype, (2, 7, 3, 41))
    x[1, :, 2] = 0
    with device_of("sm_80").active():
        for view in (x, x[:, ::2], x[..., ::2], np.broadcast_to(x[:1], x.shape), x[:, :0], x.transpose(0, 2, 1, 3)):
            expected = fp8._quantized_by_numpy(view, shared)
            for got, own in zip(gpu_quantize.quantize(view, shared), expected, strict=True):
                np.testing.assert_array_equal(got, own, strict=True)


@needs_compiler
def test_float64_is_rounded_once() -> None:
    """Numbers lie near the middle between two codes, by less than float32 tells."""
    middles = np.array([1 + 1 / 16, 17.0, 3 * 2.0**-10, 440 - 8])
    x = np.concatenate([np.nextafter(middles, 0), np.nextafter(middles, 500), middles, [448]]).reshape(1, 1, 1, -1)
    with device_of("sm_80").active():
        codes, scale = gpu_quantize.quantize(x, (0, 1, 2))
    assert scale == 1
    np.testing.assert_array_equal(codes, fp8._quantized_by_numpy(x, (0, 1, 2))[0])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 40, 96, 128, 4096 + 2048, gpu_quantize.MOST_COLUMNS])
def test_hadamard_is_numpy_s(dtype: str, columns: int) -> None:
    shape = (1, 2, 1, columns) if columns > 128 else (2, 3, 5, 2, columns)
    x = RNG.standard_normal(shape).astype(np_dtype(dtype))
    size, seed = columns & -columns, 2**63 + 12345
    with device_of("sm_80").active():
        for view in (x, x[:, ::2]):
            got = gpu_quantize.transform(view, seed, size)
            expected = fp8._transformed(np, view, seed, size)
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(
                got.astype(np.float64),
                expected.astype(np.float64),
                rtol={"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0),
                atol={"float64": 1e-14}.get(dtype, 1e-5),
            )


@needs_compiler
@pytest.mark.parametrize("capability", ["sm_75", "sm_80", "sm_90"])
def test_a_repeated_call_computes_on_the_new_arrays(capability: str) -> None:
    """The second call, which metadata knows, repeats the launches on other arrays, whose results are new, too."""
    draws = [
        [cuflash.quantize_fp8(RNG.standard_normal((1, 20, heads, 16)), "token") for heads in (2, 1, 1)]
        for _ in range(2)
    ]
    expected = [exact(capability, "float8_e4m3fn", [numbers_of(*x) for x in draw]) for draw in draws]
    with device_of(capability).active():
        for draw, own in zip(draws, expected, strict=True):
            assert_near(_attend(draw), own)
        assert len(metadata._repeats) == 1


def _attend(draw: list[tuple[Array, Array]]) -> Array:
    (q, q_scale), (k, k_scale), (v, v_scale) = draw
    return cuflash.attention(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype="float32")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_they_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    sizes = {"threads": 256, "columns": 8}
    texts: dict[str, tuple[str, Any, Any]] = {
        "convert": ("around/convert", {"source": "unsigned char", "target": "float", **sizes}, convert.CONVERSION),
        "quantize": ("around/quantize", {"source": "__half", "wide": "float", **sizes}, gpu_quantize.QUANTIZATION),
        "hadamard": (
            "around/hadamard",
            {"element": axes.CPP_TYPES["bfloat16"], "wide": "float", "size": 128, "elements": 1024, "threads": 256},
            gpu_quantize.TRANSFORM,
        ),
    }
    for entry, (path, constants, struct) in texts.items():
        report = cuda_compile.compile_for(arch, cuda_source.source_of(path, constants, struct.headers), entry)
        assert (report.spill_bytes, report.warnings) == (0, ())
