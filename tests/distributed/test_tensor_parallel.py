"""Heads over ranks, projected and summed, give the results of one device with all heads."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rank_cases import errors_of
from strategies import examples

import cuflash
from cuflash import distributed
from cuflash.distributed import projected_blocks, tensor_parallel
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator, Group, Pending
from cuflash.distributed.products import product
from cuflash.distributed.projected_blocks import ProjectedBlocks
from cuflash.distributed.steps import taken
from cuflash.distributed.tensor_parallel import blocks_of

Array = NDArray[Any]
MODEL = 6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that every call has several."""
    monkeypatch.setattr(tensor_parallel, "LEAST_ROWS", 1)
    monkeypatch.setattr(tensor_parallel, "_ROWS_OF_TILES", 5)


def make(
    rng: np.random.Generator,
    heads: tuple[int, int],
    seqlens: tuple[int, int],
    batch: int | None,
    dtype: str = "float64",
    dims: tuple[int, int] = (8, 5),
) -> dict[str, Any]:
    lead = () if batch is None else (batch,)
    return {
        "q": gaussian(rng, (*lead, seqlens[0], heads[0], dims[0]), dtype),
        "k": gaussian(rng, (*lead, seqlens[1], heads[1], dims[0]), dtype),
        "v": gaussian(rng, (*lead, seqlens[1], heads[1], dims[1]), dtype),
        "w_out": gaussian(rng, (heads[0], dims[1], MODEL), dtype),
        "dy": gaussian(rng, (*lead, seqlens[0], MODEL), dtype),
    }


def alone(arrays: dict[str, Array], edges: Array | None, options: dict[str, Any]) -> list[Array]:
    """Return y, dq, dk, dv, dw_out and the extras' gradients of one device with all heads."""
    q, k, v, w_out, dy = arrays.values()
    if edges is None:
        out, backward = cuflash.attention_vjp(q, k, v, **options)
    else:
        out, backward = cuflash.attention_varlen_vjp(q, k, v, edges, edges, **options)
        inside = np.zeros(len(dy), bool)
        inside[edges[0] : edges[-1]] = True
        dy = np.where(inside[:, None], dy, 0)
    wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
    dout = np.einsum("...m,hdm->...hd", dy.astype(wide), w_out.astype(wide)).astype(q.dtype)
    y = np.einsum("...hd,hdm->...m", out.astype(wide), w_out.astype(wide)).astype(q.dtype)
    rows = tuple(range(dy.ndim - 1))
    dw_out = np.tensordot(out.astype(wide), dy.astype(wide), (rows, rows)).astype(q.dtype)
    dq, dk, dv, *extras = backward(dout)
    return [y, dq, dk, dv, dw_out, *extras]


def spread(
    world: int, kv_shares: list[int], arrays: dict[str, Array], edges: Array | None, options: dict[str, Any]
) -> list[Array]:
    """Return the same results of ranks, of which rank r has `kv_shares[r]` KV heads."""
    group = arrays["q"].shape[-2] // arrays["k"].shape[-2]
    bounds = np.cumsum([0, *kv_shares])

    def work(comm: Communicator) -> tuple[Any, ...]:
        kv = slice(bounds[comm.rank], bounds[comm.rank + 1])
        own = slice(kv.start * group, kv.stop * group)
        mine = {name: x[..., own] for name, x in options.items() if name in ("sink", "alibi_slopes")}
        q, k, v = arrays["q"][..., own, :], arrays["k"][..., kv, :], arrays["v"][..., kv, :]
        arguments = q, k, v, arrays["w_out"][own], comm
        its = {**options, **mine, "cu_seqlens": edges}
        y, backward = distributed.attention_allreduce_vjp(*arguments, **its)
        np.testing.assert_array_equal(y, distributed.attention_allreduce(*arguments, **its))
        backward(arrays["dy"])
        return (y, *backward(arrays["dy"]))

    results = run(world, work)
    for other in results[1:]:
        np.testing.assert_array_equal(other[0], results[0][0])  # the same bits on every rank
    by_name = list(zip(*results, strict=True))
    y, dq, dk, dv, dw_out, *extras = by_name
    joined = [np.concatenate(x, axis=-2) for x in (dq, dk, dv)]
    of_heads = sum(name in options for name in ("sink", "alibi_slopes"))
    for of_operand in extras[of_heads:]:  # a sum over the ranks, which every rank has
        np.testing.assert_array_equal(of_operand, [of_operand[0]] * world)
    joined_extras = [np.concatenate(x, axis=-1) for x in extras[:of_heads]]
    return [y[0], *joined, np.concatenate(dw_out), *joined_extras, *(x[0] for x in extras[of_heads:])]


def assert_same(found: list[Array], expected: list[Array], rounding: float) -> None:
    for index, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.dtype == y.dtype
        limit = rounding * max(1.0, float(np.abs(y.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            x.astype(np.float64), y.astype(np.float64), rtol=0, atol=limit, err_msg=f"result {index}"
        )


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    """Compute a rule that depends on the sequence, on the head among those of all ranks, and on places."""
    return s * 0.5 + table[b, h, (j - i) % 7] * np.tanh(s)


def shown(b: Any, h: Any, i: Any, j: Any, table: Any, kind: Any) -> Any:
    return (i - j + b) % 4 != kind[h]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (6, 2)},
    "window of nothing": {"window": (0, None), "causal": True},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.4},
    "alibi": {"alibi_slopes": np.linspace(0.05, 0.4, 6)},
    "sink": {"sink": np.linspace(-1, 1, 6)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "rules": {
        "score_mod": scored,
        "mask_mod": shown,
        "operands": (np.random.default_rng(3).standard_normal((4, 6, 7)), np.arange(6) % 5),
        "causal": True,
        "sink": np.linspace(-1, 1, 6),
    },
    "all": {
        "window": (20, 3),
        "softcap": 3.0,
        "alibi_slopes": np.linspace(0.05, 0.4, 6),
        "sink": np.linspace(-1, 1, 6),
        "dropout_p": 0.2,
        "dropout_seed": np.array([5], np.uint64),
    },
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kv_shares", [[3], [1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_option(packed: bool, name: str, kv_shares: list[int]) -> None:
    rng = np.random.default_rng(0)
    seqlens = (41, 41) if packed else (23, 31)
    arrays = make(rng, (6, 3), seqlens, None if packed else 2)
    edges = np.array([2, 9, 9, 20, 36], np.int32) if packed else None
    found = spread(len(kv_shares), kv_shares, arrays, edges, OPTIONS[name])
    assert_same(found, alone(arrays, edges, OPTIONS[name]), 1e-13)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["alibi", "all"])
def test_as_many_queries_as_keys(name: str) -> None:
    """The first block begins where the whole does, and its last query is not aligned to the last key."""
    arrays = make(np.random.default_rng(0), (6, 3), (31, 31), 2)
    found = spread(2, [1, 2], arrays, None, OPTIONS[name])
    assert_same(found, alone(arrays, None, OPTIONS[name]), 1e-13)


@examples(100)
@given(st.data())
def test_drawn_problems(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kv_shares = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
    group = data.draw(st.integers(1, 2))
    heads = sum(kv_shares) * group, sum(kv_shares)
    packed = data.draw(st.booleans())
    sq = data.draw(st.integers(0, 40))
    sk = sq if packed else data.draw(st.integers(0, 40))
    edges = None
    if packed:
        edges = np.sort(rng.integers(0, sq + 1, data.draw(st.integers(1, 5)))).astype(np.int32)
    arrays = make(rng, heads, (sq, sk), None if packed else data.draw(st.integers(0, 3)))
    sides = st.none() | st.integers(0, 20)
    options: dict[str, Any] = {"causal": data.draw(st.booleans()), "window": (data.draw(sides), data.draw(sides))}
    if data.draw(st.booleans()):
        options["sink"] = rng.standard_normal(heads[0])
    if data.draw(st.booleans()):
        options["alibi_slopes"] = rng.uniform(0, 0.2, heads[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "LEAST_ROWS", data.draw(st.integers(1, 30)))
        patch.setattr(tensor_parallel, "_ROWS_OF_TILES", data.draw(st.integers(1, 9)))
        found = spread(len(kv_shares), kv_shares, arrays, edges, options)
    assert_same(found, alone(arrays, edges, options), 1e-12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_of_16_bits_are_rounded_once(dtype: str) -> None:
    """y is the float32 sum of all ranks' float32 products, rounded at the end."""
    arrays = make(np.random.default_rng(1), (8, 4), (37, 37), 2, dtype, (32, 32))
    found = spread(4, [1, 1, 1, 1], arrays, None, {"causal": True})
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    exact = alone(wide, None, {"causal": True})
    its = alone(arrays, None, {"causal": True})
    for x, y, z in zip(found, exact, its, strict=True):
        error, of_one = (np.abs(a.astype(np.float64) - y).max() for a in (x, z))
        assert error <= 1.25 * of_one + 1e-6


def test_default_blocks() -> None:
    """Long sequences are cut into eight blocks at tiles' edges, short ones not at all."""
    assert blocks_of([128] * 64, 8) == [(8 * n, 8 * n + 8) for n in range(8)]
    assert blocks_of([128] * 8, 8) == [(0, 8)]
    assert blocks_of([], 8) == []
    assert blocks_of([5000, 1, 1, 5000, 2000], 8) == [(0, 1), (1, 4), (4, 5)]
    arrays = make(np.random.default_rng(2), (2, 2), (2500, 20), 1, "float32")
    assert_same(spread(2, [1, 1], arrays, None, {}), alone(arrays, None, {}), 1e-5)


def test_a_block_travels_while_the_next_one_is_computed() -> None:
    """No rank waits for a block's rows before it has computed the next block."""
    events: list[list[str]] = [[], []]

    def work(comm: Communicator) -> None:
        told = events[comm.rank]

        class Noted(Group):
            """Every message of the communicator is noted when it is waited for."""

            def arriving(self, source: int, tag: int = 0, into: Any = None, ready: Any = None) -> Any:
                pending = yield from super().arriving(source, tag, into, ready)
                return Note(pending, tag)

        class Note(Pending):
            def __init__(self, pending: Pending, tag: int) -> None:
                self.pending, self.tag = pending, tag

            def get(self) -> Any:
                told.append(f"wait for {('weights', 'out', 'rows')[self.tag]}")
                return self.pending.get()

        y = np.zeros((6, 3))
        w_out = np.full((1, 1, 3), comm.rank + 1.0)
        blocks = ProjectedBlocks(Noted(comm, range(2)), [1, 1], w_out, y)
        taken(blocks.begin())
        for block in range(3):
            told.append(f"compute {block}")
            taken(blocks.add(np.full((2, 1, 1), 10.0**block)))
        taken(blocks.finish())
        np.testing.assert_array_equal(y, np.repeat([3.0, 30.0, 300.0], 2)[:, None] * np.ones(3))
        comm.barrier()

    run(2, work)
    for told in events:
        assert told[:4] == ["compute 0", "compute 1", "wait for out", "wait for weights"]  # of block 0
        assert told[4:7] == ["compute 2", "wait for out", "wait for rows"]  # of block 1, and of block 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("transposed", ["", "a", "b"])
def test_products(device: Any, dtype: str, transposed: str) -> None:
    rng = np.random.default_rng(3)
    a, b = gaussian(rng, (7, 9), dtype), gaussian(rng, (9, 4), dtype)
    given = (
        np.ascontiguousarray(a.T) if transposed == "a" else a,
        np.ascontiguousarray(b.T) if transposed == "b" else b,
    )
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0)  # sums are rounded once
    (out,) = device.put((np.full((7, 4), np.nan, a.dtype),))
    for target in (None, out):
        found = device.get(product(*device.put(given), transposed=transposed, out=target))
        assert found.dtype == a.dtype
        error = np.abs(found.astype(np.float64) - exact)
        assert (error <= rounding * np.abs(exact) + (1e-13 if dtype == "float64" else 3e-6)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"w_out": np.zeros((2, 4, MODEL))},
            ValueError,
            "w_out: expected (heads of this rank, head_dim_v, model) = (2, 5,",
        ),
        ({"w_out": np.zeros((2, 5, MODEL), np.float32)}, TypeError, "w_out: expected q's dtype float64, got float32"),
        ({"w_out": np.zeros((2, 5))}, ValueError, "w_out: expected (heads of this rank"),
        ({"w_out": None}, TypeError, "w_out: expected an array"),
        ({"bias": np.zeros((9, 9))}, NotImplementedError, "bias: expected None"),
        ({"mask": np.ones((9, 9), bool)}, NotImplementedError, "mask: expected None"),
        ({"q_lengths": np.ones(1, np.int32)}, NotImplementedError, "q_lengths: expected None"),
        ({"kv_lengths": np.ones(1, np.int32)}, NotImplementedError, "kv_lengths: expected None"),
        ({"causal": 1}, TypeError, "causal: expected a bool"),
        ({"dropout_p": 0.1}, ValueError, "dropout_seed: expected"),
        ({"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens: expected a NumPy int32 array"),
        ({"hidden": 3}, TypeError, "hidden: no such option"),
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_bad_input_is_told_on_every_rank(
    everywhere: bool, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays = make(np.random.default_rng(0), (2, 2), (9, 9), 1)

    def work(comm: Communicator) -> None:
        its = {**arrays, **(change if everywhere or comm.rank == 1 else {})}
        its.pop("dy")
        distributed.attention_allreduce_vjp(comm=comm, **its)

    found = errors_of(2, work)
    for raised in found:
        assert type(raised) is (error if everywhere else ValueError)
        assert message in str(raised)
        assert everywhere or "rank 1 of 2 finds the call invalid" in str(raised)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("causal", {"causal": True}),
        ("softcap", {"softcap": 3.0}),
        ("q", {"q": np.zeros((1, 8, 2, 8))}),
        ("k", {"k": np.zeros((1, 8, 2, 8)), "v": np.zeros((1, 8, 2, 5))}),
        ("w_out", {"w_out": np.zeros((2, 5, MODEL + 1))}),
        ("sink", {"sink": np.zeros(2)}),
        ("dropout_seed", {"dropout_p": 0.5, "dropout_seed": 8}),
    ],
)
def test_ranks_that_disagree_all_raise(name: str, change: dict[str, Any]) -> None:
    arrays = make(np.random.default_rng(0), (2, 2), (9, 9), 1)
    base = {"dropout_p": 0.5, "dropout_seed": 7} if name == "dropout_seed" else {}

    def work(comm: Communicator) -> None:
        its = {**arrays, **base, **(change if comm.rank == 1 else {})}
        its.pop("dy")
        distributed.attention_allreduce(comm=comm, **its)

    for raised in errors_of(2, work):
        assert type(raised) is ValueError
        assert f"{name}: expected the same on every rank" in str(raised)


def test_fp8_arrays_have_no_gradients() -> None:
    q, w_out = np.ones((1, 6, 2, 4), np.float16), np.ones((2, 4, MODEL), np.float16)
    codes: Any = np.zeros((1, 6, 1, 4), np.uint8)

    def work(comm: Communicator) -> Any:
        return distributed.attention_allreduce_vjp(q, codes, codes, w_out, comm)

    for raised in errors_of(2, work):
        assert isinstance(raised, NotImplementedError) and "gradients of attention with FP8 arrays" in str(raised)


def test_a_bad_dy_is_told_on_every_rank() -> None:
    arrays = make(np.random.default_rng(0), (2, 2), (9, 9), 1)
    dy = arrays.pop("dy")

    def work(comm: Communicator) -> None:
        _, backward = distributed.attention_allreduce_vjp(comm=comm, **arrays)
        backward(dy[:, : 9 - comm.rank])

    for raised in errors_of(2, work):
        assert type(raised) is ValueError
        assert "dy: expected shape (1, 9, 6)" in str(raised)


def test_a_rank_that_does_not_come() -> None:
    arrays = make(np.random.default_rng(0), (2, 2), (9, 9), 1)
    arrays.pop("dy")

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            distributed.attention_allreduce(comm=comm, **arrays)

    start = time.monotonic()
    first, second = errors_of(2, work, time_limit=0.2)
    assert isinstance(first, TimeoutError)
    assert second is None
    assert time.monotonic() - start < 10


def test_a_rank_that_fails_ends_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = make(np.random.default_rng(0), (2, 2), (9, 9), 1)
    arrays.pop("dy")
    failing = threading.local()

    def fails(*given: Any, **options: Any) -> Any:
        if getattr(failing, "here", False):
            raise ArithmeticError("no memory")
        return product(*given, **options)

    monkeypatch.setattr(projected_blocks, "product", fails)

    def work(comm: Communicator) -> None:
        failing.here = comm.rank == 1
        distributed.attention_allreduce(comm=comm, **arrays)

    first, second = errors_of(2, work)
    assert isinstance(second, ArithmeticError)
    assert isinstance(first, RuntimeError)
    assert "rank 1 failed: ArithmeticError: no memory" in str(first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_gpus(dtype: str) -> None:
    import cupy

    world = cupy.cuda.runtime.getDeviceCount()
    if world < 2:
        pytest.skip("one GPU: ranks of the same GPU are tested with NumPy arrays")
    arrays = make(np.random.default_rng(4), (2 * world, world), (2048, 2048), 2, dtype, (64, 64))
    expected = alone(arrays, None, {"causal": True})

    def work(comm: Communicator) -> list[Array]:
        kv, own = slice(comm.rank, comm.rank + 1), slice(2 * comm.rank, 2 * comm.rank + 2)
        q, k, v, w_out, dy = (cupy.asarray(x) for x in arrays.values())
        y, backward = distributed.attention_allreduce_vjp(
            q[:, :, own], k[:, :, kv], v[:, :, kv], w_out[own], comm, causal=True
        )
        return [cupy.asnumpy(x) for x in (y, *backward(dy))]

    results = run(world, work, range(world))
    joined = [results[0][0], *(np.concatenate([r[n] for r in results], axis=-2) for n in (1, 2, 3))]
    assert_same([*joined, np.concatenate([r[4] for r in results])], expected, 1e-5 if dtype == "float32" else 3e-2)
