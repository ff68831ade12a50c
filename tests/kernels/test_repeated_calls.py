"""A first call on the GPU path serves later ones with what it found out, and only those for which it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Case, OnDevice, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device
from numpy.typing import NDArray

import cuflash
from cuflash.cuda import device as cuda_device
from cuflash.frontend import call
from cuflash.gpu import launch

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

HOST = Device("numpy", np)
MASK = np.tri(17, 20, 3, dtype=bool) & (np.arange(20) % 7 > 0)  # no window
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "extras": {
        "bias": np.ones((4, 1, 20), np.float32),
        "mask": np.tri(17, 20, 5, dtype=bool),
        "alibi_slopes": np.full(4, 0.1, np.float32),
        "sink": np.full(4, 0.5, np.float32),
        "q_lengths": np.array([17, 9], np.int32),
        "kv_lengths": np.array([20, 13], np.int32),
    },
}


# The kernels are general ones, those for warps of tensor cores, and those that reach q, k and v by tensor maps.
@pytest.fixture(
    autouse=True,
    params=[((8, 0), "float32"), ((8, 0), "float16"), ((9, 0), "float16"), ((9, 0), "float32")],
    ids=lambda x: f"sm_{x[0][0]}{x[0][1]}-{x[1]}",
)
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    capability, dtype = request.param
    call._checked.clear()
    with hook.kernels_on(CpuDevice(capability)):
        yield dtype


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the entries that were looked up, not repeated."""
    entries: list[str] = []
    run = launch.Work.run

    def watched(work: launch.Work, kernel: launch.Kernel, arrays: dict[str, Any]) -> None:
        entries.append(kernel.entry)
        run(work, kernel, arrays)

    monkeypatch.setattr(launch.Work, "run", watched)
    return entries


def example(seed: int, dtype: str, **options: Any) -> Case:
    return gaussian_case(seed, dtype, (17, 20), dims=(16, 16), **options)


def packed(seed: int, dtype: str) -> Case:
    cu_seqlens = np.array([0, 7, 17], np.int32), np.array([0, 11, 20], np.int32)
    case = gaussian_case(seed, dtype, (17, 20), dims=(16, 16), batch=1)
    assert case.dlse is not None
    flat: dict[str, Any] = {name: getattr(case, name)[0] for name in ("q", "k", "v", "dout", "dlse")}
    return Case(**flat, cu_seqlens=cu_seqlens)


def run(case: Case, **backward: Any) -> None:
    """Make one forward and backward call, held against the reference."""
    run_on(case.on(HOST), **backward)


def run_on(on_device: OnDevice, **backward: Any) -> None:
    case = on_device.case
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse, **backward))


@pytest.mark.parametrize("name", [*OPTIONS, "packed"])
def test_a_second_call_looks_nothing_up(name: str, dtype: str, launches: list[str]) -> None:
    def make(seed: int) -> Case:
        return packed(seed, dtype) if name == "packed" else example(seed, dtype, **OPTIONS[name])

    run(make(0))
    assert launches
    launches.clear()
    run(make(1))
    assert launches == []


@pytest.mark.parametrize(
    "seeds", [(7, 2**64 - 1), (np.array([7], np.uint64), np.array([8], np.uint64))], ids=["int", "array"]
)
def test_seeds_and_block_masks_repeat(seeds: tuple[Any, Any], dtype: str, launches: list[str]) -> None:
    """Other numbers and another seed repeat a call with the same mask; another mask of its shape does not."""
    options = {"dropout_p": 0.3, "block_mask": MASK}
    on_device = example(0, dtype, dropout_seed=seeds[0], **options).on(HOST)
    run_on(on_device)
    assert launches
    launches.clear()
    again = example(1, dtype, dropout_seed=seeds[1], **options).on(HOST)
    same_mask = {**again.options, "block_mask": on_device.options["block_mask"]}
    run_on(replace(again, options=same_mask))
    assert launches == []
    run_on(example(2, dtype, dropout_seed=seeds[0], **{**options, "block_mask": ~MASK}).on(HOST))
    assert launches


def test_a_copy_of_a_block_mask_is_another_mask(dtype: str) -> None:
    """A copy that was made before the mask was used has no lists of tiles."""
    on_device = example(0, dtype, block_mask=MASK).on(HOST)
    other = deepcopy(on_device.options["block_mask"])
    run_on(on_device)
    run_on(replace(on_device, options={**on_device.options, "block_mask": other}))


def test_a_wrong_seed_is_no_repetition(dtype: str) -> None:
    case = example(0, dtype)
    for seed, error in (
        (1, None),
        (2**64, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (2.0, TypeError),
        (2, None),
    ):
        with nullcontext() if error is None else pytest.raises(error, match="dropout_seed"):
            cuflash.attention(case.q, case.k, case.v, dropout_seed=seed)  # type: ignore[arg-type]


def test_results_in_given_arrays(dtype: str, launches: list[str]) -> None:
    """Results may be arrays of their own or slices of one buffer, some given and some not."""
    for seed in (0, 1):
        case = gaussian_case(seed, dtype, (20, 20), heads=(2, 2), dims=(16, 16))
        on_device = case.on(HOST)
        target = np.full_like(case.q, np.nan)
        out, lse = on_device.raw_forward(out=target, return_lse=True)
        assert out is target
        case.assert_forward(out, lse)
        fused = np.full((2, 20, 3, 2, 16), np.nan, case.dtype)
        for own in (tuple(fused[:, :, i] for i in range(3)), (None, np.full_like(case.k, np.nan), None)):
            grads = on_device.raw_backward(out, lse, out=own)
            assert all(y is None or x is y for x, y in zip(grads, own, strict=True))
            case.assert_gradients(on_device.named(grads))
        with pytest.raises(ValueError, match="out, dk: expected None"):
            on_device.raw_backward(out, lse, out=(None, np.full_like(case.k, np.nan), None), grads=("q", "v"))
        assert bool(launches) == (seed == 0)
        launches.clear()


def test_given_arrays_may_overlap_after_all(dtype: str) -> None:
    """An array that is safe to write at one address may not be at another."""
    case = gaussian_case(0, dtype, (20, 20), heads=(2, 2), dims=(16, 16))
    buffer = np.zeros((4, *case.q.shape), case.dtype)
    q, k, v, target = buffer
    for x, values in ((q, case.q), (k, case.k), (v, case.v)):
        x[...] = values
    for _ in range(2):
        out, lse = cuflash.attention(q, k, v, out=target, return_lse=True)
        case.assert_forward(out, lse)
        with pytest.raises(ValueError, match="out: expected no overlap.*with v"):
            cuflash.attention(q, k, v, out=v)
        shifted = np.ndarray(q.shape, q.dtype, buffer, offset=target.nbytes // 2, strides=q.strides)
        with pytest.raises(ValueError, match="out: expected no overlap"):
            cuflash.attention(q, k, v, out=shifted)
        with pytest.raises(ValueError, match="overlap"):
            cuflash.attention_backward(case.dout, q, k, v, out, lse, out=(target, None, None))
        dq, dk, dv = np.empty((3, *q.shape), case.dtype)
        cuflash.attention_backward(case.dout, q, k, v, out, lse, out=(dq, dk, dv))
        with pytest.raises(ValueError, match=r"out, dk: expected no overlap"):
            cuflash.attention_backward(case.dout, q, k, v, out, lse, out=(dq, dq, dv))


def test_other_gradients_are_other_calls(dtype: str, launches: list[str]) -> None:
    case = example(0, dtype, **OPTIONS["extras"])
    for seed in (0, 1):
        for grads in (None, ("q",), ("k", "sink"), ("bias", "v")):
            run(example(seed, dtype, **OPTIONS["extras"]), grads=grads)
        assert bool(launches) == (seed == 0)
        launches.clear()
    without = Case(case.q, case.k, case.v, case.dout, None, case.options)
    run(without)
    assert launches, "without dlse another kernel runs"


def test_one_array_in_several_places_is_no_rule(dtype: str) -> None:
    """A call on three arrays of one metadata may follow a call on one array three times."""
    case = gaussian_case(0, dtype, (20, 20), heads=(2, 2), dims=(16, 16))
    run(Case(case.q, case.q, case.q, case.q, case.dlse))
    run(case)


def test_addresses_may_change_their_alignment(dtype: str) -> None:
    case = gaussian_case(0, dtype, (20, 20), heads=(2, 2), dims=(16, 16))
    for offset in (0, 1, 4, 0, 1):
        shifted: dict[str, Any] = {name: at_offset(getattr(case, name), offset) for name in ("q", "k", "v", "dout")}
        run(Case(**shifted, dlse=case.dlse))


def at_offset(x: NDArray[Any], elements: int) -> NDArray[Any]:
    """Return the same values so many elements behind an aligned address."""
    buffer = np.zeros(x.nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + elements * x.dtype.itemsize
    view: NDArray[Any] = buffer[start:][: x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def test_errors_do_not_depend_on_what_came_before(dtype: str) -> None:
    case = example(0, dtype)
    out, lse = cuflash.attention(case.q, case.k, case.v, return_lse=True)
    for _ in range(2):
        cuflash.attention_backward(case.dout, case.q, case.k, case.v, out, lse)
        with pytest.raises(TypeError, match="lse"):
            cuflash.attention_backward(case.dout, case.q, case.k, case.v, out, lse.astype(np.float64))
        with pytest.raises(ValueError, match="dout"):
            cuflash.attention_backward(case.dout[:, :5], case.q, case.k, case.v, out, lse)
        with pytest.raises(ValueError, match="grads"):
            cuflash.attention_backward(case.dout, case.q, case.k, case.v, out, lse, grads=("q", "bias"))
        with pytest.raises(TypeError, match="grads"):
            cuflash.attention_backward(case.dout, case.q, case.k, case.v, out, lse, grads="None")
        with pytest.raises(ValueError, match="out: .* 0 entries"):
            cuflash.attention_backward(case.dout, case.q, case.k, case.v, out, lse, out=())
        with pytest.raises(ValueError, match="dropout_seed"):
            cuflash.attention(case.q, case.k, case.v, dropout_p=0.5)


def test_memory_is_allocated_as_in_the_first_call(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's pool has under graph capture only the blocks that the call before gave back."""
    device = cuda_device.device_of(None)
    sizes: list[int] = []
    empty, scratch = device.empty, device.scratch

    def watched_empty(shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        array: NDArray[Any] = empty(shape, kind)
        sizes.append(array.nbytes)
        return array

    def watched_scratch(size: int) -> tuple[int, Any]:
        sizes.append(size)
        return scratch(size)

    monkeypatch.setattr(call.Call, "_empty", lambda self, shape, kind: watched_empty(shape, kind))
    monkeypatch.setattr(device, "empty", watched_empty)
    monkeypatch.setattr(device, "scratch", watched_scratch)
    on_device = example(0, dtype, **OPTIONS["extras"]).on(HOST)
    out, lse = on_device.forward()
    for work in (on_device.raw_forward, partial(on_device.backward, out, lse)):
        taken = []
        for _ in range(2):
            sizes.clear()
            work()
            taken.append(list(sizes))
        assert taken[0] == taken[1] != []
