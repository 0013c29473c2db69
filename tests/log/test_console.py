"""What is drawn where: lines in a pipe, a bar on a terminal, one display in a notebook."""

import io
import sys
import types

import pytest

from keras_mirror.log import console, text

FACTS = {
    "versions": {"keras_mirror": "0.1.0", "keras": "3.15.1", "tensorflow": "2.21.0"},
    "devices": ["GPU:0 (A100)", "GPU:1 (A100)"],
    "replicas": 4,
    "workers": 2,
    "global_batch": 64,
    "steps_per_epoch": 45,
    "epochs": 20,
    "seed": None,
    "precision": "mixed_float16",
}


class Progress:
    epoch, epochs, step, steps = 3, 20, 9, 45
    epoch_left, run_left = 2.0, 60.0

    def __init__(self, **more):
        self.record = {
            "logs": {"val_loss": 0.5, "accuracy": 0.9, "loss": float("nan"), "odd [red]": 1.0, "skipped_steps": 1.0, "v": [1.0]},
            "learning_rate": 0.001,
            "loss_scale": 32768.0,
            "skipped_steps": 2,
            "examples_per_second": 52_340.0,
            "examples_per_second_per_replica": 13_085.0,
            "step_ms": 1.23,
            "step_ms_p95": 1.5,
            "waiting_share": 0.03,
            "memory_mb": {"GPU:0": 900.0},
            "seconds": 4.2,
            **more,
        }


LINE = (
    "loss nan  val_loss 0.5000  accuracy 0.9000  odd [red] 1.0000  lr 0.001  loss scale 32.8k  skipped 2  "
    "52.3k examples/s (13.1k a replica)  1.23 ms/step (p95 1.50 ms)  3% waiting for data  900 MB"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines(capsys):
    plain = console.choose(redirect=False)
    assert type(plain) is console.Plain
    plain.begin(FACTS)
    plain.draw(Progress())
    plain.epoch(Progress())
    first, second, within, epoch = capsys.readouterr().out.splitlines()
    assert first == "keras_mirror 0.1.0, Keras 3.15.1, TensorFlow 2.21.0"
    where, _, rest = second.partition(", global batch ")
    assert where == "4 replicas (GPU:0 (A100), GPU:1 (A100) on each of 2 workers)"
    assert rest == "64, 45 steps an epoch, 20 epochs, mixed_float16"
    assert within == f"  epoch  3/20  9/45  2.0 s left  1:00 of the run  {LINE}"
    assert epoch == f"epoch  3/20  {LINE}  4.2 s  1:00 left"


def test_a_terminal_gets_a_bar_and_ci_doesnt(monkeypatch):
    pytest.importorskip("rich")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CI", "1")
    assert type(console.choose(redirect=False)) is console.Plain
    monkeypatch.delenv("CI")
    bar = console.choose(redirect=True)
    assert isinstance(bar, console.Terminal)
    bar.begin(FACTS)
    bar.draw(Progress())
    print("said by somebody else")
    bar.draw(Progress())
    bar.epoch(Progress())
    bar.close()
    said = out.getvalue()
    assert sys.stdout is out
    assert "━" in said
    assert "9/45" in said
    assert "said by somebody else" in said
    assert "odd [red]" in said
    assert "epoch  3/20" in said
    # The cursor is there, whatever happens.
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    assert type(console.choose(redirect=False)) is console.Plain


def test_a_notebook_gets_one_display(monkeypatch):
    shown = []

    class Handle:
        def update(self, page):
            shown.append(page)

    def display(page, display_id):
        shown.append(page)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    notebook = console.choose(redirect=False)
    assert isinstance(notebook, console.Notebook)
    notebook.begin(FACTS)
    notebook.draw(Progress(logs={"<loss>": 1.0}))
    assert '<progress value="0.2000"' in shown[-1]
    assert "&lt;loss&gt; 1.0000" in shown[-1]
    notebook.epoch(Progress())
    notebook.close()
    assert "<progress" not in shown[-1]
    assert "4.2 s" in shown[-1]


def test_drawing_is_throttled():
    throttle = console.Throttle(0.1)
    start = throttle._next
    due = [step for step in range(1000) if throttle.due(start + step / 1000)]
    assert len(due) == 10


def test_speed_leaves_out_what_isnt_known():
    record = {"logs": {}, "examples_per_second": None, "step_ms": None, "waiting_share": None, "memory_mb": {}}
    assert text.speed(record) == []
