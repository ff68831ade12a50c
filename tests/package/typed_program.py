"""A user's program, which type checkers read: each line says what they are to know."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import cuflash
from cuflash.typing import Backward

Floats = NDArray[np.float32]


def padded(q: Floats, k: Floats, v: Floats, slopes: Floats, mask: NDArray[np.bool_], flag: bool) -> None:
    assert_type(cuflash.attention(q, k, v, causal=True, mask=mask), Floats)
    assert_type(cuflash.attention(q, k, v, return_lse=True), tuple[Floats, Floats])
    assert_type(cuflash.attention(q, k, v, return_lse=flag), "Floats | tuple[Floats, Floats]")
    out, backward = cuflash.attention_vjp(q, k, v, window=(4, None), alibi_slopes=slopes)
    assert_type(out, Floats)
    assert_type(backward, Backward[Floats])
    *_, dslopes = backward(out)
    assert_type(dslopes, Floats)
    assert_type(backward(out, grads=("q",)), "tuple[Floats | None, ...]")
    (out, lse), _ = cuflash.attention_vjp(q, k, v, return_lse=True)
    assert_type(cuflash.attention_backward(out, q, k, v, out, lse), tuple[Floats, ...])
    assert_type(cuflash.merge([out, out], [lse, lse]), tuple[Floats, Floats])
    assert_type(cuflash.hadamard(q, seed=1), Floats)
    assert_type(cuflash.quantize_fp8(q, "token"), tuple[Floats, Floats])


def packed(q: Floats, k: Floats, v: Floats, cu_seqlens: NDArray[np.int32]) -> None:
    assert_type(cuflash.attention_varlen(q, k, v, cu_seqlens, cu_seqlens), Floats)
    out, backward = cuflash.attention_varlen_vjp(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    assert_type(backward(out), tuple[Floats, ...])


def caches(q: Floats, k: Floats, v: Floats, pool: Floats, lengths: NDArray[np.int32]) -> None:
    assert_type(cuflash.append_kv(k, v, pool, pool, lengths), None)
    assert_type(cuflash.append_kv(k, v, pool, pool, lengths, q=q), Floats)


def elsewhere(q: Floats, comm: cuflash.distributed.Communicator) -> None:
    assert_type(cuflash.distributed.shard(q, comm), Floats)
    assert_type(cuflash.distributed.ring_attention(q, q, q, comm, order="striped"), Floats)
    assert_type(cuflash.offload.attention(q, q, q, share=0.5, return_lse=True), tuple[Floats, Floats])


def mistakes(q: Floats, k: Any) -> None:
    cuflash.attention([1.0], [1.0], [1.0])  # type: ignore[call-overload]  # pyright: ignore
    cuflash.attention(q, k, k, causl=True)  # type: ignore[call-overload]  # pyright: ignore
