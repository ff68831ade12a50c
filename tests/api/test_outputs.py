"""Results go where out= and grads= say, over any strides, without overlaps, and inputs are never modified."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import Case, accum_dtype, assert_same_bits, gaussian, gaussian_case, np_dtype, same_bits
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from layouts import POISON_BYTE, layouts
from numpy.typing import NDArray
from strategies import cases, examples

import cuflash

Array = NDArray[Any]


def storage_of(x: Array) -> Array:
    """Return the bytes of the buffer that `x` is a view of."""
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner.reshape(-1, order="A").view(np.uint8)


@dataclass
class Target:
    """A poisoned array to be written, that lies in memory in any way that out= takes, with its storage."""

    like: Array
    array: Any
    storage: Any

    @classmethod
    def draw(cls, device: Device, data: st.DataObject, shape: tuple[int, ...], dtype: Any) -> Target:
        like = data.draw(layouts(len(shape), contiguous_rows=True, writable=True)).apply(np.zeros(shape, dtype))
        storage = storage_of(like)
        storage[...] = POISON_BYTE
        return cls(like, *device.put((like, storage)))

    def assert_written(self, device: Device, expected: Array) -> None:
        """Assert that the array holds the bits of `expected`, and that the storage around it is still poisoned."""
        storage = np.full(self.storage.shape, POISON_BYTE, np.uint8)
        if expected.size:
            offset = self.like.__array_interface__["data"][0] - storage_of(self.like).__array_interface__["data"][0]
            np.ndarray(self.like.shape, self.like.dtype, storage, offset, self.like.strides)[...] = expected
        assert np.array_equal(device.get(self.storage), storage)


@examples(80)
@given(case=cases(), data=st.data())
def test_forward_out(device: Device, case: Case, data: st.DataObject) -> None:
    """out= is returned itself, wholly written with the same bits, and nothing else is written."""
    on_device = case.on(device)
    expected = device.get(on_device.raw_forward())
    for form in ("plain", "with lse", "vjp"):
        target = Target.draw(device, data, case.out_shape, case.dtype)
        if form == "plain":
            returned = on_device.raw_forward(out=target.array)
        elif form == "with lse":
            returned, _ = on_device.raw_forward(out=target.array, return_lse=True)
        else:
            arguments = (*on_device.qkv, *on_device.cu_seqlens)
            returned, _ = case.function("_vjp")(*arguments, out=target.array, **on_device.options)
        assert returned is target.array
        target.assert_written(device, expected)


@examples(80)
@given(case=cases(), data=st.data())
def test_backward_out(device: Device, case: Case, data: st.DataObject) -> None:
    """out=(dq, dk, dv), with or without the extras' gradients behind, is written and returned likewise."""
    on_device = case.on(device)
    out, lse = on_device.forward()
    expected = on_device.backward(out, lse, deterministic=True)
    count = data.draw(st.sampled_from([3, len(case.grad_names)]))
    shapes = {name: case.input_of(name) for name in case.grad_names[:count]}
    targets = {name: Target.draw(device, data, x.shape, x.dtype) for name, x in shapes.items()}
    given_out = tuple(target.array for target in targets.values())
    returned = on_device.raw_backward(out, lse, deterministic=True, out=given_out)
    assert len(returned) == len(case.grad_names)
    for name, grad in zip(case.grad_names, returned, strict=True):
        if name in targets:
            assert grad is targets[name].array
            targets[name].assert_written(device, expected[name])
        else:
            assert same_bits(device.get(grad), expected[name])


@examples(40)
@given(case=cases(strided=False), data=st.data())
def test_residuals_of_any_strides(device: Device, case: Case, data: st.DataObject) -> None:
    """out, lse, dout and dlse may lie in memory in any way when they come to the backward pass.

    Strides that TMA does not take choose another kernel on a GPU, whose sums have an order of their own.
    """
    on_device = case.on(device)
    out, lse = on_device.forward()

    def lay_out(x: Array) -> Array:
        return data.draw(layouts(x.ndim, writable=True)).apply(x)

    moved = replace(case, dout=lay_out(case.dout), dlse=None if case.dlse is None else lay_out(case.dlse)).on(device)
    residuals = lay_out(out), lay_out(lse)
    grads = moved.backward(*residuals, deterministic=True)
    if device.name == "numpy":
        assert_same_bits(grads, on_device.backward(out, lse, deterministic=True))
    else:
        case.assert_gradients(grads, out, lse)
        assert_same_bits(moved.backward(*residuals, deterministic=True), grads)


@pytest.mark.parametrize("sizes", [(0, 5, 6), (2, 0, 6), (2, 5, 0), (0, 0, 0), (2, 0, 0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_sizes(device: Device, dtype: str, sizes: tuple[int, int, int], deterministic: bool) -> None:
    """Nothing to compute is no error: empty results, zeros where there are no keys, and a sink that gets its dlse."""
    batch, seqlen_q, seqlen_k = sizes
    accum = accum_dtype(np_dtype(dtype))
    case = gaussian_case(
        0,
        dtype,
        (seqlen_q, seqlen_k),
        batch=batch,
        causal=True,
        bias=np.zeros((batch, 4, seqlen_q, seqlen_k), np_dtype(dtype)),
        mask=np.ones((seqlen_q, 1), bool),
        sink=np.array([0, 1, -2, 3], accum),
        alibi_slopes=np.ones((batch, 4), accum),
        kv_lengths=np.full(batch, seqlen_k, np.int32),
    )
    on_device = case.on(device)
    out, lse = on_device.forward()
    grads = on_device.backward(out, lse, deterministic=deterministic)
    assert not out.any() and not any(grads[name].any() for name in ("q", "k", "v", "bias", "alibi_slopes"))
    assert np.array_equal(lse, np.broadcast_to(case.options["sink"][:, None], lse.shape))
    assert case.dlse is not None
    eps = np.finfo(accum).eps
    np.testing.assert_allclose(grads["sink"], case.dlse.sum(axis=(0, 2)), rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_slices_of_a_fused_dqkv(device: Device, dtype: str) -> None:
    """q, k, v lie in one buffer, and their gradients go into one buffer."""
    rng = np.random.default_rng(0)
    fused = gaussian(rng, (2, 70, 3, 4, 40), dtype)
    case = Case(fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], gaussian(rng, (2, 70, 4, 40), dtype), None)
    on_device = case.on(device)
    out, lse = on_device.forward(causal=True)
    causal = case.with_options(causal=True)
    causal.assert_forward(out, lse)
    dqkv = device.put(np.full(fused.shape, np.nan, fused.dtype))
    grads = on_device.raw_backward(out, lse, causal=True, out=tuple(dqkv[:, :, i] for i in range(3)))
    assert len(grads) == 3
    whole = device.get(dqkv)
    causal.assert_gradients({name: whole[:, :, i] for i, name in enumerate("qkv")})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dim", [1, 7, 8, 64, 65, 128, 200, 256])
def test_heads_first_views_and_odd_offsets(device: Device, dtype: str, dim: int) -> None:
    """Arrays may be stored as (batch, heads, seqlen, dim), with rows that begin one element behind any alignment."""
    rng = np.random.default_rng(dim)
    stored = [gaussian(rng, (2, heads, seqlen, dim + 3), dtype) for heads, seqlen in ((4, 33), (2, 65), (2, 65))]
    for first in (0, 1):
        q, k, v = (x[..., first : first + dim].swapaxes(1, 2) for x in stored)
        case = Case(q, k, v, gaussian(rng, (2, 33, 4, dim), dtype), options={"window": (40, 3)})
        on_device = case.on(device)
        out, lse = on_device.forward()
        case.assert_forward(out, lse)
        case.assert_gradients(on_device.backward(out, lse))


def test_results_are_plain_arrays(device: Device) -> None:
    """Results without out= are C-contiguous arrays of the device, and distinct at every call."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(4))
    case = Case(q, k, v, dout, options={"bias": np.zeros((5, 5), np.float32)})
    on_device = case.on(device)
    first, second = (on_device.raw_forward(return_lse=True) for _ in range(2))
    grads = on_device.raw_backward(*device.get(first))
    for x in (*first, *grads):
        assert type(x) is device.xp.ndarray and x.flags.c_contiguous and x.flags.owndata
    assert not device.xp.may_share_memory(first[0], second[0])


def _small(device: Device) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return device.put(tuple(gaussian(rng, (2, 6, 3, 8), "float32") for _ in range(4)))


def test_out_must_not_overlap_an_input(device: Device) -> None:
    q, k, v, dout = _small(device)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    bias = device.put(np.zeros((2, 3, 6, 8), np.float32))
    base = device.put(np.zeros(q.size + 8, np.float32))
    shifted_q, shifted = base[:-8].reshape(q.shape), base[8:].reshape(q.shape)
    before = device.get((q, k, v, dout, out, lse, base))
    for arrays, options in (
        ((q, k, v), {"out": q}),
        ((q, k, v), {"out": k}),
        ((q, k, v), {"out": v}),
        ((q, k, v), {"out": v[:, ::-1]}),
        ((shifted_q, k, v), {"out": shifted}),
        ((q, k[..., :8], v), {"out": bias.reshape(2, 6, 3, 8), "bias": bias[..., :6]}),
    ):
        for function in (cuflash.attention, cuflash.attention_vjp):
            with pytest.raises(ValueError, match="overlap"):
                function(*arrays, **options)
    fresh = [device.put(np.zeros((2, 6, 3, 8), np.float32)) for _ in range(3)]
    for taken in (q, k, v, dout, out):
        for position in range(3):
            grads = (*fresh[:position], taken, *fresh[position + 1 :])
            with pytest.raises(ValueError, match="overlap"):
                cuflash.attention_backward(dout, q, k, v, out, lse, out=grads)
    _, backward = cuflash.attention_vjp(q, k, v)
    with pytest.raises(ValueError, match="overlap"):
        backward(dout, out=(fresh[0], v, fresh[2]))
    for now, then in zip(device.get((q, k, v, dout, out, lse, base)), before, strict=True):
        assert same_bits(now, then)


def test_outputs_must_not_overlap_each_other(device: Device) -> None:
    q, k, v, dout = _small(device)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    dq, dk = (device.put(np.zeros((2, 6, 3, 8), np.float32)) for _ in range(2))
    with pytest.raises(ValueError, match="overlap"):
        cuflash.attention_backward(dout, q, k, v, out, lse, out=(dq, dk, dq))


def test_messages_name_operands_as_the_caller_does(device: Device) -> None:
    q, k, v, dout = _small(device)
    first, second, target = (device.put(np.zeros(6, np.float32)) for _ in range(3))
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j, t, u: s + t[j] + u[j], "operands": (first, second)}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    for targets, shared in (((first, None), "operands[0]"), ((target, target), "doperands[0]")):
        own = "doperands[0]" if targets[1] is None else "doperands[1]"
        message = f"out, {own}: expected no overlap with an input or another output, got memory shared with {shared}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            cuflash.attention_backward(dout, q, k, v, out, lse, out=(None, None, None, *targets), **options)


def test_out_may_share_a_buffer_with_an_input(device: Device) -> None:
    """Interleaved slices of one buffer do not overlap."""
    rng = np.random.default_rng(0)
    fused = device.put(gaussian(rng, (2, 6, 4, 3, 8), "float32"))
    q, k, v, target = (fused[:, :, i] for i in range(4))
    expected = device.get(cuflash.attention(q.copy(), k.copy(), v.copy()))
    inputs = device.get((q, k, v))
    assert cuflash.attention(q, k, v, out=target) is target
    assert same_bits(device.get(target), expected)
    for now, then in zip(device.get((q, k, v)), inputs, strict=True):
        assert same_bits(now, then)


def test_out_of_a_read_only_array() -> None:
    q, k, v, _ = (np.zeros((1, 4, 2, 8), np.float32) for _ in range(4))
    target = np.zeros((1, 4, 2, 8), np.float32)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cuflash.attention(q, k, v, out=target)
    one_row = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 4, 2, 8), (0, 0, 0, 4))
    with pytest.raises(ValueError, match="broadcast"):
        cuflash.attention(q, k, v, out=one_row)


def test_out_must_not_overlap_itself() -> None:
    q, k, v, _ = (np.zeros((1, 4, 2, 8), np.float32) for _ in range(4))
    fine, overlapping = [(64, 32), (-64, 32), (32, 128)], [(60, 32), (64, 28), (32, 32)]
    for strides in fine + overlapping:
        middle = np.zeros(256, np.float32)[64:]
        target = np.lib.stride_tricks.as_strided(middle, q.shape, (0, *strides, 4))
        if strides in fine:
            assert cuflash.attention(q, k, v, out=target) is target
        else:
            with pytest.raises(ValueError, match=r"^out: expected distinct elements, got .*overlapping"):
                cuflash.attention(q, k, v, out=target)


@examples(60)
@given(case=cases(), data=st.data())
def test_inputs_are_never_modified(device: Device, case: Case, data: st.DataObject) -> None:
    """Every byte of every input's storage is as before, through forward, backward and vjp."""
    bound = case.on(device)
    inputs = [*bound.qkv, bound.dout, *bound.cu_seqlens, bound.dlse, *bound.options.values()]
    inputs = [x for x in inputs if isinstance(x, device.xp.ndarray) and x.size]
    before = [device.get(x) for x in inputs]
    out, lse = bound.forward()
    residuals = device.put((out, lse))
    arguments = (bound.dout, *bound.qkv, *residuals, *bound.cu_seqlens)
    case.function("_backward")(*arguments, **{"dlse": bound.dlse, **bound.options})
    _, _, pull = bound.vjp()
    pull(*((case.dout,) if case.dlse is None else (case.dout, case.dlse)))
    for now, then in zip([*inputs, *residuals], [*before, out, lse], strict=True):
        assert same_bits(device.get(now), then)


@pytest.mark.parametrize("wanted", [(), ("q",), ("k", "v"), ["v", "q"], ("bias",), ("sink", "alibi_slopes"), {"k"}])
@pytest.mark.parametrize("packed", [False, True])
def test_order_and_places_of_gradients(device: Device, wanted: Any, packed: bool) -> None:
    """Gradients have a fixed order, dq first, and are None where not wanted, whatever the order of grads=."""
    rng = np.random.default_rng(0)
    rows = (12,) if packed else (2, 6)
    q, k, v, dout = (gaussian(rng, (*rows, 3, 8), "float32") for _ in range(4))
    options = {
        "alibi_slopes": np.full(3, 0.1, np.float32),
        "sink": np.zeros(3, np.float32),
        "bias": gaussian(rng, (3, 1, 6), "float32"),
    }
    cu = np.array([0, 6, 12], np.int32)
    case = Case(q, k, v, dout, options=options, cu_seqlens=(cu, cu) if packed else None)
    assert case.grad_names == ("q", "k", "v", "bias", "sink", "alibi_slopes")
    on_device = case.on(device)
    out, lse = on_device.forward()
    every = on_device.backward(out, lse, deterministic=True)
    case.assert_gradients(every)
    some = on_device.backward(out, lse, deterministic=True, grads=wanted)
    assert {name for name, grad in some.items() if grad is not None} == set(wanted)
    assert_same_bits({name: some[name] for name in wanted}, {name: every[name] for name in wanted})
    _, _, pull = on_device.vjp(deterministic=True)
    assert_same_bits(pull(dout), every)


def test_backward_of_vjp_takes_dlse_by_position_and_name(device: Device) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (gaussian(rng, (2, 6, 3, 8), "float32") for _ in range(4))
    case = Case(q, k, v, dout, dlse=gaussian(rng, (2, 3, 6), "float32"))
    on_device = case.on(device)
    result, backward = cuflash.attention_vjp(*on_device.qkv)
    assert isinstance(result, device.xp.ndarray)
    by_position = on_device.named(backward(on_device.dout, on_device.dlse))
    by_name = on_device.named(backward(on_device.dout, dlse=on_device.dlse))
    case.assert_gradients(by_position)
    assert_same_bits(by_name, by_position)
    replace(case, dlse=None).assert_gradients(on_device.named(backward(on_device.dout)))
