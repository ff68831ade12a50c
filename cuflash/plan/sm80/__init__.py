"""The kernels by mma.sync, for GPUs from sm_80 on: tables of their tiles, their times, and the choice among them."""
