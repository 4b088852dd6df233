"""Arguments of public functions that are not what their annotations say."""

from plurax.errors.kinds import ArgumentError


def argument_misfits(function: str, name: str, value: str, expected: str) -> ArgumentError:
    return ArgumentError(f"{function}({name}={value}): {name} has to be {expected}.")
