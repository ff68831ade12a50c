"""Both passes by mma.sync on float32 and float64."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import launch_portable, plan_wide
from cuflash.launch import Kernel, Work
from cuflash.launch_params import Arrays


@dataclass(frozen=True)
class Gradient(Kernel):
    """A gradient kernel."""

    config: plan_wide.GradientConfig

    @property
    def of_keys(self) -> bool:
        """Whether its tiles stay with keys and walk queries."""
        return self.config.of_keys


def forward(work: Work) -> bool:
    """Write out and lse; False if these kernels do not take the problem."""
    aligned = work.is_aligned(("q", "k", "v"))
    config = plan_wide.forward(work.problem, aligned, work.device.capability, work.device.smem_limit)
    if config is None:
        return False
    work.run(Kernel(config.entry, config), work.arrays)
    return True


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv, delta and each row's part of the slopes' gradient; return the others, None if nothing."""
    aligned = work.is_aligned(("q", "k", "v", "dout"))
    configs = plan_wide.backward(work.problem, aligned, work.device.capability, work.device.smem_limit)
    if not configs:
        return None
    launch_portable.delta(work, with_dlse)
    work.arrays |= launch_portable.rows_of_slopes(work, grads)
    for config in configs:
        names = plan_wide.KEY_KERNELS.get(config.entry, ("dq",))
        wanted = {name: grads[name[1:]] for name in names if name[1:] in grads}
        if wanted or (config.entry == plan_wide.DQ and "dslope_rows" in work.arrays):
            work.run(Gradient(config.entry, config), work.arrays | wanted)
    return {name: x for name, x in grads.items() if name not in ("q", "k", "v")}
