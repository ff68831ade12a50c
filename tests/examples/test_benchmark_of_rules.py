"""The benchmark of users' own rules compares rules and options that mean the same."""

from __future__ import annotations

import importlib
from typing import Any

import benchmark_scripts  # whose folder of scripts can be imported from now on
import numpy as np

assert benchmark_scripts.FOLDER.is_dir()
own_rules: Any = importlib.import_module("own_rules")


def test_rules_mean_what_the_options_mean() -> None:
    for rule in own_rules.rules_of(np, 96, 80):
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((1, rule.seqlen, own_rules.HEADS, 32), np.float32) for _ in range(4)]
        own = own_rules.cuflash_calls(rule, arrays, rule.own, rule.grads)
        option = own_rules.cuflash_calls(rule, arrays, rule.option, ("q", "k", "v"))
        assert own_rules.error_between(own, option, 0) < 1e-5
        wrong = own_rules.cuflash_calls(rule, arrays, {}, ("q", "k", "v"))
        assert own_rules.error_between(own, wrong, 0) > own_rules.TOLERANCE
        i, j = np.ogrid[: rule.seqlen, : rule.seqlen]
        seen = np.ones((rule.seqlen, rule.seqlen), bool)
        if rule.mask_mod is not None:
            seen = np.broadcast_to(rule.mask_mod(0, 0, i, j, *rule.operands), seen.shape)
        assert rule.pairs == seen.sum()
        assert any(x is not None for x in own[own_rules.BACKWARD]()[3:]) == rule.wants_operands


def test_a_line_has_every_figure() -> None:
    speeds = {own_rules.OWN: 123.0, own_rules.OPTION: 456.0}
    figures = {
        **{
            "rule": "relbias",
            "head_dim": 64,
            "seqlen": 80,
            "first_call_s": {"own rule": 1.25},
            "error": {"own rule": 0},
        },
        **dict.fromkeys(own_rules.DIRECTIONS, speeds),
    }
    line = own_rules.line_of(figures)
    assert "relbias d64 n80" in line and "123 / 123" in line and "456 / 456" in line
