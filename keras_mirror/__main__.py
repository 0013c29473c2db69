"""`python -m keras_mirror` is `keras-mirror`."""

import sys

from keras_mirror.cli import main

if __name__ == "__main__":
    sys.exit(main())
