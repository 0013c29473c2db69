"""What the commands share: exit statuses, the types of their arguments, and the import of what they need."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_mirror import requirements

DONE, FAILED, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130


class CannotRun(Exception):
    """A command can't start; the text says what was found and what to do."""


def devices(text: str) -> int | str | list[str]:
    """The type of `--devices`: what MirroredFitter takes as `devices`, written on a command line."""
    simulated = re.fullmatch(r"cpu:(\d+)", text, re.IGNORECASE)
    if simulated and int(simulated[1]) > 0:
        return f"cpu:{int(simulated[1])}"
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text)
    if not simulated and re.fullmatch(r"[A-Za-z]+:\d+(,[A-Za-z]+:\d+)*", text):
        return text.split(",")
    raise argparse.ArgumentTypeError(
        f"{text!r}, expected cpu:N for N simulated replicas on the CPU, a number of GPUs, or names such as GPU:0,GPU:2"
    )


def positive(text: str) -> int:
    """The type of a count of at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least 1")
    return int(text)


def seed(text: str) -> int:
    """The type of a random seed."""
    if not re.fullmatch(r"\d+", text) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer from 0 to 4294967295")
    return int(text)


def model_file(text: str) -> Path:
    """The type of a file that a model can be saved to."""
    path = Path(text)
    if path.suffix != ".keras":
        raise argparse.ArgumentTypeError(f"{text!r}, expected a file name that ends in .keras")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory, expected a file name")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}, but there is no directory {str(path.parent)!r}: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: permission denied")
    return path


def import_stack(extras: str, modules: Sequence[tuple[str, str]] = ()) -> None:
    """Imports what a command needs beside Keras and TensorFlow, then these, without TensorFlow's messages at the start.

    Args:
        extras: the extras that bring everything, for the message: "cpu,demo".
        modules: further modules and the names of their packages, such as ("sklearn.datasets", "scikit-learn").

    Raises:
        CannotRun: one of them isn't there, can't be imported, or is a version that isn't supported.
    """
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise CannotRun(f"found KERAS_BACKEND={backend}, expected tensorflow: replicas are those of tf.distribute. Unset it.")
    with _quiet_tensorflow():
        _import([*modules, ("tensorflow", "TensorFlow"), ("keras", "Keras")], extras)
    try:
        requirements.check()
    except (ImportError, RuntimeError) as error:
        raise CannotRun(str(error)) from error


def _import(modules: Sequence[tuple[str, str]], extras: str) -> None:
    for module, package in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise CannotRun(_broken(package, error)) from error
            raise CannotRun(
                f'{package} isn\'t installed: pip install "keras-mirror[{extras}]" brings it'
                f' ("keras-mirror[{extras.replace("cpu", "cuda")}]" on a machine with NVIDIA GPUs).'
            ) from error
        except ImportError as error:
            raise CannotRun(_broken(package, error)) from error


def _broken(package: str, error: ImportError) -> str:
    return f"{package} is installed but can't be imported ({error}): install it anew."


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    """Holds back what TensorFlow writes on its own behalf, unless the user has chosen a level.

    While TensorFlow 2.21 is imported, its libraries write to the process's standard error whatever TF_CPP_MIN_LOG_LEVEL says.
    What was held back is shown where the import fails.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        terminal = os.dup(2)
    except OSError:  # The process has no standard error.
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
