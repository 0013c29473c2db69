"""What SingleCopyCheckpoint is made of: files, formats and state; `callbacks/checkpoint.py` is its face."""
