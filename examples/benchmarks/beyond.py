"""Tables and bars of what lies beyond one GPU's memory, from the records in docs/lab/results.

`tables.py` writes them, where the files of ``ring.py``, ``offload.py`` and ``allreduce.py --json`` are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pages
from measured import read
from recorded import towards

from cuflash.tools.bench.records import Record

Cell = dict[str, Any]

# A part and the memory of its cells, the bar's words, the figure and the least that it is to be.
OFFLOAD_BARS = (
    ("stream", "pinned", "few queries, pinned: share of the link's rate", "of_link", 0.95),
    ("stream", "pageable", "few queries, pageable: share of the link's rate", "of_link", 0.5),
    ("kernels", None, "16k queries: speed of the kernels on the GPU's memory", "of_kernels", 0.95),
    ("decode", None, "one query, with the CPU's share: speed of streaming alone", "of_streaming", 1.3),
)
RING_FILES = ("ring", "ring_processes")
# The name of a scheme's cells begins so; the least share of one GPU's speed forward and backward, by tokens a GPU.
RING_BARS = (
    ("ring zigzag", {8192: (0.90, 0.92), 32768: (0.95, 0.95)}),
    ("ulysses", {8192: (0.85, 0.85), 32768: (0.92, 0.92)}),
)
ALLREDUCE_FILES = ("allreduce", "allreduce_processes")
# The bar is for a sum that takes about a third of the time without overlap.
ALLREDUCE_BAR, ALLREDUCE_SHARE = 1.3, 1 / 3
RING_HEAD = (
    "16 heads of 128 columns, causal, bfloat16; TFLOP/s of a GPU beside one GPU's on the same work, wall time of calls "
    "that begin together and end when every GPU is done."
)
RATIOS = {
    "of_link": "of the link",
    "of_kernels": "of the kernels",
    "of_streaming": "of streaming",
    "ideal": "ideal",
    "on_host": "pages on the host",
}
PART_HEADS = {
    "link": "Plain copies of 64 MiB from and to pinned memory.",
    "stream": "Few queries, nothing masked, 8 KV heads and 32 query heads of 128 columns; beside it the GPU's memory.",
    "kernels": "Many queries of the same heads, in bfloat16.",
    "decode": "One query: streaming alone, with the share that the CPU is found to have, and the CPU alone. The ideal "
    "is one plus the ratio of both rates.",
    "cache": "One query over pages of 16 keys, half of them on the host, which are streamed or computed by the CPU. "
    "Rates are of these.",
}


def bars(folder: Path) -> list[list[str]]:
    """A row of the table of bars for each that was measured; a first look says nothing of them."""
    rows = [row for file in RING_FILES for row in _ring_bars(read(folder, file))]
    record = read(folder, "offload")
    if record is not None and not record.facts["quick"]:
        for part, memory, words, name, limit in OFFLOAD_BARS:
            cells = [cell for cell in record.cells if (cell["part"], cell.get("memory")) == (part, memory)]
            figures = [cell[name] for cell in cells]
            if figures:
                rows.append(_row(f"keys in host memory, {words}", limit, figures, "", record))
    for file in ALLREDUCE_FILES:
        record = read(folder, file)
        if record is not None and record.cells:
            cell = min(record.cells, key=lambda cell: abs(cell["share_of_sum"] - ALLREDUCE_SHARE))
            what = f"sums over {cell['world']} GPUs behind attention, ranks as {record.facts['ranks']}, where they are "
            what += "nearest to a third: speed of all in turn"
            note = f" at {cell['seqlen']} tokens, of which the sum is {cell['share_of_sum']:.2f}"
            rows.append(_row(what, ALLREDUCE_BAR, [cell["of_in_turn"]], note, record))
    return rows


def _ring_bars(record: Record | None) -> list[list[str]]:
    """Rows for the schemes with a bar; each is for so many GPUs as were there."""
    rows = []
    for scheme, limits in RING_BARS if record is not None else ():
        assert record is not None
        for cell in record.cells:
            name, where = cell["cell"].split(" on ")
            tokens = int(where.split(", ")[1].split()[0])
            if name == scheme and tokens in limits:
                for direction, limit in zip(("forward", "backward"), limits[tokens], strict=True):
                    what = f"{name}, {direction}, {where}, ranks as {record.facts['ranks']}: share of one GPU's speed"
                    rows.append(_row(what, limit, [cell[direction]["of_ideal"]], "", record))
    return rows


def _row(what: str, limit: float, figures: Sequence[float], note: str, record: Record) -> list[str]:
    met = sum(figure >= limit for figure in figures)
    shown = towards(min(figures), 2)
    if len(figures) > 1:
        shown += f" to {towards(max(figures), 2)}; {met} of {len(figures)}"
    reached = "yes" if met == len(figures) else "no"
    return [what, f"at least {limit:g}", shown + note, reached, pages.short_commit(record.facts)]


def sections(folder: Path) -> list[str]:
    """Parts of the page of all figures."""
    parts = []
    for file in RING_FILES:
        record = read(folder, file)
        if record is not None:
            parts.append(f"## A sequence over several GPUs, ranks as {record.facts['ranks']}\n")
            parts.append(f"{pages.origin(record.facts)} From [{file}.jsonl]({file}.jsonl).\n")
            parts.append(f"{RING_HEAD}\n\n{_ring_table(record.cells)}")
    record = read(folder, "offload")
    if record is not None:
        machine = f"{record.facts['cores']} cores of {record.facts['cpu']}."
        quick = " A quarter of the keys." if record.facts["quick"] else ""
        parts.append("## Keys in host memory\n")
        parts.append(f"{pages.origin(record.facts)} {machine}{quick} From [offload.jsonl](offload.jsonl).\n")
        for part, head in PART_HEADS.items():
            cells = [cell for cell in record.cells if cell["part"] == part]
            if cells:
                parts.append(f"{head}\n\n{_offload_table(cells)}")
    for file in ALLREDUCE_FILES:
        record = read(folder, file)
        if record is not None:
            parts.append(f"## Sums over GPUs behind attention, ranks as {record.facts['ranks']}\n")
            parts.append(f"{pages.origin(record.facts)} From [{file}.jsonl]({file}.jsonl).\n")
            parts.append(_allreduce_table(record.cells))
    return parts


def _ring_table(cells: Sequence[Cell]) -> str:
    directions = ("forward", "backward")
    rows = [["cell", *(f"{direction}, TFLOP/s" for direction in directions), *(f"{d}, share" for d in directions)]]
    for cell in cells:
        rates = [f"{cell[d]['cuflash']:.0f} of {cell[d]['one_gpu']:.0f}" for d in directions]
        rows.append([cell["cell"], *rates, *(towards(cell[d]["of_ideal"], 2) for d in directions)])
    return pages.table(rows)


def _offload_table(cells: Sequence[Cell]) -> str:
    """Milliseconds and rates of each way, then the ratios that the cells have."""
    ways = list(cells[0]["seconds"])
    name, unit = ("tflops", "TFLOP/s") if "tflops" in cells[0] else ("gigabytes_per_second", "GB/s")
    ratios = [ratio for ratio in RATIOS if ratio in cells[0]]
    of_ways = [f"{way}, {own}" for way in ways for own in ("ms", unit)]
    rows = [["cell", *of_ways, *(RATIOS[ratio] for ratio in ratios)]]
    for cell in cells:
        figures = [text for way in ways for text in (f"{1e3 * cell['seconds'][way]:.2f}", f"{cell[name][way]:.1f}")]
        rows.append([cell["cell"], *figures, *(towards(cell[ratio], 2) for ratio in ratios)])
    return pages.table(rows)


def _allreduce_table(cells: Sequence[Cell]) -> str:
    kinds = list(cells[0]["seconds"])
    rows = [["cell", *(f"{kind}, ms" for kind in kinds), "the sum's share of all in turn", "speed of all in turn"]]
    for cell in cells:
        times = [f"{1e3 * cell['seconds'][kind]:.3f}" for kind in kinds]
        rows.append([cell["cell"], *times, f"{cell['share_of_sum']:.2f}", towards(cell["of_in_turn"], 2)])
    return pages.table(rows)
