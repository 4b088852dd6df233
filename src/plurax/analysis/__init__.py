"""Memory, batch sizes, tuning and verification of programs."""
