"""Nothing yet: on Keras 2 no fit goes on at a position of its data (SingleCopyCheckpoint says so)."""
