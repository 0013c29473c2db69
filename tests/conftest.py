"""One TensorFlow process with four simulated replicas for all tests; what a test changes of Keras's globals is put back."""

import itertools
import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import pytest
from hypothesis import HealthCheck, Phase, settings
from stack import clear_session, keras

from keras_mirror import replicas

replicas.device_names("cpu:4")

# A shell starts what it runs with "&" with SIGINT ignored, and tests are about what it does.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that needs another number of examples says so itself. The nightly profile: tox run -e nightly.
for name, examples in (("ci", 200), ("nightly", 10_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        stateful_step_count=10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
settings.load_profile("ci")

_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _keras_globals():
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    # It collects garbage by default, which after every test took more time than the tests do.
    clear_session(collect=next(_tests) % 40 == 0)
