"""C++ structs that the host packs are described once, for a NumPy dtype and for the text of their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Member(NamedTuple):
    """One member of a struct."""

    name: str
    cpp_type: str
    dtype: Any  # the NumPy dtype of the same size and alignment
    comment: str = ""  # C++ shows it behind the member


class Struct:
    """A struct of a kernel's source, and the dtype with which the host fills it.

    A source includes ``"NAME.members"`` in the struct's braces, where functions may follow, and behind them
    ``"NAME.layout"``, which asserts on the device that every member lies where the dtype has it.
    """

    def __init__(self, name: str, members: Sequence[Member]) -> None:
        self.name = name
        self._members = tuple(members)
        self.dtype = np.dtype([(member.name, member.dtype) for member in members], align=True)

    def extended(self, members: Sequence[Member]) -> Struct:
        """Return the struct with further members behind its own, which stay where they are."""
        return Struct(self.name, (*self._members, *members))

    def offset(self, member: str) -> int:
        """Return the offset of a member, in bytes."""
        assert self.dtype.fields is not None
        return int(self.dtype.fields[member][1])

    @property
    def headers(self) -> dict[str, str]:
        """The generated headers, by the names under which sources include them."""
        members = [
            f"  {member.cpp_type} {member.name};" + (f"  // {member.comment}" if member.comment else "")
            for member in self._members
        ]
        layout = [
            f'static_assert(OFFSET_OF({self.name}, {member.name}) == {self.offset(member.name)}, "{member.name}");'
            for member in self._members
        ]
        layout.append(f'static_assert(sizeof({self.name}) == {self.dtype.itemsize}, "{self.name}");')
        return {f"{self.name}.members": "\n".join(members), f"{self.name}.layout": "\n".join(layout)}
