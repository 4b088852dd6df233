"""Populations that cannot be made, or do not fit where they are used; resampling."""

from collections.abc import Iterable
from typing import Any

from plurax.errors.kinds import BatchError, CheckpointError, MembersError, PlanError, TaskError


def members_none() -> MembersError:
    return MembersError("Members(seeds=...): a population needs at least one member.")


def members_too_many(given: int, largest: int) -> MembersError:
    return MembersError(
        f"{given:,} members: a population is compiled as one program, of at most {largest:,}. "
        "Train it in several calls, each with some of the seeds: Members(range(0, 1000)), "
        "Members(range(1000, 2000)). plurax.max_members says how many fit a device."
    )


def members_are_none(given: object) -> MembersError:
    number = given if isinstance(given, int) else 10
    return MembersError(
        f"the members are a {type(given).__name__}; write members=plurax.Members({number})."
    )


def members_seeds_not_understood(seeds: object) -> MembersError:
    return MembersError(
        f"Members(seeds={seeds!r}): give a number of members, a whole number ≥ 1, or a list of "
        "their seeds."
    )


def members_not_counted() -> MembersError:
    return MembersError(
        "Members(...) does not say how many members there are; give seeds=100, or a list of "
        "seeds, or a list of values for a hyperparameter, or hyper=plurax.ensemble.grid(...)."
    )


def member_not_there(number: int, count: int) -> MembersError:
    return MembersError(f"there is no member {number}: the members are 0 to {count - 1}.")


def member_seed_out_of_range(seed: object) -> MembersError:
    return MembersError(f"Members: the seed {seed!r} is not a whole number from 0 to 2**32 - 1.")


def hyper_not_named(given: object) -> MembersError:
    return MembersError(
        f"Members(hyper={given!r}): give hyperparameters by name, "
        "{'learning_rate': [0.1, 0.2, 0.3]}, or plurax.ensemble.grid(learning_rate=[...])."
    )


def hyper_wrong_length(name: str, given: int, members: int) -> MembersError:
    return MembersError(
        f"Members: the hyperparameter {name!r} has {given} values for {members} members; a list "
        "has one value for each member. For every combination of some values write "
        f"hyper=plurax.ensemble.grid({name}=[...]), to draw from a range "
        "plurax.ensemble.uniform(low, high)."
    )


def hyper_not_numbers(name: str, values: object) -> MembersError:
    return MembersError(
        f"Members: the hyperparameter {name!r} is {values!r}; inside one program it must be a "
        "number for each member. What changes shapes or code (a width, the name of an optimizer) "
        "goes into the shapes of plurax.sweep."
    )


def hyper_too_large(name: str, value: object, dtype: str, into: str) -> MembersError:
    return MembersError(
        f"Members: the hyperparameter {name!r} holds {value} as {dtype}, and JAX computes in "
        f"{into}, which cannot represent it. Make it smaller, or call "
        "jax.config.update('jax_enable_x64', True) before anything else."
    )


def distribution_bounds(low: float, high: float, *, log: bool) -> MembersError:
    name, need = ("log_uniform", "0 < low < high") if log else ("uniform", "low < high")
    return MembersError(f"plurax.ensemble.{name}({low!r}, {high!r}): needs finite numbers, {need}.")


def grid_not_a_list(name: str, values: object) -> MembersError:
    return MembersError(
        f"plurax.ensemble.grid({name}={values!r}): give a list of at least one value."
    )


def folds_too_few(folds: object) -> MembersError:
    return MembersError(
        f"plurax.ensemble.kfold({folds!r}): at least 2 folds are needed to leave one out."
    )


def folds_too_many(folds: int, rows: int) -> BatchError:
    return BatchError(
        f"plurax.ensemble.kfold({folds}): the data have only {rows} rows; use fewer folds."
    )


def subsample_no_size(sizes: object) -> MembersError:
    return MembersError(
        f"plurax.ensemble.subsample({sizes!r}): give sizes above 0: whole numbers of rows, or "
        "fractions below 1."
    )


def subsample_wrong_size(size: float, rows: int) -> BatchError:
    return BatchError(
        f"plurax.ensemble.subsample: a size of {size} is not between 1 and the {rows} rows "
        "of the data."
    )


def plan_has_members(member: int) -> PlanError:
    return PlanError(
        f"Plan(member={member}) splits the members of a population, and this is one network; "
        "give members=plurax.Members(...), or use data to split the batch."
    )


def hyper_needs_a_value(what: str, reason: str) -> TaskError:
    return TaskError(
        f"{what}(hyper) asked for the value of a hyperparameter while the program was traced "
        f"({reason}). Every member has its own value, so it cannot decide what code runs: compute "
        "with it (jnp.where, jnp.minimum) instead of branching on it. A schedule is any function "
        "of the step: lambda step: hyper['learning_rate'] * jnp.minimum(1, step / hyper['warmup'])."
    )


def hyper_function_returns(what: str, kind: str) -> TaskError:
    wanted = "a plurax.Task" if what == "task" else "a transformation of optax"
    return TaskError(
        f"{what}(hyper) returned a {kind}, and must return {wanted}: it is called with a dict of "
        "hyperparameters."
    )


def hyper_missing(what: str, name: str, known: Iterable[str]) -> TaskError:
    names = ", ".join(repr(one) for one in known) or "none"
    return TaskError(
        f"{what}(hyper) asked for the hyperparameter {name!r}, which Members(hyper=...) does not "
        f"give; it gives {names}."
    )


def members_need_a_function(what: str) -> MembersError:
    return MembersError(
        f"Members(hyper=...) gives hyperparameters, and neither the task nor the optimizer is a "
        f"function of them. Write the {what} as a function: "
        "def optimizer(hyper): return optax.adam(hyper['learning_rate'])."
    )


def members_differ() -> MembersError:
    return MembersError(
        "join_members: the states differ in structure, shape or dtype; only members of the same "
        "task and optimizer can be put together."
    )


def state_of_one_network() -> MembersError:
    return MembersError(
        "this is the state of one network, not of a population: its leaves have no leading dim of "
        "members."
    )


def data_not_array_data(kind: str) -> MembersError:
    return MembersError(
        f"compile(data=...) takes arrays and the order in which members read them, and this is a "
        f"{kind}. Write data=plurax.train.ArrayData(arrays, batch_size)."
    )


def data_without_members() -> MembersError:
    return MembersError(
        "compile(data=...) is for members, each of which reads the arrays in its own order. For "
        "one network leave it out: loop(state, place_data(arrays), place_epoch(rows, counts), "
        "start, stop) takes the order of each epoch."
    )


def program_of_one_network() -> MembersError:
    return MembersError(
        "this program is compiled for one network, so it has no members to exchange; compile it "
        "with members=plurax.Members(...)."
    )


def members_start_alone(what: str) -> MembersError:
    return MembersError(
        f"init({what}=...) starts one network, and this program has members, each with a seed of "
        "its own. Leave it out, and give the seeds to plurax.Members(seeds)."
    )


def members_not_grown(before: int, now: int) -> CheckpointError:
    if not before:
        return CheckpointError(
            f"the checkpoint holds one network, and a population of {now} is asked for. Leave "
            "members out, or train the population in another output directory."
        )
    return CheckpointError(
        f"the checkpoint holds {before} members and {now} are asked for, which do not begin with "
        "the same ones: seeds, hyperparameters and resampling of the first must not change. "
        "Train another population in another output directory."
    )


def members_other_resample(before: str, now: str) -> CheckpointError:
    return CheckpointError(
        f"the members of the checkpoint read their data by {before} and these by {now}; continuing "
        "would not be the same training. Use the same resampling, or another output directory."
    )


def tune_needs_members() -> MembersError:
    return MembersError(
        "--tune measures the chunk and the batch_dim of a population, and this is one network, "
        "which has neither. Say how many members there are: --members.seeds 100."
    )


def members_read_otherwise(before: Any, now: Any) -> MembersError:
    return MembersError(
        f"this program is compiled for members that read their data by {before!r}, and these read "
        f"by {now!r}; compile one for them (plurax.fit, plurax.compile)."
    )


def members_in_state(given: int, wanted: int) -> MembersError:
    return MembersError(
        f"the state holds {given} members and this program is compiled for {wanted}; take those "
        "you want (plurax.ensemble.take_members) or compile for as many."
    )


def resample_needs_arrays(kind: str) -> MembersError:
    return MembersError(
        f"Members(resample={kind}) draws rows by number, and these data do not stay on the devices "
        "(an iterable of batches, or resident=False). Give the data as arrays, or leave resample "
        "out: then every member sees every batch."
    )
