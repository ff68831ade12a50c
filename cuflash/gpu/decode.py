"""Launches of the kernels for one query a head over a cache (`plan.decode`)."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.gpu import key_splits
from cuflash.gpu.launch import Kernel, Work, batch_heads
from cuflash.gpu.params import Arrays, num_key_splits
from cuflash.plan.decode import kernels as decode
from cuflash.plan.decode.kernels import DecodeConfig
from cuflash.problem.attention_problem import AttentionProblem


@dataclass(frozen=True)
class Forward(Kernel):
    """The kernel, whose thread blocks have query heads of a KV head, and all of its keys or a split of them."""

    config: DecodeConfig

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Numbers of tiles: (of one KV head, in all); each split of the keys has its own."""
        tiles = decode.tiles(problem, self.config)
        blocks = tiles * batch_heads(problem, problem.num_heads_kv) // self.config.kv_heads
        return tiles, blocks * num_key_splits(problem, arrays)


def forward(work: Work) -> bool:
    """Write out and lse of one query a head; False where another family runs."""
    choices = decode.choices(work.problem, work.device.num_sms, *_place(work))
    if not choices:
        return False
    kernel = work.chosen([Forward(choice.config.entry, choice.config) for choice in choices])
    num_splits = next(choice.num_splits for choice in choices if choice.config == kernel.config)
    key_splits.run(work, kernel, num_splits)
    return True


def sooner_forward(work: Work) -> bool:
    """Do as `forward`, but leave to Hopper's own kernel what that one is predicted to compute as soon."""
    if work.device.has_wgmma and not decode.is_sooner(work.problem, work.device.num_sms, *_place(work)):
        return False
    return forward(work)


def _place(work: Work) -> tuple[bool, tuple[int, int], int]:
    return work.is_aligned(("q", "k", "v")), work.device.capability, work.device.smem_limit
