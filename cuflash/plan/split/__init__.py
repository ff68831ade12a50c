"""Hopper's kernels for float32 as a sum of float16 parts: their tiles, and the configuration that a problem gets."""
