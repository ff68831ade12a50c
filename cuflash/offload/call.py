"""One call with keys in host memory: its checked arguments, and their copies for each device with a share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cuflash import interop
from cuflash.frontend.partial import Part
from cuflash.offload.device import Device
from cuflash.offload.devices import HostDevice
from cuflash.offload.host_keys import HostKeys, PooledKeys
from cuflash.offload.stream import Chunk, Piece
from cuflash.problem import checks
from cuflash.problem.attention_problem import AttentionProblem, Place
from cuflash.problem.gradients import extras_of
from cuflash.problem.make import make_problem
from cuflash.problem.operands import to_full_rank
from cuflash.problem.options import Options, check_names
from cuflash.problem.own_rules import check_operands

if TYPE_CHECKING:
    from cuflash.masks.block_mask import BlockMask

Array = Any
# _ARRAYS are options that are arrays on q's device, and _OF_KEYS may also lie where the keys do.
_ARRAYS = ("bias", "mask", "alibi_slopes", "sink", "q_lengths", "kv_lengths", "block_table", "q_scale")
_OF_KEYS = ("k_scale", "v_scale")
# SUPPORTED options hold for a chunk as `Side.part` cuts them; the meaning of others would change with its place.
SUPPORTED = (
    *("causal", "window", "softmax_scale", "softcap", "dropout_p", "dropout_seed", "block_mask", "deterministic"),
    *("precision", *_ARRAYS, *_OF_KEYS, "score_mod", "mask_mod", "operands", "num_splits", "split_size", "out_dtype"),
)


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call."""

    library: interop.Library
    problem: AttentionProblem
    q: Array  # of NumPy or CuPy
    k: Array  # of NumPy, as v
    v: Array
    options: Options  # with arrays of q's kind, and scales of keys and values of NumPy
    pieces: tuple[Piece, ...]
    host: HostKeys  # where k and v have the keys of a chunk
    begins: tuple[int, ...] | None = None  # where the rows of packed sequences begin; their pieces are of one sequence
    # `stretches` are the keys (first, stop) of each sequence that lie in host memory, where others lie elsewhere.
    stretches: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def extras(self) -> dict[str, Array]:
        """The differentiable options that were given, in the order of their gradients."""
        return extras_of(self.options)

    def seen_keys(self, piece: Piece) -> tuple[int, int]:
        """Return the first key of a piece that causal and the window show to some query, and one behind the last."""
        left, right = self.problem.window_left, self.problem.window_right
        first = 0 if left is None else max(0, piece.diagonal - left)
        stop = piece.keys if right is None else min(piece.keys, piece.rows + piece.diagonal + right)
        return first, max(first, stop) if piece.rows else first

    def keys_of(self, piece: Piece) -> list[tuple[int, int]]:
        """Return the stretches (first, stop) of a piece's keys in host memory that some query may see."""
        first, stop = self.seen_keys(piece)
        if self.stretches is None:
            return [(first, stop)]
        cut = [(max(a, first), min(b, stop)) for a, b in self.stretches[piece.batch]]
        return [(a, b) for a, b in cut if a < b]

    def rows_of(self, x: Array, piece: Piece) -> Array:
        """Return a piece's rows (sequences, rows, ...) of an array like q or out."""
        if self.begins is None:
            return x[piece.batches, : piece.rows]
        begin = self.begins[piece.batch]
        return x[None, begin : begin + piece.rows]

    def lse_of(self, x: Array, piece: Piece) -> Array:
        """Return a piece's rows (sequences, heads, rows) of an array like lse."""
        if self.begins is None:
            return x[piece.batches, :, : piece.rows]
        begin = self.begins[piece.batch]
        return x[None, :, begin : begin + piece.rows]

    @property
    def most_rows(self) -> int:
        """The most queries of one sequence."""
        return self.problem.seqlen_q if self.begins is None else max((piece.rows for piece in self.pieces), default=0)

    @property
    def num_keys(self) -> int:
        """The keys of all sequences that have queries, whether or not they are in use."""
        pieces = [piece for piece in self.pieces if piece.rows]
        if self.stretches is None:
            return sum(piece.batch_stop - piece.batch for piece in pieces) * self.problem.seqlen_k
        return sum(b - a for piece in pieces for own in self.stretches[piece.batches] for a, b in own)

    @property
    def bytes_per_key(self) -> int:
        """The bytes of one key and its value, of all heads of one sequence."""
        return int(self.k.shape[2] * (self.k.shape[3] + self.v.shape[3]) * self.k.dtype.itemsize)


def prepare(q: Any, k: Any, v: Any, keywords: Mapping[str, Any]) -> Call:
    """Check a call; lengths are read here, as only the keys in use are to come over the link."""
    check_names(keywords)
    check_supported(keywords)
    library = interop.library_of("q", q)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, as keys and values lie in host memory, got {_kind(x)}")
        interop.refuse_masked(name, x)
    options = Options(**keywords)
    of_keys = {name: x for name in _OF_KEYS if isinstance(x := getattr(options, name), np.ndarray)}
    for name, x in of_keys.items():
        interop.refuse_masked(name, x)
    names = *_ARRAYS, *(name for name in _OF_KEYS if name not in of_keys)
    given = {name: x for name in names if (x := getattr(options, name)) is not None}
    if hasattr(options.dropout_seed, "shape"):
        given["dropout_seed"] = options.dropout_seed
    operands = {f"operands[{n}]": x for n, x in enumerate(check_operands(options.operands))}
    adopted = interop.adopt_all(library, {"q": q, **given, **operands})
    options = replace(options, **{name: adopted[name] for name in given})
    options = replace(options, operands=tuple([adopted[name] for name in operands]))
    q = adopted["q"]
    problem = make_problem({"q": q, "k": k, "v": v}, options)
    checks.check_seed(options.dropout_seed, problem.dropout_p)
    if problem.has_fp8_keys:  # CuPy has no such dtype, but takes their bytes
        k, v = k.view(np.uint8), v.view(np.uint8)
    with interop.on_stream_of(library, q):
        pieces = _pieces(problem, options)
        scales = {name: _on_host(getattr(options, name)) for name in _OF_KEYS}
        options = replace(options, **scales)
        table = _on_host(options.block_table)
    host = HostKeys() if problem.pages is None else PooledKeys(problem.pages, table)
    return Call(library, problem, q, k, v, options, pieces, host)


def check_supported(keywords: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for an option whose meaning a chunk's place would change."""
    for name, x in keywords.items():
        if name not in SUPPORTED and x is not None:
            raise NotImplementedError(f"{name}: expected None with keys in host memory, got {_kind(x)}")


def _on_host(x: Any) -> Any:
    return x if x is None or isinstance(x, np.ndarray) else x.get()


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _pieces(problem: AttentionProblem, options: Options) -> tuple[Piece, ...]:
    rows = _lengths(options.q_lengths, problem.batch, problem.seqlen_q)
    keys = _lengths(options.kv_lengths, problem.batch, problem.seqlen_k)
    pieces, first = [], 0
    for (own_rows, own_keys), group in groupby(zip(rows, keys, strict=True)):
        stop = first + len(list(group))
        pieces.append(Piece(first, stop, own_rows, own_keys))
        first = stop
    return tuple(pieces)


def _lengths(lengths: Array | None, batch: int, most: int) -> list[int]:
    if lengths is None:
        return [most] * batch
    clamped: list[int] = np.clip(_on_host(lengths), 0, most).tolist()
    return clamped


@dataclass(frozen=True)
class Side:
    """A device with its own copies of the small arrays: q and the options."""

    call: Call
    device: Device
    q: Array
    options: Options

    def shows(self, chunk: Chunk) -> bool:
        """Tell whether some element of a chunk is shown; a chunk that a block mask hides costs no copy."""
        return self._mask_of_blocks(chunk, only_some=True) is not None

    def part(self, chunk: Chunk, k: Array, v: Array) -> Part:
        """Return a chunk's keys as a part of the whole; the sink is no part's."""
        piece, options, problem = chunk.piece, self.options, self.call.problem
        mask = _cut(options.mask, "mask", chunk)
        if problem.block_mask:
            of_blocks = self.device.put(self._mask_of_blocks(chunk))
            mask = of_blocks if mask is None else mask & of_blocks
        own = replace(
            options,
            causal=False,
            window=(problem.window_left, problem.window_right),
            bias=_cut(options.bias, "bias", chunk),
            mask=mask,
            alibi_slopes=_cut(options.alibi_slopes, "alibi_slopes", chunk),
            sink=None,
            q_lengths=None,
            kv_lengths=None,
            block_mask=None,
            num_splits=None,
            block_table=None,
            q_scale=self._scale_of_queries(piece),
            **{name: self._scale(getattr(options, name), chunk) for name in _OF_KEYS},
        )
        place = Place(first_k=chunk.first, first_batch=piece.batch, diagonal=piece.diagonal)
        return Part(self.call.rows_of(self.q, piece), k, v, own, place)

    def _scale_of_queries(self, piece: Piece) -> Array | None:
        scale = self.options.q_scale
        if scale is None or self.call.begins is None:
            return None if scale is None else scale[place_in("q_scale", scale.shape, Chunk(piece, 0, 0))]
        return scale[None] if scale.shape[0] == 1 else self.call.rows_of(scale, piece)

    def _scale(self, scale: Array | None, chunk: Chunk) -> Any:
        own = self.call.host.scale(scale, chunk)
        return None if own is None else self.device.put(np.ascontiguousarray(own))

    def _mask_of_blocks(self, chunk: Chunk, only_some: bool = False) -> Array | None:
        """Return bools (batch | 1, heads | 1, rows, keys) on the host.

        The result is True without a block mask; with `only_some` it is True if some element is shown, else None.
        """
        if not self.call.problem.block_mask:
            return True
        block_mask, piece = cast("BlockMask", self.options.block_mask), chunk.piece
        batches = range(piece.batch, piece.batch_stop) if block_mask.shape[0] > 1 else range(1)
        heads = range(block_mask.shape[1])
        shape = len(batches), len(heads), piece.rows, chunk.stop - chunk.first
        mask = None if only_some else np.zeros(shape, bool)
        for b, batch in enumerate(batches):
            for head in heads:
                shown = block_mask.tile_visible(batch, head, 0, piece.rows, chunk.first, chunk.stop)
                if shown is not None and mask is None:
                    return True
                if shown is not None and mask is not None:
                    mask[b, head] = shown
        return mask


def place_in(name: str, shape: tuple[int, ...], chunk: Chunk) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a chunk's elements in an option of full rank; operands of rules have no axis of it."""
    if name not in _ARRAYS:
        return (...,)
    whole, piece = slice(None), chunk.piece
    if name == "alibi_slopes":
        return (piece.batches if shape[0] > 1 else whole, whole)
    own: tuple[slice, ...] = (piece.batches, whole, slice(piece.rows), chunk.keys)
    if name == "q_scale":
        own = piece.batches, slice(piece.rows), whole
    return tuple(index if size > 1 else whole for index, size in zip(own, shape, strict=True))


def _cut(x: Array | None, name: str, chunk: Chunk) -> Array | None:
    full = to_full_rank(name, x)
    return None if full is None else full[place_in(name, full.shape, chunk)]


def side_of(call: Call, device: Device) -> Side:
    """Return the side of q's own device."""
    return Side(call, device, call.q, call.options)


def cpu_side_of(call: Call, device: Device) -> Side:
    """Return the CPU's side, with copies of the arrays on q's device."""
    if device.is_host:
        return Side(call, device, call.q, call.options)
    given = {name: x for name in _ARRAYS if (x := getattr(call.options, name)) is not None}
    if hasattr(call.options.dropout_seed, "shape"):
        given["dropout_seed"] = call.options.dropout_seed
    options = replace(call.options, **{name: device.get(x) for name, x in given.items()})
    options = replace(options, operands=tuple([device.get(x) for x in options.operands]))
    return Side(call, HostDevice(), device.get(call.q), options)
