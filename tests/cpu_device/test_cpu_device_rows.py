"""Every row of the tables of kernels runs on the CPU device, whatever rows the suite's cases take.

Shared memory is checked in Hopper's kernels, where warps hand it to each other without barriers of all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import rows
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import SMEM_LIMITS, Check, CpuDevice
from devices import Device

from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90.config import Sm90ForwardConfig

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

SMS_OF_FEW_TILES = 9
_WITHOUT_TENSOR_CORES = (7, 0)
# These kernels run with those of the gradients of scores, and have no row of their own.
_COMPANIONS = (sm90_backward.ROWS, sm90_backward.DQ)


class Row(NamedTuple):
    capability: tuple[int, int]
    smem_limit: int
    has_wgmma: bool
    config: KernelConfig
    dtype: str


def all_rows() -> Iterator[Row]:
    """Yield the configuration with the fewest options of each row that no older GPU has."""
    seen = set()
    for capability, limit in SMEM_LIMITS.items():
        mma = (listing.of_forward, listing.of_backward, listing.of_wide)
        tables: list[tuple[tuple[int, int], bool, rows.Table]] = [
            (_WITHOUT_TENSOR_CORES, False, listing.kernels(listing.of_portable(limit)))
        ]
        tables += [(capability, False, listing.kernels(family(capability, limit))) for family in mma]
        if capability == (9, 0):
            hopper = (
                listing.kernels(sm90_listing.of_forward()),
                listing.kernels(sm90_listing.of_backward()),
                listing.kernels(sm90_listing.of_split_forward()),
                listing.kernels(sm90_listing.of_split_backward()),
            )
            tables += [(capability, True, table) for table in hopper]
        for own, has_wgmma, table in tables:
            for (config, dtype), *_ in rows.rows_of(table):
                of_row = rows.identity(config)
                if of_row not in seen and config.entry not in _COMPANIONS:
                    seen.add(of_row)
                    yield Row(own, limit, has_wgmma, config, dtype)


def of_row(params: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what the quick tier has to run of a kernel: its architectures, dtypes, options, head dims and variants."""
    row: Row = params["row"]
    yield row.config.entry, row.capability
    yield row.config.entry, row.dtype
    yield from rows.options_of(row.config)


@pytest.mark.features(of=of_row)
@pytest.mark.parametrize(
    "row", list(all_rows()), ids=lambda row: rows.name_of("sm_{}{}".format(*row.capability), row.config)
)
def test_row(row: Row) -> None:
    config = row.config
    few_tiles = isinstance(config, Sm90ForwardConfig) and config.splits_keys
    check = Check.SHARED if row.has_wgmma else None
    device = CpuDevice(row.capability, SMS_OF_FEW_TILES if few_tiles else rows.NUM_SMS, check)
    device.has_wgmma, device.smem_limit = row.has_wgmma, row.smem_limit
    rows.run(config, row.dtype, Device(device.name, np, partial(hook.kernels_on, device)))
