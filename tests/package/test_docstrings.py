"""The examples in public docstrings run, and each public name has one."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from operator import attrgetter
from typing import Any

import pytest

import cuflash
from cuflash.cache import Step

NAMES = [name for name in cuflash.__all__ if name != "__version__"]
MODULES = ("conversions", "distributed", "offload", "rules")
OF_LIBRARY = [(f"adapters.{x}", y) for x in ("torch", "jax", "autograd", "mygrad", "thinc") for y in ("", "_varlen")]
CASES = [
    *(("", name) for name in NAMES),
    *((module, name) for module in MODULES for name in dir(getattr(cuflash, module))),
    *((module, f"attention{form}") for module, form in OF_LIBRARY),
]


def methods_of(owner: type) -> list[str]:
    """Return the public methods and properties of a class."""
    return [
        name for name in dir(owner) if not name.startswith("_") and is_documented(inspect.getattr_static(owner, name))
    ]


def is_documented(member: object) -> bool:
    return callable(member) or isinstance(member, (classmethod, staticmethod, property))


def check(name: str, docstring: str | None) -> None:
    example = doctest.DocTestParser().get_doctest(docstring or "", {}, name, None, None)
    assert example.examples, "there is no example"
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


@pytest.mark.parametrize(("module", "name"), CASES)
def test_example(module: str, name: str) -> None:
    if module.startswith("adapters"):
        pytest.importorskip(module.rpartition(".")[2])
    owner: Any = import_module(f"cuflash.{module}") if module else cuflash
    check(name, attrgetter(name)(owner).__doc__)


def has_semantics(name: str) -> bool:
    return "attention" in name or name in ("merge", "merge_backward", "append_kv")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, name in CASES if has_semantics(name)])
def test_the_page_semantics_is_named(module: str, name: str) -> None:
    """The manual makes it a link (docs/conf.py)."""
    if module.startswith("adapters"):
        pytest.importorskip(module.rpartition(".")[2])
    owner: Any = import_module(f"cuflash.{module}") if module else cuflash
    assert "docs/semantics.md" in attrgetter(name)(owner).__doc__


METHODS = [(owner, name) for owner in (cuflash.BlockMask, cuflash.PagedCache, Step) for name in methods_of(owner)]


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=[f"{owner.__name__}.{name}" for owner, name in METHODS])
def test_example_of_a_method(owner: type, name: str) -> None:
    check(name, inspect.getattr_static(owner, name).__doc__)


def test_methods_are_found() -> None:
    names = {(owner.__name__, name) for owner, name in METHODS}
    assert {("BlockMask", "from_dense"), ("BlockMask", "draw"), ("PagedCache", "fork"), ("Step", "attend")} <= names
    assert {("BlockMask", "density"), ("PagedCache", "num_free_pages"), ("Step", "num_host_pages")} <= names
    assert {name for owner, name in names if owner == "Step"} == {"append", "attend", "num_host_pages"}


def test_help_of_the_package_names_the_functions() -> None:
    check("cuflash", cuflash.__doc__)
    assert all(
        f"`{name}`" in str(cuflash.__doc__) for name in ("attention", "attention_vjp", "BlockMask", "PagedCache")
    )
