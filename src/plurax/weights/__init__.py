"""Weights in files: read and write them, start from them, and name parts of them by path."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
