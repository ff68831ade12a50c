"""The first call of a set of options rehearses, to know the kernels that it and later calls like it will need.

`cuda.ahead` compiles them in daemon threads: what the call itself needs first, then the kernels of other lengths, and
behind the forward pass of a vjp those of its gradients. A later call then finds its kernel, or waits for it once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash.cuda import ahead
from cuflash.cuda.device import Device
from cuflash.gpu import rule_blocks
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.choose import choose
from cuflash.gpu.launch import K, Kernel, Work
from cuflash.gpu.params import Arrays
from cuflash.kept import Kept
from cuflash.plan.config import flags_of
from cuflash.problem.attention_problem import WHOLE, Array

MOST_RECORDS = 4  # kernels of one set of options and direction, at most
# These lengths (of queries, of keys) tell plans apart: few queries, few keys, many of both.
LENGTHS = ((1, 8192), (512, 512), (8192, 8192))
_ROWS = {"q": 0, "k": 1, "v": 1, "out": 0, "dout": 0}  # axis 1 has queries or keys
_VECTORS = ("lse", "delta", "dlse")  # the last axis has queries
_met: Kept[Any, bool] = Kept()  # sets of options, each with the direction


class _Pass(NamedTuple):
    """The arguments of `choose`."""

    candidates: tuple[tuple[Kernel, ...], ...]  # the fastest first
    others_serve: bool = False


class Rehearsal(Work):
    """Work that runs nothing, and notes the kernels that it would run."""

    def __init__(self, work: Work) -> None:
        vars(self).update(vars(work))
        self.arrays = dict(work.arrays)
        self.kernels: list[Kernel] = []
        self.passes: list[_Pass] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of that shape which has the memory of one element."""
        xp = self.device.namespace
        one = xp.empty(1, dtype)
        strides = [one.dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return xp.lib.stride_tricks.as_strided(one, shape, strides)

    def chosen_pass(self, candidates: Sequence[tuple[K, ...]], others_serve: bool = False) -> tuple[K, ...]:
        """Note the candidates, and take the first of them without compiling it."""
        if not candidates:
            return ()
        self.passes.append(_Pass(tuple(candidates), others_serve))
        return candidates[0]

    def run(self, kernel: Kernel, arrays: Arrays) -> None:
        """Note the kernel."""
        self.kernels.append(kernel)

    def enqueue(self, launch: BoundLaunch, arrays: Arrays) -> None:
        """Enqueue nothing: the arrays have no memory."""

    def with_lengths(self, seqlen_q: int, seqlen_k: int) -> Rehearsal:
        """Return the rehearsal of the same work with other lengths."""
        other = Rehearsal(self)
        other.problem = rule_blocks.planned(replace(self.problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
        other.arrays = self.stretched(self.arrays, seqlen_q, seqlen_k)
        return other

    def stretched(self, arrays: Arrays, seqlen_q: int, seqlen_k: int) -> Arrays:
        """Return views as of arrays with other lengths, which nobody may read."""
        view = self.device.namespace.lib.stride_tricks.as_strided
        lengths = seqlen_q, seqlen_k
        found = dict(arrays)
        for name, x in arrays.items():
            if name in _VECTORS:
                found[name] = view(x, (*x.shape[:-1], seqlen_q), x.strides)
            elif name in _ROWS:
                found[name] = view(x, (x.shape[0], lengths[_ROWS[name]], *x.shape[2:]), x.strides)
        return found


def forward(work: Work, run: Callable[[Work], object]) -> None:
    """Compile ahead what the forward pass `run` needs, if its set of options is new; nothing is ever raised."""
    _rehearse("forward", work, lambda own, lengths: run(own))


def backward(work: Work, of_lse: Arrays, grads: Arrays, run: Callable[[Work, Arrays, Arrays], object]) -> None:
    """Do as `forward` for the gradients `grads`."""

    def of_lengths(own: Rehearsal, lengths: tuple[int, int] | None) -> None:
        given = (of_lse, grads) if lengths is None else (own.stretched(x, *lengths) for x in (of_lse, grads))
        run(own, *given)

    _rehearse(f"backward of {', '.join(grads)}", work, of_lengths)


def _rehearse(direction: str, work: Work, run: Callable[[Rehearsal, tuple[int, int] | None], object]) -> None:
    try:
        if _is_new(direction, work):
            own = Rehearsal(work)
            own.problem = rule_blocks.planned(own.problem)
            run(own, None)
            found = [own]
            for lengths in _other_lengths(work):
                other = Rehearsal(work).with_lengths(*lengths)
                run(other, lengths)
                found.append(other)
            needed = dict.fromkeys(_jobs(found[:1]))
            for job in dict.fromkeys((*needed, *_jobs(found))):
                ahead.submit(job, later=job not in needed)
    except Exception:  # the call meets what is wrong itself
        return


def _is_new(direction: str, work: Work) -> bool:
    problem, device = work.problem, work.device
    # Mixed dtypes are converted by launches of their own.
    if not device.compiler or not ahead.is_on() or work.is_captured or problem.is_mixed:
        return False
    options = flags_of(problem), problem.precision, problem.deterministic, problem.packed, problem.rules
    key = direction, device, problem.dtype, problem.bias_dtype, problem.head_dim, problem.head_dim_v, options
    is_new = key not in _met
    _met[key] = True
    return is_new


def _other_lengths(work: Work) -> Iterator[tuple[int, int]]:
    problem = work.problem
    of_scores = problem.bias is not None or problem.mask is not None or problem.block_mask
    if not (of_scores or problem.packed or problem.pages is not None or problem.place != WHOLE):
        yield from LENGTHS


@dataclass(frozen=True)
class _Job:
    """Work for a daemon thread: to choose among candidates, or to compile one kernel of the first of them."""

    device: Device
    own: _Pass
    place: int | None = None  # of the kernel in the first candidate

    def __call__(self) -> None:
        self.device.begin_thread()
        candidates, others_serve = self.own
        if self.place is not None and (len(candidates) > 1 or others_serve):
            candidates[0][self.place].spilled_bytes(self.device)  # which compiles it unless it is known to spill
            return
        chosen = choose(self.device, candidates, others_serve)
        for kernel in chosen if self.place is None else chosen[self.place : self.place + 1]:
            kernel.load(self.device)


def _jobs(rehearsals: Sequence[Rehearsal]) -> Iterator[_Job]:
    """Yield jobs for a call and for others like it, until there are as many records as a set of options has."""
    records: set[Any] = set()
    for work in rehearsals:
        firsts = {kernel for own in work.passes for kernel in own.candidates[0]}
        records.add(frozenset(firsts))
        if len(records) > MOST_RECORDS:
            return
        for own in work.passes:
            # The kernels of a pass are compiled side by side before it is chosen as a whole.
            if len(own.candidates[0]) > 1:
                yield from (_Job(work.device, own, place) for place in range(len(own.candidates[0])))
            yield _Job(work.device, own)
        yield from (_Job(work.device, _Pass(((kernel,),))) for kernel in work.kernels if kernel not in firsts)
