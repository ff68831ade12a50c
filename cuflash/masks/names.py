"""The names that users see of `BlockMask`, and what other libraries' names of constructors are called here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cuflash import hints
from cuflash.masks.prepared import PreparedMask


class OfMasks(type):
    """The class of `BlockMask`, which hides what is for backends, and knows names of other libraries."""

    if not TYPE_CHECKING:  # else checkers would believe that there is every name

        def __getattr__(cls, name: str) -> Any:
            raise hints.no_attribute(f"type object {cls.__name__!r}", name, hints.CONSTRUCTORS)

    def __dir__(cls) -> list[str]:
        """The names for users, and Python's own."""
        return names_for_users(super().__dir__())


def names_for_users(names: Iterable[str]) -> list[str]:
    """Return the names without those for backends."""
    internal = vars(PreparedMask).keys() | {"serial"}
    return [name for name in names if name.startswith("__") or not (name.startswith("_") or name in internal)]
