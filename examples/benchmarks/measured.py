"""Sections of docs/measured.md on training and on bytes moved, from the records in docs/lab/results.

`tables.py` writes it. The files are those of ``train_gpt2 --compare --json``, ``mytorch_client.py --json`` and
``paper.py --io``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import curves
import numpy as np
import pages
from recorded import US, geometric_mean, milliseconds, of_fastest, towards

from cuflash.tools.bench.records import Record
from cuflash.tools.bench.records import read as read_record
from cuflash.tools.bench.report import QUANTILES, SHORT_US, WORST

Figures = dict[str, Any]

OWN, BASELINE = "own", "baseline"
GPT2_BARS = {1024: 1.5, 4096: 3.0}  # context: speed of a step as a multiple of the baseline's
BFLOAT16, EIGHT_BITS = "bfloat16", "8 bits"
LAYERS, WIDTH = 12, 768  # of GPT-2 small
PEAK_TFLOPS = 989  # dense, 16 bits, of an H200


def read(folder: Path, name: str) -> Record | None:
    """One file, if it is there."""
    path = folder / f"{name}.jsonl"
    return read_record(path) if path.exists() else None


def by_attention(record: Record) -> dict[str, Figures]:
    """A record's cells by the attention that they are of."""
    return {cell["attention"]: cell for cell in record.cells}


def gpt2_records(folder: Path) -> list[Record]:
    """Compared training steps, those in bfloat16 alone before those with products in 8 bits."""
    found = (read(folder, f"gpt2_{context}{kind}") for kind in ("", "_fp8") for context in GPT2_BARS)
    return [record for record in found if record]


def _products(run: Figures) -> str:
    """Say what the products with weights are of."""
    return EIGHT_BITS if run.get("fp8") else BFLOAT16


def gpt2_bars(folder: Path) -> list[list[str]]:
    """A row of the table of bars for each context, which bfloat16 has to reach; what 8 bits do stands in brackets."""
    records = gpt2_records(folder)
    speeds = {
        (r.facts["run"]["context"], _products(r.facts["run"])): by_attention(r)[US]["speed_of_baseline"]
        for r in records
    }
    rows = []
    for record in records:
        run = record.facts["run"]
        if run.get("fp8"):
            continue
        speed = speeds[run["context"], BFLOAT16]
        bar, beside = GPT2_BARS[run["context"]], speeds.get((run["context"], EIGHT_BITS))
        what = f"step of GPT-2 small in bfloat16, {_tokens(run)} tokens: speed of attention by cuBLAS"
        shown = towards(speed, 2) + (f" ({towards(beside, 2)} with --fp8)" if beside else "")
        rows.append(
            [what, f"at least {bar:g}", shown, "yes" if speed >= bar else "no", pages.short_commit(record.facts)]
        )
    return rows


def _tokens(run: Figures) -> str:
    return f"{run['batch']} x {run['context']}"


def gpt2(folder: Path) -> str:
    """The steps of GPT-2, and what the bars leave for attention."""
    records = gpt2_records(folder)
    what = ["layers in", "context"]
    steps = [[*what, "attention", "ms a step", "of it attention", "share", "tokens/s", "speed"]]
    bars = [[*what, "bar", "asks for a step of", "leaves attention", "that is", "attention takes", "that is"]]
    for record in records:
        run, results = record.facts["run"], by_attention(record)
        context = run["context"]
        head = [_products(run), str(context)]
        for name in (BASELINE, US):
            r = results[name]
            own, share = f"{r['attention_ms']:.1f}", f"{r['attention_share']:.0%}"
            speed = towards(r["speed_of_baseline"], 2)
            line = [*head, name, f"{r['step_ms']:.1f}", own, share, f"{r['tokens_per_second']:,.0f}", speed]
            steps.append(line)
        ours, bar = results[US], GPT2_BARS[context]
        asked = results[BASELINE]["step_ms"] / bar
        left = asked - (ours["step_ms"] - ours["attention_ms"])
        rates = [
            f"{_attention_tflop(run) / (ms / 1e3):,.0f} TFLOP/s" if ms > 0 else "-"
            for ms in (left, ours["attention_ms"])
        ]
        times = [f"{ms:.1f} ms" for ms in (asked, left, ours["attention_ms"])]
        bars.append([*head, f"{bar:g}", *times[:2], rates[0], times[2], rates[1]])
    faster = " and ".join(
        towards(cells[BASELINE]["attention_ms"] / cells[US]["attention_ms"], 1)
        for cells in map(by_attention, records[: len(GPT2_BARS)])
    )
    return "\n".join(
        [
            pages.origin(records[0].facts) + "\n",
            pages.table(steps),
            f"Attention itself is {faster} times as fast. What the bars ask of it beside the rest of",
            f"cuflash's step (the tensor cores' dense peak is {PEAK_TFLOPS} TFLOP/s):\n",
            pages.table(bars),
        ]
    )


def _attention_tflop(run: Figures) -> float:
    """Causal attention of all layers, forward and backward."""
    forward = 4 * run["batch"] * run["context"] ** 2 * WIDTH / 2
    return LAYERS * 3.5 * forward / 1e12


def loss(folder: Path) -> str:
    """How training went, in bfloat16 and with products in 8 bits."""
    rows = [["layers in", "first loss", "mean of the last ten", "of the text held out"]]
    for name in ("gpt2_loss", "gpt2_loss_fp8"):
        record = read(folder, name)
        if record is not None:
            (curve,) = record.cells
            losses = curve["losses"]
            last = sum(losses[-10:]) / 10
            what = _products(record.facts["run"])
            rows.append([what, f"{losses[0]:.2f}", f"{last:.3f}", f"{curve['validation']:.3f}"])
    return pages.table(rows)


def draw_loss(folder: Path, path: Path) -> None:
    """The mean of four steps' losses, in bfloat16 and with products in 8 bits."""
    figure = curves.new_figure(8, 4.5)
    axes = figure.subplots()
    for name, style in zip(("gpt2_loss", "gpt2_loss_fp8"), curves.STYLES[:2], strict=True):
        record = read(folder, name)
        if record is not None:
            (curve,) = record.cells
            losses = curve["losses"]
            means = [sum(losses[first : first + 4]) / 4 for first in range(0, len(losses) - 3, 4)]
            steps = range(4, 4 * len(means) + 1, 4)
            axes.plot(steps, means, label=f"layers in {_products(record.facts['run'])}", **style.of_line())
    axes.set(xlabel="step", ylabel="loss (nats a byte), mean of four steps")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", frameon=False)
    curves.save(figure, path)


def moved(folder: Path) -> str:
    """Bytes between L2 and the multiprocessors, beside the theorem's."""
    record = read(folder, "paper_io")
    if record is None:
        return "No count has been recorded.\n"
    rows = [["", "n", "naive", US, "times less", "N² d² / M", "cuflash, times this", "DRAM: naive", "DRAM: cuflash"]]
    keys = dict.fromkeys((r["direction"], r["n"]) for r in record.cells)
    for direction, n in keys:
        own = {r["method"]: r for r in record.cells if (r["direction"], r["n"]) == (direction, n)}
        ours, naive = own[US], own.get("naive")
        theorem = ours["theorem_bytes"]
        line = [direction, str(n), _megabytes(naive, "l2_bytes"), _megabytes(ours, "l2_bytes")]
        line.append("-" if naive is None else towards(naive["l2_bytes"] / ours["l2_bytes"], 1))
        line += [f"{theorem / 1e6:,.1f}", f"{ours['l2_bytes'] / theorem:.1f}"]
        rows.append([*line, _megabytes(naive, "dram_bytes"), _megabytes(ours, "dram_bytes")])
    return f"{pages.origin(record.facts)} In MB; M is {record.facts['fast_bytes'] // 1024} KiB.\n\n{pages.table(rows)}"


def _megabytes(result: Figures | None, name: str) -> str:
    return "-" if result is None else f"{result[name] / 1e6:,.1f}"


def mytorch(folder: Path) -> str:
    """MyTorch's attention beside cuflash in its place."""
    record = read(folder, "mytorch")
    if record is None:
        return "Not recorded yet.\n"
    rows = [["float16, causal", "its own, ms", "cuflash, ms", "speed"]]
    compared = [cell for cell in record.cells if cell["compared"] == "attention"]
    training = {cell["attention"]: cell for cell in record.cells if cell["compared"] == "training"}
    for cell in compared:
        own, ours = (cell["ms"][name] for name in (OWN, US))
        what = f"attention, forward and backward, {cell['batch']} x {cell['context']}, 12 heads of 64"
        rows.append([what, f"{own:.2f}", f"{ours:.2f}", towards(own / ours, 2)])
    own, ours = (training[name]["ms_a_step"] for name in (OWN, US))
    what = f"a step of its training script, {record.facts['size']}, {record.facts['batch']} x 1024"
    rows.append([what, f"{own:.1f}", f"{ours:.1f}", towards(own / ours, 2)])
    losses = " and ".join(
        f"{training[name]['losses'][0]:.2f} to {training[name]['losses'][-1]:.2f}" for name in (OWN, US)
    )
    steps = len(training[US]["losses"])
    apart = max(max(cell["differences"]) for cell in compared)
    return (
        f"{pages.origin(record.facts)}\n\n{pages.table(rows)}\n"
        f"Result and gradients differ by at most {apart:.1e} in norm; the loss goes in {steps} steps from {losses}.\n"
    )


def random_shapes(folder: Path) -> str:
    """Quantiles of the speed on shapes drawn at random over the fastest peer's, and the shapes where it is least."""
    record = read(folder, "random_shapes")
    if record is None:
        return "Not recorded yet.\n"
    rows = [["direction", "time", "shapes", "geometric mean", *(f"{q}%" for q in QUANTILES)]]
    slowest = [["direction", "shape", *(f"{name}, us" for name in (US, "fa3", "cudnn")), "of the fastest peer"]]
    for direction in ("forward", "backward"):
        rated = [r for r in record.cells if r["direction"] == direction and r["speed_of_fastest_peer"]]
        for name, is_short in ((f"above {SHORT_US} us", False), (f"up to {SHORT_US} us", True)):
            ratios = [of_fastest(r) for r in rated if (1e3 * milliseconds(r) <= SHORT_US) == is_short]
            if ratios:
                quantiles = (towards(float(x), 2) for x in np.percentile(ratios, QUANTILES))
                rows.append(
                    [direction, name, str(len(ratios)), towards(geometric_mean(ratios), 2), *map(str, quantiles)]
                )
        for r in sorted(rated, key=of_fastest)[:WORST]:
            times = [
                f"{1e3 * milliseconds(r, name):.1f}" if name in r["peers"] else "-" for name in (US, "fa3", "cudnn")
            ]
            slowest.append([direction, r["cell"]["name"], *times, towards(of_fastest(r), 2)])
    seed = f"The seed is {record.facts['seed']}; times are of the device, in CUDA graphs."
    return f"{pages.origin(record.facts)} {seed}\n\n{pages.table(rows)}\n{pages.table(slowest)}"


SECTIONS = {"random": random_shapes, "gpt2": gpt2, "loss": loss, "moved": moved, "mytorch": mytorch}
