"""The only files that touch non-public names of Keras and TensorFlow.

`gate` holds the thread-local step that turns the seams on; `tensorflow` has what both Keras generations share; `stack` tells
which generation runs. Each further room is there twice, with the same small functions, and is chosen once: `generation`
(keras3, keras2), `data_seams` (data3, data2), `loss_scale` (loss_scale3, loss_scale2), `learning_rate` (learning_rate3,
learning_rate2), `log_seams` (logs3, logs2), `position` (position3; None on Keras 2). `checkpoint3` is for Keras 3 alone;
`running`, `rates` and `callbacks` are for both. Outside a step of the engine every seam calls the original and nothing else.
"""

from typing import TYPE_CHECKING

from keras_mirror.seams import gate, stack, tensorflow
from keras_mirror.seams.stack import keras

if TYPE_CHECKING:
    from keras_mirror.seams import data3 as data_seams
    from keras_mirror.seams import keras3 as generation
    from keras_mirror.seams import learning_rate3 as learning_rate
    from keras_mirror.seams import logs3 as log_seams
    from keras_mirror.seams import loss_scale3 as loss_scale
    from keras_mirror.seams import position3 as position
else:
    generation = stack.choose("keras_mirror.seams.keras3", "keras_mirror.seams.keras2")
    data_seams = stack.choose("keras_mirror.seams.data3", "keras_mirror.seams.data2")
    loss_scale = stack.choose("keras_mirror.seams.loss_scale3", "keras_mirror.seams.loss_scale2")
    learning_rate = stack.choose("keras_mirror.seams.learning_rate3", "keras_mirror.seams.learning_rate2")
    log_seams = stack.choose("keras_mirror.seams.logs3", "keras_mirror.seams.logs2")
    position = stack.choose("keras_mirror.seams.position3", "keras_mirror.seams.position2")

__all__ = [
    "data_seams",
    "gate",
    "generation",
    "install",
    "keras",
    "learning_rate",
    "log_seams",
    "loss_scale",
    "position",
    "stack",
    "tensorflow",
]


def install() -> None:
    """Puts every seam in place, once per process. Safe to call again."""
    tensorflow.install()
    generation.install()
