"""Pipeline schedules as plain data, and the programs that run them on a mesh."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
