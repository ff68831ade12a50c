"""Users' own rules: a function of a score and its place, traced once, becomes an expression.

From the expression come its derivative, the CUDA text of the kernels, and the NumPy code of the CPU path.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuflash.rules.explain import explain

__all__ = ["explain"]


def __getattr__(name: str) -> Any:
    """Import `explain` when it is first asked for, as calls need no texts of CUDA."""
    if name != "explain":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("cuflash.rules.explain")
    globals()[name] = module.explain
    return module.explain


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)
