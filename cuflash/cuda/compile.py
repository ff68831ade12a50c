"""Compilation without a GPU gives the assembler's report on a kernel."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

OPTIONS = ("--std=c++17",)


@dataclass(frozen=True)
class Report:
    """The assembler's report on one kernel."""

    registers: int
    spill_bytes: int
    static_smem_bytes: int
    warnings: tuple[str, ...]
    seconds: float
    cubin: bytes


def compile_for(arch: str, source: str, name: str) -> Report:
    """Compile for `arch` (``"sm_90a"``, ...) by NVRTC alone; RuntimeError with the log if it fails."""
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    headers = find_nvidia_header_directory("cudart")
    include = () if headers is None else (f"-I{headers}",)
    start = time.perf_counter()
    program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    try:
        # CuPy adds -ftz=true behind the options of a RawModule, so it stands here, too.
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, "-ftz=true", "--ptxas-options=-v", *include))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {arch}:\n{nvrtc.getProgramLog(program)}") from error
    log: str = nvrtc.getProgramLog(program)
    cubin = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    return Report(
        registers=max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        static_smem_bytes=max((int(n) for n in re.findall(r"(\d+) bytes smem", log)), default=0),
        # Warnings of deprecation are about an architecture and not about the kernel.
        warnings=tuple(
            line
            for line in log.splitlines()
            if ("warning" in line.lower() and "deprecated" not in line) or "(C75" in line
        ),
        seconds=time.perf_counter() - start,
        cubin=cubin,
    )
