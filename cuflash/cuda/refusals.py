"""Notes of kernels that spill registers stand next to CuPy's compiled code, so that no later process compiles them.

A note is a file of its own, named by a hash of the source and of all that makes machine code of it. It is written as a
whole or not at all, and says what any process would find that compiled the same source, so that many may write it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SUFFIX = ".refused"


class Refusal(NamedTuple):
    """A kernel that spills registers."""

    kernel: str  # the kernel in words for users
    compiler: str  # the architecture and the versions that made the machine code
    local_bytes: int  # bytes of local memory of a thread


def folder() -> Path | None:
    """Return CuPy's folder of compiled code; None where CuPy keeps it in memory alone."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0"):
        return None
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def known(source: str, compiler: str) -> int:
    """Return the bytes of local memory for which a kernel was refused; 0 where no note says so."""
    place = _file(source, compiler)
    return 0 if place is None else _read(place).local_bytes


def note(source: str, refusal: Refusal) -> None:
    """Let later processes know of a refusal; nothing is written where the folder takes no files."""
    place = _file(source, refusal.compiler)
    if place is None:
        return
    temporary = ""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=place.parent, suffix=f"{_SUFFIX}.part")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(refusal._asdict(), file)
        os.replace(temporary, place)  # in one step
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def every() -> Iterator[Refusal]:
    """Yield what is noted, of all architectures and compilers."""
    place = folder()
    for file in sorted(place.glob(f"*{_SUFFIX}")) if place is not None and place.is_dir() else ():
        refusal = _read(file)
        if refusal.local_bytes:
            yield refusal


def _file(source: str, compiler: str) -> Path | None:
    place = folder()
    name = hashlib.sha256(f"{compiler}\n{source}".encode()).hexdigest()
    return None if place is None else place / f"cuflash-{name}{_SUFFIX}"


def _read(file: Path) -> Refusal:
    """Return a note; one that is not there, or that no process of ours wrote, says that nothing was refused."""
    try:
        found = Refusal(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Refusal("", "", 0)
    return found if isinstance(found.local_bytes, int) else Refusal("", "", 0)
