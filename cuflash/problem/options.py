"""The keyword arguments that every public function shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np

from cuflash import hints
from cuflash.problem.attention_problem import Array
from cuflash.problem.mask_metadata import MaskMetadata
from cuflash.typing import AnyArray


@dataclass(slots=True)
class Options:
    """The keyword arguments that every public function shares; docs/semantics.md says what each means."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    bias: Array | None = None
    mask: Array | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Array | None = None
    block_mask: MaskMetadata | None = None
    deterministic: bool | None = None
    precision: str | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    operands: Sequence[Array] = ()
    block_table: Array | None = None
    num_splits: int | None = None
    split_size: int | None = None
    q_scale: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    out_dtype: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.dropout_seed, np.integer):  # it has a shape, as arrays have, but is none
            self.dropout_seed = int(self.dropout_seed)


OPTION_NAMES = tuple(f.name for f in fields(Options))


def check_names(keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that is no option."""
    unknown = keywords.keys() - set(OPTION_NAMES)
    if unknown:
        raise hints.unknown_keyword(min(unknown), hints.OPTIONS, OPTION_NAMES)


class OptionKeywords(TypedDict, total=False):
    """`Options` as keyword arguments, for type checkers."""

    causal: bool
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float | None
    bias: AnyArray | None
    mask: AnyArray | None
    alibi_slopes: AnyArray | None
    sink: AnyArray | None
    q_lengths: AnyArray | None
    kv_lengths: AnyArray | None
    dropout_p: float
    dropout_seed: int | AnyArray | None
    block_mask: MaskMetadata | None
    deterministic: bool | None
    precision: str | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    operands: Sequence[AnyArray]
    block_table: AnyArray | None
    num_splits: int | None
    split_size: int | None
    q_scale: AnyArray | None
    k_scale: AnyArray | None
    v_scale: AnyArray | None
    out_dtype: Any
