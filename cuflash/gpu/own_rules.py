"""The gradients of the operands of users' own rules take a pass over the scores, and sums around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import Work
from cuflash.gpu.params import MOST_AXES, Arrays, begins_of_operands, folded_axes
from cuflash.gpu.portable import Tiles, WithoutTiles
from cuflash.plan.config import CPP_TYPES
from cuflash.plan.portable.kernels import plan, types_of
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.rules.expression import loads_of

_FILE = "around/operands"
_THREADS = 256
# Sums of integers stay below 2^62; a term has no more bits than a double, in either word.
_SUM_BITS, _TERM_BITS = 62, 52


@dataclass(frozen=True)
class Operands(WithoutTiles):
    """A kernel of around/operands.cu."""

    dtype: str = "float32"  # of the gradient that it writes
    begin: int = 0  # the first element that it writes among those of all gradients
    threads = _THREADS

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return (0, as no thread block is a head's, the number of thread blocks)."""
        written = [x.size for name, x in arrays.items() if name.startswith("doperand_")]
        return 0, math.ceil((written[0] if written else begins_of_operands(problem)[1]) / _THREADS)

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the bits of a term's words, and where the gradient begins."""
        return {"operand_bits": term_bits(problem), "doperand_begin": self.begin}

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which all configurations of the same types share."""
        types = {name: getattr(self.config, name) for name in ("element", "accum", "bias_element")}
        constants = {**types, "operand_element": CPP_TYPES[self.dtype], "threads": _THREADS}
        return load(_FILE, self.entry, constants, device)


@dataclass(frozen=True)
class Terms(Tiles):
    """A pass that adds to the gradients of operands."""

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the bits of a term's words."""
        return {"operand_bits": term_bits(problem)}


def term_bits(problem: AttentionProblem) -> int:
    """Return the bits of either word of a term with which the sum of all of a problem's terms fits 64 bits."""
    loads = 0 if problem.rules.score is None else len(loads_of(problem.rules.score))
    scores = (1 if problem.packed else problem.batch) * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    return max(1, min(_TERM_BITS, _SUM_BITS - math.ceil(math.log2(max(2, loads * scores)))))


def gradients(work: Work, grads: Arrays) -> None:
    """Write the gradients of operands `grads`, by name; work has delta where the problem has a rule for scores."""
    problem = work.problem
    begins, total = begins_of_operands(problem)
    if not grads or not total:
        return
    types = types_of(problem)
    in_words = bool(problem.deterministic)
    if in_words:
        sums = {"operand_words": work.empty((3, total), "uint64")}
        passes: tuple[str, ...] = "operand_maxima", "operand_words"
    else:
        sums = {"operand_sums": work.empty((total,), problem.accum_dtype)}
        passes = ("backward_operands",)
    work.run(Operands("clear_operand_words" if in_words else "clear_operand_sums", types), sums)
    if problem.rules.score is not None and loads_of(problem.rules.score):
        for entry in passes:
            kernels = [Terms(entry, config) for config in plan(problem, entry, work.device.smem_limit)]
            work.run(work.chosen(kernels), work.arrays | sums)
    for name, x in grads.items():
        for first, part in _parts(x) if x.size else ():
            kernel = Operands("write_operand", types, x.dtype.name, begins[name] + first)
            work.run(kernel, {**sums, f"d{name}": part})


def _parts(x: Array, first: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield an array, with the number of its first element, in parts of as many axes as one launch writes."""
    if len(folded_axes(x)) <= MOST_AXES:
        yield first, x
        return
    for n, part in enumerate(x):
        yield from _parts(part, first + n * part.size)
