"""`keras-mirror report`: a page about a run, from the JSON lines that RankZeroLogger wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from keras_mirror.cli import common

_DESCRIPTION = """\
Makes one HTML page from the log of a run, which RankZeroLogger(jsonl="run.jsonl") writes: curves of loss and metrics, learning
rate, loss scale and skipped steps, speed and memory; what deserves a look; the run's facts. The page needs no network and no
other file. The log of a run that goes on still can be read too.
"""
_EPILOG = f"""\
exit status:
  {common.DONE}    the page was written
  {common.CANNOT_RUN}    wrong arguments, a file that is no log, or one that can't be read or written
"""


def add_to(commands: Any) -> None:
    """Adds the command's parser to those of `keras-mirror`."""
    parser = commands.add_parser(
        "report",
        help="make a page about a run from the log that RankZeroLogger wrote",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="the file that RankZeroLogger(jsonl=...) wrote")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="the page (default: the log's name with .html instead of its ending)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="write each chart as a PNG file too, for papers (needs the extra `report`)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and returns the exit status."""
    from keras_mirror.log import page, reading

    output = arguments.output or arguments.log.with_suffix(".html")
    if output.resolve() == arguments.log.resolve():
        raise common.CannotRun(f"{output} is the log itself: pass -o another name.")
    try:
        found = reading.read(arguments.log)
    except OSError as error:
        raise common.CannotRun(f"{arguments.log} can't be read: {error.strerror}.") from error
    except reading.NotALog as error:
        raise common.CannotRun(str(error)) from error
    try:
        output.write_text(page.page(found), encoding="utf-8")
    except OSError as error:
        raise common.CannotRun(f"{output} can't be written: {error.strerror}.") from error
    print(f"{output}: {len(found.epochs)} epochs, {len(found.steps)} lines within them")
    for each in reading.findings(found):
        print(f"{each.severity}: {each.text}")
    if arguments.png is not None:
        _save_figures(found, arguments.png)
    return common.DONE


def _save_figures(found: Any, folder: Path) -> None:
    from keras_mirror.log import figures

    try:
        paths = figures.save(found, folder)
    except ImportError as error:
        raise common.CannotRun('matplotlib isn\'t installed: pip install "keras-mirror[report]" brings it.') from error
    except OSError as error:
        raise common.CannotRun(f"{folder} can't be written: {error.strerror}.") from error
    print(f"{folder}: {len(paths)} figures")
