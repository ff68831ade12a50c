"""The kernels of the GPT-2 example agree on the CPU test device with NumPy's operations in float64."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_device import device

from cuflash.cuda import compile as cuda_compile
from cuflash.examples.gpt2 import gpu_ops
from cuflash.examples.gpt2.ops import EPSILON, NumpyOps

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = 2.0**-8  # of a bfloat16, and a little for its sums in float32
Array = Any
needs_compiler = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)


class Float64(NumpyOps):
    """The expected operations, in float64."""

    dtype = np.dtype(np.float64)


class OnCpuDevice(gpu_ops.CupyOps):
    """`CupyOps` without products on the CPU test device, which looks for races, too."""

    def __init__(self, width: int, capability: int = 9) -> None:
        self.xp: Any = SimpleNamespace(empty=self.unwritten, empty_like=self.unwritten_like)
        self.dtype = BFLOAT16
        self.width, self.eight = width, False
        self._multiprocessors = 2
        self._hopper_bytes = device.SMEM_LIMITS[capability, 0] if capability >= 9 else 0
        options = (f"-DWIDTH={width}", f"-DEPSILON={EPSILON}f")
        self.module = device.compile(gpu_ops.source(), options, "gpt2", device.Check.SHARED)
        self.launched: list[str] = []

    @staticmethod
    def unwritten(shape: Any, dtype: Any) -> Array:
        """Return an array of NaN, or of -1."""
        x = np.empty(shape, dtype)
        x.reshape(-1).view(np.uint8)[:] = 0xFF
        return x

    def unwritten_like(self, x: Array) -> Array:
        """Return an array that nobody has written."""
        return self.unwritten(x.shape, x.dtype)

    def _launch(self, name: str, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        self.launched.append(name)
        self.module.launch(name, grid, block, arguments, shared)

    def _shares_of(self, target: Array | None) -> Array | None:
        if target is None:
            return None
        return self._shares[0, (target.ctypes.data - self._vectors.ctypes.data) // target.itemsize :]


def rounded(x: Array) -> tuple[Array, Array]:
    """Return numbers in bfloat16, and the same ones in float64."""
    y = x.astype(np.float32).astype(BFLOAT16)
    return y, y.astype(np.float64)


def assert_close(ours: Array, expected: Array, relative: float, absolute: float) -> None:
    np.testing.assert_allclose(ours.astype(np.float64), expected, rtol=relative, atol=absolute)


@needs_compiler
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 256), (23, 8192)])
def test_loss(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    logits, exact = rounded(rng.normal(size=(rows, columns)) * rng.choice([0.0, 3.0, 300.0], size=(rows, 1)) - 20)
    targets = rng.integers(0, columns, rows).astype(np.int32)
    expected_loss, expected = Float64().cross_entropy(exact, targets)
    results = []
    for capability, kernel in ((9, "cross_entropy_sm90"), (8, "cross_entropy")):
        ops = OnCpuDevice(256, capability)
        loss, gradient = ops.cross_entropy(logits.copy(), targets)
        assert ops.launched == [kernel]
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6, abs=1e-6)
        assert_close(gradient.full, expected.full, ROUNDING, 2e-5 / rows)  # the lse of 1000 has so many bits
        results.append(gradient.full)
    np.testing.assert_array_equal(*results)


@needs_compiler
def test_loss_of_rows_too_long_for_two() -> None:
    ops = OnCpuDevice(256)
    logits, exact = rounded(np.random.default_rng(0).normal(size=(2, 60000)))
    targets = np.array([0, 59999], np.int32)
    expected_loss, expected = Float64().cross_entropy(exact, targets)
    loss, gradient = ops.cross_entropy(logits, targets)
    assert ops.launched == ["cross_entropy"]
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert_close(gradient.full, expected.full, ROUNDING, 1e-9)


@needs_compiler
@pytest.mark.parametrize(("width", "rows"), [(256, 1), (256, 300), (768, 200)])
@pytest.mark.parametrize("adds", [False, True])
def test_layer_norm_backward(width: int, rows: int, adds: bool) -> None:
    """Blocks have more and fewer rows than are under way, with and without a residual stream."""
    rng = np.random.default_rng(rows)
    ops, expected_ops = OnCpuDevice(width), Float64()
    (x, x64), (dy, dy64), (dx, dx64) = (rounded(rng.normal(size=(rows, width))) for _ in range(3))
    (gain, gain64), (shift, shift64) = (rounded(rng.normal(size=width)) for _ in range(2))
    expected_y, statistics64 = expected_ops.layer_norm(x64, gain64, shift64)
    y, statistics = ops.layer_norm(x, gain, shift)
    assert_close(y.full, expected_y.full, ROUNDING, 1e-5)
    vectors, expected = ops.unwritten(3 * width, np.float32), np.full((3, width), np.nan)
    of_gain, of_shift, of_bias = vectors.reshape(3, width)
    with ops.sums_into(vectors, rows):
        out = (of_gain, of_shift, of_bias if adds else None)
        result = ops.layer_norm_backward(dy, x, statistics, gain, dx if adds else None, out)
    out64 = (expected[0], expected[1], expected[2] if adds else None)
    expected_result = expected_ops.layer_norm_backward(
        dy64, x64, statistics64, gain64, dx64 if adds else None, out64
    ).full
    assert_close(result.full, expected_result, ROUNDING, 1e-5)
    sums = 2 + adds
    assert_close(vectors.reshape(3, width)[:sums], expected[:sums], 1e-5, 1e-4)


@needs_compiler
@pytest.mark.parametrize("rows", [3, 32, 33, 70])
def test_sums_over_few_rows_need_no_shares(rows: int) -> None:
    ops = OnCpuDevice(256)
    dx, exact = rounded(np.random.default_rng(0).normal(size=(rows, 512)))
    sums = ops.unwritten(512, np.float32)
    with ops.sums_into(sums, rows):
        ops.bias_gradient(dx, sums)
    assert_close(sums, exact.sum(axis=0), 1e-5, 1e-5)
    assert ops.launched == (["bias_gradient"] if rows <= 32 else ["bias_gradient", "sum_partials"])


@needs_compiler
def test_gradient_of_gelu() -> None:
    rng = np.random.default_rng(0)
    ops, expected_ops = OnCpuDevice(256), Float64()
    (dy, dy64), (z, z64) = (rounded(2 * rng.normal(size=(100, 1024))) for _ in range(2))
    sums, expected = ops.unwritten(1024, np.float32), np.full(1024, np.nan)
    with ops.sums_into(sums, len(dy)):
        result = ops.gelu_backward(dy, z, sums)
    expected_result = expected_ops.gelu_backward(dy64, z64, expected).full
    assert_close(result.full, expected_result, ROUNDING, 1e-5)
    assert_close(sums, expected, 1e-5, 1e-4)


@pytest.mark.parametrize(("arch", "width"), [("sm_80", 768), ("sm_90", 256), ("sm_90", 768), ("sm_120", 768)])
def test_kernels_do_not_spill(arch: str, width: int) -> None:
    pytest.importorskip("cupy")
    text = f"#define WIDTH {width}\n#define EPSILON {EPSILON}f\n{gpu_ops.source()}"
    report = cuda_compile.compile_for(arch, text, "gpt2")
    assert report.spill_bytes == 0 and not report.warnings


def test_vectors_are_loaded_whole() -> None:
    nvrtc = pytest.importorskip("cupy", reason="CuPy is not installed").cuda.nvrtc
    headers = pytest.importorskip("cuda.pathfinder").find_nvidia_header_directory("cudart")
    program = nvrtc.createProgram(gpu_ops.source(), "gpt2.cu", (), ())
    include = () if headers is None else (f"-I{headers}",)
    options = ("-arch=compute_90", *cuda_compile.OPTIONS, "-DWIDTH=768", f"-DEPSILON={EPSILON}f", *include)
    nvrtc.compileProgram(program, options)
    text = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    loads = re.findall(r"ld\.(?:global|shared)\.\S+", text if isinstance(text, str) else text.decode())
    assert "ld.global.v4.u32" in loads and not [load for load in loads if load.endswith("v2.u16")]
