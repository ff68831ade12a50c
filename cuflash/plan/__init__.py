"""Pure functions choose the kernel that a problem takes, and its tile, without CuPy."""
