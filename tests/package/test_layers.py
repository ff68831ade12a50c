"""Imports in cuflash go one way, between folders and modules, and no folder uses another one's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cuflash

ROOT = Path(cuflash.__file__).parent
# These know nothing of attention and import nothing of ours.
BASE = ("e4m3", "forks", "hardware", "hints", "interop", "kept", "reporting", "typing")
# A folder, or a module next to the folders, may import these. Imports for type checkers count, too.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, ()),
    "rules": ("kept",),
    "problem": ("rules", *BASE),
    "masks": ("problem", *BASE),
    "plan": ("problem", "rules", "hardware", "kept"),
    "cuda": ("forks", "hardware", "kept"),
    "gpu": ("plan", "cuda", "masks", "problem", "rules", *BASE),
    "cpu": ("masks", "problem", "rules", *BASE),
    "frontend": ("problem", "rules", *BASE),
    "varlen": ("frontend", "problem", *BASE),
    "attention": ("varlen", "frontend", "problem", *BASE),
    "fp8": ("problem", *BASE),
    "merge": ("frontend", "problem", *BASE),
    **dict.fromkeys(("pages", "upload"), ()),
    "conversions": BASE,
    "adaptors": ("conversions",),
    "appending": ("frontend", "problem", *BASE),
    "steps": ("appending", "attention", "offload", "problem", "upload", *BASE),
    "cache": ("appending", "offload", "pages", "problem", "steps", *BASE),
    "distributed": ("frontend", "merge", "problem", *BASE),
    "offload": ("frontend", "merge", "masks", "problem", *BASE),
    "__init__": (
        "attention",
        "cache",
        "fp8",
        "merge",
        "masks",
        "distributed",
        "offload",
        "conversions",
        "rules",
        *BASE,
    ),
    "adapters": ("__init__", "frontend", "problem", *BASE),  # above the public functions
    "__main__": ("__init__",),
    "reference": (),
    "tools": (
        *("__init__", "distributed", "examples", "reference"),
        *("gpu", "cpu", "plan", "cuda", "masks", "problem", *BASE),
    ),
}
# The families of kernels are folders of `plan`; one of them may import these others, and what lies next to the folders.
FAMILIES: dict[str, tuple[str, ...]] = {
    "portable": (),
    "sm90": (),
    "split": ("sm90",),
    "sm80": ("split",),
    "decode": ("sm80", "sm90"),
    "listing": ("portable", "sm90", "split", "sm80", "decode"),
}
# These names of every NamedTuple begin with an underscore and are public.
PUBLIC = ("_fields", "_replace", "_asdict")
# A backend is found by name and imported when it is first needed; so is the module that puts a mask onto a GPU.
BY_NAME = {
    "fp8": {"cuflash.gpu.quantize"},
    "__init__": {f"cuflash.{name}" for name in ("adapters", "conversions", "distributed", "offload", "rules")},
    "frontend": {"cuflash.cpu.backend", "cuflash.gpu.backend"},
    "masks": {"cuflash.cuda.device"},
    "offload": {"cuflash.gpu.host_pages"},
    "rules": {"cuflash.rules.explain", "cuflash.rules.rule"},
}


def modules() -> dict[str, Path]:
    """Return every module by its name without "cuflash."."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1])] = path
    return found


MODULES = modules()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def module_and_name(dotted: str) -> tuple[str, str]:
    """Split ``cuflash.<...>`` into (module, name in it or ""); names of the package itself are of ``__init__``."""
    own = dotted.removeprefix("cuflash").removeprefix(".") or "__init__"
    if own in MODULES:
        return own, ""
    module, _, name = own.rpartition(".")
    return module or "__init__", name


def imports_of(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (imported module, name in it or "", local name) of every import, wherever it stands."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cuflash":
                    yield (*module_and_name(alias.name), alias.name)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module if node.level == 0 else f"cuflash.{folder_of(module)}.{node.module}"
            assert node.level < 2, f"{module}: expected no imports beyond its folder by dots"
            if origin is not None and origin.split(".")[0] == "cuflash":
                for alias in node.names:
                    yield (*module_and_name(f"{origin}.{alias.name}"), alias.asname or alias.name)


def folder_of(module: str) -> str:
    """Return a module's folder; the command of a folder is one of the tools."""
    return "tools" if module.endswith(".__main__") else module.split(".")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def test_every_folder_is_named_here() -> None:
    assert {folder_of(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    folder = folder_of(module)
    for imported, *_ in imports_of(module):
        other = folder_of(imported)
        assert other == folder or other in MAY_IMPORT[folder], f"{module} imports {imported}"


def test_families_of_kernels_are_planned_one_way() -> None:
    modules = [module.split(".") for module in MODULES if module.startswith("plan.")]
    assert {parts[1] for parts in modules if len(parts) == 3} == set(FAMILIES)
    for parts in modules:
        for imported, *_ in imports_of(".".join(parts)):
            other = imported.split(".")
            if other[0] == "plan" and other[1] in FAMILIES:
                own = parts[1]
                assert own in FAMILIES, f"{'.'.join(parts)} imports {imported}"
                assert other[1] == own or other[1] in FAMILIES[own], f"{'.'.join(parts)} imports {imported}"


def test_no_module_is_in_a_circle() -> None:
    graph = {module: {imported for imported, *_ in imports_of(module)} - {module} for module in MODULES}
    order = list(TopologicalSorter(graph).static_order())  # CycleError names the modules of a circle
    assert set(MODULES) <= set(order)


@pytest.mark.parametrize("module", MODULES)
def test_private_names_stay_in_their_folder(module: str) -> None:
    """Private names are neither imported by another folder nor reached through a module."""
    others = {}
    for imported, name, local in imports_of(module):
        if folder_of(imported) != folder_of(module):
            assert not is_private(name), f"{module} imports {imported}.{name}"
            others[local] = imported
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in others:
            assert not is_private(node.attr), f"{module} uses {others[node.value.id]}.{node.attr}"


def test_modules_that_are_found_by_name_are_named_here() -> None:
    """No other text names a module of ours, but for the commands of ``__main__``."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and module != "__main__":
                own = node.value.removeprefix("cuflash.")
                if own != node.value and own in MODULES:
                    found.setdefault(folder_of(module), set()).add(node.value)
    assert found == BY_NAME


def test_the_tables_hold_themselves_to_it() -> None:
    """No two folders may import each other, by the table itself."""
    list(TopologicalSorter({folder: set(others) for folder, others in MAY_IMPORT.items()}).static_order())
    for base in ("hardware", "kept", "problem", "plan", "masks", "cuda", "frontend", "reference"):
        assert "gpu" not in MAY_IMPORT[base]
        assert "cpu" not in MAY_IMPORT[base]
    assert not [folder for folder, others in MAY_IMPORT.items() if "adapters" in others]
