"""The training loop, its data, log, progress and checkpoints."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
