"""Which kernel a problem takes, with which tile: pure functions, without CuPy."""
