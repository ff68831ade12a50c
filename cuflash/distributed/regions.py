"""The parts of the score matrix that a rank computes over some rank's keys, in as few calls as there can be.

A region is one call. Neighbouring regions in which every query sees every key are one; a rank's own keys under a causal
mask are one, too, because its tokens stand in the order of the sequence; so are packed sequences whose rows and keys
coincide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from cuflash.distributed.order import Stretch
from cuflash.frontend.partial import Window, sees_anything, sees_everything, window_of_part
from cuflash.kept import kept
from cuflash.problem.attention_problem import Place

UNBOUNDED: Window = (None, None)


class Region(NamedTuple):
    """Some of a rank's queries over some of the keys that it holds."""

    queries: Stretch
    keys: Stretch
    sees_all: bool  # every query sees every key, so that the call has no mask
    sequence: int = 0  # number of the packed sequence; 0 of padded arrays
    edges: tuple[int, ...] | None = None  # where the sequences of several begin and end, counted from the first row

    @property
    def place(self) -> Place:
        """The place of the region in its sequence."""
        if self.edges is not None:
            return Place(stride=self.queries.stride)
        return Place(self.queries.first, self.keys.first, self.queries.stride, first_batch=self.sequence)

    def keys_from(self, first: int) -> slice:
        """Return the rows of its keys in an array that begins with their rank's row `first`."""
        return slice(self.keys.begin - first, self.keys.begin - first + self.keys.length)


@kept
def regions_of(
    own: tuple[Stretch, ...],
    others: tuple[Stretch, ...],
    is_same_rank: bool,
    window: Window,
    edges: tuple[int, ...] | None,
    needs_places: bool,
) -> tuple[Region, ...]:
    """Return the regions of one step.

    Parameters
    ----------
    own, others : tuple of Stretch
        The tokens of the queries' rank and of the keys' rank.
    is_same_rank : bool
        They are one rank.
    window : (left, right)
        Of the whole sequence, with causal folded in.
    edges : tuple of int or None
        Where packed sequences begin and end.
    needs_places : bool
        ALiBi or dropout depend on positions, so that stretches do not become one region.
    """
    if needs_places:
        return tuple(_visible(own, others, window, edges))
    if is_same_rank and edges is None and (window == UNBOUNDED or (window == (None, 0) and _is_ascending(own))):
        rows = Stretch(0, sum(stretch.length for stretch in own), 0, 1)
        return (Region(rows, rows, window == UNBOUNDED),) if rows.length else ()
    found: list[Region] = []
    if is_same_rank and edges is not None:
        found += [Region(stretch, stretch, False, edges=_edges_within(stretch, edges)) for stretch in own]
        pairs = [(a, b) for a in own for b in others if a != b]
    else:
        pairs = [(a, b) for a in own for b in others]
    for a, b in pairs:
        found += _visible([a], [b], window, edges)
    return tuple(_joined(found))


@kept
def halves_of(regions: tuple[Region, ...], is_causal: bool) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Cut a rank's regions over its own keys into those to begin with, and those to end with.

    The first ones are computed while other ranks' keys travel, the last ones while shares of gradients do.
    """
    if len(regions) == 1 and regions[0].edges is None:
        (region,) = regions
        middle = region.queries.length // 2
        # Under a causal mask the first queries see no more keys than there are of them.
        is_square = is_causal and region.queries == region.keys
        first_keys = region.keys.cut(0, middle) if is_square else region.keys
        first = region._replace(queries=region.queries.cut(0, middle), keys=first_keys)
        last = region._replace(queries=region.queries.cut(middle, region.queries.length))
        return ((first,), (last,)) if middle else ((), regions)
    rows = min((region.queries.begin for region in regions), default=0)
    first_regions = tuple([region for region in regions if region.queries.begin == rows])
    return first_regions, tuple([region for region in regions if region not in first_regions])


def _is_ascending(stretches: Sequence[Stretch]) -> bool:
    """Return True if rows stand in the order of their tokens."""
    filled = [stretch for stretch in stretches if stretch.length]
    return all(a.first + (a.length - 1) * a.stride < b.first for a, b in pairwise(filled))


@kept
def keys_seen(regions: tuple[Region, ...]) -> slice:
    """Return the keys' rows from the first to the last that some region reads; an empty slice where there is none."""
    starts = [region.keys.begin for region in regions]
    stops = [region.keys.begin + region.keys.length for region in regions]
    return slice(min(starts, default=0), max(stops, default=0))


def _visible(
    own: Sequence[Stretch], others: Sequence[Stretch], window: Window, edges: Sequence[int] | None
) -> Iterator[Region]:
    """Yield each pair of stretches of one sequence, cut down to the rows and keys that see anything."""
    for queries in own:
        for keys in others:
            for sequence, bounds in enumerate([None] if edges is None else pairwise(edges)):
                start, stop = (0, 1 << 62) if bounds is None else bounds
                region = _cut(_of_sequence(queries, start, stop), _of_sequence(keys, start, stop), window)
                if region is not None:
                    yield region._replace(sequence=sequence)


def _of_sequence(stretch: Stretch, start: int, stop: int) -> Stretch:
    """Return the rows of a stretch in a sequence, with tokens counted from its start."""
    within = stretch.within(start, stop)
    return within._replace(first=within.first - start)


def _cut(queries: Stretch, keys: Stretch, window: Window) -> Region | None:
    """Return the region of two stretches without the rows and keys at its ends that see nothing; None if all do."""
    for _ in range(2):  # fewer queries may see fewer keys
        place = Place(queries.first, keys.first, queries.stride)
        left, right = own = window_of_part(window, queries.length, keys.length, place)
        if not sees_anything(own, queries.length, keys.length):
            return None
        diagonal = keys.length - queries.length
        first = 0 if right is None else max(0, -diagonal - right)
        stop = queries.length if left is None else min(queries.length, keys.length - diagonal + left)
        first_key = 0 if left is None else max(0, first + diagonal - left)
        stop_key = keys.length if right is None else min(keys.length, stop + diagonal + right)
        queries, keys = queries.cut(first, stop), keys.cut(first_key, stop_key)
    place = Place(queries.first, keys.first, queries.stride)
    own = window_of_part(window, queries.length, keys.length, place)
    return Region(queries, keys, sees_everything(own, queries.length, keys.length))


def _edges_within(stretch: Stretch, edges: Sequence[int]) -> tuple[int, ...]:
    """Return where sequences begin and end among the rows of a stretch."""
    rows = [stretch.within(stretch.first, edge).length for edge in edges]
    return tuple(rows)


def _joined(regions: Sequence[Region]) -> list[Region]:
    """Make neighbouring regions that see all one, first along the keys, then along the queries."""
    masked = [region for region in regions if not region.sees_all]
    full = [region for region in regions if region.sees_all]
    return masked + _joined_along("queries", _joined_along("keys", full))


def _joined_along(axis: Literal["keys", "queries"], regions: Iterable[Region]) -> list[Region]:
    """Make regions that see all one where they follow each other along an axis and are equal along the other."""

    def along(region: Region) -> Stretch:
        return region.keys if axis == "keys" else region.queries

    def across(region: Region) -> tuple[int, int, int]:
        other = region.queries if axis == "keys" else region.keys
        return region.sequence, other.begin, other.length

    joined: list[Region] = []
    for region in sorted(regions, key=lambda r: (across(r), along(r).begin)):
        last = joined[-1] if joined else None
        if last is not None and across(last) == across(region) and _follows(along(last), along(region)):
            together = _together(along(last), along(region))
            joined[-1] = last._replace(keys=together) if axis == "keys" else last._replace(queries=together)
        else:
            joined.append(region)
    return joined


def _follows(first: Stretch, second: Stretch) -> bool:
    return first.begin + first.length == second.begin


def _together(first: Stretch, second: Stretch) -> Stretch:
    """Join rows that follow each other; nothing asks for their tokens, as every query sees every key."""
    return first._replace(length=first.length + second.length)
