"""The CUDA sources, shipped as data: ``cuflash.kernels`` reads them through ``importlib.resources``."""
