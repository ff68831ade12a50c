"""Exact attention, forward and backward, on CuPy and NumPy arrays and on those of every library that speaks DLPack."""

__version__ = "0.1.0"
