"""A call as autodiff libraries know one: a list of arrays, and the form, which says what each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuflash
from cuflash.frontend.call import ARRAY_OPTIONS
from cuflash.problem.attention_problem import EXTRA_GRADS, Array, operand_name
from cuflash.problem.options import check_names
from cuflash.problem.own_rules import check_operands, is_differentiable, is_operand, label_of
from cuflash.problem.pages import check_cu_seqlens_k

# A library records no second derivative; each says so where one would follow.
NO_SECOND_DERIVATIVE = "attention has no second derivative: its gradient cannot be differentiated"
_PACKED = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Form:
    """The names of a call's arrays, in order, and the options that are no arrays."""

    names: tuple[str, ...]  # of the arrays: q, k, v, of packed calls cu_seqlens_q and cu_seqlens_k, options, operands
    constants: tuple[tuple[str, Any], ...]  # sorted by name

    @property
    def is_packed(self) -> bool:
        """The sequences are packed."""
        return _PACKED[0] in self.names

    @property
    def options(self) -> dict[str, Any]:
        """The options that are no arrays."""
        return dict(self.constants)

    def label(self, index: int) -> str:
        """The name of an array in messages."""
        return label_of(self.names[index])

    def with_options(self, **changed: Any) -> Form:
        """The form with other constants; None takes one away."""
        options = {name: x for name, x in {**self.options, **changed}.items() if x is not None}
        return replace(self, constants=tuple(sorted(options.items())))

    def arguments(self, arrays: Sequence[Array]) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Positional arguments and options of cuflash's function."""
        given = dict(zip(self.names, arrays, strict=True))
        inputs: tuple[Array, ...] = given.pop("q"), given.pop("k"), given.pop("v")
        if self.is_packed:
            inputs = (*inputs, given.pop("cu_seqlens_q"), given.pop("cu_seqlens_k", None))
        operands = tuple([given.pop(name) for name in self.names if is_operand(name)])
        return inputs, {**self.options, **given, **({"operands": operands} if operands else {})}

    def gradient_names(self, arrays: Sequence[Array]) -> tuple[str, ...]:
        """Names of the arrays that have a gradient, in the order in which cuflash gives these."""
        given = dict(zip(self.names, arrays, strict=True))
        extras = [name for name in EXTRA_GRADS if name in given]
        operands = [name for name in self.names if is_operand(name) and is_differentiable(given[name])]
        return ("q", "k", "v", *extras, *operands)

    def forward(self, arrays: Sequence[Array], out: Array | None = None) -> tuple[Array, Array]:
        """Return (out, lse)."""
        inputs, options = self.arguments(arrays)
        function: Callable[..., Any] = cuflash.attention_varlen if self.is_packed else cuflash.attention
        result: tuple[Array, Array] = function(*inputs, out=out, return_lse=True, **options)
        return result

    def backward(
        self,
        wanted: Sequence[str],
        cotangents: tuple[Array, Array | None],
        results: tuple[Array, Array],
        arrays: Sequence[Array],
        targets: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Return the gradients of the arrays `wanted`, by name; written into `targets` where these are given."""
        (q, k, v, *cu_seqlens), options = self.arguments(arrays)
        names = self.gradient_names(arrays)
        out = None if targets is None else tuple([targets.get(name) for name in names])
        dout, dlse = cotangents
        function: Callable[..., Any] = (
            cuflash.attention_varlen_backward if self.is_packed else cuflash.attention_backward
        )
        asked = tuple(dict.fromkeys("operands" if is_operand(name) else name for name in wanted))
        found = function(dout, q, k, v, *results, *cu_seqlens, dlse=dlse, grads=asked, out=out, **options)
        return {name: x for name, x in zip(names, found, strict=True) if name in wanted}


def form_of(inputs: Sequence[Array], options: Mapping[str, Any]) -> tuple[Form, list[Array]]:
    """Return the form of a call, and its arrays.

    `inputs` are q, k, v and, of packed calls, cu_seqlens_q and cu_seqlens_k.
    """
    check_names(options)
    arrays = dict(zip(("q", "k", "v", *_PACKED), inputs, strict=False))
    if "cu_seqlens_k" in arrays and arrays["cu_seqlens_k"] is None:
        check_cu_seqlens_k(None, options.get("block_table"))
        del arrays["cu_seqlens_k"]
    rest = {name: x for name, x in options.items() if x is not None}
    arrays |= {name: rest.pop(name) for name in ARRAY_OPTIONS if name in rest}
    if hasattr(rest.get("dropout_seed"), "shape"):
        arrays["dropout_seed"] = rest.pop("dropout_seed")
    arrays |= {operand_name(n): x for n, x in enumerate(check_operands(rest.pop("operands", None)))}
    if isinstance(rest.get("window"), list):
        rest["window"] = tuple(rest["window"])
    return Form(tuple(arrays), tuple(sorted(rest.items()))), list(arrays.values())
