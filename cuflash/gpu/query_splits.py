"""Shares of dk and dv over splits of the queries are added up in one launch, in a fixed order, and rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.axes import CPP_TYPES, FOUR, extents, strides
from cuflash.gpu.launch import Work
from cuflash.gpu.params import Arrays
from cuflash.kept import Kept

_FILE, _ENTRY = "around/sum_splits", "sum_splits"
_THREADS = 128
_VECTOR = 4  # columns that a thread sums
# Several lanes share the splits of a vector where there are more than so many for each, and too few vectors for the
# GPU. That follows from sizes alone, as it is the order of the sums.
_SPLITS_OF_LANE = 4
_MOST_LANES = 16  # with more a lane would read less than a sector of each share
_MOST_THREADS = 1 << 18
_GRADIENTS = "dk", "dv"  # in the order of the grid's y
_SUM = np.dtype([("shares", "u8"), ("target", "u8"), ("extents", FOUR), ("strides", FOUR)])
SPLIT_SUM = Struct(
    "SplitSumParams",
    [
        Member("dk", "SplitSum", _SUM),
        Member("dv", "SplitSum", _SUM),
        Member("splits", "i64", np.dtype("i8")),
        Member("lanes", "i64", np.dtype("i8"), "a power of two: lanes that share the splits of a vector"),
    ],
)


def lanes_of(vectors: int, splits: int) -> int:
    """Return how many lanes share the splits of each vector, of which dk and dv have `vectors` together."""
    lanes = 1
    while lanes < _MOST_LANES and splits > _SPLITS_OF_LANE * lanes and 2 * lanes * vectors <= _MOST_THREADS:
        lanes *= 2
    return lanes


class _Launch(BoundLaunch):
    """A sum's launch; `arrays` has the shares and the targets of dk, of dv, or of both."""

    def __init__(self, device: cuda_device.Device, arrays: Arrays, splits: int) -> None:
        params = np.zeros(1, SPLIT_SUM.dtype)
        p = params[0]
        targets = {name: arrays[name] for name in _GRADIENTS if name in arrays}
        for name, target in targets.items():
            p[name]["extents"], p[name]["strides"] = extents(target), strides(target)
        sizes, words = [target.size // _VECTOR for target in targets.values()], []
        p["splits"], p["lanes"] = splits, lanes_of(sum(sizes), splits)
        for name in arrays:
            whole, _, is_shares = name.partition("_")
            member = _SUM.fields["shares" if is_shares else "target"]  # type: ignore[index]
            words.append((SPLIT_SUM.offset(whole) + member[1]) // 8)
        (dtype,) = {target.dtype.name for target in targets.values()}
        constants: dict[str, str | int] = {"target": CPP_TYPES[dtype], "threads": _THREADS}
        kernel = cuda_device.get(_FILE, _ENTRY, constants, device, 0, SPLIT_SUM.headers)
        grid = math.ceil(max(sizes) * int(p["lanes"]) / _THREADS), len(_GRADIENTS)
        launch = kernel.bound(grid, (_THREADS,), [params.nbytes], 0, begins_early=True)
        super().__init__((params,), words, launch if any(sizes) else None)


_launches: Kept[Any, _Launch] = Kept()


def shares_of(work: Work, results: Arrays, splits: int) -> Arrays:
    """Return arrays for the shares of dk and dv: (splits * batch, seqlen_k, num_heads_kv, head_dim).

    Those of packed sequences are (splits, total_k, num_heads_kv, head_dim).
    """
    sizes = {name: x.shape if x.ndim > 3 else (1, *x.shape) for name, x in results.items()}
    return {name: work.empty((splits * batch, *rest), np.float32) for name, (batch, *rest) in sizes.items()}


def add(work: Work, shares: Arrays, results: Arrays, splits: int) -> None:
    """Write the sums of the shares to `results`."""
    arrays = {f"{name}_shares": x for name, x in shares.items()} | results
    key = work.device, splits, tuple([(name, x.dtype, x.shape, x.strides) for name, x in arrays.items()])
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _Launch(work.device, arrays, splits)
    work.enqueue(launch, arrays)
