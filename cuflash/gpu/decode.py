"""Launches of the kernels for one query a head over a cache (`plan.decode`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.gpu import key_splits
from cuflash.gpu.launch import Kernel, Work, batch_heads
from cuflash.gpu.params import Arrays, num_key_splits
from cuflash.plan import decode
from cuflash.plan.decode import DecodeConfig
from cuflash.plan.key_splits import merges_by_rows
from cuflash.problem.attention_problem import AttentionProblem


@dataclass(frozen=True)
class Forward(Kernel):
    """The kernel, whose thread blocks have query heads of a KV head, and all of its keys or a split of them."""

    config: DecodeConfig

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Numbers of tiles: (of one KV head, in all); each split of the keys has its own."""
        tiles = decode.tiles(problem, self.config)
        return tiles, tiles * batch_heads(problem, problem.num_heads_kv) * num_key_splits(problem, arrays)


def forward(work: Work) -> bool:
    """Write out and lse of one query a head; False where another family runs."""
    problem, device = work.problem, work.device
    configs = decode.forward(problem, work.is_aligned(("q", "k", "v")), device.capability, device.smem_limit)
    if not configs:
        return False
    splits = {}
    for config in configs:
        num_splits = decode.num_splits(problem, config, device.num_sms)
        splits[replace(config, splits_keys=num_splits > 1)] = num_splits
    kernel = work.chosen([Forward(config.entry, config) for config in splits])
    num_splits = splits[kernel.config]
    key_splits.run(work, kernel, num_splits, merges_by_rows(problem, num_splits))
    return True


def paged_forward(work: Work) -> bool:
    """Do as `forward` over pages, but leave to Hopper's own kernel those that it copies well."""
    pages = work.problem.pages
    if work.device.has_wgmma and pages is not None and pages.page_size >= decode.SMALL_PAGES:
        return False
    return forward(work)
