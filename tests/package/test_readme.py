"""The Python examples of the README run, and its commands can be found by those who run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from code_blocks import BLOCK

import cuflash

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def run_examples(need: str | None) -> None:
    """Run the examples that need this, or nothing, in order and in one namespace."""
    namespace: dict[str, Any] = {"np": np, "cuflash": cuflash}
    examples = [match for match in BLOCK.finditer(README) if match["need"] == need]
    assert examples
    for example in examples:
        line = README.count("\n", 0, example.start("code"))  # so that a traceback names the README's line
        exec(compile("\n" * line + example["code"], "README.md", "exec"), namespace)


def test_examples() -> None:
    run_examples(None)


def test_example_on_the_package_index() -> None:
    (example,) = BLOCK.finditer((Path(__file__).parents[2] / "docs" / "package.md").read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {}
    exec(compile(example["code"], "docs/package.md", "exec"), namespace)
    assert namespace["dk"].shape == namespace["k"].shape


def test_torch_example() -> None:
    pytest.importorskip("torch")
    run_examples("torch")


@pytest.mark.gpu
def test_gpu_example() -> None:
    run_examples("gpu")


def test_it_says_how_to_install_it() -> None:
    """The README installs from the index, and from a checkout in its folder."""
    installing = README.partition("## Install\n")[2].partition("\n## ")[0]
    for line in ('pip install "cuflash[cuda13]"', 'pip install -e ".[cuda13]"'):
        assert line in installing


def test_commands_are_marked() -> None:
    for marker in ("demo", "test"):  # .ci/run finds the two commands by these
        assert README.count(f"<!-- {marker} -->\n```sh\n") == 1
