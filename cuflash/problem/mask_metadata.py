"""The metadata of a block mask, which is all that a call's checks know of it."""

from __future__ import annotations


class MaskMetadata:
    """The base of `cuflash.BlockMask`: shapes, and the window that shows the same; no elements."""

    shape: tuple[int, int, int, int]  # (batch or 1, heads or 1, seqlen_q, seqlen_k)
    block_size: tuple[int, int]
    serial: int  # no other mask of this process has it, alive or not

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """The option `window` that shows the same; None if none does."""
        raise NotImplementedError
