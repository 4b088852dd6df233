"""What a program holds, sends and computes: memory, batch sizes and verification."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
