"""This checkout and another one by turns: how much faster or slower a change makes each cell of the benchmark.

    python examples/benchmarks/by_turns.py OTHER [--suite NAME ...] [--direction ...] [--head-dim ...] [--seqlen ...]
        [--rounds N] [--budget-ms MS] [--commit COMMIT] [--json FILE]

OTHER is a folder with the packages of another commit, as `git worktree add OTHER COMMIT` makes it. Each checkout has a
process of its own, and the two time a cell in turns, so that the clock and the heat of the device meet both alike. A
figure is this checkout's speed as a multiple of the other's: above 1 the change is a gain.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
THIS = HERE.parents[2]  # the checkout of this file
ROUNDS, BUDGET_MS = 5, 12.0
SLOWER = 0.99  # below this speed a cell is listed again at the end


class Worker:
    """A process that times the cells of one checkout; each question and answer is one line of JSON."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(HERE), "--serve"]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Return the answer; RuntimeError where the process has ended."""
        self.tell(question, **arguments)
        return self.answer()

    def tell(self, question: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([question, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` tells

    def answer(self) -> Any:
        """Wait for the answer to what was told."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.checkout}: its process ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer questions about the cells of the cuflash that this process imports."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    times = None
    for line in sys.stdin:
        question, arguments = json.loads(line)
        if question == "cells":
            times = Times(**arguments)
            answer: Any = times.described
        else:
            assert times is not None
            answer = getattr(times, question)(**arguments)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Times:
    """The cells of the suites, and the times of the one that is prepared."""

    def __init__(self, suites: list[str], grid: dict[str, Any], device: str | None, budget_ms: float) -> None:
        import cuflash
        from cuflash.tools import bench
        from cuflash.tools.bench.cells import Grid, cells_of
        from cuflash.tools.bench.clock import Stopwatch

        xp = bench.namespace(device)
        if xp is None:
            sys.exit("no GPU that CuPy can use: see python -m cuflash info")
        self._xp: Any = xp
        self._cells = [cell for name in suites for cell in cells_of(name, Grid(**grid))]
        self._stopwatch = Stopwatch(xp, budget_ms)
        self._calls: dict[str, Any] = {}
        self.described = {
            "cuflash": str(Path(cuflash.__file__).parent),
            "cells": [{"name": c.name, "suite": c.suite, "directions": list(c.directions)} for c in self._cells],
        }

    def prepare(self, number: int) -> list[str]:
        """Compile the kernels of a cell, and return the errors of its directions."""
        from cuflash.tools.bench.inputs import Inputs
        from cuflash.tools.bench.peers import cuflash_calls

        self._calls, errors = {}, []
        try:
            calls = cuflash_calls(Inputs(self._cells[number], self._xp))
        except Exception as error:  # it is reported, and the other cells are measured
            return [f"{type(error).__name__}: {error}"]
        for direction in self._cells[number].directions:
            call = getattr(calls, direction)
            try:
                call()
                self._calls[direction] = self._stopwatch.prepared(call)
            except Exception as error:
                errors.append(f"{direction}: {type(error).__name__}: {error}")
        return errors

    def time(self, direction: str) -> float | None:
        """Return the median of one round in ms; None where the cell has no such call."""
        if direction not in self._calls:
            return None
        [[of_round]] = self._stopwatch.interleaved({direction: self._calls[direction]}, 1).values()
        return statistics.median(of_round)


def measured(ours: Worker, others: Worker, number: int, direction: str, rounds: int) -> dict[str, float] | None:
    """Return the medians of both checkouts in ms, and the speed; None where one of them has no such call."""
    times: dict[Worker, list[float]] = {ours: [], others: []}
    for i in range(rounds):
        for worker in (ours, others) if i % 2 else (others, ours):
            ms = worker.ask("time", direction=direction)
            if ms is None:
                return None
            times[worker].append(ms)
    this, other = (statistics.median(times[worker]) for worker in (ours, others))
    return {"this_ms": this, "other_ms": other, "speed": other / this}


def summary(cells: list[dict[str, Any]]) -> str:
    """Return, for each suite and direction, the geometric mean, the least and the most, and the cells that lost."""
    lines = []
    for suite, direction in dict.fromkeys((cell["suite"], cell["direction"]) for cell in cells):
        speeds = [c["speed"] for c in cells if (c["suite"], c["direction"]) == (suite, direction)]
        mean = math.exp(statistics.fmean(map(math.log, speeds)))
        lines.append(f"{suite} {direction}: {mean:.3f} ({min(speeds):.3f} to {max(speeds):.3f}), {len(speeds)} cells")
    slower = sorted((cell for cell in cells if cell["speed"] < SLOWER), key=lambda cell: float(cell["speed"]))
    lines += [f"slower: {c['cell']} {c['direction']}: {c['speed']:.3f}" for c in slower]
    return "\n".join(lines)


def main() -> int:
    """Measure, print and record."""
    import recording

    from cuflash.tools import bench

    parser = recording.parser_of(__doc__, "a cell and direction")
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--suite", nargs="+", default=["dense"], help="suites of python -m cuflash bench")
    parser.add_argument("--direction", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])
    parser.add_argument("--device", choices=["gpu", "cpu"], help="default: the GPU if there is one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head-dim", nargs="+", type=int, help="only these head dims")
    parser.add_argument("--seqlen", nargs="+", type=int, help="only these lengths")
    parser.add_argument("--tokens", type=int, help="tokens of all sequences together")
    parser.add_argument("--width", type=int, help="heads times head dim")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each checkout")
    parser.add_argument("--budget-ms", type=float, default=BUDGET_MS, help="milliseconds of one turn")
    args = parser.parse_args()
    if not (args.other / "cuflash" / "__init__.py").exists():
        parser.error(f"other: expected a folder with the package cuflash, got {args.other}")
    xp = bench.namespace(args.device)
    if xp is None:
        parser.error("no GPU that CuPy can use")
    sizes = {"head_dims": args.head_dim, "seqlens": args.seqlen, "tokens": args.tokens, "width": args.width}
    grid = {"dtype": args.dtype} | sizes
    asked = {
        "suites": args.suite,
        "grid": {name: x for name, x in grid.items() if x},
        "device": args.device,
        "budget_ms": args.budget_ms,
    }
    record = recording.Recorder(args, xp, "by_turns", rounds=args.rounds)
    ours, others = workers = Worker(THIS), Worker(args.other.resolve())
    described = [worker.ask("cells", **asked) for worker in workers]
    for worker, of_worker in zip(workers, described, strict=True):
        if Path(of_worker["cuflash"]).parent != worker.checkout:
            parser.error(f"{worker.checkout}: its process imports {of_worker['cuflash']}")
    if described[0]["cells"] != described[1]["cells"]:
        parser.error("the two checkouts have other cells in these suites")
    cells = compared(ours, others, described[0]["cells"], args, record)
    print(f"\n{summary(cells)}")
    for worker in workers:
        worker.close()
    return 0


def compared(ours: Worker, others: Worker, cells: list[Any], args: argparse.Namespace, record: Any) -> list[Any]:
    """Time all cells, print each and record them."""
    done: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        for worker in (ours, others):
            worker.tell("prepare", number=number)
        for worker in (ours, others):
            for error in worker.answer():
                print(f"{cell['name']}: {worker.checkout}: {error}", file=sys.stderr)
        for direction in (d for d in args.direction if d in cell["directions"]):
            figures = measured(ours, others, number, direction, args.rounds)
            if figures is not None:
                done.append({"cell": cell["name"], "suite": cell["suite"], "direction": direction} | figures)
                times = f"{figures['this_ms']:9.4f} ms {figures['speed']:7.3f}"
                print(f"{cell['name']:32} {direction:8} {times}", flush=True)
                record.write(done)
    return done


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
