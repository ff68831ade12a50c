"""The library's kernels run on the CPU device as every architecture that the plan knows: the suite's main property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import devices
import numpy as np
import pytest
from address_sanitizer import run_sanitized
from cases import DTYPES, Case, gaussian, gaussian_case, np_dtype
from cpu_device import build, hook
from cpu_device import device as cpu_device
from cpu_device.device import Check, CpuDevice
from devices import Device
from hypothesis import given
from strategies import cases, examples

import cuflash
from cuflash import reference
from cuflash.gpu import launch
from cuflash.plan.decode import kernels as decode

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

HOST = Device("numpy", np)
# There are fewer multiprocessors than tiles, so that a persistent thread block takes several.
NUM_SMS = 3


@pytest.fixture(scope="module", params=[(7, 5), (8, 0), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def plain(capability: tuple[int, int]) -> Iterator[CpuDevice]:
    with hook.kernels_on(CpuDevice(capability, NUM_SMS, Check.NONE)) as device:
        yield device


@pytest.fixture(scope="module")
def checked(capability: tuple[int, int]) -> Iterator[CpuDevice]:
    with hook.kernels_on(CpuDevice(capability, NUM_SMS, Check.SHARED)) as device:
        yield device


# Every class of head dims that a table of some architecture has rows for is here once.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def assert_agrees(case: Case) -> None:
    on_device = case.on(HOST)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


DROPOUT: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 0x0123456789ABCDEF}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_family_drops_the_same_weights(dtype: str, head_dim: int, packed: bool) -> None:
    """Both passes drop the same weights, read off by one-hot values; heads are grouped, sizes fill no tile."""
    heads, lengths = 2, [(37, 71), (75, 19)] if packed else [(53, 139), (53, 139)]
    kept = [
        reference.dropout_keep(1, heads, *of_sequence, DROPOUT["dropout_p"], DROPOUT["dropout_seed"], b)[0]
        for b, of_sequence in enumerate(lengths)
    ]
    if packed:
        rows, keys = (sum(n) for n in zip(*lengths, strict=True))
        cu_seqlens = [np.array([0, *np.cumsum(n)], np.int32) for n in zip(*lengths, strict=True)]
        whole = np.zeros((heads, rows, keys), bool)
        whole[:, : lengths[0][0], : lengths[0][1]], whole[:, lengths[0][0] :, lengths[0][1] :] = kept
        own_options: dict[str, Any] = {**DROPOUT, "cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1]}
    else:
        (rows, keys), whole, own_options = lengths[0], np.stack(kept), DROPOUT
    attention: Any = cuflash.attention_varlen_vjp if packed else cuflash.attention_vjp
    q, k = (np.zeros((*whole.shape[:-3], n, h, head_dim), np_dtype(dtype)) for n, h in ((rows, heads), (keys, 1)))
    for first in range(0, max(rows, keys), head_dim):
        v, dout = np.zeros_like(k), np.zeros_like(q)
        some_keys, some_rows = (np.eye(n, dtype=v.dtype)[:, first : first + head_dim] for n in (keys, rows))
        v[..., 0, : some_keys.shape[1]], dout[..., : some_rows.shape[1]] = some_keys, some_rows[:, None]
        out, backward = attention(q, k, v, **own_options)
        found = out.swapaxes(-2, -3)[..., : some_keys.shape[1]] != 0
        assert np.array_equal(found, whole[..., first : first + head_dim])
        for head in range(heads):  # dv is a sum over those of the group
            dv = backward(np.where(np.arange(heads)[:, None] == head, dout, 0).astype(v.dtype))[2]
            found = dv[..., 0, : some_rows.shape[1]].swapaxes(-1, -2) != 0
            assert np.array_equal(found, whole[..., head, first : first + head_dim, :])


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_with_dropout(dtype: str, head_dim: int) -> None:
    assert_agrees(gaussian_case(0, dtype, (70, 150), (4, 2), (head_dim, head_dim), 1, **DROPOUT))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shared_slopes", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_over_rows_leave_out_those_of_no_sequence(dtype: str, shared_slopes: bool) -> None:
    """Nothing is ever written for packed rows before the first sequence and behind the last one."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (gaussian(rng, (40, 2, 32), dtype) for _ in range(4))
    cu_seqlens = np.array([3, 9, 30], np.int32)
    slopes = np.array([[0.5, 0.25], [0.125, 1.0]], np.float32)
    options = {"sink": np.zeros(2, np.float32), "alibi_slopes": slopes[0] if shared_slopes else slopes}
    assert_agrees(Case(q, k, v, dout, options=options, cu_seqlens=(cu_seqlens, cu_seqlens)))


@pytest.mark.usefixtures("plain")
@examples(100, quick=8)
@given(case=cases())
def test_kernels_agree_with_reference(case: Case) -> None:
    assert_agrees(case)


@pytest.mark.usefixtures("checked")
@examples(30, quick=3)
@given(case=cases(max_scores=20_000))
def test_kernels_have_no_defect_that_the_checked_mode_sees(case: Case) -> None:
    assert_agrees(case)


HOPPER = CpuDevice((9, 0), NUM_SMS, Check.SHARED)


@examples(15, quick=3)
@given(case=cases(dtypes=("float16", "bfloat16"), empty=False, strided=False, whole_vectors=True, max_scores=15_000))
def test_hoppers_own_kernels_have_no_defect_that_the_checked_mode_sees(case: Case) -> None:
    """Hopper's kernels take these problems: all that have scores in the forward pass, most in the backward pass.

    One query of a head may be for the kernel for decoding.
    """
    devices.forget_launches()
    with hook.kernels_on(HOPPER):
        assert_agrees(case)
    if case.q.size and case.k.size:
        taken = {x.kernel.entry for x in launch._launches.values()}
        assert "forward_sm90" in taken or (case.q.shape[1] == 1 and decode.ENTRY in taken)


@pytest.mark.parametrize("head_dim", [8, 40, 104, 144])
def test_columns_that_a_kernel_lacks_are_never_read(head_dim: int) -> None:
    """A panel of shared memory has 64 columns, of which kernels for other head dims write some."""
    block_mask = np.random.default_rng(0).random((150, 200)) < 0.7
    with hook.kernels_on(HOPPER):
        assert_agrees(gaussian_case(0, "bfloat16", (150, 200), (2, 1), (head_dim, head_dim), 1, block_mask=block_mask))


@pytest.mark.skipif(not build.has_sanitizers(), reason=build.NO_SANITIZERS)
@pytest.mark.parametrize("options", [{}, {"window": (20, 3), "kv_lengths": [50]}], ids=["plain", "window, lengths"])
def test_kernels_stay_within_their_arrays(capability: tuple[int, int], options: dict[str, Any]) -> None:
    """AddressSanitizer sees sizes that fill no tile; 16-bit inputs take an architecture's own kernels."""
    run = run_sanitized(
        f"""
import numpy as np
from test_cpu_device_kernels import HOST, CpuDevice, Check, assert_agrees, gaussian_case, hook
options = {options!r}
if "kv_lengths" in options:
    options["kv_lengths"] = np.array(options["kv_lengths"], np.int32)
with hook.kernels_on(CpuDevice({capability}, {NUM_SMS}, Check.ADDRESS)):
    assert_agrees(gaussian_case(0, "float16", (70, 75), (2, 1), (40, 72), 1, **options))
"""
    )
    assert run.returncode == 0, run.stderr[-4000:]
