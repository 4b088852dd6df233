"""Shardings, padding and stage placement of the leaves of a training state."""
