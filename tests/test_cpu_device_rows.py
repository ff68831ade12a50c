"""Every row of the tables of tensor-core kernels runs on the CPU device, whatever rows the suite's cases take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import devices
import numpy as np
import pytest
from cases import Case, gaussian, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import SMEM_LIMITS, CpuDevice
from devices import Device

from cuflash import (
    launch,
    plan_sm80,
    plan_sm80_backward,
    plan_sm90,
    plan_sm90_backward,
    plan_split,
)
from cuflash.plan import FLAGS, KernelConfig

pytestmark = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)

HOST = Device("numpy", np)
NUM_SMS, SMS_OF_FEW_TILES = 3, 9
LENGTHS = (70, 152)  # rows of a bias that TMA can bring
# What a row does not tell apart: the tiles are the same, and tests of their own go through the options.
_OF_OPTIONS = {*FLAGS, "element", "bias_element", "smem_bytes", "plain_scores"}
_TOLD_APART = ("split", "deterministic", "has_bias_tiles", "has_mask_vectors", "writes_dbias", "aligned", "computes_dk")
# Kernels around the gradients of scores: they run with these.
_COMPANIONS = (plan_sm90_backward.ROWS, plan_sm90_backward.DQ)

Row = tuple[tuple[int, int], KernelConfig, str]


def identity(config: KernelConfig) -> tuple[Any, ...]:
    return tuple((name, x) for name, x in asdict(config).items() if name not in _OF_OPTIONS)


def rows() -> Iterator[Row]:
    """A configuration (with the GPU's capability and its dtype) of each row, that with the fewest options."""
    for capability in ((7, 5), (8, 0), (9, 0)):
        limit = SMEM_LIMITS[capability]
        tables: list[Iterator[tuple[Any, str]]]
        tables = [plan_sm80.table(capability, limit), plan_sm80_backward.table(capability, limit)]
        if capability == (9, 0):
            tables = [plan_sm90.table(), plan_sm90_backward.table(), plan_split.table()]
            tables.append(plan_split.gradient_table())
        found: dict[tuple[Any, ...], Row] = {}
        for config, dtype in (pair for table in tables for pair in table):
            known = found.get(identity(config))
            if config.entry not in _COMPANIONS and (known is None or len(config.flags) < len(known[1].flags)):
                found[identity(config)] = capability, config, dtype
        yield from found.values()


class Tf32Case(Case):
    """A float32 problem with TF32's error allowed, whose 11 bits are float16's."""

    def _coarser(self, x: Any) -> np.dtype[Any]:
        return np.dtype(np.float16)

    @property
    def _naive(self) -> dict[str, Any]:
        return {"round_to": "float16"}


def lengths_of(config: plan_sm90.Config, dtype: str) -> tuple[int, int]:
    """Lengths for which Hopper's forward pass takes the row."""
    queries, keys = LENGTHS
    if config.split:
        return plan_sm90._FEW_QUERIES, 3000  # few tiles, of keys that are worth a split
    flags = tuple(flag for flag in FLAGS if getattr(config, flag))
    if takes_narrow_window(config, dtype):
        return queries, plan_sm90._MANY_KEYS
    for lengths in (LENGTHS, (queries, plan_sm90._MANY_KEYS), (plan_sm90._FEW_QUERIES, keys)):
        many_keys, few_queries = lengths[1] > keys, lengths[0] < queries
        for row in plan_sm90.FORWARD:
            if config == plan_sm90.forward_config(
                row, dtype, None, flags, many_keys=many_keys, few_queries=few_queries
            ):
                return lengths
    return LENGTHS


def takes_narrow_window(config: plan_sm90.Config, dtype: str) -> bool:
    narrow = [row for row in plan_sm90.FORWARD if row.narrow_window]
    return config in [plan_sm90.forward_config(row, dtype, None, ("has_window",), narrow_window=True) for row in narrow]


def case_of(config: KernelConfig, dtype: str) -> Case:
    """A problem that takes the row."""
    rng = np.random.default_rng(0)
    of: dict[str, Any] = asdict(config)
    queries, keys = LENGTHS
    if isinstance(config, plan_sm90.Config):
        queries, keys = lengths_of(config, dtype)
    elif of.get("has_mask_vectors"):
        keys = -(-keys // 16) * 16
    scores = (1, 2, queries, keys) if of.get("writes_dbias") else (queries, keys)
    options: dict[str, dict[str, Any]] = {
        "has_window": {"causal": True},
        "has_softcap": {"softcap": 2.0},
        "has_bias": {"bias": gaussian(rng, scores, "float32" if config.bias_element == "float" else dtype)},
        "has_mask": {"mask": rng.random(scores) < 0.7},
        "has_alibi": {"alibi_slopes": np.array([0.1, 0.5], np.float32)},
        "has_dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "has_block_mask": {"block_mask": rng.random(scores) < 0.7},
    }
    chosen = {name: x for flag in FLAGS if of[flag] for name, x in options[flag].items()}
    if of.get("has_bias_tiles") is False and config.has_bias:
        chosen["bias"] = chosen["bias"][:, :1].copy()  # a column, which TMA does not bring
    if isinstance(config, plan_sm90.Config) and takes_narrow_window(config, dtype):
        chosen = {"window": (100, 0)}
    if of.get("parts") == 1:
        chosen["precision"] = "tf32"
    in_order = plan_sm90_backward.NARROW, plan_sm90_backward.WIDE, plan_sm80_backward.MAIN
    if config.entry == plan_sm80_backward.ORDERED_DQ:
        chosen |= {"deterministic": True, **options["has_block_mask"]}
    elif of.get("deterministic") and config.entry in in_order:
        chosen["deterministic"] = True
    case = gaussian_case(0, dtype, (queries, keys), (2, 1), (config.head_dim, config.head_dim_v), 1, **chosen)
    if "precision" in chosen:
        return Tf32Case(**vars(case))
    return case.with_inputs(q=at_odd_address(case.q)) if of.get("aligned") is False else case


def at_odd_address(x: Any) -> Any:
    buffer = np.empty(x.size + 1, x.dtype)
    shifted = buffer[1:].reshape(x.shape)
    shifted[...] = x
    return shifted


def name_of(row: Row) -> str:
    (major, minor), config, _ = row
    further = [name for name, x in asdict(config).items() if name in _TOLD_APART and x]
    words = [config.entry, config.head_dim, config.head_dim_v, config.tile, config.flags, *further]
    return f"sm_{major}{minor}-{'-'.join(map(str, words))}"


@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_row(row: Row) -> None:
    capability, config, dtype = row
    case = case_of(config, dtype)
    num_sms = SMS_OF_FEW_TILES if isinstance(config, plan_sm90.Config) and config.split else NUM_SMS
    devices.forget_launches()
    if "forward" in config.entry:
        given: dict[str, Any] = {}
        if isinstance(config, plan_sm90.Config) and not (config.staging_panels or config.split):
            # A result that TMA cannot store.
            given["out"] = at_odd_address(np.empty(case.out_shape, case.dtype))
        with hook.kernels_on(CpuDevice(capability, num_sms)):
            out, lse = case.on(HOST).forward(**given)
        case.assert_forward(out, lse)
    else:
        out, lse = case.on(HOST).forward()
        with hook.kernels_on(CpuDevice(capability, num_sms)):
            of_bias = config.entry == plan_sm80_backward.BIAS or getattr(config, "writes_dbias", False)
            grads = case.on(HOST).backward(out, lse, grads=("q", "k", "v", "bias") if of_bias else ("q", "k", "v"))
        case.assert_gradients(grads)
    assert identity(config) in {identity(x.kernel.config) for x in launch._launches.values()}
