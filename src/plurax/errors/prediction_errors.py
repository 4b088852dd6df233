"""Predictions that cannot be put together, scored or drawn."""

from plurax.errors.kinds import BatchError


def picture_of_nothing(function: str, wanted: str) -> BatchError:
    return BatchError(f"{function} got nothing to draw; give at least one {wanted}.")
