"""CUDA sources."""
