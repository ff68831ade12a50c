"""``python -m cuflash info``: what is installed, and which kernels a problem takes."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cuflash import __version__, e4m3
from cuflash.cpu.threads import BLAS_THREADS
from cuflash.cuda import device as cuda_device
from cuflash.cuda import refusals
from cuflash.hardware import capability_of, smem_limit
from cuflash.plan.config import flags_of, without_window
from cuflash.plan.portable.kernels import PortableConfig, key_kernels, plan
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.tools import candidates, problems, reasons
from cuflash.tools.arguments import architecture
from cuflash.tools.families import on_gpu

# One of each kind: Turing, A100, consumer cards, Hopper, data-centre Blackwell.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100")
_ON_CPU = {"on the CPU": "NumPy, tiled"}
_ASK = "not from here; --arch sm_80 sm_90a, say, tells which kernels a problem takes there"
DEMO_NEEDS = ("matplotlib", "threadpoolctl", "tqdm")
_PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "ml_dtypes", "torch", "jax")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``info`` to its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    problem = parser.add_argument_group("a problem, to see which kernels it can take, and takes")
    problems.add_arguments(problem)
    problem.add_argument(
        "--strides",
        choices=("aligned", "unaligned"),
        default="aligned",
        help="whether all addresses and strides are multiples of 16 bytes (default %(default)s)",
    )
    problem.add_argument(
        "--arch",
        nargs="+",
        type=architecture,
        metavar="sm_XX",
        help=f"say what runs on these (default: an overview; with unaligned strides {' '.join(ARCHITECTURES)})",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0; 2 for sizes that there are no kernels for."""
    error = problems.error_of(args)
    if error:
        print(error, file=sys.stderr)
        return 2
    problem = problems.problem_of(args)
    facts = {"cuflash": __version__, "python": platform.python_version(), **versions(_PACKAGES), **_gpu()}
    lacks = missing()
    # Where nothing can be compiled, kernels are of interest to those alone who ask for them.
    of_cpu = not (args.json or args.arch or args.strides == "unaligned") and ("CuPy" in lacks or "NVRTC" in lacks)
    gpus = [] if of_cpu else _gpus(args)
    found = {gpu.arch: candidates.candidates_of(problem, gpu) for gpu in gpus}
    chosen = {**_ON_CPU, "on a GPU": _ASK} if of_cpu else _chosen(args, problem, gpus, found)
    refused = [refusal._asdict() for refusal in dict.fromkeys(refusals.every())]
    if args.json:
        of_each = {arch: [candidate.as_json() for candidate in own] for arch, own in found.items()}
        print(json.dumps({**facts, "missing": lacks, "refused": refused, "kernels": chosen, "candidates": of_each}))
        return 0
    if "CuPy" in lacks or "NVRTC" in lacks or "GPU" in lacks:
        print("\n".join(without_gpu(lacks)), end="\n\n")
    for name, value in facts.items():
        print(f"{name:16} {value}")
    print()
    print("\n".join(f"missing: {name}: {words}" for name, words in lacks.items()) or "nothing is missing")
    for refusal in refused:
        print(
            "refused: {kernel} spills {local_bytes} bytes a thread ({compiler}): the next candidate runs".format(
                **refusal
            )
        )
    print()
    width = max(map(len, chosen))
    for name, reason in chosen.items():
        print(f"{name:{width}} {reason}")
    for gpu in gpus:
        print()
        print("\n".join(_candidates_in_words(problem, gpu, found[gpu.arch])))
    return 0


def _gpus(args: argparse.Namespace) -> list[candidates.Gpu]:
    """Return the GPUs whose candidates are listed: those that were named, else the one here, else Hopper."""
    aligned = args.strides == "aligned"
    device = candidates.device_here()
    here = None if device is None else candidates.gpu_here(device, aligned)
    if not args.arch:
        return [candidates.gpu_of("sm_90a", aligned) if here is None else here]
    named = [candidates.gpu_of(name, aligned) for name in dict.fromkeys(args.arch)]
    own = None if here is None else (here.capability, here.has_wgmma)
    return [here if here is not None and (gpu.capability, gpu.has_wgmma) == own else gpu for gpu in named]


def _candidates_in_words(
    problem: AttentionProblem, gpu: candidates.Gpu, found: list[candidates.Candidate]
) -> list[str]:
    """Return a line for a problem on a GPU, and one for each candidate."""
    here = gpu.compiler or f"no GPU of {gpu.arch} with NVRTC is here, so that it is not known what spills"
    rows = []
    for own in found:
        refused = f"refused: it spills {own.refused_bytes} bytes a thread" if own.refused_bytes else ""
        rows.append((own.direction, own.family, own.words, own.prediction, "runs" if own.is_chosen else refused))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"candidates for {problems.words_of(problem)} on {gpu.arch}, {gpu.num_sms} multiprocessors ({here}):",
        *("  ".join(f"{x:{width}}" for x, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def without_gpu(lacks: dict[str, str]) -> list[str]:
    """Three lines for a machine whose GPU cannot be used: what works, what does not and why, and what to install."""
    with BLAS_THREADS as threads:
        works = f"NumPy arrays, with every function and option, on the CPU ({threads} threads)"
    need = next(name for name in ("CuPy", "NVRTC", "GPU") if name in lacks)
    why = {
        "CuPy": "CuPy is not installed",
        "NVRTC": "CuPy does not find NVIDIA's run-time compiler",
        "GPU": "CuPy finds no GPU",
    }
    install = {
        "CuPy": 'pip install "cuflash[cuda13]" if there is an NVIDIA GPU; nothing if not',
        "NVRTC": 'pip install "cuflash[cuda13]"',
        "GPU": "NVIDIA's driver if there is an NVIDIA GPU; nothing if not",
    }
    return [
        f"works here:      {works}",
        f"does not:        CuPy arrays, as {why[need]}",
        f"to install:      {install[need]}",
    ]


def _gpu() -> dict[str, str]:
    try:
        import cupy
    except ImportError:
        return {}  # `missing` says so
    try:
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception:  # whatever CuPy raises where a library cannot be loaded
        return {}
    if not cupy.cuda.is_available():
        return {"nvrtc": nvrtc}
    driver = cupy.cuda.runtime.driverGetVersion()
    gpus = {}
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        p = cupy.cuda.runtime.getDeviceProperties(index)
        gpus[f"GPU {index}"] = (
            f"{p['name'].decode()}, compute capability {p['major']}.{p['minor']}, "
            f"{p['multiProcessorCount']} multiprocessors, {p['totalGlobalMem'] / 2**30:.0f} GiB, "
            f"{p['sharedMemPerBlockOptin'] // 1024} KB shared memory a block"
        )
    return {"nvrtc": nvrtc, "driver's CUDA": f"{driver // 1000}.{driver % 1000 // 10}", **gpus}


def _chosen(
    args: argparse.Namespace,
    problem: AttentionProblem,
    gpus: list[candidates.Gpu],
    found: dict[str, list[candidates.Candidate]],
) -> dict[str, str]:
    """Return a sentence for each pass; those on `gpus` are of the candidates that were `found` there."""
    if args.arch:
        return _ON_CPU | {name: words for gpu in gpus for name, words in on_gpu(problem, gpu, found[gpu.arch]).items()}
    if args.strides == "unaligned":
        overview = [candidates.gpu_of(arch, aligned=False) for arch in ARCHITECTURES]
        each = [on_gpu(problem, gpu, candidates.candidates_of(problem, gpu)) for gpu in overview]
        return _ON_CPU | {name: words for own in each for name, words in own.items()}
    entries = ["forward", "backward_dq", *key_kernels(problem), *(["backward_bias"] if problem.bias else [])]
    chosen = {entry: _portable_reason(plan(problem, entry)[0], problem) for entry in entries}
    sentences = reasons.forward_sm90, reasons.backward_sm90
    if problem.dtype == "float32":
        sentences = reasons.forward_split, reasons.backward_split
    dims = f"head dims {problem.head_dim} and {problem.head_dim_v}"
    with_options = " with options" if without_window(flags_of(problem)) else ""
    no_parts = f"{reasons.OTHER_GPUS}: no kernel on float16 parts for {dims}{with_options}"
    directions = "forward on Hopper", "backward on Hopper"
    hopper = {name: reason(problem) or no_parts for name, reason in zip(directions, sentences, strict=True)}
    mma = {
        "forward on tensor cores": reasons.wide(problem, False) or reasons.forward_sm80(problem),
        "backward on tensor cores": reasons.wide(problem, True) or reasons.backward_sm80(problem),
    }
    if problem.dtype in HALF_DTYPES:
        fp8_keys = replace(problem, has_fp8_keys=True, out_dtype=problem.dtype)
        hopper["forward on Hopper, FP8 keys and values"] = reasons.codes_sm90(fp8_keys)
        mma["forward on FP8 keys and values"] = reasons.fp8_sm80(fp8_keys)
        bias_dtype = "float32" if problem.bias else None
        codes = replace(problem, has_fp8_keys=True, dtype=e4m3.NAME, bias_dtype=bias_dtype, out_dtype=problem.dtype)
        hopper["forward on Hopper, FP8 arrays alone"] = reasons.fp8_sm90(codes)
        mma["forward on FP8 arrays alone"] = reasons.fp8_sm80(codes)
    if problem.bias:
        configs = sm80_backward.of_bias(problem, True, capability_of("sm_80"), smem_limit("sm_80"))
        of_bias = f"mma.sync, {configs[0].entry} {configs[0].tile} on sm_80" if configs else "portable kernel"
        mma["gradient of a bias on tensor cores"] = of_bias
    return {**_ON_CPU, **hopper, **mma, **chosen}


def _portable_reason(config: PortableConfig, problem: AttentionProblem) -> Any:
    options = reasons.flags_in_words(config, problem)
    in_slices = f" for {config.slice_columns} columns of the results at a time" if config.slice_columns else ""
    return (
        f"portable kernel (runs on every GPU from sm_70 on, no tensor cores), tiles of {config.block_m} queries x "
        f"{config.block_n} keys{in_slices}, {config.smem_bytes} bytes of shared memory: "
        f"{config.accum} arithmetic for {config.element} arrays{', ' + options if options != 'plain' else ''}"
    )


def missing() -> dict[str, str]:
    """Names of what is missing, each with what it is for and how to get it."""
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


def compiler_lacking(command: str) -> str:
    """Say what a command that compiles kernels lacks, and how to get it; empty if it lacks nothing."""
    lacks = missing()
    need = next((name for name in ("CuPy", "NVRTC") if name in lacks), None)
    return "" if need is None else f"cuflash {command} needs {need}: {lacks[need]}"


def _absent(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def _of_cupy(cupy: Any) -> dict[str, str]:
    try:
        nvrtc = cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # whatever CuPy raises where a library cannot be loaded
        words = 'kernels are compiled by it: pip install "cuflash[cuda13]" or "cuflash[cuda12]"'
        return {"NVRTC": f"{words} ({first_line(error)})"}
    lacks = {}
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        words = (
            f"none that CuPy can use ({first_line(error)}); NumPy arrays run on the CPU. If there is an NVIDIA GPU, "
            "install or update its driver: https://www.nvidia.com/drivers; in a container, start it with the GPU"
        )
        return {"GPU": words}
    driver = cupy.cuda.runtime.driverGetVersion() // 1000
    if driver < nvrtc[0]:
        lacks["driver"] = (
            f"it is of CUDA {driver}, NVRTC of CUDA {nvrtc[0]}: update the driver, or change to "
            f'pip install "cuflash[cuda{driver}]" in a fresh environment'
        )
    capabilities = {cupy.cuda.Device(i).compute_capability for i in range(devices)}
    if "90" in capabilities and nvrtc < cuda_device.OWN_ARCH_SINCE:
        lacks["NVRTC 12.9"] = (
            f"Hopper's own kernels need it, here is {nvrtc[0]}.{nvrtc[1]}: "
            f'pip install -U "cuda-toolkit[cudart,nvrtc]>=12.9,<{nvrtc[0] + 1}"'
        )
    try:
        cupy.cuda.device.get_cublas_handle()
    except Exception as error:
        lacks["cuBLAS"] = (
            "attention does not need it; CuPy's own matrix products, the demo and the benchmarks do: "
            f'pip install "cuflash[cuda{nvrtc[0]}-full]" ({first_line(error)})'
        )
    return lacks


def first_line(error: Exception) -> str:
    """First line of an error's message."""
    return str(error).strip().partition("\n")[0]
