"""cuflash as a Thinc layer: Thinc's forward functions return a backprop callback, as `cuflash.attention_vjp` does.

Thinc's gradients are plain arrays outside any graph, so that a second derivative cannot be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

try:
    from thinc.api import Model
    from thinc.types import Floats2d, Floats3d, Floats4d, Ints1d
except ImportError as error:
    raise ImportError('cuflash.adapters.thinc needs Thinc: pip install "cuflash[thinc]"') from error

from cuflash.adapters.form import Form, form_of
from cuflash.frontend.run import show_options
from cuflash.hints import OPTIONS
from cuflash.problem.attention_problem import EXTRA_GRADS, operand_name
from cuflash.problem.checks import check_bool
from cuflash.problem.options import check_names
from cuflash.problem.own_rules import is_differentiable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

__all__ = ["attention", "attention_varlen"]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)


Array = Any  # of Model.ops: NumPy or CuPy
Arrays = tuple[Array, ...]
Padded = tuple[Floats4d, Floats4d, Floats4d]
Pool: TypeAlias = "Floats3d | Floats4d"  # packed rows, or pages
Packed: TypeAlias = "tuple[Floats3d, Pool, Pool, Ints1d, Ints1d | None]"


@overload
def attention(
    *, learned: Sequence[str] = (), return_lse: Literal[False] = False, **options: Unpack[OptionKeywords]
) -> Model[Padded, Floats4d]: ...
@overload
def attention(
    *, learned: Sequence[str] = (), return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> Model[Padded, tuple[Floats4d, Floats3d]]: ...
def attention(
    *others: Any, learned: Sequence[str] = (), return_lse: bool = False, **options: Unpack[OptionKeywords]
) -> Model[Padded, Any]:
    """A layer from ``(q, k, v)`` to the result of `cuflash.attention`.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    learned : sequence of str
        Those of the options bias, sink, alibi_slopes and operands that are parameters of the layer: ``finish_update``
        trains them from the arrays given here. Of operands the floating-point ones are, by the names "operand_0",
        "operand_1", ... Other arrays among the options are constants.
    return_lse : bool
        The layer gives (out, lse), and its backprop takes (dout, dlse).
    **options
        As of `cuflash.attention`; ``out=`` is not taken.

    Returns
    -------
    Model
        From (q, k, v), each (batch, seqlen, heads, dim), to out (batch, seqlen_q, num_heads_q, head_dim_v).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `cuflash.attention` when it runs; here TypeError for what is no option, and ValueError for a name in
        `learned` that is not among the options.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.adapters.thinc import attention
    >>> layer = attention(causal=True, sink=np.zeros(2, np.float32), learned=["sink"])
    >>> q = np.ones((1, 6, 2, 8), np.float32)
    >>> out, backprop = layer.begin_update((q, q, q))
    >>> dq, dk, dv = backprop(np.ones_like(out))
    >>> layer.get_grad("sink").shape
    (2,)
    """
    return _layer("attention", others, learned, return_lse, options)


@overload
def attention_varlen(
    *, learned: Sequence[str] = (), return_lse: Literal[False] = False, **options: Unpack[OptionKeywords]
) -> Model[Packed, Floats3d]: ...
@overload
def attention_varlen(
    *, learned: Sequence[str] = (), return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> Model[Packed, tuple[Floats3d, Floats2d]]: ...
def attention_varlen(
    *others: Any, learned: Sequence[str] = (), return_lse: bool = False, **options: Unpack[OptionKeywords]
) -> Model[Packed, Any]:
    """A layer from ``(q, k, v, cu_seqlens_q, cu_seqlens_k)`` to the result of `cuflash.attention_varlen`.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    learned, return_lse, **options
        As of `attention` here.

    Returns
    -------
    Model
        Its backprop gives (dq, dk, dv): the offsets have no gradient.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` here.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.adapters.thinc import attention_varlen
    >>> q, cu_seqlens = np.ones((6, 2, 8), np.float32), np.array([0, 2, 6], np.int32)
    >>> out, backprop = attention_varlen(causal=True).begin_update((q, q, q, cu_seqlens, cu_seqlens))
    >>> len(backprop(out))
    3
    """
    return _layer("attention_varlen", others, learned, return_lse, options)


show_options(attention, attention_varlen)

_INPUTS = {"attention": ("q", "k", "v"), "attention_varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")}


def _layer(
    name: str, others: Sequence[Any], learned: Sequence[str], return_lse: bool, options: Mapping[str, Any]
) -> Model[Any, Any]:
    inputs = _INPUTS[name]
    if others:
        raise TypeError(
            f"{name}: expected options by name alone, got {len(others)} by position; {_when_it_runs(inputs)}"
        )
    for each in options:
        if each in inputs or OPTIONS.get(each) in inputs:
            raise TypeError(f"{each}: no such option; {_when_it_runs(inputs)}")
    check_names(options)
    return_lse = check_bool("return_lse", return_lse)
    allowed = (*EXTRA_GRADS, "operands")
    if isinstance(learned, str) or not isinstance(learned, (tuple, list, set, frozenset)):
        raise TypeError(f"learned: expected a list of names out of {allowed}, got {learned!r}")
    for each in learned:
        if each not in allowed:
            raise ValueError(f"learned: expected names out of {allowed}, got {each!r}")
        if options.get(each) is None:
            raise ValueError(f"learned: {each!r} is named, but not given among the options")
    # A layer's arrays have names of their own, so that its parameters can stand in for them.
    given = dict(options)
    operands = given.pop("operands", None)
    names = [operand_name(n) for n in range(len(operands or ()))]
    arrays = dict(zip(names, operands or (), strict=True))
    params = {each: given.pop(each) for each in learned if each != "operands"}
    if "operands" in learned:
        params |= {each: x for each, x in arrays.items() if is_differentiable(x)}
    constants = {each: x for each, x in arrays.items() if each not in params}
    attrs: dict[str, Any] = {"options": given, "constants": constants, "operands": names}
    attrs |= {"num_inputs": len(inputs), "return_lse": return_lse}
    return Model(name, _forward, params=params, attrs=attrs)


def _when_it_runs(inputs: Sequence[str]) -> str:
    return f"the layer gets ({', '.join(inputs)}) as its input, when it runs"


def _form(model: Model[Arrays, Any], inputs: Arrays) -> tuple[Form, list[Array]]:
    attrs = model.attrs
    if not isinstance(inputs, (tuple, list)) or len(inputs) != attrs["num_inputs"]:
        wanted = "(q, k, v)" if attrs["num_inputs"] == 3 else "(q, k, v, cu_seqlens_q, cu_seqlens_k)"
        got = len(inputs) if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise ValueError(f"{model.name}: expected {wanted} as the layer's input, got {got}")
    params = {name: model.get_param(name) for name in model.param_names}
    options = {**attrs["options"], **{name: x for name, x in params.items() if name not in attrs["operands"]}}
    if attrs["operands"]:
        options["operands"] = tuple([{**attrs["constants"], **params}[name] for name in attrs["operands"]])
    return form_of(inputs, options)


def _forward(model: Model[Arrays, Any], inputs: Arrays, is_train: bool) -> tuple[Any, Callable[[Any], Arrays]]:
    form, arrays = _form(model, inputs)
    results = form.forward(arrays)
    return_lse = model.attrs["return_lse"]

    def backprop(gradient: Any) -> Arrays:
        cotangents = tuple(gradient) if return_lse else (gradient, None)
        wanted = ("q", "k", "v", *model.param_names)
        found = form.backward(wanted, cotangents, results, arrays)
        for name in model.param_names:
            model.inc_grad(name, found[name])
        return found["q"], found["k"], found["v"]

    return (results if return_lse else results[0]), backprop
