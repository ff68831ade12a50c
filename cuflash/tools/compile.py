"""``python -m cuflash compile``: compile kernels ahead of their first use, or for a GPU that is not here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import load_kernel, source_of
from cuflash.hardware import capability_of, smem_limit
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.problem.attention_problem import DTYPES
from cuflash.problem.fp8 import FP8
from cuflash.tools.arguments import architecture, positive
from cuflash.tools.info import compiler_lacking

JOBS = min(8, os.cpu_count() or 1)
_DTYPES = (*DTYPES, FP8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compile`` to its parser."""
    parser.add_argument(
        "--arch",
        nargs="+",
        type=architecture,
        metavar="sm_XX",
        help="compile for these architectures without a GPU and print registers, spills and shared memory",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=_DTYPES, default=list(_DTYPES), help="only these dtypes of queries"
    )
    every = argparse.Namespace(dtype=_DTYPES, kernel=None)
    kernels = sorted({config.entry for config in configs(every, (9, 0), smem_limit("sm_90"), True)})
    only = f"only these: {', '.join(kernels)}"
    parser.add_argument("--kernel", nargs="+", metavar="NAME", choices=kernels, help=only)
    parser.add_argument("--jobs", type=positive, default=JOBS, help="kernels compiled at once (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every kernel compiled, without spills where these show; 1 if not; 2 if something is missing."""
    if lacking := compiler_lacking("compile"):
        print(lacking, file=sys.stderr)
        return 2
    import cupy

    if args.arch:
        unknown = unknown_architectures(args.arch)
        if unknown:
            print(unknown, file=sys.stderr)
            return 2
        return _check(args)
    if not cupy.cuda.is_available():
        print("no GPU here: name architectures to compile for, as in --arch sm_80 sm_90a", file=sys.stderr)
        return 2
    return _warm(args)


def unknown_architectures(names: Sequence[str]) -> str:
    """Say which architectures NVRTC does not know; empty if it knows all."""
    from cupy.cuda import nvrtc

    known = [f"sm_{number}" for number in nvrtc.getSupportedArchs()]
    unknown = [arch for arch in names if arch.rstrip("af") not in known]
    version = ".".join(map(str, nvrtc.getVersion()))
    return f"{', '.join(unknown)}: NVRTC {version} knows {', '.join(known)}" if unknown else ""


def configs(
    args: argparse.Namespace, capability: tuple[int, int], limit: int, has_wgmma: bool
) -> Iterator[KernelConfig]:
    """The kernels that the arguments select, families that a call asks first before others.

    A thread block has `limit` bytes of shared memory.
    """
    for config, dtype in listing.kernels(_passes(capability, limit, has_wgmma)):
        if dtype in args.dtype and (args.kernel is None or config.entry in args.kernel):
            yield config


def _passes(capability: tuple[int, int], limit: int, has_wgmma: bool) -> Iterator[listing.Pass]:
    if has_wgmma:
        yield from sm90_listing.of_hopper()
    yield from listing.of_any_gpu(capability, limit)


def in_parallel(jobs: int, work: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
    """Compile, the first alone: two threads cannot load NVRTC's built-ins at once."""
    yield from map(work, items[:1])
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, items[1:])


def _announce(count: int, args: argparse.Namespace) -> None:
    if not args.json:
        print(f"{count} kernels, {args.jobs} at once; those that a call asks for first come first", file=sys.stderr)


def _check(args: argparse.Namespace) -> int:
    later = {arch: _later_of(arch) for arch in args.arch}

    def compile_one(item: tuple[str, KernelConfig]) -> tuple[KernelConfig, cuda_compile.Report]:
        arch, first = item
        for config in (first, *later[arch].get(first, ())):  # where a kernel spills the next candidate runs
            report = cuda_compile.compile_for(arch, source_of(config), config.entry)
            if report.spill_bytes == 0:
                return config, report
        return first, cuda_compile.compile_for(arch, source_of(first), first.entry)

    items = [
        (arch, config)
        for arch in args.arch
        for config in configs(args, capability_of(arch), smem_limit(arch), arch == "sm_90a")
    ]
    failed = 0
    _announce(len(items), args)
    found = zip(items, in_parallel(args.jobs, compile_one, items), strict=True)
    for number, ((arch, _), (config, report)) in enumerate(found, 1):
        good = report.spill_bytes == 0 and not report.warnings and config.smem_bytes <= smem_limit(arch)
        failed += not good
        if args.json:
            numbers = {name: value for name, value in asdict(report).items() if name != "cubin"}
            print(json.dumps({"arch": arch, "kernel": config.entry, "config": asdict(config), **numbers, "good": good}))
        else:
            print(
                f"[{number}/{len(items)}] {arch:8} {config.words:60} {report.registers:4} registers "
                f"{report.spill_bytes:4} bytes spilled "
                f"{config.smem_bytes + report.static_smem_bytes:6} bytes shared {report.seconds:5.2f} s"
                f"{''.join(chr(10) + '    ' + line for line in report.warnings)}",
                flush=True,
            )
    if not args.json:
        print(f"{len(items)} kernels compiled, {failed} with spills, warnings or too much shared memory")
    return 1 if failed else 0


def _later_of(arch: str) -> dict[KernelConfig, list[KernelConfig]]:
    """Return the kernels that run where a first candidate spills, by its kernels."""
    return {
        kernel: [config for later in own.candidates[1:] for config in later if config.entry == kernel.entry]
        for own in _passes(capability_of(arch), smem_limit(arch), arch == "sm_90a")
        for kernel in own.candidates[0]
    }


def _warm(args: argparse.Namespace) -> int:
    import cupy

    device = cuda_device.device_of(cupy.empty(0))
    selected = list(configs(args, device.capability, device.smem_limit, device.has_wgmma))
    start = time.perf_counter()

    def load(config: KernelConfig) -> None:
        load_kernel(config, config.entry, device, config.smem_bytes)

    _announce(len(selected), args)
    for number, (config, _) in enumerate(zip(selected, in_parallel(args.jobs, load, selected), strict=True), 1):
        if not args.json:
            print(f"[{number}/{len(selected)}] {config.words}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({"kernels": len(selected), "seconds": seconds}))
    else:
        print(f"{len(selected)} kernels are in CuPy's cache ({seconds:.1f} s)")
    return 0
