"""The backends of a training step: sharded, or pipelined over stages."""
