"""The adaptors convert page tables in compressed rows, and logarithms to base 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import Device

import cuflash
from cuflash.conversions import from_base2_lse, from_csr, to_base2_lse

RNG = np.random.default_rng(0)
INDPTR, INDICES, LAST = (np.array(x, np.int32) for x in ([0, 2, 2, 5], [7, 3, 1, 0, 5], [4, 0, 2]))


def test_the_earlier_name_stays() -> None:
    from cuflash import adaptors, conversions

    assert all(getattr(adaptors, name) is getattr(conversions, name) for name in adaptors.__all__)


@pytest.mark.parametrize("max_pages", [None, 3, 6])
def test_from_csr(device: Device, max_pages: int | None) -> None:
    indptr, indices, last = device.put((INDPTR, INDICES, LAST))
    table, lengths = device.get(from_csr(indptr, indices, last, 4, max_pages))
    assert table.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == [8, 0, 10]
    columns = max_pages or 3
    expected = [[7, 3], [], [1, 0, 5]]
    assert table.tolist() == [own + [-1] * (columns - len(own)) for own in expected]


def test_attention_takes_it(device: Device) -> None:
    q, k, v = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 1, 2, 16), (8, 4, 2, 16), (8, 4, 2, 16)))
    indptr, indices, last = device.put((INDPTR, INDICES, LAST))
    table, lengths = from_csr(indptr, indices, last, 4)
    on_device = device.put((q, k, v))
    out = device.get(cuflash.attention(*on_device, block_table=table, kv_lengths=lengths))
    keys = [x[[1, 0, 5]].reshape(1, 12, 2, 16)[:, :10] for x in (k, v)]
    np.testing.assert_allclose(out[2:], cuflash.attention(q[2:], *keys), atol=1e-5)
    assert not out[1].any()


def test_from_csr_of_nothing() -> None:
    table, lengths = from_csr(INDPTR[:1], INDICES[:0], LAST[:0], 4)
    assert table.shape == (0, 0) and lengths.shape == (0,)
    table, lengths = from_csr(np.zeros(3, np.int32), INDICES[:0], LAST[:2], 4, 2)
    assert table.tolist() == [[-1, -1]] * 2 and lengths.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lse(device: Device, dtype: str, shape: tuple[int, ...]) -> None:
    lse = RNG.normal(size=shape).astype(dtype)
    lse[..., 0, 0] = -np.inf
    natural = device.get(from_base2_lse(device.put(lse)))
    assert natural.dtype == dtype
    np.testing.assert_allclose(np.exp(natural.swapaxes(-1, -2)), np.exp2(lse), rtol=1e-6)
    np.testing.assert_allclose(device.get(to_base2_lse(device.put(natural))), lse, rtol=1e-6)


def test_wrong_arguments() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: from_csr(INDPTR.astype(np.int64), INDICES, LAST, 4), TypeError, "indptr: expected dtype int32"),
        (lambda: from_csr(INDPTR, INDICES[None], LAST, 4), ValueError, "indices: expected one axis"),
        (lambda: from_csr(INDPTR[1:], INDICES, LAST, 4), ValueError, r"indptr: expected shape .* = \(4,\), got \(3,\)"),
        (lambda: from_base2_lse(np.zeros((2, 3), np.float16)), TypeError, "lse: expected dtype float32 or float64"),
        (lambda: from_base2_lse(np.zeros(3)), ValueError, "lse: expected two axes"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
