"""Find what a compiled program holds when it holds most, by a walk along its schedule.

A compiler reports how much memory a program needs, not what for. Its text nearly says so: the
instructions stand in the order in which they run, and a value takes memory from the one that
computes it to the last one that reads it. Example, values of 1 MiB each:

    %a = f32[512,512] dot(%x, %w)       holds a
    %b = f32[512,512] tanh(%a)          holds a, b
    %l = f32[] reduce(%b)               holds a, b, l
    %d = f32[512,512] multiply(%a, %b)  holds a, b, l, d: the peak
    %g = f32[512,512] dot(%x, %d)       holds l, d, g

A tuple, an element of one and a bitcast are the memory of their operands; what a loop carries, and
what an instruction updates in place, stays where it is. Parameters of the program are its arguments
and no temporaries. Compilers share memory better or worse than that: the sum is near what they
report, and not equal to it.

Source: the XLA documentation, "HLO dumps" and "Tiled layout".
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from plurax.hlo.text import Instruction, Module, padded_bytes, parts_of, result_of

_IN_PLACE = frozenset([
    "async-update", "bitcast", "dynamic-update-slice", "opt-barrier", "while",
])  # fmt: skip
"""Operations whose result is in the memory of their first operand."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class LiveValue:
    """A value in memory: its `bytes`, its `type` as text, and the `instruction` it is of."""

    bytes: int
    type: str
    instruction: Instruction


Memory = LiveValue | tuple[Any, ...] | None
"""Where a value is: an array, a tuple of such, or None for what is no temporary."""


def held_at_peak(module: Module) -> Sequence[LiveValue]:
    """Return what a program holds beside its arguments when it holds most, the largest first."""
    held, _ = _walk(module, module.entry, ())
    return sorted(held, key=lambda value: -value.bytes)


def _walk(
    module: Module, name: str, arguments: Sequence[Memory], *, carries: bool = False
) -> tuple[Sequence[LiveValue], Memory]:
    """Return what a computation holds at its peak, its arguments aside, and where its result is.

    A loop's body `carries` its result on to the next iteration.
    """
    instructions = module.computations.get(name, ())
    where: dict[str, Memory] = {}
    first: dict[LiveValue, int] = {}
    last: dict[LiveValue, int] = {}
    inside: list[Sequence[LiveValue]] = []
    result: Memory = None
    for index, instruction in enumerate(instructions):
        held, where[instruction.name] = _run(module, instruction, where, arguments)
        inside.append(held)
        for value in _arrays(where[instruction.name]):
            if value.instruction is instruction:
                first[value] = index
            last[value] = index
        # An element of a tuple is none of the others'.
        read = () if instruction.opcode == "get-tuple-element" else instruction.operands
        for operand in read:
            last.update(dict.fromkeys(_arrays(where.get(operand)), index))
        result = where[instruction.name] if instruction.root else result
    for ended, carried in zip(_leaves(result), _leaves(arguments), strict=False):
        # What a loop carries on takes the memory of what it carried, if nothing reads that later.
        if carries and ended in first and _read_until(carried, last) <= first[ended]:
            del first[ended]
    last.update(dict.fromkeys(_arrays(result), len(instructions)))
    if name == module.entry:  # whose results have memory of their own, that of what is donated
        first = {value: index for value, index in first.items() if last[value] < len(instructions)}
    return _peak(first, last, inside), result


def _read_until(value: LiveValue | None, last: Mapping[LiveValue, int]) -> int:
    """Return the index of the last instruction that reads a value of another computation."""
    return -1 if value is None else last.get(value, -1)


def _peak(
    first: Mapping[LiveValue, int],
    last: Mapping[LiveValue, int],
    inside: Sequence[Sequence[LiveValue]],
) -> Sequence[LiveValue]:
    """Return the values held at the instruction at which they are largest, those inside it too."""
    first = _reusing(first, last)
    change = [0] * (len(inside) + 1)
    for value, index in first.items():
        change[index] += value.bytes
        if last[value] < len(inside):
            change[last[value] + 1] -= value.bytes
    held = itertools.accumulate(change[:-1])
    sizes = [own + _total(more) for own, more in zip(held, inside, strict=True)]
    if not sizes:
        return ()
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    own = [value for value, index in first.items() if index <= peak <= last[value]]
    return (*own, *inside[peak])


def _reusing(first: Mapping[LiveValue, int], last: Mapping[LiveValue, int]) -> dict[LiveValue, int]:
    """Return where values start to take memory of their own.

    What is computed element by element takes that of an equal operand which nothing reads later.
    """
    ending = collections.defaultdict(list)
    for value, index in last.items():
        ending[index, value.type].append(value)
    starts = dict(first)
    for value, index in first.items():
        by_element = "kind=kLoop" in value.instruction.attributes
        if by_element and ending[index, value.type] and last[value] > index:
            ending[index, value.type].pop()
            starts[value] = index + 1
    return starts


def _run(
    module: Module,
    instruction: Instruction,
    where: Mapping[str, Memory],
    arguments: Sequence[Memory],
) -> tuple[Sequence[LiveValue], Memory]:
    """Return what an instruction holds while it runs, and where its result is.

    `where` says it of what ran before, `arguments` of the parameters.
    """
    operands = [where.get(name) for name in instruction.operands]
    opcode = instruction.opcode
    if opcode == "parameter":
        return (), arguments[int(instruction.arguments)] if arguments else None
    if opcode == "constant":
        return (), None
    if opcode == "tuple":
        return (), tuple(operands)
    if opcode == "get-tuple-element":
        whole, index = operands[0], int(instruction.attribute(r"index=(\d+)") or 0)
        return (), whole[index] if isinstance(whole, tuple) and index < len(whole) else whole
    inside: Sequence[LiveValue] = ()
    if opcode == "while":
        body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
        inside, _ = _walk(module, body, operands, carries=True)
    elif opcode == "call":
        inside, _ = _walk(module, next(instruction.called()), operands)
    elif opcode == "conditional":  # each branch has one operand, behind the number that chooses
        branches = zip(instruction.called(), operands[1:], strict=False)
        walks = [_walk(module, called, [operand])[0] for called, operand in branches]
        inside = max(walks, key=_total, default=())
    if opcode in _IN_PLACE and operands:
        return inside, operands[0]
    if opcode.endswith("-start"):
        if "output_to_operand_aliasing" in instruction.attributes:  # it reduces them in place
            return inside, (operands[0] if len(operands) == 1 else tuple(operands), *operands)
        updated = _updated(module, instruction, operands)
        return inside, (_allocate(instruction, result_of(instruction), updated), *operands)
    if opcode.endswith("-done"):
        return inside, operands[0][0] if isinstance(operands[0], tuple) else operands[0]
    return inside, _allocate(instruction, instruction.type, _updated(module, instruction, operands))


def _updated(
    module: Module, instruction: Instruction, operands: Sequence[Memory]
) -> Sequence[Memory]:
    """Return for each result of a fusion the operand that it updates in place, None for a new one.

    It does that where it ends with a `dynamic-update-slice` of one of its operands.
    """
    if instruction.opcode not in ("fusion", "fusion-start"):
        return ()
    computation = module.computations.get(next(instruction.called(), ""), ())
    by_name = {one.name: one for one in computation}
    root = next((one for one in computation if one.root), None)
    ends = [root]
    if root is not None and root.opcode == "tuple":
        ends = [by_name.get(name) for name in root.operands]
    updated: list[Memory] = []
    for end in ends:
        updates = 0
        while end is not None and end.opcode in ("bitcast", "dynamic-update-slice"):
            updates += end.opcode == "dynamic-update-slice"
            end = by_name.get(end.operands[0])
        in_place = end is not None and end.opcode == "parameter" and updates
        updated.append(operands[int(end.arguments)] if end and in_place else None)
    return updated


def _allocate(instruction: Instruction, kind: str, updated: Sequence[Memory] = ()) -> Memory:
    """Return the new memory of a result of this type, but for what is updated in place."""
    if not kind.startswith("("):
        size = padded_bytes(kind)
        if updated and updated[0] is not None:
            return updated[0]
        return LiveValue(size, kind, instruction) if size else None
    parts = parts_of(kind)
    owners = updated if len(updated) == len(parts) else [None] * len(parts)
    return tuple(
        _allocate(instruction, part) if owner is None else owner
        for part, owner in zip(parts, owners, strict=True)
    )


def _arrays(memory: Memory) -> Iterator[LiveValue]:
    """Yield the arrays of a value that are temporaries."""
    return (leaf for leaf in _leaves(memory) if leaf is not None)


def _leaves(memory: Memory | Sequence[Memory]) -> Iterator[LiveValue | None]:
    """Yield the arrays of a value, None for each that is no temporary."""
    if isinstance(memory, LiveValue) or memory is None:
        yield memory
    else:
        for part in memory:
            yield from _leaves(part)


def _total(values: Sequence[LiveValue]) -> int:
    return sum(value.bytes for value in values)
