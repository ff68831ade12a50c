"""The kinds of products on wide elements (float64, float32 as float16 parts, tf32), and the GPUs on which they pay.

`wide_tiles` has their tiles and `wide` their kernels' configurations.
"""

from __future__ import annotations

import re

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES
from cuflash.plan.record import AMPERE, BLACKWELL, HOPPER, Capability
from cuflash.plan.split.kernels import KEY_PARTS, PARTS
from cuflash.problem.attention_problem import AttentionProblem

# float16 parts of an element of v and dout, by kind of products; float64 has whole elements.
PARTS_OF = {"float32": PARTS[None], "tf32": PARTS["tf32"], "float64": 0}
# The GPUs whose products of float64 are faster than their multiply-adds.
FLOAT64 = AMPERE, HOPPER
# These words in a card's name tell that it adds products of float16 in float32 at half the rate, which nothing else
# tells. Exact float32 takes 4.5 products for a multiply-add, which pays there only in gradients up to head dim 64.
HALF_RATE = "GeForce", "A10G", "L20", "L40", "GB10"


def kind_of(problem: AttentionProblem) -> str:
    """The kind of products that a problem is computed with: its precision for float32, else its dtype."""
    return problem.precision if problem.dtype == "float32" and problem.precision else problem.dtype


def pays(problem: AttentionProblem, name: str, gradients: bool) -> bool:
    """Return True if tensor cores are faster for a problem than multiply-adds on a card of this name."""
    is_small = gradients and max(problem.head_dim, problem.head_dim_v) <= 64
    return is_small or kind_of(problem) != "float32" or set(HALF_RATE).isdisjoint(re.findall(r"\w+", name))


def multiplies(kind: str, capability: Capability) -> bool:
    """Return True if products of this kind are faster than multiply-adds."""
    return capability in FLOAT64 if kind == "float64" else kind in PARTS_OF and capability >= AMPERE


def dtype_of(kind: str) -> str:
    """The dtype of the arrays that are multiplied by this kind of products."""
    return "float32" if PARTS_OF[kind] else kind


def family_of(kind: str) -> str:
    """The beginning of the entries of kernels for this kind of products."""
    return "parts" if PARTS_OF[kind] else "wide"


def element_bytes(kind: str) -> tuple[int, int]:
    """Bytes of an element of queries and keys, and of values and dout, in shared memory."""
    parts = PARTS_OF[kind]
    return (KEY_PARTS[parts] * HALF_BYTES, parts * HALF_BYTES) if parts else (2 * FLOAT_BYTES, 2 * FLOAT_BYTES)


def has_few_registers(kind: str, capability: Capability) -> bool:
    """Return True if kernels for this kind have smaller tiles on a GPU, whose compiler takes more registers."""
    return kind == "float32" and capability >= BLACKWELL
