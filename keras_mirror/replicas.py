"""From `devices` to a strategy: which replicas there are, and which worker this process is."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import tensorflow as tf

from keras_mirror.seams import tensorflow as tf_seams

Devices = None | int | str | Sequence[str]


def make_strategy(devices: Devices = None) -> tf.distribute.Strategy:
    """A MirroredStrategy on the devices asked for.

    Args:
        devices: None: all visible GPUs, else one CPU replica. 4: four GPUs. "cpu:4": four simulated replicas on the CPU.
            ["GPU:0", "GPU:2"]: these.

    Returns:
        The strategy. Where a replica is a CPU, reductions go through one device, so that several replica counts can be
        used in one process; on GPUs the reduction is TensorFlow's default (NCCL).

    Raises:
        TypeError: `devices` is none of these.
        ValueError: a device that isn't there, or a count below 1.
        RuntimeError: simulated replicas were asked for after TensorFlow had started with fewer.
    """
    names = device_names(devices)
    kinds = {name.split(":")[0] for name in names}
    if len(kinds) > 1:
        warnings.warn(
            f"MirroredFitter: devices {names} are of different kinds ({', '.join(sorted(kinds))}); every step waits for"
            " the slowest. Use devices of one kind.",
            stacklevel=3,
        )
    if "CPU" in kinds:
        return tf.distribute.MirroredStrategy(names, cross_device_ops=tf.distribute.ReductionToOneDevice())
    _warn_of_different_models(names)
    return tf.distribute.MirroredStrategy(names)


def device_names(devices: Devices) -> list[str]:
    """The names ("GPU:0") of the devices asked for; makes the simulated ones. Raises as `make_strategy`."""
    if devices is None:
        gpus = [_short(d.name) for d in tf.config.list_logical_devices("GPU")]
        return gpus or ["CPU:0"]
    if isinstance(devices, bool):
        raise TypeError(_wrong_type(devices))
    if isinstance(devices, int):
        return _gpus(devices)
    if isinstance(devices, str):
        simulated = re.fullmatch(r"cpu:(\d+)", devices, re.IGNORECASE)
        if simulated:
            return _simulated(int(simulated.group(1)))
        return _existing([devices])
    if isinstance(devices, Sequence) and all(isinstance(name, str) for name in devices):
        return _existing(list(devices))
    raise TypeError(_wrong_type(devices))


def _wrong_type(devices: object) -> str:
    return (
        f'MirroredFitter: devices={devices!r} is a {type(devices).__name__}, expected None, a number of GPUs, "cpu:N" or'
        ' a list of names such as ["GPU:0", "GPU:1"].'
    )


def _gpus(count: int) -> list[str]:
    if count < 1:
        raise ValueError(f"MirroredFitter: devices={count}, expected a number of GPUs of at least 1.")
    found = [_short(d.name) for d in tf.config.list_logical_devices("GPU")]
    if count > len(found):
        raise ValueError(
            f"MirroredFitter: devices={count} asks for {count} GPUs, found {len(found)}"
            f"{' (' + ', '.join(found) + ')' if found else ''}.\n"
            f'For a dry run on simulated replicas pass devices="cpu:{count}".'
        )
    return found[:count]


def _simulated(count: int) -> list[str]:
    if count < 1:
        raise ValueError(f'MirroredFitter: devices="cpu:{count}", expected at least one replica: "cpu:2", say.')
    if not tf_seams.devices_started():
        cpus = tf.config.list_physical_devices("CPU")
        planned = tf.config.get_logical_device_configuration(cpus[0]) or []
        if len(planned) < count:
            tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * count)
    found = len(tf.config.list_logical_devices("CPU"))
    if found < count:
        raise RuntimeError(
            f'MirroredFitter: devices="cpu:{count}" asks for {count} simulated replicas, but TensorFlow has already started'
            f' with {found}, and can\'t add devices any more.\nMove MirroredFitter(..., devices="cpu:{count}") before the'
            " first tensor, model or strategy of the program (in a notebook: restart the kernel), and where several counts"
            " are used ask for the largest first."
        )
    return [f"CPU:{i}" for i in range(count)]


def _existing(names: list[str]) -> list[str]:
    if not names:
        raise ValueError('MirroredFitter: devices=[] names no device, expected at least one, e.g. ["GPU:0"].')
    wanted = [_short(name) for name in names]
    found = [_short(d.name) for d in tf.config.list_logical_devices()]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(
            f"MirroredFitter: devices={names} names {', '.join(missing)}, found {', '.join(found)}.\n"
            f'For a dry run on simulated replicas pass devices="cpu:{len(names)}".'
        )
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"MirroredFitter: devices={names} names a device twice; each replica needs its own.")
    return wanted


def _short(name: str) -> str:
    """Shortens to "GPU:0" any of "/gpu:0", "gpu:0", "/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:0"."""
    found = re.search(r"([A-Za-z]+):(\d+)$", name)
    if not found:
        raise ValueError(f'MirroredFitter: {name!r} is no device name, expected one such as "GPU:0".')
    return f"{found.group(1).upper()}:{found.group(2)}"


def _warn_of_different_models(names: list[str]) -> None:
    physical = tf.config.list_physical_devices("GPU")
    models = {}
    for device in physical:
        details = tf.config.experimental.get_device_details(device)
        models[_short(device.name)] = details.get("device_name", "unknown")
    used = {models.get(name, "unknown") for name in names}
    if len(used) > 1:
        listed = ", ".join(f"{name} {models.get(name, 'unknown')}" for name in names)
        warnings.warn(
            f"MirroredFitter: the GPUs are of different models ({listed}); every step waits for the slowest.",
            stacklevel=4,
        )


def lowest_compute_capability(strategy: tf.distribute.Strategy | None = None) -> tuple[int, int] | None:
    """The CUDA compute capability of the oldest GPU in use.

    Args:
        strategy: one whose devices are asked, those of its other workers too (then every worker has to ask); None: all
            visible GPUs.

    Returns:
        (major, minor), or None where there is no GPU, a replica is no GPU, or TensorFlow doesn't know the capability.
    """
    visible = tf.config.get_visible_devices("GPU")
    if strategy is None:
        lowest = min((_compute_capability(device) for device in visible), default=0)
    else:
        names = [_short(name) for name in strategy.extended.worker_devices]
        known = {_short(device.name): device for device in visible}
        lowest = min(_compute_capability(known[name]) if name in known else 0 for name in names)
        if strategy.num_replicas_in_sync > len(names):
            lowest = _lowest_of_all_workers(strategy, lowest)
    return divmod(lowest, 100) if lowest else None


def _compute_capability(device: tf.config.PhysicalDevice) -> int:
    major, minor = tf.config.experimental.get_device_details(device).get("compute_capability", (0, 0))
    return 100 * int(major) + int(minor)


def _lowest_of_all_workers(strategy: tf.distribute.Strategy, value: int) -> int:
    @tf.autograph.experimental.do_not_convert
    def replica() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(tf.constant([float(value)]), axis=0)

    gathered = tf.function(lambda: strategy.run(replica), autograph=False)()
    return int(tf.reduce_min(strategy.experimental_local_results(gathered)[0]))


def check_strategy(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """A user's own strategy, if the engine can drive it.

    Raises:
        TypeError: not a strategy.
        ValueError: a strategy without a synchronous copy of each variable per replica.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"MirroredFitter: strategy={strategy!r} is a {type(strategy).__name__}, expected a tf.distribute.Strategy."
        )
    if not tf_seams.is_mirrored_strategy(strategy):
        raise ValueError(
            f"MirroredFitter: strategy is a {type(strategy).__name__}, expected MirroredStrategy or"
            " MultiWorkerMirroredStrategy: synchronous training with a copy of each variable on every replica."
        )
    return strategy


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the first worker: the one that logs and saves. Always so with one process."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec().as_dict():
        return True
    kind, index = resolver.task_type, resolver.task_id
    has_chief = any(name in resolver.cluster_spec().as_dict() for name in ("chief", "master"))
    return kind in ("chief", "master") or (not has_chief and kind == "worker" and index == 0)
