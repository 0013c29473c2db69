"""The mixed-precision switch: what it sets, what it restores, what "auto" chooses, and what it warns of."""

import types
import warnings

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_mirror
from keras_mirror import MirroredFitter, loss_scaling, precision, precision_scope, replicas, set_precision

POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]


def policy():
    return keras.config.dtype_policy().name


@pytest.fixture
def gpus(monkeypatch):
    """Makes TensorFlow report GPUs of these compute capabilities."""

    def report(*capabilities):
        devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(len(capabilities))]
        known = dict(zip((d.name for d in devices), capabilities, strict=True))
        original = tf.config.get_visible_devices
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: devices if kind == "GPU" else original(kind))
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda device: {} if known[device.name] is None else {"compute_capability": known[device.name]},
        )

    precision._said.clear()
    return report


@pytest.mark.parametrize("name", POLICIES)
def test_set_precision_sets_keras_policy_and_says_which(name):
    assert set_precision(name) == name == policy()
    assert layers.Dense(1).dtype_policy.name == name
    assert set_precision(None) == name == policy()


@pytest.mark.parametrize("name", POLICIES)
def test_the_scope_is_left_as_it_was_entered(name):
    set_precision("mixed_bfloat16")
    with precision_scope(name) as found:
        assert found == name == policy()
    assert policy() == "mixed_bfloat16"


def test_the_scope_is_left_after_an_exception_too():
    with pytest.raises(KeyError), precision_scope("mixed_float16"):
        raise KeyError("users own")
    assert policy() == "float32"
    with pytest.raises(KeyError):
        MirroredFitter(lambda: {}["nothing"], devices="cpu:2", precision="mixed_float16")
    assert policy() == "float32"


def test_a_factory_that_sets_a_policy_itself_leaves_none_behind():
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        return keras.Sequential([keras.Input((2,)), layers.Dense(1)])

    assert MirroredFitter(build, devices="cpu:2").layers[0].compute_dtype == "bfloat16"
    assert policy() == "float32"


def test_policies_that_layers_were_given_are_kept():
    def build():
        return keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.Dense(1, dtype="float32")])

    model = MirroredFitter(build, devices="cpu:2", precision="mixed_float16")
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]


@pytest.mark.parametrize("bad", ["float16", "mixed", "fp16", 16, True, keras.DTypePolicy("mixed_float16")])
@pytest.mark.parametrize("call", ["set_precision", "precision_scope", "MirroredFitter"])
def test_anything_else_is_refused_with_what_there_is(call, bad):
    calls = {
        "set_precision": set_precision,
        "precision_scope": lambda bad: precision_scope(bad).__enter__(),
        "MirroredFitter": lambda bad: MirroredFitter(lambda: None, devices="cpu:2", precision=bad),
    }
    with pytest.raises(ValueError, match=r"precision.*one of None, 'float32', 'mixed_float16', 'mixed_bfloat16', 'auto'"):
        calls[call](bad)
    assert policy() == "float32"


CHOICES = [
    ([], "float32"),
    ([(6, 1)], "float32"),
    ([(7, 0)], "mixed_float16"),
    ([(7, 5), (7, 0)], "mixed_float16"),
    ([(8, 0)], "mixed_bfloat16"),
    ([(9, 0), (12, 0)], "mixed_bfloat16"),
    ([(10, 3)], "mixed_bfloat16"),
    ([(9, 0), (7, 5)], "mixed_float16"),
    ([(9, 0), (6, 0)], "float32"),
    ([None], "float32"),
]


@pytest.mark.parametrize(("capabilities", "wanted"), CHOICES)
def test_auto_asks_the_oldest_visible_gpu_and_says_once_what_it_chose(gpus, capsys, capabilities, wanted):
    gpus(*capabilities)
    assert set_precision("auto") == wanted == policy()
    set_precision("auto")
    said = capsys.readouterr().err
    assert said.count("keras_mirror") == 1
    assert f'precision="auto" is "{wanted}" here' in said
    if capabilities and all(capabilities):
        assert "compute capability {}.{}".format(*min(capabilities)) in said


def test_auto_on_simulated_replicas_is_float32_whatever_gpus_there_are(gpus):
    gpus((9, 0))
    model = MirroredFitter(lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1)]), devices="cpu:2", precision="auto")
    assert model.layers[0].compute_dtype == "float32"


def test_auto_asks_the_strategys_own_devices(gpus):
    gpus((8, 6), (6, 0), (7, 5))
    devices = ("/job:localhost/replica:0/task:0/device:GPU:0", "/replica:0/task:0/device:GPU:2")
    two_of_three = types.SimpleNamespace(num_replicas_in_sync=2, extended=types.SimpleNamespace(worker_devices=devices))
    assert replicas.lowest_compute_capability(two_of_three) == (7, 5)
    assert replicas.lowest_compute_capability() == (6, 0)


# -- warnings


def softmax(**last):
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(3, "softmax", **last)])


def softmax_layer():
    inputs = keras.Input((3,))
    hidden = layers.Dense(3)(inputs)
    return keras.Model(inputs, [layers.Softmax(name="chances")(hidden), layers.Dense(1, dtype="float32")(hidden)])


def nested():
    inputs = keras.Input((3,))
    return keras.Model(inputs, softmax()(inputs))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4)
        self.out = layers.Dense(3, "softmax")

    def call(self, x):
        return self.out(self.hidden(x))


@pytest.mark.parametrize("factory", [softmax, softmax_layer, nested, Subclassed])
def test_a_softmax_output_in_float16_is_warned_of_once_and_at_the_users_line(factory):
    with pytest.warns(UserWarning, match=r"softmax in float16(.|\n)*dtype=\"float32\"") as caught:
        model = MirroredFitter(factory, devices="cpu:2", precision="mixed_float16")
    assert [w.filename for w in caught if "softmax" in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile("adam", "mse")


def attends():
    inputs = keras.Input((3,))
    weights = layers.Softmax()(inputs)
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(layers.Multiply()([inputs, weights])))


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (lambda: softmax(dtype="float32"), "mixed_float16"),
        (attends, "mixed_float16"),
        (softmax, "mixed_bfloat16"),
        (softmax, None),
    ],
)
def test_nothing_is_warned_of_that_is_well(factory, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MirroredFitter(factory, devices="cpu:2", precision=name)
        model.compile("adam", "mse", metrics=["mae"])


def test_a_metric_in_float16_is_warned_of():
    model = MirroredFitter(lambda: softmax(dtype="float32"), devices="cpu:2", precision="mixed_float16")
    with pytest.warns(UserWarning, match="'mine' is computed in float16, which can't count beyond 2048"):
        model.compile("adam", "mse", metrics=[keras.metrics.MeanSquaredError("mine", dtype="float16")])


def test_loss_scaling_of_a_plain_model_is_refused():
    model = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ValueError, match=r"isn't a MirroredFitter's(.|\n)*MirroredFitter\(build_model\)"):
        loss_scaling(model)


def test_the_names_are_public():
    for name in ("set_precision", "precision_scope", "loss_scaling", "LossScaling", "LossScaleMonitor"):
        assert name in keras_mirror.__all__
