"""Run Volta's kernels on a newer GPU, as CUDA 12 compiles them: NVRTC 13 no longer knows sm_70.

    python tests/support/ptx_sm70.py build FOLDER            in an environment with the extra cuda12; no GPU is needed
    python tests/support/ptx_sm70.py run FOLDER [DTYPE ...]  on any newer GPU, with any CUDA

The first writes the PTX for compute_70 of every kernel that the problems below take, the second holds their results
against the reference. Both go by the kernels' texts: one that has changed since has no PTX, and that is an error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import other_gpu
from cases import DTYPES, Case, accum_dtype, gaussian, gaussian_case, np_dtype
from cpu_device import device, hook
from devices import Device, forget_launches

from cuflash import hardware
from cuflash.cuda import device as cuda_device

ARCH, CAPABILITY = "sm_70", (7, 0)
QUERIES, KEYS = 150, 210  # several tiles each way, ragged
_AT_128 = ("softcap", "alibi", "mask", "dropout", "causal block mask")


def options_of(dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names of options and what a call takes for them."""
    rng = np.random.default_rng(0)
    table: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (40, 10)},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": np.array([0.1, 0.5], accum_dtype(np_dtype(dtype)))},
        "bias": {"bias": gaussian(rng, (1, 2, QUERIES, KEYS), dtype)},
        "mask": {"mask": rng.random((QUERIES, KEYS)) < 0.7},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "block mask": {"block_mask": rng.random((QUERIES, KEYS)) < 0.7},
        "causal block mask": {"block_mask": rng.random((QUERIES, KEYS)) < 0.7, "causal": True},
    }
    yield from table.items()
    yield "everything", {name: x for options in table.values() for name, x in options.items() if name != "window"}


def problems(dtypes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Yield each dtype's head dims, with one option after the other, and with all."""
    for dtype in dtypes:
        for dim in (64, 128, 256):
            for name, options in options_of(dtype):
                # Tiles with options are the same for all of them, and bfloat16 differs in its conversions alone.
                if (dim != 128 and name in _AT_128) or (dtype == "bfloat16" and name not in ("plain", "everything")):
                    continue
                case = gaussian_case(0, dtype, (QUERIES, KEYS), (2, 1), (dim, dim), **options)
                case.block_size = (64, 64)
                yield f"{dtype} d{dim} {name}", case


def file_of(folder: Path, source: str) -> Path:
    """Return the file for the PTX of a text."""
    return folder / f"{hashlib.sha256(source.encode()).hexdigest()}.ptx"


class Compiler(device.CpuDevice):
    """Volta for arrays of NumPy, whose kernels are compiled to PTX and whose launches do nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__((7, 5))
        self.capability, self.smem_limit, self.folder = CAPABILITY, hardware.smem_limit(ARCH), folder

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        assert smem_bytes <= self.smem_limit
        file = file_of(self.folder, source)
        if not file.exists():
            file.write_bytes(other_gpu.ptx_of(source, ARCH.replace("sm", "compute")))
        return mock.MagicMock(cuda_device.LoadedKernel)


def build(folder: Path) -> int:
    """Write the PTX of every kernel that the problems take, and return 0."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(folder)
    place = Device(ARCH, np, lambda: hook.kernels_on(compiler))
    for name, case in problems(DTYPES):
        with place.active():
            call = case.on(place)
            call.backward(*call.forward())
        print(f"{name}: {len(list(folder.iterdir()))} kernels so far", flush=True)
    return 0


def run(folder: Path, dtypes: Sequence[str]) -> int:
    """Return 0 if every result is as the reference's, else 1."""
    import cupy

    gpu = other_gpu.OtherGpu(ARCH, CAPABILITY)
    place = Device(ARCH, cupy, lambda: other_gpu.kernels_on(gpu))
    failed = 0
    with mock.patch.object(other_gpu, "ptx_file", lambda source, arch: file_of(folder, source)):
        for name, case in problems(dtypes):
            forget_launches()
            try:
                with place.active():
                    call = case.on(place)
                    out, lse = call.forward()
                    grads = call.backward(out, lse)
                case.assert_forward(out, lse)
                case.assert_gradients(grads, out, lse)
                print(f"{name}: passed", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
    print(f"{failed} failed, {len(cuda_device._kernels)} kernels")
    return bool(failed)


if __name__ == "__main__":
    what, given, *chosen = sys.argv[1:]
    sys.exit(build(Path(given)) if what == "build" else run(Path(given), chosen or DTYPES))
