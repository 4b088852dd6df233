"""The training loop, its data, log, progress and checkpoints."""
