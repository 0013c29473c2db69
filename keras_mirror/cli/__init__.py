"""The command line, `keras-mirror COMMAND`: one module for each command, and none of them imports TensorFlow unless it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import keras_mirror
from keras_mirror.cli import demo, report
from keras_mirror.cli.common import CANNOT_RUN, INTERRUPTED, CannotRun

# Each has add_to(commands), which adds a parser whose default `run` takes the parsed arguments and returns the exit status.
_COMMANDS = (demo, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit status. Arguments that can't be parsed, `--help` and `--version` end the process instead, as argparse does.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except CannotRun as error:
        print(f"keras-mirror {arguments.command}: error: {error}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print(f"keras-mirror {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-mirror",
        description="Train a Keras model on several devices exactly as on one.",
        epilog="`keras-mirror COMMAND --help` says what a command does, and what its exit status means.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keras-mirror {keras_mirror.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    return parser
