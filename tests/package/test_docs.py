"""The documentation's examples run, and its drawings are what their script draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from code_blocks import BLOCK

import cuflash

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8"))


def test_there_are_pages_with_examples() -> None:
    assert {"autodiff.md", "blocksparse.md", "kernels.md", "migration.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str) -> None:
    """The examples of a page run in order and in one namespace."""
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"np": np, "cuflash": cuflash}
    for example in BLOCK.finditer(text):
        line = text.count("\n", 0, example.start("code"))  # so that a traceback names the page's line
        exec(compile("\n" * line + example["code"], page, "exec"), namespace)


@pytest.mark.parametrize("folder", ["", "docs"])
def test_links_lead_somewhere(folder: str) -> None:
    pages = [path for path in (ROOT / folder).glob("**/*.md" if folder else "*.md") if "_build" not in path.parts]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]
    assert links
    missing = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_readme_is_a_page_whose_links_lead_somewhere() -> None:
    """Links lead to pages of the documentation and to pictures; other files of a checkout are named."""
    put_readme = runpy.run_path(str(DOCS / "conf.py"))["_put_readme"]
    source = [(DOCS / "readme.md").read_text(encoding="utf-8")]
    put_readme(SimpleNamespace(srcdir=str(DOCS)), "readme", source)
    assert "# cuflash" in source[0]
    links = re.findall(r"\]\(([^)#\s]+)", source[0])
    assert "blocksparse.md" in links
    assert not [link for link in links if "://" not in link and not (DOCS / link).exists()]
    pages = [(DOCS / link).resolve() for link in links if link.endswith(".md")]
    assert DOCS / "lab" / "README.md" in pages and all(page.is_relative_to(DOCS) for page in pages)


def test_no_page_names_an_address_of_this_project() -> None:
    """No page has an address of this project, as nothing is published; other projects have addresses."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        addresses = re.findall(r"\w+://[^\s)]+", page.read_text(encoding="utf-8"))
        assert not [address for address in addresses if "cuflash" in address.lower()], page.name


def test_drawings(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "drawings.py"))["write"](tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept
