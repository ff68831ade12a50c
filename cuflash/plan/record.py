"""A record is one line of a family's table of kernels; `candidates` chooses those that a problem can take on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from cuflash.hardware import STEP, whole_steps
from cuflash.plan.config import FLAGS, WIDEST, flags_of, has_plain_scale, without_blocks_of_rule, without_window
from cuflash.problem.attention_problem import AttentionProblem

Capability = tuple[int, int]
ANY: Capability = (99, 0)  # a capability that no GPU reaches
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)  # from here on the compiler gives some kernels more registers

# These take registers as options do: addresses or strides that are no multiples of 16 bytes, and a scale that kernels
# may not multiply by log2(e) in advance.
UNALIGNED, UNUSUAL_SCALE = "unaligned", "unusual_scale"


class Word(str):
    """A word says what a problem is like; a record takes it with any number of options, and may need it."""

    __slots__ = ()


@dataclass(frozen=True)
class Takes:
    """The options besides a window that a record can take."""

    options: tuple[str, ...] | None  # None is any, known here or not
    most: int  # so many of them at once
    least: int = 0  # with fewer, other kernels are faster
    lacks: tuple[str, ...] = ()  # options and words that it cannot take

    def all_of(self, asked: Set[str]) -> bool:
        """Return True if all of a set of options, which words may come with, can be taken at once."""
        options = {x for x in asked if not isinstance(x, Word)}
        counts = self.least <= len(without_blocks_of_rule(options)) <= self.most
        return counts and asked.isdisjoint(self.lacks) and (self.options is None or options <= {*self.options})


PLAIN = Takes((), 0)
ANYTHING = Takes(None, 99)


def one_of(*options: str) -> Takes:
    """Return what takes any one of the options, and none of the others."""
    return Takes(options, 1)


ANY_ONE = one_of(*FLAGS)


class Place(NamedTuple):
    """A place is all that a plan knows of the arrays and the GPU besides the problem."""

    aligned: bool  # addresses and strides are multiples of 16 bytes
    capability: Capability
    limit: int  # bytes of shared memory that a thread block may use


T = TypeVar("T")


@dataclass(frozen=True)
class Record(Generic[T]):
    """One line of a table: a tile, and the problems and GPUs that can take it."""

    tile: T
    takes: Takes = ANYTHING
    below: Capability = ANY  # GPUs from this capability on have too few registers
    needs: tuple[str, ...] = ()  # it is for problems with all of these options and words
    most_columns: int = WIDEST  # kernels of head dims of their own that are wider spill, or are slower than others
    # `records` fills in these.
    entries: tuple[str, ...] = ()  # the kernels of one pass
    kind: str = ""  # the kind of products
    head_dim: int = 0  # widest q and k
    head_dim_v: int = 0  # widest v


def records(entries: Sequence[str], kind: str, head_dims: tuple[int, int], *lines: Record[T]) -> tuple[Record[T], ...]:
    """Return the lines of a table for head dims up to these (of q and k, of v)."""
    head_dim, head_dim_v = head_dims
    return tuple(
        replace(line, entries=tuple(entries), kind=kind, head_dim=head_dim, head_dim_v=head_dim_v) for line in lines
    )


def asked_of(problem: AttentionProblem, place: Place) -> set[str]:
    """Return what of a problem takes registers: its options but a window, and what `UNALIGNED` names."""
    asked = without_window(flags_of(problem))
    return asked | ({UNALIGNED} if not place.aligned else set())


def asked_of_scaled(problem: AttentionProblem, place: Place) -> set[str]:
    """Do as `asked_of` for a kernel that multiplies the scale in advance."""
    return asked_of(problem, place) | ({UNUSUAL_SCALE} if not has_plain_scale(problem) else set())


def narrowest(table: Sequence[Record[T]], head_dim: int, head_dim_v: int) -> tuple[Record[T], ...]:
    """Return the lines of the narrowest head dims that are no smaller than these."""
    wide = [r for r in table if head_dim <= r.head_dim and head_dim_v <= r.head_dim_v]
    dims = min(((r.head_dim, r.head_dim_v) for r in wide), default=None)
    return tuple(r for r in wide if (r.head_dim, r.head_dim_v) == dims)


def of_own_columns(
    table: Sequence[Record[T]], head_dim: int, head_dim_v: int, fewest: int = STEP
) -> tuple[Record[T], ...]:
    """Return the `narrowest` lines with these head dims, so that their kernels compute no columns in vain.

    A kernel is compiled when it is needed, so that its head dims may be a problem's own, in whole steps of wgmma. They
    have `fewest` columns at least.
    """
    own, own_v = (max(whole_steps(d), fewest) for d in (head_dim, head_dim_v))
    lines = (line for line in narrowest(table, head_dim, head_dim_v) if max(own, own_v) <= line.most_columns)
    return tuple(replace(line, head_dim=own, head_dim_v=own_v) for line in lines)


def candidates(
    lines: Sequence[Record[T]],
    asked: Set[str],
    capability: Capability,
    fits: Callable[[Record[T]], bool],
    predicted: Callable[[Record[T]], float],
) -> tuple[Record[T], ...]:
    """Return the lines that a problem can take, each tile once, by their predicted times; equal ones as they stand.

    `asked` has the problem's options and words. `fits` asks for a line's shared memory, and for the lengths and blocks
    that it is made for.
    """
    found: dict[T, Record[T]] = {}
    for line in lines:
        if asked >= {*line.needs} and line.takes.all_of(asked) and capability < line.below and fits(line):
            found.setdefault(line.tile, line)
    return tuple(sorted(found.values(), key=predicted))
