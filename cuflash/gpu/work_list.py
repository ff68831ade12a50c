"""Lists of work for packed batches on Hopper: memory for them, the kernel that writes them, and the one that merges.

A list is made anew for each call. Whether the lengths are those of the call before is known to nobody, as a replayed
graph finds others in the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import constants_of, load
from cuflash.gpu.launch import ExtraArguments, Work, num_tiles
from cuflash.gpu.params import Arrays
from cuflash.gpu.portable import WithoutTiles
from cuflash.plan.config import KernelConfig
from cuflash.plan.portable.kernels import types_of
from cuflash.plan.sm90 import mixed as sm90_mixed
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.plan.sm90.few_queries import SHORTEST_SPLIT
from cuflash.problem.attention_problem import AttentionProblem

_THREADS = 256  # threads of a thread block of either kernel
_MERGING_BLOCKS = 4  # thread blocks that merge, for each multiprocessor
_ENTRY_WORDS, _CUT_WORDS, _KEYS_WORDS = 8, 8, 4  # of the structs of sm90/forward/work_list.cuh
_READ = ("cu_seqlens_q", "cu_seqlens_k", "q_lengths", "kv_lengths", "block_table")


@dataclass(frozen=True)
class _OfList(WithoutTiles):
    """A kernel that reads or writes a list, for tiles of a forward kernel."""

    config: KernelConfig
    of_tiles: Sm90ForwardConfig
    num_sms: int
    threads = _THREADS

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Numbers of tile slots of one head, and of thread blocks."""
        return slots_of(problem, self.of_tiles), 1

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the numbers that weigh the costs of entries."""
        steps = sm90_mixed.steps_of_entry(self.of_tiles)
        return {"num_multiprocessors": self.num_sms, "steps_of_entry": steps}

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel."""
        tiles = self.of_tiles
        constants = {
            **constants_of(self.config),
            "threads": _THREADS,
            "block_m": tiles.block_m,
            "block_n": tiles.block_n,
            "head_dim_v": tiles.head_dim_v,
            "has_window": True,  # one that is unbounded hides nothing
            "most_quarters": sm90_mixed.MOST_QUARTERS,
            "least_steps": max(SHORTEST_SPLIT // tiles.block_n, 1),
        }
        return load(self.file, self.entry, constants, device)

    @property
    def file(self) -> str:
        """The kernel's file of cuda_src."""
        return "sm90/forward/find_work"


@dataclass(frozen=True)
class _Merge(_OfList):
    """The kernel that merges the parts of tiles that were cut; its blocks are ready when the kernel before ends."""

    begins_early = True

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Return the problem without pages, as where keys lie does not matter any more."""
        return replace(problem, pages=None), arrays

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> ExtraArguments:
        """No arguments, and thread blocks that share the rows, whose number is on the device."""
        return ExtraArguments((_MERGING_BLOCKS * self.num_sms,))

    @property
    def file(self) -> str:
        """The kernel's file of cuda_src."""
        return "around/merge_tiles"


def slots_of(problem: AttentionProblem, config: Sm90ForwardConfig) -> int:
    """Tile slots of one head."""
    return num_tiles(problem, problem.seqlen_q, config.queries_of_tile(problem))


def find(work: Work, config: Sm90ForwardConfig) -> Arrays:
    """Write the list of work for a kernel of this configuration; return it, with memory for the parts of tiles."""
    problem, num_sms = work.problem, work.device.num_sms
    slots = slots_of(problem, config)
    size = sm90_mixed.size_of(problem, config, slots, num_sms)
    rows = size.most_parts, problem.num_heads_kv, config.block_m
    listed = {
        "work_entries": work.empty((size.most_entries + 1, _ENTRY_WORDS), np.int32),
        "cut_tiles": work.empty((size.most_cut, _CUT_WORDS), np.int32),
        "tile_keys": work.empty((slots, _KEYS_WORDS), np.int32),
    }
    lengths = {name: work.arrays[name] for name in _READ if name in work.arrays}
    work.run(_OfList("find_work", types_of(problem), config, num_sms), lengths | listed)
    return listed | {
        "part_outs": work.empty((*rows, config.head_dim_v), problem.accum_dtype),
        "part_lses": work.empty(rows, problem.accum_dtype),
    }


def merge(work: Work, config: Sm90ForwardConfig, listed: Arrays) -> None:
    """Write out and lse of the tiles that were cut."""
    results = {name: work.arrays[name] for name in ("out", "lse", "cu_seqlens_q")}
    parts = {name: listed[name] for name in ("work_entries", "cut_tiles", "part_outs", "part_lses")}
    work.run(_Merge("merge_tiles", types_of(work.problem), config, work.device.num_sms), results | parts)
