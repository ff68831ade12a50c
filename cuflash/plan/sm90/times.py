"""Predicted times of Hopper's forward kernels on 16 bits, by which `grid` chooses for small grids."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from cuflash.plan.key_splits import OF_MANY_ROWS, hidden_queries, merging_us, rows_of
from cuflash.problem.attention_problem import AttentionProblem

# A multiprocessor computes so many tiles one after the other; with more, they even out by themselves, and the tile that
# fills the GPU best is fastest.
MANY_WAVES = 7
_MOST_BLOCKS = 2  # most splits of tiles that a multiprocessor is given where tiles alone leave some idle
# Where tiles alone keep all busy, but the last ones few of them, so few splits make the last round short. Predictions
# can tell a gain where whole rounds take at least so many times as long as they would if all were busy.
_FEW_SPLITS = 3
_SHORT_ROUND = 1.2


class Times(NamedTuple):
    """Times of a forward kernel in microseconds."""

    launch: float  # a launch
    step: float  # a step: a tile of queries with a tile of keys
    tile: float  # a tile of queries, besides its steps


# The times of head dims 64 and 128 are fitted to 2,000 times of 195 problems in CUDA graphs, drawn at random in log
# scale (batch 1 and 2, 1 to 32 heads, 512 to 16k queries and keys, full and causal), on an H200: half of them are
# within 4%, nine of ten within 12%. The others are fitted to some 90 problems each (batch 1 to 11, 1 to 45 heads, 90 to
# 23k queries, 32 to 23k keys): half are within 2 to 6%, nine of ten within 9 to 23%. Keys are head dim, block_m,
# block_n.
_MEASURED = {
    (64, 256, 64): Times(2.4, 1.044, 2.5),
    (64, 192, 128): Times(2.4, 1.472, 3.0),
    (64, 128, 128): Times(2.3, 1.174, 2.0),
    (64, 64, 128): Times(2.8, 0.837, 1.9),
    (128, 128, 128): Times(1.1, 1.427, 3.9),
    (128, 192, 80): Times(-0.7, 1.310, 6.4),
    (128, 64, 64): Times(1.6, 0.631, 3.3),
    (80, 128, 128): Times(3.9, 1.203, 1.8),
    (80, 192, 112): Times(4.0, 1.355, 2.1),
    (96, 128, 128): Times(4.1, 1.284, 1.8),
    (96, 192, 96): Times(4.0, 1.258, 2.3),
    (112, 128, 128): Times(3.7, 1.389, 1.8),
    (112, 192, 80): Times(3.4, 1.154, 2.5),
    (112, 192, 96): Times(3.6, 1.359, 2.6),
    (144, 128, 96): Times(3.8, 1.239, 2.4),
    (144, 192, 80): Times(3.2, 1.434, 3.2),
    (160, 128, 96): Times(4.1, 1.284, 2.6),
    (160, 192, 64): Times(3.1, 1.239, 3.7),
    (176, 128, 96): Times(4.0, 1.416, 2.5),
    (192, 128, 96): Times(3.8, 1.468, 2.4),
    (208, 128, 64): Times(3.7, 1.102, 3.3),
    (240, 128, 64): Times(3.0, 1.261, 3.5),
    (256, 128, 64): Times(3.7, 1.300, 3.2),
}
# The steps of tiles that were not measured are predicted by the line through the two that were, of head dim 128, with
# the fewest and the most operations: microseconds of any step, and operations per microsecond and multiprocessor.
_STEP, _FLOPS = 0.37, 7.9e6
# A measured step tells that of head dims narrower by so many columns, where products still take most of it.
_MOST_NARROWER = 64
_ROWS_OF_HEADS = 1.5  # microseconds more of a tile with rows of several heads, which are stored one by one
_OTHER = Times(1.5, 0.0, 4.0)  # times of a tile that was not measured; `times_of` fills in its step


class _Kernel(Protocol):
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...


class _Tile(_Kernel, Protocol):
    @property
    def packs_heads(self) -> bool: ...
    def num_heads(self, problem: AttentionProblem) -> int: ...


def _flops(kernel: _Kernel, head_dim: int, head_dim_v: int) -> int:
    return 2 * kernel.block_m * kernel.block_n * (head_dim + head_dim_v)


def _known(kernel: _Kernel) -> Times | None:
    """Return the times of the narrowest kernel with this tile that was timed and has room for the head dims.

    A narrower one than that has less to multiply.
    """
    head_dim, head_dim_v, tile = kernel.head_dim, kernel.head_dim_v, (kernel.block_m, kernel.block_n)
    widest = max(head_dim, head_dim_v)
    timed = [d for d, *own in _MEASURED if tuple(own) == tile and widest <= d <= widest + _MOST_NARROWER]
    if not timed:
        return None
    times = _MEASURED[(min(timed), *tile)]
    saved = _flops(kernel, min(timed), min(timed)) - _flops(kernel, head_dim, head_dim_v)
    return times._replace(step=times.step - saved / _FLOPS)


def is_timed(kernel: _Kernel) -> bool:
    """Return True if times of the kernel's tile were measured; they are predicted from its products if not."""
    return _known(kernel) is not None


def times_of(kernel: _Kernel) -> Times:
    """Times of a kernel: measured ones of its tile, or predicted ones."""
    return _known(kernel) or times_by_products(kernel)


def times_by_products(kernel: _Kernel) -> Times:
    """Times of a kernel, predicted from its products alone."""
    return _OTHER._replace(step=_STEP + _flops(kernel, kernel.head_dim, kernel.head_dim_v) / _FLOPS)


def tile_us(kernel: _Tile) -> float:
    """Microseconds of a tile of queries besides its steps."""
    return times_of(kernel).tile + _ROWS_OF_HEADS * kernel.packs_heads


def _queries(problem: AttentionProblem, kernel: _Tile) -> int:
    return kernel.block_m // problem.group_size if kernel.packs_heads else kernel.block_m


def num_tiles(problem: AttentionProblem, kernel: _Tile) -> int:
    """Return the number of tiles of queries of all heads, each of which a thread block has with all of its keys."""
    return -(-problem.seqlen_q // _queries(problem, kernel)) * kernel.num_heads(problem) * problem.batch


def tiles_seen(
    own: int, block: int, others: int, block_of_others: int, before: int | None, behind: int | None
) -> np.ndarray:
    """Return how many tiles of the others each of one's own tiles sees: of keys each tile of queries, or the reverse.

    `own` rows come in tiles of `block`; a row sees others from `before` before its place on the diagonal to `behind`
    behind it, without a bound where that is None.
    """
    first = np.arange(0, own, block)
    last = np.minimum(first + block, own) - 1
    diagonal = others - own
    begin, end = np.zeros_like(first), np.full_like(first, others)
    if before is not None:
        begin = np.maximum(first + diagonal - before, 0)
    if behind is not None:
        end = np.minimum(last + diagonal + behind + 1, others)
    return np.maximum(-(-end // block_of_others) - begin // block_of_others, 0)


def _steps(problem: AttentionProblem, kernel: _Tile) -> np.ndarray:
    """Return the numbers of tiles of keys that each tile of queries of one head sees."""
    sides = problem.window_left, problem.window_right
    return tiles_seen(problem.seqlen_q, _queries(problem, kernel), problem.seqlen_k, kernel.block_n, *sides)


def rows_per_query(problem: AttentionProblem, kernel: _Tile) -> float:
    """Return the rows of tiles that see keys, for each query that sees one; 1 where none does."""
    rows = int(np.count_nonzero(_steps(problem, kernel))) * _queries(problem, kernel)
    seeing = problem.seqlen_q - hidden_queries(problem)
    return rows / seeing if rows and seeing else 1.0


def splits_worth_trying(problem: AttentionProblem, kernel: _Tile, num_sms: int) -> list[int]:
    """Return numbers of splits that leave each split two tiles of keys, and each multiprocessor few splits."""
    tiles, most_steps = num_tiles(problem, kernel), -(-problem.seqlen_k // kernel.block_n)
    has_short_round = tiles > num_sms and -(-tiles // num_sms) * num_sms >= _SHORT_ROUND * tiles
    most = max(_MOST_BLOCKS * num_sms // tiles, _FEW_SPLITS if has_short_round else 1)
    once = max(num_sms // tiles, 1)
    most = min(most, most_steps // 2, OF_MANY_ROWS[-1])
    return sorted(n for n in {*OF_MANY_ROWS, once} if n == 1 or n <= most)


def computing_us(steps: np.ndarray, blocks_of_each: int, step: float, tile: float, num_sms: int) -> float:
    """Microseconds of thread blocks with so many steps, the longest first; each number of steps is that of many.

    They take as long as their mean on a multiprocessor, and as whole rounds: some multiprocessor has j + 1 of the first
    j * num_sms + 1 blocks, and none of these is shorter than the last.
    """
    longest_first = np.sort(steps)[::-1] * step + tile
    blocks = len(steps) * blocks_of_each
    mean = float(longest_first.sum()) * blocks_of_each / num_sms
    first = np.arange(0, blocks, num_sms)  # the first block of each round
    rounds = (np.arange(len(first)) + 1) * longest_first[first // blocks_of_each]
    return max(float(rounds.max()), mean if len(first) > 1 else 0.0)


def predicted_us(problem: AttentionProblem, kernel: _Tile, num_splits: int, num_sms: int) -> float:
    """Predict the microseconds of a forward pass on the device, merging included and the host's work left out."""
    times = times_of(kernel)
    heads = kernel.num_heads(problem) * problem.batch
    steps = -(-_steps(problem, kernel) // num_splits)
    if num_splits == 1 and steps.any() and not kernel.packs_heads:
        steps = steps[steps > 0]  # such a kernel writes tiles that see no key while it computes the others
    merging = merging_us(rows_of(problem), problem.head_dim_v, num_splits)
    computing = computing_us(steps, num_splits * heads, times.step, tile_us(kernel), num_sms)
    return times.launch + computing + merging
