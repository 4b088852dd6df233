"""A `Task` from a model of another library; each library is imported only by its own module."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
