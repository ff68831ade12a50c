"""cuflash as a Thinc layer, with a sink for every head that the layer learns."""

from __future__ import annotations

import numpy as np

from cuflash.adapters.thinc import attention

if __name__ == "__main__":
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 64, 4, 32)).astype("float32")
    layer = attention(causal=True, sink=np.zeros(4, np.float32), learned=["sink"])
    out, backprop = layer.begin_update((q, k, v))
    dq, dk, dv = backprop(np.ones_like(out))
    print("output:", out.shape, "gradient of q:", dq.shape, "of the sink:", layer.get_grad("sink").shape)
