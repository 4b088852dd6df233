"""Measurements of plurax against the same work by hand in JAX, in TensorFlow and in PyTorch."""
