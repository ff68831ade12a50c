"""Exact attention, forward and backward, on CuPy and NumPy arrays and on those of every library that speaks DLPack."""

from cuflash.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
)
from cuflash.block_mask import BlockMask
from cuflash.merge import merge, merge_backward

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "merge",
    "merge_backward",
]
