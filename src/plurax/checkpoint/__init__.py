"""Checkpoints: save, verify and restore training state; one writer per folder, any readers."""

from plurax.checkpoint.checkpoints import Checkpoints as Checkpoints
from plurax.checkpoint.damage import DamagedCheckpointWarning as DamagedCheckpointWarning
