"""Keys in pools of pages have the right results, gradients, unread memory and errors, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian_case, same_bits
from devices import Device
from hypothesis import given
from numpy.typing import NDArray
from paging import PAGE_SIZES, as_paged, paged_cases, used_of_pool
from strategies import examples

import cuflash
from cuflash import reference

Array = NDArray[Any]
RNG = np.random.default_rng(3)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def paged_case(page_size: int = 3, dtype: str = "float32", seqlen_q: int = 5, **options: Any) -> Case:
    """Make three sequences of up to 21 or 32 keys, whose pages are shuffled and shared by none."""
    case = gaussian_case(0, dtype, (seqlen_q, 20), dims=(16, 12), batch=3)
    case = as_paged(case, page_size, RNG, num_spare=20, wild=False).with_options(**options)
    table = RNG.permutation(60)[: case.options["block_table"].size].reshape(3, -1).astype(np.int32)
    pools = {name: np.resize(getattr(case, name), (60, *getattr(case, name).shape[1:])) for name in ("k", "v")}
    return case.with_inputs(**pools).with_options(block_table=table, kv_lengths=np.array([20, 7, 0], np.int32))


def check(device: Device, case: Case) -> None:
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@examples(80)
@given(case=paged_cases(packed=False))
def test_padded_queries_agree_with_reference(device: Device, case: Case) -> None:
    check(device, case)


@examples(80)
@given(case=paged_cases(packed=True))
def test_packed_queries_agree_with_reference(device: Device, case: Case) -> None:
    check(device, case)


@examples(60)
@given(case=paged_cases())
def test_what_no_sequence_uses_changes_no_bit(device: Device, case: Case) -> None:
    """NaN in unused pages and in the tail of a last page changes no bit, and gradients are 0 there."""
    unused = ~used_of_pool(case)
    poisoned = case.with_inputs(**{name: _poisoned(getattr(case, name), unused) for name in ("k", "v")})
    clean, dirty = (x.with_options(deterministic=True).on(device) for x in (case, poisoned))
    out, lse = clean.forward()
    for ours, theirs in zip(dirty.forward(), (out, lse), strict=True):
        assert same_bits(ours, theirs)
    grads = dirty.backward(out, lse)
    assert_same_bits(grads, clean.backward(out, lse))
    assert not grads["k"][unused].any() and not grads["v"][unused].any()


def _poisoned(pool: Array, unused: Array) -> Array:
    pool = np.array(pool)
    pool[unused] = np.nan
    return pool


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_are_rows_elsewhere(device: Device, page_size: int) -> None:
    """A call on pages has the results of a call on the same rows side by side."""
    case = paged_case(page_size, causal=True)
    table, lengths = case.options["block_table"], case.options["kv_lengths"]
    k, v = (getattr(case, name)[table].reshape(3, -1, *getattr(case, name).shape[2:]) for name in ("k", "v"))
    paged, plain = case.on(device), case.with_inputs(k=k, v=v).with_options(block_table=None).on(device)
    out, lse = paged.forward()
    for ours, theirs in zip((out, lse), plain.forward(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    grads, expected = paged.backward(out, lse), plain.backward(out, lse)
    np.testing.assert_allclose(grads["q"], expected["q"], rtol=1e-5, atol=1e-5)
    for name in ("k", "v"):
        for b, length in enumerate(lengths):
            own = grads[name][table[b]].reshape(-1, *grads[name].shape[2:])[:length]
            np.testing.assert_allclose(own, expected[name][b, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_of_shared_pages_are_sums(device: Device, dtype: str) -> None:
    """Sequences with one table share every page, and a page may stand twice in a table."""
    case = paged_case(3, dtype)
    table = np.array([[4, 9, 4, 2, 0, 0, 0]] * 3, np.int32)
    case = case.with_options(block_table=table, kv_lengths=np.array([12, 11, 3], np.int32))
    check(device, case)
    out, lse = case.on(device).forward()
    grads = case.with_options(deterministic=True).on(device).backward(out, lse)
    assert_same_bits(case.with_options(deterministic=True).on(device).backward(out, lse), grads)
    assert not grads["k"][[i for i in range(60) if i not in (4, 9, 2)]].any()


def test_used_entries_are_clamped_to_the_pool(device: Device) -> None:
    case = paged_case(3)
    table = case.options["block_table"].copy()
    table[0, :3], table[1, 0] = (-5, 60, 2**31 - 1), -(2**31)
    clamped = case.with_options(block_table=np.clip(table, 0, 59)).on(device)
    for ours, theirs in zip(case.with_options(block_table=table).on(device).forward(), clamped.forward(), strict=True):
        assert same_bits(ours, theirs)


def test_lengths_are_clamped_to_the_table(device: Device) -> None:
    case = paged_case(3)
    given = case.with_options(kv_lengths=np.array([2**31 - 1, -7, 21], np.int32)).on(device)
    clamped = case.with_options(kv_lengths=np.array([21, 0, 21], np.int32)).on(device)
    for ours, theirs in zip(given.forward(), clamped.forward(), strict=True):
        assert same_bits(ours, theirs)


def test_values_may_be_the_first_columns_of_keys(device: Device) -> None:
    case = paged_case(16)
    k, q, dout = device.put((case.k, case.q, case.dout))
    v = k[..., :12]
    options: dict[str, Any] = device.put(case.options)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    host = case.with_inputs(v=case.k[..., :12])
    host.assert_forward(*device.get((out, lse)))
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    exact = host.with_inputs(dlse=np.zeros_like(case.dlse)).reference_backward()
    for name, grad in zip("qkv", device.get(grads), strict=True):
        np.testing.assert_allclose(grad, exact[name], rtol=1e-4, atol=1e-5)


def test_targets_have_the_shape_of_the_pools(device: Device) -> None:
    """out= writes every row of a pool's gradient, unused pages too; grads= leaves one out."""
    case = paged_case(3)
    on_device = case.on(device)
    out, lse = on_device.forward()
    right = on_device.backward(out, lse)
    wide = device.put(np.full((*case.k.shape[:3], 2 * case.k.shape[3]), np.nan, case.dtype))
    dk, dv = wide[..., :16], device.put(np.full(case.v.shape, np.nan, case.dtype))
    given = on_device.raw_backward(out, lse, out=(None, dk, dv))
    assert given[1] is dk and given[2] is dv
    assert_same_bits(on_device.named(given), right)
    alone = on_device.named(on_device.raw_backward(out, lse, grads=("v",)))
    assert alone["q"] is None and alone["k"] is None
    np.testing.assert_allclose(alone["v"], right["v"], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"out, dk: expected no overlap"):
        on_device.raw_backward(out, lse, out=(None, on_device.qkv[1], None))


@pytest.mark.parametrize(("batch", "max_pages", "num_pages"), [(0, 4, 3), (2, 0, 3), (2, 0, 0), (0, 0, 0)])
def test_nothing_to_see(device: Device, batch: int, max_pages: int, num_pages: int) -> None:
    q = np.ones((batch, 3, 2, 8), np.float32)
    pool = np.ones((num_pages, 4, 1, 8), np.float32)
    table, lengths = np.zeros((batch, max_pages), np.int32), np.full(batch, 5, np.int32)
    q, pool, table, lengths = device.put((q, pool, table, lengths))
    out, backward = cuflash.attention_vjp(q, pool, pool, block_table=table, kv_lengths=lengths)
    dq, dk, dv = device.get(backward(q))
    for x in (device.get(out), dq, dk, dv):
        assert not x.any()
    cu_seqlens = device.put(np.arange(batch + 1, dtype=np.int32))
    flat = q.reshape(batch * 3, 2, 8)
    packed = cuflash.attention_varlen(flat, pool, pool, cu_seqlens, None, block_table=table, kv_lengths=lengths)
    assert not device.get(packed).any()


def test_vjp_and_packed_forms_agree_with_padded_ones(device: Device) -> None:
    """Packed queries, one after the other, see the same keys as padded ones."""
    case = paged_case(3, causal=True, dropout_p=0.2, dropout_seed=11)
    out, lse = case.on(device).forward()
    flat = {name: getattr(case, name).reshape(15, *getattr(case, name).shape[2:]) for name in ("q", "dout")}
    assert case.dlse is not None
    packed = case.with_inputs(**flat, dlse=case.dlse.swapaxes(0, 1).reshape(4, 15))
    packed.cu_seqlens = np.array([0, 5, 10, 15], np.int32), None  # type: ignore[assignment]
    their_out, their_lse, backward = packed.on(device).vjp()
    np.testing.assert_allclose(their_out.reshape(out.shape), out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(their_lse, lse.swapaxes(0, 1).reshape(4, 15), rtol=1e-5, atol=1e-5)
    packed.assert_gradients(backward(packed.dout, packed.dlse))


def zeros(*shape: int, dtype: str = "float32") -> Array:
    return np.zeros(shape, dtype)


TABLE, LENGTHS = zeros(2, 3, dtype="int32"), zeros(2, dtype="int32")
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"block_table": zeros(2, 3, dtype="int64")}, TypeError, "block_table: expected dtype int32, got int64"),
    "kind": ({"block_table": [[0, 1, 2]] * 2}, TypeError, "block_table: .*list"),
    "rank": (
        {"block_table": zeros(6, dtype="int32")},
        ValueError,
        r"block_table: expected \(batch, max_pages\) = \(2, \*\), got \(6,\)",
    ),
    "batch": ({"block_table": zeros(3, 3, dtype="int32")}, ValueError, r"= \(2, \*\), got \(3, 3\)"),
    "no lengths": ({"kv_lengths": None}, ValueError, r"kv_lengths: expected .* as a block_table is given, got None"),
    "k rank": ({"k": zeros(8, 2, 16)}, ValueError, r"k: expected \(num_pages, page_size, num_heads_kv, head_dim\)"),
    "v pages": ({"v": zeros(6, 4, 2, 12)}, ValueError, r"v: .* = \(5, 4, 2, \*\), got \(6, 4, 2, 12\)"),
    "v page size": ({"v": zeros(5, 3, 2, 12)}, ValueError, r"v: .* = \(5, 4, 2, \*\), got \(5, 3, 2, 12\)"),
    "page size 0": ({"k": zeros(5, 0, 2, 16), "v": zeros(5, 0, 2, 12)}, ValueError, "page_size of at least 1"),
    "no pages": ({"k": zeros(0, 4, 2, 16), "v": zeros(0, 4, 2, 12)}, ValueError, "k: expected at least one page"),
    "bias": ({"bias": zeros(2, 4, 6, 11)}, ValueError, r"bias: .* = \(2, 4, 6, 12\), got \(2, 4, 6, 11\)"),
    "mask": ({"mask": zeros(6, 11, dtype="bool")}, ValueError, r"mask: .* = \(2, 4, 6, 12\), got \(6, 11\)"),
    "num_splits 0": ({"num_splits": 0}, ValueError, "num_splits: expected an int >= 1 or None, got 0"),
    "num_splits bool": ({"num_splits": True}, TypeError, "num_splits: expected an int >= 1 or None, got bool"),
    "split_size float": ({"split_size": 2.0}, TypeError, "split_size: expected an int >= 1 or None, got float"),
    "split_size -1": ({"split_size": -1}, ValueError, "split_size: expected an int >= 1 or None, got -1"),
    "both": ({"split_size": 8, "num_splits": 2}, ValueError, "split_size: expected None, as num_splits = 2 is given"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("form", ["", "_vjp", "_backward"])
def test_errors(device: Device, name: str, form: str) -> None:
    changes, error, message = ERRORS[name]
    arguments: dict[str, Any] = {"k": zeros(5, 4, 2, 16), "v": zeros(5, 4, 2, 12)} | changes
    options = {"block_table": TABLE, "kv_lengths": LENGTHS, **arguments}
    k, v, options = device.put((options.pop("k"), options.pop("v"), options))
    q, out, lse = device.put((zeros(2, 6, 4, 16), zeros(2, 6, 4, 12), zeros(2, 4, 6)))
    inputs = (out, q, k, v, out, lse) if form == "_backward" else (q, k, v)
    with pytest.raises(error, match=message):
        getattr(cuflash, f"attention{form}")(*inputs, **options)


def test_packed_calls_have_lengths_or_cu_seqlens_of_keys(device: Device) -> None:
    q, pool, keys = device.put((zeros(6, 4, 16), zeros(5, 4, 2, 16), zeros(20, 2, 16)))
    cu_seqlens, table, lengths = device.put((np.array([0, 2, 6], np.int32), TABLE, LENGTHS))
    with pytest.raises(ValueError, match="cu_seqlens_k: expected None, as a block_table is given"):
        cuflash.attention_varlen(q, pool, pool, cu_seqlens, cu_seqlens, block_table=table, kv_lengths=lengths)
    with pytest.raises(TypeError, match=r"cu_seqlens_k: expected an int32 array \(batch \+ 1,\), got None"):
        cuflash.attention_varlen(q, keys, keys, cu_seqlens, None)
    with pytest.raises(ValueError, match="kv_lengths: expected an int32"):
        cuflash.attention_varlen(q, pool, pool, cu_seqlens, None, block_table=table)
    wide = device.put(zeros(2, 4, 6, 13))
    with pytest.raises(ValueError, match=r"bias: .* = \(2, 4, \*, 12\), got \(2, 4, 6, 13\)"):
        cuflash.attention_varlen(q, pool, pool, cu_seqlens, None, block_table=table, kv_lengths=lengths, bias=wide)


def test_the_reference_reads_pages_as_its_own_rows() -> None:
    """The oracle of this file is right by its definition alone."""
    case = paged_case(3, causal=True)
    table, lengths = case.options["block_table"], case.options["kv_lengths"]
    out, lse = case.reference_forward()
    for b, length in enumerate(lengths.tolist()):
        rows = [(table[b, j // 3], j % 3) for j in range(length)]
        k, v = (np.array([pool[at] for at in rows]).reshape(1, length, *pool.shape[2:]) for pool in (case.k, case.v))
        own_out, own_lse = reference.attention(case.q[b : b + 1], k, v, causal=True)
        np.testing.assert_allclose(out[b : b + 1], own_out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b : b + 1], own_lse, rtol=1e-12, atol=1e-14)
