"""The orders in which ranks hold the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cuflash import interop
from cuflash.kept import kept

Array = Any

ORDERS = ("plain", "zigzag", "striped")


class Stretch(NamedTuple):
    """Rows of a rank that are tokens at equal distances."""

    begin: int  # the rank's first row of it
    length: int
    first: int  # the token of that row
    stride: int  # from one row's token to the next one's

    def within(self, start: int, stop: int) -> Stretch:
        """Return its rows whose tokens lie in [start, stop)."""
        skipped = max(0, -(-(start - self.first) // self.stride))
        end = min(self.length, max(0, -(-(stop - self.first) // self.stride)))
        return Stretch(self.begin + skipped, max(0, end - skipped), self.first + skipped * self.stride, self.stride)

    def cut(self, start: int, stop: int) -> Stretch:
        """Return its rows from `start` to `stop`, counted from its first."""
        return Stretch(self.begin + start, stop - start, self.first + start * self.stride, self.stride)

    @property
    def rows(self) -> slice:
        """Its place among the rank's rows."""
        return slice(self.begin, self.begin + self.length)

    @property
    def tokens(self) -> slice:
        """Its place in the whole sequence."""
        return slice(self.first, self.first + self.stride * self.length, self.stride)


def check_order(order: object) -> str:
    """Check that an order is one of `ORDERS`."""
    if not isinstance(order, str):
        raise TypeError(f"order: expected one of {', '.join(ORDERS)}, got {type(order).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    return order


@kept
def stretches_of(seqlen: int, rank: int, world: int, order: str) -> tuple[Stretch, ...]:
    """Return a rank's rows in their order.

    "plain": rank r has the r-th of `world` chunks. "zigzag": of 2 * world chunks rank r has chunks r and
    2 * world - 1 - r, so that causal work is even. "striped": rank r has every token t with t % world == r.
    Chunk c of C holds tokens ``seqlen * c // C`` to ``seqlen * (c + 1) // C - 1``.
    """
    if order == "striped":
        return (Stretch(0, len(range(rank, seqlen, world)), rank, world),)
    count = world if order == "plain" else 2 * world
    chunks = (rank,) if order == "plain" else (rank, count - 1 - rank)
    stretches, begin = [], 0
    for chunk in chunks:
        first, stop = seqlen * chunk // count, seqlen * (chunk + 1) // count
        stretches.append(Stretch(begin, stop - first, first, 1))
        begin += stop - first
    return tuple(stretches)


def length_of(seqlen: int, rank: int, world: int, order: str) -> int:
    """Return the number of a rank's rows."""
    return sum(stretch.length for stretch in stretches_of(seqlen, rank, world, order))


def take_part(whole: Array, stretches: Sequence[Stretch], axis: int) -> Array:
    """Copy the tokens of some stretches by their places on an axis that is counted from the end."""
    parts = [whole[_along(axis, stretch.tokens)] for stretch in stretches]
    return interop.namespace_of(whole).concatenate(parts, axis=axis)


def put_part(whole: Array, part: Array, stretches: Sequence[Stretch], axis: int) -> None:
    """Undo `take_part`: write a rank's rows to their places in the whole."""
    for stretch in stretches:
        whole[_along(axis, stretch.tokens)] = part[_along(axis, stretch.rows)]


def _along(axis: int, index: slice) -> tuple[Any, ...]:
    """Return the index of a slice of one axis, counted from the end."""
    return (..., index, *[slice(None)] * (-1 - axis))
