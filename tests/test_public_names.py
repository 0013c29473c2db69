"""The public surface: what others write against, and that it costs nothing to import."""

import inspect

import pytest
from fresh_process import run

import keras_mirror


def test_every_public_name_is_there():
    wanted = {"MirroredFitter", "EquivalenceReport", "LinearScalingWarmup", "SingleCopyCheckpoint", "__version__"}
    wanted |= {"RankZero", "RankZeroLogger", "get_logger", "rank_zero_only"}
    assert wanted <= set(keras_mirror.__all__)
    for name in keras_mirror.__all__:
        assert getattr(keras_mirror, name) is not None
    assert dir(keras_mirror) == sorted(keras_mirror.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'keras_mirror' has no attribute 'Mirror'"):
        _ = keras_mirror.Mirror


def test_the_constructor_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.MirroredFitter).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "model_factory"}
    assert defaults == {
        "devices": None,
        "strategy": None,
        "precision": None,
        "batch": "global",
        "seed": None,
        "step_sums": False,
    }
    kinds = {name: p.kind for name, p in parameters.items()}
    assert kinds.pop("model_factory") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_the_warmup_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.LinearScalingWarmup).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "warmup_epochs": 5,
        "scale": None,
        "base_batch_size": None,
        "rule": "linear",
        "momentum_correction": True,
        "start_factor": None,
        "verbose": 0,
        "warmup_steps": None,
    }


def test_the_checkpoint_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.SingleCopyCheckpoint).parameters
    assert {name: p.default for name, p in parameters.items() if name != "directory"} == {
        "every": "epoch",
        "keep_last": 1,
        "keep_best": 0,
        "monitor": "val_loss",
        "mode": "auto",
        "resume": True,
        "save_on_interrupt": True,
        "background": True,
        "weights_only": False,
        "on_error": "raise",
    }


def test_rank_zero_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.RankZero).parameters
    assert {name: p.default for name, p in parameters.items() if name != "callback"} == {"decides": "auto"}


def test_the_logger_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.RankZeroLogger).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "every": 10,
        "console": True,
        "csv": None,
        "jsonl": None,
        "tensorboard": None,
    }


def test_verify_has_the_agreed_parameters():
    parameters = inspect.signature(keras_mirror.MirroredFitter.verify).parameters
    assert list(parameters)[:3] == ["self", "x", "y"]
    assert {"batch_size", "steps"} <= set(parameters)


@pytest.mark.parametrize("name", [n for n in keras_mirror.__all__ if n != "__version__"])
def test_every_public_name_is_documented(name):
    public = getattr(keras_mirror, name)
    assert inspect.getdoc(public)
    for attribute, value in vars(public).items():
        if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{attribute} has no docstring"


def test_importing_the_package_imports_no_framework():
    loaded = run("import keras_mirror, sys; print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))")
    assert loaded == "[]\n"


def test_a_star_import_brings_the_public_names():
    brought = run("from keras_mirror import *; print(MirroredFitter.__name__, __version__)")
    assert brought == f"MirroredFitter {keras_mirror.__version__}\n"
