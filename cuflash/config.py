"""What the configurations of all families have in common. Pure, no CuPy."""

from __future__ import annotations

from dataclasses import dataclass, fields

HALF_BYTES, FLOAT_BYTES = 2, 4
# Of Hopper's blocks: barriers, the running tiles, and which keys are seen, in shared memory beside the tiles.
SMEM_BESIDE_TILES = 1024
# What heads that are computed together share is to stay in L2, of which Hopper has 50 MB.
L2_BYTES = 32 << 20
# Bound of whatever is kept by calls' metadata, for programs with ever new shapes.
MOST_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One kernel: every field but `entry` is a constant of the generated source (`block_m` -> `BLOCK_M`).

    Families add fields; another `entry` makes another kernel of the same constants.
    """

    entry: str
    element: str  # C++ type of q, k, v
    accum: str
    bias_element: str
    head_dim: int  # class: accumulators are this wide; 0 where the kernel does not depend on it
    head_dim_v: int
    block_m: int  # queries of a tile
    block_n: int  # keys
    smem_bytes: int
    has_window: bool
    has_softcap: bool
    has_bias: bool
    has_mask: bool
    has_alibi: bool
    has_dropout: bool
    has_block_mask: bool

    @property
    def flags(self) -> str:
        """The options that are compiled in, in words."""
        return ", ".join(f.removeprefix("has_") for f in FLAGS if getattr(self, f)) or "plain"

    @property
    def tile(self) -> str:
        """Queries and keys of a tile."""
        return f"{self.block_m}x{self.block_n}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError


FLAGS = tuple(f.name for f in fields(KernelConfig) if f.name.startswith("has_"))
