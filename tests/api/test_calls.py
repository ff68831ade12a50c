"""Calls that do not fit a signature, and names that other libraries have, are told what is expected here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import hints

X = np.zeros((1, 3, 2, 8), np.float32)
LSE = np.zeros((1, 2, 3), np.float32)
ROWS = X[0]
CU = np.array([0, 3], np.int32)
LENGTHS = np.array([0], np.int32)
Untyped: Any = cuflash  # a type checker would refuse these calls
Cache: Any = cuflash.PagedCache
(COMM,) = cuflash.distributed.threads(1)


def step() -> Any:
    cache = Cache(1, 1, 4, 2, 8, "float32", np)
    return cache.step([cache.add()], 3)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "maximal lengths": (
        lambda: Untyped.attention_varlen(ROWS, ROWS, ROWS, CU, CU, 64, 64),
        r"^attention_varlen: expected positional arguments \(q, k, v, cu_seqlens_q, cu_seqlens_k\), and by name "
        "options, such as causal= .*, got 7 by position; no maximal lengths are needed$",
    ),
    "one cu_seqlens": (
        lambda: Untyped.attention_varlen(ROWS, ROWS, ROWS, cu_seqlens=CU),
        r"^cu_seqlens: .* calls it attention_varlen\(q, k, v, cu_seqlens_q, cu_seqlens_k, \.\.\.\)",
    ),
    "no cu_seqlens": (
        lambda: Untyped.attention_varlen(ROWS, ROWS, ROWS, CU),
        "attention_varlen: .*got no cu_seqlens_k$",
    ),
    "lengths by another name": (
        lambda: Untyped.append_kv(X, X, X.copy(), X.copy(), cache_seqlens=LENGTHS),
        "^cache_seqlens: .* calls it kv_lengths",
    ),
    "caches by another name": (
        lambda: Untyped.append_kv(X, X, key_cache=X, value_cache=X, kv_lengths=LENGTHS),
        "^key_cache: .* calls it k_cache",
    ),
    "append_kv": (
        lambda: Untyped.append_kv(X, X),
        "^append_kv: expected k, v, .*, got no k_cache, v_cache, kv_lengths$",
    ),
    "a table by place": (
        lambda: Untyped.append_kv(X, X, X, X, LENGTHS, LENGTHS),
        r"^append_kv: expected positional arguments \(k, v, k_cache, v_cache, kv_lengths\), and by name block_table",
    ),
    "query, key, value": (lambda: Untyped.attention(query=X, key=X, value=X), "^query: .* calls it q;"),
    "a number by place": (
        lambda: Untyped.attention(X, X, X, 0.0),
        r"^attention: expected positional arguments \(q, k, v\), and by name options, such as causal= .*, got 4 by",
    ),
    "a bool by place": (lambda: Untyped.attention(X, X, X, True), "and by name options"),
    "k alone is missing": (lambda: Untyped.attention(X, v=X), "^attention: expected q, k, v, got no k$"),
    "q alone is missing": (lambda: Untyped.attention_vjp(k=X, v=X), "^attention_vjp: expected q, k, v, got no q$"),
    "backward": (lambda: Untyped.attention_backward(X, X, X, X), "got no forward_out, lse$"),
    "packed backward": (
        lambda: Untyped.attention_varlen_backward(ROWS, ROWS, ROWS, ROWS, ROWS, LSE[0], CU),
        "^attention_varlen_backward: .* got no cu_seqlens_k$",
    ),
    "packed vjp": (lambda: Untyped.attention_varlen_vjp(ROWS, ROWS, ROWS, cu_seqlens_q=CU), "got no cu_seqlens_k$"),
    "offload": (lambda: Untyped.offload.attention(X, X), "^attention: expected q, k, v, got no v$"),
    "offload's vjp": (lambda: Untyped.offload.attention_vjp(X, X, X, 0.5), "got 4 by position$"),
    "ring": (lambda: Untyped.distributed.ring_attention(X, X, X), "^ring_attention: .*, got no comm$"),
    "ulysses": (lambda: Untyped.distributed.ulysses_attention_vjp(query=X, k=X, v=X, comm=COMM), "^query: .* it q"),
    "sum": (lambda: Untyped.distributed.attention_allreduce(X, X, X, COMM), "got no comm$"),
    "step.append": (lambda: step().append(0, k=X, v=X), "^Step.append: expected layer, q, k, v, got no q$"),
    "step.attend": (lambda: step().attend(0, query=X), "^query: .* calls it q;"),
    "cache": (lambda: Cache(1, 1, 4, 2, 8), "^PagedCache: expected num_layers, .*, dtype, xp, got no dtype, xp$"),
    "cache of too many": (
        lambda: Cache(1, 1, 4, 2, 8, "float32", np, 8, 1, 0, 3),
        "^PagedCache: .* got 11 by",
    ),
    "merge": (lambda: Untyped.merge([X]), "^merge: expected outs, lses, got no lses$"),
    "merge by other names": (lambda: Untyped.merge(outs=[X], lse=[LSE]), "^lse: .* did you mean lses?"),
    "quantize_fp8": (lambda: Untyped.quantize_fp8(), "^quantize_fp8: expected x, got no x$"),
    "a mask": (lambda: Untyped.BlockMask.from_function(lambda b, h, i, j: i >= j), "got no seqlen_q, seqlen_k$"),
    "twice": (lambda: Untyped.attention(X, X, X, q=X), "multiple values for argument 'q'"),
    "a graph": (lambda: Untyped.attention_vjp(X, X, X)[1](X, retain_graph=True), r"^backward\(\) got an unexpected"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_does_not_fit(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(TypeError, match=words):
        call()


def test_the_signature_of_attend_has_options() -> None:
    assert list(inspect.signature(type(step()).attend).parameters) == ["self", "layer", "q", "share", "options"]


FUNCTIONS = (
    *(f"attention{form}" for form in ("", "_vjp", "_backward", "_varlen", "_varlen_vjp", "_varlen_backward")),
    *("append_kv", "merge", "merge_backward", "quantize_fp8"),
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_show_nothing_of_it(name: str) -> None:
    parameters = inspect.signature(getattr(cuflash, name)).parameters.values()
    assert all(x.default is not hints.MISSING for x in parameters)
    assert not any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in parameters)
    with pytest.raises(TypeError, match=f"^{name}: expected "):
        getattr(cuflash, name)()


@pytest.mark.parametrize("name", hints.FUNCTIONS)
def test_functions_of_other_libraries(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; cuflash calls it .*migration.md"):
        getattr(cuflash, name)
    assert name not in dir(cuflash) and not hasattr(cuflash, name)


@pytest.mark.parametrize("name", hints.CONSTRUCTORS)
def test_constructors_of_other_libraries(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'BlockMask' has no attribute '{name}'; cuflash calls it"):
        getattr(cuflash.BlockMask, name)


def test_names_that_nobody_has() -> None:
    with pytest.raises(AttributeError, match="^module 'cuflash' has no attribute 'nonsense'$"):
        _ = Untyped.nonsense
    with pytest.raises(AttributeError, match="^type object 'BlockMask' has no attribute 'nonsense'$"):
        _ = Untyped.BlockMask.nonsense


def test_completion_shows_public_names() -> None:
    masks = {name for name in dir(cuflash.BlockMask) if not name.startswith("_")}
    assert {"from_function", "sliding_window", "density", "to_dense", "draw"} <= masks
    assert not masks & {"addresses", "arrays", "tile_lists", "tile_visible", "serial"}
    assert {"from_function", "shape", "block_size"} <= set(dir(cuflash.BlockMask.fixed(8, 2, 1)))
    for name in ("jax", "torch", "autograd", "mygrad", "thinc"):
        pytest.importorskip(name)
        assert dir(importlib.import_module(f"cuflash.adapters.{name}")) == ["attention", "attention_varlen"]


def test_what_steps_and_ranks_show() -> None:
    assert repr(step()) == "Step(num_sequences=1, counts=3, max_pages_per_sequence=1)"
    cache = Cache(1, 4, 4, 2, 8, "float32", np)
    packed = cache.step([cache.add(), cache.add()], [3, 1])
    assert repr(packed) == "Step(num_sequences=2, counts=[3, 1], max_pages_per_sequence=4)"
    assert repr(COMM) == "ThreadCommunicator(rank=0, world=1, time_limit=60, check=True)"
