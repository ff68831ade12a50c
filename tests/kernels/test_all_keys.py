"""Where one tile has all keys, one kernel writes all gradients: on the CPU as several architectures, and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import gaussian, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device, device_of, forget_launches, has_gpu

from cuflash.gpu import launch
from cuflash.plan import listing, sm80_backward

CPUS = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_90": (9, 0)}
needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
MASK = RNG.random((1, 1, 50, 60)) < 0.6
MASK[..., 3, :] = False
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "softcap and sink": {"softcap": 2.0, "causal": True, "sink": np.array([0.3, -1.0, 2.0, 0.5], np.float32)},
    "mask": {"mask": MASK},
    "bias": {"bias": gaussian(RNG, (1, 1, 50, 60), "float32")},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "lengths": {"q_lengths": np.array([0, 41], np.int32), "kv_lengths": np.array([60, 0], np.int32)},
    "deterministic": {"deterministic": True, "causal": True},
}


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


def alone(seqlen_q: int, seqlen_k: int, batch: int = 1, head_dim: int = 64, **others: Any) -> list[str]:
    problem = listing.problem_of("bfloat16", head_dim, head_dim, (), **others)
    problem = replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=batch)
    found = sm80_backward.all_keys(problem, True, (9, 0), 227 * 1024, num_sms=132)
    return [f"{config.tile} {config.num_warps}" for (config,) in found]


def test_when_one_kernel_is_faster() -> None:
    """Few tiles of queries are, and where thread blocks have to share a multiprocessor one small tile."""
    assert alone(20, 20)[0] == "32x32 4"
    assert alone(60, 20)[0] == "64x64 8"  # of one step rather than two
    assert alone(128, 128)[0] == "64x128 8"
    assert alone(60, 60, batch=1000)[0] == "64x64 4"
    assert alone(20, 20, batch=1000, head_dim=256) != []
    for lengths, batch, head_dim in (
        ((60, 129), 1, 64),
        ((300, 60), 1, 64),
        ((200, 60), 1, 128),
        ((60, 60), 1000, 128),
    ):
        assert not alone(*lengths, batch, head_dim)
    assert not alone(60, 60, packed=True)
    assert not alone(60, 60, block_mask=True)
