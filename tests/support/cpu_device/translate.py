"""The text of CUDA kernels becomes C++: shared memory is bound to the running block, and launchers are added."""

from __future__ import annotations

import functools
import re

from .build import HEADER, DeviceError

RED_ZONE_BYTES = 64
_REMEMBERED = 64  # texts, as the calls of a test meet the same ones again and again
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_BALANCED = r"((?:[^()]|\([^()]*\))*)"
_HEAD = re.compile(r"__global__([^{;]*)[{;]")  # from __global__ to the body
_ATTRIBUTE = re.compile(r"\b(__\w+__)\s*\(" + _BALANCED + r"\)")  # __launch_bounds__(...) and the like
_NAME = re.compile(r"(\w+)\s*\(")
_ALIGN = r"(?:(?:__align__|alignas)\s*\(" + _BALANCED + r"\)\s*)?"
_DYNAMIC = re.compile(r"extern\s+__shared__\s+" + _ALIGN + r"([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"(?:static\s+)?__shared__\s+" + _ALIGN + r"([\w:<>,\s]+?[\w>])\s+(\w+)\s*((?:\[[^\[\]]*\]\s*)*);")
_STORAGE = re.compile(r"\bstruct\s+" + _ALIGN + r"(\w*Storage)\s*(:[^{};]*)?\{([^{}]*)\}\s*;")  # with its bases
# Kernels whose teams have a storage each, side by side, have this constant.
_TEAMS = re.compile(r"\bconstexpr int TEAMS\b")
_OWN_STORAGE = re.compile(r"\busing\s+SharedStorage\s*=\s*(\w+)\s*;")  # in a kernel
# These are alignment, extents, and arguments of templates.
_BESIDE_NAMES = re.compile(r"alignas\s*\(" + _BALANCED + r"\)|\[[^\[\]]*\]|<(?:[^<>]|<[^<>]*>)*>")
_DECLARATOR = re.compile(r"(\w+)\s*(?:,|=|$)")


@functools.lru_cache(_REMEMBERED)
def translate(source: str, red_zones: bool) -> str:
    """Return the C++ text that is compiled in place of the kernels' text.

    Parameters
    ----------
    source : str
        Self-contained CUDA C++.
    red_zones : bool
        Put poisoned bytes between the members of structs of shared memory, whose names end in ``Storage``.
    """
    text = _COMMENT.sub(_without_comment, source)
    tables = []
    if red_zones:
        text, zones = _separate_members(text)
        tables = _tables(text, zones)
    text = _DYNAMIC.sub(r"CPU_DEVICE_DYNAMIC_SHARED(\3, \2);", text)
    text = _STATIC.sub(lambda m: f"CPU_DEVICE_STATIC_SHARED({m[3]}, {m[1] or 16}, {m[2]} {m[4].strip()});", text)
    if "__shared__" in text:
        at = text.index("__shared__")
        raise DeviceError(f"a __shared__ declaration of an unknown form: {text[at : at + 80]!r}")
    launchers = dict.fromkeys(_launcher(m[1]) for m in _HEAD.finditer(text))
    return "\n".join([f'#include "{HEADER}"', '#line 1 "kernel"', text, *launchers, *tables]) + "\n"


def _without_comment(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else " " + "\n" * match[0].count("\n")


def _launcher(head: str) -> str:
    """Return the launcher of the kernel whose text between ``__global__`` and the body is ``head``."""
    cluster = dict(_ATTRIBUTE.findall(head)).get("__cluster_dims__", "1").split(",")
    return f"CPU_DEVICE_ENTRY({_entry(head)}, {', '.join([*cluster, '1', '1'][:3])})"


def _entry(head: str) -> str:
    name = _NAME.search(_ATTRIBUTE.sub(" ", head))
    if name is None:
        raise DeviceError(f"a kernel without a name: {head!r}")
    return name[1]


def _tables(text: str, zones: dict[str, str]) -> list[str]:
    """Return the storage of each kernel, SharedStorage or what it calls so, with its red zones."""
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    tables = {}
    for head, end in zip(heads, ends, strict=True):
        own = _OWN_STORAGE.search(text, head.end(), end)
        storage = own[1] if own else "SharedStorage"
        if storage in zones:
            tables[_entry(head[1])] = storage
    count = "TEAMS" if _TEAMS.search(text) else "1"
    return [f"CPU_DEVICE_STORAGE({entry}, {storage}, {count}, {zones[storage]})" for entry, storage in tables.items()]


def _separate_members(text: str) -> tuple[str, dict[str, str]]:
    """Insert a red zone behind each member of the structs of shared memory.

    The second result has, of each struct, what clears its members' padding, and where its red zones lie.
    """
    zones: dict[str, str] = {}
    for _, storage, bases, body in _STORAGE.findall(text):
        if storage in zones:
            raise DeviceError(f"more than one struct {storage} in a text")
        # The members of a base end where the first red zone begins.
        declarations, begins = ([_zone(0)], [0]) if bases else ([], [])
        names: list[str] = []
        ends: list[str] = []
        for declaration in body.split(";"):
            declared = _declared(storage, declaration)
            declarations.append(declaration)
            if declared:
                ends += [f"__builtin_offsetof({storage}, {declared[0]})"] if begins else []
                begins.append(len(names) + 1)
                names += declared
                declarations.append(_zone(begins[-1]))
        ends.append(f"sizeof({storage})")
        text = text.replace(body, ";".join(declarations), 1)
        clear = " ".join(f"cpu_device::clear_padding(shared.{name});" for name in names)
        places = (
            f"{{__builtin_offsetof({storage}, cpu_device_zone_{begin}), {end}}}"
            for begin, end in zip(begins, ends, strict=True)
        )
        zones[storage] = ", ".join([clear, *places])
    # The zones are the device's own, and need not fit the memory that the plan asks for.
    text = re.sub(r"static_assert\s*\(\s*sizeof\(SharedStorage\)", "static_assert(true || sizeof(SharedStorage)", text)
    return text, zones


def _zone(number: int) -> str:
    return f" unsigned char cpu_device_zone_{number}[{RED_ZONE_BYTES}]"


def _declared(storage: str, declaration: str) -> list[str]:
    """Return the members that a declaration of a struct has."""
    bare = _BESIDE_NAMES.sub("", declaration).strip()
    if not bare or bare.startswith(("static", "using", "typedef")):
        return []
    names = [_DECLARATOR.search(part.strip()) for part in bare.split(",")]
    if "(" in bare or None in names:
        raise DeviceError(f"a member of {storage} of an unknown form: {declaration.strip()!r}")
    return [name[1] for name in names if name]
