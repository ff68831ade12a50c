"""Rows of heads of some arrays, as what ranks send each other.

They are numbers until somebody needs views. Copy engines need none: what two ranks' pieces have to do with each other
is found once for all calls on arrays of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cuflash.distributed.copies import Rows, enqueue, has_wide_rows, rows_of
from cuflash.distributed.order import Stretch
from cuflash.kept import kept
from cuflash.problem.heads import Heads

Array = Any
# These arrays have their rows as the last axis, behind the heads; the others have heads and columns behind the rows.
ROWS_LAST = ("lse", "dlse")


class Piece(NamedTuple):
    """Some rows of some heads of an array."""

    array: int  # among the arrays of the message
    rows: tuple[int, int, int]  # the first one, their number, and the distance of two
    heads: tuple[int, int] | None  # from one to before another; None of all
    rows_last: bool

    def of(self, x: Array) -> Array:
        """View the piece of its array."""
        first, count, step = self.rows
        rows = slice(first, first + step * count, step)
        heads = slice(None) if self.heads is None else slice(*self.heads)
        return x[..., heads, rows] if self.rows_last else x[..., rows, heads, :]


class Layout(NamedTuple):
    """The places of an array's elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def cut(self, piece: Piece) -> tuple[int, Layout]:
        """Return where a piece of the array begins, in bytes, and its layout."""
        shape, strides = list(self.shape), list(self.strides)
        row_axis, head_axis = (-1, -2) if piece.rows_last else (-3, -2)
        first, count, step = piece.rows
        begin = first * strides[row_axis]
        shape[row_axis], strides[row_axis] = count, strides[row_axis] * step
        if piece.heads is not None:
            begin += piece.heads[0] * strides[head_axis]
            shape[head_axis] = piece.heads[1] - piece.heads[0]
        return begin, Layout(tuple(shape), tuple(strides), self.itemsize)


@dataclass(frozen=True)
class Pieces:
    """Pieces of some arrays, which travel as one message."""

    arrays: Sequence[Array]
    cuts: tuple[Piece, ...]

    def views(self) -> list[Array]:
        """View every piece."""
        return [cut.of(self.arrays[cut.array]) for cut in self.cuts]

    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts of the arrays."""
        return tuple([Layout(x.shape, x.strides, x.itemsize) for x in self.arrays])


class Move(NamedTuple):
    """Copies from one array of a message to one of those that it arrives in."""

    source: int
    target: int
    copies: tuple[Rows, ...]


@kept
def moves_between(
    sources: tuple[Layout, ...],
    source_cuts: tuple[Piece, ...],
    targets: tuple[Layout, ...],
    target_cuts: tuple[Piece, ...],
) -> tuple[Move, ...] | None:
    """Return the copies of pieces into pieces; None where some of them have no wide rows."""
    moves = []
    for source, target in zip(source_cuts, target_cuts, strict=True):
        begin, its = sources[source.array].cut(source)
        first, own = targets[target.array].cut(target)
        copies = rows_of(its.shape, its.itemsize, own.strides, its.strides)
        if copies is None:
            return None
        shifted = [rows._replace(source=rows.source + begin, target=rows.target + first) for rows in copies]
        moves.append(Move(source.array, target.array, tuple(shifted)))
    return tuple(moves)


@kept
def new_arrays(layouts: tuple[Layout, ...], cuts: tuple[Piece, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of new arrays in which the pieces of a message arrive."""
    return tuple([layouts[cut.array].cut(cut)[1].shape for cut in cuts])


@kept
def whole_arrays(shapes: tuple[tuple[int, ...], ...], cuts: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the pieces that are all of such new arrays."""
    rows = [(0, shape[-1 if cut.rows_last else -3], 1) for shape, cut in zip(shapes, cuts, strict=True)]
    return tuple([Piece(n, own, None, cut.rows_last) for n, (own, cut) in enumerate(zip(rows, cuts, strict=True))])


@kept
def have_wide_rows(layouts: tuple[Layout, ...], cuts: tuple[Piece, ...]) -> bool:
    """Return True if copy engines can bring every piece, as it lies, to a contiguous array."""
    owns = [layouts[cut.array].cut(cut)[1] for cut in cuts]
    return all(has_wide_rows(own.shape, own.itemsize, own.strides) for own in owns)


def viewed(message: Any) -> Any:
    """Return a message whose pieces are views."""
    return message.views() if isinstance(message, Pieces) else message


def copy_here(message: Pieces, into: Pieces) -> None:
    """Copy pieces into others of the same device, behind what its current stream does."""
    moves = None
    if message.arrays and type(message.arrays[0]).__module__ == "cupy":
        moves = moves_between(message.layouts(), message.cuts, into.layouts(), into.cuts)
    if moves is None:
        for target, x in zip(into.views(), message.views(), strict=True):
            target[...] = x
        return
    import cupy

    enqueue_moves(moves, message, into, cupy.cuda.get_current_stream().ptr)


def enqueue_moves(moves: Sequence[Move], message: Pieces, into: Pieces, stream: int) -> None:
    """Enqueue copies of pieces into others."""
    sources = [x.data.ptr for x in message.arrays]
    targets = [x.data.ptr for x in into.arrays]
    for source, target, copies in moves:
        enqueue(copies, targets[target], sources[source], stream)


@kept
def rows_of_heads(
    names: tuple[str, ...], places: tuple[Stretch, ...], heads: Heads | None, whole: tuple[str, ...] = ()
) -> tuple[Piece, ...]:
    """Return some rows of some heads of each array: KV heads of k and v, and all heads where these are None.

    Of the arrays that `whole` names all heads are returned, too.
    """
    cuts = []
    for number, name in enumerate(names):
        own = None
        if heads is not None and name not in whole:
            own = (heads.first_kv, heads.stop_kv) if name in ("k", "v") else (heads.first, heads.stop)
        for place in places:
            if place.length:
                rows = place.first, place.length, place.stride
                cuts.append(Piece(number, rows, own, name in ROWS_LAST))
    return tuple(cuts)


def all_of(x: Array) -> Pieces:
    """Return a whole array (rows, columns), contiguous, as one piece."""
    return Pieces((x[:, None],), (Piece(0, (0, len(x), 1), None, rows_last=False),))


@kept
def as_rows(places: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """Return stretches whose tokens are the rows of a rank's own arrays."""
    return tuple([Stretch(place.begin, place.length, place.begin, 1) for place in places])
