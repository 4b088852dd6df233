"""Sweeps, halving, and the number of members."""

from collections.abc import Iterable

from plurax.errors.kinds import MembersError


def no_member_fits(budget: int, members: int, needed: int) -> MembersError:
    return MembersError(
        f"no population fits: the smallest possible, {members} member(s), needs {needed:,} bytes "
        f"on a device and the budget is {budget:,}. A smaller chunk and more microbatches need "
        "less memory."
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


def mode_unknown(given: object) -> MembersError:
    return MembersError(
        f"mode={given!r}: choose 'min' where the smallest metric is the best (a loss), or 'max' "
        "(an accuracy)."
    )


def sweep_all_frozen(count: int) -> MembersError:
    return MembersError(
        f"all {count} members of the sweep are frozen: loss or gradient was not finite in each. "
        "Smaller learning rates may help."
    )


def sweep_no_row(row: dict[str, object]) -> MembersError:
    return MembersError(f"this is not a row of this sweep: {row}.")


def needs_pandas() -> MembersError:
    return MembersError(
        "to_pandas needs pandas: pip install pandas. Without it, rows is a list of dicts and "
        "save_csv writes a file."
    )


def halving_wrong_budget(min_epochs: object, epochs: object, reduction: object) -> MembersError:
    return MembersError(
        f"successive_halving(min_epochs={min_epochs!r}, epochs={epochs!r}, "
        f"reduction={reduction!r}): needs 1 <= min_epochs <= epochs and a reduction of at least 2, "
        "whole numbers."
    )


def halving_wrong_slots(slots: object) -> MembersError:
    return MembersError(
        f"successive_halving(slots={slots!r}): give how many members train at a time, a whole "
        "number of at least 1; leave it out to train all at once."
    )


def sweep_shapes_not_settings(shapes: object) -> MembersError:
    return MembersError(
        f"sweep(shapes={shapes!r}): give plurax.ensemble.grid(width=[32, 64]), or a list of at "
        "least one dict of settings, [{'width': 32}, {'width': 64}]."
    )


def sweep_task_not_a_function(names: Iterable[str]) -> MembersError:
    listed = ", ".join(names)
    return MembersError(
        f"the shapes of the sweep set {listed}, and the task is already a Task. Give a function "
        f"that builds it: def task({listed}): return plurax.Task(...)."
    )


def halving_needs_arrays() -> MembersError:
    return MembersError(
        "successive_halving needs data that stay on the devices; give arrays, not an iterable of "
        "batches."
    )
