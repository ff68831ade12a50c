"""Attention over keys in host memory gives the results of `attention` on the same arrays, whatever the options."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from lazy_device import LazyDevice
from numpy.typing import NDArray
from offload_cases import arrays, assert_same, options_by_name, results
from strategies import examples

import cuflash
from cuflash import offload
from cuflash.offload import share as share_module
from cuflash.offload.call import SUPPORTED
from cuflash.problem.options import OPTION_NAMES

Array = NDArray[Any]
RNG = np.random.default_rng(0)
SHARES = (0, 0.4, 1.0, "auto")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[LazyDevice]:
    """Run every pass on a lazy device of its own, in chunks of a few keys, and give the devices by their passes."""
    made: list[LazyDevice] = []

    def device_of(q: Array) -> LazyDevice:
        made.append(LazyDevice())
        return made[-1]

    monkeypatch.setattr(offload, "device_of", device_of)
    return made


@pytest.fixture(autouse=True)
def nothing_measured() -> Iterator[None]:
    share_module._measured.clear()
    yield
    share_module._measured.clear()


NAMES = tuple(options_by_name())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_streamed(streamed: list[LazyDevice], name: str, share: Any) -> None:
    given, options = arrays(), options_by_name()[name]
    assert_same(
        results(offload.attention_vjp, given, share=share, **options), results(cuflash.attention_vjp, given, **options)
    )
    assert len(streamed) == 2
    assert all(device.is_closed for device in streamed)


@pytest.mark.parametrize("name", ["alibi_slopes", "alibi_slopes by batch", "window", "rules and all", "dropout"])
def test_as_many_queries_as_keys(streamed: list[LazyDevice], name: str) -> None:
    """The first chunk begins where the whole does, and its last key is not the last query's."""
    given, options = arrays(seqlens=(40, 40)), options_by_name(seqlens=(40, 40))[name]
    options.pop("kv_lengths", None)
    assert_same(
        results(offload.attention_vjp, given, share=0, **options), results(cuflash.attention_vjp, given, **options)
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_option_in_host_memory(name: str) -> None:
    given, options = arrays(), options_by_name()[name]
    for share in SHARES:
        found = results(offload.attention_vjp, given, share=share, **options)
        assert_same(found, results(cuflash.attention_vjp, given, **options))


def test_every_option_is_tried_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {name for options in options_by_name().values() for name in options}
    of_host_keys = {"block_table", "split_size", "q_scale", "k_scale", "v_scale"}  # test_host_keys.py tries these
    assert tried | of_host_keys == set(SUPPORTED)
    q, k, v, *_ = arrays().values()
    monkeypatch.setattr("cuflash.offload.in_place.is_in_place", lambda *_: False)  # as with q on a GPU
    monkeypatch.setattr("cuflash.offload.call.SUPPORTED", tuple(set(SUPPORTED) - {"softcap"}))
    for name in {"softcap", *OPTION_NAMES} - (set(SUPPORTED) - {"softcap"}):
        offload.attention(q, k, v, **{name: None})  # type: ignore[call-overload]
        with pytest.raises(NotImplementedError, match=f"{name}: expected None with keys in host memory"):
            offload.attention(q, k, v, **{name: 3})  # type: ignore[call-overload]


@pytest.mark.parametrize("share", SHARES)
def test_pages_codes_and_fixed_splits_in_host_memory(share: Any) -> None:
    given = arrays()
    fixed = {"split_size": 16, "causal": True}
    assert_same(
        results(offload.attention_vjp, given, share=share, **fixed), results(cuflash.attention_vjp, given, **fixed), 0
    )
    pools = given | {name: given[name].reshape(12, 10, 2, -1) for name in ("k", "v")}
    table = RNG.permutation(12).reshape(2, 6).astype(np.int32)
    paged = {"block_table": table, "kv_lengths": np.array([60, 13], np.int32), "causal": True}
    assert_same(
        results(offload.attention_vjp, pools, share=share, **paged), results(cuflash.attention_vjp, pools, **paged), 0
    )
    (k, k_scale), (v, v_scale) = (cuflash.quantize_fp8(given[name].astype(np.float32)) for name in ("k", "v"))
    codes = given["q"].astype(np.float16), k, v
    scales: dict[str, Any]
    for scales in ({}, {"k_scale": k_scale, "v_scale": v_scale}):
        out = np.empty((2, 7, 4, 5), np.float16)
        in_host_memory: Any = offload.attention
        in_one_memory: Any = cuflash.attention
        assert in_host_memory(*codes, share=share, out=out, **scales) is out
        np.testing.assert_array_equal(out, in_one_memory(*codes, **scales))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_of_results(streamed: list[LazyDevice], dtype: str) -> None:
    given = arrays(dtype)
    given["dout"] = given["dout"].astype(np.float32)
    found = results(offload.attention_vjp, given, share=0.3, out_dtype="float32")
    expected = results(cuflash.attention_vjp, given, out_dtype="float32")
    for name in ("out", "lse"):
        assert_same({name: found[name]}, {name: expected[name]}, rounding=1e-5)
    assert_same(found, expected, rounding=2e-2)


def test_gradients_of_operands_by_name(streamed: list[LazyDevice]) -> None:
    given = arrays()
    table = RNG.standard_normal((4, 60))
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j, t: s + t[h, j], "operands": (table,)}
    _, backward = offload.attention_vjp(given["q"], given["k"], given["v"], share=0.3, **options)
    *others, found = backward(given["dout"], grads=("operands",))
    assert others == [None] * 3
    target = np.empty_like(table)
    *_, written = backward(given["dout"], out=(None, None, None, target))
    assert written is target
    with pytest.raises(ValueError, match=r"^out, doperands\[0\]: .* shared with operands\[0\]$"):
        backward(given["dout"], out=(None, None, None, table))
    expected = cuflash.attention_vjp(given["q"], given["k"], given["v"], **options)[1](given["dout"])[3]
    assert_same({"found": found, "written": written}, {"found": expected, "written": expected})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_partial_results_are_not_rounded(streamed: list[LazyDevice], dtype: str) -> None:
    """Many chunks cost no accuracy, as the error is one rounding of the result, as of one call."""
    given = arrays(dtype, seqlens=(5, 300), dims=(16, 16))
    sink = RNG.standard_normal(4).astype(np.float32)
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    exact = results(cuflash.attention_vjp, wide, sink=sink.astype(np.float64), softcap=4.0)
    found = results(offload.attention_vjp, given, share=0.3, sink=sink, softcap=4.0)
    alone = results(cuflash.attention_vjp, given, sink=sink, softcap=4.0)
    for name, x in exact.items():
        assert x is not None
        error, its = (np.abs(np.asarray(y[name], np.float64) - x).max() for y in (found, alone))
        assert error <= 1.25 * its + 1e-6, name


@examples(150)
@given(st.data())
def test_drawn_problems(data: st.DataObject) -> None:
    rng_seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(rng_seed)
    batch, kv = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))
    heads = kv * data.draw(st.integers(1, 3))
    sq, sk = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 90))
    d, dv = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    shapes = {"q": (batch, sq, heads, d), "k": (batch, sk, kv, d), "v": (batch, sk, kv, dv)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    given |= {"dout": rng.standard_normal((batch, sq, heads, dv)), "dlse": rng.standard_normal((batch, heads, sq))}
    sides = st.none() | st.integers(0, 40)
    options: dict[str, Any] = {"causal": data.draw(st.booleans()), "window": (data.draw(sides), data.draw(sides))}
    if data.draw(st.booleans()):
        options["kv_lengths"] = rng.integers(-1, sk + 2, batch).astype(np.int32)
    if data.draw(st.booleans()):
        options["q_lengths"] = rng.integers(-1, sq + 2, batch).astype(np.int32)
    if data.draw(st.booleans()):
        options["alibi_slopes"] = rng.uniform(0, 0.2, (batch, heads))
    if data.draw(st.booleans()):
        options["sink"] = rng.standard_normal(heads)
    share = data.draw(st.sampled_from((0, 0.3, 1)))
    device = LazyDevice(chunk_bytes=data.draw(st.integers(1, 4000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "device_of", lambda q: device)
        found = results(offload.attention_vjp, given, share=share, **options)
    assert_same(found, results(cuflash.attention_vjp, given, **options), 1e-11)


def test_hidden_keys_never_leak(streamed: list[LazyDevice]) -> None:
    given = arrays()
    options: dict[str, Any] = {"kv_lengths": np.array([50, 33], np.int32), "mask": np.arange(60) % 16 != 5}
    expected = results(offload.attention_vjp, given, share=0.5, **options)
    for x in (given["k"], given["v"]):
        x[0, 50:], x[1, 33:], x[:, 5::16] = np.nan, np.inf, np.nan
    found = results(offload.attention_vjp, given, share=0.5, **options)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)


def test_one_visible_key_is_returned_exactly(streamed: list[LazyDevice]) -> None:
    given = arrays("bfloat16", seqlens=(60, 60), heads=(2, 2))
    out = offload.attention(given["q"], given["k"], given["v"], window=(0, 0), share=0.5)
    np.testing.assert_array_equal(out, given["v"])
    assert out.dtype == ml_dtypes.bfloat16


def test_grads_names_those_wanted(streamed: list[LazyDevice]) -> None:
    given = arrays()
    options: dict[str, Any] = {"bias": RNG.standard_normal((7, 60)), "sink": RNG.standard_normal(4)}
    _, backward = offload.attention_vjp(given["q"], given["k"], given["v"], share=0.3, **options)
    _, expected = cuflash.attention_vjp(given["q"], given["k"], given["v"], **options)
    for wanted in (("k",), ("q", "sink"), ("v", "bias"), ()):
        for x, y in zip(backward(given["dout"], grads=wanted), expected(given["dout"], grads=wanted), strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)
    assert streamed[-1].taken == 0  # neither dk nor dv was wanted


def test_targets_are_wholly_written_and_returned(streamed: list[LazyDevice]) -> None:
    given = arrays()
    options: dict[str, Any] = {"window": (9, 0)}
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    out = np.full((2, 7, 4, 5), np.nan)
    found, backward = offload.attention_vjp(q, k, v, out=out, **options)
    assert found is out
    targets = [offload.pinned_empty(x.shape, x.dtype) for x in (q, k, v)]
    for x in targets:
        x.fill(np.nan)
    for x, y in zip(backward(dout, out=targets), targets, strict=True):
        assert x is y
    expected, expected_backward = cuflash.attention_vjp(q, k, v, **options)
    for x, y in zip((out, *targets), (expected, *expected_backward(dout)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="shared with k"):
        backward(dout, out=(None, k, None))
    with pytest.raises(ValueError, match="out, dv: expected shape"):
        backward(dout, out=(None, None, k))


def test_a_package_attribute_without_an_import() -> None:
    import subprocess
    import sys

    code = "import sys, cuflash; assert 'cuflash.offload' not in sys.modules; cuflash.offload.attention"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k": [1.0]},
            TypeError,
            "k: expected a NumPy array, as keys and values lie in host memory, got ",
        ),
        ({"v": np.ma.zeros((2, 60, 2, 5))}, TypeError, "v: expected an array that masks nothing"),
        ({"v": np.zeros((2, 60, 2, 5), np.float32)}, TypeError, "v: expected q's dtype float64, got float32"),
        ({"k": np.zeros((2, 61, 2, 8))}, ValueError, "v: expected "),
        ({"share": 1.5}, ValueError, 'share: expected "auto" or a number from 0 to 1, got 1.5'),
        ({"share": -0.1}, ValueError, 'share: expected "auto" or a number from 0 to 1, got -0.1'),
        ({"share": float("nan")}, ValueError, "share: expected a finite number, got nan"),
        ({"share": "half"}, ValueError, "share: expected \"auto\" or a number from 0 to 1, got 'half'"),
        ({"share": True}, TypeError, "share: expected a real number, got bool"),
        ({"share": None}, TypeError, "share: expected a real number, got NoneType"),
        ({"masked": 1}, TypeError, "masked: no such option"),
        ({"dropout_p": 0.5}, ValueError, "dropout_seed: expected "),
        ({"window": (-1, 0)}, ValueError, "None for unbounded"),
        ({"return_lse": "no"}, TypeError, "return_lse: expected a bool"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = arrays()
    arguments = {name: given[name] for name in ("q", "k", "v")} | change
    functions: tuple[Any, ...] = offload.attention, offload.attention_vjp
    for function in functions:
        with pytest.raises(error) as raised:
            function(arguments.pop("q", given["q"]), arguments.get("k"), arguments.get("v"), **rest(arguments))
        assert message in str(raised.value)


def rest(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}


def test_bad_residuals_are_told() -> None:
    given = arrays()
    _, backward = offload.attention_vjp(given["q"], given["k"], given["v"])
    with pytest.raises(ValueError, match="dout: expected shape"):
        backward(given["dout"][:, 1:])
    with pytest.raises(TypeError, match="dlse: expected dtype float64"):
        backward(given["dout"], given["dlse"].astype(np.float32))


def test_threads_call_at_once() -> None:
    given = arrays()
    expected = results(cuflash.attention_vjp, given, causal=True)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for share in (0.5, 1, "auto"):
                assert_same(results(offload.attention_vjp, given, share=share, causal=True), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_where_no_thread_starts_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays()
    expected = results(cuflash.attention_vjp, given)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_same(results(offload.attention_vjp, given, share=0.5), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_each_device(device: Device, dtype: str) -> None:
    """The queries lie on the device, keys and values on the host, pinned or not; results are those of one call."""
    given = arrays(dtype, seqlens=(17, 700), dims=(64, 64))
    sink = RNG.standard_normal(4).astype(np.float32)
    expected = results(cuflash.attention_vjp, given, causal=True, sink=sink)
    pinned = {}
    for name in ("k", "v"):
        pinned[name] = offload.pinned_empty(given[name].shape, given[name].dtype)
        pinned[name][...] = given[name]
    for host in ({name: given[name] for name in ("k", "v")}, pinned):
        for share in (0, 0.5, 1):
            q, dout, dlse, its_sink = device.put((given["q"], given["dout"], given["dlse"], sink))
            (out, lse), backward = offload.attention_vjp(
                q, host["k"], host["v"], share=share, return_lse=True, causal=True, sink=its_sink
            )
            dq, dk, dv, dsink = backward(dout, dlse)
            assert type(dk) is type(dv) is np.ndarray
            on_device = dict(zip(("out", "lse", "dq", "dsink"), device.get((out, lse, dq, dsink)), strict=True))
            rounding = {"float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
            assert_same({**on_device, "dk": dk, "dv": dv}, expected, rounding)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("name", ["causal", "window", "bias", "mask", "lengths", "block_mask", "sink"])
def test_the_kernels_compute_chunks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(offload, "device_of", lambda q: LazyDevice(chunk_bytes=1 << 12))  # chunks of 8 keys
    given = arrays("float32", seqlens=(7, 60), dims=(16, 16))
    options = {
        key: x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x
        for key, x in options_by_name()[name].items()
    }
    expected = results(cuflash.attention_vjp, given, **options)
    with hook.kernels_on(CpuDevice((8, 0), 3)):
        found = results(offload.attention_vjp, given, share=0, **options)
    assert_same(found, expected, 2e-5)
