"""Populations and sweeps that cannot be made, or do not fit where they are used."""

from collections.abc import Iterable

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


def state_of_one_network() -> MembersError:
    return MembersError(
        "this is the state of one network, not of a population: its leaves have no leading dim of "
        "members."
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
