"""Every row of the tables of kernels that other GPUs choose runs on this one.

A row's text is compiled to PTX of its own architecture (or the oldest that NVRTC knows), which the driver assembles for
this GPU. Rows of this and of newer GPUs, whose PTX it does not take, are compiled for it, with their tiles and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import rows
from cases import Case
from devices import Device
from error_rule import INPUTS, NAMES, assert_error_rule, forward_by
from other_gpu import kernels_on, other_gpu

from cuflash import hardware
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

ARCHITECTURES = (
    *("sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90"),
    *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
)
_WITHOUT_TENSOR_CORES = (7, 0)


class Row(NamedTuple):
    arch: str
    capability: tuple[int, int]  # by which its table is planned
    config: KernelConfig
    dtype: str


def all_rows() -> Iterator[Row]:
    """Yield kernels with the fewest and the most options of each row that no older GPU has, and of first rows.

    The former are of a table's first dtype (float16 of the 16 bits), the latter of its last.
    """
    seen: set[tuple[Any, ...]] = set()
    for arch in ARCHITECTURES:
        own, limit = hardware.capability_of(arch), hardware.smem_limit(arch)
        mma = (listing.of_forward, listing.of_backward, listing.of_wide)
        families = [(_WITHOUT_TENSOR_CORES, listing.of_portable(limit)), *((own, family(own, limit)) for family in mma)]
        for capability, passes in families:
            for number, row in enumerate(rows.rows_of(listing.kernels(passes))):
                of_row = rows.identity(row[0][0])
                if number == 0 or of_row not in seen:
                    seen.add(of_row)
                    for kernel in (row[0], row[-1])[: len(row)]:
                        yield Row(arch, capability, *kernel)


@pytest.mark.parametrize("row", list(all_rows()), ids=lambda row: rows.name_of(row.arch, row.config))
def test_row(row: Row) -> None:
    gpu = other_gpu(row.arch, row.capability)
    gpu.num_sms = rows.NUM_SMS
    rows.run(row.config, row.dtype, Device(row.arch, cupy, partial(kernels_on, gpu)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", INPUTS, ids=NAMES)
def test_error_rule_of_float32_by_mma(make: Callable[[str], Case], causal: bool) -> None:
    gpu = other_gpu("sm_90", (9, 0))
    with forward_by("parts_forward", Device("sm_90", cupy, partial(kernels_on, gpu))) as device:
        assert_error_rule(device, make("float32").with_options(causal=causal))
