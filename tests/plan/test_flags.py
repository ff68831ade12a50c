"""A family leaves a problem with an option that its kernels do not know to the next one, in every choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import devices
import numpy as np
import pytest
from cases import Case, gaussian_case
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device

from cuflash import hardware
from cuflash.gpu import launch
from cuflash.plan import config as plan_config
from cuflash.plan.portable import kernels as plan_portable
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.split import kernels as plan_split
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons

MADE_UP = "has_made_up"
FAMILIES = (plan_portable, sm80_forward, sm80_backward, sm90_forward, sm90_backward, plan_split, sm80_wide)
HOST = Device("numpy", np)
NUM_SMS = 3
PLACE = True, (9, 0), hardware.smem_limit("sm_90")
# No other test has this scale, so that nothing is remembered of problems without the option.
SCALE = 0.2468


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add an option that problems with the scale of these tests have, and no family knows."""
    forget()
    monkeypatch.setitem(plan_config.WANTED, MADE_UP, lambda problem: problem.softmax_scale == SCALE)
    yield
    forget()


def forget() -> None:
    devices.forget_launches()
    for module in FAMILIES:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def problem_of(dtype: str, **options: Any) -> AttentionProblem:
    return AttentionProblem(1, 64, 64, 2, 2, 64, 64, dtype, softmax_scale=SCALE, **options)


def layouts_of(problem: AttentionProblem, count: int) -> Any:
    shape = problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim
    return (((2 * 64 * 64 * 2, 2 * 64 * 2, 64 * 2, 2), shape),) * count


# Every choice of a kernel for a problem stands here, with the family that declares the flag.
CHOICES: dict[str, tuple[ModuleType, str, Callable[[AttentionProblem], Any]]] = {
    "sm90 forward": (sm90_forward, "float16", lambda p: sm90_forward.forward(p, layouts_of(p, 3))),
    "sm90 backward": (sm90_backward, "float16", lambda p: sm90_backward.backward(p, layouts_of(p, 5))),
    "split forward": (plan_split, "float32", plan_split.forward),
    "split forward by halves": (plan_split, "float32", lambda p: plan_split.forward(plan_config.of_half(p))),
    "split backward": (plan_split, "float32", plan_split.backward),
    "sm80 forward": (sm80_forward, "float16", lambda p: sm80_forward.forward(p, *PLACE)),
    "sm80 backward": (sm80_backward, "float16", lambda p: sm80_backward.backward(p, *PLACE)),
    "sm80 dq, slopes": (sm80_backward, "float16", lambda p: sm80_backward.of_queries(p, *PLACE)),
    "sm80 dbias": (sm80_backward, "float16", lambda p: sm80_backward.of_bias(p, *PLACE)),
    "parts forward": (sm80_wide, "float32", lambda p: sm80_wide.forward(p, *PLACE)),
    "parts backward": (sm80_wide, "float32", lambda p: sm80_wide.backward(p, *PLACE)),
    "wide forward": (sm80_wide, "float64", lambda p: sm80_wide.forward(p, *PLACE)),
    "wide backward": (sm80_wide, "float64", lambda p: sm80_wide.backward(p, *PLACE)),
    "wide dbias": (sm80_wide, "float64", lambda p: sm80_backward.of_bias(p, *PLACE)),
}


@pytest.mark.parametrize(("family", "dtype", "choose"), CHOICES.values(), ids=CHOICES)
def test_only_a_family_that_declares_an_option_takes_it(
    family: ModuleType, dtype: str, choose: Callable[[AttentionProblem], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(dtype)
    assert not choose(problem)
    forget()
    for other in FAMILIES:
        if other is not family:
            monkeypatch.setattr(other, "HANDLES", (*other.HANDLES, MADE_UP))
    assert not choose(problem)
    forget()
    monkeypatch.setattr(family, "HANDLES", (*family.HANDLES, MADE_UP))
    assert choose(problem)


@pytest.mark.parametrize(("family", "dtype", "choose"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("head_dims", [(257, 64), (64, 520), (1024, 1024)], ids=str)
def test_portable_kernels_alone_take_wide_heads(
    head_dims: tuple[int, int], family: ModuleType, dtype: str, choose: Callable[[AttentionProblem], Any]
) -> None:
    head_dim, head_dim_v = head_dims
    problem = replace(problem_of(dtype), head_dim=head_dim, head_dim_v=head_dim_v, softmax_scale=1.0)
    assert not choose(problem)
    assert choose(replace(problem, head_dim=64, head_dim_v=64))


PORTABLE_ENTRIES = ("forward", "backward_dq", "backward_dkv", "backward_dk", "backward_dv", "backward_bias", "delta")


@pytest.mark.parametrize("entry", PORTABLE_ENTRIES[:-1])
def test_the_portable_kernels_say_what_they_do_not_know(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("float64", bias=(1, 1, 1, 1), bias_dtype="float64")
    with pytest.raises(NotImplementedError, match="made_up"):
        plan_portable.plan(problem, entry)
    monkeypatch.setattr(plan_portable, "HANDLES", (*plan_portable.HANDLES, MADE_UP))
    assert plan_portable.plan(problem, entry)


def test_every_flag_is_wanted_by_some_problem_and_known_to_all() -> None:
    assert tuple(plan_config.WANTED) == (*plan_config.FLAGS, MADE_UP)
    assert set(plan_config.KNOWN_TO_ALL) <= set(plan_config.FLAGS)
    for family in FAMILIES:
        assert set(family.HANDLES) <= set(plan_config.FLAGS)


def test_heads_are_rows_of_a_tile_only_beside_options_that_know_such_rows() -> None:
    problem = AttentionProblem(1, 1, 64, 4, 2, 64, 64, "float16", softcap=2.0, sink=True, alibi=(1, 4))
    assert sm90_forward.packs_heads(problem)
    assert not sm90_forward.packs_heads(replace(problem, softmax_scale=SCALE))


def test_info_names_the_option_and_wide_heads() -> None:
    for dtype, sentences in (
        ("float16", (reasons.forward_sm90, reasons.backward_sm90, reasons.forward_sm80, reasons.backward_sm80)),
        ("float32", (reasons.forward_sm80, reasons.backward_sm80)),
    ):
        for reason in sentences:
            assert "wgmma and TMA" not in reason(problem_of(dtype)) and "tiles of" not in reason(problem_of(dtype))
    assert "made_up" in reasons.forward_sm90(problem_of("float16"))
    wide = AttentionProblem(1, 64, 64, 2, 2, 576, 512, "float16")
    for reason in (reasons.forward_sm90, reasons.backward_sm90, reasons.forward_sm80, reasons.backward_sm80):
        assert "head dims above 256" in reason(wide)
    assert "half of v's columns" in reasons.forward_sm80(replace(wide, head_dim=64))


needs_compiler = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)


def launched(case: Case) -> set[str]:
    """Return the kernels of both passes on the CPU device as a Hopper GPU, whose results must be right."""
    with hook.kernels_on(CpuDevice((9, 0), NUM_SMS)):
        out, lse = case.on(HOST).forward()
        case.assert_forward(out, lse)
        case.assert_gradients(case.on(HOST).backward(out, lse))
    return {x.kernel.entry for x in launch._launches.values()}


def case_of(dtype: str) -> Case:
    """Make a case with gradients of a bias, of slopes and of a sink."""
    rng = np.random.default_rng(0)
    accum = np.float64 if dtype == "float64" else np.float32
    options = {
        "bias": rng.standard_normal((2, 1, 72)).astype(dtype),
        "alibi_slopes": np.array([0.5, 0.25], accum),
        "sink": np.zeros(2, accum),
    }
    return gaussian_case(0, dtype, (40, 72), (2, 2), (64, 64), 1, softmax_scale=SCALE, **options)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_portable_kernels_compute_what_no_other_family_knows(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_portable, "HANDLES", (*plan_portable.HANDLES, MADE_UP))
    entries = launched(case_of(dtype))
    assert {"forward", "backward_dq", "backward_dkv", "backward_bias", "delta"} <= entries
    assert {entry for entry in entries if not entry.startswith("reduce_")} <= set(PORTABLE_ENTRIES)


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype", "expected"),
    [
        (sm90_forward, "float16", {"forward_sm90"}),
        (sm90_backward, "float16", {"backward_sm90"}),
        (sm80_forward, "float16", {"forward_sm80"}),
        (sm80_backward, "float16", {"backward_sm80", "bias_sm80"}),
        (plan_split, "float32", {"split_forward", "split_dq"}),
        (sm80_wide, "float32", {"parts_forward", "parts_dq", "parts_bias"}),
        (sm80_wide, "float64", {"wide_forward", "wide_dq", "wide_bias"}),
    ],
)
def test_a_family_that_knows_an_option_computes_it_beside_portable_kernels(
    family: ModuleType, dtype: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan_portable, family):
        monkeypatch.setattr(module, "HANDLES", (*module.HANDLES, MADE_UP))
    entries = launched(case_of(dtype))
    assert expected <= entries
    for entry in entries - set(PORTABLE_ENTRIES):
        assert entry.startswith("reduce_") or family_of(entry) in (family, None), entry


def family_of(entry: str) -> ModuleType | None:
    """Return the family that chooses a kernel; None for kernels that know no options."""
    prefixes = {
        "forward_sm90": sm90_forward,
        "backward_sm90": sm90_backward,
        "forward_sm80": sm80_forward,
        "backward_sm80": sm80_backward,
        "ordered_dq": sm80_backward,
        "bias_sm80": sm80_backward,
        "split_rows": None,
        "split_channels": None,
        "split": plan_split,
        "parts": sm80_wide,
        "wide": sm80_wide,
    }
    return next(family for prefix, family in prefixes.items() if entry.startswith(prefix))


@needs_compiler
def test_an_option_that_no_family_knows_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="forward: no kernel takes these inputs with made_up"):
        launched(case_of("float16"))
