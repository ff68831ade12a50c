"""Users' own rules are traced with NumPy's promotion, derivatives and errors, and only when something changed."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.rules import explain
from cuflash.rules.derivative import derivative
from cuflash.rules.expression import SCORE, Node, input_node, loads_of
from cuflash.rules.form import OperandType, trace_rules
from cuflash.rules.rule import traced
from cuflash.rules.to_numpy import Evaluation

RNG = np.random.default_rng(3)
TABLE = OperandType((4, 7), "float32")


def score(function: Callable[..., Any], *operands: OperandType, accum: str = "float64") -> Node:
    return traced("score_mod", function, operands, accum)


def value(root: Node, s: Any, *operands: Any, **places: int) -> Any:
    s = np.asarray(s, float)
    inputs = {SCORE: s, **{name: np.int32(places.get(name, 0)) for name in "bhij"}}
    return np.broadcast_to(Evaluation(inputs, [np.asarray(x) for x in operands])(root), s.shape)


def slope(root: Node) -> Node:
    return derivative(root, input_node(SCORE, root.dtype))


S = np.array([-2.5, -1.0, -0.25, 0.0, 0.5, 1.0, 3.75])
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": lambda s, b, h, i, j: np.where(s > 0.25, s * s, -s),
    "minimum": lambda s, b, h, i, j: np.minimum(s, 0.3) + np.minimum(1.1, s),
    "maximum": lambda s, b, h, i, j: np.maximum(s, 0.3) * np.maximum(-1.7, s),
    "clip": lambda s, b, h, i, j: np.clip(s, -0.7, 0.9),
    "clip by keywords": lambda s, b, h, i, j: np.clip(s, a_min=None, a_max=0.9) + np.clip(s, -1.5, None),
    "abs": lambda s, b, h, i, j: abs(s - 0.1) + np.abs(s + 0.3),
    "sign": lambda s, b, h, i, j: np.sign(s - 0.1) * s,
    "floor": lambda s, b, h, i, j: np.floor(s * 1.3 + 0.05) * s,
    "ceil": lambda s, b, h, i, j: np.ceil(s * 1.3 + 0.05) + s,
    "exp": lambda s, b, h, i, j: np.exp(s) + np.exp2(s / 2),
    "log": lambda s, b, h, i, j: np.log(s * s + 1) + np.log2(s * s + 2),
    "sqrt": lambda s, b, h, i, j: np.sqrt(s * s + 0.5),
    "tanh": lambda s, b, h, i, j: np.tanh(s) + np.sin(s) * np.cos(2 * s),
    "divide": lambda s, b, h, i, j: s / (1 + s * s) - 1 / (s * s + 2),
    "floor_divide": lambda s, b, h, i, j: (s + 0.03) // 0.7 * s,
    "remainder": lambda s, b, h, i, j: (s + 0.03) % 0.7 + 5.03 % (s * s + 1),
    "power": lambda s, b, h, i, j: s**3 + (s * s + 1) ** 1.5 + (s * s + 1) ** -2 + s**0 + (s * s + 1) ** 0.5,
    "negative": lambda s, b, h, i, j: -s + +s - (-s),
    "a loop": lambda s, b, h, i, j: sum((s**k / math.factorial(k) for k in range(1, 6)), s),
    "integers": lambda s, b, h, i, j: s * ((i * 3 - j) // 2 % 5) + (i & 6 | j ^ 3) + ~i,
    "astype": lambda s, b, h, i, j: s * (s + 0.03).astype(int) + (i > 2).astype(np.float32) + s.astype("float16"),
    "compared": lambda s, b, h, i, j: np.where((s != 7) & (s >= -1.1) | (i == j) ^ (j <= 3), s, 2 * s),
    "bools": lambda s, b, h, i, j: s + (i > 3) * 2 + np.minimum(i > 2, j > 2) + np.where(~(i < j), 1, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name: str) -> None:
    """A traced function has the values of the function itself, and its derivative those of differences."""
    function = FUNCTIONS[name]
    places = {"b": 1, "h": 2, "i": 5, "j": 11}
    root = score(function)
    direct = [np.array([place], np.int32) for place in places.values()]
    np.testing.assert_allclose(value(root, S, **places), np.broadcast_to(function(S, *direct), S.shape), rtol=1e-13)
    step = 1e-6
    difference = (value(root, S + step, **places) - value(root, S - step, **places)) / (2 * step)
    np.testing.assert_allclose(value(slope(root), S, **places), difference, rtol=1e-6, atol=1e-6)


def random_expression(rng: np.random.Generator, depth: int) -> Callable[..., Any]:
    """Make a function of random operations that are defined everywhere."""
    leaves: list[Callable[..., Any]] = [
        lambda s, i, j, t: s,
        lambda s, i, j, t: t[i % 4, (j - i) % 7],
        lambda s, i, j, t: s * 0.5,
        lambda s, i, j, t: t[j // 3, 2] - i,
    ]
    if depth == 0:
        return leaves[rng.integers(len(leaves))]
    first, second = (random_expression(rng, depth - 1) for _ in range(2))
    a, b = rng.normal(size=2)
    branches: list[Callable[..., Any]] = [
        lambda *x: first(*x) + a * second(*x),
        lambda *x: np.tanh(first(*x)) * np.sin(second(*x)),
        lambda *x: np.where(first(*x) > a, second(*x), first(*x)),
        lambda *x: np.minimum(first(*x), second(*x) + b),
        lambda *x: np.clip(first(*x), a - 1, a + 1) * np.cos(second(*x)),
        lambda *x: first(*x) / (second(*x) ** 2 + 1.5),
        lambda *x: np.log(first(*x) ** 2 + 1) - np.exp(-abs(second(*x))),
    ]
    return branches[rng.integers(len(branches))]


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions(seed: int) -> None:
    """Derivatives by the score, and by each element of an operand, agree with differences."""
    rng = np.random.default_rng(seed)
    inner = random_expression(rng, 4)
    kind = OperandType((4, 7), "float64")
    root = score(lambda s, b, h, i, j, t: s + inner(s, i, j, t), kind)
    table, s, places = rng.normal(size=(4, 7)), rng.normal(size=50), {"i": 6, "j": 5}
    step = 1e-6

    def agree(found: Any, above: Any, below: Any) -> None:
        difference = (above - below) / (2 * step)
        # A few scores lie at a kink, whose two sides differ.
        scale = np.maximum(1, np.abs(difference))
        assert np.mean(np.abs(found - difference) > 1e-5 * scale) <= 0.04

    agree(
        value(slope(root), s, table, **places),
        value(root, s + step, table, **places),
        value(root, s - step, table, **places),
    )
    total = np.zeros((4, 7, 50))
    inputs: dict[str, Any] = {SCORE: s, **{name: np.int32(places.get(name, 0)) for name in "bhij"}}
    evaluation = Evaluation(inputs, [table])
    for load in loads_of(root):
        total[evaluation.indices(load)] += value(derivative(root, load), s, table, **places)
    for place in np.ndindex(4, 7):
        moved = np.zeros((4, 7))
        moved[place] = step
        agree(total[place], value(root, s, table + moved, **places), value(root, s, table - moved, **places))


def at_zero(function: Callable[..., Any], s: float = 0.0) -> float:
    with np.errstate(all="ignore"):
        return float(value(slope(score(function)), s))


def test_conventions_of_derivatives() -> None:
    assert at_zero(lambda s, b, h, i, j: abs(s)) == 0
    assert at_zero(lambda s, b, h, i, j: np.sign(s)) == 0
    assert at_zero(lambda s, b, h, i, j: np.sqrt(s)) == 0
    assert at_zero(lambda s, b, h, i, j: np.floor(s) + np.ceil(s), 0.5) == 0
    assert at_zero(lambda s, b, h, i, j: np.minimum(2 * s, 3 * s)) == 2
    assert at_zero(lambda s, b, h, i, j: np.minimum(3 * s, 2 * s)) == 3
    assert at_zero(lambda s, b, h, i, j: np.maximum(2 * s, 3 * s)) == 2
    assert at_zero(lambda s, b, h, i, j: np.maximum(0, s)) == 0
    # clip(x, lo, hi) is minimum(maximum(x, lo), hi).
    assert at_zero(lambda s, b, h, i, j: np.clip(s, 0, 1)) == 1
    assert at_zero(lambda s, b, h, i, j: np.clip(s, -1, 0)) == 1
    # The branch that is not chosen has no part in it, even where it has no derivative.
    assert at_zero(lambda s, b, h, i, j: np.where(s > 0, np.log(s), 5 * s), -1.0) == 5
    assert at_zero(lambda s, b, h, i, j: np.where(s > 0, np.sqrt(s), 0), -1.0) == 0


def test_promotion_is_numpys() -> None:
    """Promotion is NumPy's, but every floating result has the dtype of the accumulation."""
    kinds = {name: OperandType((), name) for name in ("int8", "uint8", "int16", "uint32", "int64", "uint64", "bool")}
    for left in kinds:
        for right in kinds:
            for sign in ("+", "*", "//", "%", "/", "&", "<"):
                pair = kinds[left], kinds[right]
                a, b = np.ones((), left), np.ones((), right)
                found: list[Any] = []
                body = eval(f"lambda x, y: x {sign} y")

                def rule(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any, body: Any = body) -> Any:
                    found.append(body(x, y))  # noqa: B023 - called at once
                    return s

                try:
                    expected = body(a, b).dtype
                except TypeError:
                    with pytest.raises(TypeError):
                        score(rule, *pair, accum="float32")
                    continue
                score(rule, *pair, accum="float32")
                wanted = np.dtype("float32") if expected.kind == "f" else expected
                assert found[0].dtype == wanted, (left, sign, right)


def test_integers_round_down_and_wrap() -> None:
    kind = OperandType((), "int32")
    a, b = np.meshgrid(np.array([-7, -1, 0, 5, 2**31 - 1, -(2**31)], np.int32), np.array([-3, -1, 0, 2], np.int32))
    with np.errstate(all="ignore"):
        for sign in ("//", "%", "+", "*", "-"):
            body = eval(f"lambda x, y: x {sign} y")
            root = score(lambda s, b, h, i, j, body=body: s * 0 + body(i, j))
            found = Evaluation({SCORE: np.zeros(a.shape), "i": a, "j": b}, [])(root)
            np.testing.assert_array_equal(found, body(a, b).astype(float))
    assert value(score(lambda s, b, h, i, j, x: s * 0 + x**5, kind), 0.0, np.int32(100)) == 100**5 - 2 * 2**32
    assert value(score(lambda s, b, h, i, j, x: s * 0 + x ** np.int64(5), kind), 0.0, np.int32(100)) == 100**5


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint64", "int64"])
@pytest.mark.parametrize("bounds", [(-3, 5), (3, 2**70), (-(2**70), 300), (None, 2**64 - 1), (-(2**63), None)])
def test_clip_leaves_out_a_bound_beyond_the_dtype(dtype: str, bounds: tuple[int | None, int | None]) -> None:
    """NumPy does so, too: clip(x, -3, 5) of an unsigned x is minimum(x, 5)."""
    for number in (0, 4, np.iinfo(dtype).max, np.iinfo(dtype).min):
        operand = np.array(number, dtype)
        root = score(lambda s, b, h, i, j, x: s * 0 + np.clip(x, *bounds), OperandType((), dtype))
        assert value(root, 0.0, operand) == float(np.clip(operand, *bounds))


def test_a_number_beyond_the_dtype_is_compared_by_value() -> None:
    values = np.array([-3, 0, 5], np.int32)
    for number in (2**31, 2**40, -(2**31) - 1, -(2**70), 10**400):
        for sign in ("<", "<=", ">", ">=", "==", "!="):
            for text in (f"x {sign} number", f"number {sign} x"):
                body = eval(f"lambda x: {text}", {"number": number})
                root = score(lambda s, b, h, i, j, body=body: s * 0 + body(i))
                found = Evaluation({SCORE: np.zeros(3), "i": values}, [])(root)
                np.testing.assert_array_equal(found, np.asarray([body(int(x)) for x in values], float), err_msg=text)


def test_namespaces_are_equal() -> None:
    """NumPy's functions, those of a traced value's namespace, and CuPy's do the same."""

    def body(xp: Any, s: Any, i: Any, j: Any) -> Any:
        x = xp.where(i > j, xp.exp(s), xp.clip(s, -1, 1)) + xp.minimum(xp.abs(s), 1) * xp.maximum(s, 0)
        return x + xp.tanh(s) + xp.floor(s) - xp.sign(s) + xp.log2(xp.exp2(s)) + xp.sqrt(xp.cos(s)) + xp.log(xp.ceil(s))

    by_numpy = score(lambda s, b, h, i, j: body(np, s, i, j))
    assert score(lambda s, b, h, i, j: body(s.__array_namespace__(), s, i, j)) is by_numpy
    cupy = pytest.importorskip("cupy", reason='no CuPy: pip install "cuflash[cuda13]"')
    assert score(lambda s, b, h, i, j: body(cupy, s, i, j)) is by_numpy


def line(function: Callable[..., Any], offset: int = 0) -> str:
    return f"line {function.__code__.co_firstlineno + offset}"


def branches(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    if s > 0:
        return s
    return -s


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (branches, ("where", line(branches, 1), "if s > 0:")),
        (lambda s, b, h, i, j: math.exp(s), ("float()", "where")),
        (lambda s, b, h, i, j: float(s), ("float()", "where")),
        (lambda s, b, h, i, j: bool(s), ("bool()", "where")),
        (lambda s, b, h, i, j: s if i and j else -s, ("where",)),
        (lambda s, b, h, i, j: max(s, 0), ("where",)),
        (lambda s, b, h, i, j: int(s), ("int()", "astype")),
        (lambda s, b, h, i, j: np.sinh(s), ("sinh",)),
        (lambda s, b, h, i, j: np.cumsum(s), ("cumsum",)),
        (lambda s, b, h, i, j: np.select([s > 0], [s]), ("select",)),
        (lambda s, b, h, i, j: s.__array_namespace__().sinh(s), ("sinh",)),
        (lambda s, b, h, i, j: s.cumsum(), ("cumsum",)),
        (lambda s, b, h, i, j: np.add.reduce(s), ("add.reduce",)),
        (lambda s, b, h, i, j: s << 1, ("lshift",)),
        (lambda s, b, h, i, j: s & 1, ("bitwise_and",)),
        (lambda s, b, h, i, j: 2**s, ("constant exponent",)),
        (lambda s, b, h, i, j: s**i, ("constant exponent",)),
        (lambda s, b, h, i, j: s + np.ones(3), ("operands",)),
        (lambda s, b, h, i, j: s + np.ones(3)[i], ("operands",)),
        (lambda s, b, h, i, j: s + "1", ("str",)),
        (lambda s, b, h, i, j: None, ("NoneType",)),
        (lambda s, b, h, i, j: (s, s), ("tuple",)),
        (lambda s, b, h, i: s, ("score_mod", "(s, b, h, i, j, *operands)")),
        (3, ("score_mod", "int")),
    ],
)
def test_what_cannot_be_traced(function: Any, words: tuple[str, ...]) -> None:
    q = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(TypeError) as caught:
        cuflash.attention(q, q, q, score_mod=function)
    for word in words:
        assert word in str(caught.value)
    if callable(function) and "(s, b, h" not in words:
        assert "test_rules.py" in str(caught.value) or "operand" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j, t: s + t,
        lambda s, b, h, i, j, t: s + t[h],
        lambda s, b, h, i, j, t: s + t[h, 1:],
        lambda s, b, h, i, j, t: s + t[h, None],
        lambda s, b, h, i, j, t: s + t[h, i, j],
        lambda s, b, h, i, j, t: s + t[h, s],
        lambda s, b, h, i, j, t: s + t[h, i > 1],
        lambda s, b, h, i, j, t: s + t[..., h],
        lambda s, b, h, i, j, t: np.exp(t),
        lambda s, b, h, i, j, t: t,
        lambda s, b, h, i, j, t: s + t.sum(),
        lambda s, b, h, i, j, t: s + t[h][i],
    ],
)
def test_an_operand_is_indexed_on_all_axes(function: Any) -> None:
    with pytest.raises(TypeError, match=r"operands\[0\]"):
        score(function, TABLE)


def test_a_mask_is_a_bool() -> None:
    with pytest.raises(TypeError, match="mask_mod: expected a bool"):
        traced("mask_mod", lambda b, h, i, j: i - j, (), "float32")
    assert traced("mask_mod", lambda b, h, i, j: True, (), "float32").is_constant


def test_a_score_is_no_bool() -> None:
    q = np.zeros((1, 2, 1, 4), np.float32)
    for rule in (lambda s, b, h, i, j: i >= j, lambda s, b, h, i, j: True, lambda s, b, h, i, j: (s > 0) & (i > j)):
        with pytest.raises(TypeError, match="score_mod: expected the new score, got bool .* belongs into mask_mod"):
            cuflash.attention(q, q, q, score_mod=rule)
    cuflash.attention(q, q, q, score_mod=lambda s, b, h, i, j: i - j)  # integers are numbers


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda s, i, j: s, r"got \(s, i, j\), which takes 3 \("),
        (lambda s, b, h, i, j, table: s, r"got \(s, b, h, i, j, table\), which takes 6 \("),
        (lambda s, b, h, i, j, t, u=1: s, "which takes 6 to 7"),
        (lambda s, b, h, i, j, t, *rest: s, "which takes at least 6"),
        (lambda s, b, h, i, j, *, t: s, "missing a required"),
    ],
)
def test_the_number_of_a_rules_arguments(rule: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"takes 5 values and 0 operands, .*{words}"):
        traced("score_mod", rule, (), "float32")


def test_bad_operands() -> None:
    q = np.zeros((1, 2, 1, 4), np.float32)
    rule: Callable[..., Any] = lambda s, b, h, i, j, *x: s  # noqa: E731
    wrong: tuple[Any, ...] = np.zeros(3), 3.0, "abc", {"a": 1}
    for operands in wrong:
        with pytest.raises(TypeError, match="operands: expected a tuple"):
            cuflash.attention(q, q, q, score_mod=rule, operands=operands)
    operand: Any
    for operand in (3.0, None, [1.0], np.zeros(2, complex), np.array(["a"]), np.zeros(2, "datetime64[s]")):
        with pytest.raises(TypeError, match=r"operands\[1\]"):
            cuflash.attention(q, q, q, score_mod=rule, operands=(np.zeros(1), operand))
    with pytest.raises(TypeError, match="takes 5 values and 1 operands"):
        cuflash.attention(q, q, q, score_mod=lambda s, b, h, i, j: s, operands=(np.zeros(1),))
    with pytest.raises(ValueError, match="operands"):
        cuflash.attention_vjp(q, q, q)[1](q, grads=("operands",))
    _, backward = cuflash.attention_vjp(q, q, q, score_mod=rule, operands=(np.zeros(2),))
    with pytest.raises(TypeError, match=r"doperands\[0\]"):
        backward(q, out=(None, None, None, np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match=r"doperands\[0\]"):
        backward(q, out=(None, None, None, np.zeros(3)))
    shared = np.zeros(2)
    _, backward = cuflash.attention_vjp(q, q, q, score_mod=rule, operands=(shared,))
    with pytest.raises(ValueError, match=r"operands\[0\]"):
        backward(q, out=(None, None, None, shared))


class Counted:
    """A rule that counts how often it was traced."""

    def __init__(self, **names: Any) -> None:
        self.calls = 0
        module = types.ModuleType("rules_of_a_test")
        vars(module).update(count=self._count, **names)
        text = "def rule(s, b, h, i, j, *operands, factor=1.0):\n    count()\n    return s * SCALE * factor\n"
        exec(compile(text, "rules_of_a_test.py", "exec"), vars(module))
        self.module = module
        self.rule = vars(module)["rule"]

    def _count(self) -> None:
        self.calls += 1


def test_a_function_is_traced_once() -> None:
    counted = Counted(SCALE=2.0)
    q = RNG.standard_normal((1, 3, 1, 4))
    call: Callable[..., Any] = lambda *operands: cuflash.attention(q, q, q, score_mod=counted.rule, operands=operands)  # noqa: E731
    first = call()
    assert (call() == first).all() and counted.calls == 1
    cuflash.attention_vjp(q[:, :2], q, q, score_mod=counted.rule)[1](q[:, :2])
    assert counted.calls == 1
    vars(counted.module)["UNRELATED"] = 1
    call()
    assert counted.calls == 1
    vars(counted.module)["SCALE"] = 3.0
    second = call()
    assert counted.calls == 2 and (second != first).any()
    counted.rule.__kwdefaults__ = {"factor": 2.0 / 3.0}
    np.testing.assert_allclose(call(), first)
    assert counted.calls == 3
    call(np.zeros(3))
    call(np.ones(3))
    assert counted.calls == 4
    for operands in ((np.zeros(4),), (np.zeros(3, np.float32),), (np.zeros(3), np.zeros(1))):
        before = counted.calls
        call(*operands)
        call(*operands)
        assert counted.calls == before + 1


def test_names_of_a_closure_are_followed() -> None:
    scale = 2.0
    calls = []

    def helper(s: Any) -> Any:
        return s * scale

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        calls.append(1)
        return helper(s)

    assert value(score(rule), 1.0) == 2
    scale = 5.0
    assert value(score(rule), 1.0) == 5 and len(calls) == 2
    score(rule)
    assert len(calls) == 2


def test_equal_rules_are_one() -> None:
    """Two functions of one expression share kernels; shapes are constants only where the function reads them."""
    make: Callable[..., Any] = lambda factor: lambda s, b, h, i, j, t: s * factor + t[h, i]  # noqa: E731
    kinds = (OperandType((4, 7), "float32"),), (OperandType((5, 9), "float32"),)
    one, same, other = (trace_rules(make(x), None, kinds[0], "float32") for x in (2.0, 2.0, 3.0))
    assert one == same and hash(one) == hash(same) and one != other
    assert trace_rules(make(2.0), None, kinds[1], "float32") == one
    sized: Callable[..., Any] = lambda s, b, h, i, j, t: s + t.shape[1] * t.ndim + t[h, i]  # noqa: E731
    first, second = (trace_rules(sized, None, kind, "float32") for kind in kinds)
    assert first != second


def test_functions_are_forgotten() -> None:
    import gc
    import weakref

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 2

    score(rule)
    gone = weakref.ref(rule)
    del rule
    gc.collect()
    assert gone() is None


def test_explain() -> None:
    def rule(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return np.tanh(s) + table[h, i]

    text = explain(rule, np.zeros((4, 7)))
    for part in (
        "(tanh(s) + operands[0][h, i])",
        "derivative by s",
        "1.0 - ",
        "derivative by operands[0][h, i]",
        "Accum value(Accum s, int i, int j)",
        "differentiate",
    ):
        assert part in text
    assert "visible" in explain(lambda b, h, i, j: i >= j)
    assert cuflash.rules.explain is explain
    with pytest.raises(TypeError, match="function: expected"):
        explain(lambda s, t: s)
    with pytest.raises(ValueError, match="option"):
        explain(rule, option="bias_mod")


def test_a_repeated_look_up_is_short() -> None:
    """A repeated call traces nothing, as the function is not called again."""
    counted = Counted(SCALE=1.5)
    for _ in range(100):
        trace_rules(counted.rule, None, (), "float32")
    assert counted.calls == 1
    assert "rules_of_a_test" not in sys.modules
