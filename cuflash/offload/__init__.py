"""Exact attention whose keys and values lie in host memory, of which a GPU's memory holds two chunks at a time.

Chunks are copied while the ones before are computed; a share of the keys can be attended by the CPU where it lies, at
the same time. In the backward pass dk and dv leave for the host behind the computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cuflash import hints, interop
from cuflash.frontend.call import Gradients, check_outs, gradient_function
from cuflash.frontend.run import show_options
from cuflash.offload import in_place
from cuflash.offload.call import Call, prepare
from cuflash.offload.devices import device_of
from cuflash.offload.passes import backward as _backward_pass
from cuflash.offload.passes import forward as _forward_pass
from cuflash.offload.pinned import pinned_empty
from cuflash.offload.share import check_share, share_of
from cuflash.problem.checks import check_bool
from cuflash.problem.fp8 import refuse_gradients
from cuflash.problem.gradients import check_grads, check_like
from cuflash.problem.overlap import check_target
from cuflash.problem.own_rules import label_of
from cuflash.typing import ArrayT, Backward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.frontend.combine import Residuals
    from cuflash.problem.options import OptionKeywords

__all__ = ["attention", "attention_vjp", "pinned_empty"]

Array = Any


@overload
def attention(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@hints.with_hints(hints.OPTIONS)
def attention(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Compute attention over keys and values in host memory.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q : array (batch, seqlen_q, num_heads_q, head_dim)
        On a GPU, or a NumPy array.
    k, v : NumPy arrays (batch, seqlen_k, num_heads_kv, head_dim or head_dim_v)
        Any strides; in memory of `pinned_empty` a GPU reads them at the full speed of its link. They are not read any
        more when the call returns.
    share : "auto" or float
        The share of the keys, from 0 to 1, that the CPU computes while the GPU computes the others. "auto" measures it
        in the first call of a kind and keeps it for the process; with q in NumPy's memory it is 0.
    out : array, optional
        The result's memory, as of `attention`.
    return_lse : bool
        Whether to return lse, too.
    **options
        Those of `cuflash.attention`; arrays among them lie where q does. Lengths are read by the host: keys beyond
        them, or hidden by causal, a window or a whole chunk of `block_mask`, are not copied. With `block_table`, which
        the host reads too, k and v are pools of pages, of whose rows those in use are copied, for each sequence that
        uses them. `k_scale` and `v_scale` may also be NumPy arrays. With `split_size` a `share` of "auto" is 0.

    Returns
    -------
    out : array like q, with v's head_dim_v
    lse : array (batch, num_heads_q, seqlen_q)
        Only if `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `cuflash.attention`; TypeError where k or v is no NumPy array.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((1, 1, 2, 8), np.float32)  # or an array on a GPU
    >>> k = v = cuflash.offload.pinned_empty((1, 64, 2, 8), "float32")
    >>> k[...] = 1
    >>> cuflash.offload.attention(q, k, v).shape
    (1, 1, 2, 8)
    """
    return_lse = check_bool("return_lse", return_lse)
    of_cpu = check_share(share)
    if in_place.is_in_place((q, k, v), options):
        return in_place.forward((q, k, v), options, out, return_lse)
    call = prepare(q, k, v, options)
    with interop.on_stream_of(call.library, call.q):
        found, lse = _forward(call, of_cpu, out)
        result = call.library.release(found) if out is None else out
        return (result, call.library.release(lse)) if return_lse else result


@overload
def attention_vjp(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, Backward[ArrayT]]: ...
@overload
def attention_vjp(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
@overload
def attention_vjp(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], Backward[ArrayT]]: ...
@hints.with_hints(hints.OPTIONS)
def attention_vjp(
    q: ArrayT,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    *,
    share: Literal["auto"] | float = "auto",
    out: ArrayT | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward[ArrayT]]:
    """`attention` over keys in host memory, and its gradient function.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, share, out, return_lse, **options
        As of `attention` here.

    Returns
    -------
    out : array, or (out, lse) if `return_lse`
    backward : callable
        ``backward(dout, dlse=None, *, out=None, grads=None)`` returns dq of q's kind, dk and dv as NumPy arrays, then
        the gradients of the extras, as `cuflash.attention_backward` does; dk and dv given as ``out=(dq, dk, dv)`` in
        memory of `pinned_empty` are written at the full speed of the link.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` here.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 6, 2, 8), np.float32)
    >>> out, backward = cuflash.offload.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = backward(out)
    >>> dk.shape
    (1, 6, 2, 8)
    """
    return_lse = check_bool("return_lse", return_lse)
    of_cpu = check_share(share)
    if in_place.is_in_place((q, k, v), options):
        return in_place.vjp((q, k, v), options, out, return_lse)
    call = prepare(q, k, v, options)
    refuse_gradients(call.q, k, v)
    with interop.on_stream_of(call.library, call.q):
        residual, lse = _forward(call, of_cpu, out)
        result = call.library.release(residual) if out is None else out

    def compute(
        dout: Array, dlse: Array | None, outs: Sequence[Array | None] | None, grads: Sequence[str] | None
    ) -> Gradients:
        given = {"dout": dout} if dlse is None else {"dout": dout, "dlse": dlse}
        adopted = interop.adopt_all(call.library, given, reference=call.q)
        residuals = adopted["dout"], residual, lse, adopted.get("dlse")
        with interop.on_stream_of(call.library, call.q):
            return _backward(call, of_cpu, residuals, outs, grads)

    return ((result, call.library.release(lse)) if return_lse else result), gradient_function(compute)


@np.errstate(all="ignore")  # casts of the sums may overflow
def _forward(call: Call, of_cpu: float | None, out: Array | None) -> tuple[Array, Array]:
    """Return out in q's dtype, in the given memory if there is one, and lse."""
    device = device_of(call.q)
    inputs = {"q": call.q, "k": call.k, "v": call.v, **call.extras}
    target = (
        None if out is None else _target(call, "out", out, call.problem.out_shape, call.problem.result_dtype, inputs)
    )
    wide, lse = _forward_pass(call, device, share_of(call, device, of_cpu, "forward"))
    if target is None:
        return wide.astype(call.problem.result_dtype, copy=False), lse
    target[...] = wide
    return target, lse


@np.errstate(all="ignore")  # casts of the sums may overflow
def _backward(
    call: Call,
    of_cpu: float | None,
    residuals: Residuals,
    out: Sequence[Array | None] | None,
    grads: Sequence[str] | None,
) -> Gradients:
    problem, device = call.problem, device_of(call.q)
    dout, result, lse, dlse = residuals
    check_like("dout", dout, problem.out_shape, problem.result_dtype, "as the forward result")
    if dlse is not None:
        check_like("dlse", dlse, problem.lse_shape, problem.accum_dtype, "as the forward pass returns lse")
    wanted = check_grads(grads, problem)
    like = {"q": call.q, "k": call.k, "v": call.v, **call.extras}
    given = check_outs(out, tuple(like), wanted)
    inputs = {**like, "dout": dout, "out": result, "lse": lse, "dlse": dlse}
    targets: dict[str, Array] = {}
    for name, x in like.items():
        if given[name] is not None:
            grad = f"d{label_of(name)}"
            targets[name] = _target(call, f"out, {grad}", given[name], x.shape, x.dtype.name, inputs)
            inputs[grad] = targets[name]
        elif name in ("k", "v") and name in wanted:
            targets[name] = np.empty(x.shape, x.dtype)
    on_host = {name: x for name, x in targets.items() if name in ("k", "v")}
    share = share_of(call, device, of_cpu, "backward")
    found = _backward_pass(call, device, share, residuals, on_host, wanted)
    return tuple(_result(call, name, x, found, targets, given[name]) for name, x in like.items())


def _result(
    call: Call, name: str, like: Array, found: Mapping[str, Array], targets: Mapping[str, Array], given: Any
) -> Any:
    """Return a gradient as the caller gets it."""
    if name not in found:
        return given if given is not None else targets.get(name)
    grad = found[name].reshape(like.shape)
    if given is None:
        return call.library.release(grad.astype(like.dtype, copy=False))
    targets[name][...] = grad
    return given


def _target(
    call: Call, name: str, out: Any, shape: tuple[int, ...], dtype: str, inputs: Mapping[str, Array | None]
) -> Array:
    """Return the caller's memory for a result: dk and dv in NumPy's, others where q lies."""
    if name in ("out, dk", "out, dv"):
        if not isinstance(out, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, as keys and values lie in host memory, got {type(out)}")
        interop.refuse_masked(name, out)
        target: Array = out
    else:
        if call.library.name == "jax":  # CuPy would write them
            raise ValueError(f"{name}: expected None, as JAX's arrays are immutable, got an array")
        target = interop.adopt_all(call.library, {name: out}, reference=call.q)[name]
    check_like(name, target, shape, dtype, "as the result")
    check_target(name, target, dict(inputs))
    return target


show_options(attention, attention_vjp)


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)
