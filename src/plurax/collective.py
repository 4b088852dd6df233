"""A collective of a step: planned, in the recorded step, or read from the compiled program."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)
Key = tuple[str, tuple[str, ...]]
"""A kind of collective, and mesh axes."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    **Fields:**

    - `kind`: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
      `collective-permute`.
    - `axes`: the mesh axes it runs over, in the order of the mesh.
    - `bytes`: of its result on one device, padding included, each time it runs.
    - `bytes_sent`: by each device, each time it runs; at most, of a `ragged-all-to-all`, whose
      result is room for rows.
    - `in_loop`: whether it is in the body of a loop.
    - `trips`: how often it runs in one call; None where the loop's length is not known statically:
      of a plan that of each `while_loop`, of a compiled program that of those in which the compiler
      finds no counter. In an action of a pipeline: by the schedule, on the device that runs it
      most often. In a branch: if that branch is taken.
    - `operation`: if planned, the equation that needs the resharded operand, and its enclosing
      function; "" if the collective belongs to no single equation.
    - `without_rule`: if planned for an operation that has no rule, that operation's name and its
      line in the model's code.
    - `equivalent_kind`: if compiled, `reduce-scatter` for an all-reduce of which each device reads
      only a slice, which compilers without reduce-scatter emit; else None. `bytes` are then those
      of the slice.
    - `group`: if planned for parts of an axis, the devices that communicate with each other, and
      how far apart they are along it; None: all of the axes.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    bytes_sent: float = dataclasses.field(repr=False)
    in_loop: bool
    trips: int | None
    operation: str = dataclasses.field(default="", repr=False)
    without_rule: tuple[str, str] | None = dataclasses.field(default=None, repr=False)
    equivalent_kind: str | None = dataclasses.field(default=None, repr=False)
    group: tuple[int, int] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def key(self) -> Key:
        """The kind of which it is, or to which it is equivalent, and the mesh axes in order."""
        return self.equivalent_kind or self.kind, tuple(sorted(self.axes))


def by_kind(collectives: Iterable[Collective]) -> dict[Key, list[Collective]]:
    """Return the collectives of a step by kind and mesh axes."""
    groups: dict[Key, list[Collective]] = {}
    for collective in collectives:
        groups.setdefault(collective.key, []).append(collective)
    return groups


def in_a_step(group: Iterable[Collective], size: Callable[[Collective], Number]) -> Number:
    """Return the sum of a size over a step, in which a loop's collective runs several times."""
    return sum((size(collective) * (collective.trips or 1) for collective in group), 0)


def ring_bytes_sent(kind: str, size: int, devices: int) -> float:
    """Return the bytes that each of some devices sends by the ring algorithm.

    `size` is the bytes of the result on one device.

    >>> ring_bytes_sent("all-reduce", 1024, 4), ring_bytes_sent("reduce-scatter", 256, 4)
    (1536.0, 768.0)
    """
    shares = {
        "all-reduce": 2 * (devices - 1) / devices,
        "all-gather": (devices - 1) / devices,
        "reduce-scatter": float(devices - 1),
        "all-to-all": (devices - 1) / devices,
        "ragged-all-to-all": (devices - 1) / devices,
        "collective-permute": 1.0,
    }
    return size * shares[kind]
