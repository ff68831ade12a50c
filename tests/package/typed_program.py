"""A user's program, which type checkers read: each line says what they are to know."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import cuflash
from cuflash.typing import Backward, Message, OwnArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


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
    assert_type(cuflash.quantize_fp8(q, "token"), tuple[NDArray[np.uint8], Floats])


def halves(q: Halves, k: Halves, cu_seqlens: NDArray[np.int32]) -> None:
    """The lse of float16 arrays is float32."""
    out, lse = cuflash.attention(q, k, k, return_lse=True)
    assert_type((out, lse), tuple[Halves, Floats])
    assert_type(cuflash.attention_backward(out, q, k, k, out, lse, dlse=lse), tuple[Halves, ...])
    assert_type(cuflash.attention_varlen(q, k, k, cu_seqlens, cu_seqlens, return_lse=True), tuple[Halves, Floats])
    (out, lse), backward = cuflash.attention_vjp(q, k, k, return_lse=True)
    assert_type(lse, Floats)
    assert_type(backward(out, lse), tuple[Halves, ...])
    (out, lse), _ = cuflash.attention_varlen_vjp(q, k, k, cu_seqlens, cu_seqlens, return_lse=True)
    assert_type(lse, Floats)


def packed(q: Floats, k: Floats, v: Floats, cu_seqlens: NDArray[np.int32]) -> None:
    assert_type(cuflash.attention_varlen(q, k, v, cu_seqlens, cu_seqlens), Floats)
    out, backward = cuflash.attention_varlen_vjp(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    assert_type(backward(out), tuple[Floats, ...])


def caches(q: Floats, k: Floats, v: Floats, pool: Floats, lengths: NDArray[np.int32]) -> None:
    assert_type(cuflash.append_kv(k, v, pool, pool, lengths), None)
    assert_type(cuflash.append_kv(k, v, pool, pool, lengths, q=q), Floats)


def pages(q: Floats, k: Floats, v: Floats) -> None:
    cache = cuflash.PagedCache(1, 4, 16, 2, 8, "float32", np)
    assert_type(cache.k, OwnArray)
    step = cache.step([cache.add()], 3)
    assert_type(step.append(0, q, k, v), Floats)
    assert_type((step.block_table, step.kv_lengths), tuple[OwnArray, OwnArray])
    assert_type(step.cu_seqlens, "OwnArray | None")
    assert_type(step.attend(0, q), Floats)
    assert_type(cuflash.attention(q, cache.k[0], cache.v[0], block_table=step.block_table), Floats)


def converted(table: NDArray[np.int32], lse: Floats) -> None:
    assert_type(cuflash.conversions.from_csr(table, table, table, 16), tuple[NDArray[np.int32], NDArray[np.int32]])
    assert_type(cuflash.conversions.to_base2_lse(cuflash.conversions.from_base2_lse(lse)), Floats)
    assert_type(cuflash.rules.explain(shifted), str)


def shifted(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + 1


def masks(mask: NDArray[np.bool_]) -> None:
    assert_type(cuflash.BlockMask.from_dense(mask).to_dense(), NDArray[np.bool_])


def elsewhere(q: Floats, comm: cuflash.distributed.Communicator) -> None:
    assert_type(cuflash.distributed.shard(q, comm), Floats)
    assert_type(cuflash.distributed.positions(8, comm), NDArray[np.int64])
    assert_type(comm.receive(0), Message)
    assert_type(comm.all_gather(q.shape), list[tuple[Any, ...]])
    assert_type(comm.exchange([q, q]), list[Floats])
    assert_type(comm.sum(q), Floats)
    assert_type(cuflash.distributed.ring_attention(q, q, q, comm, order="striped"), Floats)
    assert_type(cuflash.offload.attention(q, q, q, share=0.5, return_lse=True), tuple[Floats, Floats])
    assert_type(cuflash.offload.pinned_empty((1, 2), np.float32), Floats)


def mistakes(q: Floats, k: Any) -> None:
    cuflash.attention([1.0], [1.0], [1.0])  # type: ignore[call-overload]  # pyright: ignore
    cuflash.attention(q, k, k, causl=True)  # type: ignore[call-overload]  # pyright: ignore
