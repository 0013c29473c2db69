"""What a user reads who has no TensorFlow, an unsupported version, or another Keras backend."""

import keras
import pytest
from fresh_process import run

from keras_mirror import requirements

ASK = """
import keras_mirror
try:
    keras_mirror.MirroredFitter
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("imported")
"""


@pytest.fixture
def installed(tmp_path):
    """A folder with packages that have a version and nothing else, and the question asked where only they are installed."""

    def ask(tensorflow=None, keras=None, backend="tensorflow"):
        for name, version in (("tensorflow", tensorflow), ("keras", keras)):
            if version is not None:
                (tmp_path / name).mkdir()
                (tmp_path / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        if keras is not None:
            with (tmp_path / "keras" / "__init__.py").open("a") as file:
                file.write(f"class backend:\n    backend = staticmethod(lambda: {backend!r})\n")
        return run(ASK, bare=tmp_path)

    return ask


def test_without_tensorflow_the_extra_to_install_is_named(installed):
    said = installed(keras="3.15.1")
    assert said.startswith("ImportError: keras_mirror: found no TensorFlow, expected 2.18 to 2.21")
    assert 'pip install "keras-mirror[cpu]"' in said
    assert "[cuda]" in said


def test_without_keras_the_extra_to_install_is_named(installed):
    said = installed(tensorflow="2.21.0")
    assert said.startswith("ImportError: keras_mirror: found no Keras, expected 3.10 or newer")
    assert 'pip install "keras-mirror[cpu]"' in said


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"tensorflow": "2.17.1", "keras": "3.15.1"}, "found TensorFlow 2.17.1, expected 2.18 to 2.21"),
        ({"tensorflow": "2.22.0-dev20260301", "keras": "3.15.1"}, "found TensorFlow 2.22.0-dev20260301, expected 2.18 to 2.21"),
        ({"tensorflow": "2.21.0", "keras": "3.9.2"}, "found Keras 3.9.2, expected 3.10 or newer"),
        ({"tensorflow": "2.14.0", "keras": "2.14.0"}, "found Keras 2.14.0, expected 3.10 or newer"),
        ({"tensorflow": "2.16.1", "keras": "2.15.0"}, "found TensorFlow 2.16.1, expected 2.15 to 2.15"),
    ],
)
def test_an_unsupported_version_is_named_with_the_supported_ones(installed, versions, found):
    said = installed(**versions)
    assert said.startswith("ImportError: ")
    assert found in said
    assert "pip install" in said


@pytest.mark.parametrize(("tensorflow", "keras"), [("2.18.0", "3.10.0"), ("2.21.3", "3.15.1"), ("2.20.0rc1", "4.0.0")])
def test_the_ends_of_the_supported_range_pass(installed, tensorflow, keras):
    # The check passes, and the real import fails on the stand-ins, which have nothing else.
    said = installed(tensorflow=tensorflow, keras=keras)
    assert "expected" not in said


def test_on_jax_the_message_says_why_and_what_to_do(installed):
    said = installed(tensorflow="2.21.0", keras="3.15.1", backend="jax")
    assert said.startswith("RuntimeError: keras_mirror: Keras runs on the 'jax' backend, expected 'tensorflow'")
    assert "KERAS_BACKEND=tensorflow" in said
    assert "keras.distribution.DataParallel" in said


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_real_keras_on_another_backend_is_refused_whether_that_is_installed_or_not(backend):
    said = run(ASK, KERAS_BACKEND=backend)
    assert said.startswith(f"RuntimeError: keras_mirror: Keras runs on the '{backend}' backend, expected 'tensorflow'")
    assert "KERAS_BACKEND=tensorflow" in said


def test_this_process_is_supported(monkeypatch):
    requirements.check()
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match=r"runs on the 'torch' backend.*\n.*KERAS_BACKEND=tensorflow"):
        requirements.check()
