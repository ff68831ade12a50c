"""Packed sequences and used lengths: each sequence is computed as if it were alone, and padding stays zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, gaussian, same_bits
from devices import Device
from hypothesis import given
from strategies import cases, examples
from visibility import Sequence, blind_rows, padded_rows, sequences

import cuflash

# A result that is right comes without a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def _alone(case: Case, index: int, sequence: Sequence) -> Case:
    """Return the used part of one sequence as a padded problem of batch 1 without lengths."""
    rows, keys = (
        (*where[:-1], slice(where[-1].start, where[-1].start + used))
        for where, used in ((sequence.rows, sequence.used_rows), (sequence.keys, sequence.used_keys))
    )
    options = {name: x for name, x in case.options.items() if name not in ("q_lengths", "kv_lengths")}
    for name in ("bias", "mask", "block_mask"):
        if name in options:
            extra = options[name].reshape((1,) * (4 - options[name].ndim) + options[name].shape)
            own = extra[index : index + 1] if extra.shape[0] > 1 else extra
            used_rows = slice(sequence.used_rows) if own.shape[2] > 1 else slice(None)
            used_keys = slice(sequence.used_keys) if own.shape[3] > 1 else slice(None)
            options[name] = own[:, :, used_rows, used_keys]
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2 and len(slopes) > 1:
        options["alibi_slopes"] = slopes[index]
    lse_rows = (*sequence.lse_rows[:-1], rows[-1])
    return Case(
        q=case.q[rows][None],
        k=case.k[keys][None],
        v=case.v[keys][None],
        dout=case.dout[rows][None],
        dlse=None if case.dlse is None else case.dlse[lse_rows][None],
        options=options,
        block_size=case.block_size,
    )


def _assert_each_sequence_alone(device: Device, case: Case) -> None:
    on_device = case.on(device)
    out, lse = on_device.forward()
    grads = on_device.backward(out, lse)
    padded = padded_rows(case)
    assert not out[padded].any() and not grads["q"][padded].any()
    assert np.isneginf(np.swapaxes(lse, -1, -2)[padded]).all()
    for index, sequence in enumerate(sequences(case)):
        alone = _alone(case, index, sequence)
        rows = (*sequence.rows[:-1], slice(sequence.rows[-1].start, sequence.rows[-1].start + sequence.used_rows))
        keys = (*sequence.keys[:-1], slice(sequence.keys[-1].start, sequence.keys[-1].start + sequence.used_keys))
        lse_rows = (*sequence.lse_rows[:-1], rows[-1])
        alone.assert_forward(out[rows][None], lse[lse_rows][None])
        # The extras' gradients belong to all sequences together, and agreement with the reference covers them.
        own = {"q": grads["q"][rows][None], "k": grads["k"][keys][None], "v": grads["v"][keys][None]}
        alone.assert_gradients({name: own.get(name) for name in alone.grad_names})
        unused = (*sequence.keys[:-1], slice(keys[-1].stop, sequence.keys[-1].stop))
        assert not grads["k"][unused].any() and not grads["v"][unused].any()


# Dropout draws by batch index, so a sequence alone has other bits.
@examples(100)
@given(case=cases(packed=True, without=("dropout",)))
def test_packed_sequences_are_alone(device: Device, case: Case) -> None:
    _assert_each_sequence_alone(device, case)


@examples(60)
@given(case=cases(packed=True, without=("dropout",), always=("q_lengths", "kv_lengths")))
def test_used_lengths_inside_packed_sequences(device: Device, case: Case) -> None:
    _assert_each_sequence_alone(device, case)


@examples(100)
@given(case=cases(packed=False, without=("dropout",), always=("q_lengths", "kv_lengths")))
def test_lengths_cut_the_arrays(device: Device, case: Case) -> None:
    _assert_each_sequence_alone(device, case)


def _packed(lengths_q: list[int], lengths_k: list[int], padding: int = 0, **options: Any) -> Case:
    rng = np.random.default_rng(0)
    cu_seqlens = tuple(np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k))
    total_q, total_k = sum(lengths_q) + padding, sum(lengths_k) + padding
    return Case(
        q=gaussian(rng, (total_q, 4, 16), "float32"),
        k=gaussian(rng, (total_k, 2, 16), "float32"),
        v=gaussian(rng, (total_k, 2, 8), "float32"),
        dout=gaussian(rng, (total_q, 4, 8), "float32"),
        dlse=gaussian(rng, (4, total_q), "float32"),
        options=options,
        cu_seqlens=(cu_seqlens[0], cu_seqlens[1]),
    )


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([5, 0, 7], [5, 3, 7]),
        ([5, 4, 7], [5, 0, 7]),
        ([0, 0, 0], [4, 0, 2]),
        ([3, 2], [0, 0]),
        ([1] * 150, [1] * 150),
        ([200, 1, 130], [3, 257, 129]),
        ([64, 64, 64], [64, 64, 64]),
        ([7], [9]),
        ([], []),
    ],
    ids=["no rows", "no keys", "no rows at all", "no keys at all", "many of one", "ragged", "tiles", "one", "none"],
)
@pytest.mark.parametrize("padding", [0, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_sequence_lengths(
    device: Device, lengths_q: list[int], lengths_k: list[int], padding: int, causal: bool
) -> None:
    _assert_each_sequence_alone(device, _packed(lengths_q, lengths_k, padding, causal=causal))


@pytest.mark.parametrize("values", [[0, 5, 1000], [-3, 5, 9], [0, 5, 2**31 - 1], [-(2**31), 0, 12]])
def test_cu_seqlens_are_clamped_to_the_arrays(device: Device, values: list[int]) -> None:
    """Offsets beyond the array end where it ends; the host cannot know them, the kernels must not leave the array."""
    case = _packed([5, 7], [5, 7])
    wild = np.array(values, np.int32)
    wild_case = replace(case, cu_seqlens=(wild, wild))
    tame = np.clip(wild, 0, 12)
    tame_case = replace(case, cu_seqlens=(tame, tame))
    on_device, expected = wild_case.on(device), tame_case.on(device)
    out, lse = on_device.forward()
    right_out, right_lse = expected.forward()
    assert same_bits(out, right_out) and same_bits(lse, right_lse)
    grads, right = (x.backward(out, lse, deterministic=True) for x in (on_device, expected))
    assert all(same_bits(grads[name], right[name]) for name in "qkv")
    tame_case.assert_forward(out, lse)


@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths"])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_are_clamped(device: Device, name: str, packed: bool) -> None:
    rng = np.random.default_rng(0)
    case = _packed([6, 6, 6, 6], [6, 6, 6, 6], causal=True)
    if not packed:
        q, k, v, dout = (x.reshape(4, 6, *x.shape[1:]) for x in (case.q, case.k, case.v, case.dout))
        case = Case(q, k, v, dout, gaussian(rng, (4, 4, 6), "float32"), {"causal": True})
    wild = np.array([-(2**31), 2**31 - 1, 7, -1], np.int32)
    out, lse = case.with_options(**{name: wild}).on(device).forward()
    tame_case = case.with_options(**{name: np.clip(wild, 0, 6)})
    right_out, right_lse = tame_case.on(device).forward()
    assert same_bits(out, right_out) and same_bits(lse, right_lse)
    tame_case.assert_forward(out, lse)
    tame_case.assert_gradients(case.with_options(**{name: wild}).on(device).backward(out, lse))


def test_rows_before_the_first_sequence_are_padding(device: Device) -> None:
    case = _packed([5, 7], [6, 8], padding=4)
    assert case.cu_seqlens is not None
    case = replace(case, cu_seqlens=(case.cu_seqlens[0] + 2, case.cu_seqlens[1] + 3))
    assert padded_rows(case).tolist() == [True] * 2 + [False] * 12 + [True] * 2
    _assert_each_sequence_alone(device, case)


def test_padding_with_a_sink(device: Device) -> None:
    """A real row that sees nothing has lse = sink and hands it dlse; a padded row has -inf and hands on nothing."""
    sink = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    case = _packed([3, 4], [0, 4], padding=5, sink=sink, q_lengths=np.array([2, 4], np.int32))
    on_device = case.on(device)
    out, lse = on_device.forward()
    blind, padded = blind_rows(case), padded_rows(case)
    assert padded.sum() == 1 + 5
    assert np.array_equal(lse[:, :2], np.repeat(sink[:, None], 2, axis=1))
    assert np.isneginf(lse[:, padded]).all() and np.isfinite(lse[:, ~padded]).all()
    assert not out.swapaxes(0, 1)[blind].any()
    case.assert_forward(out, lse)
    grads = on_device.backward(out, lse)
    case.assert_gradients(grads)
    assert case.dlse is not None
    only_blind = replace(case, dout=np.zeros_like(case.dout), dlse=np.where(blind, case.dlse, 0).astype(np.float32))
    dsink = only_blind.on(device).backward(out, lse)["sink"]
    np.testing.assert_allclose(dsink, case.dlse[:, :2].sum(axis=1), rtol=1e-6)


def test_forms_agree_when_nothing_is_packed(device: Device) -> None:
    """A packed call with one sequence is the padded call with batch 1."""
    packed = _packed([37], [45], causal=True)
    padded = Case(packed.q[None], packed.k[None], packed.v[None], packed.dout[None], options={"causal": True})
    out, lse = packed.on(device).forward()
    padded.assert_forward(out[None], lse[None])
    arrays = device.put((packed.q, packed.k, packed.v, *(packed.cu_seqlens or ())))
    vjp_out, backward = cuflash.attention_varlen_vjp(*arrays, causal=True)
    assert same_bits(device.get(vjp_out), out)
    grads = dict(zip("qkv", device.get(backward(device.put(packed.dout))), strict=True))
    padded.assert_gradients({name: grad[None] for name, grad in grads.items()})
