"""The mixed-precision switch: which dtype policy a model is built under, and what its loss scaling does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mirror import replicas
from keras_mirror.engine.core import engine_of
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.engine.precision import LossScaling
    from keras_mirror.fitter import MirroredFitter

POLICIES = (None, "float32", "mixed_float16", "mixed_bfloat16", "auto")

_said: set[str] = set()


def set_precision(policy: str | None) -> str:
    """Sets the dtype policy of every layer that is made from now on, as `keras.config.set_dtype_policy` does.

    Where the model is trained through MirroredFitter its argument `precision` does the same for that model alone.

    Args:
        policy: "float32", "mixed_float16", "mixed_bfloat16"; "auto": what the visible GPUs are fastest at (see
            `precision_scope`); None: leaves the policy as it is.

    Returns:
        The name of the policy that is now set.

    Raises:
        ValueError: another value.
    """
    check(policy, "set_precision: policy")
    if policy is not None:
        keras.config.set_dtype_policy(resolve(policy))
    return str(keras.config.dtype_policy().name)


@contextlib.contextmanager
def precision_scope(policy: str | None) -> Iterator[str]:
    """Sets the dtype policy for the layers made in the block; the one before is restored after it, also after an exception.

    Example:
        ```python
        with precision_scope("mixed_bfloat16"):
            model = build_model()
        ```

    Args:
        policy: as for `set_precision`. "auto" asks the visible GPUs for their compute capability: with 8.0 and above on all
            of them "mixed_bfloat16", with 7.0 and above "mixed_float16", else (and without a GPU) "float32". It says what
            it chose, and why, on standard error, once.

    Yields:
        The name of the policy in the block.

    Raises:
        ValueError: another value.
    """
    check(policy, "precision_scope: policy")
    before = keras.config.dtype_policy()
    try:
        yield set_precision(policy)
    finally:
        keras.config.set_dtype_policy(before)


def loss_scaling(model: keras.Model | MirroredFitter) -> tuple[LossScaling, ...]:
    """What the loss scaling of a model does: its scale, the steps it took and those it skipped.

    Args:
        model: a MirroredFitter, or the model it made; in a callback that is `self.model`.

    Returns:
        One `LossScaling` for each LossScaleOptimizer of the model, in no order to rely on; empty where no loss is scaled.

    Raises:
        ValueError: a model that no MirroredFitter made: plain Keras doesn't count.
    """
    from keras_mirror.fitter import MirroredFitter

    model = model.model if isinstance(model, MirroredFitter) else model
    engine = engine_of(model)
    if engine is None:
        raise ValueError(
            f"loss_scaling: the model {model.name!r} isn't a MirroredFitter's, which counts skipped steps; plain Keras doesn't.\n"
            "Wrap the function that builds it: MirroredFitter(build_model)."
        )
    return engine.loss_scales.read()


def check(policy: Any, name: str) -> None:
    """Refuses what isn't one of the policies."""
    if not (policy is None or (isinstance(policy, str) and policy in POLICIES)):
        raise ValueError(f"{name}={policy!r}, expected one of {', '.join(map(repr, POLICIES))}.")


def resolve(policy: str, strategy: tf.distribute.Strategy | None = None) -> str:
    """The policy that "auto" stands for on a strategy's devices (all visible GPUs without one); any other as it is.

    Every worker of a strategy gets the same answer, that of the oldest GPU among all of them.
    """
    if policy != "auto":
        return policy
    capability = replicas.lowest_compute_capability(strategy)
    chosen, why = choose(capability)
    message = f'keras_mirror: precision="auto" is "{chosen}" here: {why}.'
    if message not in _said and (strategy is None or replicas.is_chief(strategy)):
        _said.add(message)
        print(message, file=sys.stderr)
    return chosen


def choose(capability: tuple[int, int] | None) -> tuple[str, str]:
    """The policy for GPUs of this compute capability (None: none), and the reason.

    From NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities": Tensor Cores compute in float16 from 7.0 on and in
    bfloat16, which has float32's range and needs no loss scaling, from 8.0 on.
    """
    if capability is None:
        return "float32", "a replica isn't a GPU, and CPUs gain nothing from a smaller type"
    found = f"the oldest GPU in use has compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return "mixed_bfloat16", f"{found}, which computes fast in bfloat16"
    if capability >= (7, 0):
        return "mixed_float16", f"{found}, which computes fast in float16 but not in bfloat16"
    return "float32", f"{found}, which gains nothing from a smaller type"
