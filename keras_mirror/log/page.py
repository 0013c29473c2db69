"""The report of a run: one HTML page that needs nothing else, light or dark as its reader's system is, for phone and paper."""

from __future__ import annotations

import datetime
import html
import importlib.resources
import math
from typing import Any

import keras_mirror
from keras_mirror.log import charts, text
from keras_mirror.log.reading import Finding, RunLog, findings

_STYLE = importlib.resources.files("keras_mirror.log").joinpath("page.css").read_text(encoding="utf-8")


def page(run: RunLog) -> str:
    """The whole page."""
    title = f"{run.facts.get('model', 'model')}, run {run.facts.get('run', '')}"
    began = datetime.datetime.fromtimestamp(run.starts[0]).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    body = [
        f"<header><h1>{_e(title)}</h1><p>{_e(began)} &middot; <code>{_e(run.facts.get('command', ''))}</code></p></header>",
        _tiles(run),
        _findings(findings(run)),
        '<section class="charts">',
        *(_chart(each) for each in charts.of_run(run)),
        "</section>",
        _epochs(run),
        _facts(run),
        f"<footer>Made by keras_mirror {_e(keras_mirror.__version__)} from {_e(run.path)}.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _e(value: Any) -> str:
    return html.escape(str(value))


def _tiles(run: RunLog) -> str:
    last = (run.epochs or run.steps)[-1]
    tiles = []
    for name in run.metrics[:3]:
        for shown in (name, f"val_{name}"):
            value = last["logs"].get(shown)
            if isinstance(value, (int, float)):
                tiles.append((shown, text.number(value), ""))
    paced = [each for each in [*run.steps, *run.epochs] if each.get("examples_per_second")]
    speeds = [each["examples_per_second"] for each in (run.epochs[1:] or paced) if each.get("examples_per_second")]
    if speeds:
        tiles.append(("examples/s", text.count(sum(speeds) / len(speeds)), f"{run.facts.get('replicas', 1)} replicas"))
    steps = [each["step_ms"] for each in (run.epochs[1:] or paced) if each.get("step_ms")]
    if steps:
        tiles.append(("step, median", text.milliseconds(sorted(steps)[len(steps) // 2] / 1000), ""))
    first = next((each["first_step_seconds"] for each in run.epochs if each.get("first_step_seconds")), None)
    if first is not None:
        tiles.append(("first step", text.duration(first), ""))
    tiles.append(("steps", text.count(last["step"]), f"in {text.duration(last['elapsed'])}"))
    items = "".join(
        f"<div><dt>{_e(name)}</dt><dd>{_e(value)} <small>{_e(more)}</small></dd></div>" for name, value, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _findings(found: list[Finding]) -> str:
    if not found:
        return ""
    rows = (f'<li class="{each.severity}"><b>{each.severity.capitalize()}:</b> {_e(each.text)}</li>' for each in found)
    return f'<ul class="findings">{"".join(rows)}</ul>'


def _chart(chart: charts.Chart) -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 22 10"><path class="{style}" d="M1 5H21"/></svg>{_e(name)}</li>'
        for style, name in charts.legend(chart)
    )
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f'<figure class="card" style="margin:0"><h2>{_e(chart.title)}</h2>{legend}{charts.svg(chart)}</figure>'


def _epochs(run: RunLog) -> str:
    if not run.epochs:
        return ""
    names = [name for metric in run.metrics for name in (metric, f"val_{metric}")]
    names = [name for name in names if any(name in each["logs"] for each in run.epochs)]
    head = "".join(f"<th>{_e(name)}</th>" for name in ["epoch", "step", *names, "learning rate", "examples/s", "time"])
    rows = []
    shown = run.epochs if len(run.epochs) <= 40 else [*run.epochs[:5], *run.epochs[-30:]]
    for each in shown:
        if len(shown) < len(run.epochs) and each is run.epochs[-30]:
            rows.append(f'<tr><td colspan="{len(names) + 5}">&hellip;</td></tr>')
        speed, seconds = each.get("examples_per_second"), each.get("seconds")
        cells = [
            str(each["epoch"]),
            str(each["step"]),
            *(text.number(each["logs"].get(name)) for name in names),
            text.rate(each.get("learning_rate")),
            text.count(speed) if speed else "",
            text.duration(seconds) if seconds is not None and math.isfinite(seconds) else "",
        ]
        rows.append(f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in cells)}</tr>")
    return f'<section class="card wide"><h2>Epochs</h2><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></section>'


def _facts(run: RunLog) -> str:
    rows = []
    for name, value in run.facts.items():
        if name in ("time", "run") or value is None:
            continue
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(map(str, value)) if isinstance(value, list) else shown
        code = f"<code>{_e(shown)}</code>" if name == "command" else _e(f"{shown:,}" if isinstance(shown, int) else shown)
        rows.append(f"<tr><th>{_e(name.replace('_', ' '))}</th><td>{code}</td></tr>")
    return f'<section class="card wide"><h2>The run</h2><table>{"".join(rows)}</table></section>'
