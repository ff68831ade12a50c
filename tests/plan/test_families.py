"""`info --arch` names the family of kernels that a call launches on that architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import forget_launches
from spilling import Nothing

import cuflash
from cuflash import hardware
from cuflash.gpu import launch
from cuflash.problem.attention_problem import DTYPES, AttentionProblem
from cuflash.tools import candidates
from cuflash.tools.families import on_gpu

ARCHITECTURES = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_90a": (9, 0), "sm_120": (12, 0)}
SEQLEN = 128
# Options as a call and as a problem have them.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"window_right": 0}),
    "softcap": ({"softcap": 1.0, "causal": True}, {"softcap": 1.0, "window_right": 0}),
    "deterministic": ({"deterministic": True}, {"deterministic": True}),
    "tf32": ({"precision": "tf32"}, {"precision": "tf32"}),
}
# The words begin with the first, and the kernels' names with the others.
FAMILIES = {
    "wgmma": ("forward_sm90", "backward_sm90", "wide_backward_sm90", "split_forward", "split_dq"),
    "mma.sync": ("forward_sm80", "backward_sm80", "parts_forward", "parts_dq", "wide_forward", "wide_dq"),
    "portable": ("forward", "backward_dq"),
}


class NothingRuns(CpuDevice):
    """A GPU whose kernels are chosen and not compiled."""

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        return Nothing()


def launched(capability: tuple[int, int], arrays: Any, options: dict[str, Any]) -> dict[str, set[str]]:
    """Return the kernels of both passes."""
    found = {}
    forget_launches()
    num_sms = hardware.num_sms("sm_{}{}".format(*capability))
    with hook.kernels_on(NothingRuns(capability, num_sms=num_sms)):
        out, backward = cuflash.attention_vjp(*arrays, **options)
        found["forward"] = {x.kernel.entry for x in launch._launches.values()}
        launch._launches.clear()
        backward(out)
        found["backward"] = {x.kernel.entry for x in launch._launches.values()}
    forget_launches()
    return found


def family_of(entries: set[str]) -> str:
    """Return the family that has one of these kernels."""
    exact = {name for name in FAMILIES["portable"] if name in entries}
    found = {family for family, starts in FAMILIES.items() for x in entries - exact if x.startswith(starts)}
    found -= {"portable"}
    return found.pop() if found else "portable"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 256), (256, 256), (512, 64), (64, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_family_that_is_named_is_launched(dtype: str, dims: tuple[int, int], name: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    options, of_problem = OPTIONS[name]
    problem = AttentionProblem(1, SEQLEN, SEQLEN, 1, 1, *dims, dtype, softmax_scale=dims[0] ** -0.5)
    problem = replace(problem, **(of_problem if dtype == "float32" or name != "tf32" else {}))
    q, k, v = (np.zeros((1, SEQLEN + 1, 1, dim + 8), dtype) for dim in (dims[0], dims[0], dims[1]))
    for aligned in (True, False):
        first = 0 if aligned else 1
        arrays = [x[:, :SEQLEN, :, first : first + dim] for x, dim in zip((q, k, v), (dims[0], *dims), strict=True)]
        for arch, capability in ARCHITECTURES.items():
            gpu = candidates.gpu_of(arch, aligned)
            words = on_gpu(problem, gpu, candidates.candidates_of(problem, gpu))
            entries = launched(capability, arrays, options)
            for direction in ("forward", "backward"):
                expected = family_of(entries[direction])
                assert words[f"{direction} on {arch}"].startswith(expected), (arch, aligned, direction, entries)
