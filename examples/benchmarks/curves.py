"""Curves of the documentation's pictures: how each looks, and how a figure is written.

The colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell apart. Every curve has a
marker of its own, too, which is open, so that one curve shows through where two coincide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class Style(NamedTuple):
    """A curve's colour, marker and width."""

    color: str
    marker: str
    markersize: float
    linewidth: float

    def of_line(self, linestyle: str = "-") -> dict[str, Any]:
        """Keywords of `plot`."""
        return {
            "color": self.color,
            "marker": self.marker,
            "markersize": self.markersize,
            "markerfacecolor": "none",
            "linestyle": linestyle,
            "linewidth": self.linewidth,
        }


# Sizes and widths fall, so that of curves that lie on one another, which are drawn in this order, all are seen.
STYLES = (
    Style("#d55e00", "o", 8.0, 2.4),  # vermilion
    Style("#0072b2", "s", 5.5, 1.7),  # blue
    Style("#009e73", "^", 3.5, 1.0),  # bluish green
)
FULL, CAUSAL = "-", "--"


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, whose parts keep clear of one another."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def legend_below(figure: Any, panel: Any, columns: int) -> None:
    """A legend under all panels, where no curve crosses it."""
    figure.legend(
        *panel.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, the same text each time."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "path"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    text = path.read_text("utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")
