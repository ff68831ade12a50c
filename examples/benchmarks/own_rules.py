"""Rules of one's own beside cuflash's options of the same meaning and torch's FlexAttention, forward and backward.

    python examples/benchmarks/own_rules.py [--commit COMMIT] [--json FILE]

Each rule is first held against the option: out and gradients may differ by no more than roundings. Then figures are
TFLOP/s of visible pairs at the median time, in bfloat16, with 16 heads and a batch of 1; rounds are interleaved.
FlexAttention is compiled by torch.compile, whose seconds are shown; without torch it is left out, and so it is where
`--seconds` have passed. It needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import recording

import cuflash
from cuflash.tools.bench.cells import BACKWARD, FORWARD
from cuflash.tools.bench.clock import Stopwatch

HEADS, CAP, WINDOW, REACH = 16, 20.0, 1024, 64
DIRECTIONS = (FORWARD, BACKWARD)
OWN, OPTION, FLEX = "own rule", "option", "flex"
# Results in bfloat16 may differ by so much of their largest element: a few roundings of weights and results.
TOLERANCE = 0.02
Call = Callable[[], Any]


def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Bound the scores, as Gemma 2 does."""
    return CAP * np.tanh(s / CAP)


def within(b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:
    """Show the last keys alone."""
    return (j <= i) & (i - j <= WINDOW)


def sloped(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    """Subtract ALiBi's term."""
    return s - slopes[h] * abs(i - j)


def before(b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:
    """Show no later key."""
    return j <= i


def same_document(b: Any, h: Any, i: Any, j: Any, document: Any) -> Any:
    """Show the keys of the query's document."""
    return document[i] == document[j]


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Add a number of a table by the distance."""
    return s + table[h, np.clip(j - i, -REACH, REACH) + REACH]


@dataclass
class Rule:
    """One rule at one length: as the user writes it, and as cuflash's options say it."""

    name: str
    seqlen: int
    pairs: int  # visible pairs of a head
    score_mod: Any = None
    mask_mod: Any = None
    operands: tuple[Any, ...] = ()
    option: dict[str, Any] = field(default_factory=dict)
    wants_operands: bool = False  # the gradient of the operands is wanted, too

    @property
    def own(self) -> dict[str, Any]:
        """The rule's keywords."""
        of_rule = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: x for name, x in of_rule.items() if x is not None} | {"operands": self.operands}

    @property
    def grads(self) -> tuple[str, ...]:
        """The gradients that are wanted."""
        return ("q", "k", "v", "operands") if self.wants_operands else ("q", "k", "v")


def rules_of(xp: Any, seqlen: int, short: int) -> list[Rule]:
    """Return the rules for sequences of `seqlen`, those with a table for `short` ones."""
    rng = np.random.default_rng(0)
    slopes = xp.asarray(2.0 ** -np.arange(0.5, HEADS / 2 + 0.5, 0.5), dtype="float32")
    sizes = np.diff([0, *np.sort(rng.choice(np.arange(1, seqlen), 7, replace=False)), seqlen])
    document = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    blocks = cuflash.BlockMask.from_function(lambda b, h, i, j: document[i] == document[j], seqlen, seqlen)
    table = xp.asarray(rng.standard_normal((HEADS, 2 * REACH + 1)), dtype="float32")
    places = xp.clip(xp.arange(short) - xp.arange(short)[:, None], -REACH, REACH) + REACH
    seen = np.minimum(np.arange(seqlen), WINDOW) + 1
    biased: dict[str, Any] = {"score_mod": relative, "operands": (table,), "option": {"bias": table[:, places][None]}}
    return [
        Rule("softcap window", seqlen, int(seen.sum()), capped, within, (), {"softcap": CAP, "window": (WINDOW, 0)}),
        Rule(
            "alibi causal",
            seqlen,
            seqlen * (seqlen + 1) // 2,
            *(sloped, before, (slopes,), {"alibi_slopes": slopes, "causal": True}),
        ),
        Rule(
            "documents",
            seqlen,
            int((sizes.astype(np.int64) ** 2).sum()),
            *(None, same_document, (xp.asarray(document),), {"block_mask": blocks}),
        ),
        Rule("relbias", short, short**2, **biased),
        Rule("relbias_grad", short, short**2, **biased, wants_operands=True),
    ]


def cuflash_calls(rule: Rule, arrays: Any, options: dict[str, Any], grads: tuple[str, ...]) -> dict[str, Call]:
    """Return both directions of cuflash with these options."""
    q, k, v, dout = arrays
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return {
        FORWARD: lambda: cuflash.attention(q, k, v, **options),
        BACKWARD: lambda: cuflash.attention_backward(dout, q, k, v, out, lse, grads=grads, **options),
    }


def flex_calls(rule: Rule, arrays: Any) -> dict[str, Call]:
    """Return both directions of FlexAttention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, dout = (torch.from_dlpack(x.view("uint16")).view(torch.bfloat16).transpose(1, 2) for x in arrays)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    operands = [torch.from_dlpack(x) for x in rule.operands]
    if rule.wants_operands:
        operands = [x.detach().requires_grad_() for x in operands]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if rule.score_mod is capped:
            return CAP * torch.tanh(s / CAP)
        if rule.score_mod is sloped:
            return s - operands[0][h] * abs(i - j)
        return s + operands[0][h, torch.clamp(j - i, -REACH, REACH) + REACH]

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return rule.mask_mod(b, h, i, j, *operands)

    n = rule.seqlen
    given: dict[str, Any] = {} if rule.score_mod is None else {"score_mod": score_mod}
    if rule.mask_mod is not None:
        given["block_mask"] = create_block_mask(mask_mod, None, None, n, n, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    inputs = (q, k, v, *(operands if rule.wants_operands else ()))

    def forward() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, **given).transpose(1, 2)

    out = compiled(q, k, v, **given)

    def backward() -> Any:
        dq, dk, dv, *others = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        return (*(x.transpose(1, 2) for x in (dq, dk, dv)), *others)

    return {FORWARD: forward, BACKWARD: backward}


def in_float(x: Any) -> Any:
    """Return a result of any library as float32 on the host."""
    if hasattr(x, "detach"):
        return x.detach().float().cpu().numpy()
    return np.asarray(x.get() if hasattr(x, "get") else x, np.float32)


def error_between(given: dict[str, Call], right: dict[str, Call], operands: int) -> float:
    """Return the largest difference of two results, as a part of each one's largest element."""
    results = []
    for calls in (given, right):
        grads = calls[BACKWARD]()
        results.append([in_float(x) for x in (calls[FORWARD](), *grads[: 3 + operands]) if x is not None])
    worst = 0.0
    for a, b in zip(*results, strict=False):
        worst = max(worst, float(abs(a - b).max() / abs(b).max()))
    return worst


def measure(rule: Rule, head_dim: int, stopwatch: Stopwatch, xp: Any, rounds: int, flex: bool) -> dict[str, Any]:
    """Measure one rule in both directions."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    shape = 1, rule.seqlen, HEADS, head_dim
    arrays = [xp.asarray(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)) for _ in range(4)]
    begin = time.perf_counter()
    own = cuflash_calls(rule, arrays, rule.own, rule.grads)
    own[FORWARD](), own[BACKWARD]()
    xp.cuda.runtime.deviceSynchronize()
    figures: dict[str, Any] = {"rule": rule.name, "head_dim": head_dim, "seqlen": rule.seqlen}
    figures["first_call_s"] = {OWN: time.perf_counter() - begin}
    calls = {OWN: own, OPTION: cuflash_calls(rule, arrays, rule.option, ("q", "k", "v"))}
    figures["error"] = {OWN: error_between(own, calls[OPTION], 0)}
    if flex:
        begin = time.perf_counter()
        calls[FLEX] = flex_calls(rule, arrays)
        calls[FLEX][FORWARD](), calls[FLEX][BACKWARD]()
        xp.cuda.runtime.deviceSynchronize()
        figures["first_call_s"][FLEX] = time.perf_counter() - begin
        figures["error"][FLEX] = error_between(calls[FLEX], own, len(rule.operands) if rule.wants_operands else 0)
    for direction in DIRECTIONS:
        prepared = {name: stopwatch.prepared(each[direction]) for name, each in calls.items()}
        times = stopwatch.interleaved(prepared, rounds)
        work = 4e-9 * head_dim * HEADS * rule.pairs * (1 if direction == FORWARD else 2.5)
        figures[direction] = {name: work / float(np.median(x)) for name, x in times.items()}
    return figures


def has_torch() -> bool:
    """Return True if torch has FlexAttention on this GPU."""
    try:
        import torch
        import torch.nn.attention.flex_attention
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def line_of(figures: dict[str, Any]) -> str:
    """Return a line of the table."""
    cells = [f"{figures['rule']} d{figures['head_dim']} n{figures['seqlen']}"]
    for name in (OWN, OPTION, FLEX):
        speeds = [figures[direction].get(name) for direction in DIRECTIONS]
        cells.append("" if None in speeds else " / ".join(f"{x:.0f}" for x in speeds))
    cells.append(", ".join(f"{x:.1f}" for x in figures["first_call_s"].values()))
    cells.append(", ".join(f"{x:.4f}" for x in figures["error"].values()))
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Measure, print and record; return 1 if a rule's results are not the option's."""
    parser = recording.parser_of(__doc__, "a rule")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(128, 64), metavar="D")
    parser.add_argument("--seqlen", type=int, default=16384, metavar="N", help="of rules without a table")
    parser.add_argument("--short", type=int, default=4096, metavar="N", help="of rules with a table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80, help="after these FlexAttention is left out")
    args = parser.parse_args()
    begin = time.perf_counter()
    xp = recording.gpu_of(parser)
    record = recording.Recorder(args, xp, "own_rules")
    stopwatch, flex = Stopwatch(xp, 12.0), has_torch()
    print(f"TFLOP/s forward / backward; first call in s and error: {OWN}, {FLEX}")
    print(f"| rule | {OWN} | {OPTION} | {FLEX} | first call | error |\n|---|---|---|---|---|---|")
    measured: list[dict[str, Any]] = []
    rules = rules_of(xp, args.seqlen, args.short)
    for head_dim in args.head_dim:
        for rule in rules:
            with_flex = flex and time.perf_counter() - begin < args.seconds
            measured.append(measure(rule, head_dim, stopwatch, xp, args.rounds, with_flex))
            print(line_of(measured[-1]), flush=True)
            record.write(measured)
    wrong = [x["rule"] for x in measured if not x["error"][OWN] <= TOLERANCE]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
