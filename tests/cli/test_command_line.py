"""The command line before any command runs: what it says of itself, how it takes arguments, what it says of bad ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_mirror
from keras_mirror.cli import common, demo, main

ROOT = Path(__file__).resolve().parents[2]
_BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from keras_mirror.cli import main
sys.exit(main())
"""


def without(blocked: set[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs keras-mirror in a process that can't import some packages."""
    return subprocess.run(
        [sys.executable, "-c", _BLOCKER.format(blocked=blocked), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], f"keras-mirror {keras_mirror.__version__}\n"),
        (["--help"], "demo"),
        (["demo", "--help"], "exit status:"),
    ],
)
def test_help_and_version_import_no_heavy_package(arguments, said):
    done = without({"tensorflow", "keras", "sklearn", "numpy"}, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


def test_help_documents_each_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = capsys.readouterr().out.partition("exit status:")[2]
    for status in (common.DONE, common.FAILED, common.CANNOT_RUN, common.INTERRUPTED):
        assert f"\n  {status} " in text


def test_python_m_runs_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "keras_mirror", "--version"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == f"keras-mirror {keras_mirror.__version__}\n"


@pytest.mark.parametrize(
    ("missing", "name"), [("sklearn", "scikit-learn"), ("tensorflow", "TensorFlow")], ids=["scikit-learn", "tensorflow"]
)
def test_a_missing_package_names_the_extra(missing, name):
    done = without({missing}, "demo")
    assert done.returncode == common.CANNOT_RUN
    assert done.stdout == ""
    assert done.stderr == (
        f'keras-mirror demo: error: {name} isn\'t installed: pip install "keras-mirror[cpu,demo]" brings it'
        ' ("keras-mirror[cuda,demo]" on a machine with NVIDIA GPUs).\n'
    )


def test_a_package_that_lacks_one_of_its_own_is_called_broken():
    done = without({"scipy"}, "demo")
    assert done.returncode == common.CANNOT_RUN
    assert "scikit-learn is installed but can't be imported (No module named 'scipy" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_keras_backend_is_refused():
    done = without(set(), "demo", KERAS_BACKEND="jax")
    assert done.returncode == common.CANNOT_RUN
    assert "found KERAS_BACKEND=jax, expected tensorflow" in done.stderr


def fail_to_import():
    os.write(2, b"the reason\n")
    raise ImportError


def test_what_tensorflow_writes_at_its_start_is_shown_only_where_it_fails(monkeypatch, capfd):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    with common._quiet_tensorflow():
        os.write(2, b"noise\n")
    assert (os.environ["TF_CPP_MIN_LOG_LEVEL"], capfd.readouterr().err) == ("3", "")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    with pytest.raises(ImportError), common._quiet_tensorflow():
        fail_to_import()
    assert capfd.readouterr().err == "the reason\n"


def test_a_log_level_of_the_users_stays(monkeypatch, capfd):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with common._quiet_tensorflow():
        os.write(2, b"wanted\n")
    assert (os.environ["TF_CPP_MIN_LOG_LEVEL"], capfd.readouterr().err) == ("0", "wanted\n")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu:4", "cpu:4"),
        ("CPU:04", "cpu:4"),
        ("2", 2),
        ("GPU:0", ["GPU:0"]),
        ("GPU:0,gpu:2", ["GPU:0", "gpu:2"]),
    ],
)
def test_devices_are_what_MirroredFitter_takes(text, devices):
    assert common.devices(text) == devices


@pytest.mark.parametrize("text", ["", "banana", "cpu", "cpu:", "cpu:0", "cpu:x", "0", "-1", "1.5", "GPU:0,", "GPU:0;GPU:1"])
def test_devices_that_make_no_sense_name_cpu_n(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", f"--devices={text}"])
    assert ended.value.code == common.CANNOT_RUN
    assert f"argument --devices: {text!r}, expected cpu:N for N simulated replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["demo", "--epochs", "0"], "argument --epochs: '0', expected an integer of at least 1"),
        (["demo", "--batch-size", "1e3"], "argument --batch-size: '1e3', expected an integer of at least 1"),
        (["demo", "--seed", "4294967296"], "argument --seed: '4294967296', expected an integer from 0 to 4294967295"),
        (["demo", "--seed=-1"], "argument --seed: '-1', expected"),
        (["demo", "--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == common.CANNOT_RUN
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.h5", "expected a file name that ends in .keras"),
        ("model", "expected a file name that ends in .keras"),
        ("missing/model.keras", "make it first"),
        ("folder.keras", "is a directory"),
        ("model.keras/model.keras", "make it first"),
    ],
)
def test_a_path_that_cannot_be_saved_to_is_refused_before_anything_runs(name, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder.keras").mkdir()
    (tmp_path / "model.keras").write_bytes(b"")
    monkeypatch.setattr(demo, "run", lambda _: pytest.fail("the demo ran"))
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--save", str(tmp_path / name)])
    assert ended.value.code == common.CANNOT_RUN
    message = capsys.readouterr().err
    assert "argument --save: " in message
    assert said in message


def test_a_path_without_permission_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common.os, "access", lambda path, mode: False)  # Root may write everywhere.
    with pytest.raises(SystemExit):
        main(["demo", "--save", str(tmp_path / "model.keras")])
    assert "can't be written: permission denied" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def run(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == common.INTERRUPTED
    assert capsys.readouterr().err == "keras-mirror demo: interrupted\n"
