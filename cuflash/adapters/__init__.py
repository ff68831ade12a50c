"""cuflash inside autodiff libraries: one module a library, which imports it; this package imports none.

A module is imported when it is first asked for, and says what to install where its library is missing. Each has
`attention` and `attention_varlen` with the options of `cuflash`, and gradients of q, k, v, bias, sink, alibi_slopes and
the floating-point operands of one's own rules.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["autograd", "jax", "mygrad", "thinc", "torch"]


def __getattr__(name: str) -> ModuleType:
    """Import a library's module when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; expected one of {', '.join(__all__)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
