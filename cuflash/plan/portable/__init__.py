"""The portable kernels, which run on every GPU: their tiles, and the configuration that a problem gets."""
