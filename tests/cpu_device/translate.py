"""From the text of CUDA kernels to C++: shared memory is bound to the running block, and launchers are added."""

from __future__ import annotations

import re

from .build import HEADER, DeviceError

RED_ZONE_BYTES = 64
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_BALANCED = r"((?:[^()]|\([^()]*\))*)"
_HEAD = re.compile(r"__global__([^{;]*)[{;]")  # from __global__ to the body
_ATTRIBUTE = re.compile(r"\b(__\w+__)\s*\(" + _BALANCED + r"\)")  # __launch_bounds__(...) and the like
_NAME = re.compile(r"(\w+)\s*\(")
_ALIGN = r"(?:(?:__align__|alignas)\s*\(" + _BALANCED + r"\)\s*)?"
_DYNAMIC = re.compile(r"extern\s+__shared__\s+" + _ALIGN + r"([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"(?:static\s+)?__shared__\s+" + _ALIGN + r"([\w:<>,\s]+?[\w>])\s+(\w+)\s*((?:\[[^\[\]]*\]\s*)*);")
_STORAGE = re.compile(r"(\bstruct\s+" + _ALIGN + r"SharedStorage\s*)\{([^{}]*)\}\s*;")
# Alignment, extents, and arguments of templates.
_BESIDE_NAMES = re.compile(r"alignas\s*\(" + _BALANCED + r"\)|\[[^\[\]]*\]|<(?:[^<>]|<[^<>]*>)*>")
_DECLARATOR = re.compile(r"(\w+)\s*(?:,|=|$)")


def translate(source: str, red_zones: bool) -> str:
    """The C++ text that is compiled in place of the kernels' text.

    Parameters
    ----------
    source : str
        Self-contained CUDA C++.
    red_zones : bool
        Put poisoned bytes between the members of ``struct SharedStorage``, if there is one.
    """
    text = _COMMENT.sub(_without_comment, source)
    table = ""
    if red_zones:
        text, table = _separate_members(text)
    text = _DYNAMIC.sub(r"CPU_DEVICE_DYNAMIC_SHARED(\3, \2);", text)
    text = _STATIC.sub(lambda m: f"CPU_DEVICE_STATIC_SHARED({m[3]}, {m[1] or 16}, {m[2]} {m[4].strip()});", text)
    if "__shared__" in text:
        at = text.index("__shared__")
        raise DeviceError(f"a __shared__ declaration of an unknown form: {text[at : at + 80]!r}")
    launchers = dict.fromkeys(_launcher(m[1]) for m in _HEAD.finditer(text))
    return "\n".join([f'#include "{HEADER}"', '#line 1 "kernel"', text, *launchers, table]) + "\n"


def _without_comment(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else " " + "\n" * match[0].count("\n")


def _launcher(head: str) -> str:
    """The launcher of the kernel whose text between ``__global__`` and the body is ``head``."""
    attributes = dict(_ATTRIBUTE.findall(head))
    name = _NAME.search(_ATTRIBUTE.sub(" ", head))
    if name is None:
        raise DeviceError(f"a kernel without a name: {head!r}")
    cluster = attributes.get("__cluster_dims__", "1").split(",")
    return f"CPU_DEVICE_ENTRY({name[1]}, {', '.join([*cluster, '1', '1'][:3])})"


def _separate_members(text: str) -> tuple[str, str]:
    """Insert a red zone behind each member of SharedStorage; the second result is the table of their places."""
    found = _STORAGE.findall(text)
    if not found:
        return text, ""
    if len(found) > 1:
        raise DeviceError("more than one struct SharedStorage in a text")
    _, _, body = found[0]
    members, names = [], []
    for member in body.split(";"):
        declaration = member.strip()
        if declaration and not declaration.startswith(("static", "using", "typedef")):
            bare = _BESIDE_NAMES.sub("", declaration)
            name = _DECLARATOR.search(bare)
            if name is None or "(" in bare:
                raise DeviceError(f"a member of SharedStorage of an unknown form: {declaration!r}")
            names.append(name[1])
            member += f"; unsigned char cpu_device_zone_{len(names)}[{RED_ZONE_BYTES}]"
        members.append(member)
    text = text.replace(body, ";".join(members), 1)
    # The zones are the device's own: they need not fit the memory that the plan asks for.
    text = re.sub(r"static_assert\s*\(\s*sizeof\(SharedStorage\)", "static_assert(true || sizeof(SharedStorage)", text)
    ends = [f"__builtin_offsetof(SharedStorage, {name})" for name in names[1:]] + ["sizeof(SharedStorage)"]
    zones = (f"{{__builtin_offsetof(SharedStorage, cpu_device_zone_{i + 1}), {end}}}" for i, end in enumerate(ends))
    return text, f"CPU_DEVICE_RED_ZONES({', '.join(zones)})"
