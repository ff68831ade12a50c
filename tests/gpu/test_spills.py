"""The driver's bytes of local memory are those that the compiled code tells without a GPU."""

from __future__ import annotations

import pytest
from spilling import SAMPLES, sample

from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SAMPLES)
def test_local_bytes_are_those_of_the_cubin(name: str) -> None:
    device = cuda_device.device_of(cupy.empty(1))
    arch = "sm_{}{}".format(*device.capability)
    expected = cuda_compile.compile_for(arch, sample(name), "sample").local_bytes
    assert device.load(sample(name), "sample", 0).local_bytes == expected
