"""Shardings of tensors on a mesh, resharding between them, annotations, and a plan's rules."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
