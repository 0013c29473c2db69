"""Runs a script in a Python process of its own, where the state of this one can't help it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_BLOCKER = """
import sys

class _Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, _Blocker())
"""


def run(
    script: str,
    *arguments: object,
    without: tuple[str, ...] = (),
    bare: Path | None = None,
    limit_s: float = 240,
    **environment: str,
) -> str:
    """Returns what the script prints to stdout; its failure is the test's, with what it wrote to stderr.

    Args:
        script: Python source.
        *arguments: its `sys.argv[1:]`.
        without: packages that can't be imported.
        bare: no installed package can be imported, only keras_mirror and what lies in this folder.
        limit_s: after how many seconds the process is ended, which is a failure.
        **environment: variables beside this process's own.
    """
    path = [str(ROOT), str(ROOT / "tests")] if bare is None else [str(bare), str(ROOT)]
    done = subprocess.run(
        [sys.executable, *(["-S"] if bare else []), "-c", _BLOCKER.format(without=set(without)) + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(path), **environment},
    )
    if done.returncode:
        raise AssertionError(f"the script ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
