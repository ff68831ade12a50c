"""Calls of append_kv, with what they must write and return by a plain loop over rows in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import Device

import cuflash

Array = Any


def numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Array:
    """Draw numbers of a normal distribution."""
    if dtype == "bfloat16":
        return rng.normal(size=shape).astype(pytest.importorskip("ml_dtypes").bfloat16)
    return rng.normal(size=shape).astype(dtype)


def eps_of(dtype: Any) -> float:
    """Return the distance from 1 to the next number."""
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)


class Case:
    """Arguments of a call, with the results that it must have."""

    def __init__(
        self,
        dtype: str = "float32",
        *,
        lengths: tuple[int, ...] = (2, 0, 5),
        seqlen: int = 3,
        counts: tuple[int, ...] | None = None,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (16, 8),
        page_size: int | None = 4,
        capacity: int = 8,
        rotary_dim: int | None = None,
        table_dtype: str = "float32",
        positions: int = 20,
        interleaved: bool = False,
        with_q: bool = True,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths, self.counts, self.page_size, self.capacity = lengths, counts, page_size, capacity
        batch, (hq, hkv), (d, dv) = len(lengths), heads, dims
        rows = (batch, seqlen) if counts is None else (sum(counts) + 2,)  # two packed rows belong to no sequence
        self.k, self.v, self.q = (numbers((*rows, h, n), dtype, rng) for h, n in ((hkv, d), (hkv, dv), (hq, d)))
        self.options: dict[str, Any] = {}
        if counts is not None:
            self.options["cu_seqlens"] = np.cumsum([1, *counts]).astype(np.int32)
        outer = (batch, capacity)
        if page_size is not None:
            max_pages = capacity // page_size
            pages = rng.permutation(batch * max_pages + 2)[: batch * max_pages].reshape(batch, max_pages)
            self.options["block_table"] = pages.astype(np.int32)
            outer = (batch * max_pages + 2, page_size)
        self.k_cache, self.v_cache = (numbers((*outer, hkv, n), dtype, rng) for n in (d, dv))
        self.rotary_dim, self.interleaved = rotary_dim or 0, interleaved
        if rotary_dim is not None:
            angles = rng.normal(size=(positions, rotary_dim // 2))
            cast = numbers((1,), table_dtype, rng).dtype
            self.options["rotary"] = np.cos(angles).astype(cast), np.sin(angles).astype(cast)
            self.options["interleaved"] = interleaved
        if with_q:
            self.options["q"] = self.q

    def new_rows(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Return (index in k, sequence, position) of each row of a sequence."""
        if self.counts is None:
            return [((b, t), b, n + t) for b, n in enumerate(self.lengths) for t in range(self.k.shape[1])]
        begins = self.options["cu_seqlens"]
        return [
            ((int(begins[b]) + t,), b, n + t)
            for b, (n, count) in enumerate(zip(self.lengths, self.counts, strict=True))
            for t in range(count)
        ]

    def place(self, b: int, position: int) -> tuple[int, int] | None:
        """Return where a position lies in the caches; None for one that is dropped."""
        if not 0 <= position < self.capacity:
            return None
        if self.page_size is None:
            return b, position
        page = int(self.options["block_table"][b, position // self.page_size])
        return (page, position % self.page_size) if 0 <= page < len(self.k_cache) else None

    def rotated(self, x: Array, position: int) -> Array:
        """Rotate a row (heads, dim), in float64, by its position's angles."""
        x = x.astype(np.float64)
        if "rotary" not in self.options:
            return x
        table = [t[np.clip(position, 0, len(t) - 1)].astype(np.float64) for t in self.options["rotary"]]
        result = x.copy()
        for i in range(self.rotary_dim // 2):
            pair = [2 * i, 2 * i + 1] if self.interleaved else [i, i + self.rotary_dim // 2]
            (a, b), cos, sin = (x[:, j] for j in pair), table[0][i], table[1][i]
            result[:, pair[0]], result[:, pair[1]] = a * cos - b * sin, a * sin + b * cos
        return result

    def expected(self) -> tuple[Array, Array, Array]:
        """Return the caches and q after the call, in float64."""
        caches = [x.astype(np.float64) for x in (self.k_cache, self.v_cache)]
        q = self.q.astype(np.float64)
        for index, b, position in self.new_rows():
            q[index] = self.rotated(self.q[index], position)
            place = self.place(b, position)
            if place is not None:
                caches[0][place] = self.rotated(self.k[index], position)
                caches[1][place] = self.v[index]
        return caches[0], caches[1], q

    def arrays(self) -> list[Array]:
        """Return the arrays of the options, the rotary table last."""
        names = [name for name in self.options if name not in ("rotary", "interleaved")]
        return [*(self.options[name] for name in names), *self.options.get("rotary", ())]

    def run(self, device: Device) -> tuple[Any, Array, Array]:
        """Make the call, and return q and the caches; no other argument may have changed."""
        inputs = [self.k, self.v, np.array(self.lengths, np.int32), *self.arrays()]
        put = device.put((self.k_cache, self.v_cache, inputs))
        k_cache, v_cache, (k, v, lengths, *others) = put
        names = [name for name in self.options if name not in ("rotary", "interleaved")]
        options = dict(zip(names, others, strict=False))
        if "rotary" in self.options:
            options |= {"rotary": tuple(others[-2:]), "interleaved": self.interleaved}
        q = cuflash.append_kv(k, v, k_cache, v_cache, lengths, **options)
        for before, after in zip(inputs, device.get(put[2]), strict=True):
            np.testing.assert_array_equal(after, before)
        return device.get(q), device.get(k_cache), device.get(v_cache)

    def check(self, device: Device) -> None:
        q, k_cache, v_cache = self.run(device)
        expected_k, expected_v, expected_q = self.expected()
        tolerance = 2 * eps_of(self.k.dtype) if self.rotary_dim else 0
        np.testing.assert_array_equal(v_cache.astype(np.float64), expected_v)
        np.testing.assert_allclose(k_cache.astype(np.float64), expected_k, rtol=tolerance, atol=4 * tolerance)
        unchanged = self.k_cache.astype(np.float64) == expected_k
        np.testing.assert_array_equal(k_cache[unchanged], self.k_cache[unchanged])
        if "q" not in self.options:
            assert q is None
        else:
            assert q.dtype == self.q.dtype and q.flags.c_contiguous
            np.testing.assert_allclose(q.astype(np.float64), expected_q, rtol=tolerance, atol=4 * tolerance)
