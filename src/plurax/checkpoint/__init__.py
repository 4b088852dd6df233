"""Checkpoints: save, verify and restore training state; one writer per folder, any readers."""

from plurax.checkpoint.manager import Checkpoints as Checkpoints
