"""Files of figures: JSON Lines, one line a cell.

The first line holds the facts of the run (the command, date, commit, GPU, driver and versions), every further line the
figures of one cell.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """A record is what one file holds."""

    facts: dict[str, Any]
    cells: list[dict[str, Any]]


def write(path: Path, facts: dict[str, Any], cells: Iterable[dict[str, Any]]) -> None:
    """Write a record in place of the file at `path`, as `write_lines` does."""
    write_lines(path, (facts, *cells))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON objects in place of the file at `path`, one a line.

    The text goes into a file next to it that then takes its name, so that a run that is cut short leaves the old
    record or the new one, and never half of one.
    """
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe or a terminal keeps its name
        path.write_text(text, "utf-8")
        return
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> Record:
    """Read the record that `write` wrote; ValueError if the file is of another form."""
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = line
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object on each line, got {line[:40]!r}")
        lines.append(value)
    if not lines:
        raise ValueError(f"{path}: expected a line of facts and a line for each cell, got an empty file")
    return Record(lines[0], lines[1:])
