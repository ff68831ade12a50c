"""The options by which benchmarks record their figures, and the records that they write."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from cuflash.tools import bench
from cuflash.tools.bench import records, report


def parser_of(description: str | None, of_a_line: str = "a cell") -> argparse.ArgumentParser:
    """A command's parser with the options of a record, whose lines each hold the figures `of_a_line`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_commit(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write all figures, one line {of_a_line}")
    return parser


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the measured code."""
    parser.add_argument("--commit", help="to be recorded, where this is no checkout with git")


def gpu_of(parser: argparse.ArgumentParser) -> ModuleType:
    """CuPy; the command ends with an error where there is no GPU."""
    xp = bench.namespace("gpu")
    if xp is None:
        parser.error("no GPU that CuPy can use")
    return xp


class Recorder:
    """The record that ``--json`` asks for: the facts of a run, taken when it begins, and its figures."""

    def __init__(self, args: argparse.Namespace, xp: ModuleType, command: str, **facts: Any) -> None:
        self._path: Path | None = args.json
        self._facts = report.environment(xp, args.commit, command) | facts

    def write(self, cells: Iterable[dict[str, Any]]) -> None:
        """Write the cells that there are; after every cell, so that a run that is cut short leaves what it had."""
        if self._path:
            records.write(self._path, self._facts, cells)
