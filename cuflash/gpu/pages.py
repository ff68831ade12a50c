"""Pages of keys on a GPU are gathered into rows before a family runs, and gradients are scattered to pages behind it.

Any family then runs as with `kv_lengths`, and lengths stay on the device. A packed call gets its `cu_seqlens_k` here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import Work
from cuflash.gpu.params import Arrays
from cuflash.gpu.portable import WithoutTiles, constants_of_sums
from cuflash.plan.config import KernelConfig
from cuflash.plan.portable.kernels import types_of
from cuflash.plan.sm80.forward import dtypes
from cuflash.problem.attention_problem import Array, AttentionProblem

_THREADS = 256  # threads of a thread block
# These are numbers of around/gather_pages.cu and around/scatter_pages.cu.
_KEYS = 32
_PER_THREAD = 8
_BLOCKS_PER_SM = 8  # so many thread blocks gather at once
_MOST_BYTES = 1 << 28  # rows of so many bytes are gathered however small the pools are
_MOST_ROWS = 2**31 - 1  # cu_seqlens are int32
_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


@dataclass(frozen=True)
class _Gather(WithoutTiles):
    """The kernel that copies pages to rows."""

    config: KernelConfig
    num_sms: int
    itemsize: int
    threads = _THREADS

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of thread blocks: (of one sequence, in all)."""
        assert problem.pages is not None
        most = math.ceil(self.num_sms * _BLOCKS_PER_SM / max(problem.batch, 1))
        blocks = max(min(math.ceil(problem.pages.capacity / _KEYS), most), 1)
        return blocks, max(blocks * problem.batch, int(problem.packed))

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which all dtypes of a size share."""
        constants = constants_of_sums(self.config) | {"element": _UNSIGNED[self.itemsize], "threads": _THREADS}
        return load("around/gather_pages", self.entry, constants, device)


@dataclass(frozen=True)
class _Scatter(WithoutTiles):
    """The kernel that sums gradients of rows to those of pages."""

    threads = _THREADS

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of thread blocks: (of one page, in all)."""
        assert problem.pages is not None
        widest = max(problem.head_dim, problem.head_dim_v)
        parts = math.ceil(problem.pages.page_size * problem.num_heads_kv * widest / (_THREADS * _PER_THREAD))
        return parts, parts * problem.pages.num_pages

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which all configurations of the same types share."""
        constants = constants_of_sums(self.config) | {"threads": _THREADS}
        return load("around/scatter_pages", self.entry, constants, device)


def fits(work: Work) -> bool:
    """Return True if there is room for a row of keys for each sequence, as long as its row of the table.

    A table that is much wider than the pool has keys, as one whose sequences may have any page, would ask for many
    times the pool's memory. With splits of one size the dtype decides in place of the table's width: pages are read in
    place where kernels for tensor cores do that.
    """
    problem, k = work.problem, work.arrays["k"]
    assert problem.pages is not None
    if problem.split_size is not None:
        return problem.dtype not in dtypes(work.device.capability)
    rows = problem.batch * problem.pages.capacity
    of_row = problem.num_heads_kv * (problem.head_dim + problem.head_dim_v) * k.dtype.itemsize
    of_pools = problem.pages.num_pages * problem.pages.page_size * of_row
    return rows * of_row <= max(_MOST_BYTES, 2 * of_pools)


def with_first_keys(work: Work) -> None:
    """Give the work the `cu_seqlens_k` of packed queries, where logical keys follow each other."""
    if work.problem.packed:
        check_rows(work.problem)
        first_keys = work.empty((work.problem.batch + 1,), np.int32)
        kernel = _Gather("gather_pages", types_of(work.problem), 0, work.arrays["k"].dtype.itemsize)
        work.run(
            kernel, {name: work.arrays[name] for name in ("block_table", "kv_lengths")} | {"first_keys": first_keys}
        )
        work.arrays["cu_seqlens_k"] = first_keys


def check_rows(problem: AttentionProblem) -> None:
    """Raise ValueError where logical keys of packed queries are more than 32 bits count."""
    if problem.pages is not None and problem.packed and problem.seqlen_k > _MOST_ROWS:
        raise ValueError(
            f"block_table: expected batch * max_pages * page_size of at most {_MOST_ROWS} for packed queries, "
            f"got {problem.batch} * {problem.pages.max_pages} * {problem.pages.page_size}"
        )


class Unpaged:
    """Work on pages that becomes work on rows: its arrays are replaced, and `scatter` writes the pools' gradients."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._problem, self._arrays = work.problem, dict(work.arrays)
        problem = self._problem
        assert problem.pages is not None
        check_rows(problem)
        rows = {f"{name}_rows": self._rows_of(self._arrays[name]) for name in ("k", "v")}
        of_rows = {"k": rows["k_rows"], "v": rows["v_rows"]}
        if problem.packed:
            rows["first_keys"] = of_rows["cu_seqlens_k"] = work.empty((problem.batch + 1,), np.int32)
        pools = {name: self._arrays[name] for name in ("k", "v", "block_table", "kv_lengths")}
        kernel = _Gather("gather_pages", types_of(problem), work.device.num_sms, pools["k"].dtype.itemsize)
        work.run(kernel, pools | rows)
        work.problem = replace(problem, pages=None)
        work.arrays = {name: x for name, x in self._arrays.items() if name != "block_table"} | of_rows

    def gradients(self, grads: Arrays) -> Arrays:
        """Return targets for a family, of which those of k and v are rows."""
        self._grads = {name: x for name, x in grads.items() if name in ("k", "v")}
        self._grad_rows = {name: self._rows_of(x) for name, x in self._grads.items()}
        return grads | self._grad_rows

    def scatter(self) -> None:
        """Write the gradients of the pools."""
        if not self._grads:
            return
        rows = {f"d{name}_rows": x for name, x in self._grad_rows.items()}
        pools = {f"d{name}": x for name, x in self._grads.items()}
        inputs = {
            name: self._arrays[name] for name in ("block_table", "kv_lengths", "cu_seqlens_q") if name in self._arrays
        }
        self._work.problem = self._problem
        self._work.run(_Scatter("scatter_pages", types_of(self._problem)), inputs | pools | rows)

    def _rows_of(self, pool: Array) -> Array:
        problem = self._problem
        leading = (problem.seqlen_k,) if problem.packed else (problem.batch, problem.seqlen_k)
        return self._work.empty((*leading, *pool.shape[2:]), pool.dtype)
