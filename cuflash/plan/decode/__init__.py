"""The kernels for one query a head over a cache: their tiles, and how many thread blocks share a sequence's keys."""
