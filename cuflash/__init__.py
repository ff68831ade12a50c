"""Exact attention, forward and backward, on CuPy and NumPy arrays and on those of every library that speaks DLPack."""

from cuflash.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
]
