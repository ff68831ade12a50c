"""The mma.sync kernels agree with the reference, on the CPU as several architectures, and on the GPU.

CUFLASH_WITHOUT_WGMMA=1 makes a Hopper GPU take them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cases import gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device, has_gpu

from cuflash import hardware
from cuflash.gpu import launch
from cuflash.plan.listing import families as listing
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import tiles as sm80_tiles

CPUS = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6)}
needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
SHAPE = (150, 200)
MASK = RNG.random(SHAPE) < 0.5
MASK[:, 10:40] = False
MASK[5] = False
BIAS = np.where(MASK, RNG.standard_normal(SHAPE), -np.inf).astype(np.float32)


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=needs_compiler) for name in CPUS),
        *([pytest.param("cupy", marks=pytest.mark.gpu)] if has_gpu() else []),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give a device to run on; on the CPU the kernels that this is about must have run."""
    if request.param == "cupy":
        import cupy

        yield Device("cupy", cupy)
        return
    launch._launches.clear()
    with hook.kernels_on(cpu_device.CpuDevice(CPUS[request.param], num_sms=3)):
        yield Device(request.param, np, nullcontext)
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert {sm80_tiles.ENTRY, sm80_backward.MAIN} <= entries


def agrees(place: Device, case: Any) -> None:
    on_device = case.on(place)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 128), (192, 128), (256, 256), (33, 71)])
def test_head_dims(place: Device, dims: tuple[int, int], causal: bool) -> None:
    dtype = "float16" if place.name == "sm_75" or not causal else "bfloat16"
    heads, batch = ((4, 2), 2) if max(dims) <= 64 else ((2, 1), 1)  # wide ones take the CPU long
    agrees(place, gaussian_case(0, dtype, SHAPE, heads, dims, batch, causal=causal))


@pytest.mark.parametrize("entry", [sm80_backward.ROWS, sm80_backward.DQ])
def test_kernels_around_the_gradients_are_compiled_once_for_all_options(entry: str) -> None:
    with_one, with_other = (
        sm80_backward.backward(
            listing.problem_of("float16", 64, 64, (flag,)), True, (8, 0), hardware.smem_limit("sm_80")
        )[0][0]
        for flag in ("has_alibi", "has_dropout")
    )
    assert with_one != with_other
    assert sm80_backward.of_rows(with_one, entry) == sm80_backward.of_rows(with_other, entry)


def test_no_queries_in_order(place: Device) -> None:
    """There is no tile of queries to add to in order, and nobody counts thread blocks."""
    agrees(place, gaussian_case(0, "float16", (0, 90), (4, 2), (40, 24), 2, deterministic=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (30, 10)},
    "softcap": {"softcap": 2.0, "causal": True},
    "negative scale": {"softmax_scale": -0.3},
    "alibi": {"alibi_slopes": RNG.random(4).astype(np.float32), "causal": True},
    "bias": {"bias": BIAS},
    "bias in tiles": {"bias": np.pad(BIAS.astype(np.float16), ((0, 0), (0, -SHAPE[1] % 8)))[:, : SHAPE[1]]},
    "mask": {"mask": MASK},
    "mask in vectors": {"mask": np.pad(MASK, ((0, 0), (0, -SHAPE[1] % 16)))[:, : SHAPE[1]]},
    "sink": {"sink": RNG.standard_normal(4).astype(np.float32), "window": (3, 0)},
    "lengths": {"kv_lengths": np.array([120, 7], np.int32), "q_lengths": np.array([0, 70], np.int32)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 1234567890123},
    "block mask": {"block_mask": MASK, "causal": True},
    "deterministic": {"deterministic": True},
}
OPTIONS["all"] = {
    "deterministic": True,
    **OPTIONS["softcap"],
    **OPTIONS["alibi"],
    **OPTIONS["bias"],
    **OPTIONS["dropout"],
    "mask": MASK,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(place: Device, name: str) -> None:
    agrees(place, gaussian_case(0, "float16", SHAPE, (4, 2), (64, 64), 2, **OPTIONS[name]))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_odd_strides(place: Device, head_dim: int) -> None:
    case = gaussian_case(0, "float16", (70, 90), (2, 1), (head_dim, head_dim), 1, causal=True)
    for name in ("q", "k", "v", "dout"):
        x = getattr(case, name)
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
        wide[..., :-1] = x
        setattr(case, name, wide[..., :-1])
    agrees(place, case)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dims", "size"),
    [((64, 64), 64), ((64, 64), 128), ((128, 128), 64), ((128, 128), 128), ((192, 128), 128), ((256, 256), 128)],
)
def test_listed_tiles(dims: tuple[int, int], size: int, causal: bool) -> None:
    """Lists have odd and even numbers of whole blocks, and partial ones; keys that no query sees may be NaN.

    Tiles are no larger than the mask's blocks.
    """
    rng = np.random.default_rng(1)
    blocks = rng.random((3, 9)) < 0.5
    blocks[0] = False
    blocks[0, [1, 4, 7]] = True
    mask = np.repeat(np.repeat(blocks, 64, 0), 64, 1)[:150, :530]
    mask[100:, 200:300] &= rng.random((50, 100)) < 0.5
    mask[:, 70:75] = False
    device = cpu_device.CpuDevice((9, 0), num_sms=3)
    device.has_wgmma = False
    case = gaussian_case(0, "float16", mask.shape, (2, 1), dims, 1, block_mask=mask, causal=causal)
    case.block_size = size, size
    place = Device("sm_90", np, nullcontext)
    launch._launches.clear()
    with hook.kernels_on(device):
        clean = case.on(place).forward()
        case.assert_forward(*clean)
        case.assert_gradients(case.on(place).backward(*clean))
        for x in (case.k, case.v):
            x[:, ~mask.any(0)] = np.nan
        for before, after in zip(clean, case.on(place).forward(), strict=True):
            np.testing.assert_array_equal(before, after)
    configs: dict[str, Any] = {x.kernel.entry: x.kernel.config for x in launch._launches.values()}
    of_queries, of_keys = configs[sm80_tiles.ENTRY], configs[sm80_backward.MAIN]
    assert of_queries.listed == (2 if dims[0] == 64 and size == 128 and not causal else 1)
    widest = size if dims[0] <= 128 else 64
    assert (of_queries.block_m, of_keys.block_n) == (widest, widest)
