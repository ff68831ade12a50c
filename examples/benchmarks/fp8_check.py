"""Problems on FP8 keys and values that are drawn at random, each against float64 attention on the same FP8 inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import reference
from cuflash.interop import dtype_of

Array = NDArray[Any]

CODES = "float8_e4m3fn"
QUERIES = (CODES, "float16", "bfloat16")
RESULTS = ("float16", "bfloat16", "float32")
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
PAGE_SIZES = (1, 16, 64)
WEIGHT_FACTOR = 2.0**8  # e4m3 weights are numbers of a row's or tile's largest over this
# Kernels round a weight to the queries' 16 bits, or to e4m3, which moves it by so much of itself at most; or by so much
# of its row's largest where it is too small to have all bits.
WEIGHT_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, CODES: 2.0**-4}
LEAST_ROUNDING = {"float16": 2.0**-25, "bfloat16": 0.0, CODES: 2.0**-10 / WEIGHT_FACTOR}
RESULT_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Softcap is by the tanh instruction, with this relative error, in Hopper's kernels, and in others without more options.
TANH_ERROR = 2.0**-11
LSE_ERROR = 1e-4  # float32 sums and ex2, in a row's lse
SUMS_ROUNDING = 2e-5  # float32 sums by tensor cores, as a part of the mean of |v|
THREADS = 8  # which compile kernels at the same time


def numbers_of(codes: Array, scale: Array | float = 1.0) -> Array:
    """The numbers of e4m3 codes, by ml_dtypes, in float64."""
    wide = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return wide * (np.asarray(scale, np.float64)[..., None] if np.ndim(scale) else scale)


class Exact(NamedTuple):
    """The results of `reference`, on q, k and |v| too, and how far rounding of weights may move the result."""

    out: Array
    lse: Array
    mean_size: Array  # the result on |v|, which sums by tensor cores may be off by a part of
    rounding: Array


def exact(queries: str, numbers: Sequence[Array], *edges: Array, **options: Any) -> Exact:
    """Attention on the numbers of q, k and v for queries of a dtype; with `edges` they are packed.

    What moves weights moves a result by as much of the mean of |v|.
    """
    q, k, v = numbers
    attention = reference.attention_varlen if edges else reference.attention
    out, lse = attention(q, k, v, *edges, **options)
    mean = attention(q, k, np.abs(v), *edges, **options)[0]
    least = LEAST_ROUNDING[queries] * k.shape[0 if edges else 1] * float(np.abs(v).max(initial=0))
    return Exact(out, lse, mean, WEIGHT_ROUNDING[queries] * mean + least)


class Drawn(NamedTuple):
    """A problem on the host: arguments of `attention`, and the same in numbers for the reference."""

    name: str
    queries: str
    arrays: list[Array]
    options: dict[str, Any]
    numbers: list[Array]
    numbers_options: dict[str, Any]


def _options(rng: np.random.Generator, batch: int, heads: int, seqlens: tuple[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "causal": True,
        "window": (int(rng.integers(1, 200)), int(rng.integers(0, 50))),
        "softcap": 3.0,
        "bias": rng.standard_normal((1, heads, *seqlens), np.float32),
        "mask": rng.random((batch, 1, *seqlens)) < 0.8,
        "alibi_slopes": (2.0 ** -rng.uniform(1, 8, heads)).astype(np.float32),
        "sink": rng.standard_normal(heads, np.float32),
        "kv_lengths": rng.integers(0, seqlens[1] + 1, batch).astype(np.int32),
        "dropout_p": 0.2,
    }
    names = [name for name in found if rng.random() < 0.2]
    chosen = {name: found[name] for name in names}
    return chosen | ({"dropout_seed": 7} if "dropout_p" in chosen else {})


def _into_pages(rng: np.random.Generator, arrays: list[Array], page_size: int) -> tuple[list[Array], Array]:
    """Arrays (batch, seqlen, ...) as pools whose pages are in no order, and the table; unused places are 0."""
    batch, seqlen = arrays[0].shape[:2]
    pages = -(-seqlen // page_size)
    table = rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    pools = []
    for x in arrays:
        padded = np.zeros((batch, pages * page_size, *x.shape[2:]), x.dtype)
        padded[:, :seqlen] = x
        pool = np.empty((batch * pages, page_size, *x.shape[2:]), x.dtype)
        pool[table.reshape(-1)] = padded.reshape(pool.shape)
        pools.append(pool)
    return pools, table


def draw(seed: int) -> Drawn:
    """One problem: sizes in log scale, any options together, arrays of their own or pages."""
    rng = np.random.default_rng(seed)
    queries = QUERIES[seed % len(QUERIES)]
    batch, heads_kv, group = (int(rng.integers(1, n)) for n in (4, 3, 5))
    seqlen_q = 1 if rng.random() < 0.3 else int(2 ** rng.uniform(1, 8))
    seqlen_k = int(2 ** rng.uniform(3, 10))
    head_dim = int(rng.choice(HEAD_DIMS))
    head_dim_v = head_dim if rng.random() < 0.7 else int(rng.choice(HEAD_DIMS))
    heads = heads_kv * group
    shapes = (seqlen_q, heads, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v)
    sharpness = 3.0 if rng.random() < 0.3 else 1.0
    made = [rng.standard_normal((batch, *shape), np.float32) for shape in shapes]
    made[0] *= sharpness
    per = "token" if rng.random() < 0.7 else str(rng.choice(["head", "tensor"]))
    quantized = [cuflash.quantize_fp8(x, per) for x in made]
    options = _options(rng, batch, heads, (seqlen_q, seqlen_k))
    numbers = [numbers_of(codes, np.broadcast_to(scale, codes.shape[:-1])) for codes, scale in quantized]
    arrays = [codes for codes, _ in quantized]
    scales = {f"{name}_scale": scale for name, (_, scale) in zip("qkv", quantized, strict=True)}
    if queries != CODES:
        arrays[0] = made[0].astype(dtype_of(queries))
        numbers[0] = arrays[0].astype(np.float64)
        del scales["q_scale"]
    given = options | scales | {"out_dtype": RESULTS[seed // len(QUERIES) % len(RESULTS)]}
    paged = per == "token" and not {"bias", "mask"} & set(options) and rng.random() < 0.5
    if paged:
        lengths = options.setdefault("kv_lengths", np.full(batch, seqlen_k, np.int32))
        of_keys: list[np.ndarray] = [*arrays[1:], scales["k_scale"], scales["v_scale"]]
        (*pools, k_scale, v_scale), table = _into_pages(rng, of_keys, int(rng.choice(PAGE_SIZES)))
        arrays[1:] = pools
        given |= {"k_scale": k_scale, "v_scale": v_scale, "block_table": table, "kv_lengths": lengths}
    words = ", ".join([*options, f"per {per}", *(["pages"] if paged else [])])
    name = f"{seed}: {queries} {batch} x {heads}/{heads_kv} x {seqlen_q} x {seqlen_k} d{head_dim}/{head_dim_v}, {words}"
    return Drawn(name, queries, arrays, given, numbers, options)


def share_of_bound(seed: int, xp: Any) -> tuple[str, float]:
    """A problem's name, and the largest error of its result as a part of what rounding may do; inf for a NaN."""
    problem = draw(seed)
    true = exact(problem.queries, problem.numbers, **problem.numbers_options)
    on_device = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
    arrays = [xp.asarray(x) for x in problem.arrays]
    out, lse = cuflash.attention(*arrays, **on_device, return_lse=True)
    host = [x if xp is np else x.get() for x in (out, lse)]
    found, found_lse = (x.astype(np.float64) for x in host)
    eps = RESULT_ROUNDING[host[0].dtype.name]
    # Scores off by up to s move lse by up to s, and so a weight by a factor of exp(2 s) at most.
    of_scores = problem.numbers_options.get("softcap", 0.0) * TANH_ERROR
    rounding = true.rounding + np.expm1(2 * of_scores) * (true.mean_size + true.rounding)
    size = np.abs(true.out) + rounding
    most = rounding + eps * size + SUMS_ROUNDING * true.mean_size + np.finfo(np.float16).smallest_subnormal
    with np.errstate(invalid="ignore"):
        of_lse = np.where(found_lse == true.lse, 0, np.abs(found_lse - true.lse)) / (LSE_ERROR + of_scores)
        share = max(float(np.max(np.abs(found - true.out) / most)), float(np.max(of_lse)))
    return problem.name, share if np.isfinite(share) else np.inf


def shares(seeds: Sequence[int], xp: Any) -> Iterator[tuple[str, float]]:
    """`share_of_bound` of each seed, several at once; the first alone, as two threads cannot load NVRTC at once."""
    yield from (share_of_bound(seed, xp) for seed in seeds[:1])
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(lambda seed: share_of_bound(seed, xp), seeds[1:])
