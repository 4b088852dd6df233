"""Checkpoints: save, verify and restore training state; one writer per folder, any readers."""

from plurax.train.checkpoint.damage import DamagedCheckpointWarning as DamagedCheckpointWarning
from plurax.train.checkpoint.manager import Checkpoints as Checkpoints
