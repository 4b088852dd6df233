"""Check the kinds of task, optimizer, plan and members before tracing anything."""

from typing import Any

from plurax import errors
from plurax.members import Members
from plurax.plan import Plan
from plurax.task import Task

LIBRARIES = (
    ("flax.linen", "linen"),
    ("flax.nnx", "nnx"),
    ("equinox", "equinox"),
    ("haiku.", "haiku"),
    ("keras.", "keras"),
)


def check_kinds(task: Any, optimizer: Any, plan: Any, members: Any) -> None:
    """Raise `TaskError`, `PlanError` or `MembersError` for an argument of the wrong kind."""
    if not isinstance(plan, Plan):
        raise errors.plan_is_none(plan)
    if members is not None and not isinstance(members, Members):
        raise errors.members_are_none(members)
    many = members is not None
    if plan.member > 1 and not many:
        raise errors.plan_has_members(plan.member)
    library = _library(task)
    if not isinstance(task, Task) and (library or not (many and callable(task))):
        kind = task.__name__ if isinstance(task, type) else type(task).__name__
        raise errors.task_is_none(kind, library or ("function" if callable(task) else None))
    transforms = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if not transforms and not (many and callable(optimizer)):
        raise errors.optimizer_is_none(optimizer, members=many)


def check_population(task: Any, optimizer: Any, plan: Any, members: Any) -> None:
    """Raise as `check_kinds`, and `MembersError` if `members` is None."""
    if members is None:
        raise errors.members_are_none(members)
    check_kinds(task, optimizer, plan, members)


def _library(task: Any) -> str | None:
    """Return the library (Flax, Keras) of a model or model class given as a task, or None."""
    kinds = task.__mro__ if isinstance(task, type) else type(task).__mro__
    modules = [kind.__module__ for kind in kinds]
    for prefix, name in LIBRARIES:
        if any(module.startswith(prefix) for module in modules):
            return name
    return None
