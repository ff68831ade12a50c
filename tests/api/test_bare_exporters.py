"""Arrays with `__dlpack__` alone, whose library takes none back, give NumPy's, which go with them everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import gaussian, same_bits
from libraries import Exporter, all_options_case, convert
from numpy.typing import NDArray

import cuflash

Array = NDArray[Any]


class WithoutDevice:
    """An exporter with the least that NumPy takes: no device, and no keywords of the newer protocol."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.x.__dlpack__()


def every_other(index: int, wrap: Any) -> Any:
    """Wrap every second array, from `index` on."""
    count = iter(range(index, 1000))
    return lambda x: wrap(x) if next(count) % 2 else x


WRAPPINGS: dict[str, Any] = {
    "all": lambda: Exporter,
    "without a device": lambda: WithoutDevice,
    "odd ones": lambda: every_other(0, Exporter),
    "even ones": lambda: every_other(1, Exporter),
}


def assert_plain(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert type(ours) is np.ndarray
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bare_exporters(dtype: str, wrapping: str) -> None:
    """Results of every function are NumPy's; they and plain arrays go with exporters into each further call."""
    case = all_options_case(dtype)
    plain, options = (case.q, case.k, case.v), case.library_options()
    out, lse = cuflash.attention(*plain, **options, return_lse=True)
    dlse = np.ones_like(lse)
    grads = cuflash.attention_backward(case.dout, *plain, out, lse, dlse=dlse, **options)
    wrap = WRAPPINGS[wrapping]()
    (q, k, v, dout), bare_options = convert((*plain, case.dout), wrap), convert(options, wrap)

    assert_plain(cuflash.attention(q, k, v, **bare_options, return_lse=True), (out, lse))
    residuals = dict(zip(("forward_out", "lse", "dlse"), convert((out, lse, dlse), wrap), strict=True))
    assert_plain(cuflash.attention_backward(dout, q, k, v, **residuals, **bare_options), grads)
    assert_plain(cuflash.attention_backward(case.dout, q, k, v, out, lse, dlse=dlse, **bare_options), grads)
    result, backward = cuflash.attention_vjp(q, k, v, **bare_options)
    assert_plain((result, *backward(dout, residuals["dlse"])), (out, *grads))
    assert_plain(backward(case.dout, dlse), grads)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_bare_exporters_of_packed_sequences(wrapping: str) -> None:
    rng = np.random.default_rng(0)
    attention_backward: Any = cuflash.attention_varlen_backward
    q, k, v, dout = (gaussian(rng, (12, 3, 8), "float32") for _ in range(4))
    cu = np.array([0, 5, 12], np.int32)
    sequences = (q, k, v, cu, cu)
    out, lse = cuflash.attention_varlen(*sequences, causal=True, return_lse=True)
    grads = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, causal=True)
    wrap = WRAPPINGS[wrapping]()
    bare, bare_dout = convert(sequences, wrap), wrap(dout)
    assert_plain(cuflash.attention_varlen(*bare, causal=True, return_lse=True), (out, lse))
    assert_plain(attention_backward(bare_dout, *bare[:3], out, wrap(lse), *bare[3:], causal=True), grads)
    result, backward = cuflash.attention_varlen_vjp(*bare, causal=True)
    assert_plain((result, *backward(bare_dout)), (out, *grads))


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_bare_exporters_merge(wrapping: str) -> None:
    rng = np.random.default_rng(0)
    outs = [gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(3)]
    lses = [gaussian(rng, (2, 3, 5), "float32") for _ in range(3)]
    out, lse = cuflash.merge(outs, lses)
    douts, dlses = cuflash.merge_backward(out, lse, outs, lses, out, lse)
    wrap = WRAPPINGS[wrapping]()
    bare = convert(tuple(outs), wrap), convert(tuple(lses), wrap)
    assert_plain(cuflash.merge(*bare), (out, lse))
    for results in (
        cuflash.merge_backward(wrap(out), wrap(lse), *bare, wrap(out), wrap(lse)),
        cuflash.merge_backward(out, lse, *bare, out, lse),
        cuflash.merge_backward(wrap(out), wrap(lse), outs, lses, wrap(out), wrap(lse)),
    ):
        assert_plain((*results[0], *results[1]), (*douts, *dlses))


@pytest.mark.parametrize("exporter", [Exporter, WithoutDevice])
def test_bare_exporters_as_targets(exporter: Any) -> None:
    """Memory by the protocol before 1.0, which NumPy takes for read-only, is written, too."""
    rng = np.random.default_rng(0)
    q, k, v = (gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(3))
    expected, lse = cuflash.attention(q, k, v, return_lse=True)
    target, *targets = (exporter(np.zeros_like(q)) for _ in range(4))
    assert cuflash.attention(q, k, v, out=target) is target
    assert same_bits(target.x, expected)
    cuflash.attention_backward(q, q, k, v, expected, lse, out=tuple(targets))
    assert_plain([x.x for x in targets], cuflash.attention_backward(q, q, k, v, expected, lse))
    k_cache, v_cache = (exporter(np.zeros((2, 9, 3, 8), np.float32)) for _ in range(2))
    cuflash.append_kv(k, v, k_cache, v_cache, np.array([1, 4], np.int32))
    assert same_bits(k_cache.x[1, 4:], k[1]) and same_bits(v_cache.x[0, 1:6], v[0])


def test_a_bare_exporter_of_read_only_memory_is_no_target() -> None:
    x = np.ones((2, 5, 3, 8), np.float32)
    target = np.zeros_like(x)
    target.flags.writeable = False
    out: Any = Exporter(target)
    with pytest.raises(ValueError, match="out: expected a writable array"):
        cuflash.attention(x, x, x, out=out)
    assert not target.any()


def test_bare_exporters_as_targets_and_masks() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (gaussian(rng, (2, 5, 3, 8), "float32") for _ in range(3))
    expected, lse = cuflash.attention(q, k, v, return_lse=True)
    target: Any = Exporter(np.zeros_like(q))
    targets: tuple[Any, ...] = tuple(Exporter(np.zeros_like(q)) for _ in range(3))
    assert cuflash.attention(q, Exporter(k), v, out=target) is target
    assert same_bits(target.x, expected)
    grads = cuflash.attention_backward(q, q, k, v, expected, lse, out=targets)
    assert all(grad is own for grad, own in zip(grads, targets, strict=True))
    assert_plain([x.x for x in targets], cuflash.attention_backward(q, q, k, v, expected, lse))
    with pytest.raises(ValueError, match="overlap"):
        cuflash.attention(q, k, v, out=Exporter(q))
    mask = np.tri(5, dtype=bool)
    for bm in (
        cuflash.BlockMask.from_dense(Exporter(mask)),
        cuflash.BlockMask.from_blocks(Exporter(mask), 5, 5, (1, 1)),
        cuflash.BlockMask.from_function(lambda b, h, i, j: Exporter(mask), 5, 5),
    ):
        assert np.array_equal(bm.to_dense()[0, 0], mask)
    with pytest.raises(ValueError, match=r"blocks: expected .* \(\.\.\., 2, 2\), got \(5, 5\)"):
        cuflash.BlockMask.from_blocks(Exporter(mask), 5, 5, (3, 3))


def test_bare_exporters_have_a_metadata_of_their_own() -> None:
    """An exporter that takes another one's place in memory is known by its array and not by its address."""
    for keys in (4, 6, 4, 9):
        x = np.ones((1, keys, 1, 8), np.float32)
        q = np.ones((1, 3, 1, 8), np.float32)
        assert same_bits(cuflash.attention(q, Exporter(x), Exporter(x)), cuflash.attention(q, x, x))


@pytest.mark.parametrize("first", [0, 1])
def test_bare_exporters_beside_other_libraries(first: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.zeros((1, 4, 2, 8), np.float32)
    pair = [Exporter(x), torch.from_numpy(x)]
    q, k = pair[first], pair[1 - first]
    with pytest.raises(TypeError, match=r"k: expected an array of (numpy|torch), as the first one is, got one of"):
        cuflash.attention(q, k, q)
