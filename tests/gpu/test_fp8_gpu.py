"""Only a GPU can show of FP8 that graphs and the current stream work, and that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import gaussian, same_bits

import cuflash
from cuflash.e4m3 import decode

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def stream() -> Iterator[Any]:
    """Make a non-blocking stream current, of which the default stream knows nothing."""
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        yield own
        own.synchronize()


class Step:
    """A step of an FP8 model: transform, quantise, attend, and 16-bit queries over the same keys, with a gradient."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.arrays = [cupy.asarray(gaussian(rng, (2, n, h, 64), "bfloat16")) for n, h in ((70, 4), (90, 2), (90, 2))]
        self.lengths = cupy.asarray(np.array([90, 33], np.int32))
        self.results: tuple[Any, ...] = ()
        self.kept: Any = None  # a graph writes this, too

    def run(self) -> tuple[Any, ...]:
        self.results = self.kept = ()  # their memory serves again: a graph that is captured must not allocate
        q, k, v = self.arrays
        rotated = [cuflash.hadamard(x, 5) for x in (q, k)]
        quantized = [
            cuflash.quantize_fp8(x, per) for x, per in zip((*rotated, v), ("token", "head", "tensor"), strict=True)
        ]
        codes, scales = ([pair[i] for pair in quantized] for i in range(2))
        named: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        options: dict[str, Any] = {"kv_lengths": self.lengths, "causal": True}
        out = cuflash.attention(codes[0], codes[1], codes[2], **named, **options)
        del named["q_scale"]
        mixed = cuflash.attention(q, codes[1], codes[2], **named, **options, out_dtype="float32")
        wide, backward = cuflash.attention_vjp(q, k, v, **options, out_dtype="float32")
        self.results = (*codes, *scales, out, mixed, wide, *backward(wide))
        self.kept = rotated, backward
        return self.results

    def host(self) -> list[Any]:
        return [cupy.asnumpy(x) for x in self.results]


def test_graph_capture_and_replay(stream: Any) -> None:
    """After one warm-up a captured graph computes from the arrays' contents at replay."""
    step = Step()
    step.run()
    stream.synchronize()
    stream.begin_capture()
    step.run()
    graph = stream.end_capture()

    def replay() -> list[Any]:
        for x in step.results:
            x.data.memset_async(0xFF, x.nbytes)
        graph.launch(stream)
        stream.synchronize()
        return step.host()

    first = replay()
    eager = Step()
    eager.run()
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(first, eager.host(), strict=True))
    for x in step.arrays:
        x[...] = x[::-1].copy()
    step.lengths[...] = cupy.asarray(np.array([40, 77], np.int32))
    others = [cupy.full(1 << 20, 3, np.uint8) for _ in range(8)]  # memory that a graph must not use
    second = replay()
    assert all(int(x.min()) == int(x.max()) == 3 for x in others)
    step.run()
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(second, step.host(), strict=True))
    assert not same_bits(first[-1], second[-1])


def test_results_are_numpy_s(stream: Any) -> None:
    step = Step()
    step.run()
    stream.synchronize()
    on_host = Step()
    on_host.arrays = [cupy.asnumpy(x) for x in step.arrays]
    on_host.lengths = cupy.asnumpy(step.lengths)
    for got, expected in zip(step.host()[6:], on_host.run()[6:], strict=True):
        # A code near the middle of two may differ, by a rounding of the transform before it.
        difference = np.abs(got.astype(np.float64) - np.asarray(expected).astype(np.float64))
        assert np.sqrt(np.mean(difference**2)) < 0.01


def test_wide_transforms(stream: Any) -> None:
    """Blocks may have more columns than a thread block."""
    x = cupy.asarray(np.random.default_rng(1).standard_normal((3, 8192), np.float32))
    np.testing.assert_allclose(cupy.asnumpy(cuflash.hadamard(x, 9)), cuflash.hadamard(cupy.asnumpy(x), 9), atol=1e-4)


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("option", ["plain", "causal", "bias", "dropout"])
def test_many_queries(dims: tuple[int, int], per: str, option: str) -> None:
    """Kernels for many queries end, whatever registers their warps hand each other, and are near to exact attention."""
    rng = np.random.default_rng(2)
    shapes = ((2, 700, 4, dims[0]), (2, 900, 2, dims[0]), (2, 900, 2, dims[1]))
    named: dict[str, Any] = {}
    codes: list[Any] = []
    numbers: list[Any] = []
    for name, shape in zip("qkv", shapes, strict=True):
        x, scale = cuflash.quantize_fp8(cupy.asarray(gaussian(rng, shape, "float32")), per)
        codes.append(x)
        named[f"{name}_scale"] = scale
        numbers.append(cupy.asarray(decode(cupy.asnumpy(x))) * scale[..., None])
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"causal": True},
        "bias": {"bias": cupy.asarray(gaussian(rng, (700, 900), "float32")), "causal": True},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    }[option]
    q, k, v = codes
    out, lse = cuflash.attention(q, k, v, **named, **options, out_dtype="float32", return_lse=True)
    q, k, v = numbers
    exact, exact_lse = cuflash.attention(q, k, v, **options, return_lse=True)
    error = cupy.sqrt(cupy.mean((out - exact) ** 2)) / cupy.sqrt(cupy.mean(exact**2))
    assert float(error) < 0.04  # weights are rounded to three bits behind the first
    np.testing.assert_allclose(cupy.asnumpy(lse), cupy.asnumpy(exact_lse), rtol=1e-3, atol=1e-3)
