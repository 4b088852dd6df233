"""What is searched: the arguments of a search, as its parts hand them on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import PyTree

from plurax.members import Members
from plurax.plan import Plan


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
