"""The NumPy path: attention on the host, by tiles and threads."""
