"""Users' own rules: a function of a score and its place, traced once, becomes an expression.

From the expression come its derivative, the CUDA text of the kernels, and the NumPy code of the CPU path.
"""

from cuflash.rules.explain import explain

__all__ = ["explain"]
