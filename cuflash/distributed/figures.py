"""Measured figures of kernels and links, which `plan` computes with: bfloat16 on an H200 with NVLink."""

from __future__ import annotations

from typing import NamedTuple

CARD = "NVIDIA H200, bfloat16"
GPUS_PER_HOST = 8
GPU_MEMORY = 139 << 30

# TFLOP/s of visible pairs of one GPU by (head_dim, causal), each for `SEQLENS`; from docs/lab/results (suite "dense").
SEQLENS = (1024, 4096, 16384)
FORWARD: dict[tuple[int, bool], tuple[int, int, int]] = {
    (64, False): (450, 547, 564),
    (64, True): (367, 492, 538),
    (128, False): (657, 692, 728),
    (128, True): (498, 664, 747),
    (256, False): (691, 726, 745),
    (256, True): (551, 688, 752),
}
BACKWARD: dict[tuple[int, bool], tuple[int, int, int]] = {
    (64, False): (463, 544, 560),
    (64, True): (350, 504, 560),
    (128, False): (517, 598, 614),
    (128, True): (414, 569, 617),
    (256, False): (387, 485, 502),
    (256, True): (308, 446, 509),
}

# GB/s of one message by its bytes; figures between these follow the logarithm of the bytes.
PEER_COPY = {1 << 20: 221.0, 16 << 20: 366.0, 64 << 20: 395.0}
ALL_TO_ALL = {1 << 20: 26.0, 64 << 20: 260.0, 1 << 30: 327.0}
# Seconds before the first byte of a collective arrives.
LATENCY = 33e-6
# The host's seconds before a rank's GPU begins a call over several, and for each exchange of heads in it, fitted to the
# calls below, which vary by a tenth from run to run.
HOST = 0.22e-3
# Attention takes so many times as long while copies run at the same time.
UNDER_COPIES = 1.055
# GB/s at which merges of partial results read and write, as decoding reads keys.
MEMORY_RATE = 4100.0
# This link between hosts is assumed and not measured: one network card of 400 Gbit/s for each GPU.
ASSUMED_NETWORK = 50.0


class Measured(NamedTuple):
    """TFLOP/s a GPU of one causal layer, as measured."""

    gpus: int
    scheme: str
    seqlen: int  # of all GPUs
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    forward: float
    backward: float


# The first two are one GPU's kernels on the work that one of four has, with 16 heads and 8k and 32k tokens a GPU; the
# others are this library's schemes on two GPUs, from docs/lab/results (ring_processes.jsonl with 8k tokens a GPU,
# ring.jsonl with 32k). Nothing was measured on four since.
MEASURED = (
    Measured(1, "one GPU", 32 << 10, 4, 4, 128, 806, 570),
    Measured(1, "one GPU", 128 << 10, 4, 4, 128, 728, 570),
    Measured(2, "ring", 16 << 10, 16, 16, 128, 451, 433),
    Measured(2, "ring", 64 << 10, 16, 16, 128, 680, 557),
    Measured(2, "heads", 16 << 10, 16, 16, 128, 296, 432),
    Measured(2, "heads", 64 << 10, 16, 16, 128, 661, 554),
)
# Every plan says for these of the measured figures how far its predictions are off.
HELD_AGAINST = (1, 2, 4)
