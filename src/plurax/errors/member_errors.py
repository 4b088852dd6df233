"""Populations and sweeps that cannot be made, or do not fit where they are used."""

from collections.abc import Iterable
from typing import Any

from plurax.errors.kinds import MembersError, PlanError


def members_are_none(given: object) -> MembersError:
    number = given if isinstance(given, int) else 10
    return MembersError(
        f"the members are a {type(given).__name__}; write members=plurax.Members({number})."
    )


def member_not_there(number: int, count: int) -> MembersError:
    return MembersError(f"there is no member {number}: the members are 0 to {count - 1}.")


def plan_has_members(member: int) -> PlanError:
    return PlanError(
        f"Plan(member={member}) splits the members of a population, and this is one network; "
        "give members=plurax.Members(...), or use data to split the batch."
    )


def members_need_a_function(what: str) -> MembersError:
    return MembersError(
        f"Members(hyper=...) gives hyperparameters, and neither the task nor the optimizer is a "
        f"function of them. Write the {what} as a function: "
        "def optimizer(hyper): return optax.adam(hyper['learning_rate'])."
    )


def state_of_one_network() -> MembersError:
    return MembersError(
        "this is the state of one network, not of a population: its leaves have no leading dim of "
        "members."
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


def members_read_otherwise(before: Any, now: Any) -> MembersError:
    return MembersError(
        f"this program is compiled for members that read their data by {before!r}, and these read "
        f"by {now!r}; compile one for them (plurax.fit, plurax.compile)."
    )


def resample_needs_arrays(kind: str) -> MembersError:
    return MembersError(
        f"Members(resample={kind}) draws rows by number, and these data do not stay on the devices "
        "(an iterable of batches, or resident=False). Give the data as arrays, or leave resample "
        "out: then every member sees every batch."
    )


def sweep_without_rows() -> MembersError:
    return MembersError(
        "the table of this sweep is empty: it was stopped before the first report of its first "
        "bucket. Train on with resume=True."
    )


def sweep_no_metric(name: str, known: Iterable[str]) -> MembersError:
    return MembersError(
        f"there is no metric {name!r}; there are {', '.join(known)}. Those of the evaluation begin "
        "with eval_."
    )
