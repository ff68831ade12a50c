"""Block masks on a device: around/block_sparse.cu runs on the CPU test device, and streams keep their order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpu_device import device as cpu_device
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import examples

from cuflash import BlockMask
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import source as cuda_source
from cuflash.masks import on_device
from cuflash.masks.on_device import _CONSTANTS as CONSTANTS
from cuflash.masks.on_device import _SCAN_THREADS
from cuflash.masks.store import HIDDEN, VISIBLE

needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

LENGTHS = st.one_of(st.integers(0, 10), st.sampled_from([63, 64, 65, 100, 128, 129, 200]))
LEADING = st.sampled_from([(1, 1), (2, 3), (1, 2)])


@functools.cache
def module() -> cpu_device.Module:
    return cpu_device.compile(cuda_source.source_of("around/block_sparse", CONSTANTS), (), "block_sparse")


def get_kernel(file: str, entry: str, constants: dict[str, int]) -> Callable[..., None]:
    """Do as `cuda_device.get` on the CPU test device."""
    assert file == "around/block_sparse"
    assert constants == CONSTANTS
    return functools.partial(module().launch, entry)


def random_dense(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> NDArray[np.bool_]:
    """Draw bools whose blocks of `size` are hidden, visible or mixed."""
    coarse = rng.choice([0.0, 1.0, 0.5], (*shape[:2], *(-(-n // size) for n in shape[2:])), p=[0.4, 0.4, 0.2])
    fine = np.repeat(np.repeat(coarse, size, axis=-2), size, axis=-1)[..., : shape[2], : shape[3]]
    return rng.random(shape) < fine


@needs_compiler
@examples(30)
@given(
    leading=LEADING,
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(["plain", "transposed", "reversed", "broadcast"]),
    cell=st.sampled_from([(1, 1), (1, 1), (16, 128), (7, 5), (300, 300)]),
)
def test_pack_makes_the_host_s_store(
    leading: tuple[int, int], seqlen_q: int, seqlen_k: int, seed: int, layout: str, cell: tuple[int, int]
) -> None:
    counts = (-(-seqlen_q // cell[0]), -(-seqlen_k // cell[1]))
    cells = random_dense(np.random.default_rng(seed), (*leading, *counts), 64)
    if layout == "transposed":
        cells = np.ascontiguousarray(cells.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    elif layout == "reversed":
        cells = cells[:, ::-1, ::-1, ::-1]
    elif layout == "broadcast":
        cells = np.broadcast_to(cells[:1, :, :1], cells.shape)
    slots, bits = on_device.pack_on_device(np, get_kernel, cells, cell, seqlen_q, seqlen_k)
    expected = BlockMask.from_blocks(cells, seqlen_q, seqlen_k, block_size=cell).arrays(np)
    np.testing.assert_array_equal(slots, expected[0], strict=True)
    np.testing.assert_array_equal(bits, expected[1], strict=True)


@needs_compiler
@pytest.mark.parametrize("rest", [False, True])
def test_one_element_makes_a_block_partial(rest: bool) -> None:
    heads = np.arange(64)
    dense = np.full((1, 64, 64, 64), rest)
    dense[0, heads, heads, heads * 37 % 64] = not rest
    slots, bits = on_device.pack_on_device(np, get_kernel, dense, (1, 1), 64, 64)
    np.testing.assert_array_equal(slots.ravel(), heads)
    np.testing.assert_array_equal(bits, BlockMask.from_dense(dense).arrays(np)[1])


@needs_compiler
def test_partial_blocks_are_numbered_over_many_rounds() -> None:
    rng = np.random.default_rng(0)
    # One thread block numbers 8192 slots a round.
    unnumbered = rng.choice(np.array([HIDDEN, VISIBLE, 0], np.int32), 20_000)
    slots, count = unnumbered.copy(), np.zeros(1, np.int32)
    get_kernel("around/block_sparse", "number_blocks", CONSTANTS)(
        (1,), (_SCAN_THREADS,), (np.int64(slots.size), slots, count)
    )
    partial = unnumbered == 0
    assert count[0] == partial.sum()
    np.testing.assert_array_equal(slots[~partial], unnumbered[~partial])
    np.testing.assert_array_equal(slots[partial], np.arange(count[0]))


@needs_compiler
@examples(40)
@given(
    leading=LEADING,
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 16, 64, 100]),
    block_m=st.sampled_from([16, 32, 64, 80, 96, 128, 176, 192, 256]),
    block_n=st.sampled_from([16, 32, 64, 80, 96, 128, 176, 192, 256]),
)
def test_tile_lists(
    leading: tuple[int, int], seqlen_q: int, seqlen_k: int, seed: int, size: int, block_m: int, block_n: int
) -> None:
    dense = random_dense(np.random.default_rng(seed), (*leading, seqlen_q, seqlen_k), size)
    bm = BlockMask.from_dense(dense)
    lists = bm.tile_lists(block_m, block_n, get_kernel, np)
    assert bm.tile_lists(block_m, block_n, get_kernel, np) is lists
    check_lists(lists, dense, block_m, block_n)


@needs_compiler
@pytest.mark.parametrize("of_keys", [False, True, None])
def test_bits_in_the_order_of_fragments(of_keys: bool | None) -> None:
    """Bit e of a thread of four warps is element e of its fragment; None leaves the store's own order."""
    dense = random_dense(np.random.default_rng(0), (1, 2, 100, 200), 64)
    bm = BlockMask.from_dense(dense)
    slots, bits = bm.arrays(np)
    ordered = bm.tile_lists(64, 64, get_kernel, np, of_keys=of_keys).fragment_bits
    if of_keys is None:
        assert np.shares_memory(ordered, bits)
        return
    thread, e = np.ogrid[:128, :32]
    row, column = thread // 32 * 16 + thread % 32 // 4 + e // 2 % 2 * 8, thread % 4 * 2 + e // 4 * 8 + e % 2
    query, key = (column, row) if of_keys else (row, column)
    padded = np.pad(dense, ((0, 0), (0, 0), (0, 28), (0, 56)))
    partial = np.argwhere(slots >= 0)
    assert len(partial) == len(ordered) > 0
    for b, h, m, n in partial:
        own = padded[b, h, 64 * m :, 64 * n :][query, key]
        assert (own == (ordered[slots[b, h, m, n]][:, None] >> e & 1)).all()


@needs_compiler
def test_tile_lists_longer_than_a_warp() -> None:
    dense = random_dense(np.random.default_rng(0), (1, 2, 40, 1200), 20)
    check_lists(BlockMask.from_dense(dense).tile_lists(16, 16, get_kernel, np), dense, 16, 16)


def check_lists(lists: on_device.TileLists, dense: NDArray[np.bool_], block_m: int, block_n: int) -> None:
    num_m, num_n = -(-dense.shape[2] // block_m), -(-dense.shape[3] // block_n)
    for name, shape in zip(
        ("row_index", "row_count", "col_index", "col_count"),
        ((num_m, num_n), (num_m,), (num_n, num_m), (num_n,)),
        strict=True,
    ):
        array = getattr(lists, name)
        assert (array.dtype, array.shape) == (np.int32, (*dense.shape[:2], *shape)), name

    def entries(batch_head: tuple[int, ...], tiles: list[tuple[int, int]], position: int) -> list[int]:
        expected = []
        for tile in tiles:
            m, n = tile
            part = dense[batch_head][m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
            if part.any():
                expected.append(tile[position] << 1 | (not part.all()))
        return expected

    for batch_head in np.ndindex(dense.shape[:2]):
        for m in range(num_m):
            own = lists.row_index[batch_head][m, : lists.row_count[batch_head][m]]
            assert own.tolist() == entries(batch_head, [(m, n) for n in range(num_n)], 1)
        for n in range(num_n):
            own = lists.col_index[batch_head][n, : lists.col_count[batch_head][n]]
            assert own.tolist() == entries(batch_head, [(m, n) for m in range(num_m)], 0)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_kernels_compile_without_spills(arch: str) -> None:
    nvrtc = pytest.importorskip("cupy", reason="CuPy is not installed").cuda.nvrtc
    # This text needs no headers of CUDA, so no folder has to be found for them.
    lines = cuda_source.source_of("around/block_sparse", CONSTANTS).splitlines()
    source = "\n".join(line for line in lines if not line.startswith("#include <"))
    program = nvrtc.createProgram(source, "block_sparse.cu", (), ())
    nvrtc.compileProgram(program, (f"-arch={arch}", *cuda_compile.OPTIONS, "--ptxas-options=-v"))
    log = nvrtc.getProgramLog(program)
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == 5
    assert "warning" not in log


class Stream:
    """A stand-in for a CuPy stream, with what `OnDevice` uses and a record of what was asked of it."""

    def __init__(self, capturing: bool = False) -> None:
        self.capturing = capturing
        self.waited_for: list[Event] = []

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


class Event:
    done = False


class Namespace:
    """A stand-in for CuPy, with what `OnDevice` uses."""

    def __init__(self, current: Stream) -> None:
        self.current = current
        self.cuda = self

    def get_current_stream(self) -> Stream:
        return self.current


def test_other_streams_wait_for_the_arrays_and_the_host_does_not() -> None:
    cupy = Namespace(Stream())
    made = on_device.OnDevice(cupy, lambda: "arrays")
    event: Any = made._complete
    cupy.current = second = Stream()
    assert made.get() == "arrays"
    assert second.waited_for == [event]
    cupy.current = capture = Stream(capturing=True)
    assert made.get() == "arrays"
    event.done = True
    cupy.current = third = Stream()
    assert made.get() == "arrays"
    assert capture.waited_for == third.waited_for == []


def test_another_thread_may_find_the_arrays_complete_first() -> None:
    class Interrupted(Stream):
        def is_capturing(self) -> bool:
            cupy.current = Stream()
            made.get()
            return False

    cupy = Namespace(Stream())
    made = on_device.OnDevice(cupy, lambda: "arrays")
    event: Any = made._complete
    event.done = True
    cupy.current = Interrupted()
    assert made.get() == "arrays"
    assert made.is_complete


def test_threads_that_list_tiles_at_once_use_the_same_lists() -> None:
    mask = BlockMask.from_dense(np.ones((100, 100), bool))
    of_others: list[Any] = []

    def get_kernel(*_: Any) -> Any:
        if not of_others:
            of_others.append(None)
            of_others[0] = mask.tile_lists(64, 64, get_kernel, np)
        return lambda *_: None

    assert mask.tile_lists(64, 64, get_kernel, np) is of_others[0]


def test_a_first_use_inside_of_a_capture_is_an_error() -> None:
    def make() -> None:
        pytest.fail("nothing may be enqueued")

    with pytest.raises(RuntimeError, match="once before the capture"):
        on_device.OnDevice(Namespace(Stream(capturing=True)), make)
