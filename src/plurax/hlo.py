"""Read a compiled program's collectives, where they run, and its memory.

Counting collectives in the text of a program is wrong in two ways: one in a loop body runs once per
iteration, and one in a called computation is not in the entry. So this parses the text into
computations and follows it from `ENTRY`, multiplying trip counts. Example, `Plan(data=4)`, a
reduction after the loop over microbatches, an all-gather inside it:

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

Sources: the XLA documentation, "Operation semantics" (collectives) and "HLO dumps".
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from plurax.collective import Collective, ring_bytes_sent

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TICKS = "schedule_ticks"
"""The scope of a loop whose iterations run different actions, each in a scope `times_scope(n)`."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler reports them.

    **Fields:** `arguments` (state and batch), `outputs`, `aliased` (outputs that reuse an
    argument's memory), `temporaries`, `code`; `peak` is arguments + outputs - aliased +
    temporaries + code, the most the program holds at once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The most the program holds at once on one device."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the memory of a compiled program, bytes on one device."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this backend reports no memory"
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def times_scope(times: int) -> str:
    """Return the name of a scope whose operations run `times` for each run of the loop `TICKS`."""
    return f"runs_{times}_times"


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the walk is: how often a computation runs, and whether in a loop.

    **Fields:** `trips`; `outside`, the trips outside of the loop `TICKS`, None where not in it;
    `in_action`, whether in a loop of unknown length in it, or in a branch; `scope`, the
    `times_scope` by which `trips` was set.
    """

    trips: int | None = 1
    in_loop: bool = False
    outside: int | None = None
    in_action: bool = False
    scope: str = ""

    def at(self, line: str) -> "_Place":
        """Return the place of an operation, which may be the first one of a scope."""
        scope = re.search(r'op_name="[^"]*\b(runs_(\d+)_times)\b', line)
        # What XLA moved out of the action has its name still, and runs in every tick.
        if scope is None or scope[1] == self.scope or self.outside is None or not self.in_action:
            return self
        return dataclasses.replace(self, trips=self.outside * int(scope[2]), scope=scope[1])

    def inside(self, line: str, unknown_trips: int | None) -> "_Place":
        """Return the place of the body of a loop."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        times = int(known[1]) if known else unknown_trips
        # Nested loops multiply; an unknown length makes everything inside unknown.
        inner = None if times is None or self.trips is None else self.trips * times
        outside = self.outside
        if outside is None and re.search(rf'op_name="[^"]*\b{TICKS}\b', line):
            outside = self.trips
        in_action = self.in_action or (outside is not None and known is None)
        return dataclasses.replace(
            self, trips=inner, in_loop=True, outside=outside, in_action=in_action
        )

    def branch(self) -> "_Place":
        """Return the place of a branch."""
        return dataclasses.replace(self, in_action=self.outside is not None)


def collectives(hlo: str, mesh: Mesh, unknown_trips: int | None = None) -> list[Collective]:
    """Return the collectives in the text of a compiled program, in textual order.

    A collective that XLA splits in two (`all-reduce-start`, `all-reduce-done`) counts once; one
    over a single device is left out. Loop bodies are followed through calls, conditionals and
    nested loops; every branch of a conditional counts. `unknown_trips` are those of a loop whose
    length is not known: with 1, a loop over many steps has the collectives of one step.
    """
    bodies = dict(_computations(hlo))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE)
    assert entry is not None, "compiled text without an entry computation"
    found: list[Collective] = []
    _walk(entry[1], bodies, mesh, _Place(), unknown_trips, found)
    return found


def _walk(
    name: str,
    bodies: dict[str, list[str]],
    mesh: Mesh,
    place: _Place,
    unknown_trips: int | None,
    found: list[Collective],
) -> None:
    lines = bodies.get(name, [])
    for line in lines:
        here = place.at(line)
        match = re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
                          r"collective-permute)(-start)?\(", line)  # fmt: skip
        if match:
            size = _result_bytes(_result_of_start(match[1], match[2]) if match[3] else match[1])
            axes, devices = _axes(line, mesh), _group_size(line, mesh)
            kept = _kept_slice(line, lines, bodies) if match[2] == "all-reduce" else None
            equivalent = "reduce-scatter" if kept else None
            if devices > 1:
                found.append(
                    Collective(
                        match[2],
                        axes,
                        bytes=kept or size,
                        bytes_sent=ring_bytes_sent(equivalent or match[2], kept or size, devices),
                        in_loop=here.in_loop,
                        trips=here.trips,
                        equivalent_kind=equivalent,
                    )
                )
        if re.search(r"\bwhile\(", line):
            body = re.search(r"body=%?([\w.\-]+)", line)
            assert body is not None
            _walk(body[1], bodies, mesh, here.inside(line, unknown_trips), unknown_trips, found)
        elif not re.search(r" async-(update|done)\(", line):  # the start names the same call
            inner = here.branch() if re.search(r"\bconditional\(", line) else here
            for called in _called(line):
                _walk(called, bodies, mesh, inner, unknown_trips, found)


def _kept_slice(line: str, lines: list[str], bodies: dict[str, list[str]]) -> int | None:
    """Return the bytes of a result's slices if nothing else of it is read, else None.

    This recognizes a reduce-scatter written as an all-reduce with dynamic-slices, which may be
    inside fusions.
    """
    result = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) =", line)
    if result is not None and " all-reduce-start(" in line:
        done = next((user for user in lines if f" all-reduce-done({result[1]})" in user), None)
        return None if done is None else _kept_slice(done, lines, bodies)
    if result is None or line.lstrip().startswith("ROOT"):
        return None
    users = [user for user in lines if user is not line and _reads(user, result[1])]
    sizes = []
    for user in users:
        called = re.search(r" fusion\((.*?)\), kind=.*calls=(%?[\w.\-]+)", user)
        if called:
            # Only names: before one may be a shape, `f32[8,4]{1,0:T(8,128)} %x`, or `/*index=5*/`.
            index = re.findall(r"%[\w.\-]+", called[1]).index(result[1])
            inside = bodies.get(called[2].lstrip("%"), [])
            parameter = next(
                (re.match(r"\s*(%[\w.\-]+) =", text) for text in inside
                 if f"parameter({index})" in text), None
            )  # fmt: skip
            inner = [text for text in inside if parameter and _reads(text, parameter[1])]
        else:
            inner = [user]
        for text in inner:
            cut = re.search(r"= (.*?) dynamic-slice\(", text)
            if cut is None:
                return None
            sizes.append(_result_bytes(cut[1]))
    return sum(sizes) or None


def _reads(line: str, name: str) -> bool:
    return re.search(re.escape(name) + r"[,)\s]", line.partition(" = ")[2]) is not None


def _called(line: str) -> Iterator[str]:
    for match in re.finditer(r"(?:calls|to_apply|\w+_computation)=%?([\w.\-]+)", line):
        yield match[1]
    branches = re.search(r"(?:branch_computations|calls)=\{([^}]*)\}", line)
    if branches:
        yield from re.findall(r"%?([\w.\-]+)", branches[1])


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name: str | None = None
    lines: list[str] = []
    for line in hlo.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header and not line.startswith(" "):
            name, lines = header[1], []
        elif line.startswith("}") and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _result_of_start(text: str, kind: str) -> str:
    """Return, of the type of an asynchronous start, the part that its done returns.

    For an all-reduce that is the whole type; the others are tuples with the operands first:
    `(f32[16], f32[64]) all-gather-start`, `((f32[8]), f32[2], u32[]) reduce-scatter-start`.
    """
    if kind == "all-reduce":
        return text
    plain, depth, parts = re.sub(r"\{[^{}]*\}", "", text), 0, [""]
    for letter in plain.strip()[1:-1]:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts[1]


def _result_bytes(text: str) -> int:
    bits = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", text):
        bits += _item_bits(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim)
    return -(-bits // 8)


def _item_bits(dtype: str) -> int:
    """Return the bits of a dtype, the number in its name (`bf16`, `f8e4m3fn`); `pred` has 8."""
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ."""
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    if pairs:
        ends = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
        moved = [np.array([np.unravel_index(n, mesh.devices.shape) for n in e]) for e in ends]
        return tuple(
            axis
            for dim, axis in enumerate(mesh.axis_names)
            if any(source[dim] != target[dim] for source, target in moved)
        )
    group = _first_group(line)
    if group is None:
        return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    coordinates = np.array([np.unravel_index(member, mesh.devices.shape) for member in group])
    return tuple(
        axis
        for dim, axis in enumerate(mesh.axis_names)
        if len(set(coordinates[:, dim].tolist())) > 1
    )


def _group_size(line: str, mesh: Mesh) -> int:
    group = _first_group(line)
    if group is not None:
        return len(group)
    axes = _axes(line, mesh)
    return math.prod(mesh.shape[axis] for axis in axes)


def _first_group(line: str) -> list[int] | None:
    """Return the devices of the first group of a collective, None where no groups are written.

    Newer compilers name a mesh: `replica_groups=mesh['member'=4,'data'=2] {'data'}`.
    """
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[2])
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        group = tuple(slice(None) if name in over else 0 for name in sizes)
        return [int(device) for device in devices[group].ravel()]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return [int(member) for member in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, dims = ([int(n) for n in part.split(",")] for part in (iota[1], iota[2]))
        members = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            members = members.transpose([int(n) for n in iota[3].split(",")])
        return [int(member) for member in members.reshape(shape)[0]]
    return None
