"""Caches of keys and values: `append_kv` writes into one of any layout, and `PagedCache` keeps one in pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakValueDictionary

import numpy as np

from cuflash import hints, interop
from cuflash.attention import attention, attention_varlen
from cuflash.frontend.append import append
from cuflash.pages import Pages
from cuflash.problem.append import FP8_DTYPES
from cuflash.problem.attention_problem import DTYPES, Array
from cuflash.problem.checks import check_bool, check_int
from cuflash.typing import AnyArray, ArrayT
from cuflash.upload import Refilled, table_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords


@overload
def append_kv(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    kv_lengths: AnyArray,
    *,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
) -> None: ...
@overload
def append_kv(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    kv_lengths: AnyArray,
    *,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: ArrayT,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
) -> ArrayT: ...
@hints.without_others
def append_kv(
    k: AnyArray,
    v: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    kv_lengths: AnyArray,
    *,
    block_table: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    rotary: tuple[AnyArray, AnyArray] | None = None,
    interleaved: bool = False,
    q: AnyArray | None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    **others: Unpack[hints.NoOthers],
) -> Any:
    """Write new keys and values behind those that a cache has, in place, and rotate k and q by their positions.

    Row t of sequence b goes to position ``kv_lengths[b] + t``. Rows beyond the capacity are dropped, and so are rows
    whose page lies outside of the pool; nothing else is written. `kv_lengths` stays as it is: attention over the cache
    takes these lengths plus the new rows. On a GPU it is one launch, which never synchronises and may be captured.

    Parameters
    ----------
    k : array (batch, seqlen, num_heads_kv, head_dim), with `cu_seqlens` packed (total, num_heads_kv, head_dim)
        New keys: float16, bfloat16, float32 or float64; any strides, as all arrays here.
    v : array (batch, seqlen, num_heads_kv, head_dim_v), packed (total, num_heads_kv, head_dim_v)
        New values, of k's dtype.
    k_cache, v_cache : array (batch, capacity, num_heads_kv, head_dim and head_dim_v)
        With `block_table` pools (num_pages, page_size, num_heads_kv, ...). Of k's dtype, or FP8 (uint8 codes of e4m3,
        or float8_e4m3fn): these receive numbers rounded to nearest even and saturated.
    kv_lengths : int32 array (batch,)
        Positions of each sequence that the cache already holds.
    block_table : int32 array (batch, max_pages), optional
        Entry p is the page of positions ``p * page_size`` to ``(p + 1) * page_size - 1``.
    cu_seqlens : int32 array (batch + 1,), optional
        Where the sequences begin in packed rows; rows outside of all sequences are not written.
    rotary : (cos, sin), optional
        Arrays (positions, rotary_dim / 2) of float32 or k's dtype. k and q are rotated in their first rotary_dim
        columns (Su et al., RoFormer, 2021), computed in float32 (float64 for float64); positions are clamped to the
        table.
    interleaved : bool
        Pairs are neighbouring columns; by default a column of the first half and one of the second half.
    q : array (batch, seqlen, num_heads_q, head_dim), packed (total, num_heads_q, head_dim), optional
        Queries of the same positions, of k's dtype.
    k_scale, v_scale : float32 array, optional
        Divide what an FP8 cache receives; broadcast to the new rows' (batch, seqlen, num_heads_kv), packed (total,
        num_heads_kv). Default 1.

    Returns
    -------
    array or None
        The rotated q as a new array (without `rotary` a copy; rows outside of all sequences as they were), None without
        `q`.

    Raises
    ------
    TypeError
        For a wrong kind of thing or dtype, and for caches of a library whose arrays are immutable, as JAX's are.
    ValueError
        For a wrong shape, device or value, a cache that overlaps another argument, and a scale without an FP8 cache.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> k_cache, v_cache = np.zeros((2, 1, 16, 2, 8), np.float32)
    >>> new, lengths = np.ones((1, 1, 2, 8), np.float32), np.array([5], np.int32)
    >>> cuflash.append_kv(new, new, k_cache, v_cache, lengths)
    >>> out = cuflash.attention(new, k_cache, v_cache, kv_lengths=lengths + 1)
    >>> float(k_cache[0, 5, 0, 0])
    1.0
    """
    if others:
        hints.refuse_others(append_kv, others, hints.APPEND)
    interleaved = check_bool("interleaved", interleaved)
    given = {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "kv_lengths": kv_lengths,
        "block_table": block_table,
        "cu_seqlens": cu_seqlens,
        **_rotary(rotary),
        "q": q,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    optional = ("block_table", "cu_seqlens", "q", "k_scale", "v_scale")
    given = {name: x for name, x in given.items() if x is not None or name not in optional}
    return append(given, interleaved)


def _rotary(rotary: object) -> dict[str, Any]:
    if rotary is None:
        return {}
    if not isinstance(rotary, (tuple, list)):
        raise TypeError(f"rotary: expected (cos, sin), got {type(rotary).__name__}")
    if len(rotary) != 2:
        raise ValueError(f"rotary: expected two arrays (cos, sin), got {len(rotary)}")
    return dict(zip(("cos", "sin"), rotary, strict=True))


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
        Columns of the block tables; default `num_pages`. The pages of the longest sequence are a better number: tables
        are copied to the device in every step, and on a GPU attention may take memory in proportion to them.

    Attributes
    ----------
    k, v : array (num_layers, num_pages, page_size, num_heads_kv, head_dim and head_dim_v)
        The pools.

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
            "max_pages_per_sequence": num_pages if max_pages_per_sequence is None else max_pages_per_sequence,
        }
        for name, size in sizes.items():
            if check_int(name, size) < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        self.xp = xp
        self.num_layers = num_layers
        shape = (num_layers, num_pages, page_size, num_heads_kv)
        stored = _stored_dtype(dtype)
        self.k: Array = xp.zeros((*shape, head_dim), stored)
        self.v: Array = xp.zeros((*shape, sizes["head_dim_v"]), stored)
        self._bits = tuple(x.view(f"u{x.dtype.itemsize}") for x in (self.k, self.v))
        self._pages = Pages(num_pages, page_size, sizes["max_pages_per_sequence"])
        self._library = interop.library_of("pool", self.k)
        # The latest steps stay, others as long as somebody holds them.
        self._steps: WeakValueDictionary[Any, Step] = WeakValueDictionary()
        self._latest: OrderedDict[Any, Step] = OrderedDict()

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.num_free

    def length(self, sequence: int) -> int:
        """Positions of a sequence, those of the steps begun included."""
        return self._pages[sequence].length

    def add(self) -> int:
        """A new, empty sequence: its number, which is never used again."""
        return self._pages.add()

    def fork(self, sequence: int) -> int:
        """A new sequence with the positions of another, whose pages it shares until one of them writes into one.

        Raises
        ------
        KeyError
            For a sequence that is unknown or freed, as all methods.
        """
        return self._pages.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the positions of a sequence from `length` on; ValueError beyond its length."""
        self._pages.truncate(sequence, check_int("length", length))

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are free again, but for those that others share."""
        self._pages.free(sequence)

    def step(self, sequences: Sequence[int] | np.ndarray, counts: int | Sequence[int] | np.ndarray) -> Step:
        """Make sequences longer, with pages for the new positions, which `Step.append` fills layer by layer.

        Pages that others share are copied before they are written. The positions count from now on, whether or not
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
            Where fewer pages are free than are wanted. Whatever is raised, nothing has changed.
        """
        numbers = _as_list(sequences)
        if not isinstance(numbers, (list, tuple)):
            raise TypeError(f"sequences: expected a list of sequences, got {type(sequences).__name__}")
        key = _checked_counts(_as_list(counts), len(numbers))
        counted = (key,) * len(numbers) if isinstance(key, int) else key
        starts = [self._pages[sequence].length for sequence in numbers]
        copies = self._pages.reserve(numbers, counted)
        held = [self._pages[sequence] for sequence in numbers]
        with interop.on_stream_of(self._library, self.k):
            for source, target in copies:
                for pool in self._bits:
                    pool[:, target] = pool[:, source]
            step = self._step_of(len(numbers), key)
            step.refill(starts, [own.length for own in held], [own.pages for own in held])
        return step

    def _step_of(self, batch: int, counts: int | tuple[int, ...]) -> Step:
        """The step of that many sequences and these counts, or a new one."""
        key = batch, counts
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self, batch, counts, self._pages.max_pages)
        self._latest[key] = step
        self._latest.move_to_end(key)
        if len(self._latest) > _LATEST_STEPS:
            self._latest.popitem(last=False)
        return step


class Step:
    """New positions of some sequences: what `PagedCache.step` returns.

    Attributes
    ----------
    block_table : int32 array (batch, max_pages_per_sequence)
        The pages of each sequence; -1 in entries that are not used.
    kv_lengths : int32 array (batch,)
        Positions of each sequence, the new ones counted.
    cu_seqlens : int32 array (batch + 1,) or None
        Where the new rows of each sequence begin if they are packed.
    """

    def __init__(self, cache: PagedCache, batch: int, counts: int | tuple[int, ...], max_pages: int) -> None:
        self._cache = cache
        self._is_packed = not isinstance(counts, int)
        self._rows = (sum(counts),) if isinstance(counts, tuple) else (batch, counts)
        self._begins = np.concatenate(([0], np.cumsum(counts))) if isinstance(counts, tuple) else np.zeros(0)
        shapes = {"starts": (batch,), "kv_lengths": (batch,), "block_table": (batch, max_pages)}
        if self._is_packed:
            shapes["cu_seqlens"] = (batch + 1,)
        self._arrays = Refilled(cache.xp, shapes)
        self.block_table: Array = self._arrays.arrays["block_table"]
        self.kv_lengths: Array = self._arrays.arrays["kv_lengths"]
        self.cu_seqlens: Array | None = self._arrays.arrays.get("cu_seqlens")

    def refill(self, starts: list[int], lengths: list[int], pages: list[Any]) -> None:
        """Bring the arrays up to date, for `PagedCache`: positions before and after the step, and each one's pages."""
        table = table_of(pages, self.block_table.shape[1])
        values = {"starts": starts, "kv_lengths": lengths, "block_table": table, "cu_seqlens": self._begins}
        self._arrays.refill(values)

    @overload
    def append(
        self,
        layer: int,
        q: None,
        k: AnyArray,
        v: AnyArray,
        *,
        rotary: tuple[AnyArray, AnyArray] | None = None,
        interleaved: bool = False,
        k_scale: AnyArray | None = None,
        v_scale: AnyArray | None = None,
    ) -> None: ...
    @overload
    def append(
        self,
        layer: int,
        q: ArrayT,
        k: AnyArray,
        v: AnyArray,
        *,
        rotary: tuple[AnyArray, AnyArray] | None = None,
        interleaved: bool = False,
        k_scale: AnyArray | None = None,
        v_scale: AnyArray | None = None,
    ) -> ArrayT: ...
    @hints.without_others
    def append(
        self,
        layer: int,
        q: Any,
        k: AnyArray,
        v: AnyArray,
        *,
        rotary: tuple[AnyArray, AnyArray] | None = None,
        interleaved: bool = False,
        k_scale: AnyArray | None = None,
        v_scale: AnyArray | None = None,
        **others: Unpack[hints.NoOthers],
    ) -> Any:
        """Write the new rows of a layer, and return q, rotated if `rotary` is given, as a new array: `append_kv`.

        Raises
        ------
        TypeError, ValueError
            As `append_kv`, and for a layer or a number of rows that is not the step's.
        """
        if others:
            hints.refuse_others(Step.append, others, hints.APPEND)
        self._check_rows("k", k)
        k_pool, v_pool = self._pools(layer)
        return append_kv(
            k,
            v,
            k_pool,
            v_pool,
            self._arrays.arrays["starts"],
            block_table=self.block_table,
            cu_seqlens=self.cu_seqlens,
            rotary=rotary,
            interleaved=interleaved,
            q=q,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    @overload
    def attend(
        self, layer: int, q: ArrayT, *, return_lse: Literal[False] = False, **options: Unpack[OptionKeywords]
    ) -> ArrayT: ...
    @overload
    def attend(
        self, layer: int, q: ArrayT, *, return_lse: Literal[True], **options: Unpack[OptionKeywords]
    ) -> tuple[ArrayT, ArrayT]: ...
    def attend(self, layer: int, q: Any, **options: Any) -> Any:
        """Attention of the new rows' queries over all positions of their sequences in a layer.

        Parameters
        ----------
        layer : int
        q : array (batch, count, num_heads_q, head_dim), packed (total, num_heads_q, head_dim)
        **options
            As in `attention`; ``causal=True`` unless said otherwise. ``k_scale`` and ``v_scale`` are of the pools of an
            FP8 cache, (num_pages, page_size, num_heads_kv).

        Returns
        -------
        out, or (out, lse) with ``return_lse=True``
        """
        self._check_rows("q", q)
        k_pool, v_pool = self._pools(layer)
        options = {"causal": True, "block_table": self.block_table, "kv_lengths": self.kv_lengths, **options}
        if self._is_packed:
            cu_seqlens: Any = self.cu_seqlens
            return attention_varlen(q, k_pool, v_pool, cu_seqlens, None, **options)
        return attention(q, k_pool, v_pool, **options)

    def _pools(self, layer: int) -> tuple[Array, Array]:
        cache = self._cache
        if not 0 <= check_int("layer", layer) < cache.num_layers:
            raise ValueError(f"layer: expected 0 <= layer < {cache.num_layers}, got {layer}")
        return cache.k[layer], cache.v[layer]

    def _check_rows(self, name: str, x: Any) -> None:
        # A bare exporter of DLPack has no shape of its own.
        shape = x.shape if hasattr(x, "shape") else interop.library_of(name, x).adopt(name, x).shape
        if tuple(shape[: len(self._rows)]) != self._rows or len(shape) != len(self._rows) + 2:
            axes = "(total, heads, dim)" if self._is_packed else "(batch, count, heads, dim)"
            wanted = ", ".join(map(str, self._rows))
            raise ValueError(f"{name}: expected {axes} = ({wanted}, *, *), the step's own, got {tuple(shape)}")


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
