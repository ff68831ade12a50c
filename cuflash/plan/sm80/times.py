"""Predicted times of tiles by mma.sync against each other, by which the candidates of a problem are ordered.

A warp reads its operands from shared memory once for each of its rows, and each step has waits and powers of its own,
which more warps of a multiprocessor hide. The weights of the three are chosen so that tiles of each table keep their
order, the fastest first; they say nothing of how long a tile takes.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash.plan.record import Record
from cuflash.plan.sm80.tiles import Sm80BackwardTile, Sm80Tile


class _Weights(NamedTuple):
    rows: float  # of what a warp reads of the other side, which its rows share
    step: float  # of what a step has besides its products, which its columns share
    warps: float  # of what the warps of a multiprocessor hide for each other


_WEIGHTS = {
    "half": _Weights(10, 9, 1),
    "e4m3": _Weights(10, 9, 1),
    # Products of parts, and more so those of float64, take longer, and so a step's own time counts less.
    "float32": _Weights(10, 5, 1),
    "tf32": _Weights(10, 5, 1),
    "float64": _Weights(1, 0, 1),
}
_ONE_STAGE = 0.03  # loads that are not hidden behind products
_ADDS = 0.01  # additions to dq that are not made in bulk


def of_queries(record: Record[Sm80Tile]) -> float:
    """Return the predicted time of a score in a tile of queries, in units of its own.

    A tile for few rows is the first where it is taken, the one with the most keys.
    """
    tile = record.tile
    if tile.splits_warps:
        return -tile.block_n * tile.min_blocks
    rows = tile.block_m * tile.key_warps / tile.num_warps
    return _time(record.kind, rows, tile.block_n / tile.key_warps, tile.num_warps * tile.min_blocks, tile.stages)


def of_keys(record: Record[Sm80BackwardTile]) -> float:
    """Return the predicted time of a score in a tile of keys; a tile for few queries is the first where it is taken."""
    tile = record.tile
    if tile.short:
        return 0.0
    rows = tile.block_n * tile.query_warps / tile.num_warps
    time = _time(record.kind, rows, tile.block_m / tile.query_warps, tile.num_warps * tile.min_blocks, tile.stages)
    return time + (0 if tile.bulk_adds else _ADDS)


def _time(kind: str, rows: float, columns: float, warps: int, stages: int) -> float:
    weights = _WEIGHTS[kind]
    shared = weights.rows / rows + weights.step / columns + weights.warps / warps
    return shared + (_ONE_STAGE if stages == 1 else 0)
