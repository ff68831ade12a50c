"""The forward pass by mma.sync."""

from __future__ import annotations

from cuflash import plan_sm80
from cuflash.launch import Kernel, Work


def forward(work: Work) -> bool:
    """Write out and lse; False if these tensor cores do not take the problem."""
    aligned = work.is_aligned(("q", "k", "v"))
    config = plan_sm80.forward(work.problem, aligned, work.device.capability, work.device.smem_limit)
    if config is None:
        return False
    work.run(Kernel(config.entry, config), work.arrays)
    return True
