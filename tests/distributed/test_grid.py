"""A grid of ranks, whose groups deal heads and are joined by rings, gives the results of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rank_cases import alone, assert_same, errors_of, make_arrays, problems, spread
from strategies import examples

from cuflash import distributed
from cuflash.distributed.__main__ import heads_of_grid, run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.grid import places_in_group, rows_of_group
from cuflash.distributed.order import ORDERS, stretches_of
from cuflash.distributed.pieces import Pieces
from cuflash.distributed.ring_passes import Ring

Array = NDArray[Any]


def over_grid(heads: int) -> Any:
    return partial(distributed.ring_attention_vjp, heads=heads)


@examples(150)
@given(problem=problems(), rings=st.integers(1, 3), heads=st.integers(1, 3))
def test_a_grid_is_one_device(problem: dict[str, Any], rings: int, heads: int) -> None:
    """Heads are dealt unevenly, replicated or not at all to some ranks, and extras are summed over all ranks."""
    arrays, options, edges = problem["arrays"], problem["options"], problem["edges"]
    spread_options = options if edges is None else {**options, "cu_seqlens": edges}
    found = spread(over_grid(heads), rings * heads, problem["order"], arrays, edges is not None, spread_options)
    assert_same(found, alone(arrays, options, edges), 1e-12)


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s * table[b, h, (i + j) % 7]


def shown(b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return (i - j + b + h) % 4 != 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packed", [False, True])
def test_rules_know_the_heads_of_the_whole(order: str, packed: bool) -> None:
    edges = np.array([0, 5, 17, 29], np.int32) if packed else None
    arrays = make_arrays(np.random.default_rng(7), 29, (4, 2), None if packed else 2, "float64", (8, 5))
    options: dict[str, Any] = {
        "score_mod": scored,
        "mask_mod": shown,
        "operands": (np.random.default_rng(1).standard_normal((3, 4, 7)),),
        "causal": True,
        "sink": np.ones(4),
        "dropout_p": 0.2,
        "dropout_seed": 11,
    }
    given = {**options, "cu_seqlens": edges} if packed else options
    for rings, heads in ((2, 2), (2, 3)):
        found = spread(over_grid(heads), rings * heads, order, arrays, packed, given)
        assert "extra1" in found
        assert_same(found, alone(arrays, options, edges), 1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("order", ORDERS)
def test_results_are_rounded_once(order: str, dtype: str) -> None:
    """KV heads that several ranks read have the gradients of all of them before these are rounded."""
    arrays = make_arrays(np.random.default_rng(3), 64, (4, 1), 1, dtype, (16, 16))
    found = spread(over_grid(2), 4, order, arrays, False, {"causal": True})
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    exact, one = alone(wide, {"causal": True}, None), alone(arrays, {"causal": True}, None)
    for name, x in exact.items():
        mean, mean_of_one = (float(np.abs(y[name].astype(np.float64) - x).mean()) for y in (found, one))
        assert mean <= 1.1 * mean_of_one + 1e-7, name


def test_backward_by_itself_and_gradients_by_name() -> None:
    arrays = make_arrays(np.random.default_rng(5), 24, (4, 2), 1, "float64", (8, 8))

    def work(comm: Communicator) -> bool:
        q, k, v, dout = (distributed.shard(arrays[name], comm) for name in ("q", "k", "v", "dout"))
        options: dict[str, Any] = {"heads": 2, "causal": True, "sink": np.ones(4)}
        (out, lse), backward = distributed.ring_attention_vjp(q, k, v, comm, return_lse=True, **options)
        np.testing.assert_array_equal(distributed.ring_attention(q, k, v, comm, **options), out)
        expected = backward(dout)
        found = distributed.ring_attention_backward(dout, q, k, v, out, lse, comm, grads=("k", "sink"), **options)
        assert found[0] is None
        assert found[2] is None
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[3], expected[3])
        return True

    assert all(run(4, work))


def test_messages_around_the_rings_have_some_of_the_heads() -> None:
    """Neighbours exchange heads, and ranks of other groups get keys of one head of two alone."""
    sent: list[tuple[int, int, int, int]] = []  # sender, receiver, tag and heads of the first array

    def work(comm: Communicator) -> Any:
        own = comm.send

        def send(message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
            arrays = message.views() if isinstance(message, Pieces) else message
            sent.append((comm.rank, to, tag, arrays[0].shape[-2] if isinstance(arrays, (list, tuple)) else 0))
            own(message, to, tag, ready)

        comm.send = send  # type: ignore[method-assign]
        x = np.ones((1, 4, 2, 8))
        return distributed.ring_attention(x, x, x, comm, heads=2)

    run(6, work)
    keys = [entry for entry in sent if entry[3]]
    assert {(a // 2, a % 2) == (b // 2, b % 2) for a, b, *_ in keys} == {False}
    for sender, receiver, _, heads in keys:
        assert heads == 1
        assert sender // 2 == receiver // 2 or sender % 2 == receiver % 2  # of a group, or of a ring


@pytest.mark.parametrize(
    ("heads", "kind", "message"),
    [
        (4, ValueError, "heads: expected a divisor of the 6 ranks, of which so many deal heads, got 4"),
        (0, ValueError, "heads: expected a divisor of the 6 ranks, of which so many deal heads, got 0"),
        (2.0, TypeError, "heads: expected an integer, got float"),
    ],
)
def test_heads_that_make_no_grid(heads: Any, kind: type[Exception], message: str) -> None:
    x = np.ones((1, 2, 2, 8))
    for error in errors_of(6, lambda comm: distributed.ring_attention(x, x, x, comm, heads=heads)):
        assert type(error) is kind
        assert message in str(error)


def test_ranks_that_mean_different_grids() -> None:
    x = np.ones((1, 2, 2, 8))
    errors = errors_of(4, lambda comm: distributed.ring_attention(x, x, x, comm, heads=4 if comm.rank == 2 else 2))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "heads: expected the same on every rank, got 2 on rank 0 and 4 on rank 2" in str(error)


def test_a_rank_that_fails_ends_the_waiting_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Ring.forward

    def fails(ring: Any) -> Any:
        if ring.comm._whole.rank == 3:
            raise MemoryError("no memory left")
        return own(ring)

    monkeypatch.setattr(Ring, "forward", fails)
    x = np.ones((1, 2, 2, 8))
    errors = errors_of(4, lambda comm: distributed.ring_attention(x, x, x, comm, heads=2), time_limit=60)
    assert isinstance(errors[3], MemoryError)
    assert all(isinstance(error, RuntimeError) and "rank 3 failed" in str(error) for error in errors[:3])


@examples(100)
@given(st.integers(0, 90), st.integers(1, 4), st.integers(1, 4), st.sampled_from(ORDERS))
def test_a_group_has_the_tokens_of_its_ranks(seqlen: int, rings: int, heads: int, order: str) -> None:
    for group in range(rings):
        rows = rows_of_group(seqlen, group, rings, heads, order)
        tokens = [s.first + s.stride * n for s in rows for n in range(s.length)]
        assert [s.begin for s in rows] == np.cumsum([0, *(s.length for s in rows[:-1])]).tolist()
        if order != "striped":
            assert tokens == sorted(tokens)
        found: dict[int, int] = {}
        for rank in range(group * heads, (group + 1) * heads):
            own = stretches_of(seqlen, rank, rings * heads, order)
            held = [s.first + s.stride * n for s in own for n in range(s.length)]
            for place in places_in_group(own, rows):
                for n in range(place.length):
                    found[place.first + n] = held[place.begin + n]
        assert [found[row] for row in range(len(tokens))] == tokens


def test_the_squarest_grid() -> None:
    assert [heads_of_grid(world) for world in (1, 2, 3, 4, 6, 8, 12, 7)] == [1, 1, 1, 2, 2, 2, 3, 1]


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_the_kernels_compute_the_parts() -> None:
    arrays = make_arrays(np.random.default_rng(9), 40, (2, 2), 1, "float32", (16, 16))
    options = {"causal": True, "alibi_slopes": np.array([0.1, 0.02], np.float32)}
    expected = alone(arrays, options, None)
    with hook.kernels_on(CpuDevice((8, 0), 3)):
        found = spread(over_grid(2), 4, "zigzag", arrays, False, options)
    assert_same(found, expected, 2e-5)
