"""The migration page on the stack of tensorflow-addons: its before runs, and is the update that its after says."""

from pathlib import Path

import numpy as np
import pytest
from test_docs import script_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migration.md"
tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons runs on TensorFlow 2.15 at the latest")


def test_the_before_of_addons_runs() -> None:
    page = PAGE.read_text()
    shared = script_of(page[: page.index("## From a scope")])
    before = page[page.index("Before, on TensorFlow 2.15:") : page.index("After, on Keras 3:")]
    names: dict[str, object] = {}
    exec(compile(shared + script_of(before.replace("<!-- no-run -->", "")), str(PAGE), "exec"), names)
    assert names["model"].optimizer.iterations.numpy() == 4


@pytest.mark.parametrize("name", ["AdamW", "SGDW"])
def test_the_weight_decay_that_the_table_names_is_the_same(name: str) -> None:
    """A rate of 0.1 and a decay of 0.02 here are a decay of 0.2 in Keras."""
    import tensorflow as tf
    from stack import keras

    theirs = getattr(tfa.optimizers, name)(weight_decay=0.02, learning_rate=0.1)
    ours = {"AdamW": keras.optimizers.AdamW, "SGDW": keras.optimizers.SGD}[name](0.1, weight_decay=0.2)
    values = []
    for optimizer in (theirs, ours):
        variable = tf.Variable([1.0, -2.0])
        optimizer.apply_gradients([(tf.zeros(2), variable)])
        values.append(variable.numpy())
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
