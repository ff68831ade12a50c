"""Hopper's backward pass: its buffers and its three kernels, one before and one behind the gradients of scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuflash import kernels, plan_sm90_backward
from cuflash.launch import Kernel, Work, images, num_tiles
from cuflash.launch_params import Arrays
from cuflash.launch_sm90 import Persistent
from cuflash.params import SCORE_TENSORS
from cuflash.plan_sm90 import WARPGROUP
from cuflash.plan_sm90_backward import DQ, NARROW, ROWS, Config
from cuflash.problem import Array, AttentionProblem
from cuflash.tensor_map import ALIGNMENT

_ROWS_THREADS = 256  # of cuda_src/sm90/backward_rows.cu


@dataclass(frozen=True)
class _OfQueries(Kernel):
    """What the kernels have in common: how sums of dq are laid out."""

    config: Config

    @property
    def visits_tiles(self) -> bool:
        """No tiles of scores."""
        return False

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """How sums of dq are laid out."""
        return {"num_query_tiles": num_tiles(problem, problem.seqlen_q, self.config.block_m)}


@dataclass(frozen=True)
class Rows(_OfQueries):
    """Before the gradients of scores: what they load of each query."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _ROWS_THREADS


@dataclass(frozen=True)
class Dq(_OfQueries):
    """Behind them: dq from its sum."""

    @property
    def threads(self) -> int:
        """A warpgroup for each part."""
        return self.config.dq_parts * WARPGROUP


@dataclass(frozen=True)
class Main(_OfQueries):
    """The gradients of scores, and all that is multiplied with them."""

    @property
    def visits_tiles(self) -> bool:
        """Tiles of keys, and the queries that see them."""
        return True

    @property
    def of_keys(self) -> bool:
        """Tiles stay with keys and walk queries."""
        return True

    @property
    def reads_key_bits(self) -> bool:
        """Partial blocks' bits lie in the order of the fragments."""
        return True

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Also the order of tiles."""
        return super().numbers(problem) | {"heads_together": plan_sm90_backward.heads_together(problem)}

    def further(self, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, tiles: int) -> Persistent:
        """Maps of the arrays that TMA reads."""
        m, n = self.config.block_m, self.config.block_n
        maps = [("q", m), ("k", n), ("v", n), ("dout", m)]
        if self.entry == NARROW:
            # The last maps are those of the bias and its gradient, used or not.
            maps.append(("bias", m) if self.config.has_bias_tiles else ("v", n))
            maps.append(("dbias", m) if self.config.writes_dbias else ("v", n))
        return Persistent(problem, maps, arrays, device, tiles)


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv and delta; return the other gradients, None if nothing is done."""
    problem, arrays = work.problem, work.arrays
    layouts = work.layouts(("q", "k", "v", "dout", "out")) if work.device.has_wgmma else None
    if layouts is None:
        return None
    config = plan_sm90_backward.backward(
        problem, layouts, *(_layout(work, x) for x in (arrays.get("bias"), grads.get("bias"), arrays.get("mask")))
    )
    if config is None:
        return None
    tiles = images(problem, problem.num_heads_q) * num_tiles(problem, problem.seqlen_q, config.block_m)
    rows = {name: work.empty((tiles, config.block_m), problem.accum_dtype) for name in ("row_lse", "row_delta")}
    if "q" in grads:
        rows["dq_sum"] = work.empty((tiles, config.dq_tile), problem.accum_dtype)
    if config.deterministic and "q" in grads:
        rows["dq_turns"] = work.empty((1 + tiles * config.dq_parts,), np.int32)
    dbias = {"dbias": grads["bias"]} if config.writes_dbias else {}
    work.run(Rows(ROWS, config.of_rows), with_dlse | rows | dbias)
    of_keys = {f"d{name}": grads[name] for name in ("k", "v") if name in grads}
    work.run(Main(config.entry, config), _select(arrays, _MAIN_INPUTS) | rows | of_keys | dbias)
    if "q" in grads:
        work.run(Dq(DQ, config.of_rows), _select(arrays, _LENGTHS) | {"dq_sum": rows["dq_sum"], "dq": grads["q"]})
    done = ("q", "k", "v", "bias") if dbias else ("q", "k", "v")
    return {name: x for name, x in grads.items() if name not in done}


def _layout(work: Work, x: Array | None) -> plan_sm90_backward.Layout | None:
    """Strides and shape of an array, if there is one and TMA takes its address."""
    return None if x is None or work.device.pointer(x) % ALIGNMENT else (x.strides, x.shape)


_LENGTHS = ("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")
_MAIN_INPUTS = ("q", "k", "v", "dout", "alibi_slopes", *SCORE_TENSORS, *_LENGTHS)


def _select(arrays: Arrays, names: tuple[str, ...]) -> Arrays:
    return {name: x for name, x in arrays.items() if name in names}
