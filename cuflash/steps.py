"""A step of a paged cache: new positions of some sequences, which are appended and attended layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cuflash import hints, interop
from cuflash.appending import append_kv
from cuflash.attention import attention, attention_varlen
from cuflash.hints import MISSING
from cuflash.problem.attention_problem import Array
from cuflash.problem.checks import check_int
from cuflash.typing import AnyArray, ArrayT, OwnArray
from cuflash.upload import Refilled, table_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.offload.pools import HostPools
    from cuflash.offload.tiers import Tiers
    from cuflash.problem.options import OptionKeywords


@dataclass(frozen=True)
class Pools:
    """The memory of a cache: pools (num_layers, num_pages, page_size, num_heads_kv, columns) of k and v."""

    xp: Any
    k: Array
    v: Array
    max_pages: int  # of one sequence
    host: HostPools | None = None  # more pages, in host memory

    @property
    def num_pages(self) -> int:
        """Pages of the device."""
        return int(self.k.shape[1])

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return int(self.k.shape[2])

    def of_layer(self, layer: int) -> tuple[Array, Array]:
        """The device's pools of a layer."""
        if not 0 <= check_int("layer", layer) < len(self.k):
            raise ValueError(f"layer: expected 0 <= layer < {len(self.k)}, got {layer}")
        return self.k[layer], self.v[layer]


class Step:
    """New positions of some sequences: what `PagedCache.step` returns.

    Attributes
    ----------
    block_table : int32 array (batch, max_pages_per_sequence)
        The pages of each sequence on the device; -1 in entries that are not used, or whose page lies in host memory.
    kv_lengths : int32 array (batch,)
        Positions of each sequence, the new ones counted.
    cu_seqlens : int32 array (batch + 1,) or None
        Where the new rows of each sequence begin if they are packed.
    num_host_pages : int
        Pages of its sequences that lie in host memory; 0 of caches without `host_pages`.
    """

    def __init__(self, memory: Pools, batch: int, counts: int | tuple[int, ...]) -> None:
        self._memory = memory
        self._is_packed = not isinstance(counts, int)
        self._rows = (sum(counts),) if isinstance(counts, tuple) else (batch, counts)
        self._begins = np.concatenate(([0], np.cumsum(counts))) if isinstance(counts, tuple) else np.zeros(0)
        shapes = {"starts": (batch,), "kv_lengths": (batch,), "block_table": (batch, memory.max_pages)}
        if self._is_packed:
            shapes["cu_seqlens"] = (batch + 1,)
        self._arrays = Refilled(memory.xp, shapes)
        self.block_table: OwnArray = self._arrays.arrays["block_table"]
        self.kv_lengths: OwnArray = self._arrays.arrays["kv_lengths"]
        self.cu_seqlens: OwnArray | None = self._arrays.arrays.get("cu_seqlens")
        self._tiers: Tiers | None = None  # where the pages lie, of a cache with host pages

    def __repr__(self) -> str:
        batch, pages = self.block_table.shape
        counts = np.diff(self._begins).astype(int).tolist() if self._is_packed else self._rows[-1]
        return f"Step(num_sequences={batch}, counts={counts}, max_pages_per_sequence={pages})"

    @property
    def num_host_pages(self) -> int:
        """Pages of its sequences that lie in host memory.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 2, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np, host_pages=3)
        >>> cache.step([cache.add()], 10).num_host_pages  # of three pages, where the device has two
        1
        """
        return 0 if self._tiers is None else self._tiers.num_on_host()

    def _refill(self, starts: list[int], lengths: list[int], pages: list[Any]) -> None:
        """Bring the arrays up to date, for `PagedCache`: positions before and after the step, and each one's pages."""
        if self._memory.host is not None:
            from cuflash.offload.tiers import Tiers

            memory = self._memory
            begins = tuple(self._begins.tolist()) if self._is_packed else None
            own = tuple([x.copy() for x in pages])
            at = memory.num_pages, memory.page_size, memory.max_pages
            self._tiers = Tiers(*at, own, tuple(starts), tuple(lengths), begins, memory.xp)
            table = self._tiers.table(is_on_host=False)
        else:
            table = table_of(pages, self.block_table.shape[1])
        values = {"starts": starts, "kv_lengths": lengths, "block_table": table, "cu_seqlens": self._begins}
        self._arrays.refill(values)

    def _rename(self, renamed: Any) -> None:
        """Follow pages that have moved, for `PagedCache`: `renamed` has the new number of every page."""
        tiers = self._tiers
        if tiers is not None and any((renamed[own] != own).any() for own in tiers.pages):
            self._refill(list(tiers.starts), list(tiers.lengths), [renamed[own] for own in tiers.pages])

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
    @hints.show_signature
    def append(
        self,
        layer: int = MISSING,
        q: Any = MISSING,
        k: AnyArray = MISSING,
        v: AnyArray = MISSING,
        *rest: Any,
        rotary: tuple[AnyArray, AnyArray] | None = None,
        interleaved: bool = False,
        k_scale: AnyArray | None = None,
        v_scale: AnyArray | None = None,
        **others: Unpack[hints.NoOthers],
    ) -> Any:
        """Write the new rows of a layer, and return q, rotated if `rotary` is given, as a new array: `append_kv`.

        Rows whose pages lie in host memory, as they do where a step's rows have no room on the device, are copied there
        by the host, which waits for them.

        Raises
        ------
        TypeError, ValueError
            As `append_kv`, and for a layer or a number of rows that is not the step's.
        RuntimeError
            Where rows are written in host memory while the current stream is captured.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> step = cache.step([cache.add()], 3)  # a prompt of three tokens
        >>> q = k = v = np.ones((1, 3, 2, 8), np.float32)
        >>> step.append(0, q, k, v).shape  # q, which rotary= would have rotated
        (1, 3, 2, 8)
        """
        if others or rest or layer is MISSING or q is MISSING or k is MISSING or v is MISSING:
            raise hints.wrong_append(Step.append, (self, layer, q, k, v, *rest), others)
        self._check_rows("k", k)
        k_pool, v_pool = self._memory.of_layer(layer)
        tiers, host = self._tiers, self._memory.host
        how: dict[str, Any] = {"block_table": self.block_table, "cu_seqlens": self.cu_seqlens}
        how |= {"rotary": rotary, "interleaved": interleaved}
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        starts = self._arrays.arrays["starts"]
        if tiers is None or host is None:
            return append_kv(k, v, k_pool, v_pool, starts, q=q, **how, **scales)
        from cuflash.offload import tiers as both

        is_on_host = both.writes_on_host(tiers)
        if is_on_host:
            both.refuse_capture(host, "append")
        rotated = append_kv(k, v, k_pool, v_pool, starts, q=q, **how, **scales)
        if is_on_host:
            # The keys are rotated where the others are, so that they have the same bits.
            own_k: Any = k if rotary is None else append_kv(k, v, k_pool, v_pool, starts, q=k, **how, **scales)
            both.append_on_host(tiers, own_k, v, host, layer, scales)
        return rotated

    @overload
    def attend(
        self,
        layer: int,
        q: ArrayT,
        *,
        share: Literal["auto"] | float = "auto",
        return_lse: Literal[False] = False,
        **options: Unpack[OptionKeywords],
    ) -> ArrayT: ...
    @overload
    def attend(
        self,
        layer: int,
        q: ArrayT,
        *,
        share: Literal["auto"] | float = "auto",
        return_lse: Literal[True],
        **options: Unpack[OptionKeywords],
    ) -> tuple[ArrayT, ArrayT]: ...
    @hints.show_signature
    def attend(
        self,
        layer: int = MISSING,
        q: Any = MISSING,
        *rest: Any,
        share: Literal["auto"] | float = "auto",
        **options: Any,
    ) -> Any:
        """Attention of the new rows' queries over all positions of their sequences in a layer.

        Sequences whose pages all lie on the device, and those whose window ends before pages in host memory, are
        computed as by `attention`. Host pages that queries see are read where they lie, streamed to the device or
        computed by the CPU, as in `cuflash.offload`; then the host waits for the device.

        Parameters
        ----------
        layer : int
        q : array (batch, count, num_heads_q, head_dim), packed (total, num_heads_q, head_dim)
        share : "auto" or float
            The share of the keys in host memory that the CPU computes, as of `cuflash.offload.attention`; only of
            caches with `host_pages`.
        **options
            As in `attention`; ``causal=True`` unless said otherwise. ``k_scale`` and ``v_scale`` are of the pools of an
            FP8 cache, (num_pages, page_size, num_heads_kv); with `host_pages`, whose pages move, (1, 1, num_heads_kv)
            or (1, 1, 1).

        Returns
        -------
        out, or (out, lse) with ``return_lse=True``

        Raises
        ------
        TypeError, ValueError
            As `attention`, and for a layer or a number of rows that is not the step's.
        NotImplementedError
            For `split_size` where queries see host pages, as a row's bits depend on where its keys lie; for scales of
            pages of a cache with `host_pages`.
        RuntimeError
            Where queries see host pages while the current stream is captured.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.PagedCache(1, 8, 4, num_heads_kv=2, head_dim=8, dtype="float32", xp=np)
        >>> step = cache.step([cache.add()], 3)
        >>> q = np.ones((1, 3, 2, 8), np.float32)
        >>> step.attend(0, step.append(0, q, q, q), window=(1, 0)).shape
        (1, 3, 2, 8)
        """
        if rest or layer is MISSING or q is MISSING:
            raise hints.wrong_options_call(Step.attend, (self, layer, q, *rest), options)
        self._check_rows("q", q)
        k_pool, v_pool = self._memory.of_layer(layer)
        options = {"causal": True, **options}
        if self._memory.host is not None:
            result = self._attend_both(layer, q, options, share)
            if result is not None:
                return result
        elif share != "auto":
            raise ValueError(f'share: expected "auto", as the cache has no host_pages, got {share!r}')
        options = {"block_table": self.block_table, "kv_lengths": self.kv_lengths, **options}
        if self._is_packed:
            cu_seqlens: Any = self.cu_seqlens
            return attention_varlen(q, k_pool, v_pool, cu_seqlens, None, **options)
        return attention(q, k_pool, v_pool, **options)

    def _attend_both(self, layer: int, q: Any, options: dict[str, Any], share: Any) -> Any:
        """Return the result over both memories, None where no page in host memory counts."""
        from cuflash.offload import tiers as both
        from cuflash.offload.share import check_share

        tiers, host = self._tiers, self._memory.host
        assert tiers is not None and host is not None
        of_cpu = check_share(share)
        both.refuse_scales_by_page(options)
        if not self.num_host_pages:
            return None
        if options.pop("block_table", None) is not None:
            count = self.num_host_pages
            raise ValueError(
                f"block_table: expected None, as {count} pages of the step lie in host memory, got a table"
            )
        return both.attend(tiers, q, self._memory.of_layer(layer), host, layer, options, self.cu_seqlens, of_cpu)

    def _check_rows(self, name: str, x: Any) -> None:
        # A bare exporter of DLPack has no shape of its own.
        shape = x.shape if hasattr(x, "shape") else interop.library_of(name, x).adopt(name, x).shape
        if tuple(shape[: len(self._rows)]) != self._rows or len(shape) != len(self._rows) + 2:
            axes = "(total, heads, dim)" if self._is_packed else "(batch, count, heads, dim)"
            wanted = ", ".join(map(str, self._rows))
            raise ValueError(f"{name}: expected {axes} = ({wanted}, *, *), the step's own, got {tuple(shape)}")
