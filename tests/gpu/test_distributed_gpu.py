"""Attention over the GPUs of one process gives the results of one GPU on the whole arrays."""

from __future__ import annotations

from typing import Any

import devices
import numpy as np
import pytest
from cases import accum_dtype, gaussian
from numpy.typing import NDArray

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import main, run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import ORDERS

Array = NDArray[Any]


def grid(q: Any, k: Any, v: Any, comm: Communicator, **options: Any) -> Any:
    """Deal heads among pairs of GPUs, or all of an odd number, which rings join."""
    return distributed.ring_attention_vjp(q, k, v, comm, heads=2 if comm.world % 2 == 0 else comm.world, **options)


SCHEMES: dict[str, Any] = {
    "ring": distributed.ring_attention_vjp,
    "heads": distributed.ulysses_attention_vjp,
    "grid": grid,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (300, 20)},
    "softcap": {"causal": True, "softcap": 3.0},
    "alibi": {"causal": True, "alibi_slopes": "slopes"},
    "sink": {"causal": True, "sink": "sink"},
    "dropout": {"causal": True, "dropout_p": 0.2, "dropout_seed": 77},
}
EDGES = np.array([0, 5, 700, 1100, 2000], np.int32)
# Limits of 16 bits are some units in the last place of results of size one, as both results are rounded once.
LIMITS = {"float16": 6e-3, "bfloat16": 4e-2, "float32": 1e-4, "float64": 1e-11}


def num_gpus() -> int:
    if not devices.has_gpu():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def worlds() -> list[int]:
    """Return two ranks, and as many as there are GPUs."""
    return sorted({2, max(2, num_gpus())})


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(num_gpus() < 2, reason="fewer than two GPUs"),
]


def make_arrays(dtype: str, packed: bool) -> dict[str, Array]:
    rng = np.random.default_rng(8)
    lead, seqlen = (() if packed else (2,)), 2050
    shapes = {"q": (4, 64), "k": (2, 64), "v": (2, 128), "dout": (4, 128)}
    arrays = {name: gaussian(rng, (*lead, seqlen, *shape), dtype) for name, shape in shapes.items()}
    accum = accum_dtype(arrays["q"].dtype)
    arrays["dlse"] = rng.standard_normal((*lead, 4, seqlen)).astype(accum)
    arrays["slopes"] = np.array([0.01, 0.1, 0.003, 0.3], accum)
    arrays["sink"] = rng.standard_normal(4).astype(accum)
    return arrays


def results(comm: Communicator, make: Any, order: str, arrays: dict[str, Array], options: Any, packed: bool) -> Any:
    """Return this rank's whole results, as NumPy arrays in float64."""
    import cupy

    axis = 0 if packed else 1
    given = {name: cupy.asarray(x) for name, x in arrays.items()}
    parts = [distributed.shard(given[name], comm, order, axis) for name in ("q", "k", "v", "dout")]
    dlse = distributed.shard(given["dlse"], comm, order, -1)
    own = {name: given.get(x, x) if isinstance(x, str) else x for name, x in options.items()}
    (out, lse), backward = make(*parts[:3], comm, order=order, return_lse=True, **own)
    grads = backward(parts[3], dlse)
    whole = [distributed.unshard(x, comm, order, axis) for x in (out, *grads[:3])]
    whole += [distributed.unshard(lse, comm, order, -1), *grads[3:]]
    return [x.get().astype(np.float64) for x in whole]


def alone(arrays: dict[str, Array], options: Any, packed: bool) -> list[Array]:
    """Return the results of one GPU."""
    import cupy

    given = {name: cupy.asarray(x) for name, x in arrays.items()}
    own = {name: given.get(x, x) if isinstance(x, str) else x for name, x in options.items()}
    own.pop("cu_seqlens", None)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    if packed:
        edges = cupy.asarray(EDGES)
        (out, lse), backward = cuflash.attention_varlen_vjp(q, k, v, edges, edges, return_lse=True, **own)
    else:
        (out, lse), backward = cuflash.attention_vjp(q, k, v, return_lse=True, **own)
    grads = backward(given["dout"], given["dlse"])
    return [x.get().astype(np.float64) for x in (out, *grads[:3], lse, *grads[3:])]


@pytest.mark.parametrize("world", worlds())
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gpus_together_are_one(scheme: str, option: str, dtype: str, packed: bool, world: int) -> None:
    options = OPTIONS[option] | ({"cu_seqlens": EDGES} if packed else {})
    arrays = make_arrays(dtype, packed)
    expected = alone(arrays, options, packed)
    for order in ORDERS:

        def work(comm: Communicator, order: str = order) -> Any:
            return results(comm, SCHEMES[scheme], order, arrays, options, packed)

        for found in run(world, work, range(world)):
            for index, (x, y) in enumerate(zip(found, expected, strict=True)):
                shown = np.isfinite(y)
                np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y), err_msg=f"{order} {index}")
                limit = LIMITS[dtype] * max(1, float(np.abs(y[shown]).max(initial=0)))
                np.testing.assert_allclose(x[shown], y[shown], rtol=0, atol=limit, err_msg=f"{order} {index}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_repeat_their_bits(scheme: str) -> None:
    arrays = make_arrays("bfloat16", False)

    def work(comm: Communicator) -> Any:
        return results(comm, SCHEMES[scheme], "zigzag", arrays, {"causal": True, "deterministic": True}, False)

    first, second = run(2, work, range(2)), run(2, work, range(2))
    for x, y in zip(first[0], second[1], strict=True):
        np.testing.assert_array_equal(x, y)


def test_selftest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--selftest", "--seqlen", "256"]) == 0
    assert "GB/s" in capsys.readouterr().out
