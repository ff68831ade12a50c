"""The heads that one product computes together."""

from __future__ import annotations

from typing import NamedTuple


class Heads(NamedTuple):
    """Query heads, whole groups or a part of one, and the KV heads that they read."""

    first: int
    stop: int
    first_kv: int
    stop_kv: int

    @property
    def query(self) -> slice:
        """The query heads."""
        return slice(self.first, self.stop)

    @property
    def kv(self) -> slice:
        """The KV heads."""
        return slice(self.first_kv, self.stop_kv)

    @property
    def counts(self) -> tuple[int, int]:
        """KV heads, and query heads of each."""
        kv_heads = self.stop_kv - self.first_kv
        return kv_heads, (self.stop - self.first) // kv_heads
