"""Which charts a run's log gives, and a chart as SVG; nothing is asked of anything but the log."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

from keras_mirror.log.reading import RunLog
from keras_mirror.log.text import count, rate

Points = Sequence[tuple[float, float]]
# More points than this are thinned, so that peaks stay: the smallest and the largest of each stretch.
_POINTS = 500
_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 34
# A range of more than so many decades is shown on a logarithmic scale, where the chart allows it.
_DECADES = 1.5


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: as the legend says it.
        points: (step, value), in order.
        dots: whether each point is marked: few of them, such as epochs.
        style: "" or "thin", for what is less to be looked at.
    """

    name: str
    points: Points
    dots: bool = False
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart over the steps.

    Attributes:
        title: what it shows, with the unit.
        lines: at least one, with at least one point.
        logarithmic: whether the values may be shown on a logarithmic scale.
        from_zero: whether the scale begins at 0.
        marks: steps at which something happened.
        mark_name: what.
        percent: whether values are shares.
    """

    title: str
    lines: tuple[Line, ...]
    logarithmic: bool = False
    from_zero: bool = False
    marks: tuple[float, ...] = ()
    mark_name: str = ""
    percent: bool = False


def of_run(run: RunLog) -> list[Chart]:
    """The charts that a log has something for: metrics, learning rate, loss scale, throughput, step time, waiting, memory."""
    charts = [_metric(run, name) for name in run.metrics]
    rates = sorted({key for record in [*run.steps, *run.epochs] for key in record if key.startswith("learning_rate")})
    lines = [
        Line(name.removeprefix("learning_rate_") if i else "learning rate", _both(run, name)) for i, name in enumerate(rates)
    ]
    charts.append(Chart("Learning rate", tuple(lines), logarithmic=True))
    skips = tuple(_skips(run))
    charts.append(
        Chart("Loss scale", (Line("loss scale", _both(run, "loss_scale")),), True, marks=skips, mark_name="skipped steps")
    )
    charts.append(_of_lines(run, "Examples per second", {"examples_per_second": "all replicas"}, from_zero=True))
    times = _of_lines(run, "Step time, ms", {"step_ms": "median", "step_ms_p95": "95th percentile"}, from_zero=True)
    charts.append(dataclasses.replace(times, logarithmic=True))
    charts.append(
        _of_lines(run, "Waiting for data", {"waiting_share": "share of the epoch so far"}, from_zero=True, percent=True)
    )
    charts.append(_memory(run))
    kept = []
    for chart in charts:
        lines = [line for line in chart.lines if any(math.isfinite(value) for _, value in line.points)]
        if lines:
            kept.append(dataclasses.replace(chart, lines=tuple(lines)))
    return kept


def _metric(run: RunLog, name: str) -> Chart:
    lines = []
    inside = run.series(name, logs=True)
    if inside:
        lines.append(Line("epoch so far", inside, style="thin"))
    lines.append(Line("epoch", run.series(name, epochs=True, logs=True), dots=True))
    lines.append(Line("validation", run.series(f"val_{name}", epochs=True, logs=True), dots=True))
    return Chart(name, tuple(lines), logarithmic="loss" in name)


def _of_lines(run: RunLog, title: str, names: dict[str, str], *, from_zero: bool, percent: bool = False) -> Chart:
    lines = [Line(shown, run.series(name) or run.series(name, epochs=True)) for name, shown in names.items()]
    return Chart(title, tuple(lines), from_zero=from_zero, percent=percent)


def _both(run: RunLog, name: str) -> list[tuple[float, float]]:
    return sorted({*run.series(name), *run.series(name, epochs=True)})


def _memory(run: RunLog) -> Chart:
    records = run.steps or run.epochs
    names = list(dict.fromkeys(name for record in records for name in record.get("memory_mb") or {}))
    lines = [
        Line(name, [(record["step"], record["memory_mb"][name]) for record in records if name in (record.get("memory_mb") or {})])
        for name in names
    ]
    return Chart("Memory in use, MB", tuple(lines), from_zero=True)


def _skips(run: RunLog) -> list[float]:
    found, before = [], 0
    for record in sorted([*run.steps, *run.epochs], key=lambda each: each["step"]):
        now = record.get("skipped_steps") or 0
        if now > before:
            found.append(float(record["step"]))
        before = now
    return found


# -- drawing ---------------------------------------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """The chart as an SVG element; its colours are the page's: classes `s0`, `s1` and so on for the lines."""
    shown = [dataclasses.replace(line, points=thinned(line.points)) for line in chart.lines]
    x0, x1 = _extent([x for line in chart.lines for x, _ in line.points])
    values = [y for line in chart.lines for _, y in line.points if math.isfinite(y)]
    axis = _Axis.of(values, chart)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT),
            _TOP + (1 - axis.part(y)) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(chart.title, quote=True)} over the steps">'
    ]
    for value in axis.ticks:
        _, y = at(x0, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{axis.label(value)}</text>')
    for value in _ticks(x0, x1, 6):
        x, _ = at(value, axis.low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{count(value)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{_HEIGHT - 12}" text-anchor="end">step</text>')
    for mark in chart.marks:
        x, _ = at(mark, axis.low)
        parts.append(f'<path class="mark" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"><title>step {mark:.0f}</title></path>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    for i, line in enumerate(shown):
        parts.append(f'<path class="line s{i} {line.style}" d="{_path(line.points, at)}"/>')
        if line.dots and len(line.points) <= 60:
            for x, y in line.points:
                if math.isfinite(y):
                    cx, cy = at(x, y)
                    label = f"<title>step {x:.0f}: {y:.6g}</title>"
                    parts.append(f'<circle class="dot s{i}" cx="{cx:.1f}" cy="{cy:.1f}" r="3.2">{label}</circle>')
    return "".join([*parts, "</svg>"])


def legend(chart: Chart) -> list[tuple[str, str]]:
    """(class, name) of what a chart's reader has to tell apart; empty where there is one line only."""
    found = [(f"line s{i} {line.style}".strip(), line.name) for i, line in enumerate(chart.lines)]
    if chart.marks:
        found.append(("mark", f"{chart.mark_name}"))
    return found if len(found) > 1 else []


def _path(points: Points, at: Callable[[float, float], tuple[float, float]]) -> str:
    out, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        px, py = at(x, y)
        out.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L"
    # A single point is a line of no length, which a round cap shows.
    return "".join(out) + ("h0" if len(out) == 1 else "")


def thinned(points: Points) -> Points:
    """At most 500 points: of each stretch of too many the smallest and the largest, so that no peak is lost."""
    if len(points) <= _POINTS:
        return points
    stretch = math.ceil(2 * len(points) / _POINTS)
    out: list[tuple[float, float]] = []
    for i in range(0, len(points), stretch):
        part = points[i : i + stretch]
        finite = [point for point in part if math.isfinite(point[1])]
        kept = {max(finite, key=_value), min(finite, key=_value)} if finite else set()
        # A gap stays one.
        kept.update(point for point in part[:1] if not math.isfinite(point[1]))
        out.extend(sorted(kept, key=lambda point: point[0]))
    return out


def _value(point: tuple[float, float]) -> float:
    return point[1]


def is_logarithmic(chart: Chart) -> bool:
    """Whether a chart is shown on a logarithmic scale: it may be, and its values span decades."""
    values = [y for line in chart.lines for _, y in line.points if math.isfinite(y)]
    return _spans_decades(chart, min(values), max(values))


def _spans_decades(chart: Chart, low: float, high: float) -> bool:
    # A power of ten below 1e-290 may round to 0, and a quotient overflow: differences of logarithms don't.
    return chart.logarithmic and low > 1e-290 and math.log10(high) - math.log10(low) > _DECADES


@dataclasses.dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool
    percent: bool

    @classmethod
    def of(cls, values: list[float], chart: Chart) -> _Axis:
        low, high = min(values), max(values)
        if _spans_decades(chart, low, high):
            # A value of 0.00099 is nearly 0.001: no decade for the difference.
            low, high = 10.0 ** math.floor(math.log10(low) + 0.02), 10.0 ** math.ceil(math.log10(high) - 0.02)
            exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
            every = max(1, math.ceil(len(exponents) / 6))
            return cls(low, high, tuple(10.0**each for each in exponents if each % every == 0), True, chart.percent)
        low = min(low, 0.0) if chart.from_zero else low
        if high - low <= max(1e-9 * max(abs(high), abs(low)), 1e-290):
            # One value, or as good as one.
            low, high = (0.0, 2 * high) if high > 1e-290 else (2 * low, 0.0) if low < -1e-290 else (0.0, 1.0)
        room = 0.05 * (high - low)
        low, high = (low if chart.from_zero else low - room), high + room
        return cls(low, high, tuple(_ticks(low, high, 5)), False, chart.percent)

    def part(self, value: float) -> float:
        if self.logarithmic:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, 0.9 * self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def label(self, value: float) -> str:
        if self.percent:
            return f"{value:.0%}"
        return count(value) if abs(value) >= 1000 else rate(value) if abs(value) < 1e-3 else f"{value:.4g}"


def _extent(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers in a range, about so many."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(each * step, 12) for each in range(first, math.floor(high / step + 1e-9) + 1)]
