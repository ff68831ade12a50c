"""The kernel of append_kv is one launch whatever is asked for, on the CPU device, and NVRTC compiles it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from append_cases import Case
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import Check, CpuDevice
from devices import Device

from cuflash.cuda import source
from cuflash.cuda.compile import compile_for
from cuflash.gpu import append as gpu_append
from cuflash.plan.config import CPP_TYPES
from cuflash.problem.attention_problem import accum_of

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
HERE = Device("CPU device", np)


@pytest.fixture(params=[Check.SHARED, Check.NONE], ids=lambda check: check.value)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Give the widths of accesses of each launch, while calls run on the CPU device."""
    widths: list[tuple[int, int]] = []
    enqueue = gpu_append._Launch.enqueue

    def watched(launch: gpu_append._Launch, *arguments: Any) -> None:
        widths.append(launch.widths)
        enqueue(launch, *arguments)

    monkeypatch.setattr(gpu_append._Launch, "enqueue", watched)
    with hook.kernels_on(CpuDevice((7, 5), check=request.param)):
        yield widths


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "float16": ({"dtype": "float16", "dims": (64, 32), "rotary_dim": 32}, (8, 4)),
    "a table of float16": ({"dtype": "float16", "dims": (64, 32), "rotary_dim": 32, "table_dtype": "float16"}, (8, 8)),
    "float32": ({"dims": (64, 32), "rotary_dim": 64, "interleaved": True}, (4, 4)),
    "float64": ({"dtype": "float64", "dims": (64, 32), "rotary_dim": 64}, (2, 2)),
    "half a rotary dim of 4": ({"dtype": "float16", "dims": (64, 32), "rotary_dim": 8}, (4, 4)),
    "odd dims": ({"dtype": "float16", "dims": (7, 5), "rotary_dim": 6}, (1, 1)),
    "packed": ({"dtype": "float16", "dims": (64, 32), "counts": (3, 0, 2), "rotary_dim": 64}, (8, 4)),
    "contiguous": ({"dtype": "float16", "dims": (64, 32), "page_size": None}, (8, 8)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_one_launch(name: str, launches: list[tuple[int, int]]) -> None:
    """One launch moves as many elements at once as head dims, rotary dim and table allow."""
    options, widths = CASES[name]
    Case(**options).check(HERE)
    assert launches == [widths]


@needs_compiler
def test_addresses_decide_on_the_width(launches: list[tuple[int, int]]) -> None:
    """Calls of the same shapes and strides have other widths where their arrays begin elsewhere."""
    lines = []
    for begin in (0, 4, 1):
        case = Case("float16", dims=(64, 64), rotary_dim=64)
        storage = np.zeros(case.k.size + 16, np.float16)
        first = -storage.ctypes.data % 16 // 2 + begin
        moved = storage[first : first + case.k.size].reshape(case.k.shape)
        moved[...] = case.k
        case.k = moved
        case.check(HERE)
        lines.append(launches[-1][0])
    assert lines == [8, 4, 1]


WIDTHS = {"float16": (8, 4), "bfloat16": (1, 1), "float32": (4, 4), "float64": (2, 2)}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_compiles_without_spills(dtype: str, arch: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    width, table_width = WIDTHS[dtype]
    for to_fp8, flag in itertools.product((False, True), repeat=2):
        constants = gpu_append.constants_of(dtype, accum_of(dtype), to_fp8, ("float32", dtype), (width, table_width))
        constants |= {"packed": flag, "paged": flag, "interleaved": flag}
        text = source.source_of("around/append", constants, gpu_append._HEADERS)
        report = compile_for(arch, text, "append_kv")
        assert report.spill_bytes == 0 and not report.warnings
    assert CPP_TYPES[dtype] in text
