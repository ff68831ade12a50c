"""Gradients of the embedding examples agree with cuflash's or differences, and second derivatives are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import threads_of_cpu_path

import cuflash

Array = Any

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "autodiff/torch_autograd": "torch",
    "autodiff/jax_custom_vjp": "jax",
    "autodiff/hips_autograd": "autograd",
    "autodiff/mygrad_op": "mygrad",
    "autodiff/thinc_layer": "thinc",
}


def inputs(dtype: str = "float64", shape: tuple[int, ...] = (2, 9, 4, 8)) -> tuple[Array, ...]:
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, *shape)).astype(dtype)
    k, v = rng.normal(size=(2, shape[0], 11, 2, shape[3])).astype(dtype)
    return q, k, v, dout


def assert_same(results: Iterable[Any], arrays: Iterable[Array], **options: Any) -> None:
    q, k, v, dout = arrays
    out, backward = cuflash.attention_vjp(q, k, v, **options)
    for result, expected in zip(results, (out, *backward(dout)), strict=True):
        np.testing.assert_array_equal(np.asarray(result), expected)


@pytest.mark.parametrize(("name", "library"), NEEDS.items())
def test_runs_as_a_script(name: str, library: str) -> None:
    pytest.importorskip(library)
    subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], check=True, timeout=300)


@pytest.mark.parametrize("arguments", ["", "--dtype bfloat16 --share 0.4 --keys 2k", "--device cpu --dtype float16"])
def test_a_long_decode(arguments: str) -> None:
    """Keys lie in host memory, queries on a GPU where there is one; the last step agrees with a call on the CPU."""
    script = [sys.executable, str(EXAMPLES / "long_decode.py"), "--check", "--steps", "2", *arguments.split()]
    done = subprocess.run(script, check=True, timeout=300, capture_output=True, text=True)
    assert "step 1: " in done.stdout
    assert "largest difference" in done.stdout


def test_torch_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.examples.autodiff.torch_autograd import attention

    q, k, v, _ = (torch.tensor(x, requires_grad=True) for x in inputs(shape=(1, 5, 2, 3)))
    k, v = k[:, :5, :1], v[:, :5, :1]
    rng = np.random.default_rng(1)
    extras = {
        "bias": torch.tensor(rng.normal(size=(2, 5, 5)), requires_grad=True),
        "sink": torch.tensor(rng.normal(size=2), requires_grad=True),
        "alibi_slopes": torch.tensor(rng.random(2), requires_grad=True),
    }
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, causal=True, return_lse=True), (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, *extra: attention(q, k, v, window=(3, 0), **dict(zip(extras, extra, strict=True))),
        (q, *extras.values()),
    )


def test_torch_agrees_and_spares_unwanted_gradients() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.examples.autodiff.torch_autograd import attention

    arrays = inputs("float32")
    q, k, v, dout = map(torch.tensor, arrays)
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    assert_same([out.detach(), q.grad, k.grad, v.grad], arrays, causal=True)

    bias = torch.zeros(9, 11)
    attention(q, k.detach(), v.detach(), bias=bias).sum().backward()
    assert bias.grad is None


def test_torch_gradient_through_lse_alone() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.examples.autodiff.torch_autograd import attention

    q, k, v, _ = map(torch.tensor, inputs())
    q.requires_grad_()
    _, lse = attention(q, k, v, return_lse=True)
    lse.sum().backward()
    # d lse / d q is the mean of the keys under the attention weights, times the scale.
    groups = k.repeat_interleave(2, dim=2)
    expected = attention(q.detach(), groups, groups) * q.shape[-1] ** -0.5
    torch.testing.assert_close(q.grad, expected)


def test_torch_refuses_a_second_derivative() -> None:
    torch = pytest.importorskip("torch")
    from cuflash.examples.autodiff.torch_autograd import attention

    q, k, v, _ = (torch.tensor(x, requires_grad=True) for x in inputs())
    loss = attention(q, k, v).sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    # A gradient penalty: torch could silently leave out the second derivative, as the first one has a path to q too.
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (loss + gradient.square().sum()).backward()


def test_torch_error_names_the_example() -> None:
    torch = pytest.importorskip("torch")
    q, k, v, _ = (torch.tensor(x, requires_grad=True) for x in inputs())
    with pytest.raises(TypeError, match=r"examples/autodiff/torch_autograd\.py"):
        cuflash.attention(q, k, v)


def test_jax_agrees_under_jit() -> None:
    jax = pytest.importorskip("jax")
    from cuflash.examples.autodiff.jax_custom_vjp import attention

    arrays = inputs("float32")

    @jax.jit
    def out_and_gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, causal=True, window=(4, None)), q, k, v)
        return out, *vjp(dout)

    assert_same(out_and_gradients(*arrays), arrays, causal=True, window=(4, None))


def test_jax_arrays_of_many_megabytes() -> None:
    jax = pytest.importorskip("jax")
    from cuflash.examples.autodiff.jax_custom_vjp import attention

    q = jax.numpy.ones((16, 256, 4, 64), "float32")  # large enough that JAX would compute it on its own threads
    gradient = jax.jit(jax.grad(lambda v: attention(q, q, v).sum()))(q)
    np.testing.assert_allclose(gradient, 1, rtol=1e-5)


def test_jax_refuses_a_second_derivative() -> None:
    jax = pytest.importorskip("jax")
    from cuflash.examples.autodiff.jax_custom_vjp import attention

    q, k, v, _ = inputs("float32")

    def of_q(q: Any) -> Any:
        return attention(q, k, v).sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda q: jax.grad(of_q)(q).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(of_q)(q)


def test_hips_autograd() -> None:
    autograd = pytest.importorskip("autograd")
    from autograd.test_util import check_grads

    from cuflash.examples.autodiff.hips_autograd import attention, attention_with_lse

    *qkv, dout = inputs()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return autograd.numpy.sum(attention(q, k, v, causal=True) * dout)

    gradients = autograd.grad(loss, argnum=(0, 1, 2))(*qkv)
    assert_same([attention(*qkv, causal=True), *gradients], (*qkv, dout), causal=True)
    np.random.seed(0)  # noqa: NPY002  # the directions that autograd tries
    check_grads(lambda *qkv: attention_with_lse(*qkv)[1], modes=["rev"], order=1)(*qkv)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        autograd.elementwise_grad(autograd.elementwise_grad(loss))(*qkv)


def test_mygrad() -> None:
    mygrad = pytest.importorskip("mygrad")
    from cuflash.examples.autodiff.mygrad_op import attention

    *qkv, dout = inputs()
    q, k, v = map(mygrad.tensor, qkv)
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    assert_same([out, q.grad, k.grad, v.grad], (*qkv, dout), causal=True)
    assert not isinstance(q.grad, mygrad.Tensor)  # no graph, so nobody can ask for a second derivative


@pytest.mark.parametrize("name", ["jax_custom_vjp", "hips_autograd"])
def test_a_table_of_relative_positions_is_learned(name: str) -> None:
    pytest.importorskip(NEEDS[f"autodiff/{name}"])
    example: Any = import_module(f"cuflash.examples.autodiff.{name}")
    first, last = example.learn(steps=60)
    assert np.all(np.asarray(last) < 0.1 * np.asarray(first))


def test_thinc() -> None:
    pytest.importorskip("thinc")
    from cuflash.examples.autodiff.thinc_layer import attention

    *qkv, dout = inputs("float32")
    out, backprop = attention(causal=True).begin_update(tuple(qkv))
    assert_same([out, *backprop(dout)], (*qkv, dout), causal=True)


def test_naive_attention_beside_cuflash() -> None:
    from cuflash.tools.demo import compare

    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2048, 2, 32)).astype("float32")
    with threads_of_cpu_path(2):  # each has tiles of its own
        report = compare(q, k, v)
    naive_errors, naive_peak = report["naive"]
    errors, peak = report["cuflash"]
    assert max(errors) < 1e-4 and max(naive_errors) < 1e-4
    assert peak < naive_peak / 5
