"""Callbacks that log the rows of a run elsewhere.

To add one: a subclass of `Logger` here, and a line in `plurax/callbacks/__init__.pyi`.
"""
