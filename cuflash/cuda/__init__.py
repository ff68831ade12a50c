"""GPUs under CuPy: sources, compilation, loading and launching. It knows nothing of attention."""
