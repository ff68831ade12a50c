"""Drawn problems of few queries, with any options but a block mask, on a GPU beside float64 on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash.interop import dtype_of
from cuflash.tools.bench import inputs

GROUPS = (1, 2, 3, 4, 7, 8, 16, 71)
HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (40, 72), (192, 128), (256, 256))
PAGE_SIZES = (1, 3, 16, 64, 96, 256)
MOST_QUERIES, MOST_KEYS = 64, 4096
SOFTCAP = 5.0
LSE_ERROR = 1e-3  # of the largest |lse| or of 1
_SLOPPY_TANH = 2.0**-10  # the GPU's tanh is off by half of this, which counts twice


class Problem(NamedTuple):
    """A call of `attention`, or with `packed` of `attention_varlen`, on NumPy arrays."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]
    packed: bool

    @property
    def name(self) -> str:
        """The name that failures have."""
        shapes = " ".join("x".join(map(str, x.shape)) for x in self.arrays[:3])
        return f"{self.arrays[0].dtype} q, k, v {shapes} {'packed ' if self.packed else ''}{sorted(self.options)}"


def drawn(seed: int) -> Problem:
    """One problem; every other one has its keys in pages."""
    rng = np.random.default_rng(seed)

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    group, dims = GROUPS[seed % len(GROUPS)], HEAD_DIMS[seed // 2 % len(HEAD_DIMS)]
    dtype = dtype_of("bfloat16" if chance(0.5) else "float16")
    heads_kv, batch = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    queries, keys = int(MOST_QUERIES ** rng.uniform()), int(MOST_KEYS ** rng.uniform())
    heads, pages = group * heads_kv, seed % 2 == 1
    page_size = int(rng.choice(PAGE_SIZES))
    keys = -(-keys // page_size) * page_size if pages else keys

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    options: dict[str, Any] = {}
    if chance(0.6):
        options["window"] = (int(rng.integers(keys)) if chance(0.4) else None, int(rng.integers(8)) * chance(0.4))
    if chance(0.2):
        options["softcap"] = SOFTCAP
    if chance(0.2):
        options["alibi_slopes"] = rng.random(heads, np.float32)
    if chance(0.2):
        options["sink"] = rng.standard_normal(heads, np.float32)
    if chance(0.2):
        options |= {"dropout_p": 0.3, "dropout_seed": seed}
    if chance(0.2):
        options["num_splits"] = int(rng.integers(1, 9))
    packed = chance(0.3)
    if not packed and chance(0.3):
        columns = -(-keys // 16) * 16 if chance(0.7) else keys  # TMA takes rows of multiples of 16 bytes
        mask = rng.random((batch, 1, queries, columns)) < 0.7
        options["mask"] = mask[..., :keys]
        if chance(0.5):
            options["bias"] = numbers(1, heads, queries, columns)[..., :keys]
    lengths = rng.integers(0, keys + 1, batch).astype(np.int32)
    if pages:
        k, v, table = _pools(rng, [numbers(batch, keys, heads_kv, dim) for dim in dims], page_size, lengths)
        options |= {"block_table": table, "kv_lengths": lengths}
    else:
        k, v = (numbers(*((batch * keys,) if packed else (batch, keys)), heads_kv, dim) for dim in dims)
        if chance(0.4):
            options["kv_lengths"] = lengths
    if not packed:
        return Problem((numbers(batch, queries, heads, dims[0]), k, v), options, packed)
    begins = [np.sort(rng.integers(0, batch * n + 1, batch + 1)).astype(np.int32) for n in (queries, keys)]
    q = numbers(batch * queries, heads, dims[0])
    return Problem((q, k, v, begins[0], None if pages else begins[1]), options, packed)


def _pools(rng: np.random.Generator, rows: list[Any], page_size: int, lengths: Any) -> tuple[Any, Any, Any]:
    """Pools of shuffled pages with NaN wherever no key is in use, and their table."""
    batch, keys = rows[0].shape[:2]
    num_pages = batch * keys // page_size
    table = rng.permutation(num_pages).reshape(batch, -1).astype(np.int32)
    unused = np.arange(keys) >= lengths[:, None]
    pools = []
    for x in rows:
        x[unused] = np.nan
        pool = np.empty((num_pages, page_size, *x.shape[2:]), x.dtype)
        pool[table.ravel()] = x.reshape(num_pages, page_size, *x.shape[2:])
        pools.append(pool)
    return pools[0], pools[1], table


def _computed(problem: Problem, put: Any, get: Any) -> tuple[Any, Any]:
    function = cuflash.attention_varlen if problem.packed else cuflash.attention
    options = {name: put(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
    arrays: list[Any] = [None if x is None else put(x) for x in problem.arrays]
    out, lse = function(*arrays, **options, return_lse=True)
    return get(out), get(lse)


def _widened(x: Any) -> Any:
    return x.astype(np.float64) if x.dtype.kind not in "biu" else x


def wrong(seed: int, xp: Any) -> str:
    """Say what is wrong with the results of a drawn problem; empty if nothing is."""
    problem = drawn(seed)
    with np.errstate(invalid="ignore"):
        expected, expected_lse = _computed(problem, _widened, np.asarray)
    out, lse = _computed(problem, xp.asarray, inputs.as_float64)
    if problem.packed:  # rows behind the last sequence are padding
        used = problem.arrays[3]
        out, expected = out[used[0] : used[-1]], expected[used[0] : used[-1]]
        lse, expected_lse = lse[:, used[0] : used[-1]], expected_lse[:, used[0] : used[-1]]
    largest = float(np.abs(expected).max(initial=0))
    error = float(np.abs(out - expected).max(initial=0))
    if not error <= inputs.limit(str(problem.arrays[0].dtype)) * largest:
        return f"seed {seed}: out is off by {error:.3g}, the largest value is {largest:.3g}: {problem.name}"
    finite = np.isfinite(expected_lse)
    if not np.array_equal(expected_lse[~finite], lse[~finite]):
        return f"seed {seed}: lse is -inf in other places: {problem.name}"
    off = float(np.abs(lse[finite] - expected_lse[finite]).max(initial=0))
    most = LSE_ERROR * max(float(np.abs(expected_lse[finite]).max(initial=0)), 1)
    if not off <= most + _SLOPPY_TANH * problem.options.get("softcap", 0):
        return f"seed {seed}: lse is off by {off:.3g}: {problem.name}"
    return ""
