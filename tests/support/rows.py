"""Each row of the tables of kernels has a problem, by which whatever the tables hold is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any
from unittest import mock

import devices
import numpy as np
from cases import Case, accum_dtype, gaussian, gaussian_case, np_dtype
from devices import Device
from paging import as_paged

from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.plan.config import FLAGS, KernelConfig, without_window
from cuflash.plan.listing import families as listing
from cuflash.plan.portable.tiles import OPERAND_ENTRIES
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import splits as sm80_splits
from cuflash.plan.sm80 import tiles as sm80_tiles
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import query_splits as sm90_query_splits
from cuflash.plan.sm90 import tiles as sm90_tiles
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig
from cuflash.plan.sm90.config import Sm90ForwardConfig

HOST = Device("numpy", np)
NUM_SMS = 3  # multiprocessors that a device is given, as the problems of rows are small
LENGTHS = (70, 152)  # rows of a bias that TMA can bring
# A row does not tell these apart, as the tiles are the same, and tests of their own go through the options.
_OF_OPTIONS = {*FLAGS, "element", "bias_element", "smem_bytes", "plain_scores", "hides_queries", "rules"}
_TOLD_APART = (
    "splits_keys",
    "deterministic",
    "has_bias_tiles",
    "has_mask_tiles",
    "has_mask_vectors",
    "packs_heads",
    "has_pages",
    "copies_rows",
    "has_work_list",
    "writes_dbias",
    "writes_dq",
    "splits_queries",
    "aligned",
    "computes_dk",
    "all_keys",
    "splits_warps",
)
_OF_BIAS = (sm80_backward.BIAS, "wide_bias", "parts_bias", "backward_bias")
_ANY_HEAD_DIM = 32  # where a kernel does not depend on it
SLICED_HEAD_DIM = 536  # results are computed in slices, and v is too wide for a forward pass by halves

Table = Iterator[tuple[Any, str]]
Kernels = list[tuple[Any, str]]


def identity(config: KernelConfig) -> tuple[Any, ...]:
    return tuple((name, x) for name, x in asdict(config).items() if name not in _OF_OPTIONS)


def rows_of(*tables: Table) -> Iterator[Kernels]:
    """Yield each row's configurations, with their dtypes, from the fewest options to the most."""
    found: dict[tuple[Any, ...], Kernels] = {}
    for config, dtype in (pair for table in tables for pair in table):
        found.setdefault(identity(config), []).append((config, dtype))
    for row in found.values():
        yield sorted(row, key=lambda kernel: len(kernel[0].flags))


def options_of(config: KernelConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield what tells a kernel's records apart besides the sizes of their tiles."""
    of: dict[str, Any] = asdict(config)
    yield config.entry, "head dims and parts", (config.head_dim, config.head_dim_v, of.get("parts"))
    yield from ((config.entry, name, x) for name, x in of.items() if isinstance(x, bool | str))


def name_of(arch: str, config: KernelConfig) -> str:
    of: dict[str, Any] = asdict(config)
    further = [name for name, x in of.items() if name in _TOLD_APART and x]
    further += [f"{name}_{of[name]}" for name in ("cluster_keys", "cluster_queries") if of.get(name, 1) > 1]
    words = [config.entry, config.head_dim, config.head_dim_v, config.tile, config.flags, *further]
    return f"{arch}-{'-'.join(map(str, words))}"


class Tf32Case(Case):
    """A float32 problem with TF32's error allowed, whose 11 bits are float16's."""

    def _coarser(self, x: Any) -> np.dtype[Any]:
        return np.dtype(np.float16)

    @property
    def _naive(self) -> dict[str, Any]:
        return {"round_to": "float16"}


def lengths_of(config: Sm90ForwardConfig, dtype: str) -> tuple[int, int]:
    """Return lengths for which Hopper's forward pass takes the row."""
    queries, keys = LENGTHS
    many = sm90_forward.MANY_KEYS
    if config.splits_keys:
        return queries, 4 * config.block_n + 10
    if takes_narrow_window(config, dtype):
        return queries, many
    lengths = LENGTHS, (queries, many), (sm90_forward._FEW_QUERIES, keys)
    return next((own for own in lengths if _tile(config) == _tile(_of_lengths(config, dtype, own))), LENGTHS)


def _of_lengths(config: Sm90ForwardConfig, dtype: str, lengths: tuple[int, int], **window: Any) -> Sm90ForwardConfig:
    flags = [flag for flag in FLAGS if getattr(config, flag)]
    problem = listing.problem_of(dtype, config.head_dim, config.head_dim_v, flags)
    problem = replace(problem, seqlen_q=lengths[0], seqlen_k=lengths[1], **window)
    return sm90_forward.config_for(problem, config.has_bias_tiles, config.has_mask_tiles)


def _tile(config: Sm90ForwardConfig) -> tuple[Any, ...]:
    """Return the fields that a tile of Hopper's table has, but for those that the numbers of queries tell."""
    names = {f.name for f in fields(sm90_tiles.Sm90Tile)} - {"pair"}
    return *(x for name, x in asdict(config).items() if name in names), config.follows_every_maximum, config.teams


def takes_narrow_window(config: Sm90ForwardConfig, dtype: str) -> bool:
    if config.flags != "window":
        return False
    lengths = LENGTHS[0], sm90_forward.MANY_KEYS
    wide, narrow = (_of_lengths(config, dtype, lengths, window_left=left) for left in (None, 100))
    return _tile(config) == _tile(narrow) != _tile(wide)


def is_for_long_walks(config: KernelConfig) -> bool:
    """Return True if a tile of keys that visits fewer queries takes another row."""
    short = [asdict(x.tile) for x in sm80_tiles.BACKWARD if x.head_dim == config.head_dim and x.tile.short]
    of: dict[str, Any] = asdict(config)
    return bool(short) and not any(all(of.get(name, x) == x for name, x in tile.items()) for tile in short)


def scored_by_head(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Compute a rule whose derivative depends on the score."""
    return s + table[h] * s * s - 0.03125 * abs(i - j)


def case_of(config: KernelConfig, dtype: str) -> Case:
    """Make a problem that takes the row."""
    rng = np.random.default_rng(0)
    of: dict[str, Any] = asdict(config)
    queries, keys = LENGTHS
    if isinstance(config, Sm90ForwardConfig):
        queries, keys = lengths_of(config, dtype)
    elif of.get("all_keys"):
        queries, keys = config.block_m * of["cluster_queries"] + 5, config.block_n * of["cluster_keys"] - 3
    elif config.entry == sm80_backward.MAIN and is_for_long_walks(config):
        queries = sm80_backward._SHORT + queries
    if of.get("writes_dq"):
        keys = of["block_n"] * of["pair"] - 3
    if of.get("has_mask_vectors") or of.get("has_mask_tiles"):
        keys = -(-keys // 16) * 16
    scores = (1, 2, queries, keys) if of.get("writes_dbias") else (queries, keys)
    options: dict[str, dict[str, Any]] = {
        "has_window": {"causal": True},
        "has_softcap": {"softcap": 2.0},
        "has_bias": {"bias": gaussian(rng, scores, "float32" if config.bias_element == "float" else dtype)},
        "has_mask": {"mask": rng.random(scores) < 0.7},
        "has_alibi": {"alibi_slopes": np.array([0.1, 0.5], accum_dtype(np_dtype(dtype)))},
        "has_dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "has_block_mask": {"block_mask": rng.random(scores) < 0.7},
        "has_score_mod": {"score_mod": scored_by_head, "operands": (np.array([0.5, -0.25], np.float32),)},
        "has_mask_mod": {"mask_mod": lambda b, h, i, j, *operands: (7 * i + 3 * j + h) % 5 != 0},
    }
    chosen = {name: x for flag in FLAGS if of[flag] for name, x in options[flag].items()}
    if isinstance(config, Sm90ForwardConfig | Sm90BackwardConfig) and config.has_bias > config.has_bias_tiles:
        chosen["bias"] = chosen["bias"][:, :1].copy()  # a column, which TMA does not bring
    if isinstance(config, Sm90ForwardConfig) and takes_narrow_window(config, dtype):
        chosen = {"window": (100, 0)}
    if of.get("parts") == 1:
        chosen["precision"] = "tf32"
    in_order = sm90_backward_tiles.NARROW, sm90_backward_tiles.WIDE, sm80_backward.MAIN
    if config.entry == sm80_backward.ORDERED_DQ:
        chosen |= {"deterministic": True, **options["has_block_mask"]}
    elif of.get("deterministic") and config.entry in in_order:
        chosen["deterministic"] = True
    if config.entry in OPERAND_ENTRIES:
        chosen["deterministic"] = config.entry != OPERAND_ENTRIES[0]
    heads = 2, 1
    if isinstance(config, Sm90ForwardConfig) and config.block_m == sm90_forward._FEW_QUERIES:
        heads = (2, 1) if config.packs_heads else (2, 2)  # tiles of few queries have the heads of a group
    dims = config.head_dim or config.head_dim_v or _ANY_HEAD_DIM, config.head_dim_v or config.head_dim or _ANY_HEAD_DIM
    if of.get("slice_columns"):
        dims = SLICED_HEAD_DIM, SLICED_HEAD_DIM
    case = gaussian_case(0, dtype, (queries, keys), heads, dims, 1, **chosen)
    if of.get("has_work_list"):  # a packed batch of one sequence
        case = case.with_inputs(**{name: getattr(case, name)[0] for name in ("q", "k", "v", "dout")})
        case.cu_seqlens = np.array([0, queries], np.int32), np.array([0, keys], np.int32)
    if of.get("has_pages"):
        case = as_paged(case, 16 if of.get("copies_rows") or of["has_block_mask"] else of["block_n"], rng)
    if isinstance(config, sm80_forward.Sm80QueryConfig):
        case.block_size = (config.block_m, 64 * config.listed)  # wide blocks are listed in twos
    elif isinstance(config, sm80_backward.Sm80BackwardConfig):
        case.block_size = (config.block_n, config.block_n)
    if "precision" in chosen:
        return Tf32Case(**vars(case))
    return case.with_inputs(q=at_odd_address(case.q)) if of.get("aligned") is False else case


def at_odd_address(x: Any) -> Any:
    buffer = np.empty(x.size + 1, x.dtype)
    shifted = buffer[1:].reshape(x.shape)
    shifted[...] = x
    return shifted


@contextmanager
def short_pairs(config: KernelConfig) -> Iterator[None]:
    """Let pairs of the forward pass take few queries, too, as those that they are for take minutes on the CPU."""
    if not (isinstance(config, Sm90ForwardConfig) and config.pair > 1):
        yield
        return
    sm90_forward.forward.cache_clear()
    with mock.patch.object(sm90_forward, "LONG_QUERIES", 1):
        yield
    sm90_forward.forward.cache_clear()


@contextmanager
def small_grid(config: KernelConfig) -> Iterator[None]:
    """Say which tile and how many splits of keys, or of queries, a problem takes, as problems are small."""
    if getattr(config, "all_keys", False):
        with mock.patch.object(sm80_backward, "all_keys", return_value=((config,),)):
            yield
        return
    if isinstance(config, Sm90BackwardConfig):
        splits = sm90_query_splits.QuerySplits(2, 2) if config.splits_queries else sm90_query_splits.WHOLE_QUERIES
        alone = mock.patch.object(sm80_backward, "all_keys", return_value=())  # keeps the kernel that runs alone away
        as_listed = mock.patch.object(gpu_sm90, "in_order", side_effect=lambda problem, configs, num_sms: configs)
        with alone, as_listed, mock.patch.object(gpu_sm90, "splits_of", return_value=splits):
            yield
        return
    if isinstance(config, sm80_forward.Sm80QueryConfig) and not config.splits_keys:
        with mock.patch.object(sm80_splits, "with_splits", side_effect=lambda problem, config, num_sms: (config, 1)):
            yield
        return
    plain = not without_window(tuple(flag for flag in FLAGS if getattr(config, flag)))
    if not (isinstance(config, Sm90ForwardConfig) and (plain or config.packs_heads or config.has_pages)):
        yield
        return
    launches = sm90_grid.Launches(replace(config, splits_keys=False), 3 if config.splits_keys else 1)
    with mock.patch.object(sm90_grid, "for_grid", return_value=launches):
        yield


def run(config: KernelConfig, dtype: str, place: Device) -> None:
    """Hold the pass that a row is for against the reference; nothing but the row must have done its part."""
    case = case_of(config, dtype)
    devices.forget_launches()
    if "forward" in config.entry:
        given: dict[str, Any] = {}
        if isinstance(config, Sm90ForwardConfig) and not (config.staging_panels or config.splits_keys):
            # TMA cannot store a result at this address.
            given["out"] = at_odd_address(np.empty(case.out_shape, case.dtype))
        with place.active(), short_pairs(config), small_grid(config):
            out, lse = case.on(place).forward(**given)
        case.assert_forward(out, lse)
    else:
        out, lse = case.on(HOST).forward()
        of_bias = config.entry in _OF_BIAS or getattr(config, "writes_dbias", False)
        with place.active(), small_grid(config):
            wanted = {
                "bias": of_bias,
                "alibi_slopes": getattr(config, "writes_dslopes", False),
                "operands": config.entry in OPERAND_ENTRIES,
            }
            further = [name for name, is_wanted in wanted.items() if is_wanted]
            grads = case.on(place).backward(out, lse, grads=("q", "k", "v", *further))
        case.assert_gradients(grads)
    launched = [x.kernel.config for x in launch._launches.values() if x.kernel.entry == config.entry]
    assert identity(config) in map(identity, launched)
    assert {x.tile for x in launched} == {config.tile}
