"""Calls whose queries, too, lie in NumPy's memory may have pages, FP8 codes or fixed splits of the keys.

Nothing is to be copied there, so such calls are ordinary ones on the whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.frontend.call import Backward, Call

Array = Any
_OF_WHOLE_ARRAYS = ("block_table", "split_size")


def is_in_place(arrays: Sequence[Array], options: Mapping[str, Any]) -> bool:
    """Return True if all arrays are NumPy's, and pages, FP8 codes or a split of keys leave no choice of chunks."""
    if not all(isinstance(x, np.ndarray) for x in arrays):
        return False
    is_fp8 = any(x.dtype.itemsize == 1 for x in arrays)
    return is_fp8 or any(options.get(name) is not None for name in _OF_WHOLE_ARRAYS)


def forward(arrays: Sequence[Array], options: Mapping[str, Any], out: Array | None, return_lse: bool) -> Any:
    """Return out, or (out, lse)."""
    q, k, v = arrays
    call = Call(q, k, v, options, None)
    result, lse = call.forward(out, return_lse, None)
    return result if lse is None else (result, lse)


def vjp(
    arrays: Sequence[Array], options: Mapping[str, Any], out: Array | None, return_lse: bool
) -> tuple[Any, Backward]:
    """Return out, or (out, lse), and the gradient function."""
    q, k, v = arrays
    call = Call(q, k, v, options, None)
    call.refuse_gradients()
    result, lse = call.forward(out, True, None)
    return ((result, lse) if return_lse else result), call.gradients_of(result, lse)
