"""Problems for attention over keys in host memory, and both passes' results of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import accum_dtype, gaussian
from numpy.typing import NDArray

import cuflash

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


def options_by_name(batch: int = 2, seqlens: tuple[int, int] = (7, 60), heads: int = 4) -> dict[str, dict[str, Any]]:
    """Return every option, alone."""
    sq, sk = seqlens
    mask = RNG.random((batch, 1, sq, sk)) > 0.3
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (9, 3)},
        "window far behind": {"window": (2, 0)},
        "softmax_scale": {"softmax_scale": 0.7},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": RNG.standard_normal((batch, heads, sq, sk))},
        "bias of float32": {"bias": RNG.standard_normal((heads, sq, sk)).astype(np.float32)},
        "bias of keys": {"bias": RNG.standard_normal((1, sk))},
        "bias of rows": {"bias": RNG.standard_normal((heads, sq, 1))},
        "bias that hides": {"bias": np.where(RNG.random((sq, sk)) > 0.5, 0.0, -np.inf)},
        "mask": {"mask": mask},
        "mask that hides all": {"mask": mask & (np.arange(sq)[:, None] != 3)},
        "alibi_slopes": {"alibi_slopes": RNG.uniform(0.01, 0.2, heads)},
        "alibi_slopes by batch": {"alibi_slopes": RNG.uniform(0.01, 0.2, (batch, heads)), "causal": True},
        "sink": {"sink": RNG.standard_normal(heads)},
        "lengths": {
            "q_lengths": np.array([sq, 3][:batch], np.int32),
            "kv_lengths": np.array([41, sk + 9][:batch], np.int32),
            "causal": True,
        },
        "no length": {"kv_lengths": np.array([0, 5][:batch], np.int32), "sink": RNG.standard_normal(heads)},
        "lengths and all": {
            "q_lengths": np.array([sq - 1, -2][:batch], np.int32),
            "kv_lengths": np.array([sk - 13, sk][:batch], np.int32),
            "window": (20, 1),
            "alibi_slopes": RNG.uniform(0.01, 0.2, heads),
            "bias": RNG.standard_normal((sq, sk)),
            "dropout_p": 0.3,
            "dropout_seed": 3,
        },
        "dropout": {"dropout_p": 0.4, "dropout_seed": 2**63 + 5},
        "seed in an array": {"dropout_p": 0.4, "dropout_seed": np.array([7], np.uint64), "causal": True},
        "block_mask": {"block_mask": cuflash.BlockMask.from_dense(RNG.random((heads, sq, sk)) > 0.4)},
        "block_mask by batch": {
            "block_mask": cuflash.BlockMask.from_dense(RNG.random((batch, 1, sq, sk)) > 0.4),
            "mask": mask,
            "causal": True,
        },
        "block_mask that is a window": {"block_mask": cuflash.BlockMask.sliding_window(sq, sk, 4, 2)},
        "deterministic": {"deterministic": True},
        "precision": {"precision": "tf32"},
        "score_mod": {
            "score_mod": lambda s, b, h, i, j, t, w, n: s * w + t[b, h, np.clip(j - i, -4, 4) + 4] + 0.01 * n[j],
            "operands": (RNG.standard_normal((batch, heads, 9)), np.array(0.7), np.arange(sk)),
        },
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + b) % 3 != 1, "causal": True},
        "mask_mod that hides all": {"mask_mod": lambda b, h, i, j: i < 0, "sink": RNG.standard_normal(heads)},
        "rules and all": {
            "score_mod": lambda s, b, h, i, j, t: np.where(j == 5, -np.inf, s + t[h, j]),
            "mask_mod": lambda b, h, i, j, t: t[h, j] < 1,
            "operands": (RNG.standard_normal((heads, sk)),),
            "kv_lengths": np.array([41, sk][:batch], np.int32),
            "bias": RNG.standard_normal((sq, sk)),
            "alibi_slopes": RNG.uniform(0.01, 0.2, heads),
            "dropout_p": 0.3,
            "dropout_seed": 3,
            "window": (20, 1),
        },
        "num_splits": {"num_splits": 3},
        "out_dtype": {"out_dtype": "float64"},
    }


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
