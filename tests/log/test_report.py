"""The report of a run: what is read, found, drawn and written; and how it looks in a browser."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_mirror.cli import main
from keras_mirror.log import charts, figures, page, reading, records

START = {
    "event": "start",
    "log": "keras_mirror",
    "run": "abc",
    "time": 1.7e9,
    "versions": {"keras": "3.15"},
    "devices": ["GPU:0 (A)", "GPU:1 (A)"],
    "replicas": 2,
    "model": "a <model>",
    "command": "python train.py --name '<b>'",
}


def line(event, step, epoch=1, **more):
    logs = {"loss": 1 / step, "accuracy": 1 - 1 / step, **({"val_loss": 2 / step} if event == "epoch" else {})}
    return {
        "event": event,
        "step": step,
        "epoch": epoch,
        "batch": step,
        "elapsed": step / 10,
        "learning_rate": 0.1 * 0.9**step,
        "examples_per_second": 1000.0 + step,
        "step_ms": 1.0,
        "step_ms_p95": 1.5,
        "waiting_share": 0.01,
        "memory_mb": {"GPU:0": 900.0},
        **({"seconds": 1.0} if event == "epoch" else {}),
        "logs": {**logs, **more.pop("logs", {})},
        **more,
    }


def write(path, *records, start=START):
    path.write_text("\n".join(json.dumps(each) for each in (start, *records)) + "\n")
    return str(path)


def run_of(tmp_path, *records, start=START):
    return reading.read(write(tmp_path / "run.jsonl", *records, {"event": "end", "time": 1.7e9}, start=start))


def texts(run):
    return [each.text for each in reading.findings(run)]


def whole(**more):
    out = []
    for epoch in range(1, 5):
        out += [line("step", 10 * epoch - 5, epoch, **more), line("epoch", 10 * epoch, epoch, **more)]
    return out


def test_a_log_is_read_back(tmp_path):
    run = run_of(tmp_path, *whole())
    assert run.metrics == ["loss", "accuracy"]
    assert run.series("val_loss", epochs=True, logs=True) == [(10.0, 0.2), (20.0, 0.1), (30.0, 2 / 30), (40.0, 0.05)]
    assert (run.ended, len(run.steps), run.facts["run"]) == ("end", 4, "abc")
    assert texts(run) == []


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"waiting_share": 0.5}, "50% of the time the replicas waited for data"),
        ({"skipped_steps": 4}, r"4 of 40 steps \(10.0%\) were skipped.*so many are not"),
        ({"logs": {"loss": "nan"}}, r"loss is nan from step 5 \(epoch 1\) on"),
        ({"logs": {"mae": "-inf"}}, "mae is -inf from step 5"),
        ({"device_ms": {"GPU:0": 1.0, "GPU:1": 1.5, "GPU:2": 1.0}}, "GPU:1 is slower than the others: 50%"),
        ({"step_ms_p95": 9.0}, "one in twenty takes 9.0 times the median"),
    ],
)
def test_what_deserves_a_look_is_found(tmp_path, more, found):
    (text,) = texts(run_of(tmp_path, *whole(**more)))
    assert re.search(found, text)


def test_the_course_of_a_run_is_found(tmp_path):
    different = {**START, "devices": ["GPU:0 (A)", "GPU:1 (B)"]}
    slowing = [line("epoch", 10 * i, i, examples_per_second=speed) for i, speed in enumerate([9, 9, 9, 5, 5, 5], 1)]
    run = reading.read(write(tmp_path / "run.jsonl", *slowing, START, start=different))
    first, second, third, fourth = texts(run)
    assert "of different kinds (GPU:0 (A), GPU:1 (B))" in first
    assert "reached 56% of the fastest" in second
    assert third == "The run went on 1 time in another call of fit."
    assert "has no end" in fourth
    run = reading.read(write(tmp_path / "run.jsonl", *whole(), {"event": "interrupted", "step": 40, "time": 1.7e9}))
    assert texts(run) == ["The last fit was interrupted before its end."]


def test_a_torn_line_is_left_out_and_what_is_no_log_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, *whole())
    path.write_text(path.read_text() + '{"event": "st')
    assert len(reading.read(str(path)).steps) == 4
    for content, message in (
        ("Chapter 1", "isn't a log .*'Chapter 1'"),
        ("", "is empty"),
        (json.dumps(START), "no line of a step"),
    ):
        path.write_text(content)
        with pytest.raises(reading.NotALog, match=message):
            reading.read(str(path))


POINTS = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=3000)


@given(POINTS)
def test_thinning_keeps_order_and_extremes(values):
    points = list(enumerate(values))
    kept = charts.thinned(points)
    finite = [value for value in values if math.isfinite(value)]
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= set(points) or any(math.isnan(value) for value in values)
    assert len(kept) <= max(500, 0) + 260
    if finite:
        assert {max(finite), min(finite)} <= {value for _, value in kept}


@given(st.lists(st.floats(-1e30, 1e30) | st.sampled_from([math.nan]), min_size=1, max_size=20), st.booleans(), st.booleans())
@example([1.5, 2.2e-308, 4e12], True, False)
@example([5e-324, 1e-290, 0.98], True, True)
def test_every_chart_can_be_drawn(values, logarithmic, from_zero):
    if not any(math.isfinite(value) for value in values):
        values.append(1.0)
    chart = charts.Chart("t", (charts.Line("l", list(enumerate(values)), dots=True),), logarithmic, from_zero)
    drawn = charts.svg(chart)
    numbers = [float(each) for each in re.findall(r'c[xy]="(-?[\d.]+)"', drawn)]
    assert all(-1 <= each <= 641 for each in numbers)
    assert "nan" not in re.sub(r"<title>.*?</title>", "", drawn)


class Balance(HTMLParser):
    """Notes what isn't closed, and what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(tmp_path):
    odd = {"logs": {'<script>alert("x")</script>': 1.0}, "loss_scale": 8.0, "skipped_steps": 1}
    found = page.page(run_of(tmp_path, *whole(**odd)))
    parser = Balance()
    parser.feed(found)
    assert parser.open == []
    assert parser.fetched == []
    assert "http" not in found
    assert "<script" not in found
    assert "a &lt;model&gt;, run abc" in found
    for title in ("loss", "accuracy", "Learning rate", "Loss scale", "Examples per second", "Step time, ms", "Memory in use, MB"):
        assert f"<h2>{title}</h2>" in found


def test_the_command_writes_the_page_and_the_figures(tmp_path, capsys):
    log = write(tmp_path / "run.jsonl", *whole(waiting_share=0.5))
    assert main(["report", log, "--png", str(tmp_path / "png")]) == 0
    said = capsys.readouterr().out
    assert "run.html: 4 epochs, 4 lines within them" in said
    assert "warning: 50% of the time the replicas waited" in said
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
    names = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert names[:3] == ["01_loss.png", "02_accuracy.png", "03_learning_rate.png"]
    for path in (tmp_path / "png").iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 5000


def test_the_command_says_what_it_cant_do(tmp_path, capsys):
    log = write(tmp_path / "run.jsonl", *whole())
    (tmp_path / "thesis.txt").write_text("Chapter 1")
    for arguments, message in (
        ([str(tmp_path / "none.jsonl")], "none.jsonl can't be read: No such file"),
        ([str(tmp_path / "thesis.txt")], "isn't a log that RankZeroLogger"),
        ([log, "-o", log], "is the log itself"),
        ([log, "-o", str(tmp_path / "no" / "page.html")], "page.html can't be written: No such file"),
        ([log, "--png", str(tmp_path / "thesis.txt")], "thesis.txt can't be written: File exists"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "Chapter 1"


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    def missing(run, folder):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(figures, "save", missing)
    assert main(["report", write(tmp_path / "run.jsonl", *whole()), "--png", str(tmp_path)]) == 2
    assert "keras-mirror[report]" in capsys.readouterr().err


def test_devices_are_timed_at_the_same_work(monkeypatch):
    monkeypatch.setattr(records, "_PROBE", 64)
    found = records.device_times(["CPU:0", "CPU:1"])
    assert list(found) == ["CPU:0", "CPU:1"]
    assert all(value > 0 for value in found.values())
    assert records.gpus_of(None) == []


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def screenshot(path, target, width, height, *more):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={target.parent / 'profile'}", f"--screenshot={target}", f"--window-size={width},{height}", *more]
    subprocess.run([BROWSER, *flags, path.as_uri()], check=True, capture_output=True, timeout=120)
    from matplotlib import image

    return image.imread(target)[..., :3]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")
@pytest.mark.parametrize(("width", "more"), [(1240, ()), (500, ("--blink-settings=preferredColorScheme=0",))])
def test_it_looks_right_in_a_browser(tmp_path, width, more):
    log = tmp_path / "run.html"
    log.write_text(page.page(run_of(tmp_path, *whole(waiting_share=0.5, loss_scale=8.0, skipped_steps=1))))
    shot = screenshot(log, tmp_path / "shot.png", width, 1600, *more)
    assert shot.shape[:2] == (1600, width)
    corner = shot[2, 2]
    # Light, or dark as the reader's system is.
    assert (corner.mean() > 0.9) == (not more)
    # Nothing runs over the page's right edge: the last columns are the page's colour alone.
    assert np.abs(shot[:, -6:] - corner).max() < 0.02
    # The lines of the charts are there, each in its colour.
    for colour in (
        [(36, 99, 201), (209, 87, 27), (18, 128, 92)] if not more else [(110, 168, 255), (255, 154, 92), (76, 199, 154)]
    ):
        near = np.abs(shot - np.array(colour) / 255).max(axis=-1) < 0.02
        assert near.sum() > 100, f"no line in the colour {colour}"
    assert os.path.getsize(tmp_path / "shot.png") > 20_000
