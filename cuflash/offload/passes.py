"""The two passes compute chunks of keys on q's device and the rest on the CPU at the same time, and their sums."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cuflash.frontend.combine import Residuals, gradient_of_sink
from cuflash.frontend.partial import merge_parts
from cuflash.offload.call import Call, Side, cpu_side_of, place_in, side_of
from cuflash.offload.device import CHUNK_BYTES, Device
from cuflash.offload.devices import HostDevice
from cuflash.offload.host_keys import GradientSide
from cuflash.offload.share import Measurement, Share
from cuflash.offload.stream import Chunk, Outbox, Piece, chunks_of, incoming
from cuflash.problem.attention_problem import PartialResult
from cuflash.problem.merging import merge_into
from cuflash.problem.operands import to_full_rank

Array = Any
Grads = dict[str, Array]
# Results of so many queries are small compared with the keys that several threads read for them at once.
_FEW_QUERIES = 64
# So many results of chunks are merged at a time: as many as take the memory of two chunks, within these bounds.
_FEWEST_PARTS, _MOST_PARTS = 4, 16


def forward(call: Call, device: Device, share: Share) -> tuple[Array, Array]:
    """Return out and lse in the accumulation's dtype, on q's device."""
    with device:
        own, others = _split(call, device, share)
        side = side_of(call, device)
        found: list[tuple[Array, Array]] = []
        work = _cpu_work(call, device, others, lambda cpu, chunks: found.append(_forward_of(cpu, chunks, None)))
        share.begin(device)
        with _Beside(work, in_turn=_needs_no_host(call, device)) as cpu:
            out, lse = _forward_of(side, own, call.options.sink, share.measurement)
            cpu.join()
        for cpu_out, cpu_lse in found:
            merge_into(out, lse, device.put(cpu_out), device.put(cpu_lse))
        share.end(device, own, others, cpu.seconds)
    return out, lse.astype(call.problem.accum_dtype, copy=False)


def _forward_of(
    side: Side, chunks: Sequence[Chunk], sink: Array | None, measurement: Measurement | None = None
) -> tuple[Array, Array]:
    """Return one side's results, which begin with the sink, whose value is 0; lse is float64 until all is merged."""
    totals = _Totals(side, sink)
    for chunk, results in _results_of(side, chunks):
        if results is not None:
            totals.add(chunk.piece, *results)
        if measurement is not None:
            measurement.chunk_done(side.device, chunk)
    results = totals.end()
    if measurement is not None:
        measurement.all_done(side.device)
    return results


class _Totals:
    """The results of all keys of one side; those of several chunks are merged in one launch."""

    def __init__(self, side: Side, sink: Array | None) -> None:
        self._side, self._sink = side, sink
        self._results: tuple[Array, Array] | None = None  # of the pieces so far, once there are several
        self._piece: Piece | None = None
        self._parts: list[PartialResult] = []

    def end(self) -> tuple[Array, Array]:
        """Return out and lse of all rows."""
        problem = self._side.call.problem
        if self._results is None and self._sink is None and self._parts and len(self._side.call.pieces) == 1:
            merged = self._merged()
            assert merged.lse is not None
            if merged.x.shape == problem.out_shape:
                return merged.x, merged.lse.astype(np.float64, copy=False)
        self._merge()
        return self._all()

    def add(self, piece: Piece, out: Array, lse: Array) -> None:
        """Keep a chunk's results, and merge those that are kept where they take too much memory."""
        if self._piece != piece:
            self._merge()
        self._piece = piece
        self._parts.append(PartialResult(out, lse, 0))
        most = max(_FEWEST_PARTS, min(2 * self._side.device.chunk_bytes // max(1, out.nbytes), _MOST_PARTS))
        if len(self._parts) == most:
            self._parts = [self._merged()]

    def _all(self) -> tuple[Array, Array]:
        """Return the results of the pieces so far, which begin with the sink."""
        if self._results is None:
            problem, call, xp = self._side.call.problem, self._side.call, self._side.device.xp
            self._results = (
                xp.zeros(problem.out_shape, problem.accum_dtype),
                xp.full(problem.lse_shape, -np.inf, np.float64),
            )
            if self._sink is not None:
                for piece in call.pieces:
                    call.lse_of(self._results[1], piece)[...] = self._sink[:, None]
        return self._results

    def _merge(self) -> None:
        """Merge what is kept into the results of all pieces."""
        if self._piece is None or not self._parts:
            return
        (out, lse), merged, call = self._all(), self._merged(), self._side.call
        self._parts = []
        assert merged.lse is not None
        merge_into(call.rows_of(out, self._piece), call.lse_of(lse, self._piece), merged.x, merged.lse)

    def _merged(self) -> PartialResult:
        first = self._parts[0]
        if len(self._parts) == 1:
            return first
        xp = self._side.device.xp
        out, lse = xp.empty_like(first.x), xp.empty_like(first.lse)
        merge_parts(self._parts, out, lse)
        return PartialResult(out, lse, 0)


def _results_of(side: Side, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, tuple[Array, Array] | None]]:
    """Yield each chunk in order with its out and lse, None where no query sees a key."""

    @np.errstate(all="ignore")  # the setting holds for one thread only
    def compute(arrived: tuple[Chunk, Array, Array]) -> tuple[Chunk, tuple[Array, Array] | None]:
        part = side.part(*arrived)
        return arrived[0], part.forward() if part.sees_anything else None

    arriving = incoming(side.device, chunks, side.call.k, side.call.v, side.call.host.rows)
    lanes = max(1, min(len(chunks), _lanes(side)))
    if lanes == 1:
        yield from map(compute, arriving)
        return
    arrived = list(arriving)  # these are views on the host
    with ThreadPoolExecutor(lanes, "cuflash") as threads:
        try:
            begun = [threads.submit(compute, each) for each in arrived]
        except RuntimeError:  # no thread can be started
            begun = []
        for computed in begun:
            yield computed.result()
    if not begun:
        yield from map(compute, arrived)


def _lanes(side: Side) -> int:
    """Return how many chunks are computed at once; one of few queries has a thread for each sequence and KV head."""
    problem = side.call.problem
    if not side.device.is_host or side.call.most_rows > _FEW_QUERIES or side.call.host.is_copied:
        return 1
    return -(-(os.cpu_count() or 1) // max(1, problem.batch * problem.num_heads_kv))


def backward(
    call: Call, device: Device, share: Share, residuals: Residuals, targets: Grads, wanted: frozenset[str]
) -> Grads:
    """Write dk and dv to the host's `targets`, and return the other wanted gradients, in the accumulation's dtype."""
    with device:
        own, others = _split(call, device, share)
        side = side_of(call, device)
        of_keys = call.host.gradients(targets, (*own, *others), call.problem.accum_dtype)
        found: list[Grads] = []
        # The caller's thread copies these, because its current stream has made them.
        dout, out, lse, dlse = ((None if x is None else device.get(x)) if others else x for x in residuals)

        def on_cpu(cpu: Side, chunks: Sequence[Chunk]) -> None:
            found.append(_backward_of(cpu, chunks, (dout, out, lse, dlse), of_keys.side(), wanted))

        share.begin(device)
        with _Beside(_cpu_work(call, device, others, on_cpu)) as cpu:
            grads = _backward_of(side, own, residuals, of_keys.side(), wanted, share.measurement)
            cpu.join()
        of_keys.end()
        if "sink" in wanted:
            xp = device.xp
            inside = np.zeros(call.problem.lse_shape, bool)
            for piece in call.pieces:
                call.lse_of(inside, piece)[...] = True
            grads["sink"] = gradient_of_sink(call.options.sink, xp.asarray(inside), residuals)
        for shares in found:
            for name, x in shares.items():
                grads[name] += device.put(x)
        share.end(device, own, others, cpu.seconds)
    return grads


def _backward_of(
    side: Side,
    chunks: Sequence[Chunk],
    residuals: Residuals,
    of_keys: GradientSide,
    wanted: frozenset[str],
    measurement: Measurement | None = None,
) -> Grads:
    """Return one side's sums, apart from the sink's; its dk and dv go to the host."""
    call, xp, accum = side.call, side.device.xp, side.call.problem.accum_dtype
    like = {"q": side.q, **{name: to_full_rank(name, x) for name, x in call.extras.items()}}
    grads = {name: xp.zeros(x.shape, accum) for name, x in like.items() if name in wanted and name != "sink"}
    outbox = Outbox(side.device)
    for chunk, k, v in incoming(side.device, chunks, call.k, call.v, call.host.rows):
        part, piece = side.part(chunk, k, v), chunk.piece
        q_rows = piece.batches, slice(piece.rows)
        dout, out, lse, dlse = residuals
        of_lse = [None if x is None else call.lse_of(x, piece) for x in (lse, dlse)]
        shares: Grads = {}
        if part.sees_anything:
            shares = part.backward(
                call.rows_of(dout, piece), call.rows_of(out, piece), of_lse[0], of_lse[1], wanted - {"sink"}
            )
        for name in of_keys.names:
            of_keys.post(outbox, name, chunk, shares.pop(name, None))
        for name, x in shares.items():
            grads[name][q_rows if name == "q" else place_in(name, grads[name].shape, chunk)] += x
        if measurement is not None:
            measurement.chunk_done(side.device, chunk)
    if measurement is not None:
        measurement.all_done(side.device)
    outbox.finish()
    return grads


def _split(call: Call, device: Device, share: Share) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of q's device and those of the CPU, which has the last seen keys of each sequence."""
    own: list[Chunk] = []
    others: list[Chunk] = []
    side = side_of(call, device)
    of_device, of_cpu = device.chunk_bytes, HostDevice.chunk_bytes
    if call.problem.block_mask:  # the mask's bools of a chunk take memory, too
        of_device, of_cpu = (min(size, CHUNK_BYTES) for size in (of_device, of_cpu))
    for piece in call.pieces:
        stretches = call.keys_of(piece)
        total = sum(b - a for a, b in stretches)
        left = total - round(share.of_cpu * total)  # keys of the device, which are the first ones
        for first, stop in stretches:
            middle = min(stop, first + left)
            left -= middle - first
            for chunks, a, b in ((own, first, middle), (others, middle, stop)):
                size = of_device if chunks is own else of_cpu
                found = chunks_of(piece, a, b, call.bytes_per_key, size, call.problem.split_size)
                chunks.extend(chunk for chunk in found if side.shows(chunk))
    return own, others


def _cpu_work(
    call: Call, device: Device, chunks: Sequence[Chunk], work: Callable[[Side, Sequence[Chunk]], None]
) -> Callable[[], None] | None:
    """Return the CPU's work; the caller's thread and its current stream copy what lies on q's device now."""
    if not chunks:
        return None
    side = cpu_side_of(call, device)
    return lambda: work(side, chunks)


def _needs_no_host(call: Call, device: Device) -> bool:
    """Return True if all of the device's work is enqueued at once, and goes on while this thread does other work.

    Another thread's work would take the interpreter's lock from this one, and the link would wait.
    """
    return all(device.brings_alone(x) for x in (call.k, call.v))


class _Beside:
    """Work that a thread of its own does within a context, or `join`: in turn, or where no thread can be started."""

    def __init__(self, work: Callable[[], None] | None, *, in_turn: bool = False) -> None:
        self._work, self._in_turn = work, in_turn
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.seconds = 0.0

    def __enter__(self) -> _Beside:
        if self._work is not None and not self._in_turn:
            thread = threading.Thread(target=self._run, name="cuflash")
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread, so that none reads the caller's arrays behind an error."""
        if self._thread is not None:
            self._thread.join()

    def join(self) -> None:
        """Wait, and raise what the work raised."""
        if self._thread is not None:
            self._thread.join()
        else:
            self._run()
        if self._error is not None:
            raise self._error

    @np.errstate(all="ignore")  # the setting holds for one thread only
    def _run(self) -> None:
        start = time.perf_counter()
        try:
            if self._work is not None:
                self._work()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - start
