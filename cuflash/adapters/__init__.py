"""cuflash inside autodiff libraries: one module a library, which imports it; this package imports none.

Each has `attention` and `attention_varlen` with the options of `cuflash`, and gradients of q, k, v, bias, sink,
alibi_slopes and the floating-point operands of one's own rules.
"""

__all__ = ["autograd", "jax", "mygrad", "thinc", "torch"]


def __dir__() -> list[str]:
    return sorted(__all__)
