"""The gradient of one tile of scores on the CPU.

For scores s, with P = exp(s - lse), D the dropout factor (0 or 1 / (1 - p)) and delta = rowsum(dout * out) - dlse::

    dv = (D P)^T dout      dP = D (dout v^T)      ds = P (dP - delta)      dq = scale ds k      dk = scale ds^T q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.dropout import dropout_keep
from cuflash.cpu.own_rules import OperandTerms
from cuflash.cpu.scores import (
    Scores,
    by_kv_head,
    column_sums,
    compute_scores,
    load_keys,
    load_rows,
    sink_rows,
    split_heads,
    without_rows,
    zero_hidden,
)
from cuflash.cpu.threads import Workspace
from cuflash.cpu.tiles import Block, Tile, Tiling

Array = NDArray[Any]

# exp(score - lse) is off by eps * |lse|; rows that are off by more roundings than these are corrected.
MAX_LSE_ROUNDINGS = 32
# These are finfo's, which knows no bfloat16.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Rows(NamedTuple):
    """A block's rows in the type of the arithmetic, by KV head: (KV heads, query heads of each * rows, ...)."""

    q: Array  # times softmax_scale
    dout: Array
    q_transposed: Array  # (KV heads, head_dim, query heads of each * rows)
    dout_transposed: Array
    delta: Array
    lse: Array  # +inf where there are no probabilities
    norm: Array | None  # a factor of all probabilities

    def part(self, within: slice) -> Rows:
        """Return some of the rows."""
        norm = None if self.norm is None else self.norm[:, within]
        q_transposed, dout_transposed = self.q_transposed[:, :, within], self.dout_transposed[:, :, within]
        delta, lse = self.delta[:, within], self.lse[:, within]
        return Rows(self.q[:, within], self.dout[:, within], q_transposed, dout_transposed, delta, lse, norm)


class TileGradients(NamedTuple):
    """The gradients of a tile of scores, in scratch memory, and the operands of the next products, 0 where hidden."""

    p: Array  # the weights that v is multiplied by, after dropout
    ds: Array | None  # the gradient of the scores
    dproducts: Array | None  # the gradient of scale * q.k, before softcap
    q: Array
    dout: Array
    k: Array
    distance: Array | None
    operands: list[OperandTerms]  # what the tile adds to the gradients of operands


@dataclass(frozen=True)
class Backward:
    """A backward call; `wanted` are names of gradients."""

    tiling: Tiling
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    wanted: frozenset[str]

    @property
    def needs_ds(self) -> bool:
        """True if a wanted gradient needs that of the scores."""
        of_scores = "q", "k", "bias", "alibi_slopes", *self.tiling.problem.operand_grads
        return not self.wanted.isdisjoint(of_scores)

    def load(self, block: Block, workspace: Workspace) -> Rows:
        """Load the rows of a block."""
        tiling, heads = self.tiling, block.heads
        q = load_rows(tiling, tiling.operands.q, block)
        dout = load_rows(tiling, self.dout, block)
        out = load_rows(tiling, self.out, block)
        # A row that sees nothing has out 0: its dout does not count, even where it is NaN.
        delta = np.where(out.any(axis=-1), np.einsum("hrd,hrd->hr", dout, out), out.dtype.type(0))
        if self.dlse is not None:
            dlse = tiling.lse_of_sequence(self.dlse, block.sequence)[0, heads.query, block.rows]
            delta = delta - by_kv_head(dlse, heads)
        lse = by_kv_head(tiling.lse_of_sequence(self.lse, block.sequence)[0, heads.query, block.rows], heads)
        empty = lse == -np.inf
        if empty.any():
            q, dout = without_rows(q, ~empty), without_rows(dout, ~empty)
            delta = np.where(empty, 0, delta).astype(lse.dtype, copy=False)
            lse = np.where(empty, np.inf, lse).astype(lse.dtype, copy=False)
        q_transposed, dout_transposed = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, dout))
        rows = Rows(q * tiling.problem.softmax_scale, dout, q_transposed, dout_transposed, delta, lse, None)
        error = EPS[tiling.problem.accum_dtype] * np.abs(np.where(empty, 0, lse))
        if error.max() > MAX_LSE_ROUNDINGS * EPS[tiling.problem.dtype]:
            return rows._replace(norm=self._norm(block, rows, error, workspace))
        return rows

    def _norm(self, block: Block, rows: Rows, error: Array, workspace: Workspace) -> Array:
        """Return the factor that makes a row's probabilities sum to 1 where its lse is too large to do so.

        Scores of finfo.min make such an lse. A sum that the rounding of lse does not explain is left alone, because
        the lse of a merge counts other keys, too.
        """
        tiling, operands = self.tiling, self.tiling.operands
        total = np.zeros(rows.lse.shape)
        if operands.sink is not None:
            total += np.exp(sink_rows(tiling, block) - rows.lse)
        for tile in tiling.tiles(block):
            within = tile.rows_within(block)
            own = rows.part(within)
            found = compute_scores(tiling, tile, own.q_transposed, load_keys(tiling, operands.k, tile), workspace)
            if found is not None:
                total[:, within] += column_sums(_probabilities(found, own, block))
        is_one = (total > 0) & (np.abs(np.log(total)) <= 2 * error)
        return np.where(is_one, 1 / total, 1).astype(rows.lse.dtype)

    def gradients(
        self, tile: Tile, rows: Rows, workspace: Workspace, with_operands: bool = False
    ) -> TileGradients | None:
        """Return the gradients of a tile with these rows; None if all of it is hidden."""
        tiling, problem, heads = self.tiling, self.tiling.problem, tile.block.heads
        k = load_keys(tiling, tiling.operands.k, tile)
        found = compute_scores(tiling, tile, rows.q_transposed, k, workspace)
        if found is None:
            return None
        v = load_keys(tiling, tiling.operands.v, tile)
        q, dout, visible = rows.q, rows.dout, found.visible
        if visible is not None:
            seen_keys = visible.any(axis=(0, 2, 3))
            k, v = without_rows(k, seen_keys), without_rows(v, seen_keys)
            kv_heads, group = heads.counts
            seen_rows = np.broadcast_to(visible.any(axis=1), (kv_heads, group, q.shape[1] // group))
            seen_rows = seen_rows.reshape(q.shape[:2])
            q, dout = without_rows(q, seen_rows), without_rows(dout, seen_rows)
        p = _probabilities(found, rows, tile.block)
        factor: Array | None = None
        if problem.dropout_p:
            factor = dropout_keep(tiling, tile) * p.dtype.type(problem.dropout_rescale)
            factor = factor.reshape(p.shape)
        if not self.needs_ds:
            return TileGradients(p if factor is None else p * factor, None, None, q, dout, k, None, [])

        ds = workspace.array("ds", p.shape, problem.accum_dtype)
        np.matmul(v, rows.dout_transposed, out=ds)
        dropped = p
        if factor is not None:
            ds *= factor
            dropped = np.multiply(p, factor, out=factor)
        ds -= rows.delta[:, None]
        ds *= p
        if visible is not None:
            zero_hidden(ds, visible, heads)
        operands: list[OperandTerms] = []
        if found.rule is not None:
            view = split_heads(ds, heads)
            if with_operands:
                operands = found.rule.operand_terms(view, self.wanted)
            found.rule.chain(view)
        dproducts = ds
        if found.tanh is not None:
            dproducts = np.square(found.tanh, out=found.tanh)
            np.subtract(1, dproducts, out=dproducts)
            dproducts *= ds
            if visible is not None:
                zero_hidden(dproducts, visible, heads)
        return TileGradients(dropped, ds, dproducts, q, dout, k, found.distance, operands)


def _probabilities(found: Scores, rows: Rows, block: Block) -> Array:
    """Write exp(scores - lse) in place of the scores, 0 where hidden."""
    p = found.scores
    p -= rows.lse[:, None]
    np.exp(p, out=p)
    if rows.norm is not None:
        p *= rows.norm[:, None]
    if found.visible is not None:
        zero_hidden(p, found.visible, block.heads)
    return p
