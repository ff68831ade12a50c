"""FlashAttention in a few lines: by tiles in NumPy, and as two CUDA kernels that one can read in an hour."""
