"""Merging the results of attention over disjoint keys, and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import DTYPES, accum_dtype, gaussian, gaussian_case, np_dtype, same_bits
from devices import Device
from numpy.typing import NDArray

import cuflash
from cuflash import reference

Array = NDArray[Any]

OUT_SHAPES = [(2, 9, 3, 5), (11, 3, 5)]  # padded, packed


def lse_shape(out_shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*out_shape[:-3], out_shape[-2], out_shape[-3])


def make_parts(
    count: int, out_shape: tuple[int, ...], dtype: str, seed: int = 0, hidden: float = 0.3
) -> tuple[list[Array], list[Array]]:
    """Make parts of which some rows see nothing: their lse is -inf, and their out NaN."""
    rng = np.random.default_rng(seed)
    outs = [gaussian(rng, out_shape, dtype) for _ in range(count)]
    lses = [gaussian(rng, lse_shape(out_shape), accum_dtype(np_dtype(dtype)), 3.0) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        lse[rng.random(lse.shape) < hidden] = -np.inf
        lse[..., 1] = -np.inf if hidden else lse[..., 1]  # a row that no part sees
        out[np.isneginf(lse).swapaxes(-1, -2)] = np.nan
    return outs, lses


def exact_merge(outs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    """Compute the definition in float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        wide = np.stack(lses).astype(np.float64)
        total = np.exp(wide).sum(axis=0)
        weights = np.where(total > 0, np.exp(wide) / total, 0).swapaxes(-1, -2)[..., None]
        values = np.where(weights > 0, np.stack(outs).astype(np.float64), 0)
        return (weights * values).sum(axis=0), np.log(total)


def merge_backward(*arguments: Any) -> Any:
    """Call the library's function with the parts and the merged pair unpacked."""
    return cuflash.merge_backward(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_shape", OUT_SHAPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_definition(device: Device, count: int, out_shape: tuple[int, ...], dtype: str) -> None:
    """Parts have weights by lse, and none with -inf even where out is NaN; all -inf gives 0 and -inf."""
    outs, lses = make_parts(count, out_shape, dtype)
    out, lse = device.get(cuflash.merge(device.put(outs), device.put(lses)))
    expected_out, expected_lse = exact_merge(outs, lses)
    assert (out.dtype, out.shape) == (outs[0].dtype, out_shape)
    assert (lse.dtype, lse.shape) == (lses[0].dtype, lses[0].shape)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-50}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected_out, rtol=eps, atol=eps)
    lse_eps = 1e-6 if dtype != "float64" else 1e-14
    np.testing.assert_allclose(lse, expected_lse, rtol=lse_eps, atol=lse_eps)
    empty = np.isneginf(np.stack(lses)).all(axis=0)
    assert empty.any() and np.isneginf(lse[empty]).all() and not out.swapaxes(-2, -3)[empty].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_shape", OUT_SHAPES)
def test_gradient_formula(device: Device, out_shape: tuple[int, ...], dtype: str) -> None:
    outs, lses = make_parts(3, out_shape, dtype)
    rng = np.random.default_rng(1)
    dout, dlse = gaussian(rng, out_shape, dtype), gaussian(rng, lse_shape(out_shape), lses[0].dtype)
    parts: Any = device.put((outs, lses))
    merged = cuflash.merge(*parts)
    out, lse = device.get(merged)
    eps = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-20, "float64": 2.0**-48}[dtype]
    for with_dlse in (False, True):
        given = device.put(dlse) if with_dlse else None
        douts, dlses = device.get(merge_backward(device.put(dout), given, *parts, *merged))
        assert len(douts) == len(dlses) == 3
        for part_out, part_lse, part_dout, part_dlse in zip(outs, lses, douts, dlses, strict=True):
            assert (part_dout.dtype, part_dlse.dtype) == (part_out.dtype, part_lse.dtype)
            with np.errstate(invalid="ignore"):
                seen = ~np.isneginf(part_lse)
                weight = np.where(seen, np.exp(part_lse.astype(np.float64) - lse), 0)
                rows = (dout.astype(np.float64) * (part_out.astype(np.float64) - out.astype(np.float64))).sum(axis=-1)
                expected_dlse = np.where(seen, weight * (rows.swapaxes(-1, -2) + (dlse if with_dlse else 0)), 0)
            expected_dout = weight.swapaxes(-1, -2)[..., None] * dout.astype(np.float64)
            np.testing.assert_allclose(part_dout.astype(np.float64), expected_dout, rtol=eps, atol=eps)
            np.testing.assert_allclose(part_dlse, expected_dlse, rtol=1e-4 if dtype != "float64" else 1e-12, atol=1e-5)


@pytest.mark.parametrize("out_shape", OUT_SHAPES)
def test_gradient_is_a_difference(device: Device, out_shape: tuple[int, ...]) -> None:
    outs, lses = make_parts(3, out_shape, "float64", hidden=0.0)
    rng = np.random.default_rng(2)
    dout, dlse = rng.standard_normal(out_shape), rng.standard_normal(lse_shape(out_shape))
    directions = [rng.standard_normal(x.shape) for x in (*outs, *lses)]

    def objective(step: float) -> float:
        moved = [x + step * along for x, along in zip((*outs, *lses), directions, strict=True)]
        out, lse = device.get(cuflash.merge(device.put(moved[:3]), device.put(moved[3:])))
        return float((out * dout).sum() + (lse * dlse).sum())

    parts: Any = device.put((outs, lses))
    douts, dlses = device.get(merge_backward(device.put(dout), device.put(dlse), *parts, *cuflash.merge(*parts)))
    along = sum(float((g * d).sum()) for g, d in zip((*douts, *dlses), directions, strict=True))
    assert along == pytest.approx((objective(1e-6) - objective(-1e-6)) / 2e-6, rel=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_merging(device: Device, dtype: str) -> None:
    """Merging one by one in float32 is merging all at once; rounding between would cost 16-bit digits."""
    outs, lses = make_parts(4, (2, 9, 3, 5), dtype)
    exact_out, exact_lse = exact_merge(outs, lses)
    wide = "float64" if dtype == "float64" else "float32"
    at_once = cuflash.merge(device.put(outs), device.put(lses), out_dtype=wide)
    out, lse = device.put(outs[3]), device.put(lses[3])
    for index in (1, 0, 2):
        out, lse = cuflash.merge([out, device.put(outs[index])], [lse, device.put(lses[index])], out_dtype=wide)
    tolerance = 1e-14 if dtype == "float64" else 2e-6
    for result in (device.get(at_once), device.get((out, lse))):
        assert result[0].dtype == wide
        np.testing.assert_allclose(result[0], exact_out, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(result[1], exact_lse, rtol=tolerance, atol=tolerance)


def test_out_dtype(device: Device) -> None:
    outs, lses = make_parts(2, (2, 9, 3, 5), "float16")
    parts: Any = device.put((outs, lses))
    for given in ("float32", "f", np.float32, np.dtype("float32"), "bfloat16", np_dtype("bfloat16"), "float64", None):
        out, lse = device.get(cuflash.merge(parts[0], parts[1], out_dtype=given))
        assert out.dtype == (np.float16 if given is None else np_dtype(np.dtype(given).name if given else ""))
        assert lse.dtype == np.float32
    mixed = device.put([outs[0].astype(np.float32), outs[1]])
    assert device.get(cuflash.merge(mixed, parts[1]))[0].dtype == np.float32
    wide_dout = device.put(outs[0].astype(np.float32))
    douts, _ = cuflash.merge_backward(wide_dout, None, mixed, parts[1], *cuflash.merge(mixed, parts[1]))
    assert [x.dtype for x in device.get(douts)] == [np.float32, np.float16]


def test_large_and_distant_lses(device: Device) -> None:
    """Nothing overflows, a part far below the others adds nothing, and equal parts at any height are averaged."""
    ones = np.ones((1, 1, 4, 2), np.float32)
    first = np.array([[[1e4], [-1e4], [-3.4e38], [100.0]]], np.float32)
    second = np.array([[[1e4], [-1e4], [-3.4e38], [-100.0]]], np.float32)
    out, lse = device.get(cuflash.merge(device.put([ones, 3 * ones]), device.put([first, second])))
    np.testing.assert_allclose(out[0, 0, :, 0], [2, 2, 2, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], [1e4 + np.log(2), -1e4 + np.log(2), -3.4e38, 100], rtol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_attention(device: Device, packed: bool) -> None:
    """Causal attention split into the keys before and the square on the diagonal, as a ring of devices does it."""
    case = gaussian_case(3, "float32", (70, 130), causal=True)
    q, k, v, dout = case.q, case.k, case.v, case.dout
    exact: Any = reference.attention(q, k, v, causal=True)
    exact_grads = reference.attention_backward(dout, q, k, v, causal=True)
    if packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        exact, exact_grads = [x[0] for x in exact], {name: x[0] for name, x in exact_grads.items()}
    forward: Any = cuflash.attention_varlen if packed else cuflash.attention
    backward: Any = cuflash.attention_varlen_backward if packed else cuflash.attention_backward
    parts, calls = [], []
    for span, causal in ((slice(0, 60), False), (slice(60, 130), True)):
        keys: Any = span if packed else (slice(None), span)
        arrays = device.put((q, k[keys], v[keys]))
        cu_seqlens: Any = device.put([np.array([0, len(x)], np.int32) for x in (q, k[keys])] if packed else [])
        parts.append(forward(*arrays, *cu_seqlens, causal=causal, return_lse=True))
        calls.append((arrays, cu_seqlens, causal))
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    out, lse = merged = cuflash.merge(outs, lses)
    for result, expected in zip(device.get(merged), exact, strict=True):
        np.testing.assert_allclose(result, expected, atol=5e-6)

    douts, dlses = cuflash.merge_backward(device.put(dout), None, outs, lses, out, lse)
    by_merged = [backward(device.put(dout), *a, out, lse, *cu, causal=causal) for a, cu, causal in calls]
    by_part = [
        backward(douts[i], *a, *parts[i], *cu, causal=causal, dlse=dlses[i]) for i, (a, cu, causal) in enumerate(calls)
    ]
    for grads in (device.get(by_merged), device.get(by_part)):
        np.testing.assert_allclose(grads[0][0] + grads[1][0], exact_grads["q"], atol=2e-5)
        for index, name in ((1, "k"), (2, "v")):
            whole = np.concatenate([grads[0][index], grads[1][index]], axis=0 if packed else 1)
            np.testing.assert_allclose(whole, exact_grads[name], atol=2e-5)


def test_strides_empty_sizes_and_inputs_unchanged(device: Device) -> None:
    outs, lses = make_parts(2, (2, 9, 3, 5), "float32")
    expected = device.get(cuflash.merge(device.put(outs), device.put(lses)))
    strided = device.put([np.asfortranarray(outs[0]), np.repeat(outs[1], 2, axis=3)[..., ::2]])
    before = device.get(strided)
    result = device.get(cuflash.merge(strided, device.put([np.asfortranarray(x) for x in lses])))
    assert all(same_bits(x, y) for x, y in zip(expected, result, strict=True))
    assert all(same_bits(x, y) for x, y in zip(before, device.get(strided), strict=True))
    for shape in ((0, 9, 3, 5), (2, 0, 3, 5), (0, 3, 5)):
        empty = device.put([np.zeros(shape, np.float32)] * 2), device.put([np.zeros(lse_shape(shape), np.float32)] * 2)
        out, lse = cuflash.merge(*empty)
        assert out.shape == shape
        douts, _ = cuflash.merge_backward(out, lse, *empty, out, lse)
        assert douts[0].shape == shape


def test_other_libraries() -> None:
    torch = pytest.importorskip("torch")
    outs, lses = make_parts(2, (2, 9, 3, 5), "bfloat16")
    expected = cuflash.merge(outs, lses, out_dtype="float32")
    tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in outs]
    given = tensors, [torch.from_numpy(x) for x in lses]
    for dtype in ("float32", torch.float32):
        out, lse = cuflash.merge(*given, out_dtype=dtype)
        assert (
            out.dtype == torch.float32 and same_bits(out.numpy(), expected[0]) and same_bits(lse.numpy(), expected[1])
        )
    merged = cuflash.merge(*given)
    assert merged[0].dtype == torch.bfloat16
    douts, dlses = cuflash.merge_backward(merged[0], None, *given, *merged)
    assert douts[0].dtype == torch.bfloat16 and dlses[1].dtype == torch.float32
    with pytest.raises(TypeError, match="torch"):
        cuflash.merge(tensors, lses)


A, L = np.zeros((2, 4, 3, 5), np.float32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "outs: expected a list or tuple of arrays, got ndarray", (A, [L])),
        (TypeError, "lses: expected a list or tuple of arrays, got ndarray", ([A], L)),
        (ValueError, "outs: expected at least one part", ([], [])),
        (ValueError, "lses: expected one for each of the 2 outs, got 1", ([A, A], [L])),
        (TypeError, "outs[1]: expected an array", ([A, 3.0], [L, L])),
        (
            TypeError,
            "outs[0]: expected dtype float16 or bfloat16 or float32 or float64, got int32",
            ([A.astype("i4")], [L]),
        ),
        (TypeError, "lses[0]: expected dtype float32 or float64, got float16", ([A], [L.astype("f2")])),
        (TypeError, "lses[1]: expected dtype float32, got float64", ([A, A], [L, L.astype("f8")])),
        (ValueError, "outs[0]: expected (batch, seqlen_q, num_heads_q, head_dim_v) or (total_q", ([A[0, 0]], [L])),
        (ValueError, "outs[1]: expected shape (2, 4, 3, 5)", ([A, A[:, :3]], [L, L])),
        (
            ValueError,
            "lses[0]: expected shape (2, 3, 4) to go with outs[0] of shape (2, 4, 3, 5), got (2, 4, 3)",
            ([A], [L.swapaxes(1, 2)]),
        ),
        (TypeError, "out_dtype: expected None, float16, bfloat16, float32, float64, got 'int32'", ([A], [L], "int32")),
        (TypeError, "out_dtype: expected", ([A], [L], 5)),
    ],
)
def test_errors(error: type[Exception], words: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error) as caught:
        cuflash.merge(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "dout: expected dtype float32, got float64", {"dout": A.astype("f8")}),
        (ValueError, "dout: expected shape (2, 4, 3, 5)", {"dout": A[:1]}),
        (ValueError, "out: expected shape (2, 4, 3, 5)", {"out": A[..., :3]}),
        (TypeError, "lse: expected dtype float32, got float64", {"lse": L.astype("f8")}),
        (TypeError, "dlse: expected dtype float32, got float16", {"dlse": L.astype("f2")}),
        (ValueError, "dlse: expected shape (2, 3, 4)", {"dlse": L[..., :1]}),
        (TypeError, "lse: expected an array", {"lse": None}),
    ],
)
def test_backward_errors(error: type[Exception], words: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"dout": A, "dlse": None, "outs": [A, A], "lses": [L, L], "out": A, "lse": L} | changes
    with pytest.raises(error) as caught:
        cuflash.merge_backward(**arguments)
    assert words in str(caught.value)
