"""GPT-2 with its gradients written out: its model, its operations on NumPy and CuPy, its training."""
