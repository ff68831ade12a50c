"""Compilation without a GPU gives the assembler's report on a kernel."""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass

OPTIONS = ("--std=c++17",)
# CuPy adds these to the options of a RawModule. Without the second one the NVRTC of CUDA 13.0 takes generic lambdas for
# functions of the host.
_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Report:
    """The assembler's report on one kernel."""

    registers: int
    spill_bytes: int
    local_bytes: int  # of a thread: spilled registers, and arrays that are indexed at run time
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
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, *_OF_CUPY, "--ptxas-options=-v", *include))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {arch}:\n{nvrtc.getProgramLog(program)}") from error
    log: str = nvrtc.getProgramLog(program)
    cubin: bytes = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    return Report(
        registers=max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        local_bytes=local_bytes_of(cubin),
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


# These are places in ELF's header: where the sections' headers begin, and their size, number and names.
_SECTIONS, _SECTION_COUNTS = 0x28, 0x3A
# An attribute of `.nv.info` with a value of its own is a pair (function, value); this one is the bytes of its frame.
_WITH_VALUE, _FRAME_SIZE = 4, 0x11


def local_bytes_of(cubin: bytes) -> int:
    """Return the bytes of local memory of a thread of the largest function of a cubin.

    It is what the assembler calls the stack frame: spilled registers, and arrays that are indexed at run time. This was
    verified for sm_75, sm_80, sm_90a and sm_120 with kernels that spill, that have such arrays, that call functions and
    that do nothing of this: the attribute EIATTR_FRAME_SIZE was the log's "bytes stack frame" in each. A driver has it
    as CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, with which tests/gpu/test_spills.py compares it on a GPU.
    """
    (sections,) = struct.unpack_from("<Q", cubin, _SECTIONS)
    size, count, names = struct.unpack_from("<HHH", cubin, _SECTION_COUNTS)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + size * i) for i in range(count)]
    most = 0
    for name, _, _, _, offset, length in headers:
        begin = headers[names][4] + name
        if cubin[begin : cubin.index(b"\0", begin)] != b".nv.info":
            continue
        place = offset
        while place < offset + length:
            form, attribute, value_bytes = struct.unpack_from("<BBH", cubin, place)
            if form == _WITH_VALUE and attribute == _FRAME_SIZE:
                most = max(most, struct.unpack_from("<II", cubin, place + 4)[1])
            place += 4 + (value_bytes if form == _WITH_VALUE else 0)
    return most
