"""Arguments of public functions and callbacks that are not what they should be."""

from collections.abc import Iterable, Sequence

from plurax.errors import hints
from plurax.errors.kinds import ArgumentError, TaskError


def argument_misfits(function: str, name: str, value: str, expected: str) -> ArgumentError:
    return ArgumentError(f"{function}({name}={value}): {name} has to be {expected}.")


def callback_metric_missing(name: str, metric: str, there: Iterable[str]) -> TaskError:
    return TaskError(
        f"the callback {name} follows {metric!r}, and a row has {', '.join(there)}. Metrics of the "
        "evaluation begin with eval_, and need fit(evaluation=...)."
    )


def callback_count(name: str, argument: str, given: object) -> TaskError:
    return TaskError(f"{name}({argument}={given!r}): give a whole number ≥ 1.")


def argument_unknown(
    function: str, name: str, write: str | None, known: Sequence[str]
) -> TaskError:
    hint = f" Write {write}." if write else hints.did_you_mean(name, known)
    return TaskError(f"{function}() has no argument {name!r}.{hint}")


def hyperparam_not_a_number(name: str, value: object, members: int | None) -> TaskError:
    many = f", or an array of {members} of them, one for each member" if members else ""
    return TaskError(f"the hyperparameter {name}={value!r}: give a finite number{many}.")
