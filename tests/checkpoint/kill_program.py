"""Trains in a process that is killed again and again, and goes on each time; prints what came of it as JSON.

python kill_program.py FOLDER KILLS SEED. The training processes are forked from one that has imported everything and has not
started TensorFlow, so that a life costs no import.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time

import keras
from checkpoint_parts import BATCH, Crash, X, Y, fitter, own_callbacks

from keras_mirror import SingleCopyCheckpoint
from keras_mirror.checkpoint.files import Store


class Tell(keras.callbacks.Callback):
    """Writes a byte for each step."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def on_train_batch_end(self, batch, logs=None):
        os.write(self.pipe, b".")


def train(directory, pipe, epochs):
    """Returns a hash of every variable on every replica, and History."""
    model = fitter(2)
    checkpoint = SingleCopyCheckpoint(directory, every=2, keep_last=2, keep_best=1)
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        validation_data=(X[:20], Y[:20]),
        callbacks=[*own_callbacks(), Tell(pipe), checkpoint],
    )
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        for part in getattr(variable.value, "values", [variable.value]):
            digest.update(part.numpy().tobytes())
    return {"bits": digest.hexdigest(), "history": history.history, "epoch": history.epoch}


def life(directory, epochs):
    """Forks a training process; returns its id, the pipe of its steps and the file of its result."""
    steps, tell = os.pipe()
    result = f"{directory}.result"
    pid = os.fork()
    if pid == 0:
        os.close(steps)
        status = 1
        try:
            found = train(directory, tell, epochs)
            with open(result, "w") as file:
                json.dump(found, file)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(tell)
    return pid, steps, result


def finish(directory, epochs):
    """Lets a life end."""
    pid, steps, result = life(directory, epochs)
    while os.read(steps, 4096):
        pass
    os.close(steps)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"a training process ended with {status}"
    with open(result) as file:
        return json.load(file)


def main():
    folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    epochs = 4 + kills // 3
    undisturbed = finish(os.path.join(folder, "undisturbed"), epochs)
    directory, done, at = os.path.join(folder, "killed"), 0, []
    saved = False
    while done < kills:
        pid, steps, _ = life(directory, epochs)
        wanted, seen = rng.randint(1, 6), 0
        while seen < wanted:
            found = os.read(steps, 1)
            if not found:
                raise Crash("the run came to its end before it was killed often enough")
            seen += 1
        # A save of this model takes some 5 to 20 ms: in it, before it, after it.
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(steps)
        done += 1
        store = Store(directory)
        store.read()
        newest, damaged = store.newest_whole(lambda each: True)
        assert damaged == [], damaged
        assert newest is not None or not saved, "all checkpoints are gone"
        if newest is not None:
            saved = True
            at.append(newest.step)
            shutil.copy(store.path(newest.model_file), os.path.join(folder, f"kill-{done}.keras"))
    resumed = finish(directory, epochs)
    print(
        "RESULT"
        + json.dumps({"undisturbed": undisturbed, "resumed": resumed, "steps": at, "left": sorted(os.listdir(directory))})
    )


if __name__ == "__main__":
    main()
