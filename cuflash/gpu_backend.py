"""The GPU path: a problem and its arrays become parameter structs and kernel launches on the current stream."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cuflash import (
    kernels,
    launch_sm80_backward,
    launch_sm90,
    launch_sm90_backward,
    launch_split,
    plan_sm80,
    plan_sm80_backward,
    plan_sm90,
    plan_sm90_backward,
    plan_split,
    plan_split_backward,
)
from cuflash.launch_sm90 import PersistentLaunch
from cuflash.launch_split import SplitGradientLaunch, SplitLaunch, SplitRowsLaunch
from cuflash.params import PARAMS, SCORE_TENSORS, TENSORS, word_of
from cuflash.plan import KERNEL_FILES, KEY_KERNELS, Config, function_of, key_kernels, plan
from cuflash.problem import Array, AttentionProblem, Operands
from cuflash.recording import Memo, Recording
from cuflash.tensor_map import ALIGNMENT

# Beyond every index, and far enough from 2^31 that adding an index to it is safe.
_UNBOUNDED = 1 << 30
_NO_LIMIT = (1 << 31) - 1
# Rows of one block of delta.cu, threads of one block of reduce.cu.
_DELTA_ROWS = 8
_REDUCE_THREADS = 256

Arrays = dict[str, Array]


def repeat(memo: Memo, arrays: list[Array]) -> bool:
    """Do what the earlier call did that left `memo`, with other arrays of the same metadata; False if none did.

    `arrays` are those operands, and then the further arguments and results of `forward` or `backward`, that there are.
    """
    device = kernels.device_of(arrays[0])
    known = memo.get(device)
    pointer = device.pointer
    return known is not None and known([pointer(x) for x in arrays])


def forward(
    problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None, memo: Memo | None = None
) -> None:
    """Write the result of a problem, and lse if it is wanted; what `repeat` needs goes into `memo`."""
    device = kernels.device_of(out)
    arrays = {**_inputs(operands), "out": out}
    if lse is not None:
        arrays["lse"] = lse
    recording = Recording(device, arrays)
    if lse is None:
        arrays = {**arrays, "lse": recording.empty(problem.lse_shape, problem.accum_dtype)}
    chosen = _forward_config(problem, arrays, device)
    if isinstance(chosen, plan_sm90.Config):
        parts = launch_sm90.results_of_parts(problem, chosen, device.num_sms, recording.empty)
        if parts:
            arrays = arrays | parts  # the recording keeps the call's own
            chosen = replace(chosen, split=True)
    _launch("forward", problem, operands, arrays, device, recording, chosen)
    if "out_parts" in arrays:
        _launch("merge_parts", problem, operands, arrays, device, recording)
    if memo is not None:
        recording.keep(memo)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
    memo: Memo | None = None,
) -> None:
    """Write the wanted gradients of a problem; what `repeat` needs goes into `memo`."""
    device = kernels.device_of(out)
    arrays = {**_inputs(operands), "dout": dout, "out": out, "lse": lse}
    with_dlse = arrays if dlse is None else {**arrays, "dlse": dlse}
    recording = Recording(device, {**with_dlse, **{f"d{name}": x for name, x in grads.items()}})
    launch = partial(_launch, problem=problem, operands=operands, device=device, recording=recording)
    delta = {"delta": recording.empty(problem.lse_shape, problem.accum_dtype)}
    arrays, with_dlse = arrays | delta, with_dlse | delta
    hopper = _hopper_backward(problem, arrays, device) if device.has_wgmma else None
    by_mma = _mma_backward(problem, arrays, device) if hopper is None else ()
    if by_mma:
        grads = launch_sm80_backward.launch(launch, problem, by_mma, with_dlse, grads, recording.empty)
    elif hopper is None:
        launch("delta", arrays=with_dlse)
    else:
        launch_sm90_backward.launch(partial(launch, chosen=hopper), problem, hopper, with_dlse, grads, recording.empty)
        grads = {name: x for name, x in grads.items() if name not in ("q", "k", "v")}

    by_rows = {"dq": grads["q"]} if "q" in grads else {}
    if "alibi_slopes" in grads:
        by_rows["dslope_rows"] = recording.empty(problem.lse_shape, problem.accum_dtype)
    split = plan_split_backward.backward(problem) if device.has_wgmma else None
    if split is not None:
        of_keys = {f"d{name}": grads[name] for name in ("k", "v") if name in grads}
        launch_split.gradients(launch, problem, split, arrays, by_rows, of_keys, recording.empty, device)
    elif by_rows:
        launch("backward_dq", arrays={**arrays, **by_rows})
    for entry in key_kernels(problem) if split is None else ():
        of_keys = {name: grads[name[1:]] for name in KEY_KERNELS[entry] if name[1:] in grads}
        if of_keys:
            launch(entry, arrays={**arrays, **of_keys})
    if "bias" in grads:
        _backward_bias(launch, problem, {**arrays, "dbias": grads["bias"]}, device, recording)
    if "sink" in grads:
        launch("reduce_sink", arrays={**arrays, "dsink": grads["sink"]})
    if "alibi_slopes" in grads:
        launch("reduce_slopes", arrays={**arrays, **by_rows, "dalibi_slopes": grads["alibi_slopes"]})
    if memo is not None:
        recording.keep(memo)


def _backward_bias(
    launch: Any, problem: AttentionProblem, arrays: Arrays, device: kernels.Device, recording: Recording
) -> None:
    """dbias; a small one is the sum of parts, so that its long walks fill the GPU."""
    dbias = arrays["dbias"]
    config = plan(problem, "backward_bias", device.smem_limit)
    splits = min(max(2 * device.num_sms // max(_bias_tiles(problem, config), 1), 1), _bias_walk(problem, config))
    if splits > 1:
        arrays["dbias_parts"] = recording.empty((splits, *dbias.shape), problem.accum_dtype)
    launch("backward_bias", arrays=arrays)
    if splits > 1:
        launch("reduce_bias", arrays=arrays)


def _bias_axes(problem: AttentionProblem, config: Config) -> list[tuple[int, int]]:
    """(tiles, walk) of each axis of dbias, as Axis of backward_bias.cu counts them."""
    assert problem.bias is not None
    scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    blocks = (1, 1, config.block_m, config.block_n)
    return [
        (1, math.ceil(score / block)) if size == 1 and score != 1 else (math.ceil(size / block), 1)
        for size, score, block in zip(problem.bias, scores, blocks, strict=True)
    ]


def _bias_tiles(problem: AttentionProblem, config: Config) -> int:
    return math.prod(tiles for tiles, _ in _bias_axes(problem, config))


def _bias_walk(problem: AttentionProblem, config: Config) -> int:
    return max(math.prod(walk for _, walk in _bias_axes(problem, config)), 1)


# The operands that are plain arrays stand first.
_INPUTS = Operands._fields[: Operands._fields.index("dropout_seed")]


def _inputs(operands: Operands) -> Arrays:
    return {name: x for name, x in zip(_INPUTS, operands, strict=False) if x is not None}


_SEED_WORD = word_of("dropout_key")
# CuPy passes a struct by value as an array of one opaque element.
_STRUCT = np.dtype(f"V{PARAMS.itemsize}")


class _Launch:
    """A kernel with everything of its launch that does not change from call to call."""

    def __init__(
        self,
        entry: str,
        problem: AttentionProblem,
        arrays: Arrays,
        device: kernels.Device,
        chosen: TensorCores | None,
    ) -> None:
        if isinstance(chosen, plan_sm90.Config) or entry == "merge_parts":
            problem, arrays = launch_sm90.heads_as_rows(problem, arrays)
        config = chosen or plan(problem, entry if entry in _TILED else "forward", device.smem_limit)
        tiles, blocks = _grid(entry, problem, config, arrays)
        params = _fixed_params(problem, arrays)
        params["num_tiles"] = tiles
        self.persistent: PersistentLaunch | SplitLaunch | SplitGradientLaunch | SplitRowsLaunch | None = None
        self.block: tuple[int, ...] = (config.threads,)
        if isinstance(chosen, plan_sm80.Config):
            entry = chosen.entry
        elif isinstance(chosen, plan_sm80_backward.Config):
            params["num_query_tiles"] = launch_sm80_backward.query_tiles(problem, chosen)
        elif isinstance(chosen, plan_sm90.Config):
            entry = chosen.entry
            params["heads_together"] = plan_sm90.heads_together(problem)
            blocks *= max(int(params["splits"][0]), 1)
            # The last map is the bias's, read or not.
            last = ("bias", chosen.block_m) if chosen.has_bias_tiles else ("v", chosen.block_n)
            tiles_of = (("q", chosen.block_m), ("k", chosen.block_n), ("v", chosen.block_n), last)
            self.persistent = PersistentLaunch(problem, tiles_of, arrays, device, blocks)
        elif isinstance(chosen, plan_split.Config):
            entry = chosen.entry
            params["heads_together"] = plan_sm90.heads_together(problem)
            self.persistent = SplitLaunch(problem, chosen, device, blocks)
        elif isinstance(chosen, plan_split_backward.Config):
            heads_together = (plan_sm90_backward if chosen.of_keys else plan_sm90).heads_together
            params["heads_together"] = heads_together(problem)
            kind = SplitRowsLaunch if entry == launch_split.ROWS else SplitGradientLaunch
            self.persistent = kind(problem, chosen, device, blocks)
        elif chosen is not None:
            params["num_query_tiles"] = launch_sm90_backward.query_tiles(problem, chosen)
            self.block = (launch_sm90_backward.threads(entry, chosen),)
            if entry == chosen.entry:
                params["heads_together"] = plan_sm90_backward.heads_together(problem)
                m, n = chosen.block_m, chosen.block_n
                tiles_of = (("q", m), ("k", n), ("v", n), ("dout", m))
                self.persistent = PersistentLaunch(problem, tiles_of, arrays, device, blocks)
        if self.persistent is not None:
            blocks = self.persistent.blocks
        self.entry = entry
        self.smem_bytes = config.smem_bytes if entry in _TILED else 0
        self.grid: tuple[int, ...] = (blocks,)
        if isinstance(self.persistent, SplitRowsLaunch):
            self.kernel, self.grid, self.block = self.persistent.launched()
        else:
            file, function = KERNEL_FILES.get(entry, entry), function_of(entry)
            self.kernel = kernels.get(file, function, config, device, self.smem_bytes)
        self.words = params.view(np.uint64)
        self.pointer_words = [word_of(name) for name in arrays]  # q, k, v stand first

    def __call__(self, pointers: list[int], seed: int | None) -> None:
        if self.grid[0] == 0:
            return
        words = self.words.copy()
        for word, pointer in zip(self.pointer_words, pointers, strict=True):
            words[word] = pointer
        if seed is not None:
            words[_SEED_WORD] = seed
        maps = () if self.persistent is None else self.persistent.arguments(words)
        self.kernel(self.grid, self.block, (words.view(_STRUCT), *maps), shared_mem=self.smem_bytes)


TensorCores = (
    plan_sm80.Config
    | plan_sm80_backward.Config
    | plan_sm90.Config
    | plan_sm90_backward.Config
    | plan_split.Config
    | plan_split_backward.Config
)

_TILED = (
    "forward",
    *plan_sm80.ENTRIES,
    plan_sm80_backward.MAIN,
    "forward_sm90",
    "split_forward",
    "backward_dq",
    *KEY_KERNELS,
    "backward_bias",
    plan_sm90_backward.NARROW,
    plan_sm90_backward.WIDE,
    plan_split_backward.DQ,
    *plan_split_backward.KEY_KERNELS,
)
# The bound keeps a program with ever new shapes from growing without end.
_MAX_LAUNCHES = 4096
_launches: dict[Any, _Launch] = {}


def _launch(
    entry: str,
    problem: AttentionProblem,
    operands: Operands,
    arrays: Arrays,
    device: kernels.Device,
    recording: Recording,
    chosen: TensorCores | None = None,
) -> None:
    seed: Any = operands.dropout_seed
    key: tuple[Any, ...] = ()
    if operands.block_mask is not None and entry in _TILED:
        arrays = {**arrays, **_block_arrays(entry, problem, operands, device, chosen)}
        key = (arrays["block_list"].shape, arrays["block_slots"].shape)
    if "dbias_parts" in arrays:
        key += (arrays["dbias_parts"].shape,)
    if seed is not None and not isinstance(seed, (int, np.integer)):
        arrays = {**arrays, "dropout_seed": seed}
        seed = None
    kernel = chosen and (chosen.entry, getattr(chosen, "aligned", True), getattr(chosen, "has_bias_tiles", False))
    key += (entry, problem, device, kernel, tuple(arrays), tuple([x.strides for x in arrays.values()]))
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = _Launch(entry, problem, arrays, device, chosen)
    pointer = device.pointer
    launch([pointer(x) for x in arrays.values()], seed)
    recording.add(launch, arrays)


def _forward_config(problem: AttentionProblem, arrays: Arrays, device: kernels.Device) -> TensorCores | None:
    """The forward kernel on tensor cores that can run on these arrays, if there is one: Hopper's own first."""
    hopper = _hopper_config(problem, arrays, device) if device.has_wgmma else None
    aligned = _aligned([arrays[name] for name in ("q", "k", "v")], device)
    return hopper or plan_sm80.forward(problem, aligned, device.capability, device.smem_limit)


def _aligned(tensors: list[Array], device: kernels.Device) -> bool:
    """Whether addresses and strides are multiples of what one access moves."""
    places = [device.pointer(x) for x in tensors], [stride for x in tensors for stride in x.strides[:-1]]
    return not any(place % ALIGNMENT for place in chain(*places))


def _mma_backward(
    problem: AttentionProblem, arrays: Arrays, device: kernels.Device
) -> tuple[plan_sm80_backward.Config, ...]:
    """The backward kernels for other tensor cores than Hopper's own, if there are any."""
    aligned = _aligned([arrays[name] for name in ("q", "k", "v", "dout", "out")], device)
    return plan_sm80_backward.backward(problem, aligned, device.capability, device.smem_limit)


def _hopper_config(problem: AttentionProblem, arrays: Arrays, device: kernels.Device) -> TensorCores | None:
    """Hopper's own forward kernel if it can run on these arrays."""
    if problem.dtype == "float32":
        return plan_split.forward(problem)
    tensors = [arrays[name] for name in ("q", "k", "v")]
    if any(device.pointer(x) % ALIGNMENT for x in tensors):
        return None
    bias: Array = arrays.get("bias")
    of_bias = None
    if bias is not None and device.pointer(bias) % ALIGNMENT == 0:
        of_bias = bias.strides, bias.shape, bias.dtype.itemsize
    return plan_sm90.forward(problem, tuple([(x.strides, x.shape) for x in tensors]), of_bias)


def _hopper_backward(
    problem: AttentionProblem, arrays: Arrays, device: kernels.Device
) -> plan_sm90_backward.Config | None:
    """Hopper's own backward kernels if they can run on these arrays."""
    tensors = [arrays[name] for name in ("q", "k", "v", "dout", "out")]
    if any(device.pointer(x) % ALIGNMENT for x in tensors):
        return None
    return plan_sm90_backward.backward(problem, tuple([(x.strides, x.shape) for x in tensors]))


def _block_arrays(
    entry: str,
    problem: AttentionProblem,
    operands: Operands,
    device: kernels.Device,
    chosen: TensorCores | None,
) -> Arrays:
    """A block mask as a kernel reads it: its store, and the lists for this kernel's tiles."""
    block_mask = operands.block_mask
    assert block_mask is not None
    config = chosen or plan(problem, entry, device.smem_limit)
    get = partial(kernels.get, device=device)
    lists = block_mask.tile_lists(config.block_m, config.block_n, get, device.namespace)
    slots, bits = block_mask.arrays(device.namespace)
    by_columns = entry in (
        *KEY_KERNELS,
        plan_sm80_backward.MAIN,
        plan_sm90_backward.NARROW,
        plan_sm90_backward.WIDE,
        *plan_split_backward.KEY_KERNELS,
    )
    return {
        "block_list": lists.col_index if by_columns else lists.row_index,
        "block_count": lists.col_count if by_columns else lists.row_count,
        "block_slots": slots,
        "block_bits": bits,
    }


def _grid(entry: str, problem: AttentionProblem, config: Config | TensorCores, arrays: Arrays) -> tuple[int, int]:
    """(tiles of one head, thread blocks of the launch)."""
    if isinstance(config, plan_sm80_backward.Config):
        return launch_sm80_backward.grid(entry, problem, config)
    if isinstance(config, plan_sm90_backward.Config):
        return launch_sm90_backward.grid(entry, problem, config)
    if entry == "reduce_sink":
        return 0, problem.num_heads_q
    if entry == "reduce_slopes":
        assert problem.alibi is not None
        return 0, math.prod(problem.alibi)
    if entry == "reduce_bias":
        return 0, math.ceil(arrays["dbias"].size / _REDUCE_THREADS)
    if entry == "backward_bias":
        assert isinstance(config, Config)
        splits = arrays["dbias_parts"].shape[0] if "dbias_parts" in arrays else 1
        return 0, _bias_tiles(problem, config) * splits
    of_keys = entry in KEY_KERNELS or entry in plan_split_backward.KEY_KERNELS
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    block = _DELTA_ROWS if entry in ("delta", "merge_parts") else config.block_n if of_keys else config.block_m
    heads = problem.num_heads_kv if of_keys else problem.num_heads_q
    if problem.packed:
        # Slots for every sequence and the padding before and behind them: work_of in sequence.cuh.
        tiles = rows // block + problem.batch + 2
        return tiles, tiles * heads
    tiles = math.ceil(rows / block)
    return tiles, tiles * heads * problem.batch


def _fixed_params(problem: AttentionProblem, arrays: Arrays) -> np.ndarray:
    """The struct of a launch without pointers and seed."""
    params = np.zeros(1, PARAMS)
    p = params[0]
    for name in TENSORS:
        if name in arrays:
            p[name] = (0, *_tensor_strides(name, arrays[name], problem.packed))
    for name in SCORE_TENSORS:
        if name in arrays:
            x = arrays[name]
            strides = [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
            p[name] = (0, *strides, *(_NO_LIMIT if n == 1 else n for n in x.shape[2:]))
    left, right = problem.window_left, problem.window_right
    p["window_left"] = _UNBOUNDED if left is None else min(left, _UNBOUNDED)
    p["window_right"] = _UNBOUNDED if right is None else min(right, _UNBOUNDED)
    p["softmax_scale"], p["softcap"] = problem.softmax_scale, problem.softcap
    p["dropout_rescale"] = 1.0 / (1.0 - problem.dropout_p)
    p["dropout_threshold"] = math.floor(problem.dropout_p * 2.0**32)
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v"):
        p[name] = getattr(problem, name)
    if problem.alibi is not None:
        p["alibi_batch_stride"] = _batch_stride(arrays.get("alibi_slopes"))
        p["dalibi_batch_stride"] = _batch_stride(arrays.get("dalibi_slopes"))
    if "dbias" in arrays:
        p["dbias_batches"], p["dbias_heads"], p["dbias_rows"], p["dbias_columns"] = arrays["dbias"].shape
        p["splits"] = arrays["dbias_parts"].shape[0] if "dbias_parts" in arrays else 1
    if "out_parts" in arrays:
        p["splits"] = len(arrays["out_parts"]) // problem.batch
    if "block_list" in arrays:
        slots, lists = arrays["block_slots"], arrays["block_list"]
        p["slot_rows"], p["slot_columns"] = slots.shape[2:]
        p["num_lists"], p["list_capacity"] = lists.shape[2:]
        p["block_batch_stride"] = slots.shape[1] if slots.shape[0] > 1 else 0
        p["block_head_stride"] = 1 if slots.shape[1] > 1 else 0
    return params


def _batch_stride(slopes: Array | None) -> int:
    return 0 if slopes is None or slopes.shape[0] == 1 else slopes.strides[0] // slopes.dtype.itemsize


def _tensor_strides(name: str, x: Array, packed: bool) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements; 0 on axes of size 1, whose stride means nothing."""
    strides = [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    if name in ("lse", "dlse", "delta", "dslope_rows", "lse_parts"):
        return (0, strides[1], strides[0]) if packed else (strides[0], strides[2], strides[1])
    return (0, strides[0], strides[1]) if packed else (strides[0], strides[1], strides[2])
