"""From `devices` to a strategy, and every way in which that can be asked wrongly."""

import types

import pytest
import tensorflow as tf
from fresh_process import run

from keras_mirror import MirroredFitter, replicas


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are GPUs of the given models; returns the calls that would have made a strategy."""

    def pretend(*models):
        names = [f"/physical_device:GPU:{i}" for i in range(len(models))]
        physical = [types.SimpleNamespace(name=name, device_type="GPU") for name in names]
        logical = [types.SimpleNamespace(name=f"/device:GPU:{i}", device_type="GPU") for i in range(len(models))]
        details = {name: {"device_name": model} for name, model in zip(names, models, strict=True)}
        real = tf.config.list_logical_devices

        def devices(kind=None):
            return {"GPU": logical, None: [*real(), *logical]}.get(kind) or real(kind)

        made = []
        monkeypatch.setattr(tf.config, "list_logical_devices", devices)
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: physical)
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details[device.name])
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda *args, **kwargs: made.append((args, kwargs)))
        return made

    return pretend


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_simulated_replicas_are_as_many_as_asked_for(count):
    assert replicas.make_strategy(f"cpu:{count}").num_replicas_in_sync == count


@pytest.mark.parametrize("name", ["CPU:1", "cpu:1", "/cpu:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"])
def test_a_device_may_be_named_in_any_of_tensorflows_ways(name):
    assert replicas.device_names([name]) == ["CPU:1"]


def test_without_gpus_the_default_is_one_cpu_replica():
    assert replicas.device_names(None) == ["CPU:0"]


def test_the_default_is_every_gpu(gpus):
    gpus("A", "A", "A")
    assert replicas.device_names(None) == ["GPU:0", "GPU:1", "GPU:2"]
    assert replicas.device_names(2) == ["GPU:0", "GPU:1"]
    assert replicas.device_names(["GPU:0", "gpu:2"]) == ["GPU:0", "GPU:2"]


@pytest.mark.parametrize("devices", [True, 1.5, {"a": 1}, [1, 2], b"cpu:2"])
def test_another_type_is_a_type_error(devices):
    with pytest.raises(TypeError, match=r'^MirroredFitter: devices=.*expected None, a number of GPUs, "cpu:N" or a list'):
        replicas.device_names(devices)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, r"devices=0, expected a number of GPUs of at least 1"),
        (-1, r"devices=-1, expected a number of GPUs of at least 1"),
        (4, r'devices=4 asks for 4 GPUs, found 0\.\n.*devices="cpu:4"'),
        ("gpu:7", r'names GPU:7, found CPU:0, CPU:1, CPU:2, CPU:3\.\n.*devices="cpu:1"'),
        (["GPU:0", "CPU:0"], r"names GPU:0, found CPU:0"),
        (["CPU:0", "CPU:0"], r"devices=\['CPU:0', 'CPU:0'\] names a device twice"),
        (["CPU:0", "/device:cpu:0"], r"names a device twice"),
        ([], r"devices=\[\] names no device, expected at least one"),
        ("cpu:0", r'devices="cpu:0", expected at least one replica'),
        ("cpu:-1", r"'cpu:-1' is no device name, expected one such as"),
        ("cpu", r"'cpu' is no device name, expected one such as"),
    ],
)
def test_devices_that_are_not_there_are_named(devices, message):
    with pytest.raises(ValueError, match=message) as caught:
        replicas.device_names(devices)
    assert str(caught.value).startswith("MirroredFitter: ")


def test_more_gpus_than_there_are_names_those_found(gpus):
    gpus("A", "A")
    with pytest.raises(ValueError, match=r'asks for 4 GPUs, found 2 \(GPU:0, GPU:1\)\.\n.*devices="cpu:4"'):
        replicas.device_names(4)


def test_a_simulated_count_means_the_same_in_capitals():
    assert len(replicas.device_names("CPU:3")) == 3


def test_simulated_replicas_asked_too_late_say_what_to_move_where():
    script = """
import tensorflow as tf
from keras_mirror import MirroredFitter
tf.constant(1)
try:
    MirroredFitter(lambda: None, devices="cpu:3")
except RuntimeError as error:
    print(error)
"""
    said = run(script, KERAS_BACKEND="tensorflow")
    assert 'devices="cpu:3" asks for 3 simulated replicas, but TensorFlow has already started with 1' in said
    assert 'Move MirroredFitter(..., devices="cpu:3") before the first tensor' in said
    assert "restart the kernel" in said


def test_more_simulated_replicas_than_made_at_first_say_to_ask_for_the_largest_first():
    with pytest.raises(RuntimeError, match=r"asks for 9 simulated replicas.*started with 4.*(\n.*)*ask for the largest first"):
        replicas.device_names("cpu:9")


def test_devices_of_different_kinds_are_warned_of(gpus):
    made = gpus("A")
    with pytest.warns(UserWarning, match=r"\['GPU:0', 'CPU:0'\] are of different kinds \(CPU, GPU\)"):
        replicas.make_strategy(["GPU:0", "CPU:0"])
    assert isinstance(made[0][1]["cross_device_ops"], tf.distribute.ReductionToOneDevice)


def test_gpus_of_different_models_are_warned_of_at_the_users_line(gpus, monkeypatch):
    gpus("Slow One", "Fast One")
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda names: (_ for _ in ()).throw(InterruptedError))
    with (
        pytest.warns(UserWarning, match=r"different models \(GPU:0 Slow One, GPU:1 Fast One\)") as caught,
        pytest.raises(InterruptedError),
    ):
        MirroredFitter(lambda: None, devices=2)
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_gpus_of_one_model_use_tensorflows_own_reduction(gpus):
    made = gpus("A", "A")
    replicas.make_strategy(2)
    assert made == [((["GPU:0", "GPU:1"],), {})]


@pytest.mark.parametrize("strategy", ["mirrored", 2, tf.distribute.MirroredStrategy])
def test_what_is_no_strategy_is_a_type_error(strategy):
    with pytest.raises(TypeError, match=r"^MirroredFitter: strategy=.*expected a tf\.distribute\.Strategy"):
        replicas.check_strategy(strategy)


@pytest.mark.parametrize("make", [tf.distribute.experimental.CentralStorageStrategy, tf.distribute.get_strategy])
def test_a_strategy_without_a_copy_on_every_replica_is_refused(make):
    with pytest.raises(ValueError, match=r"strategy is a \w+Strategy, expected MirroredStrategy or\s+MultiWorker"):
        replicas.check_strategy(make())


def test_a_users_own_mirrored_strategy_is_taken_as_it_is():
    strategy = replicas.make_strategy("cpu:2")
    assert replicas.check_strategy(strategy) is strategy


@pytest.mark.parametrize(
    ("cluster", "task", "chief"),
    [
        ({}, (None, None), True),
        ({"worker": ["a:1", "b:1"]}, ("worker", 0), True),
        ({"worker": ["a:1", "b:1"]}, ("worker", 1), False),
        ({"chief": ["c:1"], "worker": ["a:1"]}, ("worker", 0), False),
        ({"chief": ["c:1"], "worker": ["a:1"]}, ("chief", 0), True),
        ({"worker": ["a:1"], "evaluator": ["e:1"]}, ("evaluator", 0), False),
    ],
)
def test_the_first_worker_is_the_chief(cluster, task, chief):
    spec = tf.train.ClusterSpec(cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=task[0], task_id=task[1])
    assert replicas.is_chief(types.SimpleNamespace(cluster_resolver=resolver)) is chief


def test_one_process_is_its_own_chief():
    assert replicas.is_chief(replicas.make_strategy("cpu:2"))
