"""The configuration of Hopper's kernels of the backward pass on 16 bits, and of those before and behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cuflash import hardware
from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, ROWS_OF_WARP, ROWS_OF_WARPGROUP, whole_rows
from cuflash.plan.config import FLAGS
from cuflash.plan.sm90.backward_tiles import NARROW, WIDE
from cuflash.plan.sm90.config import SMEM_BESIDE_TILES, Sm90Config
from cuflash.rules.form import NO_RULES

_EARLY_DRAWS_OF_SPLITS = 3  # groups of them that are drawn early where thread blocks share queries
_ROW_WARPGROUPS = 7  # computing warpgroups of ROWS and DQ


@dataclass(frozen=True, kw_only=True)
class Sm90BackwardConfig(Sm90Config):
    """The configuration of the kernels of one backward pass."""

    query_stages: int  # buffers of queries
    dout_stages: int  # buffers of dout
    ds_stages: int  # buffers of the scores' gradients
    key_stages: int  # buffers of keys
    dq_stages: int  # buffers of each part of dq
    dq_pieces: int  # parts into which a tile's dq is cut, by queries or by columns
    dq_columns: int  # columns of a part
    pair: int  # thread blocks of a cluster that alternate in computing dq
    dq_sums: int  # sums of a tile's dq that alternate in taking additions, where these have an order
    dq_registers: int  # registers of a thread that computes dq, where a warpgroup does nothing else
    early_draws: int  # groups of 16 queries whose random bits are drawn before their weights are known
    holds_draws: bool = False  # the draws are held back until the products have started
    deterministic: bool  # additions to dq have a fixed order
    first_addition_stores: bool  # the first addition to a sum of dq is a store, so that nobody clears the sum
    has_bias_tiles: bool  # TMA loads the bias; else it is read element by element
    has_mask_vectors: bool  # a mask is read 16 keys at a time; else element by element
    writes_dbias: bool = False  # the kernel writes dbias, which has one element for each score
    writes_dslopes: bool = False  # the kernel adds up the gradient of ALiBi's slopes
    wide_results: bool = False  # dq, dk and dv are float32: shares of several calls are added before rounding
    writes_dq: bool = False  # a tile, or a pair's two, has all keys, so that steps write dq, and no sums of it
    splits_queries: bool = False  # thread blocks share the queries of a tile of keys, and write float32 dk and dv
    query_warps: int = 1  # a warp computes with all queries of a tile, at once: see `sm80.backward`
    query_passes: int = 1

    @property
    def of_rows(self) -> Sm90BackwardConfig:
        """The configuration of the kernels ROWS and DQ, whose stages are their own (cuda_src/sm90/backward/rows.cu)."""
        # ROWS does not need the text of a rule; lse keeps its units with one, and with a bias.
        by_window = {"has_window"} if self.writes_dbias or self.writes_dq else set()  # which queries see keys
        known = {"has_bias", "has_score_mod"} | by_window
        flags: dict[str, Any] = {flag: getattr(self, flag) and flag in known for flag in FLAGS}
        stage_bytes = 2 * self.block_m * whole_rows(HALF_BYTES * self.head_dim_v)
        room, consumers = hardware.SMEM_BYTES - SMEM_BESIDE_TILES, _ROW_WARPGROUPS
        stages = room // stage_bytes
        stages -= stages % min(stages, consumers)
        sum_bytes = self.dq_sums * ROWS_OF_WARPGROUP * self.dq_columns * FLOAT_BYTES
        sum_stages = room // sum_bytes // consumers * consumers
        return replace(
            self,
            block_n=self.keys if self.writes_dbias or self.writes_dq else ROWS_OF_WARPGROUP,
            consumers=consumers,
            producer_registers=0,
            consumer_registers=0,
            dq_registers=0,
            early_draws=0,
            holds_draws=False,
            query_stages=sum_stages,
            dout_stages=stages,
            key_stages=1,
            dq_stages=1,
            pair=1,
            smem_bytes=hardware.SMEM_BYTES,
            plain_scores=True,
            has_bias_tiles=False,
            has_mask_vectors=False,
            rules=NO_RULES,
            rule_in_blocks=False,
            splits_queries=False,
            **flags,
        )

    @property
    def keys(self) -> int:
        """The keys of a thread block's tile, or of a pair's two."""
        return self.block_n * self.pair

    @property
    def slope_sums(self) -> int:
        """The sums of the slopes' gradient that the warps of thread blocks with a tile of keys have, or with a pair."""
        warpgroups = self.consumers if self.entry == NARROW else self.pair
        return warpgroups * ROWS_OF_WARPGROUP // ROWS_OF_WARP

    @property
    def dq_tile(self) -> int:
        """Elements of a query tile's dq in the sum of dq (cuda_src/sm90/backward/rows.cuh)."""
        return self.dq_pieces * ROWS_OF_WARPGROUP * self.dq_columns


def with_query_splits(config: Sm90BackwardConfig) -> Sm90BackwardConfig:
    """Return the configuration of a kernel whose thread blocks share the queries of a tile of keys.

    Float32 results take registers that are left where fewer random bits are drawn early.
    """
    holds = config.has_dropout and config.entry == NARROW
    early_draws = min(config.early_draws, _EARLY_DRAWS_OF_SPLITS) if holds else config.early_draws
    return replace(config, splits_queries=True, early_draws=early_draws, holds_draws=holds)


def with_dslopes(config: Sm90BackwardConfig) -> Sm90BackwardConfig:
    """Return the configuration of a kernel that adds up the slopes' gradient, or the same one where it cannot.

    That gradient comes from those of scores before softcap's derivative. With a rule, and in WIDE with a bias, the
    weights are multiplied by this derivative before.
    """
    others = config.has_score_mod or (config.has_bias and config.entry == WIDE)
    if not config.has_alibi or (config.has_softcap and others):
        return config
    # A step has the place of the sums, too, for which there may be no room.
    steps = SMEM_BESIDE_TILES if config.deterministic and config.entry == WIDE else 0
    smem_bytes = config.smem_bytes + steps
    return replace(config, writes_dslopes=True, smem_bytes=smem_bytes) if smem_bytes <= hardware.SMEM_BYTES else config
