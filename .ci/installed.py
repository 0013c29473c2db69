"""Checks the package as it was installed from its wheel: every file is there, and the console script's entry loads."""

import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

source = Path(__file__).resolve().parent.parent / "keras_mirror"
spec = importlib.util.find_spec("keras_mirror")
if spec is None or spec.origin is None:
    sys.exit("keras_mirror is not installed.")
installed = Path(spec.origin).parent
if installed == source:
    sys.exit("keras_mirror is imported from the source tree: install the wheel, and run this with python -I.")

wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
missing = sorted(str(path) for path in wanted if not (installed / path).is_file())
if missing:
    sys.exit(f"The wheel lacks {missing}. Is there an __init__.py, or a line in setup.cfg's package_data?")

(script,) = entry_points(group="console_scripts", name="keras-mirror")
script.load()
