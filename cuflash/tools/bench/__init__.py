"""``python -m cuflash bench``: forward and backward next to every peer that can be imported.

All peers of a cell are measured in interleaved rounds on the same inputs, and checked against float64 before.
"""

import argparse
import importlib
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cuflash.cpu.threads import BLAS_THREADS
from cuflash.tools.arguments import picture, positive, positive_number
from cuflash.tools.bench import peers, records, report
from cuflash.tools.bench.cells import BACKWARD, FORWARD, RANDOM, SUITES, Cell, Grid, cells_of
from cuflash.tools.bench.clock import GraphStopwatch, Stopwatch, Timed
from cuflash.tools.bench.inputs import Inputs, arguments, limit, take_sample, worst
from cuflash.tools.bench.report import Result
from cuflash.tools.compile import in_parallel
from cuflash.tools.info import first_line

# Calls whose bits a deterministic backward repeats.
REPEATS = 50
ROUNDS = 5
# Cells of a suite, and rounds, that give a first look; each has a fifth of the time.
QUICK_CELLS, QUICK_ROUNDS, QUICK_BUDGET = 3, 2, 0.2
GPU_SUITES = tuple(name for name in SUITES if name != "cpu")
_MOST_NAMES = 12  # of cells that are named before the first is measured
LISTED = tuple(name for name in GPU_SUITES if name != RANDOM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    grid = Grid()
    add = parser.add_argument
    add(
        "--suite",
        nargs="+",
        choices=(*SUITES, "all"),
        metavar="NAME",
        help=f"of {', '.join(SUITES)}, all (default: dense on a GPU, cpu without one; the others are meant for a GPU, "
        f"and all has no {RANDOM})",
    )
    add("--seed", type=int, default=grid.seed, metavar="N", help=f"draws the cells of {RANDOM} (default %(default)s)")
    add("--cells", type=positive, default=grid.count, metavar="N", help=f"of {RANDOM} (default %(default)s)")
    quick = f"a first look: {QUICK_CELLS} cells of each suite, {QUICK_ROUNDS} rounds, a fifth of the time for each"
    add("--quick", action="store_true", help=quick)
    add("--device", choices=("gpu", "cpu"), help="default: the GPU if there is one")
    dense, some = "of the dense suite (default %(default)s)", "where the suite leaves it open (default %(default)s)"
    add("--dtype", default=grid.dtype, choices=("float16", "bfloat16", "float32", "float64"), help=some)
    add("--head-dim", nargs="+", type=positive, default=grid.head_dims, metavar="D", help=some)
    add("--seqlen", nargs="+", type=positive, default=grid.seqlens, metavar="N", help=dense)
    add("--mask", nargs="+", choices=("full", "causal"), default=grid.masks, help=some)
    add("--tokens", type=positive, default=grid.tokens, help=f"batch * seqlen {dense}")
    add("--width", type=positive, default=grid.width, help=f"heads * head_dim {dense}")
    add("--direction", nargs="+", choices=(FORWARD, BACKWARD), default=(FORWARD, BACKWARD), help="default: both")
    add("--peers", nargs="+", metavar="NAME", help="only these, cuflash among them or not (default: all)")
    add("--rounds", type=positive, help=f"interleaved rounds (default {ROUNDS}, with --quick {QUICK_ROUNDS})")
    add(
        "--budget-ms",
        type=positive_number,
        help="time of one peer in one round (default: 60 on a GPU, 1000 on the CPU)",
    )
    add(
        "--compile-jobs",
        type=positive,
        default=8,
        help="cells whose kernels are compiled at once (default %(default)s)",
    )
    add("--unit", choices=("tflops", "ms"), default="tflops", help="of the table (default %(default)s)")
    add("--commit", help="to be recorded, where this is no checkout with git")
    add("--json", type=Path, metavar="FILE", help="write all figures, one line a cell")
    add("--picture", type=picture, metavar="FILE", help="draw the TFLOP/s as PNG, SVG or PDF")


def run(args: argparse.Namespace) -> int:
    """Return 1 if a result of cuflash was wrong or missing."""
    xp = namespace(args.device)
    if xp is None:
        _say("no GPU that CuPy can use: see python -m cuflash info")
        return 2
    facts = report.environment(xp, args.commit)
    _say(", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str)))
    grid = Grid(args.dtype, args.head_dim, args.seqlen, args.mask, args.tokens, args.width, args.seed, args.cells)
    budget = args.budget_ms or (1000.0 if xp is np else 60.0) * (QUICK_BUDGET if args.quick else 1.0)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    # Drawn problems may be so small that the host is slower than the device.
    in_graphs = xp is not np and args.suite == [RANDOM]
    stopwatch = GraphStopwatch(xp, budget) if in_graphs else Stopwatch(xp, budget)
    if args.suite and RANDOM in args.suite:
        facts |= {"seed": args.seed, "device_times": "graphs" if in_graphs else "calls"}
    contenders = peers.cpu_peers() if xp is np else peers.gpu_peers()
    if args.peers:
        unknown = set(args.peers) - set(contenders)
        if unknown:
            _say(f"unknown peers: {', '.join(sorted(unknown))}; there are {', '.join(contenders)}")
            return 2
        contenders = {name: contenders[name] for name in args.peers}
    results: list[Result] = []
    cells = _chosen_cells(args.suite, xp, grid, args.quick)
    for_gpu = [name for name in dict.fromkeys(cell.suite for cell in cells) if name in GPU_SUITES]
    if xp is np and for_gpu:
        _say(
            f"warning: on the CPU a cell of {', '.join(for_gpu)} may take minutes and gigabytes: these are for a GPU; "
            "--suite cpu is for here, --quick and smaller --tokens, --width and --seqlen make them shorter"
        )
    _say(f"{_in_words(cells)}; a line tells when one is done, and at the end the tables come")
    if xp is not np and peers.US in contenders:
        compile_kernels(cells, xp, args.direction, args.compile_jobs)
    begin = time.perf_counter()
    for number, cell in enumerate(cells, 1):
        start = time.perf_counter()
        directions = tuple(d for d in args.direction if d in cell.directions)
        with stopwatch.within():
            results += measure(cell, xp, contenders, directions, stopwatch, rounds)
        now = time.perf_counter()
        seconds_left = (now - begin) / number * (len(cells) - number)
        left = f", about {_duration(seconds_left)} left" if number < len(cells) else ""
        _say(f"[{number}/{len(cells)}] {cell.name} ({now - start:.1f} s{left})")
        if args.json:  # after every cell: a run that is cut short leaves what it had
            records.write(args.json, facts, (result.as_json() for result in results))
    for direction in args.direction:
        print(f"\n{direction}, {'ms' if args.unit == 'ms' else 'TFLOP/s'}\n")
        of_direction = [result for result in results if result.direction == direction]
        print(report.table(of_direction, args.unit))
        drawn = [result for result in of_direction if result.cell.suite == RANDOM]
        if drawn:
            print(f"\nspeed over the fastest peer's, {direction}: {report.summary(drawn)}")
    for peer, reason in {(peer, reason): None for result in results for peer, reason in result.absent.items()}:
        print(f"{peer}: {reason}")
    if args.picture:
        report.draw(args.picture, facts, results)
    return int(any(result.wrong or peers.US in result.absent for result in results))


def measure(
    cell: Cell,
    xp: ModuleType,
    contenders: dict[str, peers.Peer],
    directions: tuple[str, ...],
    stopwatch: Stopwatch,
    rounds: int,
) -> list[Result]:
    """Check and time every contender on one cell."""
    inputs = Inputs(cell, xp)
    given = arguments(inputs)
    with BLAS_THREADS:  # small products
        sample = take_sample(inputs, given, *peers.cuflash_results(inputs, given))
    results = {direction: Result(cell, direction) for direction in directions}
    timed: dict[str, dict[str, Timed]] = {direction: {} for direction in directions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every backend that refuses a cell
        for name, prepare in contenders.items():
            calls: peers.Calls | None = None
            for direction, result in results.items():
                try:
                    calls = calls or prepare(inputs)
                    call = calls.forward if direction == FORWARD else calls.backward
                    errors_of = sample.forward_errors if direction == FORWARD else sample.backward_errors
                    value = call()
                    if name != peers.PLAIN:  # another problem's results
                        result.errors[name] = errors_of(value)
                    if isinstance(stopwatch, GraphStopwatch):
                        result.host_us[name] = stopwatch.host_us(call)
                    timed[direction][name] = stopwatch.prepared(call)
                except Exception as error:  # a peer may fail in any way; the report says how
                    result.absent[name] = _reason(error)
    for direction, result in results.items():
        result.times = stopwatch.interleaved(timed[direction], rounds)
        if result.is_unsteady:
            _say(f"UNSTEADY: {cell.name} {direction}: is something else running on this device?")
        if peers.US in result.errors:
            largest = worst(result.errors[peers.US])
            result.wrong = not largest <= limit("float16" if "tf32" in cell.options else cell.dtype)
            if result.wrong:
                _say(f"WRONG: {cell.name} {direction}: error {largest:.3g}")
        if direction == BACKWARD and "deterministic" in cell.options and peers.US in timed[direction]:
            result.same_bits = _repeats(timed[direction][peers.US])
    return list(results.values())


def _repeats(call: Any) -> int:
    first = call()
    bits = [x.view(f"u{x.itemsize}") for x in first]
    same = 0
    for _ in range(REPEATS):
        same += all(bool((x.view(f"u{x.itemsize}") == y).all()) for x, y in zip(call(), bits, strict=True))
    return same


def compile_kernels(cells: list[Cell], xp: ModuleType, directions: tuple[str, ...], jobs: int) -> None:
    """So that nothing is compiled while others are timed."""

    def call(cell: Cell) -> None:
        try:
            calls = peers.cuflash_calls(Inputs(cell, xp))
            if BACKWARD in directions:
                calls.backward()
        except Exception as error:  # it is met again when the cell is measured
            _say(f"{cell.name}: {_reason(error)}")

    start = time.perf_counter()
    list(in_parallel(jobs, call, sorted(cells, key=lambda cell: cell.seqlen_q)))
    xp.cuda.Device().synchronize()
    xp.get_default_memory_pool().free_all_blocks()
    _say(f"kernels compiled and loaded in {time.perf_counter() - start:.1f} s")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _chosen_cells(suites: list[str] | None, xp: ModuleType, grid: Grid, quick: bool) -> list[Cell]:
    names = suites or ["cpu" if xp is np else "dense"]
    if "all" in names:
        names = ["cpu"] if xp is np else list(LISTED)
    return [cell for name in names for cell in _some(cells_of(name, grid), quick)]


def _in_words(cells: list[Cell]) -> str:
    """How many cells there are, and which: all names where these are few."""
    names = [cell.name for cell in cells]
    shown = names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"and so on, to {names[-1]}"]
    return f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}: {', '.join(shown)}"


def _some(cells: list[Cell], quick: bool) -> list[Cell]:
    """All cells, or a few from the first to the last."""
    if not quick or len(cells) <= QUICK_CELLS:
        return cells
    return [cells[round(n * (len(cells) - 1) / (QUICK_CELLS - 1))] for n in range(QUICK_CELLS)]


def namespace(device: str | None) -> ModuleType | None:
    """CuPy if it sees a GPU, else NumPy; None if `device` is the other."""
    if device == "cpu":
        return np
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        cupy = None
    if cupy is not None and cupy.cuda.is_available():
        return cupy
    return None if device == "gpu" else np


def _reason(error: Exception) -> str:
    first = first_line(error)
    return first if isinstance(error, peers.Unavailable) else f"{type(error).__name__}: {first}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
