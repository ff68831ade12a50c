"""Attention inside autodiff libraries: results and every gradient are those of `attention_vjp`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import cuflash

Array = Any
Arrays = dict[str, Array]
# From a call's inputs by name, constants and cotangents to (out, lse, gradients by name).
Differentiate = Callable[[Callable[..., Any], Arrays, Arrays, tuple[Array, Array]], tuple[Array, Array, Arrays]]
LIBRARIES = ("torch", "jax", "autograd", "mygrad", "thinc")
DIFFERENTIABLE = ("q", "k", "v", "bias", "sink", "alibi_slopes", "table")


@pytest.mark.parametrize("name", ["autograd", "mygrad"])
def test_arrays_of_a_graph_are_told_of_the_adapter(name: str) -> None:
    library = pytest.importorskip(name)
    met = []

    def loss(x: Array) -> Array:
        met.append(x)
        return (x * x).sum()

    x = np.ones((1, 2, 1, 4))
    _ = library.elementwise_grad(loss)(x) if name == "autograd" else loss(library.tensor(x))
    with pytest.raises(TypeError, match=f"q: .* of {name}: use attention of cuflash.adapters.{name}"):
        cuflash.attention(met[0], x, x)


def relative(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array, step: Array) -> Array:
    return s + table[h, np.clip(j - i, -4, 4) + 4] + step


def case(is_packed: bool, dtype: str = "float32") -> tuple[Arrays, Arrays, tuple[Array, Array]]:
    """Everything that has a gradient, everything else, and the cotangents of out and lse."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    leading = (9,) if is_packed else (2, 5)
    rows, heads = leading[-1], 4
    inputs = {"q": normal(*leading, heads, 8), "k": normal(*leading, 2, 8), "v": normal(*leading, 2, 6)}
    inputs |= {"bias": normal(heads, 6, 6) if is_packed else normal(heads, 5, 5), "sink": normal(heads)}
    inputs |= {"alibi_slopes": normal(2, heads), "table": normal(heads, 9)}
    options: Arrays = {"causal": True, "score_mod": relative, "step": np.array(2, np.int32)}
    if is_packed:
        options |= {"cu_seqlens": np.array([0, 3, 9], np.int32)}
    else:
        options |= {"mask": rng.random((2, 1, 5, 5)) < 0.8, "kv_lengths": np.array([5, 3], np.int32)}
    lse_shape = (heads, rows) if is_packed else (2, heads, rows)
    return inputs, options, (normal(*leading, heads, 6), normal(*lse_shape))


def call(module: Any, arrays: Arrays) -> tuple[Array, Array]:
    """(out, lse) of the case's call."""
    arrays = dict(arrays)
    inputs = [arrays.pop(name) for name in ("q", "k", "v")]
    operands = arrays.pop("table"), arrays.pop("step")
    cu_seqlens = arrays.pop("cu_seqlens", None)
    if cu_seqlens is None:
        return module.attention(*inputs, return_lse=True, operands=operands, **arrays)
    return module.attention_varlen(*inputs, cu_seqlens, cu_seqlens, return_lse=True, operands=operands, **arrays)


def by_torch(module: Any, inputs: Arrays, options: Arrays, cotangents: tuple[Array, Array]) -> Any:
    import torch

    variables = {name: torch.tensor(x, requires_grad=True) for name, x in inputs.items()}
    rest = {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    results = call(module, variables | rest)
    grads = torch.autograd.grad(results, list(variables.values()), [torch.tensor(x) for x in cotangents])
    return *(x.detach() for x in results), dict(zip(inputs, grads, strict=True))


def by_jax(module: Any, inputs: Arrays, options: Arrays, cotangents: tuple[Array, Array]) -> Any:
    import jax

    @jax.jit
    def both(inputs: Any, cotangents: Any) -> Any:
        results, vjp = jax.vjp(lambda inputs: call(module, inputs | options), inputs)
        return results, vjp(tuple(cotangents))[0]

    with jax.enable_x64(True):
        results, grads = both(inputs, cotangents)
    return *results, grads


def by_autograd(module: Any, inputs: Arrays, options: Arrays, cotangents: tuple[Array, Array]) -> Any:
    import autograd

    def both(inputs: Any) -> Any:
        return autograd.builtins.tuple(call(module, dict(inputs) | options))

    vjp, results = autograd.make_vjp(both)(inputs)
    return *results, vjp(cotangents)


def by_mygrad(module: Any, inputs: Arrays, options: Arrays, cotangents: tuple[Array, Array]) -> Any:
    import mygrad

    variables = {name: mygrad.tensor(x) for name, x in inputs.items()}
    results = call(module, variables | options)
    sum((x * dx).sum() for x, dx in zip(results, cotangents, strict=True)).backward()
    return *results, {name: x.grad for name, x in variables.items()}


def by_thinc(module: Any, inputs: Arrays, options: Arrays, cotangents: tuple[Array, Array]) -> Any:
    given = inputs | options
    qkv = [given.pop(name) for name in ("q", "k", "v")]
    operands = given.pop("table"), given.pop("step")
    cu_seqlens = given.pop("cu_seqlens", None)
    make = module.attention if cu_seqlens is None else module.attention_varlen
    learned = ["bias", "sink", "alibi_slopes", "operands"]
    layer = make(return_lse=True, operands=operands, learned=learned, **given)
    results, backprop = layer.begin_update(tuple(qkv if cu_seqlens is None else [*qkv, cu_seqlens, cu_seqlens]))
    grads = dict(zip(("q", "k", "v"), backprop(cotangents), strict=True))
    names = {"bias": "bias", "sink": "sink", "alibi_slopes": "alibi_slopes", "operand_0": "table"}
    return *results, grads | {to: layer.get_grad(name) for name, to in names.items()}


BY: dict[str, Differentiate] = {
    "torch": by_torch,
    "jax": by_jax,
    "autograd": by_autograd,
    "mygrad": by_mygrad,
    "thinc": by_thinc,
}


def adapter(library: str) -> Any:
    pytest.importorskip(library)
    return pytest.importorskip(f"cuflash.adapters.{library}")


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_and_gradients_are_those_of_attention_vjp(library: str, is_packed: bool) -> None:
    module = adapter(library)
    inputs, options, cotangents = case(is_packed)
    out, lse, grads = BY[library](module, inputs, options, cotangents)

    given = inputs | options
    positional = [given.pop(name) for name in ("q", "k", "v")]
    positional += [given["cu_seqlens"]] * 2 if is_packed else []
    given.pop("cu_seqlens", None)
    given["operands"] = given.pop("table"), given.pop("step")
    vjp: Any = cuflash.attention_varlen_vjp if is_packed else cuflash.attention_vjp
    (expected, expected_lse), backward = vjp(*positional, return_lse=True, **given)
    np.testing.assert_array_equal(np.asarray(out), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)
    found = backward(*cotangents)
    assert list(grads) == list(DIFFERENTIABLE) or set(grads) == set(DIFFERENTIABLE)
    for name, gradient in zip(DIFFERENTIABLE, found, strict=True):
        assert np.asarray(grads[name]).dtype == gradient.dtype
        # MyGrad adds up the gradients through out and through lse, which are rounded before.
        np.testing.assert_allclose(np.asarray(grads[name]), gradient, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_errors_are_those_of_cuflash(library: str) -> None:
    module = adapter(library)
    inputs, _, _ = case(False)
    qkv = [inputs[name] for name in ("q", "k", "v")]
    if library == "torch":
        import torch

        qkv = list(map(torch.tensor, qkv))

    def run(**options: Any) -> Any:
        if library == "thinc":
            return module.attention(**options).predict(tuple(qkv))
        return module.attention(*qkv, **options)

    with pytest.raises(TypeError, match="causal: expected a bool, got str"):
        run(causal="yes")
    with pytest.raises(ValueError, match=r"sink: expected \(num_heads_q,\) = \(4,\), got \(2, 2\)"):
        run(sink=qkv[0][0, :2, :2, 0])
    with pytest.raises(TypeError, match="no_such: no such option; expected one of causal"):
        run(no_such=1)
    with pytest.raises(TypeError, match="out: no such option"):
        run(out=qkv[0])
    with pytest.raises(TypeError, match="return_lse: expected a bool, got int"):
        run(return_lse=1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_adapter_says_what_to_install(library: str) -> None:
    """In a process of its own, without the library; the package of adapters imports none."""
    names = {"jax": "JAX", "torch": "PyTorch", "autograd": "HIPS autograd", "mygrad": "MyGrad", "thinc": "Thinc"}
    program = f"""if True:
        import sys
        import cuflash.adapters
        assert not {set(LIBRARIES)!r} & sys.modules.keys()
        sys.modules[{library!r}] = None
        try:
            import cuflash.adapters.{library}
        except ImportError as error:
            print(error)
        try:
            cuflash.adapters.{library}
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = f'cuflash.adapters.{library} needs {names[library]}: pip install "cuflash[{library}]"'
    assert done.stdout.splitlines() == [expected] * 2


def test_an_adapter_is_imported_when_it_is_asked_for() -> None:
    pytest.importorskip("autograd")
    program = "import cuflash; print(cuflash.adapters.autograd.attention.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cuflash.adapters.autograd"
    adapters: Any = cuflash.adapters
    with pytest.raises(
        AttributeError, match="no attribute 'numpy'; expected one of autograd, jax, mygrad, thinc, torch"
    ):
        _ = adapters.numpy


@pytest.mark.parametrize("library", ["torch", "jax", "autograd", "mygrad"])
def test_calls_in_the_way_of_another_library_get_hints(library: str) -> None:
    module = adapter(library)
    q = np.ones((1, 2, 2, 4), np.float32)
    if library == "torch":
        import torch

        q = torch.tensor(q)

    def assert_same(name: str, *arrays: Array, **options: Any) -> None:
        """The error is word for word that of cuflash's own function."""
        with pytest.raises(TypeError) as expected:
            getattr(cuflash, name)(*arrays, **options)
        with pytest.raises(TypeError) as met:
            getattr(module, name)(*arrays, **options)
        assert str(met.value) == str(expected.value)

    assert_same("attention", query=q, key=q, value=q)
    assert_same("attention", q, q)
    assert_same("attention", q, q, q, None, 0.0)
    assert_same("attention", q, q, q, is_causal=True)
    assert_same("attention", q, q, q, casual=True)
    assert_same("attention_varlen", q[0], q[0], q[0])
    assert_same("attention_varlen", q[0], q[0], q[0], q, q, 2, 2)
    assert_same("attention_varlen", q[0], q[0], q[0], q, q, max_seqlen_q=2)
    for name in ("attention", "attention_varlen"):
        shown = inspect.signature(getattr(module, name)).parameters
        assert "causal" in shown and "others" not in shown and shown["q"].default is inspect.Parameter.empty


def test_thinc_says_where_its_inputs_are_given() -> None:
    module = adapter("thinc")
    with pytest.raises(TypeError, match=r"by name alone, got 2 by position; the layer gets \(q, k, v\) as its input"):
        module.attention(1, 2)
    with pytest.raises(TypeError, match=r"query: no such option; the layer gets \(q, k, v\) as its input"):
        module.attention(query=1)
    with pytest.raises(TypeError, match="cu_seqlens_q: no such option; the layer gets .*cu_seqlens_q"):
        module.attention_varlen(cu_seqlens_q=1)
    with pytest.raises(TypeError, match="is_causal: no such option; cuflash calls it causal=True"):
        module.attention(is_causal=True)


def test_torch_gradcheck() -> None:
    """By torch's finite differences, in float64, with all that has a gradient."""
    torch = pytest.importorskip("torch")
    module = adapter("torch")
    rng = np.random.default_rng(0)
    shapes = ((1, 4, 2, 3), (1, 4, 1, 3), (1, 4, 1, 2), (2, 4, 4), (2,), (2,), (2, 9))
    tensors = [torch.tensor(rng.normal(size=shape), requires_grad=True) for shape in shapes]

    def function(q: Any, k: Any, v: Any, bias: Any, sink: Any, slopes: Any, table: Any) -> Any:
        operands = table, torch.tensor(2, dtype=torch.int32)
        extras = {"bias": bias, "sink": sink, "alibi_slopes": slopes, "score_mod": relative, "operands": operands}
        return module.attention(q, k, v, causal=True, return_lse=True, **extras)

    assert torch.autograd.gradcheck(function, tensors)


def test_torch_computes_no_gradient_that_nobody_wants() -> None:
    torch = pytest.importorskip("torch")
    module = adapter("torch")
    q = torch.randn(1, 5, 2, 4, requires_grad=True)
    bias = torch.randn(5, 5)
    asked: list[Any] = []
    original = cuflash.attention_backward

    def noting(*arguments: Any, **options: Any) -> Any:
        asked.append(options["grads"])
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuflash, "attention_backward", noting)
        module.attention(q, q.detach(), q.detach(), bias=bias).sum().backward()
    assert asked == [("q",)]
    assert bias.grad is None


def test_torch_func_and_no_grad() -> None:
    torch = pytest.importorskip("torch")
    module = adapter("torch")
    q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    gradient = torch.func.grad(lambda q: module.attention(q, k, v).square().sum())(q)
    variable = q.clone().requires_grad_()
    module.attention(variable, k, v).square().sum().backward()
    torch.testing.assert_close(gradient, variable.grad)
    with torch.no_grad():
        assert not module.attention(variable, k, v).requires_grad


def test_torch_checkpoints_and_compiled_functions() -> None:
    """Activation checkpointing of both kinds, and torch.compile, which leaves attention as it is."""
    torch = pytest.importorskip("torch")
    module = adapter("torch")
    table = torch.zeros(2, 9)

    def score_mod(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array) -> Array:
        return s + table[h, i - j + 4]

    def block(q: Any) -> Any:
        out, lse = module.attention(q * 2, q, q, return_lse=True, causal=True, score_mod=score_mod, operands=(table,))
        return out.sum() + lse.square().sum()

    def gradient(function: Callable[[Any], Any]) -> Any:
        q = torch.linspace(-1, 1, 80).reshape(1, 5, 2, 8).requires_grad_()
        function(q).backward()
        return q.grad

    expected = gradient(block)
    for reentrant in (True, False):
        again = gradient(partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=reentrant))
        assert torch.equal(again, expected)
    assert torch.equal(gradient(torch.compile(block, backend="aot_eager")), expected)


def test_thinc_constants_and_wrong_names() -> None:
    module = adapter("thinc")
    sink = np.zeros(4, np.float32)
    inputs, _, _ = case(False)
    layer = module.attention(sink=sink)  # a constant
    layer.begin_update(tuple(inputs[name] for name in ("q", "k", "v")))[1](np.ones((2, 5, 4, 6), np.float32))
    assert not layer.param_names
    with pytest.raises(ValueError, match="learned: expected names out of .*, got 'mask'"):
        module.attention(sink=sink, learned=["mask"])
    with pytest.raises(ValueError, match="learned: 'bias' is named, but not given among the options"):
        module.attention(sink=sink, learned=["bias"])
    with pytest.raises(TypeError, match="learned: expected a list of names"):
        module.attention(sink=sink, learned="sink")
    with pytest.raises(ValueError, match=r"attention: expected \(q, k, v\) as the layer's input, got 2"):
        layer.predict((inputs["q"], inputs["k"]))


def test_autograd_refuses_forward_mode() -> None:
    autograd = pytest.importorskip("autograd")
    module = adapter("autograd")
    q = np.ones((1, 3, 2, 4))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        autograd.make_jvp(lambda q: module.attention(q, q, q))(q)(q)
