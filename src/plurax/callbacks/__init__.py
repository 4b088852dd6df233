"""Callbacks of `fit`: stop early, keep the best, average, profile, and log elsewhere."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
