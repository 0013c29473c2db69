"""`keras-mirror demo`: trains a small CNN on real data on several replicas, and compares it with one device."""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import keras_mirror
from keras_mirror.cli import common

if TYPE_CHECKING:
    import keras
    import numpy as np

    from keras_mirror import MirroredFitter

ACCURACY = 0.97
_TRAINED_ON, _HELD_OUT = 1437, 360
_VERIFY_STEPS = 5

_DESCRIPTION = """\
Trains a small convolutional network on scikit-learn's handwritten digits (1797 images of 8 x 8 pixels, which come with
the package) on all GPUs, or without one on 2 simulated replicas on the CPU. Before, it trains copies of the network for
a few steps, one on one device and one on the replicas, and compares them. Afterwards it measures the accuracy on images
that were held out.
"""
_EPILOG = f"""\
exit status:
  {common.DONE}    the accuracy is {ACCURACY} or more, and the replicas agree with one device
  {common.FAILED}    the accuracy is below {ACCURACY}, the replicas differ from one device, or the model couldn't be saved
  {common.CANNOT_RUN}    wrong arguments, a device that isn't there, or a package that isn't installed
  {common.INTERRUPTED}  interrupted
"""


def add_to(commands: Any) -> None:
    """Adds the command's parser to those of `keras-mirror`."""
    parser = commands.add_parser(
        "demo",
        help="train a small network on real data on several replicas, and compare it with one device",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=common.devices,
        metavar="DEVICES",
        help="cpu:N for N simulated replicas on the CPU, a number of GPUs, or names such as GPU:0,GPU:2"
        " (default: all GPUs, or cpu:2 where there is none)",
    )
    parser.add_argument("--epochs", type=common.positive, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--batch-size",
        type=common.positive,
        default=64,
        metavar="N",
        help="the global batch: images in one step over all replicas (default: %(default)s)",
    )
    parser.add_argument(
        "--save", type=common.model_file, metavar="PATH", help="save the trained model to this file, whose name ends in .keras"
    )
    parser.add_argument(
        "--seed",
        type=common.seed,
        default=0,
        metavar="N",
        help="of the initial weights and the order of the images (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns its exit status."""
    if arguments.batch_size > _TRAINED_ON:
        raise common.CannotRun(f"--batch-size {arguments.batch_size} is more than the {_TRAINED_ON} images to train on.")
    clock = _Clock()
    common.import_stack("cpu,demo", [("sklearn.datasets", "scikit-learn")])
    from keras_mirror import MirroredFitter

    devices = _devices_or_default(arguments.devices)
    (x, y), held_out = load_digits()
    model = MirroredFitter(build_model, devices=devices, seed=arguments.seed)
    steps = arguments.epochs * -(-len(x) // arguments.batch_size)
    model.compile(_optimizer(steps), "sparse_categorical_crossentropy", metrics=["accuracy"])
    _print_set_up(model, arguments.batch_size, len(x), len(held_out[0]))
    clock.lap("set-up")

    batch = _uneven(arguments.batch_size, model.num_replicas)
    _say("verify", f"{_VERIFY_STEPS} steps of {batch} images, by one copy of the model on one device and one on the replicas:")
    # Before training: the steps are long then, and a difference would show.
    report = model.verify(x, y, batch_size=batch, steps=_VERIFY_STEPS)
    print(report, flush=True)
    failures = [] if report.passed else ["the replicas differ from one device, see the report above"]
    clock.lap("verification")

    traced = _after_first_step(clock)
    verbose = 1 if sys.stdout.isatty() else 2
    model.fit(x, y, batch_size=arguments.batch_size, epochs=arguments.epochs, verbose=verbose, callbacks=[traced])
    seconds = clock.lap("training")
    accuracy = _print_accuracy(model, *held_out)
    failures += [] if accuracy >= ACCURACY else [f"the accuracy {accuracy:.4f} is below {ACCURACY}: try more epochs"]
    failures += _save(model, arguments.save)
    clock.lap("evaluation and saving" if arguments.save else "evaluation")

    after_first_step = arguments.epochs * len(x) - arguments.batch_size
    _say("time", f"{clock}; training takes {after_first_step / seconds:,.0f} images/s")
    for failure in failures:
        print(f"keras-mirror demo: failed: {failure}.", file=sys.stderr)
    if failures:
        return common.FAILED
    _say("passed", f"accuracy {accuracy:.4f}, and {_replicas(model)} compute what one device computes")
    return common.DONE


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The images (values 0 to 1, with a channel axis) and their digits: (x, y) to train on, and (x, y) held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = data.images[..., None].astype("float32") / 16
    x, held_x, y, held_y = train_test_split(images, data.target, test_size=_HELD_OUT, stratify=data.target, random_state=0)
    return (x, y), (held_x, held_y)


def build_model() -> keras.Model:
    """The network. What it computes in training depends on the global batch alone, so the replicas agree with one device."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *_convolution(32, "1"),
            *_convolution(32, "2"),
            keras.layers.MaxPooling2D(2),
            *_convolution(64, "3"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax", name="classes"),
        ],
        name="digits",
    )


def _convolution(filters: int, number: str) -> list[keras.Layer]:
    import keras

    return [
        keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"convolution_{number}"),
        # Synchronised: mean and variance are those of the global batch, as on one device.
        keras.layers.BatchNormalization(momentum=0.9, synchronized=True, name=f"normalization_{number}"),
        keras.layers.Activation("relu"),
    ]


def _optimizer(steps: int) -> keras.optimizers.Optimizer:
    import keras

    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps))


def _devices_or_default(devices: int | str | list[str] | None) -> int | str | list[str] | None:
    """Checks that the devices are there, before anything is built; simulated ones are made here."""
    import tensorflow as tf

    from keras_mirror import replicas

    if devices is None and not tf.config.list_physical_devices("GPU"):
        devices = "cpu:2"
    try:
        replicas.device_names(devices)
    except (ValueError, RuntimeError) as error:
        raise common.CannotRun(re.sub(r'devices="(cpu:\d+)"', r"--devices \1", str(error))) from error
    return devices


def _after_first_step(clock: _Clock) -> keras.callbacks.Callback:
    """A callback that ends the lap "tracing" after the first step, which traces and compiles the training function."""
    import keras

    class AfterFirstStep(keras.callbacks.Callback):
        seen = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.seen:
                self.seen = True
                clock.lap("tracing")

    return AfterFirstStep()


def _print_set_up(model: MirroredFitter, batch: int, examples: int, held_out: int) -> None:
    import keras
    import tensorflow as tf

    versions = f"keras_mirror {keras_mirror.__version__}, Keras {keras.__version__}, TensorFlow {tf.__version__}"
    _say("versions", versions)
    _say("data", f"scikit-learn's handwritten digits: {examples} images to train on, {held_out} held out")
    _say("replicas", f"{model.num_replicas}: {_device_text(model)}")
    _say("batch", f"{batch} images, {_share_text(batch, model.num_replicas)}")
    _say("model", f"a convolutional network with {model.count_params():,} weights")


def _device_text(model: MirroredFitter) -> str:
    import tensorflow as tf

    names = [str(name).rpartition("device:")[2] for name in model.strategy.extended.worker_devices]
    kinds = {}
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        kinds[device.name.rpartition("device:")[2]] = details.get("device_name", "GPU")
    text = ", ".join(f"{name} ({kinds[name]})" if name in kinds else name for name in names)
    if any(name.startswith("GPU") for name in names) or len(names) == 1:
        return text
    return f"{text} (simulated: they share this machine's CPU, which shows that the results agree, not how fast GPUs are)"


def _share_text(batch: int, replicas: int) -> str:
    if replicas == 1:
        return "all on the one replica"
    each, extra = divmod(batch, replicas)
    return f"{each} or {each + 1} on each replica" if extra else f"{each} on each replica"


def _replicas(model: MirroredFitter) -> str:
    return f"{model.num_replicas} replicas" if model.num_replicas > 1 else "one replica"


def _print_accuracy(model: MirroredFitter, x: np.ndarray, y: np.ndarray) -> float:
    right = int((model.predict(x, verbose=0).argmax(-1) == y).sum())
    accuracy = right / len(y)
    _say("accuracy", f"{accuracy:.4f} on the images held out: {right} of {len(y)} are right ({ACCURACY} or more is expected)")
    return accuracy


def _save(model: MirroredFitter, path: Any) -> list[str]:
    if path is None:
        return []
    try:
        model.save(path)
    except OSError as error:
        return [f"the model couldn't be saved to {path}: {error}"]
    _say("saved", f"{path}: a Keras file, which keras.models.load_model loads without keras_mirror")
    return []


def _uneven(batch: int, replicas: int) -> int:
    """A batch that the replicas don't divide evenly: the harder case to verify."""
    return batch + 1 if replicas > 1 and batch % replicas == 0 else batch


def _say(what: str, text: str) -> None:
    print(f"{what:<10} {text}", flush=True)


class _Clock:
    """The seconds of each part of the demo, one lap after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Ends a lap and returns its seconds."""
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now
        return self._laps[name]

    def __str__(self) -> str:
        laps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._laps.items())
        return f"{sum(self._laps.values()):.1f} s: {laps}"
