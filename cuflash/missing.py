"""What is not there, what it is for, and how to get it: the words of ``python -m cuflash info``."""

from __future__ import annotations

import importlib.util
from typing import Any

from cuflash.kernels import OWN_ARCH_SINCE

DEMO_NEEDS = ("matplotlib", "threadpoolctl", "tqdm")


def missing() -> dict[str, str]:
    """Each thing that is missing, and in words what it is for and how to get it."""
    lacks: dict[str, str] = {}
    if _absent("ml_dtypes"):
        lacks["ml_dtypes"] = 'bfloat16 arrays in NumPy and CuPy need it: pip install "cuflash[bf16]"'
    demo = [name for name in DEMO_NEEDS if _absent(name)]
    if demo:
        needs = "needs it" if len(demo) == 1 else "needs them"
        lacks[", ".join(demo)] = f'python -m cuflash demo {needs}: pip install "cuflash[demo]"'
    if _absent("cupy"):
        lacks["CuPy"] = (
            'GPU arrays need it: pip install "cuflash[cuda13]", or "cuflash[cuda12]" where the driver is of CUDA 12 '
            "(nvidia-smi shows its version) or the GPU is a Volta"
        )
        return lacks
    import cupy

    return lacks | _of_cupy(cupy)


def _absent(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def _of_cupy(cupy: Any) -> dict[str, str]:
    """What CuPy, which is installed, does not find."""
    lacks: dict[str, str] = {}
    try:
        nvrtc = cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # whatever CuPy raises where a library cannot be loaded
        lacks["NVRTC"] = (
            f'kernels are compiled by it: pip install "cuflash[cuda13]" or "cuflash[cuda12]" ({_line(error)})'
        )
        return lacks
    extra = f"cuda{nvrtc[0]}"
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        lacks["GPU"] = (
            f"none that CuPy can use ({_line(error)}); NumPy arrays run on the CPU. If there is an NVIDIA GPU, "
            "install or update its driver: https://www.nvidia.com/drivers; in a container, start it with the GPU"
        )
        return lacks
    driver = cupy.cuda.runtime.driverGetVersion() // 1000
    if driver < nvrtc[0]:
        lacks["driver"] = (
            f"it is of CUDA {driver}, NVRTC of CUDA {nvrtc[0]}: update the driver, or change to "
            f'pip install "cuflash[cuda{driver}]" in a fresh environment'
        )
    capabilities = {cupy.cuda.Device(i).compute_capability for i in range(devices)}
    if "90" in capabilities and nvrtc < OWN_ARCH_SINCE:
        lacks["NVRTC 12.9"] = (
            f"Hopper's own kernels need it, here is {nvrtc[0]}.{nvrtc[1]}: "
            f'pip install -U "cuda-toolkit[cudart,nvrtc]>=12.9,<{nvrtc[0] + 1}"'
        )
    try:
        cupy.cuda.device.get_cublas_handle()
    except Exception as error:
        lacks["cuBLAS"] = (
            "attention does not need it; CuPy's own matrix products, the demo and the benchmarks do: "
            f'pip install "cuflash[{extra}-full]" ({_line(error)})'
        )
    return lacks


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
