"""Arrays of every library on a GPU keep their memory and stream, and results are of the caller's kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash

pytestmark = pytest.mark.gpu

# JAX would take three quarters of the memory for itself without this.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Array = Any


def inputs() -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 64, 4, 32), dtype=np.float32) for _ in range(3)]


EXPECTED = cuflash.attention(*inputs(), causal=True)


def assert_right(out: Array) -> None:
    np.testing.assert_allclose(np.asarray(out, np.float32), EXPECTED, atol=1e-5)


def on_gpu() -> Any:
    jax = pytest.importorskip("jax")
    try:
        return jax, jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX sees no GPU")


class CudaArray:
    """An array of a library that nobody knows: it has the CUDA array interface and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


class Exporter:
    """An array of a library that nobody knows, which speaks DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("wrapper", [CudaArray, Exporter])
def test_any_library(wrapper: Callable[[Any], Any]) -> None:
    import cupy

    out = cuflash.attention(*(wrapper(cupy.asarray(x)) for x in inputs()), causal=True)
    assert isinstance(out, cupy.ndarray)
    assert_right(out.get())


@pytest.mark.parametrize("wrapper", [CudaArray, Exporter])
def test_gradients_of_any_library(wrapper: Callable[[Any], Any]) -> None:
    """CuPy's arrays come back, and go with the exporters into each further call."""
    import cupy

    attention_backward: Any = cuflash.attention_backward
    varlen_vjp: Any = cuflash.attention_varlen_vjp
    plain = [cupy.asarray(x) for x in inputs()]
    expected, expected_lse = cuflash.attention(*plain, causal=True, return_lse=True)
    grads = attention_backward(expected, *plain, expected, expected_lse, causal=True, deterministic=True)
    bare = [wrapper(x) for x in plain]
    out, lse = cuflash.attention(*bare, causal=True, return_lse=True)
    _, pull = cuflash.attention_vjp(plain[0], *bare[1:], causal=True, deterministic=True)
    for results in (
        attention_backward(out, *bare, out, lse, causal=True, deterministic=True),
        attention_backward(wrapper(out), *bare, wrapper(out), wrapper(lse), causal=True, deterministic=True),
        pull(out),
        pull(wrapper(out)),
    ):
        for ours, theirs in zip(results, grads, strict=True):
            assert isinstance(ours, cupy.ndarray)
            cupy.testing.assert_array_equal(ours, theirs)
    cu = cupy.array([0, 20, 64], np.int32)
    packed = [x[0] for x in plain]
    result, pull = varlen_vjp(*map(wrapper, packed), wrapper(cu), cu, deterministic=True)
    same, same_pull = varlen_vjp(*packed, cu, cu, deterministic=True)
    for ours, theirs in zip((result, *pull(wrapper(same))), (same, *same_pull(same)), strict=True):
        cupy.testing.assert_array_equal(ours, theirs)
    merged = cuflash.merge([wrapper(out), out], [lse, wrapper(lse)])
    assert all(isinstance(x, cupy.ndarray) for x in merged)
    douts, dlses = cuflash.merge_backward(wrapper(out), None, [out, wrapper(out)], [lse, lse], *map(wrapper, merged))
    assert all(isinstance(x, cupy.ndarray) for x in (*douts, *dlses))


def test_numba() -> None:
    cuda = pytest.importorskip("numba.cuda")
    arrays = [cuda.to_device(x) for x in inputs()]
    out = cuflash.attention(*arrays, causal=True)
    assert type(out) is type(arrays[0])
    assert_right(out.copy_to_host())


def test_torch_on_its_own_stream() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).cuda() for x in inputs())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(50):
            busy = 0.01 * busy @ busy
        late = torch.where(busy[0, 0] == torch.inf, torch.nan, q)  # known only when the stream's work is done
        out = cuflash.attention(late, k, v, causal=True) * 1.0
    stream.synchronize()
    assert_right(out.cpu())
    for other in (k.cpu(), inputs()[1]):
        with pytest.raises((TypeError, ValueError), match=r"k: expected an array (on|of)"):
            cuflash.attention(q, other, v)


def test_torch_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.examples.autodiff.torch_autograd import attention

    qkv = [torch.randn(1, 5, 2, 3, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True, return_lse=True), qkv)


def test_cupy_stream() -> None:
    import cupy

    q, k, v = map(cupy.asarray, inputs())
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cuflash.attention(q, k, v, causal=True).get(stream=stream)
    stream.synchronize()
    assert_right(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax(dtype: str) -> None:
    jax, device = on_gpu()
    arrays = [jax.device_put(x, device).astype(dtype) for x in inputs()]
    out = cuflash.attention(*arrays, causal=True)
    assert isinstance(out, jax.Array) and out.dtype == dtype and out.devices() == {device}
    np.testing.assert_allclose(np.asarray(out, np.float32), EXPECTED, atol=1e-5 if dtype == "float32" else 0.05)


def test_jax_gradients_under_jit() -> None:
    jax, device = on_gpu()
    import cupy

    from cuflash.examples.autodiff.jax_custom_vjp import attention

    arrays = [jax.device_put(x, device) for x in inputs()]
    gradients = jax.jit(jax.grad(lambda *x: (attention(*x, causal=True) ** 2).sum(), argnums=(0, 1, 2)))(*arrays)
    out, backward = cuflash.attention_vjp(*map(cupy.asarray, inputs()), causal=True)
    for ours, expected in zip(gradients, backward(2 * out), strict=True):
        assert ours.devices() == {device}
        np.testing.assert_allclose(np.asarray(ours), expected.get(), rtol=1e-5, atol=1e-5)
