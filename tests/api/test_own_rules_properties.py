"""Drawn problems with users' own rules and every other option agree with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, gaussian
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, examples

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def bent(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, gate: Any, *_: Any) -> Any:
    return s * 0.75 + table[h, (j - i) % 5] * np.tanh(s / 4)


def shifted(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, gate: Any, *_: Any) -> Any:
    return np.where((i + j) % 2 == 0, s + table[b, j // 3], s * gate)


def hiding(s: Any, b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:
    return np.where((j + h) % 4 == 3, -np.inf, s - 0.03125 * abs(i - j))


def striped(b: Any, h: Any, i: Any, j: Any, table: Any, gate: Any, kind: Any) -> Any:
    return (i - j + h) % 3 != kind[b]


SCORE_MODS = {"none": None, "bent": bent, "shifted": shifted, "hiding": hiding}


@st.composite
def cases_with_rules(draw: st.DrawFn) -> Case:
    case = draw(cases(max_head_dim=64, max_scores=20_000))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    dtype = draw(st.sampled_from([case.dtype, np.dtype(np.float32)]))
    table = gaussian(rng, (4, 5), dtype, 0.5)
    operands = table, np.array(0.5, np.float32), rng.integers(0, 4, 3).astype(np.int16)
    return case.with_options(
        score_mod=SCORE_MODS[draw(st.sampled_from(list(SCORE_MODS)))],
        mask_mod=draw(st.sampled_from([None, striped])),
        operands=operands,
    )


@examples(150)
@given(case=cases_with_rules())
def test_rules_beside_every_option(device: Device, case: Case) -> None:
    on_device = case.on(device)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse), out, lse)
