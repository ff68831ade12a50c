"""Pages and splits work with the kernels of every architecture, on the CPU test device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian_case, same_bits
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device
from paging import as_paged, used_of_pool

import cuflash
from cuflash.frontend import call
from cuflash.gpu import backend, launch

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

HOST = Device("numpy", np)
RNG = np.random.default_rng(4)
# The portable kernels, those by mma.sync on both kinds of elements, Hopper's, and float32 in parts.
FAMILIES = [
    ((7, 5), "float32"),
    ((8, 0), "float16"),
    ((8, 0), "float32"),
    ((8, 0), "float64"),
    ((9, 0), "bfloat16"),
    ((9, 0), "float32"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "extras": {
        "window": (20, 2),
        "softcap": 4.0,
        "alibi_slopes": np.full(4, 0.1, np.float32),
        "sink": np.full(4, 0.5, np.float32),
        "q_lengths": np.array([17, 9, 12], np.int32),
        "dropout_p": 0.2,
        "dropout_seed": 3,
    },
}


@pytest.fixture(autouse=True, params=FAMILIES, ids=lambda x: f"sm_{x[0][0]}{x[0][1]}-{x[1]}")
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    capability, dtype = request.param
    call._checked.clear()
    with hook.kernels_on(CpuDevice(capability)):
        yield dtype


def paged_case(dtype: str, page_size: int, packed: bool, **options: Any) -> Case:
    case = gaussian_case(1, dtype, (17, 40), dims=(32, 32), batch=3)
    if dtype == "float64":
        options = {name: x.astype(dtype) if name in ("sink", "alibi_slopes") else x for name, x in options.items()}
    paged = as_paged(case, page_size, RNG).with_options(**options)
    if not packed:
        return paged
    assert paged.dlse is not None
    flat = {name: getattr(paged, name).reshape(51, *getattr(paged, name).shape[2:]) for name in ("q", "dout")}
    paged = paged.with_inputs(**flat, dlse=paged.dlse.swapaxes(0, 1).reshape(4, 51))
    paged.cu_seqlens = np.array([2, 17, 20, 49], np.int32), None  # type: ignore[assignment]
    return paged


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("page_size", "in_place"), [(1, False), (16, False), (3, True)])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_agree_with_reference_whatever_unused_rows_hold(
    dtype: str, packed: bool, page_size: int, in_place: bool, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are gathered, or the forward pass reads them in place."""
    monkeypatch.setattr(backend, "fits", lambda work: not in_place)
    case = paged_case(dtype, page_size, packed, deterministic=True, **OPTIONS[options])
    unused = ~used_of_pool(case)
    poisoned = {name: np.array(getattr(case, name)) for name in ("k", "v")}
    for pool in poisoned.values():
        pool[unused] = np.nan
    on_host, dirty = case.on(HOST), case.with_inputs(**poisoned).on(HOST)
    out, lse = on_host.forward()
    case.assert_forward(out, lse)
    for ours, theirs in zip(dirty.forward(), (out, lse), strict=True):
        assert same_bits(ours, theirs)
    grads = on_host.backward(out, lse)
    case.assert_gradients(grads)
    assert_same_bits(dirty.backward(out, lse), grads)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_second_call_looks_nothing_up(dtype: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with another pool, table and lengths of the same shapes repeats the launches."""
    entries: list[str] = []
    run = launch.Work.run

    def watched(work: launch.Work, kernel: launch.Kernel, arrays: dict[str, Any]) -> None:
        entries.append(kernel.entry)
        run(work, kernel, arrays)

    monkeypatch.setattr(launch.Work, "run", watched)
    for is_first in (True, False):
        case = paged_case(dtype, 16, packed)
        on_host = case.on(HOST)
        out, lse = on_host.forward()
        case.assert_forward(out, lse)
        case.assert_gradients(on_host.backward(out, lse))
        assert ("gather_pages" in entries and "scatter_pages" in entries) == is_first
        entries.clear()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_table_much_wider_than_the_pool_takes_no_memory_of_its_width(
    dtype: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache whose sequences may have any of its pages has such tables, whose rows would take 10 GB and more."""
    case = paged_case(dtype, 16, packed)
    own = case.options["block_table"]
    tables = [np.zeros((3, width), np.int32) for width in (1 << 22, 1 << 24)]
    for table in tables:
        table[:, : own.shape[1]] = own
    lengths = np.minimum(case.options["kv_lengths"], 40)
    sizes: list[int] = []
    empty = launch.Work.empty

    def watched(work: launch.Work, shape: tuple[int, ...], dtype: Any) -> Any:
        sizes.append(math.prod(shape))
        return empty(work, shape, dtype)

    monkeypatch.setattr(launch.Work, "empty", watched)
    met = []
    for table in tables:
        wide = case.with_options(block_table=table, kv_lengths=lengths)
        case.with_options(kv_lengths=lengths).assert_forward(*wide.on(HOST).forward())
        met.append(list(sizes))
        sizes.clear()
    assert met[0] == met[1]


def test_pools_of_odd_strides(dtype: str) -> None:
    """Pools may have rows that no vector of 16 bytes reads, and heads before pages."""
    case = paged_case(dtype, 3, packed=False)
    k = np.zeros((*case.k.shape[:3], 33), case.dtype)[..., 1:]
    k[...] = case.k
    v = np.ascontiguousarray(case.v.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    odd = case.with_inputs(k=k, v=v)
    out, lse = odd.on(HOST).forward()
    odd.assert_forward(out, lse)
    odd.assert_gradients(odd.on(HOST).backward(out, lse))


@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000])
def test_a_number_of_splits(dtype: str, num_splits: int) -> None:
    case = gaussian_case(2, dtype, (3, 300), dims=(64, 64), kv_lengths=np.array([300, 130], np.int32))
    case = case.with_options(num_splits=num_splits, causal=True)
    case.assert_forward(*case.on(HOST).forward())


def test_splits_of_one_size_have_the_bits_of_any_batch(dtype: str) -> None:
    """Bits are the same alone, in any order, in tables of any width, packed, and from rows that are not aligned."""
    lengths, page_size = np.array([130, 64, 37], np.int32), 16
    case = gaussian_case(3, dtype, (5, 144), heads=(4, 2), dims=(64, 64), batch=3)
    pools = {name: getattr(case, name).reshape(27, page_size, 2, 64) for name in ("k", "v")}
    table = RNG.permutation(27).reshape(3, 9).astype(np.int32)
    options: dict[str, Any] = {"split_size": 48, "causal": True}
    out = cuflash.attention(case.q, **pools, block_table=table, kv_lengths=lengths, **options)
    for order in ([2, 0, 1], [1], [0, 0]):
        for width in (9, 14):
            wide = np.full((len(order), width), -1, np.int32)
            wide[:, :9] = table[order]
            own = {"block_table": wide, "kv_lengths": lengths[order], **options}
            assert same_bits(cuflash.attention(case.q[order], **pools, **own), out[order])
    odd = np.zeros((*case.q.shape[:3], 65), case.dtype)[..., 1:]
    odd[...] = case.q
    assert same_bits(cuflash.attention(odd, **pools, block_table=table, kv_lengths=lengths, **options), out)
    packed = {"block_table": table, "kv_lengths": lengths, **options}
    cu_seqlens = np.array([0, 5, 10, 15], np.int32)
    rows = cuflash.attention_varlen(case.q.reshape(15, 4, 64), pools["k"], pools["v"], cu_seqlens, None, **packed)
    assert same_bits(rows.reshape(out.shape), out)
