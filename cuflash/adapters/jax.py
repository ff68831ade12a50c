"""cuflash inside JAX: attention under ``jit``, ``grad``, ``vmap`` and ``shard_map``, on the CPU and on a GPU.

Within compiled code cuflash works in place on JAX's own buffers, on JAX's stream. Shapes, dtypes and options are
checked when a function is traced. There are first derivatives in reverse mode only; others raise an error.

``vmap`` folds its axis into the batch, so that all examples are one launch. Where that would change a result, the
examples are computed one after the other: with packed sequences, with dropout, and with a block mask of several
sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, overload

try:
    import jax
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError('cuflash.adapters.jax needs JAX: pip install "cuflash[jax]"') from error

import numpy as np
from jax import numpy as jnp

from cuflash.adapters import folding
from cuflash.adapters.form import NO_SECOND_DERIVATIVE, Form, form_of
from cuflash.frontend.describe import described
from cuflash.frontend.run import show_options
from cuflash.hints import MISSING, wrong_options_call
from cuflash.interop import dtype_of, refuse_masked
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.checks import check_bool
from cuflash.problem.fp8 import refuse_gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

__all__ = ["attention", "attention_varlen"]


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)


Buffers = Sequence[Any]  # of NumPy or CuPy
_SEED = jax.ShapeDtypeStruct((1,), np.uint64)
_ON_CPU = 1  # DLPack's number


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[False] = False, **options: Unpack[OptionKeywords]
) -> jax.Array: ...
@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[True], **options: Unpack[OptionKeywords]
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: jax.Array = MISSING,
    k: jax.Array = MISSING,
    v: jax.Array = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cuflash.attention` of JAX's arrays, which may be traced.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, return_lse, **options
        As of `cuflash.attention`. Gradients, through out and through lse, are of q, k, v, bias, sink, alibi_slopes
        and floating-point operands, of those alone that are differentiated. NumPy arrays are constants. A
        `dropout_seed` may also be a key of `jax.random`, or a uint32 array of one element or two (low word first),
        as JAX has no uint64 by default. ``out=`` is not taken.

    Returns
    -------
    out : array (batch, seqlen_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError
        As `cuflash.attention`, when the call is traced; TypeError for forward-mode derivatives (jvp,
        linearize, jacfwd, hessian), with JAX's own words where the function was traced before, as under `jit`.
    NotImplementedError
        Where the gradient itself is differentiated, and for gradients of FP8 arrays.

    Examples
    --------
    >>> import jax
    >>> from cuflash.adapters.jax import attention
    >>> q = jax.numpy.ones((1, 6, 2, 8))
    >>> jax.jit(jax.grad(lambda q: attention(q, q, q, causal=True).sum()))(q).shape
    (1, 6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING:
        raise wrong_options_call(attention, (q, k, v, *others), options)
    return _apply((q, k, v), return_lse, options)


@overload
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> jax.Array: ...
@overload
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[jax.Array, jax.Array]: ...
def attention_varlen(
    q: jax.Array = MISSING,
    k: jax.Array = MISSING,
    v: jax.Array = MISSING,
    cu_seqlens_q: jax.Array = MISSING,
    cu_seqlens_k: jax.Array | None = MISSING,
    *others: Any,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cuflash.attention_varlen` of JAX's arrays, which may be traced: `attention` for packed sequences.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse, **options
        As of `cuflash.attention_varlen`; gradients as of `attention` here.

    Returns
    -------
    out : array (total_q, num_heads_q, head_dim_v), or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` here.

    Examples
    --------
    >>> import jax
    >>> from cuflash.adapters.jax import attention_varlen
    >>> q, cu_seqlens = jax.numpy.ones((6, 2, 8)), jax.numpy.array([0, 2, 6], "int32")
    >>> jax.grad(lambda q: attention_varlen(q, q, q, cu_seqlens, cu_seqlens).sum())(q).shape
    (6, 2, 8)
    """
    if others or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING or cu_seqlens_k is MISSING:
        raise wrong_options_call(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k, *others), options)
    return _apply((q, k, v, cu_seqlens_q, cu_seqlens_k), return_lse, options)


show_options(attention, attention_varlen)


def _apply(inputs: Sequence[Any], return_lse: bool, options: Mapping[str, Any]) -> Any:
    seed = options.get("dropout_seed")
    if isinstance(seed, (np.ndarray, np.generic)) and seed.dtype == np.uint64 and seed.size == 1:
        options = {**options, "dropout_seed": int(seed.item())}  # JAX would cut it to 32 bits
    form, arrays = form_of(inputs, options)
    for name, x in (("return_lse", return_lse), *form.constants):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            raise TypeError(
                f"{name}: expected a value that is known when the function is traced, got a tracer: name its argument "
                f"in static_argnames of jax.jit, or bind it by functools.partial"
            )
    return_lse = check_bool("return_lse", return_lse)
    arrays = [_jax_array(form.label(index), x) for index, x in enumerate(arrays)]
    _problem(form, arrays)
    with _in_reverse_mode():
        out, lse = _attention(form, *arrays)
    return (out, lse) if return_lse else out


def _jax_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        if name == "dropout_seed" and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        refuse_masked(name, x)
        return jnp.asarray(x)
    raise TypeError(f"{name}: expected an array of JAX or NumPy, got {type(x).__name__}")


def _problem(form: Form, arrays: Sequence[Any]) -> AttentionProblem:
    """The checked problem of a call, by the shapes of its arrays."""
    known: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    if "dropout_seed" in form.names:
        index = form.names.index("dropout_seed")
        seed = known[index]
        if seed.dtype == np.uint32:
            if seed.size not in (1, 2):
                raise ValueError(
                    f"dropout_seed: expected one or two elements of uint32 (low word first), got shape {seed.shape}"
                )
            known[index] = _SEED
    inputs, options = form.arguments(known)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    return described({name: x for name, x in zip(names, inputs, strict=False) if x is not None}, options)


@contextlib.contextmanager
def _in_reverse_mode() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        if "forward-mode" in str(error) and "custom_vjp" in str(error):
            raise TypeError(
                "attention has no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (grad, vjp, jacrev)"
            ) from None
        raise


@jax.tree_util.register_static
class _Names(tuple[str, ...]):
    """Names among the residuals, which are no arrays."""

    __slots__ = ()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: Form, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward_call(form)(*arrays)


def _attention_fwd(form: Form, *given: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    arrays = [x.value for x in given]
    refuse_gradients(*arrays[:3])
    differentiable = form.gradient_names(arrays)
    wanted = [name for name, x in zip(form.names, given, strict=True) if x.perturbed and name in differentiable]
    results = _attention(form, *arrays)  # by its own rule again, where this pass is differentiated itself
    return results, (_Names(wanted), results, arrays)


def _attention_bwd(form: Form, residuals: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
    wanted, results, arrays = residuals
    dout, dlse = cotangents
    if _is_zero(dout):
        dout = jnp.zeros_like(results[0])
    with _in_reverse_mode():
        found = _gradients(form, wanted, dout, None if _is_zero(dlse) else dlse, *results, *arrays)
    by_name = dict(zip(wanted, found, strict=True))
    return tuple([by_name.get(name) for name in form.names])


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(form: Form, wanted: _Names, dout: jax.Array, dlse: jax.Array | None, *rest: jax.Array) -> Any:
    if dlse is None:
        return _backward_call(form, tuple(wanted), False)(dout, *rest)
    return _backward_call(form, tuple(wanted), True)(dout, dlse, *rest)


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


_gradients.defvjp(_no_second_derivative, _no_second_derivative)


# JAX compiles a call again for each new function, so that functions of one form are one.
@lru_cache(maxsize=512)
def _forward_call(form: Form) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The forward pass of a form, with its rule for `vmap`."""

    def write(context: Any, results: Any, *buffers: Any) -> None:
        out, lse, *arrays = map(_array, (*results, *buffers))
        with _on_stream_of(context, out):
            lse[...] = form.forward(_with_seed(form, arrays), out)[1]

    def compute(*arrays: jax.Array) -> Any:
        problem = _problem(form, arrays)
        out = jax.ShapeDtypeStruct(problem.out_shape, dtype_of(problem.result_dtype))
        lse = jax.ShapeDtypeStruct(problem.lse_shape, dtype_of(problem.accum_dtype))
        return buffer_callback(write, (out, lse), vmap_method="sequential")(*map(_with_codes, arrays))

    call = jax.custom_batching.custom_vmap(jax.jit(compute))

    @call.def_vmap
    def over_examples(size: int, are_stacked: Sequence[bool], *arrays: jax.Array) -> Any:
        problem = _problem(form, _of_one(are_stacked, arrays))
        if not folding.can_fold(form, problem):
            return _one_by_one(call, are_stacked, arrays), (True, True)
        folded = folding.fold(jnp, form, problem, size, are_stacked, arrays)
        if folded.sink is None:
            results = _forward_call(folded.form)(*folded.arrays)
        else:
            wide = folding.with_wide_result(folded.form, problem)
            results = folding.add_sink(folded, problem, *_forward_call(wide)(*folded.arrays))
        out, lse = map(folded.unfold, results)
        return (out.astype(dtype_of(problem.result_dtype)), lse), (True, True)

    return call


@lru_cache(maxsize=512)
def _backward_call(form: Form, wanted: tuple[str, ...], has_dlse: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The backward pass of a form, of (dout, dlse if there is one, out, lse, *arrays), with its rule for `vmap`."""

    def split(given: Sequence[Any]) -> tuple[tuple[Any, Any | None], tuple[Any, Any], list[Any]]:
        dout, dlse, (out, lse, *arrays) = given[0], given[1] if has_dlse else None, given[1 + has_dlse :]
        return (dout, dlse), (out, lse), arrays

    def write(context: Any, results: Any, *buffers: Any) -> None:
        targets = dict(zip(wanted, map(_array, results), strict=True))
        cotangents, residuals, arrays = split([_array(x) for x in buffers])
        with _on_stream_of(context, cotangents[0]):
            form.backward(wanted, cotangents, residuals, _with_seed(form, arrays), targets)

    def compute(*given: jax.Array) -> Any:
        if not wanted:
            return ()
        by_name = dict(zip(form.names, split(given)[2], strict=True))
        shapes = tuple([jax.ShapeDtypeStruct(by_name[name].shape, by_name[name].dtype) for name in wanted])
        return buffer_callback(write, shapes, vmap_method="sequential")(*given)

    call = jax.custom_batching.custom_vmap(jax.jit(compute))

    @call.def_vmap
    def over_examples(size: int, are_stacked: Sequence[bool], *given: jax.Array) -> Any:
        all_stacked = (True,) * len(wanted)
        of_one = split(_of_one(are_stacked, given))[2]
        problem = _problem(form, of_one)
        if not folding.can_fold(form, problem):
            return _one_by_one(call, are_stacked, given), all_stacked
        own = [name for name in wanted if name != "sink"]
        stacked_arrays = split(are_stacked)[2]
        arrays = split(given)[2]
        folded = folding.fold(jnp, form, problem, size, stacked_arrays, arrays, own, without_sink=True)
        num_residuals = len(given) - len(arrays)
        residuals = [
            (x if stacked else jnp.broadcast_to(x[None], (size, *x.shape))).reshape((-1, *x.shape[1 + stacked :]))
            for x, stacked in zip(given[:num_residuals], are_stacked[:num_residuals], strict=True)
        ]
        found = {}
        if own:
            grads = _backward_call(folded.form, tuple(own), has_dlse)(*residuals, *folded.arrays)
            shapes = dict(zip(form.names, [x.shape for x in of_one], strict=True))
            for name, x in zip(own, grads, strict=True):
                found[name] = folding.gradient_by_example(folded, name, x, shapes[name])
        if "sink" in wanted:
            cotangents, results, _ = split([*residuals, *arrays])
            found["sink"] = folding.gradient_of_sink(folded, cotangents, results)
        return tuple([found[name] for name in wanted]), all_stacked

    return call


def _of_one(are_stacked: Sequence[bool], arrays: Sequence[jax.Array]) -> list[Any]:
    """The shapes of one example's arrays."""
    return [
        jax.ShapeDtypeStruct(x.shape[1:] if stacked else x.shape, x.dtype)
        for x, stacked in zip(arrays, are_stacked, strict=True)
    ]


def _one_by_one(call: Callable[..., Any], are_stacked: Sequence[bool], arrays: Sequence[jax.Array]) -> Any:
    """The examples' results, computed one after the other."""

    def of_example(stacked: Sequence[jax.Array]) -> Any:
        rest = iter(stacked)
        return call(*[next(rest) if is_stacked else x for x, is_stacked in zip(arrays, are_stacked, strict=True)])

    return jax.lax.map(of_example, [x for x, is_stacked in zip(arrays, are_stacked, strict=True) if is_stacked])


def _array(buffer: Any) -> Any:
    """JAX's memory as an array of NumPy or CuPy."""
    if buffer.__dlpack_device__()[0] == _ON_CPU:
        return np.asarray(buffer)
    import cupy

    return cupy.from_dlpack(buffer)


def _on_stream_of(context: Any, array: Any) -> contextlib.AbstractContextManager[Any]:
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.ExternalStream(context.stream, array.device.id)


def _with_codes(x: jax.Array) -> jax.Array:
    """FP8 arrays as their codes, because neither NumPy nor CuPy takes them from JAX."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == jnp.float8_e4m3fn else x


def _with_seed(form: Form, arrays: Sequence[Any]) -> list[Any]:
    """The arrays with a seed of 64 bits."""
    found = list(arrays)
    if "dropout_seed" in form.names:
        index = form.names.index("dropout_seed")
        seed = found[index]
        if seed.dtype == np.uint32:
            words = seed.reshape(-1)
            found[index] = words.view(np.uint64) if words.size == 2 else words.astype(np.uint64)
    return found
