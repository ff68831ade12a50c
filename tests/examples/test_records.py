"""Files of figures are read as they were written, one line a cell, and a failed write leaves a file as it was."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import FOLDER, load_script

from cuflash.tools.bench import records

FACTS: dict[str, Any] = {"command": "bench", "versions": {"torch": "2"}, "gpu": None}
CELLS: list[dict[str, Any]] = [{"ms": 0.1 + 0.2, "cell": {"name": "n² 1k"}}, {"ms": math.inf, "lengths": [1, 2]}]
RESULTS = FOLDER.parents[1] / "docs" / "lab" / "results"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    records.write(path, FACTS, iter(CELLS))
    assert records.read(path) == (FACTS, CELLS)
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [FACTS, *CELLS]
    records.write(path, FACTS, [])
    assert records.read(path) == (FACTS, [])
    assert os.listdir(path.parent) == ["run.jsonl"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    records.write(path, FACTS, CELLS)
    with pytest.raises(TypeError, match="serializable"):
        records.write(path, FACTS, [*CELLS, {"ms": object()}])
    whole = Path.write_text

    def cut_short(self: Path, text: str, *arguments: Any) -> None:
        whole(self, text[: len(text) // 2], *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        records.write(path, FACTS, [])
    assert records.read(path) == (FACTS, CELLS)
    assert os.listdir(tmp_path) == ["run.jsonl"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    link, file, pipe = tmp_path / "link.jsonl", tmp_path / "run.jsonl", tmp_path / "pipe"
    file.touch()
    link.symlink_to(file)
    records.write(link, FACTS, CELLS)
    assert link.is_symlink() and records.read(file) == (FACTS, CELLS)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        records.write(pipe, FACTS, [])
        assert json.loads(os.read(reading, 4096)) == FACTS and pipe.is_fifo()
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.jsonl: expected a line of facts and a line for each cell, got an empty file"),
        (
            '{"command": "bench"}\n{"ms": 1.0',
            "run.jsonl, line 2: expected a JSON object on each line, got '{\"ms\": 1.0'",
        ),
        ("[1]\n", r"run.jsonl, line 1: expected a JSON object on each line, got '\[1\]'"),
    ],
)
def test_a_file_of_another_form(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        records.read(tmp_path / "run.jsonl")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_recorded_files_say_what_they_are_of(path: Path) -> None:
    """The command, the date and the machine stand in the first line, and a line holds one cell's figures."""
    facts, cells = records.read(path)
    assert {"command", "date", "system", "versions"} <= facts.keys() and ("gpu" in facts or "cpu" in facts)
    assert cells and not any("command" in cell for cell in cells)


def test_there_are_recorded_files() -> None:
    assert {"forward", "backward_full", "errors", "host", "mma", "float32"} <= {p.stem for p in RESULTS.glob("*.jsonl")}


@pytest.mark.parametrize("script", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_scripts_find_what_they_import(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module(script).__doc__


def test_the_script_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    path = tmp_path / "cpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--seqlen", "64", "--rounds", "1", "--json", str(path)])
    load_script("cpu").main()
    facts, cells = records.read(path)
    assert facts["command"] == "cpu" and facts["bytes_of_all_scores"] == 4 * 8 * 64**2
    assert [cell["direction"] for cell in cells] == ["forward", "forward_and_backward"]
    assert all(cell["peers"]["cuflash"]["wall_min_s"] >= 0 and cell["peak_bytes"] > 0 for cell in cells)
