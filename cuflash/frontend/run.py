"""The three forms of a call: forward, gradients from its results, and both as a function and its derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuflash import hints
from cuflash.frontend import on_host
from cuflash.frontend.call import Backward, Call, Gradients, gradient_function
from cuflash.frontend.metadata import metadata_of, repeated
from cuflash.problem.attention_problem import Array
from cuflash.problem.checks import check_bool
from cuflash.problem.fp8 import refuse_gradients
from cuflash.problem.options import Options

Inputs = tuple[Array, ...]  # q, k, v, and of packed sequences cu_seqlens_q and cu_seqlens_k


def _call(inputs: Inputs, options: Mapping[str, Any]) -> Call:
    q, k, v, *cu_seqlens = inputs
    return Call(q, k, v, options, (cu_seqlens[0], cu_seqlens[1]) if cu_seqlens else None)


def forward(inputs: Inputs, options: Mapping[str, Any], out: Array | None, return_lse: bool) -> Any:
    """Return out, or (out, lse)."""
    return_lse = check_bool("return_lse", return_lse)
    key = on_host.key_of(inputs, options) if out is None and len(inputs) == 3 else None
    if key is not None:
        return _forward_on_host(key, inputs, options, return_lse)
    metadata = metadata_of("forward, lse" if return_lse else "forward", inputs, options, (out,))
    results = repeated(metadata)
    if results is not None:
        return tuple(results) if return_lse else results[0]
    call = _call(inputs, options)
    result, lse = call.forward(out, return_lse, metadata)
    return result if lse is None else (result, call.release(lse))


def _forward_on_host(key: on_host.Key, inputs: Inputs, options: Mapping[str, Any], return_lse: bool) -> Any:
    """Do as `forward` does with NumPy arrays, without `out`."""
    results = on_host.forward(key, inputs, options, return_lse)
    if results is None:
        call = _call(inputs, options)
        results = call.forward(None, return_lse)
        on_host.remember(key, call, inputs, options, results[0].dtype)
    return results if return_lse else results[0]


def backward_from(
    further: tuple[Array, Array, Array, Array | None],
    inputs: Inputs,
    options: Mapping[str, Any],
    out: Sequence[Array | None] | None,
    grads: Sequence[str] | None,
) -> Gradients:
    """Return the gradients of a call, from its (dout, out, lse, dlse) alone."""
    metadata = None
    if out is None or (isinstance(out, (tuple, list)) and out):
        metadata = metadata_of(f"backward, {grads!r}", (*further, *inputs), options, out or ())
    results = repeated(metadata)
    if results is not None:
        return tuple(results)
    call = _call(inputs, options)
    dout, result, lse, dlse = further
    residuals = call.adopt("out", result), call.adopt("lse", lse)
    return call.backward(call.adopt("dout", dout), *residuals, call.adopt("dlse", dlse), out, grads, metadata)


def vjp(inputs: Inputs, options: Mapping[str, Any], out: Array | None, return_lse: bool) -> tuple[Any, Backward]:
    """Return what `forward` does, and the gradient function."""
    return_lse = check_bool("return_lse", return_lse)
    metadata = metadata_of("forward, lse", inputs, options, (out,))
    if metadata is not None:  # then these are arrays, and the same forward pass may be known
        refuse_gradients(*inputs[:3])
    results = repeated(metadata)
    if results is not None:
        result, lse = results
        return ((result, lse) if return_lse else result), gradient_function(
            lambda dout, dlse, outs, grads: backward_from((dout, result, lse, dlse), inputs, options, outs, grads)
        )
    call = _call(inputs, options)
    call.refuse_gradients()
    result, lse = call.forward(out, True, metadata)
    return ((result, call.release(lse)) if return_lse else result), call.gradients_of(result, lse)


def show_options(*functions: Callable[..., Any]) -> None:
    """Let `help` and editors show every option of public functions."""
    options = [x.replace(kind=x.KEYWORD_ONLY) for x in inspect.signature(Options).parameters.values()]
    for function in functions:
        named = [x for x in hints.required_of(function) if x.kind is not x.VAR_KEYWORD]
        vars(function)["__signature__"] = inspect.Signature((*named, *options))
