"""Runs the Python code blocks of README.md and docs/ as a reader would: a page's blocks in order, in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NO_RUN = "<!-- no-run -->"
LIMIT_S = 240

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[ {.]*(?P<language>\w*)")
_PYTHON = {"py", "python", "python3"}


def script_of(page: str) -> str:
    """Returns a page's Python blocks as one script, in which every line has the number it has on the page.

    Args:
        page: The page's Markdown. A block that follows a line `<!-- no-run -->` is left out.

    Returns:
        The script; empty where the page has no block to run.
    """
    script: list[str] = []
    opened: re.Match[str] | None = None
    runs = marked = False
    for number, line in enumerate(page.splitlines(), start=1):
        code = ""
        if opened is not None:
            if line.strip().startswith(opened["fence"]) and not line.strip().strip(opened["fence"][0]):
                opened = None
            elif runs:
                code = line.removeprefix(opened["indent"])
        elif opened := _FENCE.match(line):
            python = opened["language"].lower() in _PYTHON
            if marked and not python:
                raise ValueError(f"Line {number}: {NO_RUN} stands before a block that isn't Python.")
            runs, marked = python and not marked, False
        elif line.strip():
            if marked:
                raise ValueError(f"Line {number}: {NO_RUN} doesn't stand directly before a block.")
            marked = line.strip() == NO_RUN
        script.append(code)
    if opened is not None:
        raise ValueError("The last block isn't closed.")
    return "\n".join(script) + "\n" if any(script) else ""


SCRIPTS = {str(page.relative_to(ROOT)): script_of(page.read_text(encoding="utf-8")) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, script in SCRIPTS.items() if script])
def test_code_blocks_run(page: str, tmp_path: Path) -> None:
    # A file of its own, and not exec: tf.function and inspect read a function's source from its file.
    # The prefix: logging.md mustn't stand for the standard library's module.
    script = tmp_path / f"page_{Path(page).stem.replace('-', '_')}.py"
    script.write_text(SCRIPTS[page], encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{page}, exit status {done.returncode}; lines are the page's:\n{done.stdout[-8000:]}"


def test_readme_shows_code() -> None:
    assert SCRIPTS["README.md"]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("text\n```python\na = 1\n```\nmore\n```py\nb = a\n```\n", "\n\na = 1\n\n\n\nb = a\n\n"),
        ("```sh\nls\n```\n```\nplain\n```\n", ""),
        ("<!-- no-run -->\n\n```python\nboom\n```\n```python\na = 1\n```\n", "\n\n\n\n\n\na = 1\n\n"),
        ('- item\n\n  ```python title="x"\n  if a:\n      b\n  ```\n', "\n\n\nif a:\n    b\n\n"),
        ("~~~~ python\n~~~\n```\n~~~~\n", "\n~~~\n```\n\n"),
    ],
)
def test_script_keeps_line_numbers(page: str, expected: str) -> None:
    assert script_of(page) == expected


@pytest.mark.parametrize(
    "page",
    ["```python\na = 1\n", "<!-- no-run -->\ntext\n```python\n```\n", "<!-- no-run -->\n```sh\nls\n```\n"],
)
def test_faulty_page_is_rejected(page: str) -> None:
    with pytest.raises(ValueError, match=r"block"):
        script_of(page)
