"""Another GPU's rows run as they are, whatever this GPU's compilers say of their registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from cuflash.cuda import device as cuda_device
from cuflash.gpu.choose import choose

pytest.importorskip("cupy", reason="CuPy is not installed")


class Reported(NamedTuple):
    """A kernel of which every device's compiler reports so many bytes of spilled registers."""

    bytes: int

    def spilled_bytes(self, device: Any) -> int:
        return self.bytes


def begin(device: Any, index: int) -> None:
    device.index, device.capability, device.smem_limit = index, (9, 0), 232448
    device.compiler = "sm_90, NVRTC 13.0, driver 13000"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_first_candidate_runs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is compiled to PTX of its own architecture, or for this GPU where no PTX is taken."""
    import other_gpu

    monkeypatch.setattr(cuda_device.Device, "__init__", begin)
    monkeypatch.setattr(other_gpu.cupy.cuda.runtime, "getDevice", lambda: 0)
    gpu = other_gpu.OtherGpu(arch, (8, 0) if arch == "sm_80" else (9, 0))
    assert (gpu._ptx_arch is None) == (arch == "sm_90")
    first, second = (Reported(8),), (Reported(0),)
    assert choose(gpu, [first, second]) is first
