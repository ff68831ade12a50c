"""Pieces of Markdown: tables, where figures come from, and sections of a page that are written by a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The text between such marks in a page is written by tables.py.
BEGIN, END = "<!-- begin: {} by tables.py -->", "<!-- end: {} by tables.py -->"
LIBRARIES = (("torch", "torch"), ("nvidia-cudnn-cu13", "cuDNN"), ("flash-attn-3", "FlashAttention-3"))


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def short_commit(facts: dict[str, Any]) -> str:
    """Return it as people write it."""
    commit, _, dirty = (facts["commit"] or "unknown").partition("-")
    return f"{commit[:7]} with changes" if dirty else str(commit[:7])


def origin(facts: dict[str, Any]) -> str:
    """Where figures come from, in one line."""
    versions = facts["versions"]
    others = ", ".join(f"{label} {versions[name]}" for name, label in LIBRARIES if name in versions)
    machine = f"{facts['gpu']}, driver {facts['driver']}, NVRTC {facts['nvrtc']}"
    return f"Commit {short_commit(facts)}, {facts['date'][:10]}, {machine}; {others}."


def with_section(text: str, name: str, section: str) -> str:
    """`text` with what stands between the marks of `name` replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{section}{end}{after}"
