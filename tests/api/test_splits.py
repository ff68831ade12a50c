"""Any splits of the keys give right results; with split_size a row's bits depend on its sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian, same_bits
from devices import Device, forget_launches
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from paging import paged_cases
from strategies import cases, examples

import cuflash
from cuflash.gpu import launch

Array = NDArray[Any]
RNG = np.random.default_rng(8)

SPLITS = st.one_of(
    st.builds(dict, num_splits=st.integers(1, 40)), st.builds(dict, split_size=st.sampled_from([1, 3, 16, 64, 10**9]))
)


@examples(80)
@given(case=st.one_of(cases(), paged_cases()), splits=SPLITS)
def test_splits_agree_with_reference(device: Device, case: Case, splits: dict[str, int]) -> None:
    on_device = case.with_options(**splits).on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)


@examples(20)
@given(case=st.one_of(cases(empty=False), paged_cases(empty=False)), splits=SPLITS)
def test_gradients_ignore_splits(device: Device, case: Case, splits: dict[str, int]) -> None:
    """Backward functions accept both, and compute the same bits as without."""
    whole, split = (x.with_options(deterministic=True).on(device) for x in (case, case.with_options(**splits)))
    out, lse = whole.forward()
    assert_same_bits(split.backward(out, lse), whole.backward(out, lse))
    assert same_bits(split.forward()[0], split.vjp()[0])


PAGE_SIZE, NUM_PAGES = 16, 64
LENGTHS = (300, 64, 65, 1, 0, 190)
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (70, 5)},
    "softcap": {"softcap": 2.0},
    "dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 5},
}


class Requests:
    """Sequences with their pages, any of which a call serves, in any order, by tables of any width."""

    def __init__(self, device: Device, dtype: str, seqlen_q: int, heads: tuple[int, int], **options: Any) -> None:
        self.device, self.options = device, options
        num_heads_q, num_heads_kv = heads
        self.seqlen_q = seqlen_q
        self.q = gaussian(RNG, (len(LENGTHS), seqlen_q, num_heads_q, 64), dtype)
        self.k, self.v = (gaussian(RNG, (NUM_PAGES, PAGE_SIZE, num_heads_kv, 64), dtype) for _ in "kv")
        self.sink = RNG.standard_normal(num_heads_q).astype("float64" if dtype == "float64" else "float32")
        pages = RNG.permutation(NUM_PAGES).astype(np.int32)
        counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
        self.pages = np.split(pages, np.cumsum(counts))[:-1]

    def call(self, served: list[int], width: int, packed: bool = False, contiguous: bool = False) -> list[bytes]:
        """Return the bits of out and lse of each sequence that is served."""
        table = np.full((len(served), width), -1, np.int32)
        for row, own in zip(table, served, strict=True):
            row[: len(self.pages[own])] = self.pages[own]
        lengths = np.array([LENGTHS[own] for own in served], np.int32)
        options: dict[str, Any] = {"kv_lengths": lengths, "sink": self.sink, "return_lse": True, **self.options}
        q, k, v = self.q[served], self.k, self.v
        if contiguous:
            k, v = (x[table].reshape(len(served), -1, *x.shape[2:]) for x in (k, v))
        else:
            options["block_table"] = table
        if packed:
            cu_seqlens = np.arange(len(served) + 1, dtype=np.int32) * self.seqlen_q
            arguments = (*self.device.put((q.reshape(-1, *q.shape[2:]), k, v, cu_seqlens)), None)
            out, lse = self.device.get(cuflash.attention_varlen(*arguments, **self.device.put(options)))
            out, lse = out.reshape(q.shape), lse.reshape(-1, len(served), self.seqlen_q).swapaxes(0, 1)
        else:
            out, lse = self.device.get(cuflash.attention(*self.device.put((q, k, v)), **self.device.put(options)))
        return [out[b].tobytes() + np.ascontiguousarray(lse[b]).tobytes() for b in range(len(served))]


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["2-2", "8-1"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_rows_bits_depend_on_its_sequence_alone(
    device: Device, dtype: str, seqlen_q: int, heads: tuple[int, int], packed: bool, extra: str
) -> None:
    """A row's bits are the same over batches, orders, tables' widths, other lengths, and pages or rows by one tile."""
    options = dict(EXTRAS[extra])
    has_dropout = "dropout_p" in options  # which counts sequences: only the first keeps its place
    requests = Requests(device, dtype, seqlen_q, heads, split_size=48, **options)
    alone = [requests.call([own], len(requests.pages[own]) + own, packed)[0] for own in range(len(LENGTHS))]
    orders = (
        [[0, 1, 2, 3, 4, 5], [0, 3], [0, 5, 5, 1]] if has_dropout else [[0, 1, 2, 3, 4, 5], [5, 2, 0], [4, 0], [3] * 9]
    )
    for order, width in zip(orders, (19, 40, 23, 64), strict=False):
        together = requests.call(order, width, packed)
        for own, bits in list(zip(order, together, strict=True))[: 1 if has_dropout else None]:
            assert bits == alone[own], f"sequence {own} in {order}, width {width}"
    if not packed:
        (of_pages, tiles_of_pages), (of_rows, tiles_of_rows) = (
            with_tiles(partial(requests.call, [0], 19, contiguous=contiguous)) for contiguous in (False, True)
        )
        assert of_pages == alone[0]
        # A block table is an option, by which a device may choose another tile; NumPy's path has none to choose from.
        assert of_rows == of_pages or tiles_of_rows != tiles_of_pages


def with_tiles(call: Callable[[], list[bytes]]) -> tuple[bytes, set[str]]:
    """Return the bits of a call's first sequence, and the tiles of the kernels that it launched, if there were any."""
    forget_launches()
    bits = call()[0]
    return bits, {x.kernel.config.tile for x in launch._launches.values() if x.kernel.visits_tiles}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_bits_of_many_rows(device: Device, packed: bool) -> None:
    """Sequences of several tiles of queries keep their bits, which other batches cut otherwise without one size."""
    requests = Requests(device, "float32", 400, (4, 2), split_size=100, causal=True)
    alone = [requests.call([own], 19, packed)[0] for own in (0, 5)]
    assert requests.call([0, 1, 5], 30, packed)[::2] == alone
    assert requests.call([5, 0], 22, packed) == alone[::-1]
    assert requests.call([0] * 10, 19, packed) == alone[:1] * 10
