"""The documentation's examples run, and its drawings are what their script draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from code_blocks import BLOCK

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8"))


def test_there_are_pages_with_examples() -> None:
    assert {"autodiff.md", "blocksparse.md", "index.md", "kernels.md", "migration.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str) -> None:
    """The examples of a page run in order and in one namespace, and need no import that the page does not show."""
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
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


def test_every_page_can_be_found_from_the_home_page() -> None:
    """Each page of the manual stands in a table of contents; the package's page has no links that need a checkout."""
    listed = set()
    for page in (DOCS / "index.md", DOCS / "measured.md", DOCS / "lab" / "README.md"):
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert listed == {path for path in DOCS.glob("*.md") if path.name not in ("index.md", "package.md")} | {
        path for path in (DOCS / "lab").rglob("*.md") if path.name != "paper.md"
    }
    assert "](" not in (DOCS / "package.md").read_text(encoding="utf-8")


def test_no_page_names_an_address_of_this_project() -> None:
    """No page has an address of this project, as nothing is published; other projects have addresses."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        addresses = re.findall(r"\w+://[^\s)]+", page.read_text(encoding="utf-8"))
        assert not [address for address in addresses if "cuflash" in address.lower()], page.name


def test_drawings(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "drawings.py"))["write"](tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {name: (DOCS / "pictures" / name).read_text(encoding="utf-8") for name in drawn}
    assert drawn == kept
