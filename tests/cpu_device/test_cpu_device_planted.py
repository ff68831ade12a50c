"""The checked mode names defects that are planted in Hopper's own kernels and that no result shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest
import rows
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice, DeviceError
from devices import Device

from cuflash import hardware
from cuflash.cuda import source as cuda_source
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig
from cuflash.plan.sm90.config import Sm90ForwardConfig

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

UNORDERED = "nothing orders them"
OUT_OF_BOUNDS = "shared memory out of bounds"
UNINITIALISED = "uninitialised shared memory is read"


def is_wide(config: KernelConfig) -> bool:
    return config.entry == sm90_backward_tiles.WIDE


def repeats_columns(config: KernelConfig) -> bool:
    return (
        isinstance(config, Sm90BackwardConfig)
        and config.entry == sm90_backward_tiles.NARROW
        and config.block_m == hardware.ROWS_OF_WARPGROUP
        and config.dq_columns >= config.head_dim
    )


def has_blocks_without_order(config: KernelConfig) -> bool:
    return isinstance(config, Sm90ForwardConfig) and config.has_block_mask and not config.ping_pong


PLANTED: tuple[tuple[str, str, str, Callable[[KernelConfig], bool], str], ...] = (
    (
        "sm90/backward/wide.cu",
        "__syncwarp();  // all lanes must have read the weights and delta",
        "",
        is_wide,
        UNORDERED,
    ),
    ("sm90/backward/backward.cu", "DQ_COLUMNS < HEAD_DIM;", "true;", repeats_columns, OUT_OF_BOUNDS),
    (
        "sm90/forward/consumer.cuh",
        "if constexpr (HAS_BLOCK_MASK && !PING_PONG) __syncwarp();",
        "",
        has_blocks_without_order,
        UNORDERED,
    ),
    ("sm90/backward/loader.cuh", " = {NO_DQ, 0, true, 0};", ".sum = NO_DQ;", repeats_columns, UNINITIALISED),
)


@pytest.mark.parametrize(("file", "old", "new", "takes", "expected"), PLANTED, ids=[case[0] for case in PLANTED])
def test_defect_is_named(file: str, old: str, new: str, takes: Callable[[KernelConfig], bool], expected: str) -> None:
    read = cuda_source._read

    def edited(path: str) -> str:
        text = read(path)
        if path == file:
            assert text.count(old) == 1
            return text.replace(old, new)
        return text

    device = CpuDevice((9, 0), 3, Check.SHARED)
    table = (*listing.kernels(sm90_listing.of_forward()), *listing.kernels(sm90_listing.of_backward()))
    config, dtype = next((config, dtype) for config, dtype in table if takes(config))
    place = Device(device.name, np, partial(hook.kernels_on, device))
    with mock.patch.object(cuda_source, "_read", edited), pytest.raises(DeviceError, match=expected):
        rows.run(config, dtype, place)
