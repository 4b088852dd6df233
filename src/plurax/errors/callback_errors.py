"""Callbacks that cannot be called, and what they ask for that is not there."""

from collections.abc import Iterable, Sequence

from plurax.errors import hints
from plurax.errors.kinds import TaskError


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


def hyperparams_not_now(*, servers: bool) -> TaskError:
    if servers:
        return TaskError(
            "run.set_hyperparams(): with servers= the optimizer's state is on the servers. Give "
            "the optimizer a schedule, or train without servers."
        )
    return TaskError(
        "run.set_hyperparams(): set them in on_start, on_evaluation or on_epoch. on_step is called "
        "some steps late, so that a resumed run would set them elsewhere; for a value of each step "
        "give the optimizer a schedule."
    )


def hyperparam_unknown(name: str, there: list[str]) -> TaskError:
    if there:
        return TaskError(
            f"the optimizer's state keeps no hyperparameter {name!r}; it keeps {', '.join(there)}."
        )
    return TaskError(
        f"the optimizer's state keeps no hyperparameter {name!r}, nor any other. Write "
        f"optax.inject_hyperparams(optax.adam)({name}=1e-3) for optax.adam(1e-3)."
    )


def hyperparam_not_a_number(name: str, value: object, members: int | None) -> TaskError:
    many = f", or an array of {members} of them, one for each member" if members else ""
    return TaskError(f"the hyperparameter {name}={value!r}: give a finite number{many}.")
