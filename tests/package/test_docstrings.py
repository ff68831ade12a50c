"""The examples in public docstrings run, and each public name has one."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import cuflash

NAMES = [name for name in cuflash.__all__ if name != "__version__"]
FURTHER = {
    "distributed": ("threads", "shard", "ring_attention_vjp"),
    "offload": ("attention", "attention_vjp"),
    **dict.fromkeys(("adapters.torch", "adapters.jax", "adapters.autograd"), ("attention", "attention_varlen")),
    **dict.fromkeys(("adapters.mygrad", "adapters.thinc"), ("attention", "attention_varlen")),
}
CASES = [("", name) for name in NAMES] + [(module, name) for module, names in FURTHER.items() for name in names]


@pytest.mark.parametrize(("module", "name"), CASES)
def test_example(module: str, name: str) -> None:
    if module.startswith("adapters"):
        pytest.importorskip(module.rpartition(".")[2])
    owner: Any = pytest.importorskip(f"cuflash.{module}") if module else cuflash
    example = doctest.DocTestParser().get_doctest(getattr(owner, name).__doc__, {}, name, None, None)
    assert example.examples, "there is no example"
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0
