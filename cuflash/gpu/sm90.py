"""Launches of both passes on 16 bits on Hopper (`plan.sm90`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cuflash import hardware
from cuflash.cuda import device as cuda_device
from cuflash.gpu import convert, key_splits, query_splits, work_list
from cuflash.gpu.launch import ExtraArguments, Kernel, Work, batch_heads, num_tiles
from cuflash.gpu.pages import check_rows
from cuflash.gpu.params import SCORE_TENSORS, Arrays, num_key_splits
from cuflash.gpu.persistent import Box, Persistent
from cuflash.gpu.portable import WithoutTiles, slope_sums
from cuflash.hardware import ALIGNMENT, HALF_BYTES, WARP
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import codes as sm90_codes
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import order as sm90_order
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig, with_query_splits
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.plan.sm90.forward import Layout
from cuflash.plan.sm90.query_splits import WHOLE_QUERIES, QuerySplits, in_order, splits_of
from cuflash.problem.attention_problem import Array, AttentionProblem

# The kernel before the gradients ends sooner by itself on all multiprocessors if there are no more query tiles.
_FEW_TILES = 1024


@dataclass(frozen=True)
class Forward(Kernel):
    """The forward kernel."""

    config: Sm90ForwardConfig

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles: (of one head, in all); each split of the keys has its own."""
        tiles = num_tiles(problem, problem.seqlen_q, self.config.queries_of_tile(problem))
        total = tiles * batch_heads(problem, self.config.num_heads(problem))
        if self.config.has_work_list:  # the device knows how many entries there are
            return tiles, len(arrays["work_entries"]) * problem.num_heads_kv
        return tiles, total * num_key_splits(problem, arrays)

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the number of heads whose tiles are mixed, which is the order of tiles."""
        config = self.config
        return {"num_grouped_heads": sm90_order.of_queries(problem, config.block_m, config.packs_heads)}

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> Persistent:
        """Return the tensor maps of the arrays that TMA reads and writes."""
        config, n = self.config, self.config.block_n
        rows, heads = config.block_m, 1
        if config.packs_heads:
            rows, heads = config.queries_of_tile(problem), problem.group_size
        bias = Box("v", n)  # the kernel does not read this map
        mask = Box("mask", rows, config.mask_row_bytes, heads, config.packs_heads) if config.has_mask_tiles else bias
        if config.has_bias_tiles:
            x = arrays["bias"]
            one_row = not config.packs_heads and not (x.shape[2] > 1 and x.strides[2])
            bias = Box("bias", 1 if one_row else rows, 0, heads, config.packs_heads)
        out = "out" if config.staging_panels else "v"
        queries = Box("q", rows, 0, heads, config.packs_heads)
        keys = n if problem.pages is None else math.gcd(n, problem.pages.page_size)
        boxes = (queries, Box("k", keys), Box("v", keys), bias, mask, Box(out, hardware.ROWS_OF_WARP), Box(out, 1))
        return Persistent(problem, boxes, arrays, device, tiles, config.pair)


def forward(work: Work) -> bool:
    """Write out and lse; False where another family runs."""
    layouts = work.layouts(("q", "k", "v")) if work.device.has_wgmma else None
    if layouts is None:
        return False
    tensors = layouts, *(_layout(work, work.arrays.get(x)) for x in ("bias", "mask"))
    config = sm90_forward.forward(work.problem, *tensors)
    if config is None:
        return False
    config, num_splits = work.launches or sm90_grid.for_grid(work.problem, config, work.device.num_sms)
    config = sm90_forward.for_pages(work.problem, config)
    if work.arrays["out"].dtype.itemsize > HALF_BYTES:
        return _wide_forward(work, config)
    partials = key_splits.partial_results(work, num_splits)
    if partials or not _is_out_expressible(work):
        config = replace(config, splits_keys=bool(partials), staging_panels=0, pair=1)
    kernel = _first_forward(work, config)
    if kernel is None:
        return False
    if kernel.config.has_work_list:
        listed = work_list.find(work, kernel.config)
        work.run(kernel, work.arrays | listed)
        work_list.merge(work, kernel.config, listed)
        return True
    work.run(kernel, work.arrays | partials)
    if partials:
        key_splits.merge(work, partials)
    return True


def codes_forward(work: Work) -> bool:
    """Do as `forward` for 16-bit queries over e4m3 keys and values, in pages or not."""
    problem = work.problem
    if not work.device.has_wgmma or sm90_codes.obstacle(problem):
        return False
    check_rows(problem)
    # Elements that are made of rows of codes lie as TMA wants them.
    makes_elements = sm90_codes.makes_elements(problem)
    layouts = work.layouts(("q",) if makes_elements else ("q", "k", "v"))
    if layouts is None:
        return False
    tensors = layouts, *(_layout(work, work.arrays.get(x)) for x in ("bias", "mask"))
    token_scales = any(_varies(work, name) for name in ("k_scale", "v_scale"))
    found = sm90_codes.forward(problem, *tensors, token_scales, num_sms=work.device.num_sms)
    chosen = work.chosen_pass([(Forward(config.entry, config),) for config, _ in found], others_serve=True)
    if not chosen:
        return False
    (kernel,), num_splits = chosen, dict(found)[chosen[0].config]
    own = convert.elements_of_codes(work) if makes_elements else work
    if work.arrays["out"].dtype.itemsize > HALF_BYTES:
        _run_wide(own, kernel)
        return True
    partials = key_splits.partial_results(own, num_splits)
    if not partials and not _is_out_expressible(own):
        kernel = replace(kernel, config=replace(kernel.config, staging_panels=0))
    own.run(kernel, own.arrays | partials)
    if partials:
        key_splits.merge(own, partials)
    return True


def _varies(work: Work, name: str) -> bool:
    """Return True if the rows of a head may have scales of their own, or pages may."""
    scale = work.arrays.get(name)
    if scale is None:
        return False
    axes = slice(-2 if work.problem.pages is None else -3, -1)
    return any(n > 1 and stride for n, stride in zip(scale.shape[axes], scale.strides[axes], strict=True))


def paged_forward(work: Work) -> bool:
    """Do as `forward` does, but read pages where they lie."""
    if not work.device.has_wgmma:
        return False
    check_rows(work.problem)
    return forward(work)


def _wide_forward(work: Work, config: Sm90ForwardConfig) -> bool:
    """Write a float32 out and lse, as those of the only split of the keys; False where another family runs."""
    wide = sm90_forward.wide_config(work.problem, config)
    kernel = None if wide is None else _first_forward(work, wide)
    if kernel is None:
        return False
    _run_wide(work, kernel)
    return True


def _run_wide(work: Work, kernel: Forward) -> None:
    work.run(kernel, work.arrays | {"out_splits": work.arrays["out"], "lse_splits": work.arrays["lse"]})


def _first_forward(work: Work, config: Sm90ForwardConfig) -> Forward | None:
    """Return the kernel of a configuration, or one with a smaller tile where that spills registers.

    The result is None where another family runs, as `Work.chosen_pass` says.
    """
    hides = sm90_forward.may_hide_queries(work.problem)
    found = [replace(each, hides_queries=hides) for each in sm90_forward.candidates(work.problem, config)]
    return work.chosen_or_none(Forward(each.entry, each) for each in found)


def _is_out_expressible(work: Work) -> bool:
    return _is_expressible(work, work.arrays["out"])


def _is_expressible(work: Work, x: Array) -> bool:
    """Tell whether a tensor map can describe a result, so that TMA writes it."""
    layout = _layout(work, x)
    return layout is not None and sm90_forward.expressible(*layout)


def _layout(work: Work, x: Array | None) -> Layout | None:
    """Return strides and shape of an array; None without an array, or where TMA cannot take its address."""
    return None if x is None or work.device.pointer(x) % ALIGNMENT else (x.strides, x.shape)


@dataclass(frozen=True)
class _OfQueries(WithoutTiles):
    """A kernel of the backward pass whose tiles are queries."""

    config: Sm90BackwardConfig
    splits: QuerySplits = WHOLE_QUERIES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a thread block, in bytes."""
        return self.config.smem_bytes

    @property
    def begins_early(self) -> bool:
        """Tell whether the kernel begins early: its blocks are ready when the kernel before ends."""
        return self.entry != sm90_backward.ROWS

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the numbers of query tiles, by which sums of dq are laid out, and of splits of the queries."""
        tiles = num_tiles(problem, problem.seqlen_q, self.config.block_m)
        return {"num_query_tiles": tiles, "splits": self.splits.in_all, "head_splits": self.splits.of_heads}


@dataclass(frozen=True)
class BeforeGradients(_OfQueries):
    """The kernel ROWS, which prepares what `Gradients` loads of each query."""

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> Persistent:
        """Return the tensor maps of the arrays that TMA reads."""
        m, blocks = self.config.block_m, arrays["rows_ready"].size if "rows_ready" in arrays else device.num_sms
        return Persistent(problem, [Box("dout", m), Box("out", m)], arrays, device, tiles, takers=blocks)


@dataclass(frozen=True)
class Dq(_OfQueries):
    """The kernel DQ, which writes dq from its sum."""

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> ExtraArguments:
        """Return a grid of as many thread blocks as run at once, but no more than pieces, and no arguments."""
        return ExtraArguments((min(tiles * self.config.dq_pieces, device.num_sms),))


@dataclass(frozen=True)
class Gradients(_OfQueries):
    """The main kernel, which computes the gradients of scores and their products dq, dk and dv."""

    visits_tiles = of_keys = True

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the numbers of query tiles and splits, and of heads whose tiles are mixed."""
        alternates = self.config.ping_pong and not self.config.deterministic
        return super().numbers(problem) | {"num_grouped_heads": sm90_order.last_of_keys(problem, alternates)}

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles (of one head, in all, once a split); two tiles of a cluster count as one."""
        tiles = num_tiles(problem, problem.seqlen_k, self.config.keys)
        return tiles, tiles * batch_heads(problem, problem.num_heads_kv) * self.splits.in_all

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> Persistent:
        """Return the tensor maps of the arrays that TMA reads or writes."""
        m, n = self.config.block_m, self.config.block_n
        pair = self.config.pair
        # A map of v stands in for a map that the kernel does not read.
        bias = Box("bias", m) if self.config.has_bias_tiles else Box("v", n)
        dbias = Box("dbias", m) if self.config.writes_dbias else Box("v", n)
        dq = Box("dq", hardware.ROWS_OF_WARPGROUP) if self.config.writes_dq else Box("v", n)
        maps = (Box("q", m), Box("k", n * pair), Box("v", n), Box("dout", m), bias, dbias, dq)
        return Persistent(problem, maps, arrays, device, tiles, pair)


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv and delta; return the gradients that are left, None where another family runs.

    float32 gradients of 16-bit inputs are not rounded.
    """
    problem, arrays = work.problem, work.arrays
    layouts = work.layouts(("q", "k", "v", "dout", "out")) if work.device.has_wgmma else None
    if layouts is None:
        return None
    tensors = arrays.get("bias"), grads.get("bias"), arrays.get("mask")
    dslopes = "alibi_slopes" in grads and bool(problem.seqlen_q)  # without queries no thread block would clear sums
    configs = sm90_backward.backward(problem, layouts, *(_layout(work, x) for x in tensors), dslopes=dslopes)
    if not configs:
        return None
    configs = in_order(problem, configs, work.device.num_sms)
    is_wide = any(grads[name].dtype.itemsize > HALF_BYTES for name in ("q", "k", "v") if name in grads)
    results = {f"d{name}": grads[name] for name in ("k", "v") if name in grads}
    is_split = not is_wide and bool(results)
    splits = splits_of(problem, configs[0], work.device.num_sms) if is_split else WHOLE_QUERIES
    if splits.in_all > 1:
        configs = tuple(map(with_query_splits, configs))
    of_results = [replace(config, wide_results=is_wide) for config in configs]
    if "q" in grads and not is_wide and _is_expressible(work, grads["q"]):
        of_results = [each for config in of_results for each in sm90_backward.writing_dq(problem, config)]
    chosen = work.chosen_pass([(Gradients(each.entry, each, splits),) for each in of_results], others_serve=True)
    if not chosen:
        return None
    (kernel,) = chosen
    config = kernel.config
    tiles = batch_heads(problem, problem.num_heads_q) * num_tiles(problem, problem.seqlen_q, config.block_m)
    rows = {name: work.empty((tiles, config.block_m), problem.accum_dtype) for name in ("row_lse", "row_delta")}
    dq = {"dq": grads["q"]} if config.writes_dq else {}
    if "q" in grads and not dq:
        rows["dq_sum"] = work.empty((tiles * config.dq_sums, config.dq_tile), problem.accum_dtype)
    if config.first_addition_stores and "dq_sum" in rows:
        words = 2 + tiles * config.dq_sums * config.dq_pieces + batch_heads(problem, problem.num_heads_kv)
        rows["dq_order"] = work.empty((words,), np.int32)
    slopes = slope_sums(problem, config.keys, config.slope_sums * splits.in_all)
    if config.writes_dslopes:
        rows["dslope_rows"] = slopes.empty(work)
    dbias = {"dbias": grads["bias"]} if config.writes_dbias else {}
    if config.ping_pong and not dbias and not config.has_alibi and tiles > _FEW_TILES:
        # Each lane of the warp that waits polls one thread block that prepares rows.
        rows["rows_ready"] = work.empty((WARP,), np.int32)
    work.run(BeforeGradients(sm90_backward.ROWS, config.of_rows), with_dlse | rows | dbias | dq)
    key_grads = results
    if splits.in_all > 1:
        key_grads = query_splits.shares_of(work, results, splits.in_all)
    work.run(kernel, _select(arrays, _MAIN_INPUTS) | rows | key_grads | dbias | dq)
    if "dq_sum" in rows:
        sums = _select(rows, ("dq_sum", "dq_order"))
        of_dq = replace(config.of_rows, writes_dslopes=False)
        work.run(Dq(sm90_backward.DQ, of_dq, splits), _select(arrays, _LENGTHS) | sums | {"dq": grads["q"]})
    if splits.in_all > 1:
        query_splits.add(work, key_grads, results, splits.in_all)
    if config.writes_dslopes:
        of_slopes = _select(rows, ("dslope_rows",)) | {"dalibi_slopes": grads["alibi_slopes"]}
        work.run(slopes, arrays | of_slopes)
    done = {"q", "k", "v"}
    done |= {"bias"} if dbias else set()
    done |= {"alibi_slopes"} if config.writes_dslopes else set()
    return {name: x for name, x in grads.items() if name not in done}


_LENGTHS = ("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")
_MAIN_INPUTS = ("q", "k", "v", "dout", "alibi_slopes", *SCORE_TENSORS, *_LENGTHS)


def _select(arrays: Arrays, names: tuple[str, ...]) -> Arrays:
    return {name: x for name, x in arrays.items() if name in names}
