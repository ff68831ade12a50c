"""Naive attention and its gradients in NumPy: the oracle that every other path is tested against.

It is written to be read next to the formulas and is not fast: it builds whole score matrices. It imports nothing of
this package, so that it cannot share a mistake with what it checks; a wheel does not carry it.
"""

from .dropout import dropout_keep, dropout_rescale, dropout_threshold, philox4x32
from .packed import attention_varlen, attention_varlen_backward
from .padded import attention, attention_backward

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "dropout_keep",
    "dropout_rescale",
    "dropout_threshold",
    "philox4x32",
]
