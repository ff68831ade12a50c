"""Constants, headers and an entry become one source text.

Every header is inlined, because CuPy's disk cache of compiled code is keyed by source text and options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from cuflash.hardware import EMITTED

Constants = Mapping[str, bool | int | str]

_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[ \t]*$', re.MULTILINE)
_PRELUDE = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#define DEVICE __device__ __forceinline__\n"
_NO_HEADERS: Mapping[str, str] = {}


def source_of(paths: str, constants: Constants, generated: Mapping[str, str] = _NO_HEADERS) -> str:
    """Write a kernel's source text.

    Parameters
    ----------
    paths : str
        Files of cuda_src, one behind the other, with a blank between them; ``.cu`` of a single one may be left out.
        ``keys=sm80/own_keys.cuh`` is no file of its own, but what ``#include "keys"`` stands for in the files.
    constants : mapping of str to bool, int or str
        ``block_m=64`` becomes ``constexpr int BLOCK_M = 64;``, a str a type alias. They stand before the files, behind
        the numbers of the hardware.
    generated : mapping of str to str
        Headers that are no files, by name.
    """
    names = paths if "." in paths else f"{paths}.cu"
    return _PRELUDE + constants_text(EMITTED) + constants_text(constants) + inlined(names, generated) + "\n"


def constants_text(constants: Constants) -> str:
    """Return the lines that define constants, as `source_of` writes them."""
    lines = []
    for name, value in constants.items():
        if isinstance(value, bool):
            lines.append(f"[[maybe_unused]] constexpr bool {name.upper()} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"[[maybe_unused]] constexpr int {name.upper()} = {value};")
        elif isinstance(value, str):
            lines.append(f"using {name.title().replace('_', '')} = {value};")
        else:
            raise TypeError(f"constant {name}: expected bool, int or str, got {type(value).__name__}")
    return "\n".join(lines) + "\n"


def inlined(paths: str, generated: Mapping[str, str] = _NO_HEADERS) -> str:
    """Return the text of some files, with every quoted include inlined where it is first met."""
    seen: set[str] = set()
    bound = dict(word.split("=") for word in paths.split() if "=" in word)
    return "".join(_inlined(path, seen, generated, bound) for path in paths.split() if "=" not in path)


def _inlined(path: str, seen: set[str], generated: Mapping[str, str], bound: Mapping[str, str]) -> str:
    seen.add(path)
    text = _read(path)
    folder = path.split("/")[:-1]
    pieces = [f'#line 1 "cuda_src/{path}"\n']
    end = 0
    for match in _INCLUDE.finditer(text):
        pieces.append(text[end : match.start()])
        name = match[1]
        target = bound.get(name) or _resolved(folder, name)
        if name in generated:
            pieces.append(f'#line 1 "{name}"\n{generated[name]}')
        elif target not in seen:
            pieces.append(_inlined(target, seen, generated, bound))
        end = match.end()
        line = text.count("\n", 0, end) + 1
        pieces.append(f'\n#line {line} "cuda_src/{path}"')
    pieces.append(text[end:])
    return "".join(pieces)


def _resolved(folder: list[str], include: str) -> str:
    """Return the path in cuda_src of what a file in `folder` includes."""
    parts = list(folder)
    for part in include.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _read(path: str) -> str:
    return files("cuflash.cuda_src").joinpath(*path.split("/")).read_text(encoding="utf-8")
