"""Sweeps, halving, and the number of members."""

from collections.abc import Iterable

from plurax.errors.kinds import MembersError


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
