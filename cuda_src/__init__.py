"""The CUDA sources, which ``cuflash.kernels`` reads."""
