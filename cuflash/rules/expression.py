"""Expressions of a rule are typed and immutable, and equal ones are one object.

A node's dtype is the name of a NumPy dtype; every floating one is that of the accumulation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

# A rule is given these numbers: the score, and where it stands.
INDICES = ("b", "h", "i", "j")
SCORE = "s"
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


class Node:
    """One operation of an expression.

    `op` is "constant", "input" (its name is the value), "load" (the value is the operand's number, the arguments are
    the indices), "cast", "where", or the name of NumPy's function that does the same.
    """

    __slots__ = ("__weakref__", "args", "dtype", "op", "value")

    op: str
    dtype: str
    args: tuple[Node, ...]
    value: Any

    def __deepcopy__(self, memo: Any) -> Node:
        return self  # equal nodes are one object

    @property
    def is_float(self) -> bool:
        """The node is a floating-point number, and so has a derivative."""
        return self.dtype.startswith("float")

    @property
    def is_constant(self) -> bool:
        """The node is a known number."""
        return self.op == "constant"


_nodes: WeakValueDictionary[Any, Node] = WeakValueDictionary()
_lock = threading.Lock()


def node(op: str, dtype: str, args: Iterable[Node] = (), value: Any = None) -> Node:
    """Return the one node of this operation on these arguments."""
    args = tuple(args)
    # The text of a constant stands in the key, because it tells -0.0 from 0.0 and a NaN's equals itself.
    key = (op, dtype, tuple([id(x) for x in args]), repr(value))
    with _lock:
        found = _nodes.get(key)
        if found is None:
            found = Node()
            found.op, found.dtype, found.args, found.value = op, dtype, args, value
            _nodes[key] = found
        return found


def constant(value: Any, dtype: str) -> Node:
    """Return the node of a number of a dtype."""
    with np.errstate(all="ignore"):
        return node("constant", dtype, value=np.dtype(dtype).type(value).item())


def input_node(name: str, dtype: str) -> Node:
    """Return the node of the score or of an index."""
    return node("input", dtype, value=name)


def in_order(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield every node that the roots need, each behind its arguments."""
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            current, is_ready = stack.pop()
            if current in seen:
                continue
            if is_ready:
                seen.add(current)
                yield current
            else:
                stack.append((current, True))
                stack += [(x, False) for x in reversed(current.args) if x not in seen]


def loads_of(root: Node) -> tuple[Node, ...]:
    """Return the elements of floating-point operands that an expression reads, by operand, each once."""
    found = [x for x in in_order((root,)) if x.op == "load" and x.is_float]
    return tuple(sorted(found, key=lambda x: x.value))


def text_of(root: Node) -> str:
    """Write an expression as a line of text; nodes that are used often have lines of their own before it."""
    uses: dict[Node, int] = {}
    order = list(in_order((root,)))
    for x in order:
        for arg in x.args:
            uses[arg] = uses.get(arg, 0) + 1
    texts: dict[Node, str] = {}
    lines: list[str] = []
    for x in order:
        text = _text(x, [texts[arg] for arg in x.args])
        if x.args and uses.get(x, 0) > 1:
            name = f"t{len(lines)}"
            lines.append(f"{name} = {text}")
            text = name
        texts[x] = text
    return "\n".join([*lines, texts[root]])


_SIGNS = {
    **dict(zip(COMPARISONS, ("==", "!=", "<", "<=", ">", ">="), strict=True)),
    **{"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//", "remainder": "%"},
    **{"power": "**", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"},
}


def _text(x: Node, args: list[str]) -> str:
    if x.op == "constant":
        return repr(x.value)
    if x.op == "input":
        return str(x.value)
    if x.op == "load":
        return f"operands[{x.value}][{', '.join(args) or '()'}]"
    if x.op == "cast":
        return f"{x.dtype}({args[0]})"
    if x.op in _SIGNS:
        return f"({args[0]} {_SIGNS[x.op]} {args[1]})"
    return f"{x.op}({', '.join(args)})"
