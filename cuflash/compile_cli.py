"""``python -m cuflash compile``: fill the cache for this GPU, or check every kernel for GPUs that are not here."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from cuflash import (
    kernels,
    plan_sm80,
    plan_sm80_backward,
    plan_sm90,
    plan_sm90_backward,
    plan_split,
    plan_wide,
)
from cuflash.plan import KERNEL_FILES, PORTABLE, Config, capability_of, function_of, smem_limit, table
from cuflash.problem import DTYPES

AnyConfig = (
    Config
    | plan_sm80.Config
    | plan_sm80_backward.Config
    | plan_sm90.Config
    | plan_sm90_backward.Config
    | plan_split.Config
    | plan_wide.Config
)


def _hopper_table() -> Iterator[tuple[AnyConfig, str]]:
    yield from plan_sm90.table()
    yield from plan_sm90_backward.table()
    yield from plan_split.table()
    yield from plan_split.gradient_table()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--arch",
        nargs="+",
        metavar="sm_XX",
        help="compile for these architectures without a GPU and print registers, spills and shared memory",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="only these dtypes")
    names = {
        *(c.entry for c, _ in _hopper_table()),
        *plan_sm80.ENTRIES,
        plan_sm80_backward.MAIN,
        plan_sm80_backward.ORDERED_DQ,
        *plan_wide.ENTRIES,
        *(k for k, *_ in PORTABLE),
    }
    kernels = sorted(names)
    only = f"only these: {', '.join(kernels)}"
    parser.add_argument("--kernel", nargs="+", metavar="NAME", choices=kernels, help=only)
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at once (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every kernel compiled, without spills where that can be seen; 1 if not; 2 if something is missing."""
    try:
        import cupy
    except ImportError:
        print('cuflash compile needs CuPy: pip install "cuflash[cuda13]"', file=sys.stderr)
        return 2
    if args.arch:
        known = [f"sm_{number}" for number in cupy.cuda.nvrtc.getSupportedArchs()]
        unknown = [arch for arch in args.arch if arch.rstrip("af") not in known]
        if unknown:
            version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
            print(f"{', '.join(unknown)}: NVRTC {version} knows {', '.join(known)}", file=sys.stderr)
            return 2
        return _check(args)
    if not cupy.cuda.is_available():
        print("no GPU here: name architectures to compile for, as in --arch sm_80 sm_90a", file=sys.stderr)
        return 2
    return _warm(args)


def configs(args: argparse.Namespace, capability: tuple[int, int], limit: int, has_wgmma: bool) -> Iterator[AnyConfig]:
    """The kernels that the arguments select, for GPUs that grant a thread block `limit` bytes of shared memory."""
    mma: list[tuple[AnyConfig, str]] = [
        *plan_sm80.table(capability, limit),
        *plan_sm80_backward.table(capability, limit),
        *plan_wide.table(capability, limit),
    ]
    for config, dtype in (*table(limit), *mma, *(_hopper_table() if has_wgmma else ())):
        if dtype in args.dtype and (args.kernel is None or config.entry in args.kernel):
            yield config


def describe(config: AnyConfig) -> str:
    """One kernel in a few words."""
    dims = "/".join(str(d) for d in (config.head_dim, config.head_dim_v) if d) or "any"
    return f"{config.entry} {config.element} d{dims} {config.tile} {config.flags}"


def _in_parallel(jobs: int, work: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
    # NVRTC loads its built-ins at its first compilation, and two threads that do so at once fail.
    yield from map(work, items[:1])
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, items[1:])


def _check(args: argparse.Namespace) -> int:
    def compile_one(item: tuple[str, AnyConfig]) -> kernels.Report:
        arch, config = item
        return kernels.compile_for(
            arch, kernels.source_of(KERNEL_FILES.get(config.entry, config.entry), config), config.entry
        )

    items = [
        (arch, config)
        for arch in args.arch
        for config in configs(args, capability_of(arch), smem_limit(arch), arch == "sm_90a")
    ]
    failed = 0
    for (arch, config), report in zip(items, _in_parallel(args.jobs, compile_one, items), strict=True):
        good = report.spill_bytes == 0 and not report.warnings and config.smem_bytes <= smem_limit(arch)
        failed += not good
        if args.json:
            numbers = {name: value for name, value in asdict(report).items() if name != "cubin"}
            print(json.dumps({"arch": arch, "kernel": config.entry, "config": asdict(config), **numbers, "good": good}))
        else:
            print(
                f"{arch:8} {describe(config):60} {report.registers:4} registers {report.spill_bytes:4} bytes spilled "
                f"{config.smem_bytes + report.static_smem_bytes:6} bytes shared {report.seconds:5.2f} s"
                f"{''.join(chr(10) + '    ' + line for line in report.warnings)}",
                flush=True,
            )
    if not args.json:
        print(f"{len(items)} kernels compiled, {failed} with spills, warnings or too much shared memory")
    return 1 if failed else 0


def _warm(args: argparse.Namespace) -> int:
    import cupy

    device = kernels.device_of(cupy.empty(0))
    selected = list(configs(args, device.capability, device.smem_limit, device.has_wgmma))
    start = time.perf_counter()

    def load(config: AnyConfig) -> None:
        file = KERNEL_FILES.get(config.entry, config.entry)
        kernels.get(file, function_of(config.entry), config, device, config.smem_bytes)

    for done, _ in enumerate(_in_parallel(args.jobs, load, selected), 1):
        if not args.json and sys.stderr.isatty():
            print(f"\r{done}/{len(selected)} kernels", end="", file=sys.stderr)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({"kernels": len(selected), "seconds": seconds}))
    else:
        print(f"\r{len(selected)} kernels are in CuPy's cache ({seconds:.1f} s)")
    return 0
