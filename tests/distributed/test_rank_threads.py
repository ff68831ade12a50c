"""Threads whose calls one of them runs for all, and calls of a kind, which are checked and launched once."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from numpy.typing import NDArray
from rank_cases import SCHEMES, call_ring, make_arrays, ones

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import run, run_threads
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.rank_threads import make_threads

Array = NDArray[Any]


@pytest.mark.parametrize("is_failing", [False, True])
def test_one_thread_that_leads_all_tells_of_errors(is_failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank disagrees each has the error, where it fails the others hear of it, and threads that wait wake."""
    from cuflash.frontend import partial

    own, count = partial.Part.forward, []

    def dies(part: Any, **options: Any) -> Any:
        count.append(part)
        if len(count) == 2:
            raise MemoryError("no memory left")
        return own(part, **options)

    def work(comm: Communicator) -> Any:
        try:
            return call_ring(comm, softcap=0.0 if is_failing else 1.0 + comm.rank)
        except Exception as error:
            return error

    if is_failing:
        monkeypatch.setattr(partial.Part, "forward", dies)
    comms = make_threads(3, None, 60, True, is_led=True)
    errors = run_threads(comms, work)
    if is_failing:
        assert sorted(type(error).__name__ for error in errors) == ["MemoryError", "RuntimeError", "RuntimeError"]
        told = "failed: MemoryError: no memory left"
        assert all(told in str(error) for error in errors if isinstance(error, RuntimeError))
    else:
        assert all(isinstance(error, ValueError) and "softcap" in str(error) for error in errors)
        assert run_threads(comms, lambda comm: call_ring(comm).shape) == [(1, 4, 2, 8)] * 3


def test_steps_that_wait_for_what_nobody_sends() -> None:
    def work(comm: Communicator) -> Any:
        try:
            return comm.run(comm.arriving(1 - comm.rank))
        except Exception as error:
            return error

    for error in run_threads(make_threads(2, None, 60, True, is_led=True), work):
        assert isinstance(error, RuntimeError) and "expected a message of another rank, got none" in str(error)


def test_a_thread_that_does_not_come_to_what_one_leads() -> None:
    def work(comm: Communicator) -> Any:
        try:
            return None if comm.rank == 1 else call_ring(comm)
        except Exception as error:
            return error

    first, second = run_threads(make_threads(2, None, 0.3, True, is_led=True), work)
    assert second is None
    assert isinstance(first, TimeoutError)
    assert "rank 0: expected a message of rank 1 within 0.3 s, got none" in str(first)


def laid_out(x: Array, by_heads: bool) -> Array:
    """Return an array (batch, rows, heads, columns) whose heads, or whose rows, are neighbours in memory."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if by_heads else np.ascontiguousarray(x)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("is_led", [False, True], ids=["each", "led"])
def test_launches_are_repeated_for_keys_that_lie_alike(name: str, is_led: bool) -> None:
    """One rank's keys change their layout, then all do, while what every rank compares stays the same."""
    vjp, layouts = SCHEMES[name][0], [(False, False)] * 4 + [(False, True), (True, True), (True, False), (False, False)]
    with hook.kernels_on(CpuDevice((9, 0), 3)):
        for call_number, by_heads in enumerate(layouts):
            rng = np.random.default_rng(call_number)
            arrays = make_arrays(rng, 96, (4, 2), 2, "float64", (64, 64))

            def work(comm: Communicator, arrays: Any = arrays, by_heads: Any = by_heads) -> Any:
                part = {key: distributed.shard(x, comm, "zigzag") for key, x in arrays.items() if key != "dlse"}
                q, k, v, dout = (part[key] for key in ("q", "k", "v", "dout"))
                k, v = (laid_out(x, by_heads[comm.rank]) for x in (k, v))
                out, backward = vjp(q, k, v, comm, order="zigzag", causal=True)
                return [distributed.unshard(x, comm, "zigzag") for x in (out, *backward(dout))]

            found, _ = run_threads(make_threads(2, None, 60, True, is_led=is_led), work)
            out, backward = cuflash.attention_vjp(*(arrays[key] for key in ("q", "k", "v")), causal=True)
            for x, y in zip(found, (out, *backward(arrays["dout"])), strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-12, err_msg=f"call {call_number}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_calls_that_look_alike_are_told_apart(scheme: str) -> None:
    """A kind of calls remembers nothing for another kind."""
    vjp, _ = SCHEMES[scheme]

    def work(comm: Communicator) -> None:
        x, by_heads = ones(comm), cast("Any", distributed.ulysses_attention)
        for grads in (None, (), None, ("q",), ["q"], ("q", "k"), None, ()):
            _, backward = vjp(x, x, x, comm, order="plain")
            wanted = ("q", "k", "v") if grads is None else grads
            assert [g is not None for g in backward(x, grads=grads)] == [n in wanted for n in "qkv"]
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                vjp(x, x, x, comm, order="plain", hidden=1)
        if scheme == "ulysses":
            for _ in range(2):
                with pytest.raises(TypeError, match="heads"):
                    by_heads(x, x, x, comm, order="plain", heads=1)
                distributed.ulysses_attention(x, x, x, comm, order="plain")

    run(2, work)

    def unchecked(comm: Communicator) -> None:
        x = ones(comm)
        for _ in range(3):
            vjp(x, x, x, comm, order="plain", softmax_scale=0.1 * (1 + comm.rank))

    run(2, unchecked, check=False)


def test_an_interruption_is_that_of_the_thread_which_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whosever step it meets, the leading thread is interrupted; the others hear that the call has ended."""
    from cuflash.frontend import partial

    own, count = partial.Part.forward, []

    def interrupted(part: Any, **options: Any) -> Any:
        count.append(threading.get_ident())
        if len(count) == 2:
            raise KeyboardInterrupt
        return own(part, **options)

    monkeypatch.setattr(partial.Part, "forward", interrupted)

    def work(comm: Communicator) -> Any:
        try:
            return call_ring(comm)
        except BaseException as error:
            return threading.get_ident(), error

    found = run_threads(make_threads(3, None, 60, True, is_led=True), work)
    kinds = {thread: type(error).__name__ for thread, error in found}
    assert kinds.pop(count[0]) == "KeyboardInterrupt"
    assert list(kinds.values()) == ["RuntimeError", "RuntimeError"]
