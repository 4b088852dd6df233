"""Parse the text of a compiled program into computations of instructions.

The text lists computations, each a list of instructions in the order in which a device runs them:

    %body.1 (p: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
      %p = (s32[], f32[64,32]{1,0}) parameter(0)
      %x = f32[64,32]{1,0} get-tuple-element(%p), index=1
      %g = f32[256,32]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
      ...
    }
    ENTRY %main (...) -> ... {
      %w = (s32[], f32[64,32]{1,0}) while(%t), condition=%cond.1, body=%body.1, ...

A loop's number of iterations is written in three ways. XLA's CPU and GPU compilers give it
(`"known_trip_count":{"n":"8"}`); those of TPUs do not, but the loop's condition compares a counter
that starts at 0 with a constant, inside a fusion or not:

    %c = s32[] constant(8)
    ROOT %lt = pred[] compare(%counter, %c), direction=LT

The body adds 1 to the counter, or a constant: 2 where XLA unrolled the loop of a windowed product.
A loop whose condition compares with a value that it carries has a length that is data.

Source: the XLA documentation, "HLO text" and "Operation semantics".
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    **Fields:** `name`; `type`, as text; `opcode`; `operands`, the names of its operands;
    `arguments`, the text in which they stand; `attributes`, the text behind it; `root`, whether its
    value is the computation's.
    """

    name: str
    type: str
    opcode: str
    operands: Sequence[str]
    arguments: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """The bytes of the result: of a tuple all its parts."""
        return type_bytes(self.type)

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression in the attributes, None without one."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """The JAX scopes and the primitive that this instruction comes from; "" if unknown."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    def called(self) -> Iterator[str]:
        """Yield the names of the computations that this instruction runs, a loop's aside."""
        for match in re.finditer(
            r"(?:calls|to_apply|\w+_computation)=%?([\w.\-]+)", self.attributes
        ):
            yield match[1]
        branches = self.attribute(r"(?:branch_computations|calls)=\{([^}]*)\}")
        if branches:
            yield from re.findall(r"%?([\w.\-]+)", branches)


@final
@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    **Fields:** `computations` by name; `entry`, the name of the one that runs first; `frames`, of
    the Python code that was traced, by number: the file, the line and the number of the caller.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    frames: Mapping[str, tuple[str, str, str]] = dataclasses.field(default_factory=dict)

    def lines(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Yield the files and lines of the code that an instruction is of, inner ones first."""
        number = instruction.attribute(r"stack_frame_id=(\d+)") or ""
        while number in self.frames:
            file, line, number = self.frames[number]
            yield file, line

    def trips(self, loop: Instruction) -> int | None:
        """Return how often the body of a `while` runs; None where that is data."""
        known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)
        condition = loop.attribute(r"condition=%?([\w.\-]+)") or ""
        bound = self._compared(condition)
        return bound and -(-bound // self._step(condition, loop))

    def _compared(self, name: str) -> int | None:
        """Return the constant with which a loop's condition compares its counter."""
        by_name = {one.name: one for one in self.computations.get(name, ())}
        for compare in by_name.values():
            # The constant is an operand of a fusion, or inside it.
            fused = compare.opcode == "fusion" and compare.root
            if fused or (compare.opcode == "compare" and "direction=LT" in compare.attributes):
                bounds = (_constant(by_name.get(operand)) for operand in compare.operands)
                bound = next((n for n in bounds if n is not None), None)
                return bound or self._compared(next(compare.called(), ""))
        return None

    def _step(self, condition: str, loop: Instruction) -> int:
        """Return the constant that a loop's body adds to its counter."""
        body = self.computations.get(loop.attribute(r"body=%?([\w.\-]+)") or "", ())
        by_name = {one.name: one for one in body}
        carried = next((one.operands for one in body if one.root), ())
        for one in self.computations.get(condition, ()):
            index = int(one.attribute(r"index=(\d+)") or len(carried))
            added = by_name.get(carried[index]) if index < len(carried) else None
            if added and added.opcode == "add":
                steps = (_constant(by_name.get(operand)) for operand in added.operands)
                return next((n for n in steps if n), 1)
        return 1


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    whole = re.fullmatch(r"\s*(\d+)\s*", instruction.arguments)
    return int(whole[1]) if whole else None


def parse(text: str) -> Module:
    """Parse the text of a compiled program.

    Attributes of a kernel may hold line breaks: what is no instruction belongs to the one before.
    """
    computations: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        header = None if line.startswith(" ") else re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header:
            instructions = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif re.match(r"\}(?!\})", line):
            instructions = None
        elif instructions is not None and (instruction := _instruction(line)) is not None:
            instructions.append(instruction)
        elif instructions:
            last = instructions.pop()
            instructions.append(dataclasses.replace(last, attributes=f"{last.attributes}\n{line}"))
    assert entry, "compiled text without an entry computation"
    return Module(computations, entry, _frames(text))


def _frames(text: str) -> dict[str, tuple[str, str, str]]:
    """Return the frames in the tables in front of a program, which refer to each other by number:

    1 "/models/model.py"                                            of FileNames
    7 {file_name_id=1 function_name_id=2 line=34 ...}              of FileLocations
    9 {file_location_id=7 parent_frame_id=4}                       of StackFrames, caller 4 - 1
    """
    names = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.MULTILINE))
    places = re.findall(
        r"^(\d+) \{file_name_id=(\d+).* line=(\d+)", _section(text, "FileLocations"), re.MULTILINE
    )
    located = {number: (names.get(file, ""), line) for number, file, line in places}
    stacks = re.findall(
        r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", _section(text, "StackFrames"),
        re.MULTILINE,
    )  # fmt: skip
    return {
        number: (*located.get(place, ("", "")), str(int(parent) - 1))
        for number, place, parent in stacks
    }


def _section(text: str, name: str) -> str:
    """Return a table in front of a program, "" without one."""
    return text.partition(f"\n{name}\n")[2].partition("\n\n")[0]


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    # The type of a tuple has parentheses, those of a tile too: f32[8,4]{1,0:T(8,128)}.
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest)
    arguments = rest[opening + 1 : closing]
    return Instruction(
        name=head[2],
        type=kind,
        opcode=rest[:opening],
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        attributes=rest[closing + 1 :],
        root=bool(head[1]),
    )


def _closing(text: str) -> int:
    """Return the index of the parenthesis that closes the first one of a text.

    >>> _closing("(f32[8]{0:T(8)}, s32[]) all-reduce(%x)")
    22
    """
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


# --- Types ----------------------------------------------------------------------------------------


def type_bytes(text: str) -> int:
    """Return the bytes of a value of this type; of a tuple all its parts.

    >>> type_bytes("(f32[64,32]{1,0:T(8,128)}, bf16[3])"), type_bytes("pred[5]")
    (8198, 5)
    """
    bits = 0
    for dtype, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", text):
        bits += item_bits(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim)
    return -(-bits // 8)


def item_bits(dtype: str) -> int:
    """Return the bits of a dtype, the number in its name (`bf16`, `f8e4m3fn`); `pred` has 8."""
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0


_DTYPES = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "s8": "int8", "s32": "int32",
    "u32": "uint32", "s64": "int64", "u64": "uint64", "u8": "uint8", "c64": "complex64",
    "c128": "complex128",
}  # fmt: skip


def dtype_of(text: str) -> str:
    """Return the dtype of the first array in a type, by its name in JAX.

    >>> dtype_of("(bf16[64,32]{1,0}, f32[])")
    'bfloat16'
    """
    found = re.search(r"\b(\w+)\[", text)
    return _DTYPES.get(found[1], found[1]) if found else ""


def dims_of(text: str) -> tuple[int, ...]:
    """Return the dims of the first array in a type.

    >>> dims_of("f32[64,32]{1,0}")
    (64, 32)
    """
    found = re.search(r"\[([\d,]*)\]", text)
    return tuple(int(dim) for dim in found[1].split(",") if dim) if found else ()


def parts_of(text: str) -> list[str]:
    """Return the types of a tuple's parts with their layouts; of another type itself.

    >>> parts_of("((f32[8]{0}), /*index=1*/f32[2,3]{1,0:T(8,128)}, u32[])")
    ['(f32[8]{0})', 'f32[2,3]{1,0:T(8,128)}', 'u32[]']
    """
    plain = re.sub(r"/\*.*?\*/", "", text).strip()
    if not plain.startswith("("):
        return [plain]
    depth, parts = 0, [""]
    for letter in plain[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def result_of(instruction: Instruction) -> str:
    """Return the type of an instruction's result; of an asynchronous start, what its done returns.

    A start's type is a tuple with the operands first: `(f32[16], f32[64]) all-gather-start`,
    `((f32[8]), f32[2], u32[]) reduce-scatter-start`. A copy has its result first. An all-reduce has
    nothing else until JAX 0.10, since 0.11 it is `((f32[8]), f32[8]) all-reduce-start`.
    """
    parts = parts_of(instruction.type)
    if not instruction.opcode.endswith("-start") or len(parts) == 1:
        return instruction.type
    if instruction.opcode == "all-reduce-start" and not parts[0].startswith("("):
        return instruction.type
    return parts[0] if instruction.opcode == "copy-start" else parts[1]


def padded_bytes(text: str) -> int:
    """Return the bytes of an array in a device's memory, where tiles are filled up.

    TPUs store an array in tiles of its minor dims; what is in another memory space than the
    device's first (`S(1)`, a TPU's memory on the chip) takes nothing.

    >>> padded_bytes("bf16[3,200]{1,0:T(8,128)(2,1)}"), padded_bytes("f32[3,200]{1,0:T(8,128)S(1)}")
    (4096, 0)
    """
    if re.search(r"S\([1-9]", text):
        return 0
    dims, order = list(dims_of(text)), re.search(r"\{([\d,]+)", text)
    tile = re.search(r"T\(([\d,]+)\)", text)
    if tile and order and dims:
        minor = [int(dim) for dim in order[1].split(",")]
        for dim, size in zip(minor, reversed(tile[1].split(",")), strict=False):
            dims[dim] = -(-dims[dim] // int(size)) * int(size)
    dtype = re.match(r"\s*(\w+)\[", text)
    return -(-math.prod(dims) * item_bits(dtype[1]) // 8) if dtype else 0
