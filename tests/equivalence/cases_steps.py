"""Rows about custom train steps and about how a model is driven: on batches, in parts, with one's own loop of calls."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from harness import SIZES, Case
from parts import classes, dense, one_hot, regression, weighted
from stack import keras, layers, losses, metrics, ops, optimizers


def body() -> keras.Sequential:
    """The part of each model below that has the weights."""
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dense(2)])


class Wrapped(keras.Model):
    """A model around `body`, for steps of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.body(inputs, training=training)


class Documented(Wrapped):
    """The step of Keras's guide "Customizing what happens in fit", with compute_loss and the model's own metrics."""

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


class OwnTracker(Wrapped):
    """The low-level version: a loss function called directly, own trackers, losses of layers added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_tracker = metrics.Mean(name="loss")
        self.mae = metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = losses.MeanSquaredError()

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred) + ops.sum(self.losses)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.mae.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class ClipsItself(Wrapped):
    """Clips its gradients and logs their norm, before the optimizer sees them."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.05)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


class RootOfLoss(Wrapped):
    """A nonlinear function of compute_loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.sqrt(self.compute_loss(x=x, y=y, y_pred=self(x, training=True)))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        return {"loss": loss}


class Sums(Wrapped):
    """Sums over the batch: needs MirroredFitter(step_sums=True)."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.sum(ops.square(y - self(x, training=True)))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        return {"loss": loss}


class CallsSuper(Wrapped):
    """Adds to the logs of Keras's own step."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs, "rate": self.optimizer.learning_rate}

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "one": ops.ones(())}


class OwnComputeLoss(Wrapped):
    """Keras's own step with a compute_loss of the user's: a mean of one's own beside Keras's loss."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.abs(y - y_pred)) + super().compute_loss(x, y, y_pred, sample_weight)


class TwoSteps(Wrapped):
    """Two tapes and two updates of the same optimizer in a step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
        return {"loss": loss}


class PersistentTape(Wrapped):
    """A persistent tape, and gradients with respect to a list, a dictionary and one variable."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        first, *others = self.trainable_variables
        gradients = [tape.gradient(loss, first.value), *tape.gradient(loss, [v.value for v in others])]
        named = tape.gradient(loss, {v.path: v.value for v in self.trainable_variables})
        gradients = [0.5 * (g + named[v.path]) for g, v in zip(gradients, self.trainable_variables, strict=True)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class PerExample(Wrapped):
    """A tape whose target is a vector over the batch: the tape sums it, so the step divides by the batch size."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            values = ops.mean(ops.square(y - self(x, training=True)), axis=-1)
        gradients = tape.gradient(values, self.trainable_variables)
        self.optimizer.apply_gradients([(0.1 * g, v) for g, v in zip(gradients, self.trainable_variables, strict=True)])
        return {"loss": ops.mean(values)}


class VAE(keras.Model):
    """Keras's VAE example: own means of two terms and own trackers. The noise comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential(
            [keras.Input((2,)), layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dense(3, "sigmoid")]
        )
        self.total_loss_tracker = metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def losses_of(self, data: Any) -> tuple[Any, Any, Any]:
        x, noise = data[0]["x"], data[0]["noise"]
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        reconstruction = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
        reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(x[..., None], reconstruction[..., None]), axis=1))
        kl_loss = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
        return reconstruction_loss + kl_loss + ops.sum(self.decoder.losses), reconstruction_loss, kl_loss

    def track(self, *values: Any) -> Any:
        for tracker, value in zip(self.metrics, values, strict=True):
            tracker.update_state(value)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            values = self.losses_of(data)
        gradients = tape.gradient(values[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.track(*values)

    def test_step(self, data: Any) -> Any:
        return self.track(*self.losses_of(data))


def noisy(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return ({"x": rng.uniform(size=(rows, 3)), "noise": rng.normal(size=(rows, 2))},)


class GAN(keras.Model):
    """Keras's GAN example: a compile of its own, two optimizers, Loss objects called directly, no call()."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(3)])

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any, **more: Any) -> None:
        super().compile(**more)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = metrics.Mean(name="d_loss")
        self.g_loss_metric = metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data: Any) -> Any:
        real, latent = data[0]["real"], data[0]["latent"]
        combined = ops.concatenate([self.generator(latent), real], axis=0)
        size = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(self.generator(latent)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(GAN):
    """Keras's WGAN-GP example: an inner tape with respect to inputs. The interpolation comes with the data."""

    def gradient_penalty(self, real: Any, fake: Any, at: Any) -> Any:
        interpolated = real + at * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            predicted = self.discriminator(interpolated, training=True)
        gradients = tape.gradient(predicted, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-6)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        real, latent, at = data[0]["real"], data[0]["latent"], data[0]["at"]
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                d_cost = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real))
                d_loss = d_cost + 10.0 * self.gradient_penalty(real, fake, at)
            gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(latent, training=True)))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def real_and_latent(rng: np.random.Generator, rows: int) -> tuple[Any, ...]:
    return ({"real": rng.normal(size=(rows, 3)), "latent": rng.normal(size=(rows, 2)), "at": rng.uniform(size=(rows, 1))},)


def adversarial(rate: float) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "d_optimizer": optimizers.Adam(rate),
        "g_optimizer": optimizers.SGD(rate, momentum=0.5, clipnorm=0.1),
        "loss_fn": losses.BinaryCrossentropy(from_logits=True),
    }


def row(name: str, model: Callable[[], keras.Model], data: Any = regression, **more: Any) -> Case:
    given = more.pop("compile", {})
    return Case(
        name=f"train_step-{name}",
        model=model,
        data=data,
        compile=lambda: {"optimizer": optimizers.SGD(0.05, momentum=0.5), "loss": "mse", **(given() if given else {})},
        **more,
    )


STEPS = [
    row(
        "of-the-guide", Documented, weighted(regression), compile=lambda: {"metrics": ["mae"]}, evaluate=True, replicas=(2, 3, 4)
    ),
    row("with-own-trackers-and-loss", OwnTracker, evaluate=True, predict=True, replicas=(2, 3, 4)),
    row("that-clips-its-gradients", ClipsItself, replicas=(2, 3, 4)),
    row("with-root-of-compute_loss", RootOfLoss),
    row("that-sums", Sums, compile=lambda: {"optimizer": optimizers.SGD(0.005)}, fitter={"step_sums": True}, replicas=(2, 3, 4)),
    row("that-calls-super", CallsSuper, compile=lambda: {"metrics": ["mae"]}, evaluate=True),
    row("of-keras-with-own-compute_loss", OwnComputeLoss),
    row("with-two-updates", TwoSteps),
    row("with-a-persistent-tape", PersistentTape),
    row("with-a-vector-as-target", PerExample),
    row("run-eagerly", OwnTracker, compile=lambda: {"run_eagerly": True}),
    row(
        "with-gradient_accumulation",
        Documented,
        compile=lambda: {"optimizer": optimizers.Adam(0.02, gradient_accumulation_steps=3, clipnorm=0.05)},
    ),
    row(
        "with-LossScaleOptimizer", OwnTracker, compile=lambda: {"optimizer": optimizers.LossScaleOptimizer(optimizers.SGD(0.05))}
    ),
    Case(
        name="train_step-of-a-VAE",
        model=VAE,
        data=noisy,
        compile=lambda: {"optimizer": optimizers.Adam(0.02)},
        evaluate=True,
        replicas=(2, 3, 4),
    ),
    Case(name="train_step-of-a-GAN", model=GAN, data=real_and_latent, compile=adversarial(0.02), replicas=(2, 3, 4)),
    Case(name="train_step-of-a-WGAN-GP", model=WGAN, data=real_and_latent, compile=adversarial(0.01), replicas=(2, 3, 4)),
]

# -- how a model is driven


def on_batches(case: Case, model: Any) -> dict[str, Any]:
    """train_on_batch, test_on_batch and predict_on_batch, batch after batch of another size."""
    logs: dict[str, Any] = {}
    for i, (x, y, weight) in enumerate(case.batches() * case.epochs):
        trained = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
        logs.update({f"train {i} {name}": value for name, value in trained.items()})
    for i, (x, y, weight) in enumerate(case.batches()):
        logs[f"test {i}"] = model.test_on_batch(x, y, sample_weight=weight)
        logs[f"predict {i}"] = model.predict_on_batch(x)
    return logs


def on_batches_with_class_weight(case: Case, model: Any) -> dict[str, Any]:
    return {
        f"train {i}": model.train_on_batch(x, y, class_weight={0: 0.5, 1: 2.0, 2: 1.0})
        for i, (x, y) in enumerate(case.batches() * case.epochs)
    }


def with_arrays(case: Case, model: Any) -> dict[str, Any]:
    """Arrays in a fixed order, whose last batch is smaller; validation data; evaluate and predict."""
    x, y, weight = case.arrays()
    validation = (x[:11], y[:11], weight[:11])
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=validation,
        validation_batch_size=5,
    )
    return {
        **history.history,
        "evaluate": model.evaluate(x[:9], y[:9], sample_weight=weight[:9], batch_size=4, verbose=0),
        "predict": model.predict(x[:9], batch_size=4, verbose=0),
    }


def with_validation_split(case: Case, model: Any) -> dict[str, Any]:
    x, y = case.arrays()
    return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_split=0.3).history


def fit_twice(case: Case, model: Any) -> dict[str, Any]:
    """fit, evaluate in between, compile anew with another loss, fit again."""
    first = model.fit(case.dataset(), verbose=0).history
    middle = model.evaluate(case.dataset(), verbose=0)
    model.compile(optimizers.Adam(0.02, clipnorm=0.05), "mae", jit_compile=False)
    return {**{f"first {k}": v for k, v in first.items()}, "middle": middle, **model.fit(case.dataset(), verbose=0).history}


def rate_changed(case: Case, model: Any) -> dict[str, Any]:
    """Between two calls of fit the model's own optimizer gets another rate; a layer is frozen and compiled again."""
    logs = model.fit(case.dataset(), verbose=0).history
    model.optimizer.learning_rate = 0.5 * float(model.optimizer.learning_rate)
    more = model.fit(case.dataset(), verbose=0).history
    return {**{f"first {k}": v for k, v in logs.items()}, **more, "rate": float(model.optimizer.learning_rate)}


def endless(case: Case, model: Any) -> dict[str, Any]:
    """A dataset without end, in epochs of 7 steps that go on where the last one stopped."""
    return model.fit(case.dataset().repeat(), steps_per_epoch=7, epochs=3, verbose=0).history


class Epochs(keras.callbacks.Callback):
    """Evaluates and predicts from within fit."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.seen = case, []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.predict(self.case.inputs(), verbose=0))


def predicting_within(case: Case, model: Any) -> dict[str, Any]:
    callback = Epochs(case)
    history = model.fit(case.dataset(), epochs=2, verbose=0, validation_data=case.dataset(), callbacks=[callback]).history
    return {**history, "seen": callback.seen}


def driven(name: str, drive: Any, data: Any = regression, **more: Any) -> Case:
    loss, units, activation = more.pop("loss", "mse"), more.pop("units", 2), more.pop("activation", None)
    return Case(
        name=name,
        model=dense(units, activation),
        data=data,
        compile=lambda: {
            "optimizer": optimizers.Adam(0.02, global_clipnorm=0.1),
            "loss": loss,
            "metrics": ["mae"],
            **more.pop("compile", {}),
        },
        drive=drive,
        **more,
    )


DRIVEN = [
    driven("train_on_batch-test_on_batch-predict_on_batch", on_batches, weighted(regression), replicas=(2, 3, 4)),
    driven(
        "train_on_batch-class_weight",
        on_batches_with_class_weight,
        one_hot,
        loss="categorical_crossentropy",
        units=3,
        activation="softmax",
    ),
    driven("arrays-and-validation_data", with_arrays, weighted(regression)),
    driven("arrays-and-validation_split", with_validation_split),
    driven("fit-compile-and-fit-again", fit_twice),
    driven("learning_rate-changed-between-fits", rate_changed),
    driven("endless-dataset-steps_per_epoch", endless),
    driven("evaluate-and-predict-within-fit", predicting_within),
    Case(
        name="first-batch-smaller-than-N",
        model=lambda: keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)]),
        data=regression,
        compile=lambda: {"optimizer": "adam", "loss": "mse"},
        sizes=(1, *SIZES),
        evaluate=True,
        predict=True,
        replicas=(2, 3, 4),
    ),
    Case(
        name="every-batch-of-one-example",
        model=dense(3, "softmax"),
        data=classes,
        compile=lambda: {"optimizer": optimizers.SGD(0.1), "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]},
        sizes=(1,) * 10,
        evaluate=True,
    ),
    *(
        Case(
            name=f"steps_per_execution-{steps}",
            model=dense(),
            data=regression,
            compile=lambda: {
                "optimizer": optimizers.Adam(0.02, clipnorm=0.05, gradient_accumulation_steps=3),
                "loss": "mse",
                "metrics": ["mae"],
            },
            steps_per_execution=steps,
            evaluate=True,
            predict=True,
        )
        for steps in (3, 20)
    ),
]

CASES = [*STEPS, *DRIVEN]
