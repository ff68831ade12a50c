"""Properties that hold for every attention problem, on every device.

Results agree with the reference, gradients are those of the function, invariances and bitwise promises hold, and data
that nobody may see changes nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, accum_dtype, assert_same_bits, gaussian, gaussian_case, same_bits
from devices import Device
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import POSITIONAL, cases, examples
from visibility import blind_rows, hidden_keys, padded_rows

import cuflash

Array = NDArray[Any]

# A result that is right comes without a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@examples(200)
@given(case=cases(packed=False))
def test_padded_agrees_with_reference(device: Device, case: Case) -> None:
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@examples(150)
@given(case=cases(packed=True))
def test_packed_agrees_with_reference(device: Device, case: Case) -> None:
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


@examples(60)
@given(case=cases(dtypes=("float64",), empty=False, strided=False, max_head_dim=24, max_scores=8_000), data=st.data())
def test_finite_differences(device: Device, case: Case, data: st.DataObject) -> None:
    """Gradients are the derivatives of sum(dout * out) + sum(dlse * lse) along random directions."""
    if case.options.get("bias") is not None:
        # The bias is float64, as float32 would lose a small step.
        case = case.with_options(bias=case.options["bias"].astype(np.float64))
    case = replace(case, dlse=gaussian(np.random.default_rng(1), case.lse_shape, "float64"))
    sees = ~np.isneginf(case.reference_forward()[1])

    def loss(moved: Case) -> float:
        out, lse = moved.on(device).forward()
        assert case.dlse is not None
        return float((case.dout * out).sum() + (case.dlse[sees] * lse[sees]).sum())

    on_device = case.on(device)
    grads = on_device.backward(*on_device.forward())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    step = 1e-5
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        here = case.input_of(name)
        ahead, behind = (case.with_inputs(**{name: np.asarray(here + sign * step * direction)}) for sign in (1, -1))
        expected = (loss(ahead) - loss(behind)) / (2 * step)
        terms = np.abs(grad * direction).sum() + np.abs(case.dout).sum()
        assert abs((grad * direction).sum() - expected) <= 1e-7 * terms + 1e-6 * abs(expected), name


@examples(60)
@given(case=cases(packed=False, without=(*POSITIONAL, "kv_lengths")), seed=st.integers(0, 2**32 - 1))
def test_order_of_keys_does_not_matter(device: Device, case: Case, seed: int) -> None:
    """Permuting keys permutes dk, dv and the columns of dbias, and changes nothing else."""
    order = np.random.default_rng(seed).permutation(case.k.shape[1])
    moved = case.with_inputs(k=case.k[:, order], v=case.v[:, order])
    wide = [name for name in ("bias", "mask", "block_mask") if _has_columns(case, name)]
    moved = moved.with_options(**{name: case.options[name][..., order] for name in wide})

    on_device = moved.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    grads = on_device.backward(out, lse)
    back = np.argsort(order)
    grads["k"], grads["v"] = grads["k"][:, back], grads["v"][:, back]
    if "bias" in wide:
        grads["bias"] = grads["bias"][..., back]
    case.assert_gradients(grads)


def _has_columns(case: Case, name: str) -> bool:
    """Return True if a bias or mask is there and has an entry for every key."""
    extra = case.options.get(name)
    return extra is not None and extra.ndim > 0 and extra.shape[-1] == case.k.shape[1]


def _split_keys(case: Case, at: list[int]) -> list[Case]:
    """Return the problems over each range of keys; a sink joins the first."""
    parts = []
    for index, (first, last) in enumerate(zip([0, *at], [*at, case.k.shape[1]], strict=True)):
        own = replace(case, k=case.k[:, first:last], v=case.v[:, first:last])
        for name in ("bias", "mask", "block_mask"):
            if _has_columns(case, name):
                own = own.with_options(**{name: case.options[name][..., first:last]})
        parts.append(own if index == 0 else own.with_options(sink=None))
    return parts


@examples(60)
@given(case=cases(packed=False, without=(*POSITIONAL, "kv_lengths"), empty=False), data=st.data())
def test_split_keys_merge_to_the_whole(device: Device, case: Case, data: st.DataObject) -> None:
    seqlen_k = case.k.shape[1]
    assume(seqlen_k > 1)  # one key's bias cannot be told from a bias that is the same for all keys
    case = replace(case, dlse=gaussian(np.random.default_rng(2), case.lse_shape, accum_dtype(case.dtype)))
    at = sorted(data.draw(st.lists(st.integers(0, seqlen_k), min_size=1, max_size=2)))
    parts = _split_keys(case, at)
    on_device = [part.on(device) for part in parts]
    results = [part.forward() for part in on_device]
    outs, lses = device.put([out for out, _ in results]), device.put([lse for _, lse in results])
    merged = cuflash.merge(outs, lses)
    out, lse = device.get(merged)
    case.assert_forward(out, lse)

    # Each part's gradients from the merged result, and from its own result through the gradient of the merge.
    direct = [part.backward(out, lse) for part in on_device]
    case.assert_gradients(_join(case, direct))
    dout, dlse = device.put((case.dout, case.dlse))
    douts, dlses = device.get(cuflash.merge_backward(dout, dlse, outs, lses, *merged))
    chained = [
        replace(part, dout=own_dout, dlse=own_dlse).on(device).backward(*result)
        for part, own_dout, own_dlse, result in zip(parts, douts, dlses, results, strict=True)
    ]
    case.assert_gradients(_join(case, chained))


def _join(case: Case, grads: list[dict[str, Array]]) -> dict[str, Array]:
    """Make the gradients of the whole from those of its ranges of keys."""
    whole: dict[str, Array] = {}
    for name in case.grad_names:
        if name in ("k", "v"):
            whole[name] = np.concatenate([own[name] for own in grads], axis=1)
        elif name == "bias" and _has_columns(case, name):
            whole[name] = np.concatenate([own[name] for own in grads], axis=-1)
        elif name == "sink":
            whole[name] = grads[0][name]
        else:
            total = np.sum([own[name].astype(np.float64) for own in grads], axis=0)
            whole[name] = total.astype(case.input_of(name).dtype)
    return whole


@examples(60)
@given(case=cases(always=("mask",), without=("block_mask",)))
def test_block_mask_is_the_same_dense_mask(device: Device, case: Case) -> None:
    """A mask may be given as block mask; an all-true block mask added to it changes nothing."""
    mask = np.atleast_2d(case.options["mask"])
    sizes = [size if own == 1 else own for size, own in zip(_longest(case), mask.shape[-2:], strict=True)]
    mask = np.broadcast_to(mask, (*mask.shape[:-2], *sizes))
    all_true = np.ones(sizes, bool)
    for options in ({"mask": None, "block_mask": mask}, {"block_mask": all_true}):
        on_device = case.with_options(**options).on(device)
        out, lse = on_device.forward()
        case.assert_forward(out, lse)
        case.assert_gradients(on_device.backward(out, lse))


def _longest(case: Case) -> tuple[int, int]:
    """Return the rows and keys of the longest sequence."""
    if case.cu_seqlens is None:
        return case.q.shape[1], case.k.shape[1]
    longest_q, longest_k = (int(max(np.diff(cu), default=0)) for cu in case.cu_seqlens)
    return longest_q, longest_k


def _poisoned(x: Array, where: Array, rng: np.random.Generator) -> Array:
    """Copy `x` with NaN, inf and -inf at the rows `where`."""
    x = x.copy()
    x[where] = rng.choice([np.nan, np.inf, -np.inf], x[where].shape)
    return x


HIDING = ("mask", "q_lengths", "kv_lengths", "block_mask")


@pytest.mark.parametrize("hides", HIDING)
@examples(40)
@given(data=st.data())
def test_hidden_data_changes_no_bit(device: Device, hides: str, data: st.DataObject) -> None:
    """NaN and inf in padding and in keys that nobody sees change no bit of anything; their own gradients are 0."""
    case = data.draw(cases(always=(hides,), strided=False))
    rng = np.random.default_rng(3)
    if case.dlse is None:
        case = replace(case, dlse=np.zeros(case.lse_shape, accum_dtype(case.dtype)))
    padded, hidden, blind = padded_rows(case), hidden_keys(case), blind_rows(case)
    lse_padded = np.broadcast_to(np.expand_dims(padded, -2), case.lse_shape)
    assert case.dlse is not None
    poisoned = replace(
        case,
        q=_poisoned(case.q, padded, rng),
        dout=_poisoned(case.dout, padded, rng),
        dlse=_poisoned(case.dlse, lse_padded, rng),
        k=_poisoned(case.k, hidden, rng),
        v=_poisoned(case.v, hidden, rng),
    )
    clean_on_device, on_device = case.on(device), poisoned.on(device)
    out, lse = clean_on_device.forward()
    assert_same_bits(dict(zip("ol", on_device.forward(), strict=True)), {"o": out, "l": lse})
    assert not out[padded].any() and np.isneginf(lse[lse_padded]).all()
    assert not np.swapaxes(out, -2, -3)[blind].any()
    if "sink" not in case.options:
        assert np.array_equal(np.isneginf(lse), blind)

    clean = clean_on_device.backward(out, lse, deterministic=True)
    residuals = _poisoned(out, padded, rng), _poisoned(lse, lse_padded, rng)
    grads = on_device.backward(*residuals, deterministic=True)
    assert_same_bits(grads, clean)
    assert not grads["k"][hidden].any() and not grads["v"][hidden].any()
    assert not np.swapaxes(grads["q"], -2, -3)[blind].any()


@examples(60)
@given(case=cases(without=("deterministic",)))
def test_bits_do_not_depend_on_what_else_is_asked(device: Device, case: Case) -> None:
    """The passes give the same bits alone, with lse, by vjp, with determinism, again, stateless and in subsets."""
    on_device = case.on(device)
    out, lse = on_device.forward()
    for alone in (on_device.raw_forward(), on_device.raw_forward(deterministic=True)):
        assert same_bits(device.get(alone), out)
    again = [on_device.forward(), on_device.forward(deterministic=False)]
    vjp_out, vjp_lse, pull = on_device.vjp(deterministic=True)
    for other_out, other_lse in [*again, (vjp_out, vjp_lse)]:
        assert same_bits(other_out, out) and same_bits(other_lse, lse)

    grads = on_device.backward(out, lse, deterministic=True)
    assert_same_bits(on_device.backward(out, lse, deterministic=True), grads)
    cotangents = (case.dout,) if case.dlse is None else (case.dout, case.dlse)
    for _ in range(2):
        assert_same_bits(pull(*cotangents), grads)


@examples(40)
@given(case=cases(without=("causal", "window")), left=st.sampled_from([None, 0, 3]))
def test_causal_is_a_window(device: Device, case: Case, left: int | None) -> None:
    """window=(None, 0) is the same bits as causal=True, and causal bounds any window on the right."""
    causal = {"causal": True} if left is None else {"causal": True, "window": (left, 7)}
    a, b = case.with_options(**causal).on(device), case.with_options(window=(left, 0)).on(device)
    out, lse = a.forward()
    assert_same_bits(dict(zip("ol", b.forward(), strict=True)), {"o": out, "l": lse})
    expected = a.backward(out, lse, deterministic=True)
    assert_same_bits(b.backward(out, lse, deterministic=True), expected)


@pytest.mark.parametrize("packed", [False, True])
@examples(10)
@given(data=st.data())
def test_a_window_beyond_everything_is_no_window(device: Device, packed: bool, data: st.DataObject) -> None:
    """A window's sides may be of any size, far beyond 32 and 64 bits."""
    assert_windows_hide_nothing(device, data.draw(cases(packed=packed, without=("causal", "window"))))


@pytest.mark.parametrize("seqlens", [(1, 4), (3, 4), (5, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_window_beyond_few_keys_is_no_window(device: Device, dtype: str, seqlens: tuple[int, int]) -> None:
    assert_windows_hide_nothing(device, gaussian_case(0, dtype, seqlens, (2, 1), (1, 1), 1))


def assert_windows_hide_nothing(device: Device, case: Case) -> None:
    out, lse = case.on(device).forward()
    for side in (2**31 - 1, 2**31, 2**63, 2**80):
        for window in ((side, None), (None, side), (side, side)):
            again = case.with_options(window=window).on(device).forward()
            assert_same_bits(dict(zip("ol", again, strict=True)), {"o": out, "l": lse})


@examples(40)
@given(case=cases(), data=st.data())
def test_only_wanted_gradients(device: Device, case: Case, data: st.DataObject) -> None:
    """grads= leaves the others None and changes no bit of those wanted."""
    wanted = data.draw(st.sets(st.sampled_from(case.grad_names)))
    on_device = case.on(device)
    out, lse = on_device.forward()
    every = on_device.backward(out, lse, deterministic=True)
    some = on_device.backward(out, lse, deterministic=True, grads=tuple(wanted))
    assert {name for name, grad in some.items() if grad is not None} == wanted
    assert_same_bits({name: some[name] for name in sorted(wanted)}, {name: every[name] for name in sorted(wanted)})


@examples(40)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_backward_starts_from_the_given_out_and_lse(device: Device, case: Case, seed: int) -> None:
    """P comes from the lse that was given, whatever it is; -inf there gives zeros."""
    rng = np.random.default_rng(seed)
    own_out, own_lse = case.on(device).forward()
    out = gaussian(rng, own_out.shape, own_out.dtype)
    lse = (own_lse + rng.uniform(0, 2, own_lse.shape)).astype(own_lse.dtype)
    empty = rng.random(lse.shape) < 0.3
    lse[empty] = -np.inf
    grads = case.on(device).backward(out, lse)
    case.assert_gradients(grads, out, lse)
    assert not np.swapaxes(grads["q"], -2, -3)[empty].any()


@examples(20)
@given(case=cases(strided=False))
def test_no_state_is_shared_between_threads(device: Device, case: Case) -> None:
    """Calls of several threads at once give the bits of one call alone."""

    def work(_: int) -> dict[str, Array]:
        on_device = case.on(device)
        out, lse = on_device.forward()
        return {"out": out, "lse": lse, **on_device.backward(out, lse, deterministic=True)}

    expected = work(0)
    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(work, range(3)):
            assert_same_bits(result, expected)
