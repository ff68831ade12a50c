"""Attention over ranks that are threads with NumPy arrays gives the results of one device on the whole arrays."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import accum_dtype, gaussian
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rank_cases import SCHEMES, alone, assert_same, call_ring, errors_of, make_arrays, ones, problems, spread
from strategies import examples

import cuflash
from cuflash import distributed, reference
from cuflash.distributed import dealing
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import ORDERS, length_of, stretches_of
from cuflash.distributed.regions import halves_of, regions_of

Array = NDArray[Any]


@pytest.mark.parametrize("is_led", [False, True], ids=["each", "led"])
@pytest.mark.parametrize("scheme", SCHEMES)
@examples(100)
@given(problem=problems())
def test_ranks_together_are_one_device(scheme: str, is_led: bool, problem: dict[str, Any]) -> None:
    arrays, options, edges = problem["arrays"], problem["options"], problem["edges"]
    spread_options = options if edges is None else {**options, "cu_seqlens": edges}
    make, order = SCHEMES[scheme][0], problem["order"]
    found = spread(make, problem["world"], order, arrays, edges is not None, spread_options, is_led=is_led)
    assert_same(found, alone(arrays, options, edges), 1e-12)


@pytest.mark.parametrize("num_rounds", [2, 3])
def test_heads_are_dealt_in_rounds(num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with unequal numbers of heads, of which a round may have none of some rank's, are one device."""
    monkeypatch.setattr(dealing.Dealing, "rounds", property(lambda own: dealing.rounds_of(own.shares, num_rounds)))
    rng = np.random.default_rng(3)
    arrays = make_arrays(rng, 41, (10, 5), 2, "float64", (16, 8))
    options = {"causal": True, "sink": rng.standard_normal(10), "alibi_slopes": rng.random(10)}
    for is_led in (False, True):
        found = spread(SCHEMES["ulysses"][0], 2, "zigzag", arrays, False, options, is_led=is_led)
        assert_same(found, alone(arrays, options, None), 1e-12)


def test_rounds_have_all_heads_once() -> None:
    for kv, group, world in ((8, 4, 2), (5, 2, 2), (4, 1, 4), (2, 3, 4)):
        shares = dealing.shares_of(kv * group, kv, world)
        for num_rounds in (1, 2, 3, 4):
            rounds = dealing.rounds_of(shares, num_rounds)
            if kv < world and num_rounds > 1:
                continue  # KV heads of several ranks have one round
            held = sorted(head for heads in rounds for share in heads for head in range(share.first, share.stop))
            assert held == list(range(kv * group))
    long, short = (131072**2 * 128, 8192**2 * 128)  # rows of queries and keys, columns
    assert dealing.num_rounds_of(dealing.shares_of(16, 16, 4), long) == 4
    assert dealing.num_rounds_of(dealing.shares_of(16, 2, 4), long) == 1
    assert dealing.num_rounds_of(dealing.shares_of(16, 16, 4), short) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_partial_results_are_not_rounded(scheme: str, order: str, dtype: str) -> None:
    """Only the last result has the inputs' dtype, so that it is as near to float64 as that of one device."""
    rng = np.random.default_rng(7)
    arrays = make_arrays(rng, 256, (4, 2), 1, dtype, (32, 32))
    found = spread(SCHEMES[scheme][0], 4, order, arrays, False, {"causal": True})
    one = alone(arrays, {"causal": True}, None)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    q, k, v = wide["q"], wide["k"], wide["v"]
    exact, exact_lse = reference.attention(q, k, v, causal=True)
    grads = reference.attention_backward(wide["dout"], q, k, v, causal=True, dlse=wide["dlse"])
    expected = {"out": exact, "lse": exact_lse, **{f"d{name}": grads[name] for name in ("q", "k", "v")}}
    for name, x in expected.items():
        mean, mean_of_one = (float(np.abs(y[name].astype(np.float64) - x).mean()) for y in (found, one))
        assert mean <= 1.1 * mean_of_one + 1e-7, name


@examples(100)
@given(st.integers(0, 100), st.integers(1, 9), st.sampled_from(ORDERS))
def test_every_token_is_on_one_rank(seqlen: int, world: int, order: str) -> None:
    held: list[int] = []
    for rank in range(world):
        begin = 0
        for stretch in stretches_of(seqlen, rank, world, order):
            assert stretch.begin == begin
            begin += stretch.length
            held += [stretch.first + i * stretch.stride for i in range(stretch.length)]
        assert begin == length_of(seqlen, rank, world, order)
    assert sorted(held) == list(range(seqlen))


def test_orders_by_example() -> None:
    """The orders of eight tokens on two ranks are these."""
    comms = distributed.threads(2)
    expected = {
        "plain": ([0, 1, 2, 3], [4, 5, 6, 7]),
        "zigzag": ([0, 1, 6, 7], [2, 3, 4, 5]),
        "striped": ([0, 2, 4, 6], [1, 3, 5, 7]),
    }
    x = np.arange(8)
    for order, parts in expected.items():
        for comm, part in zip(comms, parts, strict=True):
            assert distributed.positions(8, comm, order).tolist() == part
            assert distributed.shard(x, comm, order, axis=0).tolist() == part


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("order", ORDERS)
def test_whole_arrays_come_back(order: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = gaussian(rng, (2, 11, 3), "float32").astype(gaussian(rng, (), dtype).dtype if dtype == "bfloat16" else dtype)
    parts = run(3, lambda comm: distributed.unshard(distributed.shard(x, comm, order), comm, order))
    for part in parts:
        assert part.dtype == x.dtype
        np.testing.assert_array_equal(part, x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"causal": True}, "causal: expected the same on every rank, got False on rank 0 and True on rank 1"),
        ({"softcap": -1.0}, "rank 1 of 3 finds the call invalid: ValueError: softcap"),
        ({"softcap": "x"}, "rank 1 of 3 finds the call invalid: TypeError: softcap"),
        ({"order": "plain"}, "order: expected the same on every rank, got striped on rank 0 and plain on rank 1"),
        ({"sink": np.ones(2, np.float32)}, "sink: expected the same on every rank"),
    ],
)
def test_one_rank_that_disagrees_is_an_error_on_all(wrong: dict[str, Any], message: str) -> None:
    def work(comm: Communicator) -> Any:
        return call_ring(comm, **({"order": "striped"} | (wrong if comm.rank == 1 else {})))

    start = time.monotonic()
    errors = errors_of(3, work)
    assert time.monotonic() - start < 30
    for error in errors:
        assert isinstance(error, ValueError), error
        assert message in str(error)


def test_wrong_on_every_rank_is_the_error_itself() -> None:
    errors = errors_of(2, lambda comm: call_ring(comm, softcap="x"))
    assert all(isinstance(error, TypeError) and "softcap" in str(error) for error in errors)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse"])
def test_an_array_that_is_none_is_named(scheme: str, name: str) -> None:
    _, backward = SCHEMES[scheme]

    def work(comm: Communicator, is_missing: bool = True) -> Any:
        arrays: dict[str, Any] = {x: ones(comm) for x in ("dout", "q", "k", "v", "out")}
        arrays["lse"] = np.zeros((1, 2, 4), np.float32)
        if is_missing:
            arrays[name] = None
        return backward(*arrays.values(), comm, order="plain")

    for error in errors_of(2, work):
        assert isinstance(error, TypeError) and str(error).startswith(f"{name}: expected an array"), error
    for error in errors_of(2, lambda comm: work(comm, comm.rank == 1)):
        assert isinstance(error, ValueError), error
        assert f"rank 1 of 2 finds the call invalid: TypeError: {name}" in str(error)


def test_masked_cu_seqlens_are_refused() -> None:
    edges: Any = np.ma.masked_array(np.array([0, 8], np.int32))

    def work(comm: Communicator) -> Any:
        x = ones(comm)[0]
        return distributed.ring_attention(x, x, x, comm, cu_seqlens=edges)

    for error in errors_of(2, work):
        assert isinstance(error, TypeError) and str(error).startswith("cu_seqlens: expected an array that masks")


@pytest.mark.parametrize("name", ["bias", "mask", "q_lengths", "kv_lengths", "block_mask", "block_table"])
def test_options_of_the_whole_matrix_are_refused(name: str) -> None:
    errors = errors_of(2, lambda comm: call_ring(comm, 4, **{name: np.ones(1)}))
    assert all(isinstance(error, NotImplementedError) and str(error).startswith(name) for error in errors)


def test_lengths_that_are_no_order() -> None:
    errors = errors_of(2, lambda comm: call_ring(comm, 3 + 2 * comm.rank))
    for error in errors:
        assert isinstance(error, ValueError)
        assert "q: expected 4 of the 8 tokens on rank 0 by order 'zigzag', got 3" in str(error)


def test_a_rank_that_does_not_come() -> None:
    def work(comm: Communicator) -> Any:
        if comm.rank == 1:
            return None
        return call_ring(comm)

    errors = errors_of(2, work, time_limit=0.3)
    assert isinstance(errors[0], TimeoutError)
    assert "rank 0: expected a message of rank 1 within 0.3 s, got none" in str(errors[0])


def test_a_rank_that_dies_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting ends long before the time limit."""
    from cuflash.frontend import partial

    own = partial.Part.forward

    def dies(part: Any, **options: Any) -> Any:
        if threading.current_thread().name == "dies":
            raise MemoryError("no memory left")
        return own(part, **options)

    monkeypatch.setattr(partial.Part, "forward", dies)

    def work(comm: Communicator) -> Any:
        if comm.rank == 1:
            threading.current_thread().name = "dies"
        return call_ring(comm)

    start = time.monotonic()
    errors = errors_of(3, work, time_limit=60)
    assert time.monotonic() - start < 30
    assert isinstance(errors[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RuntimeError)
        assert "rank 1 failed: MemoryError: no memory left" in str(errors[rank])


def test_without_checks_ranks_do_not_compare() -> None:
    def work(comm: Communicator) -> Any:
        return call_ring(comm, softmax_scale=1.0 + comm.rank)

    run(2, work, check=False)
    assert all(isinstance(error, ValueError) for error in errors_of(2, work))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"world": 0}, ValueError, "world: expected at least one rank, got 0"),
        ({"world": 2.0}, TypeError, "world: expected an integer, got float"),
        ({"world": 2, "devices": (0,)}, ValueError, "devices: expected one for each of the 2 ranks, got 1"),
        ({"world": 2, "time_limit": 0}, ValueError, "time_limit: expected more than 0 seconds"),
    ],
)
def test_arguments_of_threads(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        distributed.threads(**arguments)


@pytest.mark.parametrize("comm", [None, 3, [], "nccl"])
def test_what_is_no_communicator(comm: Any) -> None:
    x, w_out, lse = np.zeros((1, 4, 2, 8)), np.zeros((2, 8, 3)), np.zeros((1, 2, 4))
    calls: list[Callable[[], Any]] = [
        lambda: distributed.shard(x, comm),
        lambda: distributed.unshard(x, comm),
        lambda: distributed.positions(4, comm),
        lambda: distributed.attention_allreduce(x, x, x, w_out, comm),
        lambda: distributed.attention_allreduce_vjp(x, x, x, w_out, comm),
        lambda: distributed.ring_attention(x, x, x, comm),
        lambda: distributed.ulysses_attention(x, x, x, comm),
        *(lambda make=make: make(x, x, x, comm) for make, _ in SCHEMES.values()),
        *(lambda back=back: back(x, x, x, x, x, lse, comm) for _, back in SCHEMES.values()),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"comm: expected the communicator of one rank, .*{type(comm).__name__}"):
            call()


def test_gradients_that_are_wanted() -> None:
    def work(comm: Communicator) -> Any:
        x = ones(comm)
        out, backward = distributed.ring_attention_vjp(x, x, x, comm, sink=np.zeros(2, np.float32))
        return backward(out, grads=("k", "sink"))

    for dq, dk, dv, dsink in run(2, work):
        assert dq is None and dv is None
        assert dk.shape == (1, 4, 2, 8)
        assert dsink.shape == (2,)


def test_the_package_knows_it_without_an_import() -> None:
    assert cuflash.distributed is distributed
    assert set(distributed.__all__) <= set(dir(distributed))


def test_selftest(capsys: pytest.CaptureFixture[str]) -> None:
    from cuflash.distributed import __main__ as selftest

    assert selftest.main(["--selftest", "--device", "cpu", "--world", "3", "--seqlen", "100"]) == 0
    printed = capsys.readouterr().out
    assert "3 ranks, each a thread with NumPy arrays, 100 tokens" in printed
    assert "every rank computes what one device does" in printed
    for scheme in ("ring", "heads"):
        for order in ORDERS:
            assert any(line.split()[:2] == [scheme, order] for line in printed.splitlines())
    assert "grid" not in printed  # three ranks make none
    assert selftest.main(["--selftest", "--device", "cpu", "--world", "4", "--seqlen", "100"]) == 0
    assert "grid     zigzag" in capsys.readouterr().out


def test_selftest_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cuflash.distributed import __main__ as selftest
    from cuflash.distributed import ring_passes

    monkeypatch.setattr(ring_passes, "merge_parts", lambda parts, out, lse: (out.fill(0), lse.fill(0)))
    assert selftest.main(["--selftest", "--device", "cpu", "--world", "2", "--seqlen", "64"]) == 1
    assert "errors above" in capsys.readouterr().out


def seen_by_positions(
    rows: Array, keys: Array, window: tuple[int | None, int | None], edges: tuple[int, ...] | None
) -> Array:
    """Return bool (rows, keys) that tells which tokens see which, by their positions."""
    left, right = window
    distance = keys - rows[:, None]
    shown = np.ones(distance.shape, bool)
    if left is not None:
        shown &= distance >= -left
    if right is not None:
        shown &= distance <= right
    if edges is not None:
        sequence = [np.searchsorted(edges, x, side="right") for x in (rows, keys)]
        inside = [(s > 0) & (s < len(edges)) for s in sequence]
        shown &= (sequence[0][:, None] == sequence[1]) & inside[0][:, None] & inside[1]
    return shown


@pytest.mark.parametrize("order", ORDERS)
@given(data=st.data())
def test_regions_cover_what_is_seen_once(order: str, data: st.DataObject) -> None:
    """Every pair that sees is in one region, and a region that sees all hides nothing."""
    world, seqlen = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 60))
    sides = st.none() | st.integers(0, 40)
    window = data.draw(st.sampled_from(((None, 0), (None, None)))) if data.draw(st.booleans()) else None
    window = window or (data.draw(sides), data.draw(sides))
    edges = None
    if data.draw(st.booleans()):
        edges = tuple(sorted(data.draw(st.lists(st.integers(0, seqlen), min_size=2, max_size=5))))
    for rank in range(world):
        for source in range(world):
            own, others = (stretches_of(seqlen, r, world, order) for r in (rank, source))
            rows, keys = (
                np.concatenate([s.first + s.stride * np.arange(s.length) for s in x]).astype(int) for x in (own, others)
            )
            expected = seen_by_positions(rows, keys, window, edges)
            count = np.zeros(expected.shape, int)
            for region in regions_of(own, others, rank == source, window, edges, data.draw(st.booleans())):
                block = expected[region.queries.rows, region.keys.rows]
                count[region.queries.rows, region.keys.rows] += block
                assert block.all() or not region.sees_all
                assert block.any() or region.edges is not None
            np.testing.assert_array_equal(count, expected)
            # The two halves of a rank's own regions are the same pairs.
            for is_causal in {False, window[1] is not None and window[1] <= 0}:
                own_regions = regions_of(own, own, True, window, edges, False)
                halved, whole = np.zeros((2, len(rows), len(rows)), int)
                its = seen_by_positions(rows, rows, window, edges)
                for region in own_regions:
                    whole[region.queries.rows, region.keys.rows] += its[region.queries.rows, region.keys.rows]
                for region in itertools.chain(*halves_of(own_regions, is_causal)):
                    halved[region.queries.rows, region.keys.rows] += its[region.queries.rows, region.keys.rows]
                np.testing.assert_array_equal(halved, whole)


def test_a_causal_step_of_the_zigzag_order_is_one_call() -> None:
    """Three quarters of the pairs are seen by calls without a mask."""
    world, seqlen = 4, 64
    for rank in range(world):
        for source in range(world):
            own, others = (stretches_of(seqlen, r, world, "zigzag") for r in (rank, source))
            (region,) = regions_of(own, others, rank == source, (None, 0), None, False)
            assert region.sees_all == (rank != source)
            assert region.queries.length * region.keys.length == (256 if rank == source else 128)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_kernels_of_ranks_are_one_device(dtype: str, packed: bool, capability: tuple[int, int]) -> None:
    """Kernels' partial results, merged and summed by kernels, are right; ranks follow each other on one test device."""
    rng = np.random.default_rng(4)
    arrays = make_arrays(rng, 150, (4, 2), None if packed else 2, dtype, (64, 64))
    edges = np.array([0, 7, 90, 140], np.int32) if packed else None
    options: dict[str, Any] = {"causal": True, "sink": rng.standard_normal(4).astype(accum_dtype(arrays["q"].dtype))}
    spread_options = options if edges is None else {**options, "cu_seqlens": edges}
    expected = alone(arrays, options, edges)
    with hook.kernels_on(CpuDevice(capability, 3)):
        for _ in range(3):  # the third time launches are repeated by addresses
            found = spread(SCHEMES["ring"][0], 3, "zigzag", arrays, packed, spread_options, is_led=True)
            assert_same(found, expected, 1e-12 if dtype == "float64" else 4e-3)


# Users' own rules have the indices of the whole sequence, and gradients of operands are sums over ranks.


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    return s * 0.5 + table[b, h, (j - i) % 7] * np.tanh(s)


def shown(b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    return (i - j + b) % 4 != kind[h]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packed", [False, True])
def test_rules_over_ranks(name: str, order: str, packed: bool) -> None:
    if name == "ulysses":
        order = "plain" if order == ORDERS[0] else order
    edges = np.array([0, 5, 17, 29], np.int32) if packed else None
    leading = () if packed else (2,)
    rng = np.random.default_rng(7)
    shapes = {"q": (*leading, 29, 4, 8), "k": (*leading, 29, 2, 8), "v": (*leading, 29, 2, 8)}
    arrays = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    arrays |= {"dout": rng.standard_normal(shapes["q"])}
    arrays |= {"dlse": rng.standard_normal((4, 29) if packed else (2, 4, 29))}
    options = {
        "score_mod": scored,
        "mask_mod": shown,
        "operands": (rng.standard_normal((3, 4, 7)), np.array([0, 1, 2, 3])),
        "causal": True,
        "sink": rng.standard_normal(4),
    }
    given = {**options, "cu_seqlens": edges} if packed else options
    found, expected = spread(SCHEMES[name][0], 3, order, arrays, packed, given), alone(arrays, options, edges)
    assert found.keys() == expected.keys() and "extra1" in found
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, atol=1e-12, err_msg=key)


def test_ranks_compare_functions_by_name_and_operands_by_shape() -> None:
    q = np.zeros((1, 6, 2, 4))

    def other(s: Any, b: Any, h: Any, i: Any, j: Any, *operands: Any) -> Any:
        return s

    def work(comm: Any) -> None:
        part = distributed.shard(q, comm, "plain")
        mod = other if comm.rank else scored
        distributed.ring_attention(
            part, part, part, comm, order="plain", score_mod=mod, operands=(np.zeros((1, 2, 7)), np.zeros(2, int))
        )

    def sized(comm: Any) -> None:
        part = distributed.shard(q, comm, "plain")
        operands = (np.zeros((1, 2, 7 + comm.rank)), np.zeros(2, int))
        distributed.ring_attention(part, part, part, comm, order="plain", score_mod=scored, operands=operands)

    for bad, word in ((work, "score_mod"), (sized, "operands")):
        errors = errors_of(2, bad)
        assert all(isinstance(error, ValueError) and word in str(error) for error in errors)
