"""The only files that touch non-public names of Keras and TensorFlow.

`gate` holds the thread-local step that turns the seams on; `tensorflow` has what both Keras generations share; `keras3` has
the seams of Keras 3, `checkpoint3` and `position3` those of saving and resuming. Outside a step of the engine every seam
calls the original and nothing else.
"""

from keras_mirror.seams import gate, keras3, tensorflow

__all__ = ["gate", "install", "keras3", "tensorflow"]


def install() -> None:
    """Puts every seam in place, once per process. Safe to call again."""
    tensorflow.install()
    keras3.install()
