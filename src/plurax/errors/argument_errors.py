"""Arguments of public functions that are not what their annotations say."""

from collections.abc import Sequence

from plurax.errors import hints
from plurax.errors.kinds import ArgumentError


def argument_misfits(function: str, name: str, value: str, expected: str) -> ArgumentError:
    return ArgumentError(f"{function}({name}={value}): {name} has to be {expected}.")


def argument_no_choice(
    function: str, name: str, given: object, value: str, choices: Sequence[str]
) -> ArgumentError:
    hint = hints.did_you_mean(given, choices) if isinstance(given, str) else ""
    return ArgumentError(
        f"{function}({name}={value}): {name} must be one of {', '.join(map(repr, choices))}.{hint}"
    )


def bytes_not_understood(value: str) -> ArgumentError:
    return ArgumentError(
        f"memory={value} is no number of bytes above 0: write 40GB, 512MB or 4e10, and in Python "
        "'40GB' or 40e9."
    )


def argument_too_large(function: str, name: str, value: str) -> ArgumentError:
    return ArgumentError(
        f"{function}({name}={value}): {name} counts what has to fit in memory, and must be a whole "
        "number of at least 0 that does."
    )


def arguments_do_not_bind(function: str, reason: str, known: Sequence[str]) -> ArgumentError:
    return ArgumentError(f"{function}(...): {reason}. Its arguments are {', '.join(known)}.")


def path_unusable(function: str, name: str, value: str, reason: str) -> ArgumentError:
    return ArgumentError(f"{function}({name}={value}): {reason}. Give another path.")
