"""``python -m cuflash tune``: compile and time the candidates of problems, next to the times that plans predict.

The figures of the plans' tables (`plan.*_times`) come from such runs on the GPUs that they name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuflash.cuda import compile as cuda_compile
from cuflash.cuda.device import Device
from cuflash.gpu import capture
from cuflash.gpu.kernels import source_of
from cuflash.gpu.launch import Kernel
from cuflash.gpu.trial import Trial
from cuflash.hardware import capability_of
from cuflash.interop import dtype_of
from cuflash.plan.config import KernelConfig
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import candidates, problems
from cuflash.tools.arguments import architecture, positive
from cuflash.tools.bench import records, report
from cuflash.tools.bench.cells import RANDOM, Grid, cells_of
from cuflash.tools.bench.clock import GraphStopwatch, Stopwatch
from cuflash.tools.candidates import DIRECTIONS, FORWARD, Candidate, Gpu
from cuflash.tools.compile import JOBS, in_parallel, unknown_architectures
from cuflash.tools.info import compiler_lacking, first_line

ROUNDS, COUNT = 5, 20
BUDGET_MS = 20.0  # of one candidate in one round
_CLOSE = 1.05  # a choice is good if it takes at most so many times as long as the best candidate
_WITH_DRAWN = ("dtype", "precision")  # these arguments hold for drawn problems, too
_HOPPER = "sm_90a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tune`` to its parser."""
    add = parser.add_argument
    add("--arch", type=architecture, metavar="sm_XX", help=f"default: the GPU here, with --compile-only {_HOPPER}")
    add("--jobs", type=positive, default=JOBS, help="kernels compiled at once (default %(default)s)")
    add("--rounds", type=positive, default=ROUNDS, help="interleaved rounds (default %(default)s)")
    add("--seed", type=int, default=Grid().seed, metavar="N", help="draws the problems (default %(default)s)")
    add("--count", type=positive, default=COUNT, metavar="N", help="of drawn problems (default %(default)s)")
    add("--compile-only", action="store_true", help="time nothing: registers, spills and compile times, without a GPU")
    add("--output", type=Path, metavar="FILE", help="write one JSON object a candidate, one a line")
    add("--commit", help="to be recorded, where this is no checkout with git")
    title = "a problem; with none of these but --dtype and --precision, problems are drawn as bench --suite random does"
    names = problems.add_arguments(parser.add_argument_group(title))
    parser.set_defaults(problem_arguments=[name for name in names if name not in _WITH_DRAWN])


class Built(NamedTuple):
    """A kernel's figures, as the compiler reports them."""

    registers: int
    spilled_bytes: int  # local memory of a thread beyond what it has by design
    seconds: float


class Figures(NamedTuple):
    """A candidate with what was found."""

    candidate: Candidate
    built: list[Built]  # of its kernels
    round_us: list[float]  # medians of the rounds of the pass on the device; none where it was not timed
    failure: str = ""  # why it did not run to the end

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that a thread of one of its kernels spills."""
        return max(own.spilled_bytes for own in self.built)

    @property
    def measured_us(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.round_us) if self.round_us else None

    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        own = self.candidate
        measured = f"{self.measured_us:.1f} us" if self.measured_us is not None else "failed" if self.failure else "-"
        return (
            own.direction,
            own.family,
            own.words,
            f"{sum(kernel.seconds for kernel in self.built):.1f} s",
            "/".join(str(kernel.registers) for kernel in self.built),
            f"{self.spilled_bytes} bytes" if self.spilled_bytes else "none",
            own.prediction,
            measured,
            "chosen" if own.is_chosen else "",
        )

    def as_json(self) -> dict[str, Any]:
        """Everything that is known, for programs."""
        return {
            **self.candidate.as_json(),
            "compile_seconds": [kernel.seconds for kernel in self.built],
            "registers": [kernel.registers for kernel in self.built],
            "spilled_bytes": self.spilled_bytes,
            "round_us": self.round_us,
            "measured_us": self.measured_us,
            "failure": self.failure or None,
        }


_HEADER = ("pass", "family", "candidate", "compiled", "registers", "spills", "predicted", "measured", "")


def run(args: argparse.Namespace) -> int:
    """Return 0; 1 if a kernel does not compile; 2 for wrong use or where something is missing.

    A candidate that does not run, and a problem whose arrays find no memory, are reported and left out.
    """
    error = problems.error_of(args) or _error_of(args)
    if error:
        print(error, file=sys.stderr)
        return 2
    device = None if args.compile_only else candidates.device_here()
    gpu = candidates.gpu_of(args.arch or _HOPPER) if device is None else candidates.gpu_here(device)
    facts: dict[str, Any] = {"gpu": None, "driver": None, "nvrtc": _nvrtc()}
    facts |= report.environment(np if device is None else device.namespace, args.commit, "tune")
    facts |= {"arch": gpu.arch, "num_sms": gpu.num_sms, "compiler": gpu.compiler}
    drawn = _problems(args)
    compiler = _Compiler(gpu.arch, args.jobs)
    clock = None if device is None else stopwatch(device)
    lines: list[dict[str, Any]] = []
    passes: list[list[Figures]] = []
    for number, problem in enumerate(drawn, 1):
        words = problems.words_of(problem)
        try:
            found = _figures(problem, gpu, device, compiler, clock, args.rounds)
        except MemoryError as failure:
            print(f"{words}: left out, as its arrays find no memory: {first_line(failure)}", file=sys.stderr)
            continue
        except RuntimeError as failure:
            print(f"{words}: {failure}", file=sys.stderr)
            return 1
        for own in found:
            if own.failure:
                print(f"{words}: {own.candidate.words} does not run: {own.failure}", file=sys.stderr)
        print(f"[{number}/{len(drawn)}] {words} on {gpu.arch}, {gpu.num_sms} multiprocessors\n")
        print(_table([own.row() for own in found]), end="\n\n", flush=True)
        lines += [{**facts, "problem": words, **_sizes(problem), **own.as_json()} for own in found]
        passes += [[own for own in found if own.candidate.direction == direction] for direction in DIRECTIONS]
        if args.output:  # after every problem: a run that is cut short leaves what it had
            records.write_lines(args.output, lines)
    print(summary(passes))
    return 0


def _error_of(args: argparse.Namespace) -> str:
    """Say in a sentence what is missing, or what contradicts itself; empty if nothing does."""
    if args.output and (reason := _unwritable(args.output)):
        return f"--output: expected a file that can be written, got {args.output}: {reason}"
    if lacking := compiler_lacking("tune"):
        return lacking
    if args.compile_only:
        return unknown_architectures([args.arch]) if args.arch else ""
    device = candidates.device_here()
    if device is None:
        return (
            "cuflash tune times kernels on a GPU, and CuPy finds none here: --compile-only lists registers, spills and "
            "compile times without one"
        )
    here = candidates.gpu_here(device)
    if args.arch and capability_of(args.arch) != here.capability:
        return f"--arch: expected {here.arch}, the GPU here, got {args.arch}; others go with --compile-only"
    return ""


def _unwritable(path: Path) -> str:
    """Say why no file can be written at a path, whose folders may be missing; empty if one can."""
    if path.is_dir():
        return "it is a folder"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"{folder} is no folder"
    target = path if path.exists() else folder
    return "" if os.access(target, os.W_OK) else "permission denied"


def _problems(args: argparse.Namespace) -> list[AttentionProblem]:
    """Return the problem that was given, or drawn ones."""
    if any(getattr(args, name) is not None for name in args.problem_arguments):
        return [problems.problem_of(args)]
    grid = Grid(dtype=args.dtype or Grid().dtype, seed=args.seed, count=args.count)
    return [problems.cell_problem(cell, args.precision) for cell in cells_of(RANDOM, grid)]


def _nvrtc() -> str:
    import cupy

    return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))


class _Compiler:
    """Compiles kernels for an architecture, each once."""

    def __init__(self, arch: str, jobs: int) -> None:
        self._arch, self._jobs = arch, jobs
        self._built: dict[KernelConfig, Built] = {}

    def __call__(self, kernels: Iterable[Kernel]) -> list[Built]:
        """Return what the compiler says of each kernel."""
        asked = [kernel.config for kernel in kernels]
        new = [config for config in dict.fromkeys(asked) if config not in self._built]
        self._built.update(zip(new, in_parallel(self._jobs, self._compile, new), strict=True))
        return [self._built[config] for config in asked]

    def load(self, kernels: Iterable[Kernel], device: Device) -> None:
        """Load kernels side by side, which calls would compile one behind the other."""
        for _ in in_parallel(self._jobs, lambda kernel: kernel.load(device), list(dict.fromkeys(kernels))):
            pass

    def _compile(self, config: KernelConfig) -> Built:
        made = cuda_compile.compile_for(self._arch, source_of(config), config.entry)
        spilled = made.local_bytes if made.local_bytes > config.local_bytes else 0
        return Built(made.registers, spilled, made.seconds)


def stopwatch(device: Device) -> Stopwatch:
    """Return what times work on the device alone."""
    return GraphStopwatch(device.namespace, BUDGET_MS)


def _figures(
    problem: AttentionProblem,
    gpu: Gpu,
    device: Device | None,
    compiler: _Compiler,
    clock: Stopwatch | None,
    rounds: int,
) -> list[Figures]:
    """Return the candidates of both passes, compiled and, where a clock is given, timed."""
    found = candidates.candidates_of(problem, gpu)
    compiler([kernel for own in found for kernel in own.kernels])  # side by side
    built = [compiler(own.kernels) for own in found]
    spilled = [max(kernel.spilled_bytes for kernel in own) for own in built]
    found = candidates.with_spills(found, spilled)
    times: list[_Timed] = [_Timed([]) for _ in found]
    if device is not None and clock is not None:
        timed = [own if not bytes_ else None for own, bytes_ in zip(found, spilled, strict=True)]
        compiler.load([kernel for own in timed if own is not None for kernel in own.kernels], device)
        times = _times(problem, device, timed, clock, rounds)
    return [Figures(own, kernels, *timed) for own, kernels, timed in zip(found, built, times, strict=True)]


class _Timed(NamedTuple):
    """The times of a candidate, or why it has none."""

    round_us: list[float]
    failure: str = ""


def _times(
    problem: AttentionProblem, device: Device, found: Sequence[Candidate | None], clock: Stopwatch, rounds: int
) -> list[_Timed]:
    """Return the microseconds of each candidate's pass on random arrays, the median of each round.

    A candidate is prepared anew in each round, so that one graph at a time has memory; one that fails has no times.
    """
    times = [_Timed([]) for _ in found]
    with clock.within():
        arrays = problems.arrays_of(problem, problems.random_arrays(problem, device.namespace, dtype_of))
        # A block mask is prepared by its first call, outside of a capture.
        operands = problems.operands_of(problem, arrays, with_mask=True)
        grads = candidates.grads_of(problem, arrays, device.namespace.empty_like)

        def call_of(own: Candidate) -> Callable[[], None]:
            def call() -> None:
                trial = Trial(candidates.work_of(own.direction, problem, arrays, operands, device), own.place)
                candidates.run(own.direction, trial, grads)
                trial.recording.end()

            return call

        # Gradients read the results of the forward pass.
        candidates.run(FORWARD, candidates.work_of(FORWARD, problem, arrays, operands, device), {})
        for number in range(rounds):
            first = number % max(1, len(found))  # every round begins with another candidate
            for index in (*range(first, len(found)), *range(first)):
                own = found[index]
                if own is None or times[index].failure:
                    continue
                try:
                    timed = {str(index): clock.prepared(call_of(own))}
                    (of_round,) = clock.interleaved(timed, 1)[str(index)]
                    times[index].round_us.append(1e3 * statistics.median(of_round))
                    del timed
                except (RuntimeError, MemoryError) as failure:
                    times[index] = _Timed([], first_line(failure))
                capture.forget()
    return times


def _sizes(problem: AttentionProblem) -> dict[str, Any]:
    names = ("dtype", "batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
    masks = ("window_left", "window_right", "precision")
    return {name: getattr(problem, name) for name in (*names, *masks)}


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [_HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{x:{width}}" for x, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def summary(passes: Iterable[Sequence[Figures]]) -> str:
    """Say how good predictions and choices were, of passes with the figures of their candidates."""
    errors, good = [], []
    for found in passes:
        timed = [(own, us) for own in found if (us := own.measured_us) is not None]
        errors += [
            abs(own.candidate.predicted_us / us - 1) for own, us in timed if own.candidate.predicted_us is not None
        ]
        chosen = [us for own, us in timed if own.candidate.is_chosen and own.candidate.place.number == 0]
        of_first = [us for own, us in timed if own.candidate.place.number == 0]
        good += [us <= _CLOSE * min(of_first) for us in chosen]
    if not good:
        return "nothing was timed"
    predicted = f"{statistics.median(errors):.1%} of {len(errors)} candidates" if errors else "none is in microseconds"
    share = f"{sum(good) / len(good):.1%} of {len(good)} passes"
    return f"median error of predictions: {predicted}; chosen within {_CLOSE - 1:.0%} of the best: {share}"
