"""Kernels that run nothing, and small ones of which the compiler's report on local memory is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Nothing:
    """A kernel that does nothing."""

    local_bytes = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        pass

    def bound(self, *_: Any, **__: Any) -> Callable[[int, int], None]:
        return lambda arguments, stream: None


# Texts of a kernel's body, by what they have in local memory.
SAMPLES = {
    "nothing": "x[threadIdx.x] *= 2;",
    "an array": (
        "float a[32], sum = 0; for (int i = 0; i < 32; ++i) a[i] = x[i];\n"
        "for (int i = 0; i < n; ++i) sum += a[(i * 7 + threadIdx.x) % 32]; x[threadIdx.x] = sum;"
    ),
    "spills": (
        "float a[160];\n#pragma unroll\nfor (int i = 0; i < 160; ++i) a[i] = x[i * n + threadIdx.x];\n"
        "__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 160; ++i) x[i * n * 2] = a[159 - i] * a[i];"
    ),
}


def sample(name: str) -> str:
    """Return the source of one of the samples, a kernel with that name."""
    return f'extern "C" __global__ __launch_bounds__(1024) void sample(float* x, int n) {{ {SAMPLES[name]} }}'
