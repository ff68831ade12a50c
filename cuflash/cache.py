"""`PagedCache` keeps the keys and values of many sequences in pages; `append_kv` writes into a cache of any layout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from cuflash import hints, interop
from cuflash.appending import append_kv
from cuflash.pages import Pages
from cuflash.problem.append import FP8_DTYPES
from cuflash.problem.attention_problem import DTYPES, Array
from cuflash.problem.checks import check_int
from cuflash.steps import Pools, Step
from cuflash.typing import OwnArray

__all__ = ["PagedCache", "Step", "append_kv"]


class PagedCache:
    """Keys and values of many sequences, for all layers, in pages of one pool; sequences may share pages.

    Which page belongs to which sequence is known on the host alone: nothing here ever waits for a device. Work is
    enqueued on the current stream, which has to be the same one from a step on to the attention over it.

    Parameters
    ----------
    num_layers, num_pages, page_size, num_heads_kv, head_dim : int
        All of the `num_pages` can be used; each has `page_size` positions in every layer.
    dtype : dtype or its name
        float16, bfloat16, float32, float64, or float8_e4m3fn, whose codes are kept as uint8.
    xp : module
        numpy or cupy: on the current device.
    head_dim_v : int, optional
        Columns of the values; default `head_dim`.
    max_pages_per_sequence : int, optional
        Columns of the block tables; default `num_pages` and `host_pages` together. The pages of the longest sequence
        are a better number: tables are copied to the device in every step, and on a GPU attention may take memory in
        proportion to them.
    host_pages : int
        More pages, in host memory, pinned where there is a GPU (`cuflash.offload.pinned_empty`); default 0. Where the
        device's pages do not suffice, `step` moves the coldest full ones there, those of the sequences longest unused
        first and of these the oldest positions, and it brings pages of its sequences back where device pages are free.
        `Step.attend` reads pages in host memory where they lie. See the notes.

    Attributes
    ----------
    k, v : array (num_layers, num_pages, page_size, num_heads_kv, head_dim and head_dim_v)
        The pools on the device.

    Notes
    -----
    With `host_pages` a `step` still never waits: pages are copied on the current stream. `Step.append` and
    `Step.attend` wait for the device where they write or read pages in host memory, and raise RuntimeError where they
    would do so under graph capture. A captured graph reads the device's pages alone: replay it where
    `Step.num_host_pages` is 0, or the window does not reach the pages in host memory, and call append and attend anew
    where not. A row's last bits depend on where its keys lie.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
    >>> sequence = cache.add()
    >>> step = cache.step([sequence], 5)  # a prompt of five tokens
    >>> k = v = q = np.ones((1, 5, 2, 8), np.float32)
    >>> q = step.append(0, q, k, v)
    >>> step.attend(0, q).shape, cache.length(sequence), cache.num_free_pages
    ((1, 5, 2, 8), 5, 6)
    """

    @hints.with_hints(hints.CACHE)
    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        dtype: Any,
        xp: Any,
        head_dim_v: int | None = None,
        max_pages_per_sequence: int | None = None,
        host_pages: int = 0,
    ) -> None:
        if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
            raise TypeError(f"xp: expected the module numpy or cupy, got {xp!r}")
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_heads_kv": num_heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        }
        for name, size in sizes.items():
            if check_int(name, size) < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if check_int("host_pages", host_pages) < 0:
            raise ValueError(f"host_pages: expected at least 0, got {host_pages}")
        most = num_pages + host_pages if max_pages_per_sequence is None else max_pages_per_sequence
        if check_int("max_pages_per_sequence", most) < 1:
            raise ValueError(f"max_pages_per_sequence: expected at least 1, got {most}")
        self.xp = xp
        self.num_layers = num_layers
        shape = (num_layers, num_pages, page_size, num_heads_kv)
        stored = _stored_dtype(dtype)
        self.k: OwnArray = xp.zeros((*shape, head_dim), stored)
        self.v: OwnArray = xp.zeros((*shape, sizes["head_dim_v"]), stored)
        pools: tuple[Array, Array] = self.k, self.v
        self._bits = tuple(x.view(f"u{x.dtype.itemsize}") for x in pools)
        self._pages = Pages(num_pages, page_size, most, host_pages)
        host = None
        if host_pages:
            from cuflash.offload.pools import HostPools

            host = HostPools(pools, host_pages, xp)
        self._memory = Pools(xp, self.k, self.v, most, host)
        self._library = interop.library_of("pool", self.k)
        # The latest steps stay, others as long as somebody holds them.
        self._steps: WeakValueDictionary[Any, Step] = WeakValueDictionary()
        self._latest: OrderedDict[Any, Step] = OrderedDict()

    def __repr__(self) -> str:
        layers, pages, page_size, heads, columns = self.k.shape
        return (
            f"PagedCache(num_layers={layers}, num_pages={pages}, page_size={page_size}, num_heads_kv={heads}, "
            f"head_dim={columns}, dtype={self.k.dtype.name}, num_free_pages={self.num_free_pages})"
        )

    @property
    def num_free_pages(self) -> int:
        """Pages of the device that no sequence holds.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> step = cache.step([cache.add()], 5)  # two pages
        >>> cache.num_free_pages
        6
        """
        return self._pages.num_free

    @property
    def num_free_host_pages(self) -> int:
        """Pages in host memory that no sequence holds.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np, host_pages=3)
        >>> cache.num_free_host_pages
        3
        """
        return self._pages.num_free_on_host

    def length(self, sequence: int) -> int:
        """Positions of a sequence, those of the steps begun included.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> sequence = cache.add()
        >>> step = cache.step([sequence], 5)
        >>> cache.length(sequence)
        5
        """
        return self._pages[sequence].length

    def add(self) -> int:
        """A new, empty sequence: its number, which is never used again.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> cache.add(), cache.add()
        (0, 1)
        """
        return self._pages.add()

    def fork(self, sequence: int) -> int:
        """A new sequence with the positions of another, whose pages it shares until one of them writes into one.

        Raises
        ------
        KeyError
            For a sequence that is unknown or freed, as all methods.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> sequence = cache.add()
        >>> step = cache.step([sequence], 5)  # two pages
        >>> other = cache.fork(sequence)
        >>> cache.length(other), cache.num_free_pages
        (5, 6)
        """
        return self._pages.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the positions of a sequence from `length` on; ValueError beyond its length.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> sequence = cache.add()
        >>> step = cache.step([sequence], 5)
        >>> cache.truncate(sequence, 4)
        >>> cache.length(sequence), cache.num_free_pages
        (4, 7)
        """
        self._pages.truncate(sequence, check_int("length", length))

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are free again, but for those that others share.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> sequence = cache.add()
        >>> step = cache.step([sequence], 5)
        >>> cache.free(sequence)
        >>> cache.num_free_pages
        8
        """
        self._pages.free(sequence)

    def step(self, sequences: Sequence[int] | np.ndarray, counts: int | Sequence[int] | np.ndarray) -> Step:
        """Make sequences longer, with pages for the new positions, which `Step.append` fills layer by layer.

        Pages that others share are copied before they are written; with `host_pages` pages move between the memories,
        and the tables of steps that are still valid follow. The positions count from now on, whether or not
        anything is appended. To be called outside of graph capture, as it copies a table to the device.

        Parameters
        ----------
        sequences : sequence of int
            Each one once.
        counts : int or sequence of int
            How many new positions: one number for all, with padded rows (batch, count, heads, dim), or one for each,
            with packed rows (total, heads, dim). They may be 0.

        Returns
        -------
        Step
            Valid until a later step with as many sequences and the same counts, which refills the same arrays: a
            graph that captured `append` and `attend` does the next step when it is replayed.

        Raises
        ------
        KeyError
            For a sequence that is unknown or freed.
        ValueError
            For one that is named twice or would have more than `max_pages_per_sequence` pages, and for counts that do
            not fit.
        MemoryError
            Where fewer pages are free, of the device and the host together, than are wanted. Whatever is raised,
            nothing has changed.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> first, second = cache.add(), cache.add()
        >>> cache.step([first, second], 2)  # padded rows (2, 2, heads, dim)
        Step(num_sequences=2, counts=2, max_pages_per_sequence=8)
        >>> step = cache.step([first, second], [1, 3])  # packed rows (4, heads, dim)
        >>> step.cu_seqlens.tolist(), step.kv_lengths.tolist()
        ([0, 1, 4], [3, 5])
        """
        numbers = _as_list(sequences)
        if not isinstance(numbers, (list, tuple)):
            raise TypeError(f"sequences: expected a list of sequences, got {type(sequences).__name__}")
        key = _checked_counts(_as_list(counts), len(numbers))
        counted = (key,) * len(numbers) if isinstance(key, int) else key
        starts = [self._pages[sequence].length for sequence in numbers]
        copies, renamed = self._pages.reserve(numbers, counted)
        held = [self._pages[sequence] for sequence in numbers]
        with interop.on_stream_of(self._library, self.k):
            if self._memory.host is not None:
                self._memory.host.copy(copies)
            else:
                for source, target in copies:
                    for pool in self._bits:
                        pool[:, target] = pool[:, source]
            if renamed is not None:
                for valid in list(self._steps.values()):
                    valid._rename(renamed)
            step = self._step_of(len(numbers), key)
            step._refill(starts, [own.length for own in held], [own.pages for own in held])
        return step

    def _step_of(self, batch: int, counts: int | tuple[int, ...]) -> Step:
        """The step of that many sequences and these counts, or a new one."""
        key = batch, counts
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self._memory, batch, counts)
        self._latest[key] = step
        self._latest.move_to_end(key)
        if len(self._latest) > _LATEST_STEPS:
            self._latest.popitem(last=False)
        return step


# Steps that stay although nobody holds them: those of other counts are made anew.
_LATEST_STEPS = 256


def _as_list(x: Any) -> Any:
    return x.tolist() if isinstance(x, np.ndarray) else x


def _checked_counts(counts: Any, batch: int) -> int | tuple[int, ...]:
    """One number for all sequences, or a tuple with one for each."""
    if not isinstance(counts, (list, tuple)):
        count = check_int("counts", counts)
        if count < 0:
            raise ValueError(f"counts: expected at least 0, got {count}")
        return count
    each = tuple(check_int(f"counts[{i}]", count) for i, count in enumerate(counts))
    if len(each) != batch:
        raise ValueError(f"counts: expected one for each of the {batch} sequences, got {len(each)}")
    for i, count in enumerate(each):
        if count < 0:
            raise ValueError(f"counts[{i}]: expected at least 0, got {count}")
    return each


def _stored_dtype(dtype: Any) -> np.dtype:
    """The dtype of the pools for a dtype, which may be given by name."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).rpartition(".")[2]
    if name in FP8_DTYPES:
        return np.dtype(np.uint8)
    if name not in DTYPES:
        raise TypeError(f"dtype: expected {', '.join(DTYPES)} or float8_e4m3fn, got {dtype!r}")
    return interop.dtype_of(name)
