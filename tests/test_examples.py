"""Each example runs as a user runs it, on two simulated replicas, and reaches something."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# file: (epochs, what it prints with a number in a group, the smallest and the largest number)
REACHED = {
    "mixed_precision.py": (8, r"replicas: 2, accuracy on 360 digits held out: (\S+)", 0.93, 1.0),
    "plain_classifier.py": (8, r"replicas: 2, accuracy on 360 digits held out: (\S+)", 0.93, 1.0),
    # Untrained: 44. With the mean image of all digits for every digit: 27.1.
    "custom_train_step.py": (8, r"replicas: 2, loss on 360 digits held out: (\S+)", 20.0, 26.5),
    "resume.py": (8, r"replicas: 2, accuracy on 360 digits held out: (\S+)", 0.93, 1.0),
    "one_fit.py": (10, r"replicas: 2, accuracy on 360 digits held out: (\S+)", 0.93, 1.0),
    "linear_scaling.py": (12, r"replicas, scaled: accuracy (\S+)", 0.93, 1.0),
    "transfer_learning.py": (3, r"replicas: 2, accuracy on 180 digits held out: (\S+)", 0.95, 1.0),
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example):
    epochs, pattern, lowest, highest = REACHED[example.name]
    done = subprocess.run(
        [sys.executable, str(example), "--epochs", str(epochs)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert lowest <= float(re.search(pattern, done.stdout)[1]) <= highest
    if example.name == "transfer_learning.py":
        assert "the frozen base is unchanged, bit for bit: 10 arrays" in done.stdout
    if example.name == "resume.py":
        assert "the process would end here, with status 143" in done.stdout
        assert "going on from epoch 3, batch 10 of 45 (step 100)" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_docs_describe_it(example):
    assert f"examples/{example.name}" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
