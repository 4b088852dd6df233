"""Callbacks that log the rows of a run elsewhere."""
