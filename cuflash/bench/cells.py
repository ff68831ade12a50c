"""What is measured: one attention problem a cell."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash.block_mask import BlockMask
from cuflash.block_store import CANONICAL, VISIBLE

FORWARD, BACKWARD = "forward", "backward"
# Matrix products: 2 forward, 5 backward (q k^T again, dout v^T, and one for each gradient).
RELATIVE_FLOPS = {FORWARD: 1.0, BACKWARD: 2.5}


@dataclass(frozen=True)
class Cell:
    """One problem.

    `lengths` makes it packed; `density` gives it a random block mask; `options` are names of `options.py`.
    """

    name: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window_left: int | None = None
    density: float | None = None
    lengths: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    suite: str = ""
    directions: tuple[str, ...] = (FORWARD, BACKWARD)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and dout."""
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.lengths:
            rows_q = rows_k = (sum(self.lengths),)  # type: ignore[assignment]
        return {
            "q": (*rows_q, self.num_heads_q, self.head_dim),
            "k": (*rows_k, self.num_heads_kv, self.head_dim),
            "v": (*rows_k, self.num_heads_kv, self.head_dim_v),
            "dout": (*rows_q, self.num_heads_q, self.head_dim_v),
        }

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The window as every library spells it: inclusive, None is unbounded."""
        return self.window_left, 0 if self.causal else None

    def flops(self, direction: str) -> float:
        """Floating-point operations of the visible pairs' products; a causal cell counts half of all pairs."""
        if self.lengths:
            pairs: float = sum(n * n for n in self.lengths)
        else:
            pairs = self.batch * self.seqlen_q * self.seqlen_k
        if self.density is not None:
            pairs *= block_mask(self).density
        elif self.window_left is not None:
            last = np.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q  # the key on each query's diagonal
            ends = np.minimum(last, self.seqlen_k - 1) if self.causal else self.seqlen_k - 1
            pairs *= np.clip(ends - np.maximum(last - self.window_left, 0) + 1, 0, None).mean() / self.seqlen_k
        elif self.causal and self.seqlen_q > 1:
            pairs /= 2
        return 2.0 * pairs * self.num_heads_q * (self.head_dim + self.head_dim_v) * RELATIVE_FLOPS[direction]

    def visible(self, rows: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
        """Which of the `keys` (by default all) the query `rows` see: bool (rows, keys)."""
        keys = np.arange(self.seqlen_k) if keys is None else keys
        diagonal = rows[:, None] + self.seqlen_k - self.seqlen_q
        seen = np.ones((len(rows), len(keys)), bool)
        if self.causal:
            seen &= keys <= diagonal
        if self.window_left is not None:
            seen &= keys >= diagonal - self.window_left
        if self.density is not None:
            slots = block_mask(self).arrays(np)[0][0, 0]  # no block is partial, as all are of whole canonical ones
            seen &= slots[np.ix_(rows // CANONICAL, keys // CANONICAL)] == VISIBLE
        return seen

    @property
    def plain(self) -> Cell:
        """The same problem without options, window and block mask."""
        return replace(self, options=(), window_left=None, density=None)

    @property
    def restricted(self) -> bool:
        """Whether another library needs a dense mask to compute this cell."""
        return self.window_left is not None or self.density is not None

    def sequence(self, index: int) -> tuple[slice, Cell]:
        """Where sequence `index` of a packed cell lies, and its problem alone."""
        start, length = sum(self.lengths[:index]), self.lengths[index]
        return slice(start, start + length), replace(self, batch=1, seqlen_q=length, seqlen_k=length, lengths=())

    def describe(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)


@lru_cache(maxsize=2)
def block_mask(cell: Cell) -> BlockMask:
    """The random blocks of 128 x 128 that `cell.density` asks for, or its window as a block mask."""
    if cell.density is None:
        return BlockMask.sliding_window(cell.seqlen_q, cell.seqlen_k, cell.window_left, 0 if cell.causal else None)
    return BlockMask.random(cell.seqlen_q, cell.seqlen_k, cell.density, seed=0)


def short(seqlen: int) -> str:
    """``16384`` as ``16k``."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def default_scale(cell: Cell) -> float:
    """The softmax scale of every library."""
    return 1.0 / math.sqrt(cell.head_dim)
