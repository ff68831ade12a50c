"""Problems for attention over keys in host memory, and both passes' results of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import accum_dtype, gaussian
from numpy.typing import NDArray

Array = NDArray[Any]
RNG = np.random.default_rng(0)


def arrays(
    dtype: str = "float64",
    batch: int = 2,
    seqlens: tuple[int, int] = (7, 60),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 5),
) -> dict[str, Array]:
    shapes = {
        "q": (batch, seqlens[0], heads[0], dims[0]),
        "k": (batch, seqlens[1], heads[1], dims[0]),
        "v": (batch, seqlens[1], heads[1], dims[1]),
        "dout": (batch, seqlens[0], heads[0], dims[1]),
    }
    made = {name: gaussian(RNG, shape, dtype) for name, shape in shapes.items()}
    lse = (batch, heads[0], seqlens[0])
    return made | {"dlse": RNG.standard_normal(lse).astype(accum_dtype(made["q"].dtype))}


def results(make: Callable[..., Any], given: dict[str, Array], **options: Any) -> dict[str, Array | None]:
    """Return out, lse and every gradient."""
    (out, lse), backward = make(given["q"], given["k"], given["v"], return_lse=True, **options)
    names = ["dq", "dk", "dv", *(f"d{name}" for name in ("bias", "sink", "alibi_slopes") if name in options)]
    operands = enumerate(options.get("operands", ()))
    names += [f"doperands[{n}]" for n, x in operands if x.dtype.kind == "f"]
    return {"out": out, "lse": lse, **dict(zip(names, backward(given["dout"], given["dlse"]), strict=True))}


def assert_same(found: dict[str, Array | None], expected: dict[str, Array | None], rounding: float = 1e-13) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        y = found[name]
        assert x is not None
        assert y is not None
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x), err_msg=name)
        shown = np.isfinite(x)
        wide, its = y[shown].astype(np.float64), x[shown].astype(np.float64)
        limit = rounding * max(1.0, float(np.abs(its).max(initial=0)))
        np.testing.assert_allclose(wide, its, rtol=0, atol=limit, err_msg=name)
