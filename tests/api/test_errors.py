"""Every bad argument raises the promised type of error, with a message that says what was expected and what was met."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import np_dtype
from devices import Device

import cuflash
from cuflash.problem.options import OPTION_NAMES, Options

Row = tuple[dict[str, Any], type[Exception], tuple[str, ...]]

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV, DIM, DIM_V = 2, 6, 8, 4, 2, 16, 12
TOTAL_Q, TOTAL_K = 10, 14


def zeros(*shape: int, dtype: str = "float32") -> Any:
    return np.zeros(shape, np_dtype(dtype))


def call(device: Device, form: str, packed: bool = False, **changes: Any) -> Any:
    """Make a call of one form ("", "_vjp", "_backward") with valid arguments, but for the `changes` by name."""
    if packed:
        arguments = {
            "q": zeros(TOTAL_Q, HEADS_Q, DIM),
            "k": zeros(TOTAL_K, HEADS_KV, DIM),
            "v": zeros(TOTAL_K, HEADS_KV, DIM_V),
            "forward_out": zeros(TOTAL_Q, HEADS_Q, DIM_V),
            "lse": zeros(HEADS_Q, TOTAL_Q),
            "cu_seqlens_q": np.array([0, 4, 9], np.int32),
            "cu_seqlens_k": np.array([0, 8, 14], np.int32),
        }
    else:
        arguments = {
            "q": zeros(BATCH, SEQLEN_Q, HEADS_Q, DIM),
            "k": zeros(BATCH, SEQLEN_K, HEADS_KV, DIM),
            "v": zeros(BATCH, SEQLEN_K, HEADS_KV, DIM_V),
            "forward_out": zeros(BATCH, SEQLEN_Q, HEADS_Q, DIM_V),
            "lse": zeros(BATCH, HEADS_Q, SEQLEN_Q),
        }
    arguments["dout"] = arguments["forward_out"]
    names = ["dout", "q", "k", "v", "forward_out", "lse"] if form == "_backward" else ["q", "k", "v"]
    names += ["cu_seqlens_q", "cu_seqlens_k"] if packed else []
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    arguments.update({name: changes.pop(name) for name in arguments.keys() & changes.keys()})
    function = getattr(cuflash, ("attention_varlen" if packed else "attention") + form)
    positional, options = device.put(([arguments[name] for name in names], changes))
    return function(*positional, **options)


def check(error: type[Exception], fragments: tuple[str, ...], attempt: Callable[[], Any]) -> None:
    """Assert that `attempt` raises exactly `error`, and that its message has all `fragments`."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        attempt()
    assert caught.type is error, f"expected {error.__name__}, got {caught.type.__name__}: {caught.value}"
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"


def block_mask(*shape: int) -> Callable[[], cuflash.BlockMask]:
    return lambda: cuflash.BlockMask.from_dense(np.ones(shape, bool))


INPUTS: dict[str, Row] = {
    "k head dim": (
        {"k": zeros(2, 8, 2, 80)},
        ValueError,
        ("k: expected (batch, seqlen_k, num_heads_kv, head_dim) = (2, *, *, 16), got (2, 8, 2, 80)",),
    ),
    "q rank": (
        {"q": zeros(2, 6, 16)},
        ValueError,
        ("q: expected (batch, seqlen_q, num_heads_q, head_dim)", "(2, 6, 16)"),
    ),
    "k rank": (
        {"k": zeros(8, 2, 16)},
        ValueError,
        ("k: expected (batch, seqlen_k, num_heads_kv, head_dim)", "(8, 2, 16)"),
    ),
    "v rank": ({"v": zeros(16)}, ValueError, ("v: expected (batch, seqlen_k, num_heads_kv, head_dim_v)", "(16,)")),
    "q int": (
        {"q": zeros(2, 6, 4, 16, dtype="int32")},
        TypeError,
        ("q:", "float16, bfloat16, float32, float64", "int32"),
    ),
    "q complex": ({"q": zeros(2, 6, 4, 16, dtype="complex64")}, TypeError, ("q:", "float32", "complex64")),
    "q list": ({"q": [[[[0.0]]]]}, TypeError, ("q:", "list")),
    "q none": ({"q": None}, TypeError, ("q:", "None")),
    "k none": ({"k": None}, TypeError, ("k:", "None")),
    "k dtype": ({"k": zeros(2, 8, 2, 16, dtype="float16")}, TypeError, ("k:", "float32", "float16")),
    "v dtype": ({"v": zeros(2, 8, 2, 12, dtype="bfloat16")}, TypeError, ("v:", "float32", "bfloat16")),
    "k batch": ({"k": zeros(3, 8, 2, 16)}, ValueError, ("k:", "(2, *, *, 16)", "(3, 8, 2, 16)")),
    "v batch": ({"v": zeros(1, 8, 2, 12)}, ValueError, ("v:", "(2, 8, 2, *)", "(1, 8, 2, 12)")),
    "v length": ({"v": zeros(2, 9, 2, 12)}, ValueError, ("v:", "(2, 8, 2, *)", "(2, 9, 2, 12)")),
    "v heads": ({"v": zeros(2, 8, 4, 12)}, ValueError, ("v:", "(2, 8, 2, *)", "(2, 8, 4, 12)")),
    "heads": (
        {"k": zeros(2, 8, 3, 16), "v": zeros(2, 8, 3, 12)},
        ValueError,
        ("multiple", "num_heads_q = 4", "num_heads_kv = 3"),
    ),
    "more kv heads": (
        {"k": zeros(2, 8, 8, 16), "v": zeros(2, 8, 8, 12)},
        ValueError,
        ("multiple", "num_heads_q = 4", "num_heads_kv = 8"),
    ),
    "no kv heads": ({"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 12)}, ValueError, ("num_heads_kv = 0",)),
    "head dim 0": (
        {"q": zeros(2, 6, 4, 0), "k": zeros(2, 8, 2, 0)},
        ValueError,
        ("head_dim", "expected 1 to 1024, got 0"),
    ),
    "head dim 1025": (
        {"q": zeros(2, 6, 4, 1025), "k": zeros(2, 8, 2, 1025)},
        NotImplementedError,
        ("head_dim", "expected 1 to 1024, got 1025"),
    ),
    "head dim v 1100": (
        {"v": zeros(2, 8, 2, 1100), "forward_out": zeros(2, 6, 4, 1100), "dout": zeros(2, 6, 4, 1100)},
        NotImplementedError,
        ("head_dim_v", "expected 1 to 1024, got 1100"),
    ),
}

OPTIONS: dict[str, Row] = {
    "unknown": ({"casual": True}, TypeError, ("casual",)),
    "causal string": ({"causal": "no"}, TypeError, ("causal", "bool", "str")),
    "causal number": ({"causal": 1}, TypeError, ("causal", "bool", "int")),
    "causal none": ({"causal": None}, TypeError, ("causal", "bool", "NoneType")),
    "scale too large": ({"softmax_scale": 10**400}, ValueError, ("softmax_scale", "finite", "inf")),
    "scale nan": ({"softmax_scale": float("nan")}, ValueError, ("softmax_scale", "finite", "nan")),
    "scale inf": ({"softmax_scale": float("-inf")}, ValueError, ("softmax_scale", "finite", "-inf")),
    "scale beyond float32": ({"softmax_scale": 1e39}, ValueError, ("softmax_scale", "finite in float32", "1e+39")),
    "scale far below float32": ({"softmax_scale": -(10**39)}, ValueError, ("softmax_scale", "float32", "-1e+39")),
    "scale string": ({"softmax_scale": "1"}, TypeError, ("softmax_scale", "number", "str")),
    "softcap negative": ({"softcap": -30.0}, ValueError, ("softcap", "None", "-30")),
    "softcap nan": ({"softcap": float("nan")}, ValueError, ("softcap", "nan")),
    "softcap list": ({"softcap": [30.0]}, TypeError, ("softcap", "number", "list")),
    "window left": ({"window": (-1, 0)}, ValueError, ("window", "None", "-1")),
    "window right": ({"window": (None, -2)}, ValueError, ("window", "None", "-2")),
    "window int": ({"window": 128}, TypeError, ("window", "(left, right)", "int")),
    "window three": ({"window": (1, 2, 3)}, ValueError, ("window", "(left, right)", "3")),
    "window float": ({"window": (1.5, None)}, TypeError, ("window", "integer", "float")),
    "bias int": ({"bias": zeros(6, 8, dtype="int32")}, TypeError, ("bias", "float32", "int32")),
    "bias bool": ({"bias": zeros(6, 8, dtype="bool")}, TypeError, ("bias", "float32", "bool", "mask")),
    "bias half": ({"bias": zeros(6, 8, dtype="float16")}, TypeError, ("bias", "float32", "float16")),
    "bias double": ({"bias": zeros(6, 8, dtype="float64")}, TypeError, ("bias", "float32", "float64")),
    "bias list": ({"bias": [0.0]}, TypeError, ("bias", "list")),
    "bias keys": ({"bias": zeros(6, 9)}, ValueError, ("bias", "(2, 4, 6, 8)", "(6, 9)")),
    "bias kv heads": ({"bias": zeros(2, 2, 6, 8)}, ValueError, ("bias", "(2, 4, 6, 8)", "(2, 2, 6, 8)")),
    "bias rank 5": ({"bias": zeros(1, 2, 4, 6, 8)}, ValueError, ("bias", "(2, 4, 6, 8)", "(1, 2, 4, 6, 8)")),
    "mask float": ({"mask": zeros(6, 8)}, TypeError, ("mask", "bool", "float32", "bias")),
    "mask uint8": ({"mask": zeros(6, 8, dtype="uint8")}, TypeError, ("mask", "bool", "uint8", "bias")),
    "mask rows": ({"mask": zeros(7, 8, dtype="bool")}, ValueError, ("mask", "(2, 4, 6, 8)", "(7, 8)")),
    "alibi dtype": ({"alibi_slopes": zeros(4, dtype="float16")}, TypeError, ("alibi_slopes", "float32", "float16")),
    "alibi shape": ({"alibi_slopes": zeros(2)}, ValueError, ("alibi_slopes", "(4,)", "(2,)")),
    "alibi batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, ("alibi_slopes", "(2, 4)", "(3, 4)")),
    "alibi number": ({"alibi_slopes": 0.5}, TypeError, ("alibi_slopes", "float")),
    "sink dtype": ({"sink": zeros(4, dtype="float64")}, TypeError, ("sink", "float32", "float64")),
    "sink shape": ({"sink": zeros(2, 4)}, ValueError, ("sink", "(4,)", "(2, 4)")),
    "q_lengths dtype": ({"q_lengths": zeros(2, dtype="int64")}, TypeError, ("q_lengths", "int32", "int64")),
    "q_lengths shape": ({"q_lengths": zeros(3, dtype="int32")}, ValueError, ("q_lengths", "(2,)", "(3,)")),
    "kv_lengths dtype": ({"kv_lengths": zeros(2)}, TypeError, ("kv_lengths", "int32", "float32")),
    "kv_lengths shape": ({"kv_lengths": zeros(2, 1, dtype="int32")}, ValueError, ("kv_lengths", "(2,)", "(2, 1)")),
    "kv_lengths list": ({"kv_lengths": [8, 8]}, TypeError, ("kv_lengths", "list")),
    "dropout negative": (
        {"dropout_p": -0.1, "dropout_seed": 0},
        ValueError,
        ("dropout_p", "0 <= dropout_p < 1", "-0.1"),
    ),
    "dropout 1": ({"dropout_p": 1.0, "dropout_seed": 0}, ValueError, ("dropout_p", "0 <= dropout_p < 1", "1.0")),
    "dropout nan": ({"dropout_p": float("nan"), "dropout_seed": 0}, ValueError, ("dropout_p", "nan")),
    "dropout string": ({"dropout_p": "0.1", "dropout_seed": 0}, TypeError, ("dropout_p", "number", "str")),
    "no seed": ({"dropout_p": 0.1}, ValueError, ("dropout_seed", "uint64", "None")),
    "seed negative": ({"dropout_p": 0.1, "dropout_seed": -1}, ValueError, ("dropout_seed", "2**64", "-1")),
    "seed 2**64": ({"dropout_p": 0.1, "dropout_seed": 2**64}, ValueError, ("dropout_seed", str(2**64))),
    "seed float": ({"dropout_p": 0.1, "dropout_seed": 7.0}, TypeError, ("dropout_seed", "int", "float")),
    "seed int64": ({"dropout_p": 0.1, "dropout_seed": zeros(1, dtype="int64")}, TypeError, ("uint64", "int64")),
    "two seeds": ({"dropout_p": 0.1, "dropout_seed": zeros(2, dtype="uint64")}, ValueError, ("dropout_seed", "(2,)")),
    "block mask array": ({"block_mask": zeros(6, 8, dtype="bool")}, TypeError, ("block_mask", "BlockMask", "ndarray")),
    "block mask keys": ({"block_mask": block_mask(6, 9)}, ValueError, ("block_mask", "(2, 4, 6, 8)", "(1, 1, 6, 9)")),
    "block mask kv heads": ({"block_mask": block_mask(2, 6, 8)}, ValueError, ("block_mask", "(1, 2, 6, 8)")),
    "block mask of B, H, Q, K": (
        {"block_mask": block_mask(6, 8, 2, 4)},
        ValueError,
        ("where (batch, num_heads_q, seqlen_q, seqlen_k) is (2, 4, 6, 8)", "takes seqlen_q and seqlen_k before batch"),
    ),
    "block mask batch": ({"block_mask": block_mask(3, 4, 6, 8)}, ValueError, ("block_mask", "(3, 4, 6, 8)")),
    "deterministic": ({"deterministic": "yes"}, TypeError, ("deterministic", "bool", "str")),
    "deterministic number": ({"deterministic": 0}, TypeError, ("deterministic", "bool", "int")),
    "precision": ({"precision": "fp8"}, ValueError, ("precision", "tf32", "fp8")),
    "precision number": ({"precision": 32}, TypeError, ("precision", "tf32", "int")),
}

PACKED: dict[str, Row] = {
    "q padded": (
        {"q": zeros(2, 6, 4, 16)},
        ValueError,
        ("q: expected (total_q, num_heads_q, head_dim)", "(2, 6, 4, 16)"),
    ),
    "k head dim": (
        {"k": zeros(14, 2, 8)},
        ValueError,
        ("k: expected (total_k, num_heads_kv, head_dim) = (*, *, 16), got (14, 2, 8)",),
    ),
    "v length": ({"v": zeros(13, 2, 12)}, ValueError, ("v:", "(14, 2, *)", "(13, 2, 12)")),
    "cu none": ({"cu_seqlens_k": None}, TypeError, ("cu_seqlens_k", "int32", "None")),
    "cu list": ({"cu_seqlens_q": [0, 4, 9]}, TypeError, ("cu_seqlens_q", "list")),
    "cu int64": ({"cu_seqlens_q": zeros(3, dtype="int64")}, TypeError, ("cu_seqlens_q", "int32", "int64")),
    "cu rank": ({"cu_seqlens_q": zeros(1, 3, dtype="int32")}, ValueError, ("cu_seqlens_q", "(batch + 1,)", "(1, 3)")),
    "cu empty": ({"cu_seqlens_k": zeros(0, dtype="int32")}, ValueError, ("cu_seqlens_k", "(batch + 1,)", "(0,)")),
    "cu counts": ({"cu_seqlens_k": zeros(4, dtype="int32")}, ValueError, ("cu_seqlens_k", "3", "4")),
    "lengths": ({"kv_lengths": zeros(3, dtype="int32")}, ValueError, ("kv_lengths", "(2,)", "(3,)")),
    "bias heads": ({"bias": zeros(2, 3, 9, 9)}, ValueError, ("bias", "(2, 4, *, *)", "(2, 3, 9, 9)")),
    "block mask heads": ({"block_mask": block_mask(3, 9, 9)}, ValueError, ("block_mask", "(1, 3, 9, 9)")),
    "alibi": ({"alibi_slopes": zeros(3, 4)}, ValueError, ("alibi_slopes", "(2, 4)", "(3, 4)")),
}

BACKWARD: dict[str, Row] = {
    "dout dtype": ({"dout": zeros(2, 6, 4, 12, dtype="float16")}, TypeError, ("dout", "float32", "float16")),
    "dout shape": ({"dout": zeros(2, 6, 4, 16)}, ValueError, ("dout", "(2, 6, 4, 12)", "(2, 6, 4, 16)")),
    "dout none": ({"dout": None}, TypeError, ("dout", "None")),
    "out dtype": ({"forward_out": zeros(2, 6, 4, 12, dtype="float64")}, TypeError, ("out", "float32", "float64")),
    "out shape": ({"forward_out": zeros(2, 4, 6, 12)}, ValueError, ("out", "(2, 6, 4, 12)", "(2, 4, 6, 12)")),
    "lse dtype": ({"lse": zeros(2, 4, 6, dtype="float16")}, TypeError, ("lse", "float32", "float16")),
    "lse double": ({"lse": zeros(2, 4, 6, dtype="float64")}, TypeError, ("lse", "float32", "float64")),
    "lse shape": ({"lse": zeros(2, 6, 4)}, ValueError, ("lse", "(2, 4, 6)", "(2, 6, 4)")),
    "lse none": ({"lse": None}, TypeError, ("lse", "None")),
    "dlse dtype": ({"dlse": zeros(2, 4, 6, dtype="float16")}, TypeError, ("dlse", "float32", "float16")),
    "dlse shape": ({"dlse": zeros(2, 6, 4)}, ValueError, ("dlse", "(2, 4, 6)", "(2, 6, 4)")),
    "grads name": ({"grads": ("q", "w")}, ValueError, ("grads", "w")),
    "grads not given": ({"grads": ("q", "bias")}, ValueError, ("grads", "bias")),
    "grads string": ({"grads": "qkv"}, TypeError, ("grads", "qkv")),
    "out array": ({"out": zeros(2, 6, 4, 16)}, TypeError, ("out", "(dq, dk, dv)", "ndarray")),
    "out two": ({"out": (zeros(2, 6, 4, 16), zeros(2, 8, 2, 16))}, ValueError, ("out", "(dq, dk, dv)", "2")),
    "out of what is not wanted": (
        {"out": lambda: (zeros(2, 6, 4, 16), zeros(2, 8, 2, 16), None), "grads": ("q",)},
        ValueError,
        ("out, dk: expected None", "grads does not name k", "ndarray"),
    ),
    "out dtype of dk": (
        {"out": lambda: (zeros(2, 6, 4, 16), zeros(2, 8, 2, 16, dtype="float16"), zeros(2, 8, 2, 12))},
        TypeError,
        ("dk", "float32", "float16"),
    ),
    "out shape of dv": (
        {"out": lambda: (zeros(2, 6, 4, 16), zeros(2, 8, 2, 16), zeros(2, 8, 2, 16))},
        ValueError,
        ("dv", "(2, 8, 2, 12)", "(2, 8, 2, 16)"),
    ),
}

OUT: dict[str, Row] = {
    "dtype": ({"out": zeros(2, 6, 4, 12, dtype="float16")}, TypeError, ("out", "float32", "float16")),
    "shape": ({"out": zeros(2, 6, 4, 16)}, ValueError, ("out", "(2, 6, 4, 12)", "(2, 6, 4, 16)")),
    "rows": ({"out": lambda: zeros(2, 6, 4, 24)[..., ::2]}, ValueError, ("out", "contiguous", "8")),
    "backwards": ({"out": lambda: zeros(2, 6, 4, 12)[..., ::-1]}, ValueError, ("out", "contiguous", "-4")),
    "list": ({"out": [0.0]}, TypeError, ("out", "list")),
    "lse string": ({"return_lse": "no"}, TypeError, ("return_lse", "expected a bool", "str")),
    "lse number": ({"return_lse": 1}, TypeError, ("return_lse", "expected a bool", "int")),
    "lse none": ({"return_lse": None}, TypeError, ("return_lse", "expected a bool", "NoneType")),
    "lse array": ({"return_lse": zeros(2, dtype="bool")}, TypeError, ("return_lse", "expected a bool", "ndarray")),
}


def table(rows: dict[str, Row]) -> Any:
    """Parametrize a test over a table's rows."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in rows.items()])


@pytest.mark.parametrize("form", ["", "_vjp", "_backward"])
@pytest.mark.parametrize("packed", [False, True])
def test_valid_arguments_pass(device: Device, form: str, packed: bool) -> None:
    """The calls that the tables below change are right before."""
    call(device, form, packed)


@pytest.mark.parametrize("form", ["", "_vjp", "_backward"])
@table({**INPUTS, **OPTIONS})
def test_padded(device: Device, form: str, row: Row) -> None:
    changes, error, fragments = row
    check(error, fragments, lambda: call(device, form, **changes))


@pytest.mark.parametrize("form", ["", "_vjp", "_backward"])
@table(PACKED)
def test_packed(device: Device, form: str, row: Row) -> None:
    changes, error, fragments = row
    check(error, fragments, lambda: call(device, form, packed=True, **changes))


@table(BACKWARD)
def test_backward(device: Device, row: Row) -> None:
    changes, error, fragments = row
    check(error, fragments, lambda: call(device, "_backward", **changes))


@table({name: row for name, row in BACKWARD.items() if not {"forward_out", "lse"} & row[0].keys()})
def test_backward_of_vjp(device: Device, row: Row) -> None:
    """The function that attention_vjp returns checks its arguments alike."""
    changes, error, fragments = row
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    arguments = device.put({"dout": zeros(2, 6, 4, 12), **changes})
    _, backward = call(device, "_vjp")
    check(error, fragments, lambda: backward(arguments.pop("dout"), arguments.pop("dlse", None), **arguments))


@pytest.mark.parametrize("form", ["", "_vjp"])
@table(OUT)
def test_out(device: Device, form: str, row: Row) -> None:
    changes, error, fragments = row
    check(error, fragments, lambda: call(device, form, **changes))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_beside_each_input_dtype(device: Device, dtype: str) -> None:
    """A bias has q's dtype or float32; sink, slopes and lse have float32, or float64 where q has."""
    accum, other = ("float64", "float32") if dtype == "float64" else ("float32", "float64")
    inputs = {
        "q": zeros(2, 6, 4, 16, dtype=dtype),
        "k": zeros(2, 8, 2, 16, dtype=dtype),
        "v": zeros(2, 8, 2, 12, dtype=dtype),
    }
    for bias_dtype in ("float16", "bfloat16", "float32", "float64"):
        if bias_dtype in (dtype, "float32"):
            call(device, "", **inputs, bias=zeros(6, 8, dtype=bias_dtype))
        else:
            wrong = {**inputs, "bias": zeros(6, 8, dtype=bias_dtype)}
            check(TypeError, ("bias", dtype, bias_dtype), partial(call, device, "", **wrong))
    call(device, "", **inputs, sink=zeros(4, dtype=accum), alibi_slopes=zeros(4, dtype=accum))
    for name in ("sink", "alibi_slopes"):
        wrong = {**inputs, name: zeros(4, dtype=other)}
        check(TypeError, (name, accum, other), partial(call, device, "", **wrong))
    out = zeros(2, 6, 4, 12, dtype=dtype)
    residuals = {"dout": out, "forward_out": out, "lse": zeros(2, 4, 6, dtype=other)}
    check(TypeError, ("lse", accum, other), lambda: call(device, "_backward", **inputs, **residuals))


def test_bools_of_numpy_are_bools(device: Device) -> None:
    for value in (np.True_, np.False_):
        results = call(device, "", return_lse=value, causal=value, deterministic=value)
        assert isinstance(results, tuple) == bool(value)
        results, _ = call(device, "_vjp", return_lse=value)
        assert isinstance(results, tuple) == bool(value)


def test_scales_that_each_dtype_takes(device: Device) -> None:
    """A scale is finite in the type of the arithmetic: float64 for float64, float32 for all others."""
    large = 2e38  # a kernel's product of it with log2(e) is finite, too
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        inputs = {"q": zeros(2, 6, 4, 16, dtype=dtype), "k": zeros(2, 8, 2, 16, dtype=dtype)}
        inputs["v"] = np.ones((2, 8, 2, 12), np_dtype(dtype))
        for scale in (large, -large, 1e-60):
            assert (device.get(call(device, "", **inputs, softmax_scale=scale)) == 1).all()
        beyond = partial(call, device, "", **inputs, softmax_scale=2 * large)
        if dtype == "float64":
            assert (device.get(beyond()) == 1).all()
        else:
            check(ValueError, ("softmax_scale", "finite in float32"), beyond)


def test_options_are_keyword_only(device: Device) -> None:
    arrays = device.put((zeros(2, 6, 4, 16), zeros(2, 8, 2, 16), zeros(2, 8, 2, 12)))
    functions: list[Callable[..., Any]] = [cuflash.attention, cuflash.attention_vjp]
    for function in functions:
        check(TypeError, ("positional",), partial(function, *arrays, True))


@pytest.mark.parametrize("packed", ["", "_varlen"])
@pytest.mark.parametrize("form", ["", "_backward", "_vjp"])
def test_signatures_name_every_option(form: str, packed: str) -> None:
    """Signatures show every option as users see them in `help`."""
    parameters = inspect.signature(getattr(cuflash, f"attention{packed}{form}")).parameters
    own = ["dout", "q", "k", "v", "forward_out", "lse"] if form == "_backward" else ["q", "k", "v"]
    own += ["cu_seqlens_q", "cu_seqlens_k"] if packed else []
    own += ["dlse", "out", "grads"] if form == "_backward" else ["out", "return_lse"]
    assert list(parameters) == [*own, *OPTION_NAMES]
    for field in fields(Options):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default


def test_a_valid_call_before_hides_no_error(device: Device) -> None:
    """Checks that a call like it has passed are remembered, and what it does not share with that call is checked."""
    call(device, "", dropout_p=0.25, dropout_seed=3)
    check(ValueError, ("dropout_seed", "None"), lambda: call(device, "", dropout_p=0.25))
    check(ValueError, ("dropout_seed", "-1"), lambda: call(device, "", dropout_p=0.25, dropout_seed=-1))
    seed = zeros(3, dtype="uint64")
    check(ValueError, ("dropout_seed", "(3,)"), lambda: call(device, "", dropout_p=0.25, dropout_seed=seed))
    call(device, "", window=(1, 0), softmax_scale=1)
    check(TypeError, ("window", "float"), lambda: call(device, "", window=(1.0, 0), softmax_scale=1))
    check(TypeError, ("window", "bool"), lambda: call(device, "", window=(True, 0), softmax_scale=1))
    check(TypeError, ("softmax_scale", "bool"), lambda: call(device, "", window=(1, 0), softmax_scale=True))
