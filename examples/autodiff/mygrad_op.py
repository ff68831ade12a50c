"""cuflash inside MyGrad: ``attention(q, k, v, ...)`` of its tensors.

MyGrad's gradients are plain NumPy arrays outside any graph, so a second derivative cannot be asked for.
"""

from __future__ import annotations

import mygrad
import numpy as np

from cuflash.adapters.mygrad import attention

if __name__ == "__main__":
    q, k, v = (mygrad.tensor(x) for x in np.random.default_rng(0).normal(size=(3, 2, 64, 4, 32)))
    mygrad.sum(attention(q, k, v, causal=True)).backward()
    print("gradient of q:", q.grad.shape, q.grad.dtype)
