"""cuflash inside PyTorch's autograd: ``attention(q, k, v, ...)`` for tensors that require grad.

The adapter is an ``autograd.Function``. First derivatives only: differentiating twice raises an error.
"""

from __future__ import annotations

import torch

from cuflash.adapters.torch import attention

if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.autograd.gradcheck(lambda *qkv: attention(*qkv, causal=True, return_lse=True), (q, k, v))
    print("gradcheck passed")
