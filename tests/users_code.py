"""A user's own registered classes, importable where keras_mirror isn't."""

import keras


@keras.saving.register_keras_serializable("users")
class Gain(keras.layers.Layer):
    """A layer with a constructor argument and a weight."""

    def __init__(self, start=1.0, **arguments):
        super().__init__(**arguments)
        self.start = start

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer=keras.initializers.Constant(self.start), name="gain")

    def call(self, inputs):
        return inputs * self.gain

    def get_config(self):
        return {**super().get_config(), "start": self.start}


@keras.saving.register_keras_serializable("users")
class Slow(keras.optimizers.Adam):
    """An optimizer with a constructor argument."""

    def __init__(self, slowness=2.0, **arguments):
        super().__init__(**arguments)
        self.slowness = slowness

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / self.slowness)

    def get_config(self):
        return {**super().get_config(), "slowness": self.slowness}


@keras.saving.register_keras_serializable("users")
class Pair(keras.Model):
    """A subclassed model with the user's own train_step."""

    def __init__(self, units=4, **arguments):
        super().__init__(**arguments)
        self.units = units
        self.first, self.gain, self.last = keras.layers.Dense(units), Gain(0.5), keras.layers.Dense(1)

    def call(self, inputs):
        return self.last(self.gain(self.first(inputs)))

    def train_step(self, data):
        return super().train_step(data)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("users")
def absolute(y_true, y_pred):
    """A loss function for each example."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), -1)
