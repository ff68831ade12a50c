"""The kernels by wgmma, for Hopper: tables of their tiles, their times, grids and splits, and the choice among them."""
