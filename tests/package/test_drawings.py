"""The drawings of the manual can be read: colours are told apart by everybody, and texts stay clear of edges."""

from __future__ import annotations

import runpy
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

DRAWINGS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "drawings.py"))
LEAST = 20  # CIE76
# SEEN is what people see of linear RGB: Vienot, Brettel and Mollon, "Digital video colourmaps", 1999.
SEEN = {
    "any": np.eye(3),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
}
XYZ = np.array([[0.41246, 0.35758, 0.18044], [0.21267, 0.71515, 0.07218], [0.01933, 0.11919, 0.95030]])
WHITE = XYZ.sum(axis=1)
MEAN_WIDTH = 0.55  # of a letter, in units of the font's size


def lab(colour: str, vision: str) -> Any:
    """Return the CIELAB coordinates of a colour as some people see it."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(SEEN[vision] @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", SEEN)
def test_colours_are_told_apart(vision: str) -> None:
    operands, tiles = ("QUERY", "KEY", "VALUE", "OUT", "HIDDEN"), (("PAPER", "EDGE"), ("EDGE", "HIDDEN"))
    for one, other in (*combinations(operands, 2), *tiles):
        distance = np.linalg.norm(lab(DRAWINGS[one], vision) - lab(DRAWINGS[other], vision))
        assert distance >= LEAST, (one, other, distance)


def shapes(name: str, kind: str) -> list[dict[str, str]]:
    root = ElementTree.fromstring(DRAWINGS["DRAWINGS"][name]().svg())
    return [{**x.attrib, "text": x.text or ""} for x in root.iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


@pytest.mark.parametrize("name", ["offload", "online_softmax"])
def test_no_text_runs_over_an_edge(name: str) -> None:
    boxes = [[float(x[key]) for key in ("x", "y", "width", "height")] for x in shapes(name, "rect") if "x" in x]
    for text in shapes(name, "text"):
        width = MEAN_WIDTH * float(text["font-size"]) * len(text["text"])
        start = float(text["x"]) - {"start": 0.0, "middle": width / 2, "end": width}[text["text-anchor"]]
        for x, y, size, height in boxes:
            if y <= float(text["y"]) <= y + height:
                inside = x <= start and start + width <= x + size
                assert inside or start + width <= x or x + size <= start, (text["text"], x)


@pytest.mark.parametrize("name", ["tiles", "backward"])
def test_hidden_tiles_have_a_diagonal(name: str) -> None:
    hidden = {(x["x"], x["y"]) for x in shapes(name, "rect") if x["fill"] == DRAWINGS["HIDDEN"]}
    diagonals = {(x["x1"], x["y2"]) for x in shapes(name, "line") if x["stroke"] == DRAWINGS["GREY"]}
    assert hidden and hidden == diagonals


def test_the_maximum_has_a_mark() -> None:
    largest = [x for x in shapes("online_softmax", "rect") if x["fill"] == "#fb8f44"]
    marks = [x for x in shapes("online_softmax", "text") if x["text"] == "max"]
    middles = [float(x["x"]) + float(x["width"]) / 2 for x in largest]
    assert largest and middles == [float(x["x"]) for x in marks]
