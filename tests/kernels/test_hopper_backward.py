"""Hopper's backward kernels run on the CPU device, and their gradients are the NumPy path's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import devices
import numpy as np
import pytest
from compiling import HOPPER, assert_compiles_well, compiled, needs_compiler
from cpu_device import device, hook

import cuflash
from cuflash import hardware
from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles
from cuflash.plan.sm90 import query_splits as sm90_query_splits
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)

RNG = np.random.default_rng(0)
LENGTH_Q, LENGTH_K = 150, 200


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare rows while gradients are computed, however few there are; other tests of small sizes prepare before."""
    monkeypatch.setattr(gpu_sm90, "_FEW_TILES", 0)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


def inputs(head_dim: int, head_dim_v: int) -> tuple[Array, Array, Array]:
    return normal(2, LENGTH_Q, 4, head_dim), normal(2, LENGTH_K, 2, head_dim), normal(2, LENGTH_K, 2, head_dim_v)


def wide(x: Any) -> Any:
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def both(
    q: Array,
    k: Array,
    v: Array,
    hidden_keys: Any = None,
    hidden_queries: Any = None,
    with_dlse: bool = False,
    num_sms: int = 4,
    **options: Any,
) -> None:
    """Compare the gradients with the NumPy path's in float64, from the same rounded out and lse.

    (What the rounding of out leaves in delta is multiplied by distances, and summed, in the gradient of slopes.) Hidden
    rows hold NaN and inf on the device.
    """
    exact_q, exact_k, exact_v = (wide(x) for x in (q, k, v))
    wide_options = {name: wide(x) for name, x in options.items()}
    out, lse = cuflash.attention(exact_q, exact_k, exact_v, return_lse=True, **wide_options)
    dout = normal(*out.shape)
    dlse = RNG.standard_normal(lse.shape).astype(np.float32) if with_dlse else None
    out, lse = out.astype(q.dtype), lse.astype(np.float32)
    expected = cuflash.attention_backward(
        wide(dout), exact_q, exact_k, exact_v, wide(out), wide(lse), dlse=wide(dlse), **wide_options
    )

    tensors = [x.copy() for x in (dout, q, k, v, out)]
    for which, rows in ((hidden_queries, (0, 1, 4)), (hidden_keys, (2, 3))):
        for index in rows if which is not None else ():
            tensors[index][which] = np.nan if index % 2 else np.inf
    grads = tuple(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    extra_grads = tuple(
        np.full(x.shape, np.nan, options[name].dtype)
        for name, x in zip((n for n in ("bias", "sink", "alibi_slopes") if n in options), expected[3:], strict=True)
    )
    devices.forget_launches()
    # The kernel that runs alone is kept away.
    with (
        mock.patch.object(sm80_backward, "all_keys", return_value=()),
        hook.kernels_on(device.CpuDevice((9, 0), num_sms=num_sms)),
    ):
        dq, dk, dv, *extras = cuflash.attention_backward(
            tensors[0],
            tensors[1],
            tensors[2],
            tensors[3],
            tensors[4],
            lse,
            dlse=dlse,
            out=(*grads, *extra_grads),
            **options,
        )
    assert {sm90_backward_tiles.NARROW, sm90_backward_tiles.WIDE} & {x.kernel.entry for x in launch._launches.values()}
    for name, x, ref in zip(("dq", "dk", "dv"), (dq, dk, dv), expected, strict=False):
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=8e-3, rtol=8e-3, err_msg=name)
    for x, ref in zip(extras, expected[3:], strict=True):
        np.testing.assert_allclose(x, ref, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("head_dims", [(64, 64), (40, 72), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(head_dims: tuple[int, int], causal: bool) -> None:
    both(*inputs(*head_dims), causal=causal)


@pytest.mark.parametrize("head_dims", [(8, 8), (72, 72), (104, 104), (136, 136), (184, 24), (24, 184), (200, 232)])
@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
def test_kernels_have_the_columns_of_their_own_head_dims(head_dims: tuple[int, int], deterministic: bool) -> None:
    both(*inputs(*head_dims), causal=True, deterministic=deterministic)
    entries = sm90_backward_tiles.NARROW, sm90_backward_tiles.WIDE
    kernels = [x.kernel for x in launch._launches.values() if x.kernel.entry in entries]
    fewest = 32 if max(head_dims) <= 128 else hardware.PANEL
    own = tuple(max(hardware.whole_steps(d), fewest) for d in head_dims)
    assert {(kernel.config.head_dim, kernel.config.head_dim_v) for kernel in kernels} == {own}


SPLITS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    # The sizes are (seqlen_q, seqlen_k, num_heads_q, num_heads_kv).
    "heads": ((150, 70, 6, 2), {}),
    "heads, causal": ((150, 170, 6, 1), {"causal": True}),
    "rows": ((1300, 70, 2, 2), {}),
    "rows, causal": ((1300, 300, 1, 1), {"causal": True}),
    "heads and rows": ((700, 30, 3, 1), {"window": (400, 20)}),
    "more queries than keys": ((900, 40, 2, 1), {"causal": True}),
    "dropout": ((500, 70, 4, 1), {"dropout_p": 0.3, "dropout_seed": 5}),
    "in order": ((500, 200, 3, 1), {"deterministic": True, "causal": True}),
    "in order, rows": ((900, 200, 1, 1), {"deterministic": True}),
    "block mask": (
        (300, 70, 4, 1),
        {"block_mask": cuflash.BlockMask.random(300, 70, 0.5, seed=1, block_size=(64, 64))},
    ),
    "lengths": (
        (400, 90, 4, 1),
        {"q_lengths": np.array([370, 0], np.int32), "kv_lengths": np.array([90, 8], np.int32)},
    ),
    "alibi": ((500, 200, 4, 2), {"alibi_slopes": np.array([0.5, -0.1, 0.02, 0.3], np.float32), "window": (300, 60)}),
    "softcap and bias": ((300, 64, 4, 1), {"softcap": 3.0, "bias": normal(1, 4, 300, 64)}),
}


ONE_TILE: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    # The sizes are (seqlen_q, seqlen_k, num_heads_q, num_heads_kv).
    "plain": ((150, 100, 4, 2), {}),
    "one key": ((300, 1, 2, 1), {"causal": True}),
    "more queries than keys": ((500, 60, 2, 1), {"causal": True}),
    "hidden queries behind": ((400, 50, 2, 2), {"window": (100, 20)}),
    "in order": ((500, 60, 2, 1), {"causal": True, "deterministic": True}),
    "lengths of keys": ((200, 64, 2, 1), {"kv_lengths": np.array([0, 50], np.int32), "causal": True}),
    "sink": ((200, 30, 2, 1), {"sink": np.array([0.5, -1.0], np.float32), "causal": True}),
    "softcap and alibi": ((150, 60, 2, 1), {"softcap": 3.0, "alibi_slopes": np.array([0.5, -0.1], np.float32)}),
    "dropout": ((200, 60, 2, 1), {"dropout_p": 0.3, "dropout_seed": 5}),
    "whole bias": ((200, 64, 2, 2), {"bias": normal(2, 2, 200, 64), "causal": True}),
    "mask": ((200, 64, 2, 1), {"mask": RNG.random((2, 2, 200, 64)) < 0.5}),
    "rule": ((200, 60, 2, 1), {"causal": True, "score_mod": lambda s, b, h, i, j: s + 0.1 * s * s - 0.01 * (i - j)}),
}

OF_ONE_TILE = [
    (case, dims[place % len(dims)]) for dims in ((128, 64, 40), (136, 200)) for place, case in enumerate(ONE_TILE)
]


@pytest.mark.parametrize(("case", "head_dim"), OF_ONE_TILE)
def test_one_tile_of_keys_writes_dq_without_sums(case: str, head_dim: int) -> None:
    (queries, keys, heads, heads_kv), options = ONE_TILE[case]
    q, k, v = (normal(2, rows, n, head_dim) for rows, n in ((queries, heads), (keys, heads_kv), (keys, heads_kv)))
    both(q, k, v, with_dlse=True, **options)
    entries = {x.kernel.entry for x in launch._launches.values()}
    assert sm90_backward.ROWS in entries
    assert sm90_backward.DQ not in entries


@pytest.fixture
def free_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small problems be split, as if tiles began, and shares were added, in no time."""
    monkeypatch.setattr(sm90_query_splits, "_TILE_US", 0.0)
    monkeypatch.setattr(sm90_query_splits, "_LAUNCH_US", 0.0)
    sm90_query_splits.splits_of.cache_clear()
    yield
    sm90_query_splits.splits_of.cache_clear()


@pytest.mark.usefixtures("free_splits")
@pytest.mark.parametrize("head_dim", [64, 128, 200])
@pytest.mark.parametrize("case", SPLITS)
def test_thread_blocks_share_the_queries_of_few_keys(case: str, head_dim: int) -> None:
    (seqlen_q, seqlen_k, heads, heads_kv), options = SPLITS[case]
    q, k = normal(2, seqlen_q, heads, head_dim), normal(2, seqlen_k, heads_kv, head_dim)
    both(q, k, normal(2, seqlen_k, heads_kv, head_dim), num_sms=60, **options)
    gradients = [x.kernel for x in launch._launches.values() if isinstance(x.kernel, gpu_sm90.Gradients)]
    assert [kernel.splits.in_all > 1 for kernel in gradients] == [True]


@pytest.mark.usefixtures("free_splits")
def test_packed_sequences_share_the_queries_of_few_keys() -> None:
    q, k, v = normal(400, 6, 64), normal(60, 1, 64), normal(60, 1, 64)
    ends_q, ends_k = np.array([0, 130, 390], np.int32), np.array([0, 40, 55], np.int32)
    exact = wide(q), wide(k), wide(v)
    out, lse = cuflash.attention_varlen(*exact, ends_q, ends_k, return_lse=True)
    dout, out, lse = normal(*out.shape), out.astype(q.dtype), lse.astype(np.float32)
    expected = cuflash.attention_varlen_backward(wide(dout), *exact, wide(out), wide(lse), ends_q, ends_k)
    devices.forget_launches()
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=60)):
        found = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, ends_q, ends_k, grads=("q", "v"))
    gradients = [x.kernel for x in launch._launches.values() if isinstance(x.kernel, gpu_sm90.Gradients)]
    assert gradients[0].splits.in_all > 1
    assert found[1] is None
    for x, ref in zip(found[::2], expected[::2], strict=True):
        assert x is not None and ref is not None
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=8e-3, rtol=8e-3)


def test_training_shapes_keep_their_queries_whole() -> None:
    for head_dim, heads in ((64, 32), (128, 16), (256, 8)):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            sizes = (16384 // seqlen, seqlen, seqlen, heads, heads, head_dim, head_dim)
            problem = AttentionProblem(*sizes, "bfloat16", softmax_scale=head_dim**-0.5)
            config = sm90_backward.backward(problem, ())[0]
            assert sm90_query_splits.splits_of(problem, config, 132) == sm90_query_splits.WHOLE_QUERIES


LENGTHS = {
    "kv_lengths": np.array([120, 7], np.int32),
    "q_lengths": np.array([0, 70], np.int32),
}
MASK = RNG.random((LENGTH_Q, LENGTH_K)) < 0.5
MASK[:, 10:40] = False
MASK[5] = False
HIDDEN_BY_MASK = (slice(None), slice(10, 40))
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": RNG.random(4).astype(np.float32), "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 1234567890123},
    "softcap, alibi, dropout": {
        "softcap": 2.0,
        "alibi_slopes": RNG.random(4).astype(np.float32),
        "dropout_p": 0.3,
        "dropout_seed": 7,
        "window": (60, 20),
    },
    "softcap, alibi": {"softcap": 2.0, "alibi_slopes": RNG.random(4).astype(np.float32), "window": (60, 20)},
    "bias": {"bias": np.where(MASK, normal(LENGTH_Q, LENGTH_K), np.float16(-np.inf)), "hidden_keys": HIDDEN_BY_MASK},
    "mask": {"mask": MASK, "hidden_keys": HIDDEN_BY_MASK},
    "block mask": {
        "block_mask": cuflash.BlockMask.from_dense(MASK, block_size=(16, 16)),
        "hidden_keys": HIDDEN_BY_MASK,
        "causal": True,
    },
    "deterministic": {"deterministic": True, "window": (60, 20)},
    "window": {"window": (30, 10), "hidden_keys": (slice(None), slice(0, 20))},
    "negative scale": {"softmax_scale": -0.3},
    "dlse": {"with_dlse": True, "causal": True},
    "sink": {"sink": RNG.standard_normal(4).astype(np.float32), "window": (3, 0)},
    "lengths": {**LENGTHS, "hidden_keys": (slice(None), slice(120, None)), "hidden_queries": (1, slice(70, None))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    both(*inputs(64, 64), **OPTIONS[name])


@pytest.mark.parametrize("head_dims", [(160, 72), (192, 192), (256, 200)])
@pytest.mark.parametrize("name", ["softcap", "softcap, alibi", "bias", "mask", "block mask"])
def test_options_of_wide_heads(head_dims: tuple[int, int], name: str) -> None:
    both(*inputs(*head_dims), **OPTIONS[name])


@pytest.mark.parametrize("name", ["block mask", "mask", "softcap"])
def test_options_of_wide_heads_with_lengths(name: str) -> None:
    both(*inputs(200, 256), **{**OPTIONS[name], **LENGTHS, "hidden_queries": (1, slice(70, None))})


BLOCKS = RNG.random((LENGTH_Q, LENGTH_K)) < 0.6
BLOCKS[:, 60:90] = False
BLOCKS[70:] |= np.arange(LENGTH_K) >= 128  # some blocks are visible
OPTIONS["blocks"] = {"block_mask": cuflash.BlockMask.from_dense(BLOCKS), "hidden_keys": (slice(None), slice(60, 90))}
COMBINATIONS = [
    "bias, alibi",
    "bias, softcap",
    "bias, mask, blocks",
    "bias, blocks, dropout",
    "mask, dropout",
    "mask, blocks, softcap, alibi, dropout",
    "blocks, softcap",
    "blocks, dropout",
    "alibi, dropout",
]


def combined(names: str) -> dict[str, Any]:
    return {key: x for name in names.split(", ") for key, x in OPTIONS[name].items()}


def padded(options: dict[str, Any], keys: int) -> dict[str, Any]:
    """Give arrays like the scores so many more keys, which all queries see."""
    pad = (0, 0), (0, keys)
    return {
        name: cuflash.BlockMask.from_dense(np.pad(BLOCKS, pad, constant_values=True))
        if name == "block_mask"
        else np.pad(x, pad, constant_values=name == "mask")
        if name in ("bias", "mask")
        else x
        for name, x in options.items()
    }


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 96), (192, 128), (192, 192), (256, 200)], ids=str)
@pytest.mark.parametrize("names", COMBINATIONS)
def test_several_options(names: str, head_dims: tuple[int, int], deterministic: bool) -> None:
    chosen = names.split(", ")[: None if head_dims[1] <= 192 else 2]  # for more there are too few registers
    if head_dims[0] > 192 and deterministic and chosen == ["bias", "blocks"]:
        chosen = ["bias", "dropout"]
    keys = 208  # vectors of 16
    q, k, v = (normal(2, n, h, d) for n, h, d in ((LENGTH_Q, 4, head_dims[0]), *((keys, 2, d) for d in head_dims)))
    options = padded(combined(", ".join(chosen)), keys - LENGTH_K)
    both(q, k, v, **{**options, **LENGTHS}, deterministic=deterministic)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_softcap_beside_a_bias_by_elements(head_dims: tuple[int, int]) -> None:
    """A large bias leaves few digits of scores, and all of the derivative."""
    bias = np.where(MASK, RNG.standard_normal(MASK.shape), -np.inf).astype(np.float32)
    bias[11, MASK[11]] = -3e4
    both(*inputs(*head_dims), bias=bias, softcap=0.7, hidden_keys=HIDDEN_BY_MASK)


def test_block_masks_of_heads_that_share_keys() -> None:
    mask = np.stack([np.roll(MASK, 37 * head) for head in range(4)])
    both(*inputs(192, 128), block_mask=cuflash.BlockMask.from_dense(mask), window=(100, 30))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_mask_in_vectors(head_dim: int) -> None:
    keys = 208  # vectors of 16
    mask = np.pad(MASK, ((0, 0), (0, keys - LENGTH_K)), constant_values=True)
    q, k, v = normal(2, LENGTH_Q, 4, head_dim), normal(2, keys, 2, head_dim), normal(2, keys, 2, head_dim)
    both(q, k, v, mask=mask, hidden_keys=HIDDEN_BY_MASK, window=(100, 30))
    assert any(getattr(x.kernel.config, "has_mask_vectors", False) for x in launch._launches.values())


@pytest.mark.parametrize("rows", [1, LENGTH_Q], ids=["one row", "stride of 0"])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_bias_and_mask_of_keys_alone(name: str, rows: int) -> None:
    keys = 208  # vectors of 16
    x: Array = np.pad(MASK[:1], ((0, 0), (0, keys - LENGTH_K)), constant_values=True)
    if name == "bias":
        x = np.where(x, normal(2, 1, 1, keys), np.float16(-np.inf))
    q, k, v = normal(2, LENGTH_Q, 4, 64), normal(2, keys, 2, 64), normal(2, keys, 2, 64)
    options: dict[str, Any] = {name: np.broadcast_to(x, (*x.shape[:-2], rows, keys))}
    both(q, k, v, hidden_keys=HIDDEN_BY_MASK, **options)
    config = next(x.kernel.config for x in launch._launches.values() if x.kernel.entry == sm90_backward_tiles.NARROW)
    assert isinstance(config, Sm90BackwardConfig)
    assert config.has_bias_tiles or config.has_mask_vectors


@pytest.mark.parametrize("name", ["softcap", "block mask"])
def test_options_with_one_tile_of_queries_for_two_of_keys(name: str) -> None:
    both(*inputs(128, 128), **OPTIONS[name])
    assert sm90_backward_tiles.NARROW in {x.kernel.entry for x in launch._launches.values()}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"window": (60, 20)}, LENGTHS], ids=["window", "lengths"])
def test_gradient_of_a_whole_bias_comes_beside_the_others(head_dim: int, options: dict[str, Any]) -> None:
    bias = np.where(MASK, normal(2, 4, LENGTH_Q, LENGTH_K), np.float16(-np.inf))
    both(*inputs(head_dim, head_dim), bias=bias, hidden_keys=HIDDEN_BY_MASK, **options)
    assert {x.kernel.entry for x in launch._launches.values()} == {
        sm90_backward.ROWS,
        sm90_backward_tiles.NARROW,
        sm90_backward.DQ,
    }


def test_gradient_of_a_whole_bias_beside_other_options() -> None:
    bias = normal(2, 4, LENGTH_Q, 208)
    for names, kernels in (("mask", 3), ("dropout", 3), ("blocks", 4)):
        q, k, v = normal(2, LENGTH_Q, 4, 64), normal(2, 208, 2, 64), normal(2, 208, 2, 64)
        both(q, k, v, bias=bias, **{**padded(combined(names), 8), **LENGTHS})
        # Nobody writes what a block mask leaves out, so the gradient has a kernel of its own.
        assert len({x.kernel.entry for x in launch._launches.values()}) == kernels


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("options", [{"causal": True}, LENGTHS], ids=["causal", "lengths"])
def test_sums_have_an_order_in_long_sequences(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(hardware, "L2_BYTES", 0)  # one head alone comes in the order of the last group
    both(*inputs(head_dim, head_dim), deterministic=True, **options)


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_some_gradients_are_the_same_in_order(wanted: str) -> None:
    q, k, v = inputs(256, 256)
    out, lse = cuflash.attention(*(x.astype(np.float32) for x in (q, k, v)), return_lse=True)
    dout = normal(*out.shape)
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        every, some = (
            cuflash.attention_backward(dout, q, k, v, out.astype(q.dtype), lse, deterministic=True, grads=tuple(grads))
            for grads in ("qkv", wanted)
        )
    x: Any
    y: Any
    for name, x, y in zip("qkv", some, every, strict=True):
        assert np.array_equal(x, y) if name in wanted else x is None


def test_float32_takes_other_kernels() -> None:
    problem = AttentionProblem(1, 8, 8, 1, 1, 64, 64, "float32")
    assert "float32" in reasons.backward_sm90(problem)


@pytest.mark.parametrize("options", [{"window": (30, 10)}, LENGTHS], ids=["window", "lengths"])
def test_pairs_of_blocks_compute_dq_by_turns(options: dict[str, Any]) -> None:
    both(*inputs(192, 128), **options)
    assert launched_pair() == 2


def test_pairs_of_blocks_take_many_tiles() -> None:
    both(normal(1, 300, 2, 192), normal(1, 1900, 1, 192), normal(1, 1900, 1, 128), window=(300, 0))
    assert launched_pair() == 2


def test_blocks_without_pairs_take_keys_that_pairs_would_waste() -> None:
    both(normal(2, 300, 2, 192), normal(2, 40, 2, 192), normal(2, 40, 2, 128))
    assert launched_pair() == 1


def launched_pair() -> int:
    """Return how many thread blocks of the main kernel were a cluster."""
    kernels = [x.kernel for x in launch._launches.values()]
    (pair,) = {kernel.config.pair for kernel in kernels if isinstance(kernel, gpu_sm90.Gradients)}
    return pair


def test_grouped_heads_visit_many_queries_together() -> None:
    both(normal(1, 1100, 4, 128), normal(1, 300, 2, 128), normal(1, 300, 2, 128), causal=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tail", [1, 300])
def test_padding_far_behind_packed_queries(deterministic: bool, tail: int) -> None:
    """There may be no tile of queries where padding begins; dq is written there all the same, and no other memory."""
    q, k, v, dout = (normal(n, 2, 64) for n in (9, 512 + tail, 512 + tail, 9))
    cu_seqlens = (np.array([0, 8], np.int32), np.array([0, 512], np.int32))
    exact_q, exact_k, exact_v = wide(q[None, :8]), wide(k[None, :512]), wide(v[None, :512])
    expected_out, lse = cuflash.attention(exact_q, exact_k, exact_v, return_lse=True)
    expected = cuflash.attention_backward(wide(dout[None, :8]), exact_q, exact_k, exact_v, expected_out, lse)
    out = np.zeros_like(q)
    out[:8] = expected_out[0]
    all_lse = np.full((2, 9), -np.inf, np.float32)
    all_lse[:, :8] = lse[0]
    grads = tuple(np.full_like(x, np.nan) for x in (q, k, v))
    with hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)):
        cuflash.attention_varlen_backward(
            dout, q, k, v, out, all_lse, *cu_seqlens, deterministic=deterministic, out=grads
        )
    for x, ref in zip(grads, expected, strict=True):
        np.testing.assert_allclose(x[: ref.shape[1]], ref[0], atol=8e-3, rtol=8e-3)
        assert not x[ref.shape[1] :].any()


@needs_compiler
@pytest.mark.parametrize("entry", sorted({config.entry for config, _ in listing.kernels(sm90_listing.of_backward())}))
def test_every_row_compiles_without_spills(entry: str) -> None:
    configs = [
        c for c, dtype in listing.kernels(sm90_listing.of_backward()) if c.entry == entry and dtype == "bfloat16"
    ]
    for config in compiled(HOPPER, configs):
        assert_compiles_well(HOPPER, config)
