"""What is searched: the arguments of a search, as its parts hand them on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from plurax import errors
from plurax.execute.population import example_network
from plurax.members import Members
from plurax.plan import Plan
from plurax.validate import changed_fields


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is searched: `batch`, as `jax.ShapeDtypeStruct`s; `fields` of `pinned`, which hold;
    `memory`, the bytes that a device may use, or None; `count`, of plans to rank."""

    task: Any
    optimizer: Any
    batch: PyTree
    members: Members | None
    pinned: Plan
    fields: Sequence[str]
    memory: float | None
    count: int

    def holding(self, **fields: Any) -> "Wanted":
        """Return the same with more fields that hold."""
        pinned = dataclasses.replace(self.pinned, **fields)
        return dataclasses.replace(self, pinned=pinned, fields=[*self.fields, *fields])

    def unless_held(self, **fields: Any) -> "Wanted":
        """Return the same with those of more fields that are open."""
        return self.holding(**{name: fields[name] for name in fields if name not in self.fields})


def pinned_fields(pinned: Plan | Mapping[str, Any]) -> list[str]:
    """Return the fields of a plan that the search must keep."""
    if isinstance(pinned, Mapping):
        known = [field.name for field in dataclasses.fields(Plan)]
        for name in pinned:
            if name not in known:
                raise errors.plan_unknown_key(name, known, "pinned")
        return list(pinned)
    return list(changed_fields(pinned))


def of_one_member(wanted: Wanted) -> Wanted:
    """Return the search for the first member alone."""
    task, optimizer = example_network(wanted.task, wanted.optimizer, wanted.members)
    pinned = dataclasses.replace(wanted.pinned, member=1, chunk=None, batch_dim=None)
    own = ("member", "chunk", "batch_dim")
    return dataclasses.replace(
        wanted, task=task, optimizer=optimizer, members=None, pinned=pinned,
        fields=[name for name in wanted.fields if name not in own],
    )  # fmt: skip
