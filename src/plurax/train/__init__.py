"""`fit` and what it is composed of; the public names of training."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
