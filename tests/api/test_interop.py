"""Arrays of any library give the same library's arrays, over the same memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import Case, gaussian, np_dtype, same_bits
from devices import Device
from libraries import Exporter, all_options_case, convert
from numpy.typing import NDArray

import cuflash
from cuflash import interop

Array = NDArray[Any]

NUMPY = Device("numpy", np)
ROOT = Path(__file__).parents[2]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


class Torch:
    """Conversions to and from torch, on the CPU."""

    name = "torch"

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="torch is not installed")
        self.array_type = self.torch.Tensor

    def to(self, x: Array) -> Any:
        if x.dtype.name == "bfloat16":
            return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(x)

    def back(self, x: Any) -> Array:
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(np_dtype("bfloat16"))
        return x.numpy()


class Jax:
    """Conversions to and from JAX, on the CPU."""

    name = "jax"

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax", reason="jax is not installed")
        self.jax.config.update("jax_enable_x64", True)
        self.array_type = self.jax.Array

    def to(self, x: Array) -> Any:
        return self.jax.device_put(np.ascontiguousarray(x), self.jax.devices("cpu")[0])

    def back(self, x: Any) -> Array:
        return np.asarray(x)


@pytest.fixture(params=[Torch, Jax], ids=["torch", "jax"], scope="module")
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def assert_same(library: Any, actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert isinstance(ours, library.array_type), type(ours)
        assert same_bits(library.back(ours), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_library_out(library: Any, dtype: str) -> None:
    """All three forms give that library's arrays, with the bits that NumPy arrays give."""
    case = all_options_case(dtype)
    options = case.library_options()
    plain = (case.q, case.k, case.v)
    foreign, foreign_options, dout = convert((plain, options, case.dout), library.to)
    out, lse = cuflash.attention(*plain, **options, return_lse=True)
    grads = cuflash.attention_backward(case.dout, *plain, out, lse, **options)
    assert len(grads) == 6

    results = cuflash.attention(*foreign, **foreign_options, return_lse=True)
    assert_same(library, results, (out, lse))
    assert_same(library, cuflash.attention_backward(dout, *foreign, *results, **foreign_options), grads)
    result, backward = cuflash.attention_vjp(*foreign, **foreign_options)
    assert_same(library, (result,), (out,))
    assert_same(library, backward(dout), grads)
    some = backward(dout, library.to(np.zeros_like(lse)), grads=("k", "sink"))
    assert [x is None for x in some] == [True, False, True, True, False, True]
    assert_same(library, (some[1], some[4]), (grads[1], grads[4]))


def test_packed_and_merged(library: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (gaussian(rng, (12, 3, 8), "float32") for _ in range(3))
    cu = np.array([0, 5, 12], np.int32)
    arguments = (q, k, v, cu, cu)
    plain = [cuflash.attention_varlen(*arguments, causal=causal, return_lse=True) for causal in (True, False)]
    foreign = [
        cuflash.attention_varlen(*convert(arguments, library.to), causal=causal, return_lse=True)
        for causal in (True, False)
    ]
    for ours, theirs in zip(foreign, plain, strict=True):
        assert_same(library, ours, theirs)
    merged = cuflash.merge([x[0] for x in foreign], [x[1] for x in foreign])
    assert_same(library, merged, cuflash.merge([x[0] for x in plain], [x[1] for x in plain]))


def test_nothing_is_copied_on_the_way_in(library: Any) -> None:
    for dtype in DTYPES:
        x = library.to(gaussian(np.random.default_rng(0), (2, 5, 3, 8), dtype))
        adopted = interop.adopt_all(interop.library_of("q", x), {"q": x})["q"]
        pointer = x.data_ptr() if library.name == "torch" else x.unsafe_buffer_pointer()
        assert adopted.__array_interface__["data"][0] == pointer
        assert adopted.dtype == np_dtype(dtype)


def test_libraries_do_not_mix(library: Any) -> None:
    x = np.zeros((1, 4, 2, 8), np.float32)
    for q, k in ((library.to(x), x), (x, library.to(x))):
        with pytest.raises(TypeError, match=rf"k: .*({library.name}|numpy)"):
            cuflash.attention(q, k, q)
    foreign = library.to(x)
    with pytest.raises(TypeError, match="mask"):
        cuflash.attention(foreign, foreign, foreign, mask=np.ones((4, 4), bool))


def test_torch_strides_and_out() -> None:
    """Transposed, sliced and expanded tensors go in as they are, and out= is written in place and returned."""
    torch = Torch().torch
    fused = torch.randn(2, 3, 4, 10, 16, generator=torch.Generator().manual_seed(0))
    q, k = fused[:, 0].transpose(1, 2), fused[:, 1].transpose(1, 2)
    v = fused[:1, 2].transpose(1, 2).expand(2, 10, 4, 16)
    expected = cuflash.attention(*(x.contiguous().numpy() for x in (q, k, v)), causal=True)
    buffer = torch.full((2, 10, 3, 4, 16), torch.nan)
    out = buffer[:, :, 1]
    assert cuflash.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert buffer[:, :, 0].isnan().all() and buffer[:, :, 2].isnan().all()
    dqkv = torch.full((2, 10, 3, 4, 16), torch.nan)
    lse = cuflash.attention(q, k, v, causal=True, return_lse=True)[1]
    targets = tuple(dqkv[:, :, i] for i in range(3))
    grads = cuflash.attention_backward(out, q, k, v, out, lse, causal=True, out=targets)
    assert all(grad is target for grad, target in zip(grads, targets, strict=True))
    assert not dqkv.isnan().any()
    with pytest.raises(ValueError, match="overlap"):
        cuflash.attention(q, k, v, out=q)


def test_torch_tensor_that_requires_grad() -> None:
    """The message names the example with autograd.Function, and the example is there."""
    torch = Torch().torch
    x = torch.zeros(1, 4, 2, 8)
    weight = torch.nn.Parameter(x.clone())
    for arguments in ((weight, x, x), (x, x, x.clone().requires_grad_()), (x, weight * 2, x)):
        with pytest.raises(TypeError, match=r"autograd\.Function") as caught:
            cuflash.attention(*arguments)
        [example] = [word for word in str(caught.value).replace(",", " ").split() if word.endswith(".py")]
        assert (ROOT / example).is_file(), f"the message names {example}"
    assert cuflash.attention(weight.detach(), x, x).shape == x.shape


def test_subclasses_of_torch_tensors() -> None:
    """Subclasses are tensors of torch, wherever they are defined."""
    torch = Torch().torch

    class Tensor(torch.Tensor):  # type: ignore[name-defined]
        pass

    class Parameter(torch.nn.Parameter):  # type: ignore[name-defined]
        pass

    x = torch.randn(1, 4, 2, 8)
    for dtype in (torch.float32, torch.bfloat16):
        plain = x.to(dtype)
        mixed = plain.as_subclass(Tensor), plain, Parameter(plain).detach()
        out, backward = cuflash.attention_vjp(*mixed)
        assert torch.equal(out, cuflash.attention(plain, plain, plain))
        assert all(isinstance(gradient, torch.Tensor) for gradient in backward(out.as_subclass(Tensor)))
    for weight in (Parameter(x), x.clone().as_subclass(Tensor).requires_grad_()):
        with pytest.raises(TypeError, match=r"k: .*autograd\.Function"):
            cuflash.attention(x, weight, x)


def test_torch_gradcheck() -> None:
    """An autograd.Function around attention_vjp passes torch's own finite differences."""
    torch = Torch().torch

    class Attention(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
            inputs = (x.detach() for x in (q, k, v))
            (out, lse), ctx.pull = cuflash.attention_vjp(*inputs, causal=True, bias=bias.detach(), return_lse=True)
            return out, lse

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return ctx.pull(*cotangents)

    shapes = ((1, 5, 4, 3), (1, 6, 2, 3), (1, 6, 2, 2), (4, 5, 6))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(Attention.apply, inputs)


def test_torch_kinds_without_data() -> None:
    torch = Torch().torch
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"k: .*meta"):
        cuflash.attention(x, x.to("meta"), x)
    with pytest.raises(TypeError, match="sparse"):
        cuflash.attention(x, x, x.to_sparse())
    with pytest.raises(TypeError, match=r"v: expected a dtype .* got float8_e5m2"):
        cuflash.attention(x, x, x.to(torch.float8_e5m2))


def test_jax_tracers_and_immutable_arrays() -> None:
    jax = Jax().jax
    x = jax.numpy.zeros((1, 4, 2, 8))
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(lambda q: cuflash.attention(q, q, q))(x)
    out, backward = cuflash.attention_vjp(x, x, x)
    with pytest.raises(ValueError, match="out: .*immutable"):
        cuflash.attention(x, x, x, out=jax.numpy.zeros((1, 4, 2, 8)))
    with pytest.raises(ValueError, match="out, dk: .*immutable"):
        backward(out, out=(None, jax.numpy.zeros((1, 4, 2, 8)), None))


class Namespaced(Exporter):
    """An exporter with an array API namespace, which can take results back."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: Namespaced(np.from_dlpack(x)))


def test_any_library_that_speaks_dlpack() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(3))
    expected = cuflash.attention(q, k, v, causal=True)
    result = cuflash.attention(Namespaced(q), Namespaced(k), Namespaced(v), causal=True)
    assert isinstance(result, Namespaced)
    assert same_bits(result.x, expected)
    with pytest.raises(TypeError, match="k: expected an array of test_interop, as the first one is, got one of numpy"):
        cuflash.attention(Namespaced(q), k, Namespaced(v))


def test_dtypes_that_numpy_does_not_take() -> None:
    torch = Torch().torch
    x = Exporter(torch.zeros((1, 4, 2, 8), dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="q: expected a dtype .* got"):
        cuflash.attention(x, x, x)


def test_gpu_arrays_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    interface = {"shape": (1, 2, 3, 4), "typestr": "<f4", "data": (0, False), "version": 3}
    x = SimpleNamespace(__cuda_array_interface__=interface)
    with pytest.raises(ImportError, match=r"q: .*cuflash\[cuda13\]"):
        cuflash.attention(x, x, x)


def test_numpy_arrays_of_every_origin(tmp_path: Path) -> None:
    """Read-only arrays, memory maps and broadcasts are taken; results are plain NumPy arrays."""
    rng = np.random.default_rng(0)
    k, v = (gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(2))
    q = np.memmap(tmp_path / "q", np.float32, "w+", shape=k.shape)
    q[...] = gaussian(rng, k.shape, "float32")
    k.flags.writeable = False
    v_all = np.broadcast_to(v[:1], v.shape)
    case = Case(q, k, v_all, np.zeros(v.shape, np.float32))
    out = cuflash.attention(q, k, v_all)
    assert type(out) is np.ndarray and out.flags.writeable
    case.assert_forward(out, NUMPY.get(cuflash.attention(q, k, v_all, return_lse=True)[1]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_arrays_of_the_other_byte_order(dtype: str) -> None:
    case = all_options_case(dtype)

    def swapped(x: Any) -> Any:
        return x.astype(x.dtype.newbyteorder()) if isinstance(x, np.ndarray) else x

    on_device = case.on(NUMPY)
    options = on_device.options | {name: swapped(x) for name, x in case.options.items() if name != "block_mask"}
    (out, lse), backward = cuflash.attention_vjp(
        swapped(case.q), swapped(case.k), swapped(case.v), return_lse=True, **options
    )
    case.assert_forward(out, lse)
    gradients = dict(zip(case.grad_names, backward(swapped(case.dout), swapped(case.dlse)), strict=True))
    case.assert_gradients(gradients)
    for name in ("bias", "sink", "alibi_slopes"):
        assert gradients[name].dtype == options[name].dtype
