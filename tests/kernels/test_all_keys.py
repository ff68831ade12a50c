"""Where one tile has all keys, one kernel writes all gradients: on the CPU as several architectures, and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cases import gaussian, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device, device_of, forget_launches, has_gpu

from cuflash.gpu import launch
from cuflash.plan.listing import families as listing
from cuflash.plan.record import Record
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80.tiles import ALONE, Sm80BackwardTile

CPUS = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_90": (9, 0)}
needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)


def options_of(queries: int, keys: int) -> dict[str, dict[str, Any]]:
    """Return options by name, for two sequences of these lengths and four query heads."""
    mask = RNG.random((1, 1, queries, keys)) < 0.6
    mask[..., 3, :] = False
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (7, 3)},
        "softcap and sink": {"softcap": 2.0, "causal": True, "sink": np.array([0.3, -1.0, 2.0, 0.5], np.float32)},
        "mask": {"mask": mask},
        "bias": {"bias": gaussian(RNG, (1, 1, queries, keys), "float32")},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
        "lengths": {
            "q_lengths": np.array([0, queries * 4 // 5], np.int32),
            "kv_lengths": np.array([keys, 0], np.int32),
        },
        "deterministic": {"deterministic": True, "causal": True},
    }


OPTIONS = options_of(50, 60)


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=needs_compiler) for name in CPUS),
        *([pytest.param("cupy", marks=pytest.mark.gpu)] if has_gpu() else []),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give a device; the gradients of q, k and v must come from one kernel."""
    forget_launches()
    if request.param == "cupy":
        yield device_of(request.param)
    else:
        cpu = cpu_device.CpuDevice(CPUS[request.param], num_sms=16)
        yield Device(request.param, np, partial(hook.kernels_on, cpu))
    entries: list[Any] = [x.kernel for x in launch._launches.values() if x.kernel.entry.startswith("backward_sm")]
    assert [(kernel.entry, kernel.config.all_keys) for kernel in entries] == [(sm80_backward.MAIN, True)]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(place: Device, name: str) -> None:
    """All rows are written, those of queries that no key sees and of padding, too."""
    case = gaussian_case(1, "float16", (50, 60), (4, 4), (64, 64), 2, **OPTIONS[name])
    out, lse = case.on(device_of("numpy")).forward()
    with place.active():
        grads = case.on(place).backward(out, lse)
        again = case.on(place).backward(out, lse)
    case.assert_gradients(grads)
    for name_of, x in grads.items():
        assert x is None or x.tobytes() == again[name_of].tobytes(), "nothing is added up in another order"


@pytest.mark.parametrize("dims", [(32, 32), (40, 64)])
@pytest.mark.parametrize(("queries", "keys", "heads"), [(1, 1, (2, 2)), (70, 30, (2, 2)), (9, 64, (4, 2))])
def test_sizes(
    place: Device,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    request: pytest.FixtureRequest,
) -> None:
    case = gaussian_case(2, "float16", (queries, keys), heads, dims, 2, causal=queries == 70)
    out, lse = case.on(device_of("numpy")).forward()
    with place.active():
        grads = case.on(place).backward(out, lse)
    case.assert_gradients(grads)


@needs_compiler
@pytest.mark.parametrize(("keys", "dims"), [(128, (64, 64)), (50, (72, 128)), (50, (160, 160)), (50, (256, 200))])
def test_large_tiles(keys: int, dims: tuple[int, int]) -> None:
    """These need more shared memory than sm_75 has."""
    case = gaussian_case(3, "bfloat16", (35, keys), (2, 2), dims, 2, causal=True)
    out, lse = case.on(device_of("numpy")).forward()
    forget_launches()
    with hook.kernels_on(cpu_device.CpuDevice((8, 0), num_sms=16)):
        grads = case.on(Device("sm_80", np)).backward(out, lse)
    configs: list[Any] = [x.kernel.config for x in launch._launches.values()]
    assert [config.all_keys for config in configs] == [True]
    case.assert_gradients(grads)


# A cluster's shape (blocks with keys of their own, with queries of their own), and lengths for it.
CLUSTERS = {"keys": ((4, 1), (20, 120)), "queries": ((1, 4), (150, 30)), "both": ((3, 2), (75, 90))}
SMALL, SQUARE = (
    next(line for line in ALONE if line.head_dim == head_dim and line.tile.block_m == block_m)
    for head_dim, block_m in ((64, 32), (128, 64))
)


@contextmanager
def in_cluster(
    line: Record[Sm80BackwardTile], keys: int, queries: int, check: cpu_device.Check, adds_apart: bool = False
) -> Iterator[None]:
    """Let a tile have all keys in a cluster, on the CPU as Hopper; nothing else may compute the gradients."""
    tile = replace(line.tile, cluster_keys=keys, cluster_queries=queries, adds_apart=adds_apart)

    def all_keys(problem: Any, *place: Any, num_sms: int) -> Any:
        record = replace(line, tile=tile)
        return sm80_backward.of_cluster(replace(problem, deterministic=False), *place, record=record)

    forget_launches()
    with (
        mock.patch.object(sm80_backward, "all_keys", all_keys),
        hook.kernels_on(cpu_device.CpuDevice((9, 0), num_sms=16, check=check)),
    ):
        yield
    kernels: list[Any] = [x.kernel for x in launch._launches.values() if x.kernel.entry.startswith("backward_sm")]
    assert [(kernel.entry, kernel.config.cluster) for kernel in kernels] == [(sm80_backward.MAIN, keys * queries)]


@needs_compiler
@pytest.mark.parametrize("name", [*OPTIONS, "short lengths"])
@pytest.mark.parametrize("kind", CLUSTERS)
def test_clusters(kind: str, name: str) -> None:
    """Causal and short lengths hide tiles from some thread blocks, and whole steps from all."""
    shape, (queries, keys) = CLUSTERS[kind]
    options = options_of(queries, keys)
    options["short lengths"] = {
        "causal": True,
        "q_lengths": np.array([queries, queries // 3], np.int32),
        "kv_lengths": np.array([keys // 3, keys], np.int32),
    }
    case = gaussian_case(4, "float16", (queries, keys), (4, 2), (64, 64), 2, **options[name])
    out, lse = case.on(device_of("numpy")).forward()
    check = cpu_device.Check.SHARED if name in ("causal", "lengths") else cpu_device.Check.NONE
    with in_cluster(SMALL, *shape, check):
        first, again = (case.on(Device("sm_90", np)).backward(out, lse) for _ in range(2))
    case.assert_gradients(first)
    for name_of, x in first.items():
        assert x is None or x.tobytes() == again[name_of].tobytes(), "nothing is added up in another order"


@needs_compiler
@pytest.mark.parametrize("adds_apart", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3), (3, 2), (5, 1)])
def test_shapes_of_clusters(shape: tuple[int, int], adds_apart: bool) -> None:
    """Keys may leave a thread block without any, queries a group without a step; head dims need not fill pieces."""
    case = gaussian_case(5, "bfloat16", (90, 60), (3, 1), (72, 100), 2, causal=True)
    out, lse = case.on(device_of("numpy")).forward()
    line = replace(SQUARE, tile=replace(SMALL.tile, block_n=64)) if shape == (1, 1) else SQUARE
    with in_cluster(line, *shape, cpu_device.Check.NONE, adds_apart):
        grads = case.on(Device("sm_90", np)).backward(out, lse)
    case.assert_gradients(grads)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("head_dim", [33, 56])
@pytest.mark.parametrize("sink", [False, True])
def test_tiles_of_queries_that_see_no_key(shape: tuple[int, int], head_dim: int, sink: bool) -> None:
    """Their dq is zeros, and nothing is read for them but what the gradient of a sink takes."""
    keys = 5 if shape[0] == 1 else 40
    options = {"sink": np.array([0.3, -1.0], np.float32)} if sink else {}
    case = gaussian_case(7, "float16", (230, keys), (2, 1), (head_dim, head_dim), 2, causal=True, **options)
    out, lse = case.on(device_of("numpy")).forward()
    if not sink:
        case.dout[:, : 230 - keys - 32] = np.nan
    with in_cluster(SMALL, *shape, cpu_device.Check.NONE):
        grads = case.on(Device("sm_90", np)).backward(out, lse)
    assert not grads["q"][:, : 230 - keys].any()
    case.dout[:, : 230 - keys] = 0
    case.assert_gradients(grads)


@needs_compiler
def test_no_query_takes_part_in_tiles_that_it_does_not_see() -> None:
    """NaN of a key stays where a tile of queries sees some key of its tile."""
    case = gaussian_case(6, "float16", (90, 90), (2, 1), (64, 64), 1, causal=True)
    case.k[:, 80] = np.nan
    out, lse = case.on(device_of("numpy")).forward()
    with in_cluster(SMALL, 3, 2, cpu_device.Check.NONE):
        grads = case.on(Device("sm_90", np)).backward(out, lse)
    dq = grads["q"]
    assert np.isfinite(dq[:, :64]).all()
    assert np.isnan(dq[:, 80:]).all()


def alone(
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 1,
    head_dim: int = 64,
    capability: tuple[int, int] = (8, 0),
    heads: tuple[int, int] = (1, 1),
    **others: Any,
) -> list[str]:
    problem = listing.problem_of("bfloat16", head_dim, head_dim, (), **others)
    problem = replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=batch)
    problem = replace(problem, num_heads_q=heads[0], num_heads_kv=heads[1])
    found = sm80_backward.all_keys(problem, True, capability, 227 * 1024, num_sms=132)
    clusters = (f" {c.cluster_keys}x{c.cluster_queries}" if c.cluster > 1 else "" for (c,) in found)
    return [f"{c.tile} {c.num_warps}{cluster}" for (c,), cluster in zip(found, clusters, strict=True)]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_when_one_kernel_is_faster(capability: tuple[int, int]) -> None:
    """Few tiles of queries are, and where thread blocks have to share a multiprocessor one small tile."""
    of_gpu: dict[str, Any] = {"capability": capability}
    assert alone(20, 20, **of_gpu)[0] == "32x32 4"
    assert alone(60, 20, **of_gpu)[0] == "64x64 8"  # of one step rather than two
    assert alone(60, 60, batch=1000, **of_gpu)[0] == "64x64 4"
    assert alone(20, 20, batch=1000, head_dim=256, **of_gpu) != []
    assert not alone(60, 60, 1000, 128, **of_gpu)
    assert not alone(60, 60, packed=True, **of_gpu)
    assert not alone(60, 60, block_mask=True, **of_gpu)


def test_clusters_are_for_hopper() -> None:
    """There heads of more keys than a tile has, and of more queries than one thread block visits soon, are fast."""
    many = ((60, 129), (300, 60)), ((60, 129),)
    for lengths, head_dim in ((one, dim) for dim, each in zip((64, 128), many, strict=True) for one in each):
        assert not alone(*lengths, 1, head_dim)
        assert alone(*lengths, 1, head_dim, (9, 0)) != []
    assert alone(128, 128)[0] == "64x128 8"
    hopper = partial(alone, capability=(9, 0))
    assert hopper(128, 128)[0] == "64x32 4 4x2"
    assert hopper(12, 372, 1, 112, heads=(6, 6))[0] == "16x64 4 6x1"
    assert hopper(1, 433, 6, 128, heads=(4, 4))[0] == "16x64 4 7x1"
    assert hopper(13, 6, 1, 48, heads=(55, 5))[0] == "32x32 4 1x8"
    assert hopper(306, 1, 10, 104)[0].endswith("1x8")
    causal: dict[str, Any] = {"window_right": 0}
    assert hopper(63, 10, 10, 64, **causal)[0] == "32x32 4", "all but one tile of queries see no key"
    assert not hopper(306, 1, 10, 104, **causal), "a thread block makes zeros of so many queries slowly"
    assert not hopper(20, 2100), "a cluster has eight thread blocks at most"
    assert not hopper(20, 500, 100), "clusters do not wait for others"
    assert not hopper(2, 624, 2, 80, heads=(12, 12)), "nor do clusters of five, which take multiprocessors by twos"
    assert not hopper(1109, 36, 3, 200), "several steps of wide heads are slow"
    assert not hopper(4096, 60), "there several launches share the queries better"
    assert not hopper(108, 3, 2, 232), "where one tile has all keys, two launches are enough"
