"""Exact attention, forward and backward, on CuPy and NumPy arrays and on those of every library that speaks DLPack."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# A checkout has cuda_src and examples next to the package, which can be used so without being installed.
if not os.path.isdir(os.path.join(__path__[0], "cuda_src")):
    __path__.append(os.path.dirname(__path__[0]))

from cuflash import forks
from cuflash.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
)
from cuflash.merge import merge, merge_backward

if TYPE_CHECKING:
    from cuflash.cache import PagedCache, append_kv
    from cuflash.fp8 import hadamard, quantize_fp8
    from cuflash.masks.block_mask import BlockMask

__version__ = "0.2.0"

__all__ = [
    "BlockMask",
    "PagedCache",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "hadamard",
    "merge",
    "merge_backward",
    "quantize_fp8",
]


def __getattr__(name: str) -> Any:
    """Import what is first asked for now: together it would take longer than all that every program needs."""
    if name not in ("BlockMask", "PagedCache", "append_kv", "distributed", "hadamard", "offload", "quantize_fp8"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: Any
    with forks.LOCK:  # a child cannot end an import that another thread of its parent began
        if name == "distributed":
            found = import_module("cuflash.distributed")
        elif name == "offload":
            found = import_module("cuflash.offload")
        elif name in ("PagedCache", "append_kv"):
            from cuflash import cache

            found = getattr(cache, name)
        elif name in ("hadamard", "quantize_fp8"):
            from cuflash import fp8

            found = getattr(fp8, name)
        else:
            from cuflash.masks.block_mask import BlockMask

            found = BlockMask
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
