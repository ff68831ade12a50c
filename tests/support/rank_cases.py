"""Calls over ranks that are threads, their whole results, and those of one device, for drawn problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import accum_dtype, gaussian
from hypothesis import strategies as st
from numpy.typing import NDArray

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import run, run_threads
from cuflash.distributed.communicators import DEFAULT_TIME_LIMIT, Communicator
from cuflash.distributed.order import ORDERS
from cuflash.distributed.rank_threads import make_threads

Array = NDArray[Any]
SCHEMES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring": (distributed.ring_attention_vjp, distributed.ring_attention_backward),
    "ulysses": (distributed.ulysses_attention_vjp, distributed.ulysses_attention_backward),
}


def errors_of(world: int, work: Callable[[Communicator], Any], **options: Any) -> list[BaseException | None]:
    """Return what every rank raised."""

    def caught(comm: Communicator) -> BaseException | None:
        try:
            work(comm)
        except Exception as error:
            return error
        return None

    return run(world, caught, **options)


def spread(
    make: Callable[..., Any],
    world: int,
    order: str,
    arrays: dict[str, Array],
    packed: bool,
    options: dict[str, Any],
    *,
    is_led: bool = False,
) -> dict[str, Array]:
    """Return whole results of a distributed vjp on whole arrays; with `is_led` as threads with GPUs compute them."""
    axis = 0 if packed else 1

    def work(comm: Communicator) -> dict[str, Array]:
        parts = {
            key: distributed.shard(x, comm, order, axis) for key, x in arrays.items() if key in ("q", "k", "v", "dout")
        }
        dlse = distributed.shard(arrays["dlse"], comm, order, axis=-1)
        (out, lse), backward = make(parts["q"], parts["k"], parts["v"], comm, order=order, return_lse=True, **options)
        grads = backward(parts["dout"], dlse)
        names = ("dq", "dk", "dv")
        whole = {"out": distributed.unshard(out, comm, order, axis), "lse": distributed.unshard(lse, comm, order, -1)}
        whole |= {n: distributed.unshard(x, comm, order, axis) for n, x in zip(names, grads, strict=False)}
        return whole | {f"extra{i}": x for i, x in enumerate(grads[3:])}

    results = run_threads(make_threads(world, None, DEFAULT_TIME_LIMIT, True, is_led=is_led), work)
    for other in results[1:]:
        for key, x in results[0].items():
            np.testing.assert_array_equal(x, other[key])
    found: dict[str, Array] = results[0]
    return found


def alone(arrays: dict[str, Array], options: dict[str, Any], edges: Array | None) -> dict[str, Array]:
    """Return the results of one device."""
    q, k, v, dout, dlse = (arrays[key] for key in ("q", "k", "v", "dout", "dlse"))
    if edges is None:
        (out, lse), backward = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    else:
        (out, lse), backward = cuflash.attention_varlen_vjp(q, k, v, edges, edges, return_lse=True, **options)
    grads = backward(dout, dlse)
    names = ("dq", "dk", "dv", *(f"extra{i}" for i in range(len(grads) - 3)))
    return {"out": out, "lse": lse, **dict(zip(names, grads, strict=True))}


def make_arrays(
    rng: np.random.Generator, seqlen: int, heads: tuple[int, int], batch: int | None, dtype: str, dims: tuple[int, int]
) -> dict[str, Array]:
    lead = () if batch is None else (batch,)
    shapes = {
        "q": (*lead, seqlen, heads[0], dims[0]),
        "k": (*lead, seqlen, heads[1], dims[0]),
        "v": (*lead, seqlen, heads[1], dims[1]),
        "dout": (*lead, seqlen, heads[0], dims[1]),
    }
    arrays = {name: gaussian(rng, shape, dtype) for name, shape in shapes.items()}
    return arrays | {"dlse": rng.standard_normal((*lead, heads[0], seqlen)).astype(accum_dtype(arrays["q"].dtype))}


def assert_same(found: dict[str, Array], expected: dict[str, Array], rounding: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        limit = rounding * max(1.0, float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0)))
        np.testing.assert_array_equal(np.isneginf(found[name]), np.isneginf(x), err_msg=name)
        shown = np.isfinite(x)
        np.testing.assert_allclose(found[name][shown], x[shown], rtol=0, atol=limit, err_msg=name)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 5))
    packed = draw(st.booleans())
    num_heads_kv = draw(st.sampled_from((1, 2, 3)))
    heads = num_heads_kv * draw(st.sampled_from((1, 2, 3))), num_heads_kv
    seqlen = draw(st.integers(0, 70))
    batch = None if packed else draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options: dict[str, Any] = {}
    edges = None
    if packed:
        cuts = sorted(draw(st.lists(st.integers(0, seqlen), max_size=4)))
        edges = np.array([0, *cuts, draw(st.sampled_from((seqlen, max([0, *cuts]))))], np.int32)
    num_sequences = len(edges) - 1 if edges is not None else batch
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        sides = st.none() | st.integers(0, 40)
        options["window"] = draw(sides), draw(sides)
    if draw(st.booleans()):
        options["softcap"] = 3.0
    if draw(st.booleans()):
        options["sink"] = rng.standard_normal(heads[0])
    if draw(st.booleans()):
        rows = draw(st.sampled_from(((), (1,), (num_sequences,))))
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, (*rows, heads[0]))
    if draw(st.booleans()):
        options |= {"dropout_p": draw(st.sampled_from((0.1, 0.6))), "dropout_seed": draw(st.integers(0, 2**64 - 1))}
    return {
        "world": world,
        "order": draw(st.sampled_from(ORDERS)),
        "arrays": make_arrays(rng, seqlen, heads, batch, "float64", (8, 5)),
        "options": options,
        "edges": edges,
    }


def call_ring(comm: Communicator, tokens: int = 4, **options: Any) -> Any:
    x = ones(comm, tokens)
    return distributed.ring_attention(x, x, x, comm, **options)


def ones(comm: Communicator, tokens: int = 4, heads: int = 2) -> Array:
    return np.ones((1, tokens, heads, 8), np.float32)
