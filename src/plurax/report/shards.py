"""Show a network's shardings and the communication of a step as tables."""

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plurax.collective import Collective
from plurax.execute.layouts.parameter_info import ParameterInfo
from plurax.hlo import Memory
from plurax.sharding.spec import TensorSharding
from plurax.tree import human_bytes

Key = tuple[str, str]


def shards_table(parameters: Sequence[ParameterInfo]) -> RenderableType:
    """Return a table of each parameter's sharding, shard, bytes and optimizer bytes.

    Notes on some of the parameters follow below the table.
    """
    table = Table(title="parameters on one device", title_justify="left")
    for column, justify in (
        ("parameter", "left"),
        ("shape", "left"),
        ("dims split", "left"),
        ("shard", "left"),
        ("bytes", "right"),
        ("optimizer", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for one in parameters:
        table.add_row(
            one.path,
            _dims(one.shape),
            _axes(one.sharding),
            _dims(one.shard),
            f"{one.bytes:,}",
            f"{one.optimizer_bytes:,}",
        )
    held = held_bytes(parameters, lambda one: one.bytes)
    kept = held_bytes(parameters, lambda one: one.optimizer_bytes)
    table.add_section()
    table.add_row("a device has", "", "", "", f"{held:,}", f"{kept:,}")
    notes: dict[str, list[str]] = {}
    for one in parameters:
        if one.note:
            notes.setdefault(one.note, []).append(one.path)
    said = [Text(f"{', '.join(paths)}: {note}", style="yellow") for note, paths in notes.items()]
    return Group(table, *said)


def held_bytes(parameters: Sequence[ParameterInfo], size: Callable[[ParameterInfo], int]) -> int:
    """Return the bytes on one device.

    A parameter with a home lives on one device of a pipeline only. Every device allocates as much
    for these as the fullest needs, so that amount is counted.
    """
    homes: dict[int | None, int] = {None: 0}
    for one in parameters:
        homes[one.home] = homes.get(one.home, 0) + size(one)
    return homes.pop(None) + max(homes.values(), default=0)


def _dims(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _axes(sharding: TensorSharding) -> str:
    """Return the split dims and their mesh axes as text."""
    split = [f"{d}: {' '.join(axes)}" for d, axes in enumerate(sharding.dims) if axes]
    return ", ".join(split) or "replicated"


def compared_table(planned: Sequence[Collective], found: Sequence[Collective]) -> RenderableType:
    """Return a table of a step's planned communication beside that of the compiled step.

    A "?" stands for a loop whose length is not in the compiled text because it depends on the
    device.
    """
    table = Table(
        title="bytes of one step's communication: planned, and as compiled", title_justify="left"
    )
    for column, justify in (
        ("kind", "left"),
        ("mesh axis", "left"),
        ("in a loop", "right"),
        ("count", "right"),
        ("planned", "right"),
        ("compiled", "right"),
        ("device sends", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    plan_bytes: Counter[Key] = Counter()
    for record in planned:
        plan_bytes[record.kind, ", ".join(record.axes)] += record.bytes * (record.trips or 1)
    counts: Counter[Key] = Counter()
    looped: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    wires: dict[Key, float] = {}
    unknown: set[Key] = set()
    for one in found:
        key = (one.equivalent_kind or one.kind, ", ".join(one.axes))
        if one.trips is None:
            unknown.add(key)
        times = one.trips or 1
        counts[key] += times
        looped[key] += times if one.in_loop else 0
        sizes[key] += times * one.bytes
        wires[key] = wires.get(key, 0.0) + times * one.bytes_sent
    for key in {**plan_bytes, **sizes}:
        if key in unknown:
            table.add_row(*key, "?", "?", f"{plan_bytes[key]:,}", "?", "?")
            continue
        table.add_row(
            *key,
            str(looped[key]),
            str(counts[key]),
            f"{plan_bytes[key]:,}",
            f"{sizes[key]:,}",
            human_bytes(wires.get(key, 0.0)),
        )
    if not unknown:
        return table
    return Group(table, Text("?: in a loop of which the compiled text does not tell the length."))


def kinds_of_memory(parameters: Sequence[ParameterInfo], memory: Memory) -> dict[str, int]:
    """Return bytes on one device by kind; other arguments are optimizer state and batch."""
    params = held_bytes(parameters, lambda one: one.bytes)
    return {
        "parameters": params,
        "optimizer's state and batch": max(0, memory.arguments - params),
        "temporaries": memory.temporaries,
        "outputs that reuse nothing": memory.outputs - memory.aliased,
        "code": memory.code,
    }
