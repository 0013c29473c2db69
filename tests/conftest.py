"""One TensorFlow process with four simulated replicas for all tests; what a test changes of Keras's globals is put back."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import pytest

from keras_mirror import replicas

replicas.device_names("cpu:4")


@pytest.fixture(autouse=True)
def _keras_globals():
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    keras.backend.clear_session()
