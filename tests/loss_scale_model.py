"""Dynamic loss scaling written anew in plain Python, to judge what runs on the devices."""

import math

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
LEARNING_RATE, MOMENTUM = 2.0**-10, 0.5


class Reference:
    """SGD with momentum on one weight per gradient entry, under a loss scale with bounds.

    Args:
        weights: the weights at the start.
        scale: the loss scale at the start.
        growth: good steps until the scale doubles.
        accumulation: batches per update.
        initial: `initial_scale`, which stands in for a scale that is no positive finite number.
    """

    def __init__(self, weights, scale, growth, accumulation=1, initial=2.0**15):
        self.weights = [float(w) for w in weights]
        self.momenta = [0.0] * len(self.weights)
        self.scale, self.growth, self.initial = scale, growth, initial
        self.counter = self.applied = self.steps = self.skipped = self.in_a_row = self.at_floor = 0
        self.accumulation = accumulation
        self.held = []

    @property
    def iterations(self):
        return self.applied // self.accumulation

    @property
    def hopeless(self):
        return self.in_a_row >= 50 or self.at_floor >= 2

    def scaled(self, gradient):
        """What the backward pass gives for each entry, in exact arithmetic; None where float32 can't hold it."""
        values = [g * self.scale for g in gradient]
        finite = all(math.isfinite(v) and abs(v) <= LARGEST for v in values)
        return values if finite else None

    def is_near_overflow(self, gradient):
        """Whether rounding may decide if float32 holds the scaled gradient."""
        values = [abs(g * self.scale) / LARGEST for g in gradient if math.isfinite(g * self.scale)]
        return any(0.999 < v < 1.001 for v in values)

    def start_again(self):
        """What follows the stop."""
        self.scale, self.counter, self.in_a_row, self.at_floor = self.initial, 0, 0, 0

    def step(self, gradient):
        """One batch with this gradient of the unscaled loss."""
        self.steps += 1
        usable = math.isfinite(self.scale) and self.scale >= 1
        scaled = self.scaled(gradient) if usable else None
        if scaled is None:
            self.skipped += 1
            self.in_a_row += 1
            self.at_floor = self.at_floor + 1 if self.scale <= 1.0 else 0
            self.counter = 0
            self.scale = max(self.scale / 2, 1.0) if usable else self.initial
            return
        self.in_a_row = self.at_floor = 0
        self.applied += 1
        self.held.append([s / self.scale for s in scaled])
        if len(self.held) == self.accumulation:
            mean = [sum(parts) / self.accumulation for parts in zip(*self.held, strict=True)]
            self.held = []
            self.momenta = [MOMENTUM * m - LEARNING_RATE * g for m, g in zip(self.momenta, mean, strict=True)]
            self.weights = [w + m for w, m in zip(self.weights, self.momenta, strict=True)]
        self.counter += 1
        if self.counter >= self.growth:
            self.counter = 0
            if self.scale * 2 <= LARGEST:
                self.scale *= 2
