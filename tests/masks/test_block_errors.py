"""Wrong arguments and operations of block masks raise errors that say what was expected and what was met."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mask_cases import dense_of

from cuflash import BlockMask

BOOLS = np.ones((3, 4), bool)
Untyped: Any = BlockMask  # a type checker would refuse these arguments
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: Untyped.from_dense([[True]]), TypeError, "mask: expected an array .* got list"),
    "ints": (lambda: Untyped.from_dense(np.ones((3, 4), int)), TypeError, "mask: expected dtype bool.* got int64"),
    "one axis": (lambda: Untyped.from_dense(np.ones(3, bool)), ValueError, r"mask: expected 2, 3 or 4 axes .*\(3,\)"),
    "five axes": (lambda: Untyped.from_dense(np.ones((1,) * 5, bool)), ValueError, "mask: expected 2, 3 or 4 axes"),
    "block size 0": (lambda: Untyped.from_dense(BOOLS, (0, 1)), ValueError, r"block_size\[0\]: .* >= 1, got 0"),
    "block size": (lambda: Untyped.from_dense(BOOLS, 64), TypeError, "block_size: expected a pair .* got int"),
    "block sizes": (lambda: Untyped.from_dense(BOOLS, (1, 2, 3)), ValueError, "block_size: .* got 3 entries"),
    "float block size": (lambda: Untyped.from_dense(BOOLS, (64.0, 64)), TypeError, "an integer, got float"),
    "blocks": (
        lambda: Untyped.from_blocks(BOOLS, 300, 600),
        ValueError,
        r"blocks: .* \(\.\.\., 3, 5\), got \(3, 4\)",
    ),
    "float blocks": (
        lambda: Untyped.from_blocks(np.ones((3, 4)), 300, 500),
        TypeError,
        "blocks: expected dtype bool",
    ),
    "length": (lambda: Untyped.from_blocks(BOOLS, -1, 500), ValueError, "seqlen_q: expected an integer >= 0, got -1"),
    "no function": (lambda: Untyped.from_function(BOOLS, 3, 4), TypeError, "function: expected a callable"),
    "int result": (
        lambda: Untyped.from_function(lambda b, h, i, j: i - j, 3, 4),
        TypeError,
        "bools .* got dtype int64",
    ),
    "and of conditions": (
        lambda: Untyped.from_function(lambda b, h, i, j: i >= j and j > 2, 30, 40),
        TypeError,
        "function: expected conditions .* combined by &, . and ~.* np.where",
    ),
    "a chain": (lambda: Untyped.from_function(lambda b, h, i, j: 2 < j < i, 30, 40), TypeError, "chained comparisons"),
    "an if": (lambda: Untyped.from_function(lambda b, h, i, j: i if j > 2 else j, 30, 40), TypeError, "np.where"),
    "order of FlexAttention": (
        lambda: Untyped.from_function(lambda b, h, i, j: i >= j, None, None, 64, 64),
        TypeError,
        r"seqlen_q: expected an integer, got None: lengths come first, as in from_function\(function, seqlen_q",
    ),
    "truth": (lambda: bool(Untyped.fixed(8, 2, 1)), TypeError, "bool: expected &, . or ~ .* is not None"),
    "and in place of &": (lambda: Untyped.fixed(8, 2, 1) and Untyped.fixed(8, 2, 1), TypeError, "bool: expected &"),
    "not in place of ~": (lambda: not Untyped.fixed(8, 2, 1), TypeError, "bool: expected &"),
    "shape": (
        lambda: Untyped.from_function(lambda b, h, i, j: np.ones((2, 2), bool), 3, 4),
        ValueError,
        r"broadcasts to .* \(3, 4\), got \(2, 2\)",
    ),
    "None result": (lambda: Untyped.from_function(lambda b, h, i, j: None, 3, 4), TypeError, "result.* got NoneType"),
    "heads": (lambda: Untyped.from_function(lambda b, h, i, j: i < j, 3, 4, heads=0), ValueError, "heads: .* >= 1"),
    "left": (lambda: Untyped.sliding_window(8, 8, -1, 0), ValueError, "left: .*None for unbounded, got -1"),
    "right": (lambda: Untyped.sliding_window(8, 8, 1, 0.5), TypeError, "right: expected an integer, got float"),
    "no heads": (lambda: Untyped.strided(8, 1, 2, heads=0), ValueError, "heads: expected an integer >= 1, got 0"),
    "stride": (lambda: Untyped.strided(8, 1, 0), ValueError, "stride: expected an integer >= 1, got 0"),
    "local": (lambda: Untyped.fixed(8, 0, 0), ValueError, "local: expected an integer >= 1, got 0"),
    "summary": (lambda: Untyped.fixed(8, 2, 3), ValueError, "summary: expected an integer <= local = 2, got 3"),
    "causal": (lambda: Untyped.fixed(8, 2, 1, causal=1), TypeError, "causal: expected a bool, got int"),
    "global": (lambda: Untyped.longformer(8, 2, [8]), ValueError, "global_tokens: expected positions from 0 to 7"),
    "last": (lambda: Untyped.longformer(8, 2, [-1]), ValueError, "global_tokens: expected positions from 0 to 7"),
    "global mask": (lambda: Untyped.longformer(8, 2, BOOLS[0]), TypeError, "global_tokens: .* got 1-D bool"),
    "fewer than none": (lambda: Untyped.longformer(8, 2, -1), ValueError, "global_tokens: .* >= 0, got -1"),
    "random blocks": (lambda: Untyped.bigbird(8, 1, 1, -1, 0), ValueError, "random_blocks: .* >= 0, got -1"),
    "density": (lambda: Untyped.random(8, 8, 1.5, 0), ValueError, "density: expected a number from 0 to 1, got 1.5"),
    "NaN density": (lambda: Untyped.random(8, 8, float("nan"), 0), ValueError, "density: .* got nan"),
    "text density": (lambda: Untyped.random(8, 8, "0.1", 0), TypeError, "density: expected a real number, got str"),
    "and lengths": (
        lambda: Untyped.fixed(8, 2, 1) & Untyped.fixed(9, 2, 1),
        ValueError,
        r"same .* got \(1, 1, 8, 8\) and \(1, 1, 9, 9\)",
    ),
    "and heads": (
        lambda: Untyped.fixed(8, 2, 1, heads=2) & Untyped.fixed(8, 2, 1, heads=3),
        ValueError,
        r"\(1, 2, 8, 8\) and \(1, 3, 8, 8\)",
    ),
    "and array": (lambda: Untyped.fixed(3, 2, 1) & BOOLS, TypeError, "&: expected two of BlockMask.* got ndarray"),
    "array and": (lambda: BOOLS & Untyped.fixed(3, 2, 1), TypeError, "&: expected two of BlockMask.* got ndarray"),
    "and bool": (lambda: Untyped.fixed(3, 2, 1) & True, TypeError, "&: expected two of BlockMask.* got bool"),
    "bool and": (lambda: np.True_ & Untyped.fixed(3, 2, 1), TypeError, "&: expected two of BlockMask"),
    "or lengths": (lambda: Untyped.fixed(8, 2, 1) | Untyped.fixed(9, 2, 1), ValueError, r"^\|: .* got \(1, 1, 8, 8\)"),
    "or array": (lambda: Untyped.fixed(3, 2, 1) | BOOLS, TypeError, r"\|: expected two of BlockMask.* got ndarray"),
    "array or": (lambda: BOOLS | Untyped.fixed(3, 2, 1), TypeError, r"\|: expected two of BlockMask.* got ndarray"),
    "xor bool": (lambda: Untyped.fixed(3, 2, 1) ^ True, TypeError, r"\^: expected two of BlockMask.* got bool"),
    "difference": (lambda: Untyped.fixed(3, 2, 1) - Untyped.fixed(3, 2, 1), TypeError, "-: expected &, .* a & ~b"),
    "array difference": (lambda: BOOLS - Untyped.fixed(3, 2, 1), TypeError, "-: expected &, .* a & ~b"),
    "head to draw": (lambda: Untyped.fixed(8, 2, 1, heads=2).draw(head=2), ValueError, "head: .* <= 1, got 2"),
    "batch to draw": (lambda: Untyped.fixed(8, 2, 1).draw(1), ValueError, "batch: .* <= 0, got 1"),
    "lines to draw": (lambda: Untyped.fixed(8, 2, 1).draw(rows=0), ValueError, "rows: .* >= 1, got 0"),
    "class": (
        lambda: Untyped(512, 512),
        TypeError,
        r"BlockMask: .*from_dense\(mask\).* got a call of the class itself",
    ),
    "class alone": (Untyped, TypeError, "BlockMask: expected a call of one of its constructors"),
    "class by names": (lambda: Untyped(mask=BOOLS), TypeError, "BlockMask: expected a call of one of its constructors"),
    "two arguments": (
        lambda: Untyped.from_function(lambda i, j: i < j, 3, 4),
        TypeError,
        r"function: expected a callable \(b, h, i, j\), got one with the arguments \(i, j\)",
    ),
    "five arguments": (
        lambda: Untyped.from_function(lambda b, h, i, j, k: i < j, 3, 4),
        TypeError,
        r"function: expected a callable \(b, h, i, j\), got .* \(b, h, i, j, k\)",
    ),
    "long": (lambda: Untyped.strided(2**31, 1, 2), ValueError, "seqlen: expected an integer <= 2147483647"),
    "many heads": (lambda: Untyped.strided(8, 1, 2, heads=2**70), ValueError, "heads: expected an integer <= 2147"),
    "large blocks": (lambda: Untyped.from_dense(BOOLS, (2**70, 1)), ValueError, r"block_size\[0\]: .* <= 2147483647"),
    **{
        f"{name} of seed {seed!r}": (partial(make, seed=seed), error, "seed: expected an integer >= 0, a sequence")
        for name, make in (
            ("random", partial(Untyped.random, 8, 8, 0.5)),
            ("bigbird", partial(Untyped.bigbird, 8, 1, 1, 1)),
        )
        for seed, error in (
            (-1, ValueError),
            ([3, -1], ValueError),
            (1.5, TypeError),
            ("x", TypeError),
            (True, TypeError),
            (np.True_, TypeError),
            ([0.5], TypeError),
        )
    },
}


def test_rules_that_can_take_four_arguments() -> None:
    """Defaults, any number of arguments, methods and functions that tell no signature are all callables of four."""
    expected = np.tri(3, 4, -1, dtype=bool)

    class Rule:
        def method(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return j < i

    rules: list[Any] = [
        lambda b, h, i, j, by=0: j + by < i,
        lambda *indices: indices[3] < indices[2],
        Rule().method,
        partial(lambda by, b, h, i, j: j + by < i, 0),
    ]
    for rule in rules:
        np.testing.assert_array_equal(dense_of(BlockMask.from_function(rule, 3, 4))[0, 0], expected)


def test_errors_within_a_rule_are_its_own() -> None:
    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        raise TypeError("of the rule")

    with pytest.raises(TypeError, match="^of the rule$"):
        BlockMask.from_function(rule, 3, 4)


def test_reaches_beyond_every_position() -> None:
    """A window, a stride or a section that is longer than the sequence shows the same, however long it is."""
    far = 2**70
    pairs = [
        (BlockMask.strided(9, far, far), BlockMask.strided(9, 20, 20)),
        (BlockMask.strided(9, 1, far), BlockMask.strided(9, 1, 20)),
        (BlockMask.fixed(9, far, 0), BlockMask.fixed(9, 20, 0)),
        (BlockMask.fixed(9, far, far - 5, causal=True), BlockMask.fixed(9, 20, 15, causal=True)),
        (BlockMask.longformer(9, far, 0), BlockMask.longformer(9, 20, 0)),
        (BlockMask.longformer(9, 1, far), BlockMask.longformer(9, 1, 20)),
        (BlockMask.bigbird(9, far, 0, 0, 0, block_size=(2, 2)), BlockMask.bigbird(9, 20, 0, 0, 0, block_size=(2, 2))),
        (BlockMask.bigbird(9, 1, 0, far, 0, block_size=(2, 2)), BlockMask.bigbird(9, 1, 0, 20, 0, block_size=(2, 2))),
    ]
    for far_off, same in pairs:
        np.testing.assert_array_equal(dense_of(far_off), dense_of(same))


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    attempt, error, message = BAD[name]
    with pytest.raises(error, match=message) as caught:
        attempt()
    assert caught.type is error
