"""Read the collectives of a compiled program, and where they run.

Counting collectives in the text of a program is wrong in two ways: one in a loop body runs once per
iteration, and one in a called computation is not in the entry. So this parses the text into
computations (`text.py`) and follows it from `ENTRY`, multiplying trip counts. Example,
`Plan(data=4)`, a reduction after the loop over microbatches, an all-gather inside it:

    %body.1 (...) {
      %g = f32[64,32] all-gather(...), replica_groups={{0,1,2,3}}, dimensions={0}
    }
    ENTRY %main (...) {
      %w = ... while(...), body=%body.1, ... "known_trip_count":{"n":"8"}
      %r = f32[64,32] all-reduce(...), replica_groups=[1,4]<=[4]
    }
    -> Collective("all-gather", ("data",), 8192, in_loop=True,  trips=8)
       Collective("all-reduce", ("data",), 8192, in_loop=False, trips=1)

How often a loop runs whose number of iterations is data is not in the text. The actions of a
pipeline are such loops, of 0 or 1 iterations in each tick. Their schedule says how often a device
runs them, so they are traced in scopes with that number, which XLA keeps in operations' names:

    op_name="jit(step)/.../schedule_ticks/while/body/.../runs_4_times/..."      trips=4, in any loop

A compiler may split a collective in parts between which a device computes. It counts once, where
it starts:

    %s = (f32[64], f32[256]) all-gather-start(%x), ...           two instructions; a TPU names the
    %d = f32[256] all-gather-done(%s)                            parts async-start, async-done

    %s = (...) fusion(%x), calls=%start   all-gather, chain_id="5"     a TPU's, in three fusions, of
    %c = (...) fusion(%s), calls=%step    all-gather, chain_id="5"     which the second multiplies
    %d = f32[256] fusion(%c), calls=%done all-gather, chain_id="5"     matrices meanwhile, also in
                                                                       the body of a loop

Sources: the XLA documentation, "Operation semantics" (collectives) and "HLO dumps".
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from plurax.collective import Collective, ring_bytes_sent
from plurax.hlo.text import Instruction, Module, parse, result_of, type_bytes

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip
TICKS = "schedule_ticks"
"""The scope of a loop whose iterations run different actions, each in a scope `times_scope(n)`."""


def times_scope(times: int) -> str:
    """Return the name of a scope whose operations run `times` for each run of the loop `TICKS`."""
    return f"runs_{times}_times"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a walk through a program is: how often a computation runs, and whether in a loop.

    **Fields:** `trips`; `outside`, the trips outside of the loop `TICKS`, None where not in it;
    `in_action`, whether in a loop of unknown length in it, or in a branch; `scope`, the
    `times_scope` by which `trips` was set.
    """

    trips: int | None = 1
    in_loop: bool = False
    outside: int | None = None
    in_action: bool = False
    scope: str = ""

    def at(self, instruction: Instruction) -> "Place":
        """Return the place of an instruction, which may be the first one of a scope."""
        return self._in_scope(_times_scopes([instruction]))

    def of(self, computation: Sequence[Instruction]) -> "Place":
        """Return the place of a computation's instructions without a name of their own.

        In a loop of unknown length that is the one scope that others of it have: XLA makes some
        operations anew, a sum over devices for example, under the name of the loop around them.
        """
        return self if self.scope else self._in_scope(_times_scopes(computation))

    def _in_scope(self, scopes: set[tuple[str, int]]) -> "Place":
        # What XLA moved out of the action has its name still, and runs in every tick.
        if len(scopes) != 1 or self.outside is None or not self.in_action:
            return self
        [(scope, times)] = scopes
        if scope == self.scope:
            return self
        return dataclasses.replace(self, trips=self.outside * times, scope=scope)

    def inside(self, loop: Instruction, known: int | None, unknown_trips: int | None) -> "Place":
        """Return the place of the body of a loop that runs `known` times, None if that is data."""
        times = unknown_trips if known is None else known
        # Nested loops multiply; an unknown length makes everything inside unknown.
        inner = None if times is None or self.trips is None else self.trips * times
        outside = self.outside
        if outside is None and re.search(rf"\b{TICKS}\b", loop.op_name):
            outside = self.trips
        in_action = self.in_action or (outside is not None and known is None)
        return dataclasses.replace(
            self, trips=inner, in_loop=True, outside=outside, in_action=in_action
        )

    def branch(self) -> "Place":
        """Return the place of a branch."""
        return dataclasses.replace(self, in_action=self.outside is not None)


def _times_scopes(computation: Sequence[Instruction]) -> set[tuple[str, int]]:
    names = (re.search(r"\b(runs_(\d+)_times)\b", one.op_name) for one in computation)
    return {(name[1], int(name[2])) for name in names if name}


def collectives(text: str, mesh: Mesh, unknown_trips: int | None = None) -> list[Collective]:
    """Return the collectives in the text of a compiled program, in textual order.

    A collective that is split in parts counts once; one over a single device is left out. Loop
    bodies are followed through calls, conditionals and nested loops; every branch of a conditional
    counts. `unknown_trips` are those of a loop whose length is not known: with 1, a loop over many
    steps has the collectives of one step.
    """
    module = parse(text)
    found: list[Collective] = []
    _walk(module.entry, module, mesh, Place(), unknown_trips, found, set())
    return found


def _walk(
    name: str,
    module: Module,
    mesh: Mesh,
    place: Place,
    unknown_trips: int | None,
    collectives: list[Collective],
    chains: set[str],
) -> None:
    computation = module.computations.get(name, ())
    place = place.of(computation)
    for instruction in computation:
        here = place.at(instruction)
        chain = chain_of(instruction, module)
        if chain is not None:
            if chain.id not in chains and (sent := sent_by(chain.part, (), module, mesh)):
                collectives.append(collective_of(sent, here))
            chains.add(chain.id)
            continue
        if sent := sent_by(instruction, computation, module, mesh):
            collectives.append(collective_of(sent, here))
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
            inside = here.inside(instruction, module.trips(instruction), unknown_trips)
            _walk(body, module, mesh, inside, unknown_trips, collectives, chains)
        elif instruction.opcode not in ("async-update", "async-done"):  # the start calls the same
            inner = here.branch() if instruction.opcode == "conditional" else here
            for called in instruction.called():
                _walk(called, module, mesh, inner, unknown_trips, collectives, chains)


class Chain(NamedTuple):
    """A part of a collective that a TPU spreads over several fusions.

    **Fields:** `id`, of the collective; `part`, the collective as it stands in this fusion.
    """

    id: str
    part: Instruction


def chain_of(fusion: Instruction, module: Module) -> Chain | None:
    """Return what a fusion does of a collective that is spread over several; None if nothing."""
    if fusion.opcode != "fusion":
        return None
    for part in module.computations.get(next(fusion.called(), ""), ()):
        if kind_of(part) and (number := part.attribute(r'chain_id="(\d+)"')):
            return Chain(number, part)
    return None


class Sent(NamedTuple):
    """What an instruction sends.

    **Fields:** `kind`; `axes` of the mesh; `bytes` of its result, `bytes_sent` by each device;
    `equivalent`, as `Collective.equivalent_kind`.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    bytes_sent: float
    equivalent: str | None


def collective_of(sent: Sent, place: Place) -> Collective:
    """Return a collective at a place of a program."""
    return Collective(
        sent.kind,
        sent.axes,
        bytes=sent.bytes,
        bytes_sent=sent.bytes_sent,
        in_loop=place.in_loop,
        trips=place.trips,
        equivalent_kind=sent.equivalent,
    )


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of the collective that an instruction is or starts, None if neither."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def sent_by(
    instruction: Instruction, computation: Sequence[Instruction], module: Module, mesh: Mesh
) -> Sent | None:
    """Return what an instruction of a computation sends, None if nothing to another device."""
    kind = kind_of(instruction)
    if kind is None:
        return None
    axes, devices = _axes(instruction, mesh), _group_size(instruction, mesh)
    if devices == 1:
        return None
    kept = _kept_slice(instruction, computation, module) if kind == "all-reduce" else None
    whole = type_bytes(result_of(instruction))
    # Several instructions may read one device's part.
    size = min(kept, whole // devices) if kept else whole
    equivalent = "reduce-scatter" if kept else None
    sent = ring_bytes_sent(equivalent or kind, size, devices)
    return Sent(kind, axes, size, sent, equivalent)


def _kept_slice(
    reduction: Instruction, computation: Sequence[Instruction], module: Module
) -> int | None:
    """Return the bytes of a result's slices if nothing else of it is read, else None.

    This recognizes a reduce-scatter written as an all-reduce with dynamic-slices, which may be
    inside fusions.
    """
    users = [user for user in computation if reduction.name in user.operands]
    if reduction.opcode == "all-reduce-start":
        done = next((user for user in users if user.opcode == "all-reduce-done"), None)
        return None if done is None else _kept_slice(done, computation, module)
    if reduction.root:
        return None
    sizes = []
    for user in users:
        readers = [user]
        if user.opcode == "fusion":
            inside = module.computations.get(next(user.called(), ""), ())
            index = str(user.operands.index(reduction.name))
            names = {p.name for p in inside if p.opcode == "parameter" and p.arguments == index}
            readers = [one for one in inside if names.intersection(one.operands)]
        for reader in readers:
            if reader.opcode != "dynamic-slice":
                return None
            sizes.append(reader.bytes)
    return sum(sizes) or None


# --- Groups of devices ----------------------------------------------------------------------------


def _axes(instruction: Instruction, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ."""
    pairs = instruction.attribute(r"source_target_pairs=\{(\{.*?\})\}")
    if pairs:
        ends = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs)]
        moved = [np.array([np.unravel_index(n, mesh.devices.shape) for n in e]) for e in ends]
        return tuple(
            axis
            for dim, axis in enumerate(mesh.axis_names)
            if any(source[dim] != target[dim] for source, target in moved)
        )
    group = _first_group(instruction.attributes)
    if group is None:
        return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    coordinates = np.array([np.unravel_index(member, mesh.devices.shape) for member in group])
    return tuple(
        axis
        for dim, axis in enumerate(mesh.axis_names)
        if len(set(coordinates[:, dim].tolist())) > 1
    )


def _group_size(instruction: Instruction, mesh: Mesh) -> int:
    group = _first_group(instruction.attributes)
    if group is not None:
        return len(group)
    return math.prod(mesh.shape[axis] for axis in _axes(instruction, mesh))


def _first_group(attributes: str) -> list[int] | None:
    """Return the devices of the first group of a collective, None where no groups are written.

    Newer compilers name a mesh: `replica_groups=mesh['member'=4,'data'=2] {'data'}`.
    """
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[2])
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        group = tuple(slice(None) if name in over else 0 for name in sizes)
        return [int(device) for device in devices[group].ravel()]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return [int(member) for member in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, dims = ([int(n) for n in part.split(",")] for part in (iota[1], iota[2]))
        members = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            members = members.transpose([int(n) for n in iota[3].split(",")])
        return [int(member) for member in members.reshape(shape)[0]]
    return None
