"""Predictions of times, link use and memory of attention over many GPUs, by figures of one GPU and of its links.

A step of a ring takes the longer of computing and passing on, all-to-alls of heads hide behind nothing, merges of
partial results take their reads and writes, and the host takes its time before a call begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cuflash.distributed import figures

_BYTES = 2  # of a bfloat16
_WIDE = 4  # of a partial result
# The backward pass computes five matrix products where the forward pass computes two.
_BACKWARD_WORK = 2.5
# A merge reads a part's result and reads and writes the sum.
_MERGE_ACCESSES = 3


@dataclass(frozen=True)
class Layer:
    """One layer's attention over all GPUs; seqlen_q is seqlen_k."""

    seqlen: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int = 1
    causal: bool = True

    @property
    def flops(self) -> float:
        """Operations of the forward pass: two products of all visible pairs."""
        share = 0.5 if self.causal else 1.0
        return 4.0 * share * self.batch * self.num_heads_q * self.seqlen**2 * self.head_dim


@dataclass(frozen=True)
class Machine:
    """GPUs a host, and GB/s of a GPU's link to other hosts."""

    gpus_per_host: int = figures.GPUS_PER_HOST
    network: float = figures.ASSUMED_NETWORK


@dataclass(frozen=True)
class Pass:
    """One pass of a layer, in seconds."""

    compute: float  # kernels and merges
    exposed: float  # waiting for links, behind which nothing is computed
    link_busy: float
    step_compute: float  # of one step of the ring, which hides the next
    step_link: float

    @property
    def seconds(self) -> float:
        """The pass's time from begin to end."""
        return self.compute + self.exposed

    @property
    def link_use(self) -> float:
        """The share of the time in which a GPU's link carries something."""
        return self.link_busy / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Prediction:
    """A scheme of `ring` times `heads` GPUs."""

    name: str
    ring: int  # ranks around each ring
    heads: int  # ranks among which heads are dealt
    forward: Pass
    backward: Pass
    memory: float  # bytes a GPU

    @property
    def seconds(self) -> float:
        """The time of both passes."""
        return self.forward.seconds + self.backward.seconds


def interpolated(table: Mapping[int, float], at: float) -> float:
    """Interpolate in the logarithm between a table's values; beyond its ends the values stay those of the ends."""
    points = sorted(table)
    if at <= points[0]:
        return table[points[0]]
    for low, high in zip(points[:-1], points[1:], strict=True):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return table[low] + share * (table[high] - table[low])
    return table[points[-1]]


def kernel_rate(direction: str, head_dim: int, causal: bool, seqlen: float) -> float:
    """Return FLOP/s of one GPU's kernels, from those of the next head dim that was measured."""
    rates = figures.FORWARD if direction == "forward" else figures.BACKWARD
    dims = sorted({dim for dim, _ in rates})
    dim = next((dim for dim in dims if dim >= head_dim), dims[-1])
    table = dict(zip(figures.SEQLENS, map(float, rates[dim, causal]), strict=True))
    # The kernels compute columns up to the measured head dim, too.
    return interpolated(table, seqlen) * 1e12 * min(1.0, head_dim / dim)


def predict(layer: Layer, ring: int, heads: int, machine: Machine) -> Prediction:
    """Predict a grid where `heads` ranks, as near to each other as can be, deal heads, and rings join such groups."""
    name = "one GPU" if ring * heads == 1 else "ring" if heads == 1 else "heads" if ring == 1 else "grid"
    passes = {direction: _pass(layer, ring, heads, machine, direction) for direction in ("forward", "backward")}
    return Prediction(name, ring, heads, passes["forward"], passes["backward"], _memory(layer, ring, heads))


def _pass(layer: Layer, ring: int, heads: int, machine: Machine, direction: str) -> Pass:
    is_forward = direction == "forward"
    busy = min(heads, layer.num_heads_q)  # ranks without a head wait for the others
    own_q = -(-layer.num_heads_q // busy)
    own_kv = max(1, -(-layer.num_heads_kv // busy))
    rows = layer.seqlen / ring
    work = layer.flops * (1.0 if is_forward else _BACKWARD_WORK)
    work *= own_q / layer.num_heads_q / ring**2  # of one step; in zigzag order all steps are alike
    # A step of a causal ring computes half its pairs, of which it sees all, so that its kernels have no mask.
    is_cut = layer.causal and ring == 1
    step_rows = rows / 2 if layer.causal and ring > 1 else rows
    compute = work / kernel_rate(direction, layer.head_dim, is_cut, step_rows)
    merged = 0.0
    if ring > 1:
        compute *= figures.UNDER_COPIES
        columns = own_q if is_forward else own_q + 2 * own_kv
        merged = _MERGE_ACCESSES * _WIDE * layer.batch * rows * columns * layer.head_dim / (figures.MEMORY_RATE * 1e9)
    message = 2.0 * layer.batch * rows * own_kv * layer.head_dim * (_BYTES if is_forward else _BYTES + _WIDE)
    link = message / _ring_rate(message, ring, heads, machine) if ring > 1 else 0.0
    waits = max(0.0, link - compute - merged) * (ring - 1)
    dealt, bytes_dealt = _dealing(layer, ring, heads, machine, is_forward)
    return Pass(
        compute=(compute + merged) * ring,
        exposed=waits + dealt + (figures.HOST if ring * heads > 1 else 0.0),
        link_busy=link * (ring - 1) + (dealt if bytes_dealt else 0.0),
        step_compute=compute + merged,
        step_link=link,
    )


def _ring_rate(message: float, ring: int, heads: int, machine: Machine) -> float:
    """Return bytes a second from one rank of a ring to the next, of which the slowest link counts."""
    if ring * heads <= machine.gpus_per_host:
        return interpolated(figures.PEER_COPY, message) * 1e9
    return machine.network * 1e9


def _dealing(layer: Layer, ring: int, heads: int, machine: Machine, is_forward: bool) -> tuple[float, float]:
    """Return seconds and bytes of the all-to-alls that deal heads and bring their results back."""
    if heads == 1:
        return 0.0, 0.0
    tokens = layer.batch * layer.seqlen / (ring * heads)
    # In the forward pass q, k and v go and out comes; in the backward pass dout and out go, too, and dq, dk, dv come.
    per_token = layer.num_heads_q * (2 if is_forward else 4) + max(layer.num_heads_kv, heads) * (2 if is_forward else 4)
    sent = tokens * per_token * layer.head_dim * _BYTES * (heads - 1) / heads
    calls = 2
    rate = interpolated(figures.ALL_TO_ALL, sent / calls) * 1e9
    if heads > machine.gpus_per_host:
        rate = min(rate, machine.network * 1e9)
    return sent / rate + calls * (figures.LATENCY + figures.HOST), sent


def _memory(layer: Layer, ring: int, heads: int) -> float:
    """Return the most bytes of a GPU, which the backward pass takes: inputs, results, and messages in flight."""
    tokens = layer.batch * layer.seqlen / (ring * heads)
    of_q, of_kv = layer.num_heads_q * layer.head_dim, max(layer.num_heads_kv, heads) * layer.head_dim
    # A rank holds q, out, dout and dq; k, v, dk and dv; and lse.
    held = tokens * (4 * of_q + 4 * of_kv) * _BYTES + tokens * layer.num_heads_q * _WIDE
    if heads > 1:  # all tokens of this rank's heads come on top of this rank's tokens of all heads
        held *= 2
    if ring > 1:  # a second k and v, sums of dq, and sums of dk and dv twice
        held += tokens * (2 * of_kv * _BYTES + of_q * _WIDE + 4 * of_kv * _WIDE)
    return held


def grids(layer: Layer, gpus: int, machine: Machine) -> list[Prediction]:
    """Predict every way to write the GPUs as rings times heads; no more ranks share heads than there are heads."""
    ways = [
        heads for heads in range(1, gpus + 1) if gpus % heads == 0 and (heads <= layer.num_heads_q or heads == gpus)
    ]
    return [predict(layer, gpus // heads, heads, machine) for heads in ways]


def rate(layer: Layer, seconds: float, gpus: int, *, backward: bool) -> float:
    """Return TFLOP/s of one GPU."""
    return layer.flops * (_BACKWARD_WORK if backward else 1.0) / seconds / gpus / 1e12
