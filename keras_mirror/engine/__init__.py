"""One training step on N replicas, and the loop around it: reduce first, then be a single device."""
