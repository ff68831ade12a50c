"""Attention over the pages of a cache some of which lie on a device and some in host memory, and appending to both.

Sequences none of whose host pages a query may see are one ordinary call. The others have their device pages in a
second call, and their host pages in offload's passes, which stream them or let the CPU compute a share where they lie;
the results are merged by lse in the accumulation's dtype and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.frontend.append import append
from cuflash.frontend.call import Call as OrdinaryCall
from cuflash.offload.call import Call, check_supported
from cuflash.offload.devices import device_of
from cuflash.offload.host_keys import PooledKeys
from cuflash.offload.passes import forward as _forward_pass
from cuflash.offload.pools import HostPools
from cuflash.offload.share import share_of
from cuflash.offload.stream import Piece
from cuflash.problem.attention_problem import accum_of
from cuflash.problem.checks import check_window
from cuflash.problem.fp8 import is_fp8
from cuflash.problem.make import make_problem
from cuflash.problem.merging import merge_into
from cuflash.problem.operands import to_full_rank
from cuflash.problem.options import Options, check_names
from cuflash.problem.own_rules import check_operands

Array = Any
Stretches = tuple[tuple[int, int], ...]
# Options that index a sequence's keys by their places, which pages without those between would not have.
_BY_PLACE = ("bias", "mask", "block_mask", "score_mod", "mask_mod")
_ARRAYS = ("bias", "mask", "alibi_slopes", "sink", "q_lengths", "kv_lengths", "q_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Tiers:
    """Where the keys of a step's sequences lie.

    Numbers of pages below `num_device_pages` are the device's, the others the host's.
    """

    num_device_pages: int
    page_size: int
    max_pages: int
    pages: tuple[np.ndarray[Any, Any], ...]  # of each sequence, in the order of its positions
    starts: tuple[int, ...]  # positions before the step
    lengths: tuple[int, ...]  # positions, the new ones counted
    begins: tuple[int, ...] | None  # where each sequence's rows begin, and the rows in all, if they are packed
    xp: Any

    @property
    def counts(self) -> list[int]:
        """New positions of each sequence."""
        return [length - start for start, length in zip(self.starts, self.lengths, strict=True)]

    def num_on_host(self) -> int:
        """How many pages of its sequences lie in host memory; a shared one counts for each."""
        return sum(int((pages >= self.num_device_pages).sum()) for pages in self.pages)

    def on_host(self, sequence: int, first: int, stop: int) -> list[int]:
        """The places among a sequence's pages of those in host memory that have some of the keys first to stop - 1."""
        if stop <= first:
            return []
        low, high = first // self.page_size, -(-stop // self.page_size)
        found = np.flatnonzero(self.pages[sequence][low:high] >= self.num_device_pages)
        return [int(place) + low for place in found]

    def table(self, is_on_host: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The block table of the device's pages, or of the host's by their own numbers; -1 in all other entries."""
        table = np.full((len(self.pages), self.max_pages), -1, np.int32)
        for row, pages in zip(table, self.pages, strict=True):
            own = pages - self.num_device_pages
            row[: len(pages)] = np.where(own < 0, -1, own) if is_on_host else np.where(own < 0, pages, -1)
        return table

    def put(self, x: Any) -> Array:
        """Bring small integers to the device."""
        return self.xp.asarray(np.asarray(x, np.int32))


@dataclass(frozen=True)
class _Reach:
    """The host pages that queries of a call may see."""

    lengths: list[int]  # of the keys of each sequence
    stretches: tuple[Stretches, ...]  # the keys (first, stop) in host memory

    @property
    def is_cold(self) -> list[bool]:
        """Whether each sequence sees some of its host pages."""
        return [bool(own) for own in self.stretches]


def _window_of(options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return check_window(options.get("causal", False), options.get("window"))


def _reach_of(tiers: Tiers, options: Mapping[str, Any], lengths: Sequence[int]) -> _Reach:
    left, _ = _window_of(options)
    stretches = []
    for sequence, (length, count) in enumerate(zip(lengths, tiers.counts, strict=True)):
        # Fewer queries by q_lengths see fewer keys, and the last query sees the last key or the window's right side.
        first = 0 if left is None else max(0, length - count - left)
        places = tiers.on_host(sequence, first, length) if count else []
        own: list[tuple[int, int]] = []
        for place in places:
            a, b = place * tiers.page_size, min((place + 1) * tiers.page_size, length)
            own[-1:] = [(own[-1][0], b)] if own and own[-1][1] == a else [*own[-1:], (a, b)]
        stretches.append(tuple(own))
    return _Reach(list(lengths), tuple(stretches))


def attend(
    tiers: Tiers,
    q: Array,
    pools: tuple[Array, Array],
    host: HostPools,
    layer: int,
    options: Mapping[str, Any],
    cu_seqlens: Array | None,
    of_cpu: float | None,
) -> Any:
    """Return what `attention` does over pages of both memories, or None where no host page counts.

    Parameters
    ----------
    tiers : Tiers
    q : array (batch, count, num_heads_q, head_dim), packed (total, num_heads_q, head_dim)
    pools : (k, v)
        The layer's pools on the device.
    host : HostPools
    layer : int
    options : mapping
        Those of `Step.attend`, without block_table; kv_lengths only where the caller gave other ones than the step's.
    cu_seqlens : int32 array (batch + 1,) or None
        Of packed rows, on the device.
    of_cpu : float or None
        The CPU's share of the host's keys; None measures it.

    Raises
    ------
    NotImplementedError
        For `split_size`.
    RuntimeError
        While the current stream records a graph.
    ValueError
        For `kv_lengths` beyond the pages of a sequence.
    """
    if options.get("kv_lengths") is None:
        reach = _reach_of(tiers, options, tiers.lengths)
        if not any(reach.is_cold):
            return None
    refuse_capture(host, "attend")
    if options.get("split_size") is not None:
        raise NotImplementedError(
            "split_size: expected None where queries see pages in host memory, as a row's bits depend on which pages "
            f"those are, got {options['split_size']}"
        )
    call = _Call(tiers, q, pools, options, cu_seqlens)
    with interop.on_stream_of(call.library, call.q), np.errstate(all="ignore"):
        if call.own_lengths is not None:
            reach = _reach_of(tiers, options, call.own_lengths)
            if not any(reach.is_cold):
                return None
        host.finish()
        return call.run(reach, (host.k[layer], host.v[layer]), of_cpu)


def refuse_scales_by_page(options: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for scales that differ over pages or their rows, which would have to move with them."""
    for name in ("k_scale", "v_scale"):
        shape = getattr(options.get(name), "shape", ())
        if len(shape) == 3 and tuple(shape[:2]) != (1, 1):
            raise NotImplementedError(
                f"{name}: expected shape (1, 1, num_heads_kv) or (1, 1, 1) of a cache with host_pages, whose pages "
                f"move between the memories without scales of their own, got {tuple(shape)}"
            )


def refuse_capture(host: HostPools, what: str) -> None:
    """Raise RuntimeError while the current stream records a graph."""
    if host.is_capturing():
        raise RuntimeError(
            f"{what}: expected no graph capture where pages in host memory are read or written, as the host has to "
            "wait for the device; Step.num_host_pages tells how many there are"
        )


class _Call:
    """The arguments of one call over both memories, of NumPy or CuPy."""

    def __init__(
        self,
        tiers: Tiers,
        q: Array,
        pools: tuple[Array, Array],
        options: Mapping[str, Any],
        cu_seqlens: Array | None,
    ) -> None:
        self.tiers, self.pools, self.cu_seqlens = tiers, pools, cu_seqlens
        given = dict(options)
        self.out, self.return_lse = given.pop("out", None), given.pop("return_lse", False)
        check_names(given)
        check_supported(given)
        self.library = interop.library_of("q", q)
        arrays = {name: x for name in _ARRAYS if (x := given.get(name)) is not None}
        if hasattr(given.get("dropout_seed"), "__dlpack__"):
            arrays["dropout_seed"] = given["dropout_seed"]
        operands = {f"operands[{n}]": x for n, x in enumerate(check_operands(given.get("operands", ())))}
        adopted = interop.adopt_all(self.library, {"q": q, "k": pools[0], **arrays, **operands})
        self.q = adopted["q"]
        self.options = {**given, **{name: adopted[name] for name in arrays}}
        if operands:
            self.options["operands"] = tuple([adopted[name] for name in operands])
        lengths = self.options.pop("kv_lengths", None)
        self.own_lengths = None if lengths is None else self._checked(lengths)

    def _checked(self, lengths: Array) -> list[int]:
        """Read lengths of the caller, which count keys of the sequences' own pages."""
        tiers = self.tiers
        if lengths.dtype.name != "int32":
            raise TypeError(f"kv_lengths: expected dtype int32, got {lengths.dtype.name}")
        if tuple(lengths.shape) != (len(tiers.pages),):
            raise ValueError(f"kv_lengths: expected shape (batch,) = ({len(tiers.pages)},), got {tuple(lengths.shape)}")
        found: list[int] = np.clip(_on_host(lengths), 0, tiers.max_pages * tiers.page_size).tolist()
        for sequence, (length, pages) in enumerate(zip(found, tiers.pages, strict=True)):
            if length > len(pages) * tiers.page_size:
                raise ValueError(
                    f"kv_lengths[{sequence}]: expected at most the {len(pages) * tiers.page_size} positions of its "
                    f"pages, some of which lie in host memory, got {length}"
                )
        return found

    def run(self, reach: _Reach, host_pools: tuple[Array, Array], of_cpu: float | None) -> Any:
        """Compute, and return out or (out, lse)."""
        # The sequences without host pages are computed as ever, and the checks of their call are those of the whole.
        warm = [0 if cold else n for n, cold in zip(reach.lengths, reach.is_cold, strict=True)]
        table = self.tiers.table(is_on_host=False)
        result, lse = self._on_device(self.options, table, warm, self.out, self.return_lse)
        target = self.library.adopt("out", result)
        wide, wide_lse = self._part_on_device(reach, table)
        if wide.size:
            merge_into(wide, wide_lse, *self._part_on_host(reach, host_pools, of_cpu))
        for rows in self._rows_of(reach.is_cold):
            target[rows] = wide[rows]
            if lse is not None:
                of_lse = rows if self.cu_seqlens is None else (slice(None), rows)
                lse[of_lse] = wide_lse[of_lse]
        return (result, self.library.release(lse)) if self.return_lse else result

    def _on_device(
        self, options: Mapping[str, Any], table: Array, lengths: Sequence[int], out: Any, with_lse: bool
    ) -> tuple[Any, Array | None]:
        """Make an ordinary call over pages of the device."""
        put = self.tiers.put
        cu_seqlens = None if self.cu_seqlens is None else (self.cu_seqlens, None)
        own = {**options, "block_table": put(table), "kv_lengths": put(lengths)}
        return OrdinaryCall(self.q, *self.pools, own, cu_seqlens).forward(out, with_lse)

    def _part_on_device(self, reach: _Reach, table: Array) -> tuple[Array, Array]:
        """Return the part of the cold sequences' pages on the device in the accumulation's dtype; it has the sink."""
        options: dict[str, Any] = {**self.options, "out_dtype": self._accum}
        lengths = [n if cold else 0 for n, cold in zip(reach.lengths, reach.is_cold, strict=True)]
        if self._keeps_order(reach):
            lengths = [n - sum(b - a for a, b in own) for n, own in zip(lengths, reach.stretches, strict=True)]
            rows = [row[row >= 0] for row in table]
            table = np.full((len(rows), max(1, max(map(len, rows)))), -1, np.int32)
            for own, pages in zip(table, rows, strict=True):
                own[: len(pages)] = pages
        else:
            shown = np.repeat(table >= 0, self.tiers.page_size, axis=1)[:, None, None, :]
            mask = to_full_rank("mask", options.get("mask"))
            of_pages = self.tiers.xp.asarray(shown)
            options["mask"] = of_pages if mask is None else mask & of_pages
        out, lse = self._on_device(options, table, lengths, None, True)
        assert lse is not None
        return self.library.adopt("out", out), lse

    def _keeps_order(self, reach: _Reach) -> bool:
        """Return True if the device's keys may stand side by side, as if the host's between them did not exist.

        Nothing may ask for a key's place but causal, the window and ALiBi, which count from the last key. For these the
        host's keys must come before all others, or be visible to every query without regard to their distance.
        """
        given = self.options
        if any(given.get(name) is not None for name in _BY_PLACE) or given.get("dropout_p"):
            return False
        left, right = _window_of(given)
        counts = self.tiers.counts
        for sequence, (length, own) in enumerate(zip(reach.lengths, reach.stretches, strict=True)):
            if not own:
                continue
            first, stop = own[0][0], own[-1][1]
            begins = len(own) == 1 and first == 0 and stop % self.tiers.page_size == 0
            is_seen_by_all = right is None or stop <= length - counts[sequence] + right + 1
            if not begins and (left is not None or given.get("alibi_slopes") is not None or not is_seen_by_all):
                return False
        return True

    def _part_on_host(self, reach: _Reach, pools: tuple[Array, Array], of_cpu: float | None) -> tuple[Array, Array]:
        """Return the part of the host's pages, streamed or computed by the CPU, without the sink."""
        tiers = self.tiers
        given = {**self.options, "out_dtype": self._accum, "sink": None, "num_splits": None}
        table = tiers.table(is_on_host=True)
        paged: dict[str, Any] = {"block_table": table, "kv_lengths": np.array(reach.lengths, np.int32)}
        arrays = {"q": self.q, "k": pools[0], "v": pools[1]}
        if self.cu_seqlens is not None:
            arrays["cu_seqlens_q"] = self.cu_seqlens
        problem = make_problem(arrays, Options(**given, **paged))
        assert problem.pages is not None
        q_lengths = given.pop("q_lengths", None)
        rows = tiers.counts
        if q_lengths is not None:
            rows = np.clip(_on_host(q_lengths), 0, rows).tolist()
        pieces = [
            Piece(sequence, sequence + 1, own if cold else 0, length)
            for sequence, (own, cold, length) in enumerate(zip(rows, reach.is_cold, reach.lengths, strict=True))
        ]
        options = Options(**given)
        scales: dict[str, Any] = {
            name: None if (x := getattr(options, name)) is None else _on_host(x) for name in ("k_scale", "v_scale")
        }
        begins = None if tiers.begins is None else tiers.begins[:-1]
        call = Call(
            library=self.library,
            problem=problem,
            q=self.q,
            k=pools[0],
            v=pools[1],
            options=replace(options, **scales),
            pieces=tuple(pieces if begins is not None else _joined(pieces, reach.stretches)),
            host=PooledKeys(problem.pages, table),
            begins=begins,
            stretches=reach.stretches,
        )
        device = device_of(self.q)
        return _forward_pass(call, device, share_of(call, device, of_cpu, "forward"))

    @property
    def _accum(self) -> str:
        return "float32" if is_fp8(self.q) else accum_of(self.q.dtype.name)

    def _rows_of(self, is_wanted: Sequence[bool]) -> list[slice]:
        """Return the rows of some sequences: places in the batch, or rows of packed arrays."""
        begins = range(len(is_wanted) + 1) if self.tiers.begins is None else self.tiers.begins
        return [slice(begins[n], begins[n + 1]) for n, wanted in enumerate(is_wanted) if wanted]


def _joined(pieces: Sequence[Piece], stretches: Sequence[Stretches]) -> list[Piece]:
    """Make neighbouring sequences one piece where their rows, keys and stretches are equal."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last[2:] == piece[2:] and stretches[last.batch] == stretches[piece.batch]:
            joined[-1] = last._replace(batch_stop=piece.batch_stop)
        else:
            joined.append(piece)
    return joined


def _on_host(x: Array) -> Any:
    return x if isinstance(x, np.ndarray) else x.get()


def append_on_host(
    tiers: Tiers,
    rotated: Array,
    v: Array,
    host: HostPools,
    layer: int,
    scales: Mapping[str, Array | None],
) -> None:
    """Write the rows of new keys, rotated already, and values whose pages lie in host memory."""
    library = interop.library_of("k", rotated)
    arrays = {"k": rotated, "v": v, **{name: x for name, x in scales.items() if x is not None}}
    adopted = interop.adopt_all(library, arrays)
    with interop.on_stream_of(library, adopted["k"]):
        here = {name: _on_host(x) for name, x in adopted.items()}
        host.finish()
    given = {
        **here,
        "k_cache": host.k[layer],
        "v_cache": host.v[layer],
        "kv_lengths": np.array(tiers.starts, np.int32),
        "block_table": tiers.table(is_on_host=True),
    }
    if tiers.begins is not None:
        given["cu_seqlens"] = np.array(tiers.begins, np.int32)
    append(given, False)


def writes_on_host(tiers: Tiers) -> bool:
    """Return True if new positions of some sequence lie in host memory."""
    bounds = zip(tiers.starts, tiers.lengths, strict=True)
    return any(tiers.on_host(sequence, start, length) for sequence, (start, length) in enumerate(bounds))
