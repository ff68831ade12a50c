"""Arrays of numpy.ma are refused wherever an array is taken, as their mask would be lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask

Arguments = dict[str, Any]

INPUTS: Arguments = {
    "q": np.ones((2, 6, 4, 16), np.float32),
    "k": np.ones((2, 8, 2, 16), np.float32),
    "v": np.ones((2, 8, 2, 12), np.float32),
}
PACKED: Arguments = {
    "q": np.ones((9, 4, 16), np.float32),
    "k": np.ones((14, 2, 16), np.float32),
    "v": np.ones((14, 2, 12), np.float32),
    "cu_seqlens_q": np.array([0, 4, 9], np.int32),
    "cu_seqlens_k": np.array([0, 8, 14], np.int32),
}
OPTIONS: Arguments = {
    "bias": np.zeros((8, 8), np.float32),
    "mask": np.ones((8, 8), bool),
    "alibi_slopes": np.zeros(4, np.float32),
    "sink": np.zeros(4, np.float32),
    "q_lengths": np.array([4, 4], np.int32),
    "kv_lengths": np.array([6, 6], np.int32),
    "dropout_seed": np.array([1], np.uint64),
}
GRADIENTS = ("q", "k", "v", "bias", "sink", "alibi_slopes")


def arguments_of(packed: bool) -> Arguments:
    options = OPTIONS if packed else {**OPTIONS, "bias": np.zeros((6, 8), np.float32), "mask": np.ones((6, 8), bool)}
    return {**(PACKED if packed else INPUTS), **options, "dropout_p": 0.1}


def residuals_of(packed: bool) -> Arguments:
    function: Any = cuflash.attention_varlen if packed else cuflash.attention
    out, lse = function(**arguments_of(packed), return_lse=True)
    return {"dout": np.ones_like(out), "forward_out": out, "lse": lse, "dlse": np.ones_like(lse)}


def refused(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*: expected an array that masks nothing, got .*numpy.ma"):
        call()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention(packed: bool, has_mask: bool) -> None:
    """Every array of the forward and backward functions is refused by itself, as is every target."""
    arguments, residuals = arguments_of(packed), residuals_of(packed)
    name_of = "attention_varlen" if packed else "attention"
    forward, vjp, backward = (getattr(cuflash, name_of + form) for form in ("", "_vjp", "_backward"))

    def masked(x: Any) -> Any:
        return np.ma.masked_array(x, np.zeros(x.shape, bool) if has_mask else np.ma.nomask)

    for name in [name for name, x in arguments.items() if isinstance(x, np.ndarray)]:
        changed = {**arguments, name: masked(arguments[name])}
        refused(partial(forward, **changed), name)
        refused(partial(vjp, **changed), name)
        refused(partial(backward, **changed, **residuals), name)
    refused(partial(forward, **arguments, out=masked(np.empty_like(residuals["dout"]))), "out")
    refused(partial(vjp, **arguments, out=masked(np.empty_like(residuals["dout"]))), "out")
    pull = vjp(**arguments)[1]
    for name in residuals:
        changed = {**residuals, name: masked(residuals[name])}
        refused(partial(backward, **arguments, **changed), name.removeprefix("forward_"))
        if name in ("dout", "dlse"):
            refused(partial(pull, changed["dout"], changed["dlse"]), name)
    for index, name in enumerate(GRADIENTS):
        targets = [np.empty_like(arguments[n]) for n in GRADIENTS]
        targets[index] = masked(targets[index])
        refused(partial(backward, **arguments, **residuals, out=tuple(targets)), f"out, d{name}")
        refused(partial(pull, residuals["dout"], out=tuple(targets)), f"out, d{name}")


def test_merge() -> None:
    out, lse = np.ones((2, 6, 4, 12), np.float32), np.zeros((2, 4, 6), np.float32)
    masked_out, masked_lse = np.ma.masked_array(out), np.ma.masked_array(lse, np.ones_like(lse, bool))
    refused(lambda: cuflash.merge([masked_out, out], [lse, lse]), r"outs\[0\]")
    refused(lambda: cuflash.merge([out, masked_out], [lse, lse]), r"outs\[1\]")
    refused(lambda: cuflash.merge([out, out], [lse, masked_lse]), r"lses\[1\]")
    valid: Arguments = {"dout": out, "dlse": lse, "outs": [out], "lses": [lse], "out": out, "lse": lse}
    for name, x in (("dout", masked_out), ("dlse", masked_lse), ("out", masked_out), ("lse", masked_lse)):
        refused(partial(cuflash.merge_backward, **{**valid, name: x}), name)


def test_block_masks() -> None:
    bools: Any = np.ma.masked_array(np.ones((6, 8), bool), np.eye(6, 8, dtype=bool))
    refused(lambda: BlockMask.from_dense(bools), "mask")
    refused(lambda: BlockMask.from_blocks(bools, 6, 8, (1, 1)), "blocks")
    refused(lambda: BlockMask.from_function(lambda b, h, i, j: bools, 6, 8), "function's result")
    refused(lambda: BlockMask.from_function(lambda b, h, i, j: np.ma.masked, 6, 8), "function's result")
    refused(lambda: BlockMask.longformer(8, 2, np.ma.masked_array([1, 2], [True, False])), "global_tokens")
    seed: Any = np.ma.masked_array([1, 2], [True, False])
    refused(lambda: BlockMask.random(8, 8, 0.5, seed), "seed")


def test_a_mask_of_the_cuda_array_interface() -> None:
    interface = {"shape": (1, 2, 3, 4), "typestr": "<f4", "data": (0, False), "version": 3, "mask": object()}
    x = SimpleNamespace(__cuda_array_interface__=interface)
    with pytest.raises(TypeError, match="q: expected an array that masks nothing, got a __cuda_array_interface__"):
        cuflash.attention(x, x, x)
