"""Processes that hold what is measured; `serve.py` is their end of the pipe."""
