"""The GPU path: launches of every family of kernels."""
