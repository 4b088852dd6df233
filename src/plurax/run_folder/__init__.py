"""What a run leaves in its folder beside checkpoints: the log, `run.toml`, settings."""
