"""Dropout keeps weights by the contract's formula alone, everywhere and for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian_case, np_dtype, same_bits
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import cases, examples

import cuflash
from cuflash import reference
from cuflash.cpu import dropout

Array = NDArray[Any]

# A result that is right comes without a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

MASK32 = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """Compute Philox4x32 as its paper writes it (Salmon et al. 2011), one counter at a time in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def threshold_of(p: float) -> int:
    return int(np.floor(p * 65536))


def keep(seed: int, p: float, batch: int, head: int, i: int, j: int) -> bool:
    """Decide on one weight as the contract does, to the letter."""
    words = philox4x32([i & ~8, j & ~8 & ~1, head, batch], [seed & MASK32, seed >> 32])
    bit3_i, bit3_j = i >> 3 & 1, j >> 3 & 1
    word = words[2 * bit3_i + bit3_j]
    half = word >> 16 if j & 1 else word & 0xFFFF
    return half >= threshold_of(p)


ZEROS, ONES = ([0] * 4, [0] * 2), ([MASK32] * 4, [MASK32] * 2)
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]


@pytest.mark.parametrize(
    ("rounds", "of", "words"),
    [
        (7, ZEROS, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, ONES, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (7, PI, [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
        (10, ZEROS, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, ONES, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (10, PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_known_answers(rounds: int, of: tuple[list[int], list[int]], words: list[int]) -> None:
    """All three generators give the answers that come with the authors' Random123."""
    counter, key = of
    assert philox4x32(counter, key, rounds) == words
    first, second, third, fourth = counter
    seed = key[0] | key[1] << 32
    assert reference.philox4x32((first, second, third, fourth), seed, rounds).tolist() == words
    if rounds == 7:
        of_cpu_path = dropout.philox4x32(
            (np.uint64(first), np.uint64(second), np.uint64(third), np.uint64(fourth)), seed
        )
        assert [int(word) for word in of_cpu_path] == words


def kept_weights(device: Device, dtype: str, seed: Any, p: float, sizes: tuple[int, int, int, int]) -> Array:
    """Return bool (batch, heads, rows, keys), the weights that the library kept, read off by one-hot values."""
    batch, heads, rows, keys = sizes
    q = np.zeros((batch, rows, heads, 8), np_dtype(dtype))
    k = np.zeros((batch, keys, 1, 8), np_dtype(dtype))
    kept = np.zeros(sizes, bool)
    for first in range(0, keys, 256):
        width = min(256, keys - first)
        v = np.zeros((batch, keys, 1, width), np_dtype(dtype))
        v[:, first : first + width, 0] = np.eye(width)
        arrays = device.put((q, k, v))
        # Weights are 1 / keys each, so that a kept one times keys is the factor.
        out = device.get(cuflash.attention(*arrays, dropout_p=p, dropout_seed=device.put(seed)))
        weights = out.astype(np.float64).swapaxes(1, 2) * keys * (65536 - threshold_of(p)) / 65536
        assert np.all((weights == 0) | (np.abs(weights - 1) < 0.02)), "kept weights are scaled by 65536 / (65536 - T)"
        kept[..., first : first + width] = weights != 0
    return kept


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seed", [0, 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
def test_bits_follow_the_formula(device: Device, dtype: str, seed: int) -> None:
    sizes = (2, 3, 21, 37)
    kept = kept_weights(device, dtype, seed, 0.3, sizes)
    for index in np.ndindex(*sizes):
        assert kept[index] == keep(seed, 0.3, *index), f"batch, head, i, j = {index}"


def test_bits_do_not_depend_on_tiles(device: Device) -> None:
    """Bits are the same at positions far beyond one tile, in rows and in keys."""
    sizes = (1, 1, 300, 520)
    kept = kept_weights(device, "float32", 77, 0.5, sizes)
    for i in (0, 7, 8, 63, 64, 127, 128, 255, 256, 299):
        for j in range(520):
            assert kept[0, 0, i, j] == keep(77, 0.5, 0, 0, i, j), (i, j)
    assert np.array_equal(kept, reference.dropout_keep(1, 1, 300, 520, 0.5, 77))


@pytest.mark.parametrize("p", [0.0, 2.0**-17, 2.0**-16, 1e-3, 0.1, 1 / 3, 0.5, 0.75, 0.999, 1 - 2.0**-15])
def test_threshold(device: Device, p: float) -> None:
    """A weight is kept iff half >= floor(p * 65536); p below 2^-16 drops nothing."""
    kept = kept_weights(device, "float32", 5, p, (1, 2, 40, 64))
    expected = np.array([[[keep(5, p, 0, h, i, j) for j in range(64)] for i in range(40)] for h in range(2)])
    assert np.array_equal(kept[0], expected)
    if p < 2.0**-16:
        assert kept.all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kept_weights_are_rescaled_exactly(device: Device, dtype: str) -> None:
    """The factor is one over the exact share of kept weights, 65536 / (65536 - floor(p * 65536)), not 1 / (1 - p)."""
    p = 2.0**-16 + 2.0**-17
    q = np.zeros((1, 1, 1, 4), np_dtype(dtype))
    arrays = device.put((q, q, np.ones_like(q)))
    seed = next(seed for seed in range(9) if keep(seed, p, 0, 0, 0, 0))
    out = device.get(cuflash.attention(*arrays, dropout_p=p, dropout_seed=seed))
    np.testing.assert_allclose(out, 65536 / 65535, rtol=4 * np.finfo(out.dtype).eps, atol=0)


@pytest.mark.parametrize("shape", [None, (), (1,), (1, 1)])
def test_seed_as_int_and_as_array(device: Device, shape: tuple[int, ...] | None) -> None:
    seed = 0xFEDCBA9876543210
    as_given: Any = seed if shape is None else np.full(shape, seed, np.uint64)
    kept = kept_weights(device, "float32", as_given, 0.4, (1, 2, 16, 16))
    assert np.array_equal(
        kept[0], [[[keep(seed, 0.4, 0, h, i, j) for j in range(16)] for i in range(16)] for h in (0, 1)]
    )


def test_heads_are_query_heads(device: Device) -> None:
    """Each query head drops its own weights where queries are grouped."""
    kept = kept_weights(device, "float32", 3, 0.5, (1, 4, 24, 24))  # four query heads on one KV head
    assert len({kept[0, h].tobytes() for h in range(4)}) == 4


def test_packed_positions_are_local(device: Device) -> None:
    """i and j count from the start of each sequence, batch is its index, and used lengths do not shift them."""
    lengths_q, lengths_k = [5, 19, 0, 33], [9, 40, 3, 33]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k))
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    v = np.concatenate([np.eye(40, dtype=np.float32)[:length] for length in lengths_k])[:, None]
    arrays = device.put((np.zeros((total_q, 2, 4), np.float32), np.zeros((total_k, 1, 4), np.float32), v, cu_q, cu_k))
    used = device.put(np.array([5, 12, 0, 33], np.int32))
    out = device.get(cuflash.attention_varlen(*arrays, q_lengths=used, dropout_p=0.5, dropout_seed=9))
    for b, (rows, used_rows, keys) in enumerate(zip(lengths_q, [5, 12, 0, 33], lengths_k, strict=True)):
        for head in range(2):
            own = out[cu_q[b] : cu_q[b] + rows, head, :keys]
            expected = [[keep(9, 0.5, b, head, i, j) for j in range(keys)] for i in range(used_rows)]
            assert np.array_equal(own[:used_rows] != 0, np.array(expected, bool).reshape(used_rows, keys)), b
            assert not own[used_rows:].any()


def test_lengths_do_not_shift_positions(device: Device) -> None:
    """The positions i and j of padded arrays are absolute, whatever the lengths, masks and windows are."""
    rng = np.random.default_rng(0)
    lengths = np.array([11, 30], np.int32)
    q = np.zeros((2, 30, 1, 4), np.float32)
    v = np.broadcast_to(np.eye(30, dtype=np.float32)[None, :, None], (2, 30, 1, 30))
    mask = rng.random((30, 30)) < 0.8
    arrays = device.put((q, q, v.copy()))
    options = device.put({"q_lengths": lengths, "kv_lengths": lengths, "mask": mask})
    out = device.get(cuflash.attention(*arrays, window=(20, 0), dropout_p=0.5, dropout_seed=4, **options))
    for b, length in enumerate(lengths):
        for i in range(length):
            for j in range(length):
                sees = mask[i, j] and i - 20 <= j <= i
                assert (out[b, i, 0, j] != 0) == (sees and keep(4, 0.5, b, 0, i, j)), (b, i, j)


@examples(40)
@given(case=cases(always=("dropout",)))
def test_lse_is_before_dropout(device: Device, case: Case) -> None:
    _, lse = case.on(device).forward()
    plain = case.with_options(dropout_p=None, dropout_seed=None)
    out, _ = plain.on(device).forward()
    plain.assert_forward(out, lse)


@examples(30)
@given(case=cases(without=("dropout",)), seed=st.integers(0, 2**64 - 1))
def test_probability_zero_is_no_dropout(device: Device, case: Case, seed: int) -> None:
    """dropout_p=0 is the same bits as no dropout, and then the seed may be left out."""
    plain = case.on(device)
    out, lse = plain.forward()
    grads = plain.backward(out, lse, deterministic=True)
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0, "dropout_seed": seed}):
        zero = case.with_options(**options).on(device)
        assert same_bits(zero.forward()[0], out)
        assert_same_bits(zero.backward(out, lse, deterministic=True), grads)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_forward_and_backward_drop_the_same_weights(device: Device, dtype: str) -> None:
    """Gradients of dropped weights vanish: with one-hot values, dv tells which weights the backward pass kept."""
    sizes = (2, 2, 40, 48)
    batch, heads, rows, keys = sizes
    q, k = (np.zeros((batch, n, heads, 16), np_dtype(dtype)) for n in (rows, keys))
    v = np.zeros((batch, keys, heads, keys), np_dtype(dtype))
    v[:] = np.eye(keys)[:, None]
    dout = np.zeros((batch, rows, heads, keys), np_dtype(dtype))
    dout[..., :rows] = np.eye(rows)[:, None]
    case = Case(q, k, v, dout, options={"dropout_p": 0.35, "dropout_seed": 21})
    on_device = case.on(device)
    out, lse = on_device.forward()
    kept = out.swapaxes(1, 2) != 0
    dv = on_device.backward(out, lse)["v"]  # dv[j, i] = weight of (i, j) where dout is one-hot
    assert np.array_equal(dv[..., :rows].transpose(0, 2, 3, 1) != 0, kept)
    case.assert_gradients(on_device.backward(out, lse))


def test_gradients_with_dropout(device: Device) -> None:
    """Gradients are right over several tiles with grouped heads and dlse; another seed gives another result."""
    seed = np.array([2**63 + 1], np.uint64)
    case = gaussian_case(11, "float32", (150, 170), dropout_p=0.25, dropout_seed=seed, causal=True)
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))
    assert not np.array_equal(case.with_options(dropout_seed=2**63 + 2).on(device).forward()[0], out)


@pytest.mark.parametrize("kind", [np.uint64, np.int64, np.int8])
def test_a_seed_is_an_integer_of_numpy_everywhere(kind: Any) -> None:
    """Over keys in host memory and over ranks, too."""
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8))
    w_out = np.random.default_rng(1).normal(size=(2, 8, 3))
    (comm,) = cuflash.distributed.threads(1)
    functions: dict[str, Callable[..., Any]] = {
        "attention": lambda **options: cuflash.attention(x, x, x, **options),
        "offload": lambda **options: cuflash.offload.attention(x, x, x, **options),
        "ring": lambda **options: cuflash.distributed.ring_attention(x, x, x, comm, **options),
        "ulysses": lambda **options: cuflash.distributed.ulysses_attention(x, x, x, comm, **options),
        "allreduce": lambda **options: cuflash.distributed.attention_allreduce(x, x, x, w_out, comm, **options),
    }
    for name, function in functions.items():
        found, expected = (function(dropout_p=0.3, dropout_seed=seed) for seed in (kind(7), 7))
        np.testing.assert_array_equal(found, expected, err_msg=name)
