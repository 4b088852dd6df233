"""Train neural networks in parallel on JAX: many on one device, one on many devices."""

from plurax.lazy import public_names

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = public_names(__name__, __file__)
