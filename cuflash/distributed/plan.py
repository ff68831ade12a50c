"""``python -m cuflash.distributed plan`` predicts times, link use and memory of a layer's attention on many GPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cuflash.distributed import figures
from cuflash.distributed.predict import Layer, Machine, Pass, Prediction, grids, predict, rate

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BAR = 40  # characters of the longest bar


def parse_count(text: str) -> int:
    """Return a positive integer, which may be written as 512k or 16M (of 1024)."""
    number = text.strip().lower()
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        count = float(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a count such as 4096, 512k or 16M, got {text!r}") from None
    if not 1 <= count < 1 << 50 or count != int(count):
        raise argparse.ArgumentTypeError(f"expected a whole count of at least 1, got {text!r}")
    return int(count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuflash.distributed plan",
        description=f"Predict one layer's attention over many GPUs from figures of one ({figures.CARD}).",
    )
    parser.add_argument("--gpus", type=parse_count, required=True)
    parser.add_argument("--seqlen", type=parse_count, required=True, help="tokens of all GPUs, such as 16M")
    parser.add_argument("--heads", type=parse_count, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=parse_count, help="default: as many as query heads")
    parser.add_argument("--head-dim", type=parse_count, default=128, help="default %(default)s")
    parser.add_argument("--batch", type=parse_count, default=1, help="default %(default)s")
    parser.add_argument("--full", action="store_true", help="every query sees every key (default: causal)")
    parser.add_argument(
        "--gpus-per-host",
        type=parse_count,
        default=figures.GPUS_PER_HOST,
        help="joined by NVLink (default %(default)s)",
    )
    parser.add_argument(
        "--network",
        type=float,
        default=figures.ASSUMED_NETWORK,
        help="GB/s of a GPU's link to other hosts, which nobody measured (default %(default)s)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 0, or 2 for wrong use."""
    args = _parser().parse_args(argv)
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        print(f"--kv-heads: expected a divisor of the {args.heads} query heads, got {kv_heads}", file=sys.stderr)
        return 2
    if not 0 < args.network < float("inf"):
        print(f"--network: expected more than 0 GB/s, got {args.network}", file=sys.stderr)
        return 2
    layer = Layer(args.seqlen, args.heads, kv_heads, args.head_dim, args.batch, not args.full)
    print("\n".join(report(layer, args.gpus, Machine(args.gpus_per_host, args.network))))
    return 0


def report(layer: Layer, gpus: int, machine: Machine) -> list[str]:
    """Return a plan's lines: a table of all ways, the fastest that fits as a picture, and how far figures are off."""
    ways = grids(layer, gpus, machine)
    fitting = [way for way in ways if way.memory <= figures.GPU_MEMORY]
    best = min(fitting or ways, key=lambda way: way.seconds)
    kind = "causal" if layer.causal else "full"
    lines = [
        f"{_gpus(gpus)} ({figures.CARD}), {machine.gpus_per_host} a host: one layer, {kind}, {layer.seqlen} tokens x "
        f"{layer.batch}, heads {layer.num_heads_q}/{layer.num_heads_kv} of {layer.head_dim}",
        "",
        f"{'scheme':8} {'ring x heads':>14} {'forward':>10} {'backward':>10} {'step':>10} {'TFLOP/s a GPU':>14} "
        f"{'link use':>9} {'memory':>9}",
    ]
    for way in ways:
        lines.append(_row(layer, way, gpus) + ("  <- fastest" if way is best else ""))
    if not fitting:
        lines.append(f"\nnone of these fits the {figures.GPU_MEMORY / 2**30:.0f} GiB of a GPU")
    return [*lines, "", *picture(best, machine), "", *held_against(machine)]


def _row(layer: Layer, way: Prediction, gpus: int) -> str:
    forward, backward = way.forward, way.backward
    both = rate(layer, way.seconds, gpus, backward=False) + rate(layer, way.seconds, gpus, backward=True)
    use = (forward.link_busy + backward.link_busy) / way.seconds
    return (
        f"{way.name:8} {f'{way.ring} x {way.heads}':>14} {_time(forward.seconds):>10} {_time(backward.seconds):>10} "
        f"{_time(way.seconds):>10} {both:14.0f} {use:9.0%} {way.memory / 2**30:5.1f} GiB"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def picture(way: Prediction, machine: Machine) -> list[str]:
    """Draw what a GPU and its link do, and which GPUs belong together."""
    lines = [f"{way.ring} x {way.heads}: {_who(way, machine)}", f"  by {_call_of(way)}"]
    for name, of_pass in (("forward", way.forward), ("backward", way.backward)):
        if way.ring > 1:
            lines += [f"  {name}, each of {way.ring} steps", *_bars(of_pass)]
        else:
            lines += [f"  {name}", *_bars(of_pass)]
    return lines


def _who(way: Prediction, machine: Machine) -> str:
    if way.ring * way.heads == 1:
        return "one GPU alone"
    parts = []
    if way.heads > 1:
        where = "within a host" if way.heads <= machine.gpus_per_host else "across hosts"
        parts.append(f"{way.heads} GPUs deal heads among them {where}")
    if way.ring > 1:
        where = "within a host" if way.ring * way.heads <= machine.gpus_per_host else "from host to host"
        parts.append(f"keys go around {way.ring} {where}: " + "[GPU] -> [GPU] -> .. -> back")
    return "; ".join(parts)


def _call_of(way: Prediction) -> str:
    """Return the call that computes so."""
    if way.ring * way.heads == 1:
        return "attention(q, k, v)"
    if way.ring == 1:
        return "ulysses_attention(q, k, v, comm)"
    grid = f", heads={way.heads}" if way.heads > 1 else ""
    return f"ring_attention(q, k, v, comm{grid})"


def _bars(of_pass: Pass) -> list[str]:
    compute, link = of_pass.step_compute, of_pass.step_link
    rows = [("compute", "#", compute), ("link", "=", link)]
    longest = max(compute, link)
    lines = [
        f"    {name:8}|{sign * max(1, round(_BAR * x / longest)):{_BAR}}| {_time(x)}" for name, sign, x in rows if x
    ]
    if of_pass.exposed:
        lines.append(f"    waiting for links, of the whole pass: {_time(of_pass.exposed)}")
    return lines


def held_against(machine: Machine) -> list[str]:
    """Say how far predictions are off what was measured, or that nothing was."""
    lines = ["predictions held against measurements (TFLOP/s a GPU, causal):"]
    for gpus in figures.HELD_AGAINST:
        found = [measured for measured in figures.MEASURED if measured.gpus == gpus]
        if not found:
            lines.append(f"  {_gpus(gpus)}: not measured yet, so nothing is known of the error")
        for measured in found:
            layer = Layer(measured.seqlen, measured.num_heads_q, measured.num_heads_kv, measured.head_dim)
            heads = gpus if measured.scheme == "heads" else 1
            way = predict(layer, gpus // heads, heads, machine)
            errors = [
                _error(name, rate(layer, of_pass.seconds, gpus, backward=name == "backward"), known)
                for name, of_pass, known in (
                    ("forward", way.forward, measured.forward),
                    ("backward", way.backward, measured.backward),
                )
            ]
            what = f"{measured.seqlen} tokens, {measured.num_heads_q} heads of {measured.head_dim}"
            lines.append(f"  {_gpus(gpus)}, {measured.scheme}, {what}: {'; '.join(errors)}")
    return lines


def _error(name: str, predicted: float, measured: float) -> str:
    return f"{name} {predicted:.0f} predicted, {measured:.0f} measured ({predicted / measured - 1:+.1%})"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
