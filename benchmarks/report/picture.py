"""Owns the picture of a result: panels of lines, drawn with matplotlib.

Must not compute what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Series:
    """One line of a panel; `style` as in matplotlib's format strings."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: str = "o-"


@dataclass(frozen=True)
class Panel:
    """One plot. `log`: which axes are logarithmic, of "x" and "y"."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log: str = ""


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side, at most three in a row, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 3.8 * rows), constrained_layout=True, squeeze=False
    )
    figure.suptitle(title)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for series in panel.series:
        axis.plot(series.x, series.y, series.style, markersize=3, linewidth=1.2, label=series.label)
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    if "x" in panel.log:
        axis.set_xscale("log")
    elif all(value.is_integer() for series in panel.series for value in map(float, series.x)):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "y" in panel.log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # else small differences look large
    axis.grid(alpha=0.3)
    if len(panel.series) > 1:
        axis.legend(fontsize="small")
