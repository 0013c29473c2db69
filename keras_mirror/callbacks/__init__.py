"""Callbacks for Keras's `fit`, with MirroredFitter or without it."""
