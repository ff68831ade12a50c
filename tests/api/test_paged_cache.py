"""PagedCache: attention over its pages is attention over the same keys in one piece, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import Device
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Exporter

import cuflash
from cuflash import PagedCache

Array = Any
RNG = np.random.default_rng(0)
LAYERS, HEADS_KV, HEADS_Q, DIM, DIM_V = 2, 2, 4, 16, 8


def cache_of(
    device: Device, num_pages: int = 12, page_size: int = 4, dtype: Any = "float32", **more: Any
) -> PagedCache:
    return PagedCache(LAYERS, num_pages, page_size, HEADS_KV, DIM, dtype, device.xp, head_dim_v=DIM_V, **more)


def rows(*shape: int) -> tuple[Array, Array, Array]:
    """Make new q, k and v."""
    dims = ((HEADS_Q, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
    q, k, v = (RNG.normal(size=(*shape, *own)).astype(np.float32) for own in dims)
    return q, k, v


class Model:
    """The sequences of a cache in one piece each, by number and layer, against which its steps are held."""

    def __init__(self, device: Device, cache: PagedCache) -> None:
        self.device, self.cache = device, cache
        self.keys: dict[int, list[tuple[Array, Array]]] = {}

    def add(self) -> int:
        sequence = self.cache.add()
        empty = np.zeros((0, HEADS_KV, DIM), np.float32), np.zeros((0, HEADS_KV, DIM_V), np.float32)
        self.keys[sequence] = [empty] * LAYERS
        return sequence

    def fork(self, sequence: int) -> int:
        other = self.cache.fork(sequence)
        self.keys[other] = list(self.keys[sequence])
        return other

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        self.keys[sequence] = [(k[:length], v[:length]) for k, v in self.keys[sequence]]

    def free(self, sequence: int) -> None:
        self.cache.free(sequence)
        del self.keys[sequence]

    def length(self, sequence: int) -> int:
        return len(self.keys[sequence][0][0])

    def step(self, sequences: list[int], counts: int | list[int], **options: Any) -> Any:
        """Make a step of all layers, whose results are checked."""
        step = self.cache.step(sequences, counts)
        for layer in range(LAYERS):
            self.attend(step, layer, sequences, counts, **options)
        return step

    def attend(self, step: Any, layer: int, sequences: list[int], counts: int | list[int], **options: Any) -> None:
        each = [counts] * len(sequences) if isinstance(counts, int) else counts
        shape = (len(sequences), counts) if isinstance(counts, int) else (sum(counts),)
        q, k, v = rows(*shape)
        put = self.device.put((q, k, v))
        returned = step.append(layer, *put)
        out = self.device.get(step.attend(layer, returned, **options))
        np.testing.assert_array_equal(self.device.get(returned), q)
        assert out.shape == (*shape, HEADS_Q, DIM_V)
        ends = np.cumsum(each)
        for index, (sequence, count) in enumerate(zip(sequences, each, strict=True)):
            new = index if isinstance(counts, int) else slice(ends[index] - count, ends[index])
            old = self.keys[sequence][layer]
            keys = [np.concatenate((x, y[new])) for x, y in zip(old, (k, v), strict=True)]
            self.keys[sequence][layer] = keys[0], keys[1]
            if count:
                expected = cuflash.attention(q[new][None], *(x[None] for x in keys), **{"causal": True, **options})
                np.testing.assert_allclose(out[new], expected[0], rtol=1e-5, atol=1e-5)


@pytest.fixture
def model(device: Device) -> Model:
    return Model(device, cache_of(device))


def test_padded_and_packed_steps(model: Model) -> None:
    a, b, c = model.add(), model.add(), model.add()
    model.step([a], 7)
    model.step([b, c], [3, 5])
    model.step([c, a, b], 1)
    model.step([a, b, c], [0, 2, 1])
    model.step([a, c], 0)
    model.step([], 3)
    model.step(np.array([a, c]).tolist(), [0, 0])
    model.cache.step(np.array([a]), np.array([0]))
    assert [model.cache.length(s) for s in (a, b, c)] == [8, 6, 7]


def test_what_a_step_says(device: Device) -> None:
    cache = cache_of(device, page_size=4)
    a, b = cache.add(), cache.add()
    cache.step([a], 5)
    step = cache.step([a, b], [2, 9])
    assert step.kv_lengths.dtype == step.block_table.dtype == np.int32
    assert device.get(step.kv_lengths).tolist() == [7, 9]
    table = device.get(step.block_table)
    assert table.shape == (2, 12)  # max_pages_per_sequence is num_pages by default
    used = [*table[0, :2], *table[1, :3]]
    assert len(set(used)) == 5 and min(used) >= 0 and max(used) < 12
    assert (table[0, 2:] == -1).all() and (table[1, 3:] == -1).all()
    assert step.cu_seqlens is not None and device.get(step.cu_seqlens).tolist() == [0, 2, 11]
    assert cache.step([a, b], 1).cu_seqlens is None
    assert cache_of(device, max_pages_per_sequence=3).step([], 1).block_table.shape == (0, 3)


def test_options_of_attention(model: Model) -> None:
    """Attention is causal unless said otherwise; window, softcap, lse and the like go through."""
    a, b = model.add(), model.add()
    model.step([a, b], [6, 3])
    model.step([a, b], 4, causal=False)
    model.step([a, b], [3, 4], window=(2, 0))
    model.step([a, b], 2, softcap=3.0, softmax_scale=0.3)
    step = model.cache.step([a], 2)
    q, k, v = model.device.put(rows(1, 2))
    out, lse = step.attend(0, step.append(0, q, k, v), return_lse=True)
    assert out.shape == (1, 2, HEADS_Q, DIM_V) and lse.shape == (1, HEADS_Q, 2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(device: Device, interleaved: bool) -> None:
    """Positions go on from step to step: the keys are those that one call would have rotated."""
    cache, angles = cache_of(device), RNG.normal(size=(20, DIM // 2)).astype(np.float32)
    table = device.put((np.cos(angles), np.sin(angles)))
    sequence = cache.add()
    q, k, v = rows(1, 9)
    caches = np.zeros((1, 9, HEADS_KV, DIM), np.float32), np.zeros((1, 9, HEADS_KV, DIM_V), np.float32)
    options: dict[str, Any] = {"rotary": (np.cos(angles), np.sin(angles)), "interleaved": interleaved}
    whole = cuflash.append_kv(k, v, *caches, np.zeros(1, np.int32), q=q, **options)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        part = device.put(tuple(np.ascontiguousarray(x[:, begin:end]) for x in (q, k, v)))
        step = cache.step([sequence], end - begin)
        rotated = step.append(0, *part, rotary=table, interleaved=interleaved)
        np.testing.assert_allclose(device.get(rotated), whole[:, begin:end], rtol=1e-5, atol=1e-6)
        out = device.get(step.attend(0, rotated))
        expected = cuflash.attention(whole[:, begin:end], *(x[:, :end] for x in caches), causal=True)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_fork_shares_pages_and_copies_one_before_it_is_written(model: Model) -> None:
    cache = model.cache
    a = model.add()
    model.step([a], 10)  # two full pages, and one that is begun
    free = cache.num_free_pages
    b, c = model.fork(a), model.fork(a)
    assert cache.num_free_pages == free
    tables = model.device.get(cache.step([a, b, c], 0).block_table)
    assert (tables[0] == tables[1]).all() and (tables[0] == tables[2]).all()
    step = model.step([a, b, c], 1)
    tables = model.device.get(step.block_table)
    assert (tables[:, :2] == tables[0, :2]).all() and len(set(tables[:, 2])) == 3
    assert cache.num_free_pages == free - 2  # the last one writes where it is
    model.step([b, a], [5, 2])
    model.free(a)
    model.step([b, c], 3)
    model.free(b)
    model.free(c)
    assert cache.num_free_pages == 12


def test_truncate_gives_pages_back_and_keeps_shared_ones(model: Model) -> None:
    a = model.add()
    model.step([a], 12)
    b = model.fork(a)
    free = model.cache.num_free_pages
    model.truncate(b, 6)
    assert model.cache.num_free_pages == free
    model.step([b], 3)  # into a page that a still has: a copy of it, and another one
    assert model.cache.num_free_pages == free - 2
    model.truncate(a, 12)
    model.truncate(a, 0)
    model.step([a, b], 2)


def test_all_pages_are_usable(model: Model) -> None:
    a, b = model.add(), model.add()
    model.step([a, b], [12 * 4 - 4, 4])
    assert model.cache.num_free_pages == 0
    model.free(a)
    model.step([b], 44)
    assert model.cache.num_free_pages == 0


def test_pages_that_are_not_used_never_matter(device: Device) -> None:
    model = Model(device, cache_of(device))
    model.cache.k[...] = np.nan
    model.cache.v[...] = np.nan
    a, b = model.add(), model.add()
    model.step([a, b], [5, 2])
    model.step([a, model.fork(b)], 3)


def state(cache: PagedCache, *sequences: int) -> tuple[Any, ...]:
    own = [(cache.length(s), cache._pages[s].pages.tolist()) for s in sequences]
    return cache.num_free_pages, own, cache._pages._holders.tolist()


Change = Callable[[PagedCache, int, int], Any]
WRONG: dict[str, tuple[type[Exception], str, Change]] = {
    "unknown": (KeyError, "99", lambda c, a, b: c.step([a, 99], 1)),
    "freed": (KeyError, "sequence", lambda c, a, b: c.free(99)),
    "unhashable": (KeyError, "sequence", lambda c, a, b: c.step([[a]], 1)),  # type: ignore[list-item]
    "fork": (KeyError, "99", lambda c, a, b: c.fork(99)),
    "truncate": (KeyError, "99", lambda c, a, b: c.truncate(99, 0)),
    "length": (KeyError, "99", lambda c, a, b: c.length(99)),
    "twice": (ValueError, "each one once, got 0 twice", lambda c, a, b: c.step([a, b, a], 0)),
    "counts": (ValueError, "one for each of the 2 sequences, got 1", lambda c, a, b: c.step([a, b], [1])),
    "negative": (ValueError, "at least 0, got -1", lambda c, a, b: c.step([a], -1)),
    "negative one": (ValueError, r"counts\[1\]: expected at least 0", lambda c, a, b: c.step([a, b], [1, -1])),
    "float": (TypeError, "counts: expected an integer, got float", lambda c, a, b: c.step([a], 1.0)),  # type: ignore
    "bool": (TypeError, r"counts\[0\]: expected an integer", lambda c, a, b: c.step([a], [True])),
    "no list": (TypeError, "sequences: expected a list", lambda c, a, b: c.step(a, 1)),  # type: ignore[arg-type]
    "beyond": (ValueError, "0 <= length <= 10", lambda c, a, b: c.truncate(a, 11)),
    "before": (ValueError, "0 <= length <= 10", lambda c, a, b: c.truncate(a, -1)),
    "too long": (ValueError, r"sequence 0: .* = 5 \* 4 positions, got 10 \+ 11", lambda c, a, b: c.step([a, b], 11)),
    "before memory": (ValueError, "max_pages_per_sequence", lambda c, a, b: c.step([b, a], [5, 999])),
    "memory": (MemoryError, "5 pages are wanted for this step, 2 are free", lambda c, a, b: c.step([a, b], [10, 8])),
    "a copy": (MemoryError, "3 pages are wanted for this step, 2 are free", lambda c, a, b: c.step([a, b], [1, 8])),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_changes_nothing(device: Device, name: str) -> None:
    error, message, change = WRONG[name]
    model = Model(device, cache_of(device, num_pages=9, max_pages_per_sequence=5))
    a, b = model.add(), model.add()
    model.step([a, b], [10, 10])
    c = model.fork(a)
    model.step([c], 5)
    model.truncate(c, 10)
    d = model.fork(b)
    model.truncate(b, 8)
    assert model.cache.num_free_pages == 9 - 3 - 3 - 1
    model.truncate(c, 9)
    e = model.fork(a)
    before = state(model.cache, a, b, c, d, e)
    with pytest.raises(error, match=message):
        change(model.cache, a, b)
    assert state(model.cache, a, b, c, d, e) == before
    model.step([a, b], 1)


def test_a_freed_sequence_is_unknown_and_its_number_is_not_used_again(model: Model) -> None:
    a = model.add()
    model.step([a], 3)
    model.free(a)
    for call in (model.cache.free, model.cache.fork, model.cache.length, lambda s: model.cache.step([s], 1)):
        with pytest.raises(KeyError):
            call(a)
    assert model.add() != a


def test_a_later_step_refills_the_same_arrays(device: Device) -> None:
    """The first step's own calls, which stand for a replay, do on the same arrays what the later step asks."""
    model = Model(device, cache_of(device))
    a, b, c = model.add(), model.add(), model.add()
    for counts in (1, [1, 2]):
        first = model.step([a, b], counts)
        arrays = first.block_table, first.kv_lengths
        model.step([a, b, c], 1)  # of other sequences, or other counts
        other = model.cache.step([a], 0)
        assert other.block_table is not arrays[0]
        later = model.cache.step([c, a], counts)
        assert later.block_table is arrays[0] and later.kv_lengths is arrays[1]
        for layer in range(LAYERS):
            model.attend(first, layer, [c, a], counts)


def test_a_step_is_valid_until_another_of_the_same_counts(model: Model) -> None:
    a, b = model.add(), model.add()
    decode, prefill = model.cache.step([a], 1), model.cache.step([b], [5])
    model.cache.step([model.add()], 2)
    for layer in range(LAYERS):
        model.attend(prefill, layer, [b], [5])
        model.attend(decode, layer, [a], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [1, [1, 3]])
def test_a_captured_step_is_replayed(counts: int | list[int]) -> None:
    import cupy
    from devices import device_of

    device = device_of("cupy")
    model = Model(device, cache_of(device, num_pages=40))
    a, b = model.add(), model.add()
    model.step([a, b], [3, 9])
    model.step([a, b], counts)
    each = [counts] * 2 if isinstance(counts, int) else counts
    shape = (2, counts) if isinstance(counts, int) else (sum(counts),)
    q, k, v = device.put(rows(*shape))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step = model.cache.step([a, b], counts)
        outs = [step.attend(layer, step.append(layer, q, k, v)) for layer in range(LAYERS)]  # what capture wants
        stream.begin_capture()
        outs = [step.attend(layer, step.append(layer, q, k, v)) for layer in range(LAYERS)]
        graph = stream.end_capture()
        graph.launch()
    keys: dict[int, list[Any]] = {s: list(model.keys[s]) for s in (a, b)}
    for turn in range(3):
        with stream:
            if turn:
                assert model.cache.step([a, b], counts) is step
                new = rows(*shape)
                for to, x in zip((q, k, v), new, strict=True):
                    to.set(x)
                graph.launch()
            stream.synchronize()
        ends = np.cumsum(each)
        for layer in range(LAYERS):
            for index, (s, count) in enumerate(zip((a, b), each, strict=True)):
                own = index if isinstance(counts, int) else slice(ends[index] - count, ends[index])
                new_q, new_k, new_v = (device.get(x)[own] for x in (q, k, v))
                keys[s][layer] = tuple(
                    np.concatenate(pair) for pair in zip(keys[s][layer], (new_k, new_v), strict=True)
                )
                expected = cuflash.attention(new_q[None], *(x[None] for x in keys[s][layer]), causal=True)
                np.testing.assert_allclose(device.get(outs[layer])[own], expected[0], rtol=1e-4, atol=1e-5)


def test_wrong_rows_and_layers(device: Device) -> None:
    cache = cache_of(device)
    a, b = cache.add(), cache.add()
    q, k, v = device.put(rows(2, 3))
    step = cache.step([a, b], 2)
    calls: tuple[Callable[[], Any], ...] = (lambda: step.append(0, q, k, v), lambda: step.attend(0, q))
    for call in calls:
        with pytest.raises(ValueError, match=r"expected \(batch, count, heads, dim\) = \(2, 2, \*, \*\)"):
            call()
    packed = cache.step([a, b], [2, 1])
    with pytest.raises(ValueError, match=r"k: expected \(total, heads, dim\) = \(3, \*, \*\), .* got \(2, 3, 2, 16\)"):
        packed.append(0, q, k, v)
    step = cache.step([a, b], 3)
    layers: tuple[tuple[Any, type[Exception]], ...] = ((2, ValueError), (-1, ValueError), ("0", TypeError))
    for layer, error in layers:
        with pytest.raises(error, match="layer: expected"):
            step.append(layer, q, k, v)
    with pytest.raises(ValueError, match="k_scale: expected None"):
        step.append(0, q, k, v, k_scale=device.put(np.ones((1, 1, 1), np.float32)))
    assert step.append(0, None, k, v) is None


def test_bare_exporters_have_no_shape() -> None:
    """Those of DLPack are appended and attended, with NumPy's arrays as results; what is no array is a TypeError."""
    rng = np.random.default_rng(0)
    k, v, q = (rng.normal(size=(1, 3, heads, 8)) for heads in (1, 1, 2))
    caches = [cuflash.PagedCache(1, 4, 2, 1, 8, "float64", np) for _ in range(2)]
    wraps: tuple[Any, ...] = np.asarray, Exporter
    no_arrays: tuple[Any, ...] = None, [1.0]
    results = []
    for cache, wrap in zip(caches, wraps, strict=True):
        step = cache.step([cache.add()], 3)
        step.append(0, None, wrap(k), wrap(v))
        results.append(step.attend(0, wrap(q)))
        with pytest.raises(ValueError, match=r"q: expected \(batch, count, heads, dim\) = \(1, 3, \*, \*\)"):
            step.attend(0, wrap(q[:, :2]))
        for wrong in no_arrays:
            with pytest.raises(TypeError, match="q: expected an array of NumPy"):
                step.attend(0, wrong)
            with pytest.raises(TypeError, match="k: expected an array of NumPy"):
                step.append(0, None, wrong, v)
    np.testing.assert_array_equal(*results)


def test_wrong_caches() -> None:
    good: dict[str, Any] = {"num_layers": 1, "num_pages": 4, "page_size": 2, "num_heads_kv": 1, "head_dim": 8}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_pages": 0}, ValueError, "num_pages: expected at least 1, got 0"),
        ({"page_size": 2.0}, TypeError, "page_size: expected an integer, got float"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v"),
        ({"max_pages_per_sequence": 0}, ValueError, "max_pages_per_sequence"),
        ({"dtype": "int8"}, TypeError, "dtype: expected float16, .* got 'int8'"),
        ({"dtype": object()}, TypeError, "dtype: expected"),
        ({"xp": "numpy"}, TypeError, "xp: expected the module numpy or cupy"),
    ]
    for changes, error, message in wrong:
        with pytest.raises(error, match=message):
            PagedCache(**{**good, "dtype": "float32", "xp": np, **changes})
    for dtype in ("float16", np.float64, np.dtype("float32")):
        assert PagedCache(**good, dtype=dtype, xp=np).k.dtype == dtype
    cache = PagedCache(**good, dtype="float32", xp=np)
    assert cache.k.shape == cache.v.shape == (1, 4, 2, 1, 8)
    expected = "num_pages=4, page_size=2, num_heads_kv=1, head_dim=8, dtype=float32, num_free_pages=4"
    assert repr(cache) == f"PagedCache(num_layers=1, {expected})"


def test_fp8_holds_codes(device: Device) -> None:
    """Rows are appended by scales of the new rows, and the pools hold codes."""
    cache = cache_of(device, dtype="float8_e4m3fn")
    assert cache.k.dtype == cache.v.dtype == np.uint8
    step = cache.step([cache.add()], 3)
    q, k, v = rows(1, 3)
    scale = np.full((1, 1, HEADS_KV), 0.5, np.float32)
    step.append(1, *device.put((q, k, v)), k_scale=device.put(scale))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    page = int(device.get(step.block_table)[0, 0])
    for pool, x, factor in ((cache.k, k, 2), (cache.v, v, 1)):
        expected = (factor * x[0]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(device.get(pool)[1, page, :3], expected)
        assert not device.get(pool)[0].any()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), num_pages=st.integers(1, 12))
def test_any_history(device: Device, data: st.DataObject, page_size: int, num_pages: int) -> None:
    """Drawn histories give the results of keys in one piece, lose no page, and change nothing where they fail."""
    model = Model(device, cache_of(device, num_pages=num_pages, page_size=page_size))
    for _ in range(data.draw(st.integers(1, 8))):
        alive = sorted(model.keys)
        kind = data.draw(st.sampled_from(["add", "fork", "truncate", "free", "step", "step", "step"]))
        if kind == "add" or not alive:
            model.add()
            continue
        one = data.draw(st.sampled_from(alive))
        if kind == "fork":
            model.fork(one)
        elif kind == "truncate":
            model.truncate(one, data.draw(st.integers(0, model.length(one))))
        elif kind == "free":
            model.free(one)
        else:
            chosen = data.draw(st.lists(st.sampled_from(alive), unique=True, min_size=1))
            count = st.integers(0, 2 * page_size)
            each = st.lists(count, min_size=len(chosen), max_size=len(chosen))
            counts = data.draw(st.one_of(count, each))
            before = state(model.cache, *alive)
            try:
                model.step(chosen, counts)
            except (MemoryError, ValueError):  # no page is left, or a sequence would have more than there are
                assert state(model.cache, *alive) == before
    for sequence in list(model.keys):
        model.free(sequence)
    assert model.cache.num_free_pages == num_pages
