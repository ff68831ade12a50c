"""The problem of a call whose arrays are known by shape and dtype alone, as libraries that trace know theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.checks import check_seed
from cuflash.problem.make import make_problem
from cuflash.problem.options import Options, check_names


def described(inputs: Mapping[str, Array], keywords: Mapping[str, Any]) -> AttentionProblem:
    """Check a call and describe it.

    `inputs` are q, k, v and, of packed calls, cu_seqlens_q and cu_seqlens_k by name. Of an array only its shape and its
    dtype, one of NumPy's, are asked for.
    """
    check_names(keywords)
    options = Options(**keywords)
    problem = make_problem(dict(inputs), options)
    check_seed(options.dropout_seed, options.dropout_p)
    return problem
