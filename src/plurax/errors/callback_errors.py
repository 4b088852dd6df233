"""Callbacks that cannot be called, and what they ask for that is not there."""

from collections.abc import Iterable, Mapping, Sequence

from plurax.errors import hints
from plurax.errors.kinds import TaskError


def callbacks_not_a_list(kind: str) -> TaskError:
    return TaskError(
        f"the callbacks are a {kind}; write a list: "
        "callbacks=[plurax.callbacks.EarlyStopping('eval_loss')]."
    )


def callback_is_a_class(name: str) -> TaskError:
    return TaskError(
        f"the callback {name} is a class; write an object of it: callbacks=[{name}(...)]."
    )


def callback_hooks(name: str, unknown: Sequence[str], hooks: Mapping[str, str]) -> TaskError:
    has = f"has {', '.join(unknown)}, which nothing calls" if unknown else "has no hook"
    known = ", ".join(f"{hook}({arguments})" for hook, arguments in hooks.items())
    return TaskError(f"the callback {name} {has}; the hooks of a callback are {known}.")


def callback_half_a_state(name: str) -> TaskError:
    return TaskError(
        f"the callback {name} has one of get_state() and set_state(state); a callback whose state "
        "is kept in checkpoints has both."
    )


def callback_state_not_json(name: str, reason: str) -> TaskError:
    return TaskError(
        f"the state of the callback {name} cannot be saved: {reason}. get_state() returns numbers, "
        "text, None, and lists and dicts of them."
    )


def callback_metric_missing(name: str, metric: str, there: Iterable[str]) -> TaskError:
    return TaskError(
        f"the callback {name} follows {metric!r}, and a row has {', '.join(there)}. Metrics of the "
        "evaluation begin with eval_, and need fit(evaluation=...)."
    )


def callback_metric_not_a_number(name: str, metric: str, kind: str) -> TaskError:
    return TaskError(
        f"the callback {name} follows {metric!r}, which is a {kind} in the row; name a number."
    )


def callback_count(name: str, argument: str, given: object) -> TaskError:
    return TaskError(f"{name}({argument}={given!r}): give a whole number ≥ 1.")


def callback_mode(name: str, given: object) -> TaskError:
    return TaskError(f"{name}(mode={given!r}): give 'min', 'max', or None to guess by the name.")


def nothing_kept(metric: str) -> TaskError:
    return TaskError(
        f"KeepBest({metric!r}) has kept no state yet: it keeps one after the first epoch whose "
        f"{metric} is a finite number."
    )


def ema_decay(given: object) -> TaskError:
    return TaskError(f"Ema(decay={given!r}): give a number ≥ 0 and < 1, such as 0.999.")


def ema_not_in_state() -> TaskError:
    return TaskError(
        "the optimizer's state has no average of the parameters: train with "
        "callbacks=[plurax.callbacks.Ema(...)], and ask for params(result.state) of that run."
    )


def learning_rate_not_found() -> TaskError:
    return TaskError(
        "LearningRate() finds no learning rate in the optimizer's state. Give it the schedule, "
        "LearningRate(schedule), or write "
        "optax.inject_hyperparams(optax.adam)(learning_rate=schedule)."
    )


def argument_unknown(
    function: str, name: str, write: str | None, known: Sequence[str]
) -> TaskError:
    hint = f" Write {write}." if write else hints.did_you_mean(name, known)
    return TaskError(f"{function}() has no argument {name!r}.{hint}")


def plateau_factor(given: object) -> TaskError:
    return TaskError(
        f"ReduceOnPlateau(factor={given!r}): give a number > 0 and < 1, such as 0.5; the learning "
        "rate is multiplied by it."
    )


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


def hyperparam_ambiguous(name: str, paths: list[str]) -> TaskError:
    return TaskError(
        f"several hyperparameters of the optimizer are named {name!r}. Give the path of one: "
        f"{', '.join(paths)}."
    )


def hyperparam_scheduled(name: str) -> TaskError:
    return TaskError(
        f"the hyperparameter {name!r} follows a schedule, which would replace another value in the "
        "next step. Give optax.inject_hyperparams a number in place of the schedule."
    )


def hyperparam_not_a_number(name: str, value: object, members: int | None) -> TaskError:
    many = f", or an array of {members} of them, one for each member" if members else ""
    return TaskError(f"the hyperparameter {name}={value!r}: give a finite number{many}.")


def profile_steps(given: object) -> TaskError:
    return TaskError(
        f"Profile(steps={given!r}): give the first and the last step, such as (10, 12)."
    )


def profile_directory() -> TaskError:
    return TaskError(
        "Profile() has no directory to write to: give Profile(directory='trace') or "
        "fit(output=...)."
    )


def max_steps_not_positive(given: object) -> TaskError:
    return TaskError(f"fit(max_steps={given!r}): give a whole number ≥ 1, or None for no limit.")


def max_seconds_not_positive(given: object) -> TaskError:
    return TaskError(f"fit(max_seconds={given!r}): give a number > 0, or None for no limit.")


def fast_dev_run_not_understood(given: object) -> TaskError:
    return TaskError(
        f"fit(fast_dev_run={given!r}): give a number of steps, True for one, or 0 for a whole run."
    )
