"""Exact attention over a sequence that is spread over ranks: GPUs, processes or threads.

Every rank calls the same functions with its own part of the sequence (`shard`), in the same order, and gets its own
part of the result. A rank's rows do not stand at positions 0, 1, 2, ...: whoever encodes positions, as rotary
embeddings do, asks `positions` for them.
"""

from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import from_environment
from cuflash.distributed.heads import ulysses_attention, ulysses_attention_backward, ulysses_attention_vjp
from cuflash.distributed.rank_threads import threads
from cuflash.distributed.ring import ring_attention, ring_attention_backward, ring_attention_vjp
from cuflash.distributed.sharding import positions, shard, unshard
from cuflash.distributed.tensor_parallel import attention_allreduce, attention_allreduce_vjp

__all__ = [
    "Communicator",
    "attention_allreduce",
    "attention_allreduce_vjp",
    "from_environment",
    "positions",
    "ring_attention",
    "ring_attention_backward",
    "ring_attention_vjp",
    "shard",
    "threads",
    "ulysses_attention",
    "ulysses_attention_backward",
    "ulysses_attention_vjp",
    "unshard",
]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)
