"""The gradient of one tile of scores on the CPU.

For scores s, with P = exp(s - lse), D the dropout factor (0 or 1 / (1 - p)) and delta = rowsum(dout * out) - dlse::

    dv = (D P)^T dout      dP = D (dout v^T)      ds = P (dP - delta)      dq = scale ds k      dk = scale ds^T q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.numpy_threads import Workspace
from cuflash.numpy_tiles import Block, Tiling, without_rows, zero_hidden

Array = NDArray[Any]

# An lse says how much a probability is to within a factor of 1 +- eps * |lse|; from here on rows are put right.
MAX_LSE_ERROR = 2.0**-8


class Rows(NamedTuple):
    """A block's rows in the type of the arithmetic, by KV head: (KV heads, query heads of each * rows, ...)."""

    q: Array  # times softmax_scale
    dout: Array
    delta: Array
    lse: Array  # +inf where there are no probabilities
    norm: Array | float  # a factor of all probabilities


class Tile(NamedTuple):
    """The gradients of a tile of scores, by KV head, in scratch memory, and the operands of what follows from them.

    What the tile hides from all its rows or keys is 0 in the operands: NaN there would come through a product with 0.
    """

    p: Array  # as v meets it: after dropout
    ds: Array | None  # of the scores
    dproducts: Array | None  # of scale * q.k, which softcap comes after
    q: Array
    dout: Array
    k: Array
    distance: Array | None


@dataclass(frozen=True)
class Backward:
    """A backward call: its arrays, and the names of the gradients that are wanted."""

    tiling: Tiling
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    wanted: frozenset[str]

    @property
    def needs_ds(self) -> bool:
        """Whether a gradient of the scores is wanted, not only dv."""
        return not self.wanted.isdisjoint(("q", "k", "bias", "alibi_slopes"))

    def load(self, block: Block, workspace: Workspace) -> Rows:
        """The rows of a block."""
        tiling, heads = self.tiling, block.heads
        q = tiling.load_rows(tiling.operands.q, block) * tiling.problem.softmax_scale
        dout = tiling.load_rows(self.dout, block)
        delta = np.einsum("hrd,hrd->hr", dout, tiling.load_rows(self.out, block))
        index = slice(heads.first, heads.stop), slice(block.row, block.row_stop)
        if self.dlse is not None:
            delta = delta - tiling.by_kv_head(tiling.lse_of_sequence(self.dlse, block.sequence)[index], heads)
        lse = tiling.by_kv_head(tiling.lse_of_sequence(self.lse, block.sequence)[index], heads)
        empty = lse == -np.inf
        if empty.any():
            q, dout = without_rows(q, ~empty), without_rows(dout, ~empty)
            delta = np.where(empty, 0, delta).astype(lse.dtype, copy=False)
            lse = np.where(empty, np.inf, lse).astype(lse.dtype, copy=False)
        rows = Rows(q, dout, delta, lse, 1.0)
        error = np.finfo(lse.dtype).eps * np.abs(np.where(empty, 0, lse))
        return rows._replace(norm=self._norm(block, rows, error, workspace)) if error.max() > MAX_LSE_ERROR else rows

    def _norm(self, block: Block, rows: Rows, error: Array, workspace: Workspace) -> Array:
        """What makes a row's probabilities sum to 1 where its lse is too large to tell how many keys it counts.

        A row whose scores are all finfo.min has lse = finfo.min too, and exp(score - lse) = 1 at every key. The sum is
        left alone where it is surely below 1: the lse of a merge counts other keys beside these.
        """
        tiling, operands = self.tiling, self.tiling.operands
        total = np.zeros(rows.lse.shape)
        if operands.sink is not None:
            total += np.exp(tiling.sink_rows(block) - rows.lse)
        for key, key_stop, cut in tiling.tiles(block):
            k = tiling.load_keys(operands.k, block, key, key_stop)
            tile = tiling.score_tile(block, key, key_stop, cut, rows.q, k, workspace)
            if tile is not None:
                p = tiling.by_kv_head(tile.scores, block.heads)
                np.exp(np.subtract(p, rows.lse[..., None], out=p), out=p)
                if tile.visible is not None:
                    zero_hidden(tile.scores, tile.visible)
                total += p.sum(axis=-1)
        is_one = (error > MAX_LSE_ERROR) & (total > 0) & (np.log(total) >= -error)
        return np.where(is_one, 1 / total, 1).astype(rows.lse.dtype)

    def tile(self, block: Block, rows: Rows, key: int, key_stop: int, cut: bool, workspace: Workspace) -> Tile | None:
        """The gradients of a tile; None if all of it is hidden."""
        tiling, problem, operands = self.tiling, self.tiling.problem, self.tiling.operands
        q, dout = rows.q, rows.dout
        k = tiling.load_keys(operands.k, block, key, key_stop)
        tile = tiling.score_tile(block, key, key_stop, cut, q, k, workspace)
        if tile is None:
            return None
        v = tiling.load_keys(operands.v, block, key, key_stop)
        visible = tile.visible
        if visible is not None:
            seen_keys = visible.any(axis=(0, 1))
            k, v = without_rows(k, seen_keys), without_rows(v, seen_keys)
            seen_rows = np.broadcast_to(visible.any(axis=2), tile.scores.shape[:2])
            seen_rows = tiling.by_kv_head(seen_rows, block.heads)
            q, dout = without_rows(q, seen_rows), without_rows(dout, seen_rows)

        p = tiling.by_kv_head(tile.scores, block.heads)
        p -= rows.lse[..., None]
        np.exp(p, out=p)
        if isinstance(rows.norm, np.ndarray):
            p *= rows.norm[..., None]
        if visible is not None:
            zero_hidden(tile.scores, visible)
        factor = self._dropout_factor(block, key, key_stop)
        if not self.needs_ds:
            return Tile(p if factor is None else p * factor, None, None, q, dout, k, None)

        ds = workspace.array("ds", p.shape, problem.accum_dtype)
        np.matmul(dout, v.swapaxes(1, 2), out=ds)
        dropped = p
        if factor is not None:
            ds *= factor
            dropped = np.multiply(p, factor, out=factor)
        ds -= rows.delta[..., None]
        ds *= p
        wide_ds = tiling.by_query_head(ds, block.heads)
        if visible is not None:
            zero_hidden(wide_ds, visible)
        dproducts = ds
        if tile.tanh is not None:
            slope = np.square(tile.tanh, out=tile.tanh)
            np.subtract(1, slope, out=slope)
            slope *= wide_ds
            if visible is not None:
                zero_hidden(slope, visible)
            dproducts = tiling.by_kv_head(slope, block.heads)
        return Tile(dropped, ds, dproducts, q, dout, k, tile.distance)

    def _dropout_factor(self, block: Block, key: int, key_stop: int) -> Array | None:
        """0 where a probability is dropped, else 1 / (1 - p), by KV head."""
        problem = self.tiling.problem
        if not problem.dropout_p:
            return None
        keep = self.tiling.by_kv_head(self.tiling.dropout_keep(block, key, key_stop), block.heads)
        return keep * np.dtype(problem.accum_dtype).type(1 / (1 - problem.dropout_p))
