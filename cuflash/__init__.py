"""Exact attention, forward and backward, on CuPy and NumPy arrays and on those of every library that speaks DLPack.

- `attention`, `attention_vjp` (with the function for its gradients), `attention_backward`; `attention_varlen` and so on
  for packed sequences. All options are described in ``help(cuflash.attention)``.
- `BlockMask` says which keys are seen, `merge` joins attentions over disjoint keys.
- `PagedCache` and `append_kv` keep keys and values for generating; `quantize_fp8` halves their memory.
- `cuflash.adapters` has attention inside PyTorch, JAX, HIPS autograd, MyGrad and Thinc.
- `cuflash.distributed` spreads a sequence over GPUs, `cuflash.offload` takes keys from host memory.

>>> import numpy as np, cuflash
>>> q = k = v = np.ones((2, 6, 4, 8), np.float32)  # (batch, seqlen, num_heads, head_dim)
>>> out, backward = cuflash.attention_vjp(q, k, v, causal=True)
>>> dq, dk, dv = backward(np.ones_like(out))

``python -m cuflash info`` says what is installed, and what is missing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# A checkout has cuda_src and examples next to the package, which can be used so without being installed.
if not os.path.isdir(os.path.join(__path__[0], "cuda_src")):
    __path__.append(os.path.dirname(__path__[0]))

from cuflash import forks, hints
from cuflash.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
)
from cuflash.merge import merge, merge_backward
from cuflash.reporting import progress

if TYPE_CHECKING:
    from cuflash import conversions as conversions
    from cuflash import distributed as distributed
    from cuflash import offload as offload
    from cuflash import rules as rules
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
    "progress",
    "quantize_fp8",
]

# These need no import of their own.
_SUBPACKAGES = {
    "adapters": "cuflash.adapters",
    "conversions": "cuflash.conversions",
    "distributed": "cuflash.distributed",
    "offload": "cuflash.offload",
    "rules": "cuflash.rules",
}


def __getattr__(name: str) -> Any:
    """Import what is first asked for now: together it would take longer than all that every program needs."""
    if name not in (*_SUBPACKAGES, "BlockMask", "PagedCache", "append_kv", "hadamard", "quantize_fp8"):
        raise hints.no_attribute(f"module {__name__!r}", name, hints.FUNCTIONS)
    found: Any
    with forks.LOCK:  # a child cannot end an import that another thread of its parent began
        if name in _SUBPACKAGES:
            found = import_module(_SUBPACKAGES[name])
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
    """The public names alone, so that completion shows nothing else."""
    return sorted((*__all__, *_SUBPACKAGES))
