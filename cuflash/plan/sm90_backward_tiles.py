"""Tiles of Hopper's backward kernels on 16 bits, and the choice of a row by the registers that options leave."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.plan.config import OF_RULES, flags_of, without_blocks_of_rule, without_window
from cuflash.problem.attention_problem import AttentionProblem

# Computing warpgroups of NARROW have 64 keys each. The warpgroups of WIDE, which is for wide heads, share 64 keys, of
# which they compute dv, dk and dq.
NARROW, WIDE = "backward_sm90", "backward_sm90_wide"
_SHORT = 4096  # most queries that see a key where they are few


@dataclass(frozen=True)
class Sm90BackwardRow:
    """The tile for head dims up to these, and its buffers."""

    entry: str  # NARROW or WIDE
    head_dim: int  # widest q and k
    head_dim_v: int  # widest v
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    query_stages: int  # buffers of queries
    dout_stages: int  # buffers of dout
    ds_stages: int  # buffers of the scores' gradients
    key_stages: int = 1  # buffers of keys; values have one

    def holds(self, problem: AttentionProblem) -> bool:
        """Return True if the row is wide enough for a problem."""
        return problem.head_dim <= self.head_dim and problem.head_dim_v <= self.head_dim_v


# The first row is taken that is wide enough. Its numbers are head dims, block_m, block_n, stages of q, dout, ds, keys.
BACKWARD = (
    Sm90BackwardRow(NARROW, 64, 64, 128, 128, 2, 2, 2),
    Sm90BackwardRow(NARROW, 96, 96, 64, 128, 2, 2, 2, 2),
    Sm90BackwardRow(NARROW, 128, 128, 64, 128, 2, 2, 2, 2),
    Sm90BackwardRow(WIDE, 192, 128, 64, 64, 2, 2, 2),
    Sm90BackwardRow(WIDE, 192, 192, 64, 64, 2, 2, 2),
    Sm90BackwardRow(WIDE, 256, 256, 64, 64, 2, 2, 2),
)

# These rows are for softcap, a bias that TMA loads, or a mask that is read in vectors. The mask needs too many
# registers where additions to dq have an order.
_FEW_QUERIES = Sm90BackwardRow(NARROW, 64, 64, 64, 128, 2, 2, 2)
WITH_ONE_OPTION = (_FEW_QUERIES, *BACKWARD[1:])
# These rows are for options that take registers.
WITH_OPTIONS = (_FEW_QUERIES, Sm90BackwardRow(WIDE, 128, 128, 64, 64, 2, 2, 2), *BACKWARD[3:])
WITH_BIAS_TILES = (*WITH_ONE_OPTION[:-1], WITH_OPTIONS[1])  # rows with room for tiles of a bias
# These rows are for keys that few queries see. There is a third tile of queries, because the queries that a block mask
# picks come from farther away and half-hidden steps are skipped.
FOR_SHORT_RANGES = (*BACKWARD[:2], Sm90BackwardRow(NARROW, 128, 128, 64, 128, 3, 3, 2), *BACKWARD[3:])
ARRAYS = {"has_bias", "has_mask", "has_block_mask"}


def options_of(problem: AttentionProblem) -> set[str]:
    """Return the flags of a problem but the window's."""
    return without_window(flags_of(problem))


def row_for(problem: AttentionProblem, bias_tiles: bool = False, mask_vectors: bool = False) -> Sm90BackwardRow | None:
    """Choose the row whose registers suffice for a problem's options, or None."""
    options = options_of(problem)
    if options & {*OF_RULES}:
        return next(iter(_rows_for_rules(problem, options)), None)
    rows: tuple[Sm90BackwardRow, ...] = WITH_OPTIONS
    # Registers hold no random bits where the additions to dq have an order.
    drops = options == {"has_dropout"} and not problem.deterministic
    if (drops or not (options or problem.deterministic)) and _has_short_ranges(problem):
        rows = FOR_SHORT_RANGES
    elif options <= {"has_alibi"} or drops:
        rows = BACKWARD
    elif options == {"has_block_mask"}:
        rows = WITH_ONE_OPTION if problem.deterministic else FOR_SHORT_RANGES
    elif (
        options == {"has_softcap"}
        or (options == {"has_bias"} and bias_tiles)
        or (options == {"has_mask"} and mask_vectors and not problem.deterministic)
    ):
        rows = WITH_ONE_OPTION
    # There are too few registers for the options that remain.
    if "has_bias" in options:
        capped = "has_softcap" in options and options & {"has_mask", "has_dropout"}
        dropped = "has_dropout" in options and options & {"has_mask", "has_alibi"}
        if len(options) > 3 or capped or (dropped and not bias_tiles and rows[0].holds(problem)):
            return None
    bias_and_blocks = {"has_bias", "has_block_mask"} <= options
    if (options & ARRAYS and len(options) > 2) or (problem.deterministic and bias_and_blocks):
        rows = rows[:-1]
    return next((r for r in rows if r.holds(problem)), None)


def smaller_rows(problem: AttentionProblem) -> list[Sm90BackwardRow]:
    """Return the rows that a problem can take where the threads of `row_for`'s would spill registers."""
    options = options_of(problem)
    if options & {*OF_RULES}:
        return _rows_for_rules(problem, options)[1:]
    return [row for row in WITH_OPTIONS if row.holds(problem)]


def _rows_for_rules(problem: AttentionProblem, options: set[str]) -> list[Sm90BackwardRow]:
    """Return the rows that a problem with users' own rules can take, the fastest first.

    WIDE hands on a weight times the rule's derivative, whose sign would say that dropout drops it.
    """
    with_others = WITH_ONE_OPTION, WITH_OPTIONS, WITH_OPTIONS[1:]
    tables = with_others if len(without_blocks_of_rule(options)) > 1 else (BACKWARD, *with_others)
    wide = not options >= {"has_score_mod", "has_dropout"}
    first = (next((r for r in rows if r.holds(problem) and (wide or r.entry == NARROW)), None) for rows in tables)
    return [*dict.fromkeys(row for row in first if row is not None)]


def _has_short_ranges(problem: AttentionProblem) -> bool:
    """Return True if so few queries see a key, in a window, that steps at its ends count."""
    return "has_window" in flags_of(problem) and queries_seen(problem) <= _SHORT


def queries_seen(problem: AttentionProblem) -> int:
    """Return the number of queries that see one key."""
    left, right = problem.window_left, problem.window_right
    return problem.seqlen_q if left is None or right is None else min(left + right + 1, problem.seqlen_q)
