"""The drawings of kernels.md, minimal.md and offload.md: ``python docs/drawings.py`` writes them into docs/pictures."""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "pictures"
INK, GREY = "#24292f", "#59636e"
# People with any kind of colour vision tell them apart: each is at least 20 from every other (CIE76), with protanopia
# and deuteranopia, too.
QUERY, KEY, VALUE, OUT, HIDDEN = "#9ad1f2", "#f5c766", "#81c489", "#dc84b0", "#eaeef2"
PAPER, EDGE = "#ffffff", "#ffe98a"  # tiles that all see, and those on the edge of a mask; hidden ones have a diagonal


class Drawing:
    """Shapes of one SVG file; the origin is at the top left, lengths are pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.shapes: list[str] = []
        self.texts: list[str] = []  # which stand above all shapes

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str = "", size: int = 13) -> None:
        """A rectangle with its label in the middle, which may have several lines."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{INK}" rx="2"/>'
        )
        lines = label.split("\n") if label else []
        for i, line in enumerate(lines):
            self._write(x + width / 2, y + height / 2 + (i - (len(lines) - 1) / 2) * 1.25 * size, line, size)

    def tile(self, x: float, y: float, side: float, fill: str) -> None:
        """A square; a hidden one has a diagonal, because its colour is near that of paper."""
        self.box(x, y, side, side, fill)
        if fill == HIDDEN:
            self.shapes.append(
                f'<line x1="{x:g}" y1="{y + side:g}" x2="{x + side:g}" y2="{y:g}" stroke="{GREY}" stroke-width="1"/>'
            )

    def text(self, x: float, y: float, text: str, size: int = 13, anchor: str = "middle", fill: str = INK) -> None:
        """One line around (x, y), with a rim of paper, so that no line runs into it."""
        self._write(x, y, text, size, anchor, fill, ' stroke="white" stroke-width="4" paint-order="stroke"')

    def _write(
        self, x: float, y: float, text: str, size: int, anchor: str = "middle", fill: str = INK, rim: str = ""
    ) -> None:
        middle = y + 0.35 * size  # half a capital's height: not every program knows dominant-baseline
        self.texts.append(
            f'<text x="{x:g}" y="{middle:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{rim}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = INK) -> None:
        """From the first point to the second."""
        self.shapes.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{colour}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The file."""
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join([head, *self.shapes, *self.texts])
            + "\n</svg>\n"
        )


def tiles() -> Drawing:
    """The matrix of scores that never exists: which tiles one block of threads visits."""
    d = Drawing(720, 370)
    side, left, top, count = 44, 150, 90, 6
    d.text(left + 3 * side, 20, "K and V: tiles of BLOCK_N keys", 13)
    for j in range(count):
        d.box(left + j * side, 36, side, 18, KEY, f"K{j}", 11)
        d.box(left + j * side, 56, side, 18, VALUE, f"V{j}", 11)
    for i in range(count):
        d.box(left - 62, top + i * side, 52, side, QUERY if i != 3 else "#56b4e9", f"Q{i}")
        for j in range(count):
            fill = HIDDEN if j > i else EDGE if j == i else PAPER
            d.tile(left + j * side, top + i * side, side, fill)
        d.box(left + count * side + 10, top + i * side, 52, side, OUT, f"O{i}")
    y = top + 3.5 * side
    d.arrow(left + 6, y, left + 3.8 * side, y)
    d.text(left + 1.5 * side, y - 10, "S, P: one tile at a time", 11)
    x = left + count * side + 90
    for i, (fill, words) in enumerate(
        ((PAPER, "seen by all: no mask"), (EDGE, "on the edge: masked"), (HIDDEN, "hidden: not visited"))
    ):
        d.tile(x, top + 10 + 34 * i, 20, fill)
        d.text(x + 28, top + 20 + 34 * i, words, 12, "start")
    d.text(x, top + 140, "One thread block: Q3.", 12, "start")
    d.text(x, top + 158, "It keeps O3, the row", 12, "start")
    d.text(x, top + 176, "maxima and row sums", 12, "start")
    d.text(x, top + 194, "in registers.", 12, "start")
    return d


def hopper() -> Drawing:
    """The way of the data in the Hopper forward kernel."""
    d = Drawing(760, 360)
    d.box(16, 60, 110, 220, "#f6f8fa")
    d.text(71, 44, "global memory, L2")
    for i, (name, fill) in enumerate((("Q", QUERY), ("K", KEY), ("V", VALUE), ("O", OUT))):
        d.box(36, 76 + 50 * i, 70, 34, fill, name)
    d.box(200, 60, 210, 220, "#f6f8fa")
    d.text(305, 44, "shared memory, 227 KB")
    d.box(215, 76, 180, 34, QUERY, "Q tile")
    for i, (name, fill) in enumerate((("K", KEY), ("V", VALUE))):
        for stage in range(2):
            d.box(215 + 92 * stage, 126 + 50 * i, 88, 34, fill, f"{name} stage {stage}", 12)
    d.box(215, 232, 180, 34, PAPER, "barriers: full, free; tiles to do", 11)
    for i in range(3):
        d.arrow(108, 93 + 50 * i, 212, 93 + 50 * i)
    d.text(160, 80, "TMA", 11)
    d.box(200, 300, 210, 40, "#ffebe9", "loading warp: one thread asks TMA", 11)
    d.arrow(305, 300, 305, 284)
    for i in range(2):
        y = 60 + 116 * i
        d.box(480, y, 264, 104, "#f6f8fa")
        d.text(612, y + 14, f"warpgroup {i}: 64 queries, in registers", 12)
        d.box(490, y + 30, 76, 60, EDGE, "S = Q Kᵀ\n(wgmma)", 12)
        d.box(574, y + 30, 76, 60, PAPER, "mask,\nsoftmax: P", 12)
        d.box(658, y + 30, 76, 60, OUT, "O += P V\n(wgmma)", 12)
        d.arrow(412, y + 60, 478, y + 60)
        d.shapes.append(
            f'<path d="M612,284 L612,350 L71,350 L71,284" fill="none" stroke="{INK}" marker-end="url(#head)"/>'
        )
    d.text(520, 338, "O once, at the end", 11)
    return d


def turns() -> Drawing:
    """Two warpgroups that take turns at the tensor cores."""
    d = Drawing(720, 150)
    width = 96
    for i, name in enumerate(("warpgroup 0", "warpgroup 1")):
        y = 40 + 48 * i
        d.text(70, y + 17, name, 12)
        for step in range(6):
            products = step % 2 == i
            label = "products" if products else "softmax"
            d.box(124 + step * width, y, width, 34, EDGE if products else PAPER, label, 12)
    d.text(124 + 3 * width, 20, "the tensor cores always have one of them", 12)
    d.arrow(124, 136, 124 + 6 * width, 136, GREY)
    d.text(104, 136, "time", 11, fill=GREY)
    return d


def backward() -> Drawing:
    """Who owns what in the backward pass."""
    d = Drawing(640, 330)
    side, top, count = 38, 84, 5
    for panel, (left, title) in enumerate(
        ((96, "backward_dq: a tile of queries"), (410, "backward_dkv: a tile of keys"))
    ):
        d.text(left + count * side / 2, 24, title, 13)
        for j in range(count):
            owned = panel == 1 and j == 1
            d.box(left + j * side, 46, side, 26, KEY if not owned else "#fb8f44", f"K{j} V{j}", 10)
        for i in range(count):
            owned = panel == 0 and i == 3
            d.box(left - 46, top + i * side, 38, side, QUERY if not owned else "#56b4e9", f"Q{i}", 11)
            for j in range(count):
                mine = (panel == 0 and i == 3) or (panel == 1 and j == 1)
                fill = HIDDEN if j > i else EDGE if mine else PAPER
                d.tile(left + j * side, top + i * side, side, fill)
        if panel == 0:
            d.arrow(left + 5, top + 3.5 * side, left + 3.8 * side, top + 3.5 * side)
            d.text(left + count * side / 2, top + count * side + 20, "P again from lse; dQ += dS K", 12)
        else:
            d.arrow(left + 1.5 * side, top + 1.1 * side, left + 1.5 * side, top + count * side - 5)
            d.text(left + count * side / 2, top + count * side + 20, "dV += Pᵀ dO,  dK += dSᵀ Q", 12)
    d.text(320, 312, "before both: delta = rowsum(dO * O) - dlse, one number a row", 12)
    return d


def offload() -> Drawing:
    """Chunks of keys come through two buffers of the GPU while the ones before are computed."""
    d = Drawing(790, 300)
    d.text(80, 24, "host memory", 13)
    for n in range(6):
        d.box(30, 44 + 30 * n, 100, 28, KEY if n < 5 else PAPER, f"K{n} V{n}", 11)
    d.text(80, 240, "the last keys are", 11, fill=GREY)
    d.text(80, 256, "the CPU's share", 11, fill=GREY)
    left, width = 290, 76
    for row, name in enumerate(("link in", "GPU", "link out (backward)", "CPU")):
        d.text(left - 12, 62 + 50 * row, name, 12, "end")
    for n in range(5):
        d.box(left + n * width, 46, width - 4, 32, KEY, f"chunk {n}", 11)
        d.box(left + (n + 1) * width, 96, width - 4, 32, QUERY, f"Q x {n}", 11)
        d.arrow(left + n * width + width - 6, 80, left + (n + 1) * width + 4, 94)
        if n < 4:
            d.box(left + (n + 2) * width - 2, 146, width - 4, 32, VALUE, f"dK{n} dV{n}", 11)
    d.box(left, 196, 6 * width - 4, 32, PAPER, "Q x keys 5, where they lie", 11)
    d.box(left + 6 * width + 4, 96, 30, 132, OUT, "O", 13)
    d.text(left, 254, "buffer 0 holds the even chunks, buffer 1 the odd ones: chunk 2 comes", 11, "start", GREY)
    d.text(left, 270, "once chunk 0 is computed, while chunk 1 is", 11, "start", GREY)
    return d


def online_softmax() -> Drawing:
    """One row of scores in three tiles: the maximum, the sum and the rescaling, with the numbers that they have."""
    d = Drawing(760, 330)
    row = ((1.0, 0.5, 2.0, 0.0), (1.5, 3.0, 0.5, 1.0), (2.5, 1.0, 2.0, 0.5))
    side, left, gap = 50, 90, 26
    m, l = -math.inf, 0.0  # noqa: E741
    d.text(left - 12, 66, "scores", 12, "end")
    d.text(left - 12, 106, "exp(s - m)", 12, "end")
    for n, scores in enumerate(row):
        x = left + n * (len(scores) * side + gap)
        middle = x + len(scores) * side / 2
        d.text(middle, 24, f"tile {n} of the keys", 13)
        larger = max(m, *scores)
        rescale = math.exp(m - larger)
        weights = [math.exp(s - larger) for s in scores]
        for i, (score, weight) in enumerate(zip(scores, weights, strict=True)):
            is_largest = score == larger
            d.box(x + i * side, 50, side, 32, "#fb8f44" if is_largest else KEY, f"{score:g}", 12)
            if is_largest:
                d.text(x + (i + 0.5) * side, 43, "max", 10)
            d.box(x + i * side, 90, side, 32, EDGE, f"{weight:.2f}", 12)
        total = rescale * l + sum(weights)
        d.box(x + 4, 160, len(scores) * side - 8, 92, "#f6f8fa")
        d.text(middle, 176, f"m = max({'-inf' if n == 0 else f'{m:g}'}, {max(scores):g}) = {larger:g}", 11)
        d.text(middle, 202, f"rescale = exp({'-inf' if n == 0 else f'{m:g} - {larger:g}'}) = {rescale:.2f}", 11)
        d.text(middle, 228, f"l = {rescale:.2f} * {l:.2f} + {sum(weights):.2f} = {total:.2f}", 11)
        d.arrow(middle, 124, middle, 158)
        if n:
            d.arrow(x - gap - 4, 206, x + 2, 206)
        m, l = larger, total  # noqa: E741
    d.text(380, 276, "O goes the same way as l:  O = rescale * O + exp(S - m) V.  At the end the row is O / l.", 13)
    whole = math.log(sum(math.exp(s) for scores in row for s in scores))
    d.text(
        380,
        302,
        f"lse = m + log(l) = {m + math.log(l):.2f}, and of all scores at once it is {whole:.2f}",
        12,
        fill=GREY,
    )
    return d


DRAWINGS = {
    "tiles": tiles,
    "hopper": hopper,
    "turns": turns,
    "backward": backward,
    "offload": offload,
    "online_softmax": online_softmax,
}


def write(folder: Path) -> None:
    """Write all drawings."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
