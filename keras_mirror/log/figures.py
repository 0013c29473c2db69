"""The report's charts as PNG files, with matplotlib, for papers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from keras_mirror.log import charts
from keras_mirror.log.reading import RunLog

_COLOURS = ("#2463c9", "#d1571b", "#12805c", "#8a3fc4", "#b0306a")


def save(run: RunLog, folder: str | os.PathLike[str]) -> list[str]:
    """Writes a PNG (1500 x 900 pixels, 300 dpi) for each chart of a run.

    Args:
        run: what the log tells.
        folder: where they go; made where it isn't there.

    Returns:
        Their paths.

    Raises:
        ImportError: matplotlib isn't there.
        OSError: they can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for number, chart in enumerate(charts.of_run(run), 1):
        # Without pyplot, which has state for the whole process.
        figure = Figure(figsize=(5, 3), dpi=300, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(chart, figure.add_subplot())
        name = re.sub(r"[^a-z0-9]+", "_", chart.title.lower()).strip("_") or "chart"
        path = os.path.join(folder, f"{number:02}_{name}.png")
        figure.savefig(path)
        paths.append(path)
    return paths


def _draw(chart: charts.Chart, axes: Any) -> None:
    for i, line in enumerate(chart.lines):
        thin = line.style == "thin"
        axes.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            color=_COLOURS[i % len(_COLOURS)],
            linewidth=0.8 if thin else 1.4,
            alpha=0.6 if thin else 1,
            marker="o" if line.dots and len(line.points) <= 60 else None,
            markersize=2.5,
            label=_literal(line.name),
        )
    for j, mark in enumerate(chart.marks):
        label = chart.mark_name if j == 0 else None
        axes.axvline(mark, color="#c62828", linewidth=0.6, alpha=0.6, label=label)
    if charts.is_logarithmic(chart):
        axes.set_yscale("log")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel(_literal(chart.title))
    axes.grid(alpha=0.3, linewidth=0.5)
    if charts.legend(chart):
        axes.legend(fontsize=7, frameon=False)


def _literal(name: str) -> str:
    """A name as it is: matplotlib takes dollars for mathematics, and a leading underscore for a line without a legend."""
    return name.replace("$", r"\$").lstrip("_") or name
