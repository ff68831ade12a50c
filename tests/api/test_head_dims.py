"""Head dims above 256, and the error above 1024."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import gaussian
from devices import Device
from tolerance import EPS

import cuflash
from cuflash import reference


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("head_dims", [(257, 40), (40, 300), (576, 512), (1024, 1024)], ids=str)
def test_wide_heads(device: Device, head_dims: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(8)
    head_dim, head_dim_v = head_dims
    q, k = gaussian(rng, (2, 9, 4, head_dim), dtype), gaussian(rng, (2, 21, 2, head_dim), dtype)
    # v may be k's first columns, as in latent attention.
    v = k[..., :head_dim_v] if head_dim_v < head_dim else gaussian(rng, (2, 21, 2, head_dim_v), dtype)
    dout = gaussian(rng, (2, 9, 4, head_dim_v), dtype)
    options: dict[str, Any] = {"causal": True, "softcap": 20.0}
    given = device.put((q, k, v, dout))
    out, backward = cuflash.attention_vjp(*given[:3], **options)
    grads = dict(zip("qkv", device.get(backward(given[3])), strict=True))
    expected = reference.attention(q, k, v, **options)[0]
    # Errors of a product grow with the terms of its sum.
    unit = EPS[dtype] * max(head_dims) / 64
    np.testing.assert_allclose(device.get(out), expected, rtol=0, atol=8 * unit * np.abs(expected).max())
    for name, x in reference.attention_backward(dout, q, k, v, **options).items():
        np.testing.assert_allclose(grads[name], x, rtol=0, atol=30 * unit * np.abs(x).max(), err_msg=name)


def test_what_no_kernel_takes_is_said_before_anything_runs(device: Device) -> None:
    q = device.put(np.zeros((1, 4, 1, 1025), np.float32))
    with pytest.raises(NotImplementedError, match="head_dim of q: expected 1 to 1024, got 1025"):
        cuflash.attention(q, q, q)
