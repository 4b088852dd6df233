"""Populations: their hyperparameters and rows, searches over them, and what they predict."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
