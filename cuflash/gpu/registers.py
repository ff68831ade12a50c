"""Kernels with users' own rules are chosen by the registers that they are met to take.

How many registers a rule takes is known only when a kernel with it is compiled. So a family's plan has several
candidates for a problem with rules, and the first is taken whose threads keep everything in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

from cuflash.gpu.launch import Kernel, Work
from cuflash.rules.expression import in_order
from cuflash.rules.form import NO_RULES, Rules

# The compiler's sine and cosine keep an array in local memory, for large arguments only; it takes at most so many
# bytes.
_OF_TURNS, _TURNS_BYTES = {"sin", "cos"}, 48

T = TypeVar("T")


def choose(
    work: Work, candidate: Callable[[int], T], kernels: Callable[[T], Iterable[Kernel]], spills: bool = True
) -> T | None:
    """Return the first candidate whose `kernels` do not spill registers, or None.

    `candidate` gives the candidate of a number, from 0 on, and behind the last one this again; it is false where there
    is none at all. Where all spill and that is allowed (`spills`), the one that spills least is taken. Without rules
    the first is taken, which the tests of the tables have seen compiled.
    """
    own = least = candidate(0)
    if not own or work.problem.rules == NO_RULES:
        return own or None
    least_bytes = math.inf
    for number in count(1):
        spilled = sum(_spilled(kernel, work) for kernel in kernels(own))
        if spilled == 0:
            return own
        if spilled < least_bytes:
            least, least_bytes = own, spilled
        before, own = own, candidate(number)
        if own == before:
            return least if spills else None
    raise AssertionError("there is a last candidate")


def _spilled(kernel: Kernel, work: Work) -> int:
    found = kernel.load(work.device).local_bytes
    return 0 if found <= _allowed(kernel.rules) else found


def _allowed(rules: Rules) -> int:
    roots = [x for x in (rules.score, rules.visible) if x is not None]
    return _TURNS_BYTES if any(x.op in _OF_TURNS for x in in_order(roots)) else 0
