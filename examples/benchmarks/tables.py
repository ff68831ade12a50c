"""Write every table of figures, and the pictures, from the records in docs/lab/results.

    python examples/benchmarks/tables.py            # write them
    python examples/benchmarks/tables.py --check    # fail if a table is not what the files say

The tables stand in README.md, docs/measured.md and docs/lab/results/README.md, the pictures beside the latter and in
docs/pictures. No figure in them is typed by hand, and each table names the commit that it is of.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import beyond
import counters
import curves
import measured
import pages
import paper
import paper_io
from bars import BARS, DENSE_BAR, NOT_MEASURED, host_row
from recorded import (
    RESULTS,
    US,
    Recorded,
    Result,
    geometric_mean,
    milliseconds,
    of_fastest,
    of_peer,
    of_plain,
    towards,
)

from cuflash.tools.bench import records

ROOT = Path(__file__).parents[2]
README, MEASURED, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md", RESULTS / "README.md"
PICTURES = ROOT / "docs" / "pictures"
PEER_NAMES = {
    "cuflash": "cuflash",
    "plain": "cuflash, plain",
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "torch, memory-efficient",
    "naive": "naive CuPy",
}
PAGE_HEAD = """# Recorded figures

Made by `python examples/benchmarks/tables.py` from the records beside it, which `python -m cuflash bench --json`
wrote; how a figure comes about is told in [NOTES.md](../NOTES.md). Times are medians of five interleaved rounds.
"""
ERRORS_HEAD = """From [errors.jsonl](errors.jsonl).

Against float64, as a multiple of FlashAttention-3's, with the standard error over heads: the mean error over all
elements, and the mean over heads of each head's largest error.
"""
COUNTERS_HEAD = """From [counters.jsonl](counters.jsonl).

By ncu, of the cell with the best and the worst ratio to its fastest peer; of a pass the kernel that takes longest. A
stall is how many warps wait for that reason whenever an instruction is issued; the three largest are shown.
"""
BOTH = ("forward", "backward")
# The names by which `bench --json`, `host.py`, `errors.py` and `counters.py` call themselves.
COMMANDS = ("bench", "host", "errors", "counters")


def load(folder: Path) -> list[Recorded]:
    """All files that `python -m cuflash bench`, `errors.py` and the like wrote on a GPU, each with its facts.

    Cells that were drawn from a seed stand in docs/measured.md alone.
    """
    recorded = []
    for path in sorted(folder.glob("*.jsonl")):
        facts, cells = records.read(path)
        if facts.get("command") in COMMANDS and "gpu" in facts and "seed" not in facts:
            recorded.append(Recorded((path.name,), facts, {facts["command"]: cells}))
    return merged(recorded)


def grid(results: Iterable[Result], measure: Any) -> str:
    """A dense suite: TFLOP/s, and the ratio to the peer in brackets, with a cross where it misses the bar."""
    chosen = list(results)
    seqlens = sorted({r["cell"]["seqlen_q"] for r in chosen})
    rows = [["head dim", "mask", *(f"n {_short(n)}" for n in seqlens)]]
    lines: dict[tuple[int, bool], dict[int, str]] = {}
    ratios = []
    for r in chosen:
        cell, ratio = r["cell"], measure(r)
        text = f"{r['peers'][US]['tflops']:.0f}"
        if not math.isnan(ratio):
            ratios.append(ratio)
            text += f" ({towards(ratio, 2)}{'' if ratio >= DENSE_BAR else ' ✗'})"
        lines.setdefault((cell["head_dim"], cell["causal"]), {})[cell["seqlen_q"]] = text
    for (head_dim, causal), line in sorted(lines.items()):
        rows.append([str(head_dim), "causal" if causal else "full", *(line.get(n, "-") for n in seqlens)])
    text = pages.table(rows)
    if ratios:
        mean, met = towards(geometric_mean(ratios), 3), sum(ratio >= DENSE_BAR for ratio in ratios)
        text += f"\nGeometric mean of the ratios {mean}; {met} of {len(ratios)} reach {DENSE_BAR}.\n"
    return text


def listing(results: Iterable[Result]) -> str:
    """Any other suite: a row a cell, milliseconds a peer."""
    chosen = list(results)
    peers = [name for name in PEER_NAMES if any(name in r["peers"] for r in chosen)]
    columns = [
        ["cell", *(r["cell"]["name"] for r in chosen)],
        ["TFLOP/s", *(f"{r['peers'][US]['tflops']:.1f}" for r in chosen)],
        *([f"{PEER_NAMES[name]}, ms", *(_figure(milliseconds(r, name), 4) for r in chosen)] for name in peers),
        ["of the fastest peer", *(_figure(of_fastest(r), 3) for r in chosen)],
        ["of plain", *(_figure(of_plain(r), 3) for r in chosen)],
    ]
    return pages.table(list(zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True)))


def float32_grid(record: Recorded) -> str:
    """The float32 suite: TFLOP/s, and the ratio to torch's memory-efficient kernel in brackets."""
    kinds = [(direction, kind) for kind in ("float32", "tf32") for direction in ("forward", "backward")]
    rows = [
        ["head dim", "mask", *(f"{direction}, {'exact' if kind == 'float32' else 'TF32'}" for direction, kind in kinds)]
    ]
    lines: dict[tuple[int, bool], dict[tuple[str, str], str]] = {}
    for r in record.results:
        cell = r["cell"]
        if (cell["suite"], cell["dtype"]) == ("float32", "float32") and US in r["peers"]:
            kind = "tf32" if cell["options"] else "float32"
            ratio = of_peer("efficient")(r)
            text = f"{r['peers'][US]['tflops']:.0f}" + ("" if math.isnan(ratio) else f" ({towards(ratio, 1)})")
            lines.setdefault((cell["head_dim"], cell["causal"]), {})[r["direction"], kind] = text
    for (head_dim, causal), line in sorted(lines.items()):
        rows.append([str(head_dim), "causal" if causal else "full", *(line.get(kind, "-") for kind in kinds)])
    return pages.table(rows)


def errors(results: Iterable[Result]) -> str:
    """Mean and largest errors against float64 beside each peer's, where they are of a whole head."""
    chosen = [r for r in results if r["cell"]["seqlen_q"] == 1024 and r["peers"][US]["errors"]]
    peers = [name for name in PEER_NAMES if any(r["peers"].get(name, {}).get("errors") for r in chosen)]
    rows = [["cell", "result", *(f"{PEER_NAMES[name]}, mean / max" for name in peers)]]
    for r in chosen:
        for result in r["peers"][US]["errors"]:
            found = [(r["peers"].get(name, {}).get("errors") or {}).get(result) for name in peers]
            shown = [f"{error['mean']:.2g} / {error['max']:.2g}" if error else "-" for error in found]
            rows.append([r["cell"]["name"], result, *shown])
    return pages.table(rows) if chosen else ""


def errors_of_all_heads(cells: Iterable[dict[str, Any]]) -> str:
    """Tell what `errors.py` found: ratios to FlashAttention-3's errors, with their standard errors."""
    columns = [(name, kind) for name in ("out", "dq", "dk", "dv") for kind in ("mean", "max")]
    rows = [["cell", "heads", *(f"{name}, {kind}" for name, kind in columns)]]
    for measured_cell in cells:
        cell, results = measured_cell["cell"], measured_cell["results"]
        ratios = [results.get(name, {}).get(kind) for name, kind in columns]
        shown = [f"{x['ratio']:.4f} ± {x['se']:.4f}" if x else "-" for x in ratios]
        rows.append([f"{cell['dtype']} {cell['name']}", str(measured_cell["heads"]), *shown])
    return pages.table(rows)


def _short(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _figure(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def merged(recorded: Sequence[Recorded]) -> list[Recorded]:
    """The same, with the files of one commit, kind of kernels and machine as one."""
    together: dict[tuple[str, ...], Recorded] = {}
    for record in recorded:
        facts = record.facts
        key = tuple(str(facts.get(name)) for name in ("commit", "without_wgmma", "gpu", "driver", "nvrtc"))
        if key in together:
            first = together[key]
            cells = {name: [*first.cells.get(name, []), *record.cells.get(name, [])] for name in COMMANDS}
            record = Recorded(first.files + record.files, {**first.facts, **facts}, cells)
        together[key] = record
    return list(together.values())


def _groups(record: Recorded) -> dict[tuple[str, str, str], list[Result]]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for r in record.results:
        if US in r["peers"]:
            groups.setdefault((r["cell"]["suite"], r["direction"], r["cell"]["dtype"]), []).append(r)
    return groups


def page(recorded: Sequence[Recorded], folder: Path = RESULTS) -> str:
    """The page of all figures."""
    parts = [PAGE_HEAD, "## The bars\n", bars_table(bars_rows(recorded, folder))]
    sections = [(record, *key, results) for record in recorded for key, results in _groups(record).items()]
    sections.sort(key=lambda section: (section[1] != "dense", section[0].is_mma))
    for record in recorded:
        if record.cells.get("errors"):
            parts.append("## Errors of all heads\n")
            parts.append(f"{pages.origin(record.facts)} {ERRORS_HEAD}")
            parts.append(errors_of_all_heads(record.cells["errors"]))
        if record.cells.get("counters"):
            parts.append("## Hardware counters\n")
            parts.append(f"{pages.origin(record.facts)} {COUNTERS_HEAD}")
            parts.append(counters.table(record.cells["counters"]))
    for record, suite, direction, dtype, results in sections:
        files = ", ".join(f"[{file}]({file})" for file in record.files)
        parts.append(f"## {suite}: {direction}, {dtype}{', mma.sync' if record.is_mma else ''}\n")
        parts.append(f"{pages.origin(record.facts)} From {files}.\n")
        if suite != "dense":
            parts.append(listing(results))
            continue
        peer = "FlashAttention-2" if record.is_mma else "the faster of FlashAttention-3 and cuDNN"
        parts.append(f"TFLOP/s, and the ratio to {peer}.\n")
        parts.append(grid(results, of_peer("flash") if record.is_mma else of_fastest))
        parts.append(errors(results))
        parts.append(f"<details><summary>Every peer</summary>\n\n{listing(results)}\n</details>\n")
    parts += beyond.sections(folder)
    return "\n".join(part for part in parts if part)


def bars_rows(recorded: Sequence[Recorded], folder: Path = RESULTS) -> list[list[str]]:
    """Every bar, and whether it is reached."""
    rows = [*(bar.row(recorded) for bar in BARS), host_row(recorded)]
    return rows + measured.gpt2_bars(folder) + beyond.bars(folder)


def bars_table(rows: Sequence[list[str]]) -> str:
    """The same as a table."""
    return pages.table([["what", "bar", "measured", "reached", "commit"], *rows])


def kernels_section(recorded: Sequence[Recorded]) -> str:
    """Return what docs/measured.md shows of kernels: the dense tables in bfloat16, and float32."""
    parts = []
    for direction in ("forward", "backward"):
        for record in recorded:
            results = _groups(record).get(("dense", direction, "bfloat16"))
            if results and not record.is_mma:
                parts += [f"**{direction.capitalize()}.** {pages.origin(record.facts)}\n", grid(results, of_fastest)]
    for record in recorded:
        if not record.is_mma and any(r["cell"]["suite"] == "float32" for r in record.results):
            parts += [
                f"**float32**, n 4k, exact and with TF32's error. {pages.origin(record.facts)}\n",
                float32_grid(record),
            ]
    aims = bars_rows(recorded)
    rows = [row for row in aims if row[2:] != [*NOT_MEASURED]]
    reached = sum(row[3] == "yes" for row in rows)
    text = f"Of what is aimed at, with all options and dtypes, {reached} of {len(rows)} are reached"
    text += f", {len(aims) - len(rows)} not measured" if len(rows) < len(aims) else ""
    parts.append(f"{text}: [the bars](lab/results/README.md#the-bars).\n")
    return "\n".join(parts)


def readme_section(recorded: Sequence[Recorded], folder: Path = RESULTS) -> str:
    """README.md's table: a row a dtype and its peers, of each direction the mean ratio, the least and the most."""
    hopper = [record for record in recorded if not record.is_mma]

    def ratios(direction: str, suite: str, dtype: str, measure: Any, options: bool) -> list[float]:
        results = [r for record in hopper for r in _groups(record).get((suite, direction, dtype), [])]
        found = [measure(r) for r in results if bool(r["cell"]["options"]) == options]
        return [ratio for ratio in found if not math.isnan(ratio)]

    fastest = "the faster of FlashAttention-3 and cuDNN"
    efficient = "torch's memory-efficient kernel"
    kinds = (
        ("bfloat16", fastest, "dense", "bfloat16", of_fastest, False),
        ("float16", fastest, "dense", "float16", of_fastest, False),
        ("float32, with float32's error", efficient, "float32", "float32", of_peer("efficient"), False),
        ('float32, `precision="tf32"`', efficient, "float32", "float32", of_peer("efficient"), True),
    )
    rows = [["inputs", "GPU", "peers", "shapes", "forward", "backward"]]
    for name, peers, suite, dtype, measure, options in kinds:
        both = [ratios(direction, suite, dtype, measure, options) for direction in ("forward", "backward")]
        if any(both):
            gpus = {r.facts["gpu"].removeprefix("NVIDIA ").split()[0] for r in hopper if _has(r, suite, dtype)}
            shapes = str(max(map(len, both)))
            rows.append([name, " and ".join(sorted(gpus)), peers, shapes, *map(_spread, both)])
    small = folder / "small_grids.jsonl"
    if small.exists():
        facts, cells = records.read(small)
        found = [cell["speed_of_fastest_peer"] for cell in cells]
        gpu = facts["gpu"].removeprefix("NVIDIA ").split()[0]
        what = "bfloat16, small shapes drawn at random"
        rows.append([what, gpu, fastest, str(len(found)), _spread(found), "-"])
    drawn = folder / "random_shapes.jsonl"
    if drawn.exists():
        facts, cells = records.read(drawn)
        rated = [r for r in cells if r["speed_of_fastest_peer"]]
        both = [[of_fastest(r) for r in rated if r["direction"] == direction] for direction in BOTH]
        gpu = facts["gpu"].removeprefix("NVIDIA ").split()[0]
        count = str(max(map(len, both)))
        peers = fastest if any("cudnn" in r["peers"] for r in rated) else "FlashAttention-3"
        rows.append(["bfloat16, shapes drawn at random", gpu, peers, count, *map(_spread, both)])
    return pages.table(rows)


def _has(record: Recorded, suite: str, dtype: str) -> bool:
    return any(key[0] == suite and key[2] == dtype for key in _groups(record))


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    digits = 2 if max(ratios) < 2 else 1
    mean, least, most = (towards(x, digits) for x in (geometric_mean(ratios), min(ratios), max(ratios)))
    return f"{mean} ({least} to {most})"


def draw(recorded: Sequence[Recorded], path: Path) -> None:
    """Speed over n: a row a direction, a column a head dim; causal dashed."""
    dense = [
        r
        for record in recorded
        if not record.is_mma
        for (suite, _, dtype), results in _groups(record).items()
        if (suite, dtype) == ("dense", "bfloat16")
        for r in results
    ]
    directions = [d for d in ("forward", "backward") if any(r["direction"] == d for r in dense)]
    head_dims = sorted({r["cell"]["head_dim"] for r in dense})
    figure = curves.new_figure(11, 3.2 * len(directions) + 0.6)
    panels = figure.subplots(len(directions), len(head_dims), squeeze=False, sharex=True)
    for direction, line in zip(directions, panels, strict=True):
        for head_dim, panel in zip(head_dims, line, strict=True):
            here = [r for r in dense if r["direction"] == direction and r["cell"]["head_dim"] == head_dim]
            for style, peer in zip(curves.STYLES[:3], (US, "fa3", "cudnn"), strict=True):
                for causal in (False, True):
                    points = sorted(
                        (r["cell"]["seqlen_q"], r["peers"][peer]["tflops"])
                        for r in here
                        if r["cell"]["causal"] == causal and peer in r["peers"]
                    )
                    label = f"{PEER_NAMES[peer]}, {'causal' if causal else 'full'}"
                    looks = style.of_line(curves.CAUSAL if causal else curves.FULL)
                    panel.plot([n for n, _ in points], [t for _, t in points], label=label, **looks)
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            ticks = sorted({r["cell"]["seqlen_q"] for r in here})
            panel.set_xticks(ticks, [_short(n) for n in ticks])
            panel.set_title(f"{direction}, head dim {head_dim}", fontsize=10)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("TFLOP/s")
    for panel in panels[-1]:
        panel.set_xlabel("sequence length")
    curves.legend_below(figure, panels[0, 0], 3)
    figure.suptitle("bfloat16 on an H200, over the sequence length", fontsize=11)
    curves.save(figure, path)


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description="Write every table of figures from the records in docs/lab/results.")
    parser.add_argument("--check", action="store_true", help="only say whether the tables are what the files say")
    parser.add_argument("--results", type=Path, help="print the page of another folder's files, and write nothing")
    arguments = parser.parse_args()
    if arguments.results:
        print(page(load(arguments.results), arguments.results))
        return 0
    recorded = load(RESULTS)
    texts = {PAGE: page(recorded), README: README.read_text("utf-8"), MEASURED: MEASURED.read_text("utf-8")}
    texts[README] = pages.with_section(texts[README], "speed", f"\n{readme_section(recorded)}\n")
    texts[MEASURED] = pages.with_section(texts[MEASURED], "kernels", f"\n{kernels_section(recorded)}\n")
    for name, write in measured.SECTIONS.items():
        texts[MEASURED] = pages.with_section(texts[MEASURED], name, f"\n{write(RESULTS)}\n")
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    if arguments.check:
        print("\n".join(f"{path} is not what the files say" for path in stale) or "all tables are as the files say")
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    if recorded:
        draw(recorded, RESULTS / "speed.svg")
    measured.draw_loss(RESULTS, PICTURES / "gpt2_loss.svg")
    if record := measured.read(RESULTS, "paper"):
        paper.draw(record.cells, paper.title_of(record.facts), PICTURES / "paper.svg")
    if record := measured.read(RESULTS, "paper_io"):
        paper_io.draw(record.cells, record.facts["fast_bytes"], PICTURES / "paper_io.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
