"""A user's program inside autodiff libraries that carry types or take NumPy's arrays, which type checkers read."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinc.model import Model
from thinc.types import Floats3d, Floats4d, Ints1d
from typing_extensions import assert_type

from cuflash.adapters import autograd, thinc

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Rows: TypeAlias = "Floats3d | Floats4d"  # or pages
Packed: TypeAlias = "tuple[Floats3d, Rows, Rows, Ints1d, Ints1d | None]"


def with_autograd(q: Floats, half: Halves, cu_seqlens: NDArray[np.int32]) -> None:
    assert_type(autograd.attention(q, q, q, causal=True), Floats)
    assert_type(autograd.attention(q, q, q, return_lse=True), tuple[Floats, Floats])
    assert_type(autograd.attention(half, half, half, return_lse=True), tuple[Halves, Floats])
    assert_type(autograd.attention_varlen(q, q, q, cu_seqlens, cu_seqlens), Floats)
    assert_type(autograd.attention_varlen(half, half, half, cu_seqlens, None, return_lse=True), tuple[Halves, Floats])


def with_thinc(q: Floats4d) -> None:
    layer = thinc.attention(causal=True)
    assert_type(layer, Model[tuple[Floats4d, Floats4d, Floats4d], Floats4d])
    out, backprop = layer.begin_update((q, q, q))
    assert_type(out, Floats4d)
    dq, *_ = backprop(out)
    assert_type(dq, Floats4d)
    (out, lse), _ = thinc.attention(return_lse=True).begin_update((q, q, q))
    assert_type(lse, Floats3d)
    assert_type(thinc.attention_varlen(), Model[Packed, Floats3d])
