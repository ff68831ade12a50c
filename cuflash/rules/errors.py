"""Errors of a rule name the line of the user's function."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_OWN = str(Path(__file__).parent)
_LIBRARIES = ("numpy", "cupy", "torch", "jax", "autograd")


class RuleError(TypeError):
    """A rule does with a traced value what cannot become part of a kernel."""


class RuleAttributeError(AttributeError, TypeError):
    """A rule asks a traced value for an attribute that it does not have."""


def here() -> str:
    """Return `` (file, line n: text)`` of the innermost line that is the user's."""
    frame = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code, frame.f_globals.get("__name__", "")):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return _line(frame, frame.f_lineno)


def meets_traced(error: Exception) -> bool:
    """Return True if a library's error is about a traced value, whose class or value it shows."""
    return "Traced" in str(error) or "<traced " in str(error)


def line_in(function: Callable[..., Any], error: Exception) -> str:
    """Return `` (file, line n: text)`` of the innermost line of a user's module that an error came through."""
    module = getattr(function, "__module__", None)
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == module:
            found = _line(frame, line)
    return found


def _line(frame: FrameType, line: int) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, line, frame.f_globals).strip()
    return f" ({path}, line {line}{f': {text}' if text else ''})"


def place_of(code: CodeType | None) -> str:
    """Return `` (file, line n)`` of a function."""
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def _is_library(code: CodeType, module: str) -> bool:
    return code.co_filename.startswith(_OWN) or module.partition(".")[0] in _LIBRARIES
