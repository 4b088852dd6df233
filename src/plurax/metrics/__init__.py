"""Metrics over a data set, from sums over its examples: AUC, F1, perplexity, R², and your own."""

from plurax.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
