"""GPUs under CuPy: this folder has sources, compilation, loading and launching, and knows nothing of attention."""
