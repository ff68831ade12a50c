"""Launches of Hopper's forward kernel on e4m3 codes (`plan.sm90.fp8`)."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.cuda import device as cuda_device
from cuflash.gpu import key_splits
from cuflash.gpu.launch import Kernel, Work
from cuflash.gpu.params import Arrays, num_key_splits
from cuflash.gpu.persistent import Box, Persistent
from cuflash.plan.sm90 import fp8 as sm90_fp8
from cuflash.plan.sm90 import order as sm90_order
from cuflash.plan.sm90.fp8 import Sm90Fp8Config
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.fp8 import SCALES


@dataclass(frozen=True)
class Forward(Kernel):
    """The forward kernel."""

    config: Sm90Fp8Config

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Numbers of tiles: (of one head, in all); each split of the keys has its own."""
        tiles, total = super().grid(problem, arrays)
        return tiles, total * num_key_splits(problem, arrays)

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """The number of heads whose tiles are mixed, which is the order of tiles."""
        return {"num_grouped_heads": sm90_order.of_queries(problem, self.config.block_m)}

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> Persistent:
        """Tensor maps of the codes that TMA reads."""
        keys = self.config.block_n
        boxes = (Box("q", self.config.block_m), Box("k", keys), Box("v", keys))
        return Persistent(problem, boxes, arrays, device, tiles)


def forward(work: Work) -> bool:
    """Write out and lse of e4m3 queries, keys and values; False where another family runs."""
    layouts = work.layouts(("q", "k", "v")) if work.device.has_wgmma else None
    if layouts is None:
        return False
    scales = [work.arrays[name] for name in SCALES if name in work.arrays]
    # The axis of a head's rows is the last but one, packed or not.
    token_scales = any(x.shape[-2] > 1 and x.strides[-2] != 0 for x in scales)
    problem, num_sms = work.problem, work.device.num_sms
    splits = dict(sm90_fp8.choices(problem, layouts, token_scales, num_sms))
    kernel = work.chosen_or_none(Forward(config.entry, config) for config in splits)
    if kernel is None:
        return False
    num_splits = splits[kernel.config]
    key_splits.run(work, kernel, num_splits)
    return True
