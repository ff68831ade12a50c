"""Splits of the keys, and heads as rows, in the kernels by mma.sync: every option, on the CPU test device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import gaussian, np_dtype
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import forget_launches
from fp8 import CODES, assert_near, exact, quantized
from numpy.typing import NDArray

import cuflash
from cuflash.gpu import launch
from cuflash.plan.decode import kernels as decode

Array = NDArray[Any]

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
RNG = np.random.default_rng(0)
DEVICES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0)}
# Devices and the dtypes of queries; keys of CODES and of "codes of keys" are in FP8.
KINDS = (
    ("sm_80", "float16"), ("sm_80", "bfloat16"), ("sm_80", "float32"), ("sm_80", "float64"), ("sm_80", CODES),
    ("sm_80", "codes of keys"), ("sm_89", CODES), ("sm_90", CODES), ("sm_90", "codes of keys"),
)  # fmt: skip
WIDE = ("float32", "float64")  # dtypes that do not round weights
HEADS, HEADS_KV, BATCH, DIM = 4, 2, 2, 64
PAGE_SIZE = 16


def options_of(name: str, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    """Draw the arrays of options, by one name."""
    lengths = np.array([seqlen_k - 40, 5], np.int32)
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True, "kv_lengths": lengths},
        "window": {"window": (90, 7)},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": RNG.standard_normal((BATCH, HEADS, seqlen_q, seqlen_k)).astype(np.float32)},
        "mask": {"mask": RNG.random((HEADS, seqlen_q, seqlen_k)) < 0.5},
        "alibi": {"alibi_slopes": RNG.random(HEADS).astype(np.float32)},
        "sink": {"sink": RNG.standard_normal(HEADS).astype(np.float32)},
        "q_lengths": {"q_lengths": np.array([seqlen_q, seqlen_q // 2], np.int32), "causal": True},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "block mask": {"block_mask": RNG.random((seqlen_q, seqlen_k)) < 0.8},
        "rules": {
            "score_mod": lambda s, b, h, i, j, table: s + table[h] * abs(i - j),
            "mask_mod": lambda b, h, i, j, table: (7 * i + 3 * j + h) % 5 != 0,
            "operands": (np.array([0.1, -0.05, 0.02, 0.0], np.float32),),
        },
    }
    return found[name]


NAMES = (
    "plain", "causal", "window", "softcap", "bias", "mask", "alibi", "sink", "q_lengths", "dropout", "block mask",
    "rules",
)  # fmt: skip
SPLITS: tuple[dict[str, int], ...] = ({"num_splits": 3}, {"num_splits": 100}, {"split_size": 50})


# Each option comes with two kinds, in turns.
CASES = [(KINDS[(n + 4 * i) % len(KINDS)], name) for n, name in enumerate(NAMES) for i in range(2)]
each_option = pytest.mark.parametrize(
    ("kind", "name"), CASES, ids=[f"{'-'.join(kind)}-{name}" for kind, name in CASES], indirect=["kind"]
)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The queries' dtype on a device, whose calls must have merged splits of kernels by mma.sync."""
    name, dtype = request.param
    forget_launches()
    with hook.kernels_on(CpuDevice(DEVICES[name], num_sms=3)):
        yield dtype


def merged() -> bool:
    """Splits were merged."""
    return any(x.kernel.entry.startswith("merge_") for x in launch._launches.values())


def tiles_of_forward() -> set[int]:
    """The numbers of thread blocks of forward kernels by mma.sync."""
    return {
        x._extra.grid[0] // max(int(x.params["splits"][0]), 1)
        for x in launch._launches.values()
        if "forward" in x.kernel.entry or x.kernel.entry == decode.ENTRY
    }


def drawn(kind: str, seqlen_q: int, seqlen_k: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Draw arrays, their scales, and the numbers that both are."""
    of_keys = BATCH, seqlen_k, HEADS_KV, DIM
    shapes = (BATCH, seqlen_q, HEADS, DIM), of_keys, of_keys
    if kind not in (CODES, "codes of keys"):
        arrays = [gaussian(RNG, shape, kind) for shape in shapes]
        return arrays, {}, [x.astype(np.float64) for x in arrays]
    q, k, v = (quantized(RNG.standard_normal(shape).astype(np.float32), "token") for shape in shapes)
    scales = {"k_scale": k.scale, "v_scale": v.scale}
    if kind == CODES:
        return [q.codes, k.codes, v.codes], {"q_scale": q.scale, **scales}, [x.numbers for x in (q, k, v)]
    given = q.numbers.astype(np_dtype("bfloat16"))
    return [given, k.codes, v.codes], scales, [given.astype(np.float64), k.numbers, v.numbers]


def assert_right(kind: str, seqlen_q: int, seqlen_k: int, name: str, splits: dict[str, int]) -> None:
    arrays, scales, numbers = drawn(kind, seqlen_q, seqlen_k)
    options = options_of(name, seqlen_q, seqlen_k)
    if kind == "float64":
        wide = ("sink", "alibi_slopes", "bias")
        options = {key: x.astype(np.float64) if key in wide else x for key, x in options.items()}
    queries = kind if kind in (CODES, "float16") else "bfloat16"
    expected = exact("numpy" if kind in WIDE else "sm_80", queries, numbers, **options)
    if "block_mask" in options:
        options["block_mask"] = cuflash.BlockMask.from_dense(options["block_mask"])
    given: dict[str, Any] = scales | options | splits
    out, lse = cuflash.attention(*arrays, **given, return_lse=True)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)


@each_option
def test_every_option_takes_splits(kind: str, name: str) -> None:
    splits = SPLITS[NAMES.index(name) % len(SPLITS)]
    assert_right(kind, 70, 300, name, splits)
    # Kernels of float32 and float64 have no rules, and splits of one size leave keys whole.
    assert merged() or (name == "rules" and kind in WIDE) or "split_size" in splits


@pytest.mark.parametrize("kind", [("sm_80", "float16"), ("sm_80", "float32"), ("sm_80", "float64")], indirect=True)
@pytest.mark.parametrize(("num_splits", "dim"), [(2, 64), (16, 136), (17, 64), (200, 40), (30, 30)])
def test_any_number_of_splits_is_merged(kind: str, num_splits: int, dim: int) -> None:
    """Rows of results have one vector or several of a lane, or columns by themselves where rows are not aligned."""
    rows = (2, 1, HEADS, dim), (2, 3300, HEADS_KV, dim), (2, 3300, HEADS_KV, dim)
    q, k, v = (gaussian(RNG, shape, kind) for shape in rows)
    lengths = np.array([3300, 20], np.int32)  # most splits of the second sequence have no key
    expected = exact(
        "numpy" if kind in WIDE else "sm_80", "float16", [x.astype(np.float64) for x in (q, k, v)], kv_lengths=lengths
    )
    out, lse = cuflash.attention(q, k, v, kv_lengths=lengths, num_splits=num_splits, return_lse=True)
    assert_near(out, expected)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)
    (merged_splits,) = {
        int(x.params["splits"][0]) for x in launch._launches.values() if x.kernel.entry == "merge_splits"
    }
    assert min(num_splits, 20) / 2 < merged_splits <= num_splits  # a split has one tile of keys at least


ROWS = ("plain", "causal", "softcap", "bias", "mask")  # options whose heads are rows
OF_DECODE = (*ROWS[:3], "window", "alibi", "sink", "q_lengths")  # those that the kernels for one query know


@each_option
def test_heads_of_one_query_are_rows(kind: str, name: str) -> None:
    """A KV head's keys are read once for its query heads, where no option tells these apart."""
    assert_right(kind, 1, 130, name, {})
    are_rows = (name in ROWS and kind != "float32") or (name in OF_DECODE and kind not in WIDE)
    heads = HEADS_KV if are_rows else HEADS
    assert tiles_of_forward() == {BATCH * heads}


@pytest.mark.parametrize("kind", [("sm_80", "float16"), ("sm_89", CODES)], ids="-".join, indirect=True)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("splits", [{}, *SPLITS], ids=str)
def test_pages_take_splits(kind: str, splits: dict[str, int], packed: bool) -> None:
    """Pools of pages, whose table is wide, have the bits of keys in rows wherever these take the same splits."""
    seqlen_q, pages = 3, 9
    (q, k, v), scales, numbers = drawn(kind, seqlen_q, pages * PAGE_SIZE)
    lengths = np.array([pages * PAGE_SIZE - 5, 20], np.int32)
    order = RNG.permutation(BATCH * pages).astype(np.int32).reshape(BATCH, pages)
    pools = {}
    for own, x in {"k": k, "v": v, **{n: x for n, x in scales.items() if n != "q_scale"}}.items():
        pools[own] = np.empty((BATCH * pages, PAGE_SIZE, *x.shape[2:]), x.dtype)
        pools[own][order] = x.reshape(BATCH, pages, PAGE_SIZE, *x.shape[2:])
    of_queries = {"q_scale": scales["q_scale"]} if kind == CODES else {}
    options: dict[str, Any] = {"causal": True, "kv_lengths": lengths}
    expected = exact("sm_80", kind if kind == CODES else "bfloat16", numbers, **options)
    given = {n: x for n, x in pools.items() if n.endswith("_scale")} | options | splits | {"block_table": order}
    if packed:
        edges = np.arange(BATCH + 1, dtype=np.int32) * seqlen_q
        of_queries = {n: x.reshape(-1, HEADS) for n, x in of_queries.items()}
        out = cuflash.attention_varlen(
            q.reshape(-1, HEADS, DIM), pools["k"], pools["v"], edges, None, **of_queries, **given
        ).reshape(*q.shape[:3], -1)
    else:
        out = cuflash.attention(q, pools["k"], pools["v"], **(of_queries | given))
    assert_near(out, expected)
    if splits and "split_size" not in splits:
        assert merged()


@pytest.mark.parametrize("kind", [("sm_80", "float16"), ("sm_89", CODES)], ids="-".join, indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_hidden_keys_leak_nothing(kind: str, seed: int) -> None:
    """Keys beyond a length, and those that a mask hides from all, may hold anything."""
    (q, k, v), scales, _ = drawn(kind, 1, 300)
    hidden = np.random.default_rng(seed).random(300) < 0.7
    options = scales | {"mask": ~hidden, "kv_lengths": np.array([280, 130], np.int32), "num_splits": 3}
    clean = cuflash.attention(q, k, v, **options)
    with_nan = [x.copy() for x in (k, v)]
    for x in with_nan:
        x[:, hidden] = 0x7F if kind == CODES else np.nan
        x[0, 280:] = x[1, 130:] = 0x7F if kind == CODES else np.inf
    out = cuflash.attention(q, *with_nan, **options)
    assert out.tobytes() == clean.tobytes()
    assert merged()
