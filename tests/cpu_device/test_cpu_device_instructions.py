"""Every wrapped instruction compiles for its architecture and runs on the CPU device as on a GPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_device import device, tensor_map
from cpu_device.instructions import CASES, HELPERS, SMEM_BYTES, WORDS_OUT, Case

from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import source as cuda_source

Array = np.ndarray[Any, Any]
FURTHER = Path(device.__file__).parent  # instructions that no kernel uses
needs_compiler = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def source_of(arch: str) -> str:
    """Return the kernels of all instructions of an architecture."""
    folders = ("sm80", "sm90") if arch == "sm_90a" else ("sm80",)
    used = cuda_source.source_of(f"ptx/{folders[-1]}.cuh", {})
    others = "".join((FURTHER / folder / "ptx.cuh").read_text().replace("#pragma once", "") for folder in folders)
    own = "".join(case.kernel for case in CASES if case.arch == arch)
    return f"{used}\n{others}\n{HELPERS}{own}"


def inputs(case: Case) -> Array:
    return case.data(np.random.default_rng(len(case.name)))


def on_cpu(case: Case, check: device.Check = device.Check.NONE) -> Array:
    words, out = inputs(case), np.zeros(WORDS_OUT + 32, np.uint32)
    out = out[-out.ctypes.data % 128 // 4 :][:WORDS_OUT]  # TMA wants 16 bytes
    encoded: Any = np.int32(0)
    if case.arch == "sm_90a":
        encoded = np.zeros(1, "V128")
    if case.map is not None:
        m, base = case.map, out if case.map.of_out else words
        encoded = tensor_map.encode(base.ctypes.data, m.dtype, m.extents, m.strides, m.box, m.swizzle)
    module = device.compile(source_of(case.arch), (), "instructions", check)
    module.launch(case.entry, (case.cluster,), (case.threads,), (words, out, encoded), SMEM_BYTES)
    return out


@functools.cache
def gpu_module(arch: str) -> Any:
    import cupy as cp

    # CuPy asks for this GPU's own architecture; only an architecture's own instructions need its name with an "a".
    own = (f"-arch={arch}",) if arch.endswith("a") else ()
    return cp.RawModule(code=source_of(arch), options=("--std=c++17", *own))


def on_gpu(case: Case) -> Array:
    import cupy as cp

    words, out = cp.asarray(inputs(case)), cp.zeros(WORDS_OUT, np.uint32)
    encoded: Any = np.int32(0)
    if case.arch == "sm_90a":
        encoded = np.zeros(1, "V128")
    if case.map is not None:
        encoded = driver_map(out if case.map.of_out else words, case)
    kernel = gpu_module(case.arch).get_function(case.entry)
    kernel.max_dynamic_shared_size_bytes = SMEM_BYTES
    kernel((case.cluster,), (case.threads,), (words, out, encoded), shared_mem=SMEM_BYTES)
    return cp.asnumpy(out)


def driver_map(base: Any, case: Case) -> Array:
    """Encode a map by cuTensorMapEncodeTiled."""
    m = case.map
    assert m is not None
    rank, buffer = len(m.extents), np.zeros(256, np.uint8)
    at = -buffer.ctypes.data % 64
    dtype = {"float32": 7, "bfloat16": 9}[m.dtype]
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[m.swizzle]
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(buffer.ctypes.data + at), dtype, rank, ctypes.c_void_p(base.data.ptr),
        (ctypes.c_uint64 * rank)(*m.extents), (ctypes.c_uint64 * (rank - 1))(*m.strides),
        (ctypes.c_uint32 * rank)(*m.box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, 0, 0,
    )  # fmt: skip
    assert code == 0, f"cuTensorMapEncodeTiled: {code}"
    return buffer[at : at + 128].view("V128").copy()


def assert_same(got: Array, want: Array, tolerance: float) -> None:
    if tolerance == 0:
        np.testing.assert_array_equal(got, want)
        return
    x, y = got.view(np.float32), want.view(np.float32)
    finite = np.isfinite(y)
    np.testing.assert_array_equal(x[~finite], y[~finite])
    np.testing.assert_allclose(x[finite], y[finite], rtol=tolerance, atol=tolerance * np.abs(y[finite]).max())


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_they_compile(arch: str) -> None:
    pytest.importorskip("cupy")
    assert cuda_compile.compile_for(arch, source_of(arch), "instructions").cubin


@needs_compiler
@each_case
def test_it_runs_with_checks_and_without(case: Case) -> None:
    plain = on_cpu(case)
    np.testing.assert_array_equal(on_cpu(case, device.Check.SHARED), plain)
    assert plain.any()


@needs_compiler
@pytest.mark.gpu
@each_case
def test_the_gpu_gives_the_same(case: Case) -> None:
    import cupy as cp

    if int(cp.cuda.Device().compute_capability) < int(case.arch[3:5]):
        pytest.skip(f"this GPU is older than {case.arch}")
    assert_same(on_cpu(case), on_gpu(case), case.tolerance)


@needs_compiler
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "mma_" in case.name and "f64" not in case.name and case.tolerance > 0],
    ids=lambda case: case.name,
)
def test_hopper_cuts_sums_off_to_the_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy as cp

    if int(cp.cuda.Device().compute_capability) != 90:
        pytest.skip("these are Hopper's sums")
    monkeypatch.setenv("CUFLASH_CPU_DEVICE_SUMS", "hopper")
    np.testing.assert_array_equal(on_cpu(case).view(np.float32), on_gpu(case).view(np.float32))
