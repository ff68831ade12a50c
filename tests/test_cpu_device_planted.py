"""The checked mode names defects that are planted in Hopper's own kernels: those that no result shows."""

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

from cuflash import kernels, plan_sm90, plan_sm90_backward
from cuflash.plan import KernelConfig

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

UNORDERED = "nothing orders them"
OUT_OF_BOUNDS = "shared memory out of bounds"
UNINITIALISED = "uninitialised shared memory is read"


def is_wide(config: KernelConfig) -> bool:
    return config.entry == plan_sm90_backward.WIDE


def repeats_columns(config: KernelConfig) -> bool:
    return (
        isinstance(config, plan_sm90_backward.Config)
        and config.entry == plan_sm90_backward.NARROW
        and config.block_m == plan_sm90.ROWS_OF_WARPGROUP
        and config.dq_columns >= config.head_dim
    )


def has_blocks_without_turns(config: KernelConfig) -> bool:
    return isinstance(config, plan_sm90.Config) and config.has_block_mask and not config.ping_pong


PLANTED: tuple[tuple[str, str, str, Callable[[KernelConfig], bool], str], ...] = (
    ("backward_wide", "__syncwarp();  // all lanes have read the weights and delta", "", is_wide, UNORDERED),
    ("backward", "DQ_COLUMNS < HEAD_DIM;", "true;", repeats_columns, OUT_OF_BOUNDS),
    ("forward", "if constexpr (HAS_BLOCK_MASK && !PING_PONG) __syncwarp();", "", has_blocks_without_turns, UNORDERED),
    ("gradient_loader", " = {NO_DQ, 0, true, 0};", ".sum = NO_DQ;", repeats_columns, UNINITIALISED),
)


@pytest.mark.parametrize(("file", "old", "new", "takes", "expected"), PLANTED, ids=[case[0] for case in PLANTED])
def test_defect_is_named(file: str, old: str, new: str, takes: Callable[[KernelConfig], bool], expected: str) -> None:
    read = kernels._read

    def edited(path: str) -> str:
        text = read(path)
        if path.removeprefix("sm90/").partition(".")[0] == file and path.startswith("sm90/"):
            assert text.count(old) == 1
            return text.replace(old, new)
        return text

    device = CpuDevice((9, 0), 3, Check.SHARED)
    table = (*plan_sm90.table(), *plan_sm90_backward.table())
    config, dtype = next((config, dtype) for config, dtype in table if takes(config))
    place = Device(device.name, np, partial(hook.kernels_on, device))
    with mock.patch.object(kernels, "_read", edited), pytest.raises(DeviceError, match=expected):
        rows.run(config, dtype, place)
