"""GPT-2 whose sequence is spread over ranks: each has all parameters and a part of every sequence's tokens.

Everything but attention works on tokens by themselves, so that a rank needs its tokens' positions, attention over the
ring, and the mean of all ranks' gradients.
"""

from __future__ import annotations

from typing import Any

from cuflash import distributed
from cuflash.distributed.communicators import Communicator

from .model import GPT2, Backward, Config
from .ops import Array, NumpyOps

ORDER = "zigzag"


class RingGPT2(GPT2):
    """One rank's model; its losses and gradients are those of the whole sequences.

    Parameters
    ----------
    config, ops, seed
        As of `GPT2`; the same on every rank.
    comm : Communicator
        This rank's.
    watch : callable
        Wraps the attention, ``(ops, qkv) -> out, backward``.
    deterministic : bool or None
        As of `cuflash.attention`.
    """

    def __init__(
        self,
        config: Config,
        ops: NumpyOps,
        comm: Communicator,
        watch: Any,
        seed: int,
        deterministic: bool | None = None,
    ) -> None:
        self.comm = comm
        self.deterministic = deterministic
        super().__init__(config, ops, watch(self._ring_attention), seed)

    def _ring_attention(self, ops: NumpyOps, qkv: Array) -> tuple[Array, Backward]:
        q, k, v = (qkv[:, :, i] for i in range(3))
        out, backward = distributed.ring_attention_vjp(
            q, k, v, self.comm, order=ORDER, causal=True, deterministic=self.deterministic
        )

        def gradient(dout: Array) -> Array:
            return ops.xp.stack(backward(dout), axis=2)

        return out, gradient

    def loss(self, windows: Array) -> Array:
        """The mean loss of all ranks' tokens."""
        return self._mean(super().loss(windows))

    def loss_and_gradients(self, windows: Array) -> Array:
        """The same, and all of `gradients` are those of the whole sequences, on every rank."""
        loss = super().loss_and_gradients(windows)
        self.gradients[...] = self._mean(self.gradients)
        return self._mean(loss)

    def _mean(self, x: Array) -> Array:
        """The mean over ranks, which have as many tokens each."""
        total = self.comm.sum(self.ops.xp.atleast_1d(x)).reshape(x.shape) / self.comm.world
        self.comm.barrier()
        return total

    def split(self, windows: Array) -> tuple[Array, Array]:
        """This rank's tokens of the windows, and those that follow each."""
        tokens, targets = super().split(windows)
        seqlen, pieces = tokens.shape[1], 2 * self.comm.world
        if seqlen % pieces:
            raise ValueError(f"context: expected a multiple of {pieces} on {self.comm.world} ranks, got {seqlen}")
        return distributed.shard(tokens, self.comm, ORDER), distributed.shard(targets, self.comm, ORDER)

    def rows_of_positions(self, table: Array, seqlen: int) -> Array:
        """The rows of this rank's tokens: without them every rank would take its tokens for a sequence's first."""
        return table[self._positions(seqlen * self.comm.world)]

    def put_rows_of_positions(self, table: Array, rows: Array) -> None:
        """Write the rows of this rank's tokens."""
        table[self._positions(len(rows) * self.comm.world)] = rows

    def _positions(self, seqlen: int) -> Array:
        return self.ops.xp.asarray(distributed.positions(seqlen, self.comm, ORDER))
