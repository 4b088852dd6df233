"""Show a plan on a machine as text: memory, shardings, and the communication of a step."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plurax.collective import Collective, by_kind, in_a_step
from plurax.hlo.memory import Memory
from plurax.plan import Plan
from plurax.sharding.parameter_info import ParameterInfo
from plurax.sharding.spec import TensorSharding
from plurax.tree import human_bytes


def new_table(title: str, *columns: str, wrap: bool = False) -> Table:
    """Return an empty table; a column that begins with ">" is of numbers, on the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, no_wrap=not wrap)  # type: ignore[arg-type]
    return table


def plan_report(
    plan: Plan,
    batch_size: int,
    devices: Sequence[str],
    parameters: int,
    parameter_bytes: int,
    memory: Memory,
    communication: RenderableType | None,
    collectives: Sequence[Collective],
    predicted: int | None = None,
) -> RenderableType:
    """Return a plan in words, its mesh, its memory on one device and a step's communication.

    `communication`, if given, replaces the table of `collectives`. `predicted` is the peak memory
    that was expected before compiling.
    """
    return Group(
        plan.explain(batch_size),
        "",
        f"mesh: {', '.join(f'{axis}={n}' for axis, n in plan.axes.items() if n > 1) or 'data=1'} "
        f"on {', '.join(devices)}",
        f"parameters: {parameters:,} ({human_bytes(parameter_bytes)})",
        "",
        memory_table(memory, predicted),
        "",
        communication or collectives_table(collectives, parameter_bytes),
    )


# --- Memory and shardings -------------------------------------------------------------------------


def memory_table(memory: Memory, predicted: int | None = None) -> Table:
    """Return a table of bytes on one device during a step, and of the predicted peak."""
    table = new_table("memory per device, from the compiled step", "kind", ">bytes", ">",
                      wrap=True)  # fmt: skip
    rows = {
        "arguments (state and batch)": memory.arguments,
        "temporaries": memory.temporaries,
        "outputs": memory.outputs,
        "outputs that reuse arguments": -memory.aliased,
        "code": memory.code,
        "peak": memory.peak,
    }
    if predicted is not None:
        rows["peak, predicted before compiling"] = predicted
    for kind, count in rows.items():
        table.add_row(kind, f"{count:,}", human_bytes(count), end_section=kind == "code")
    return table


def shards_table(parameters: Sequence[ParameterInfo]) -> RenderableType:
    """Return a table of each parameter's sharding, shard, bytes and optimizer bytes.

    Notes on some of the parameters follow below the table.
    """
    table = new_table("parameters on one device", "parameter", "shape", "dims split", "shard",
                      ">bytes", ">optimizer")  # fmt: skip
    notes: dict[str, list[str]] = {}
    for row in parameters:
        sizes = f"{row.bytes:,}", f"{row.optimizer_bytes:,}"
        table.add_row(row.path, _dims(row.shape), _axes(row.sharding), _dims(row.shard), *sizes)
        if row.note:
            notes.setdefault(row.note, []).append(row.path)
    held = held_bytes(parameters, lambda row: row.bytes)
    kept = held_bytes(parameters, lambda row: row.optimizer_bytes)
    table.add_section()
    table.add_row("a device has", "", "", "", f"{held:,}", f"{kept:,}")
    lines = [Text(f"{', '.join(paths)}: {note}", style="yellow") for note, paths in notes.items()]
    return Group(table, *lines)


def held_bytes(parameters: Sequence[ParameterInfo], size: Callable[[ParameterInfo], int]) -> int:
    """Return the bytes on one device.

    A parameter with a home lives on one device of a pipeline only. Every device allocates as much
    for these as the fullest needs, so that amount is counted.
    """
    homes: dict[int | None, int] = {None: 0}
    for row in parameters:
        homes[row.home] = homes.get(row.home, 0) + size(row)
    return homes.pop(None) + max(homes.values(), default=0)


def kinds_of_memory(parameters: Sequence[ParameterInfo], memory: Memory) -> dict[str, int]:
    """Return bytes on one device by kind; other arguments are optimizer state and batch."""
    params = held_bytes(parameters, lambda row: row.bytes)
    return {
        "parameters": params,
        "optimizer's state and batch": max(0, memory.arguments - params),
        "temporaries": memory.temporaries,
        "outputs that reuse nothing": memory.outputs - memory.aliased,
        "code": memory.code,
    }


def _dims(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _axes(sharding: TensorSharding) -> str:
    """Return the split dims and their mesh axes as text."""
    split = [f"{d}: {' '.join(axes)}" for d, axes in enumerate(sharding.dims) if axes]
    return ", ".join(split) or "replicated"


# --- Communication --------------------------------------------------------------------------------


def collectives_table(collectives: Sequence[Collective], parameter_bytes: int) -> Table | str:
    """Return a table of one step's communication, by kind, mesh axis and place."""
    if not collectives:
        return "communication: none"
    table = new_table("communication of one step, from the compiled step", "kind", "mesh axis",
                      "where", ">count", ">bytes", ">of the parameters", wrap=True)  # fmt: skip
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for record in collectives:
        where = "in a loop" if record.in_loop else "once a step"
        groups.setdefault((record.kind, ", ".join(record.axes), where), []).append(record)
    for key, group in groups.items():
        size = in_a_step(group, lambda record: record.bytes)
        share = size / parameter_bytes if parameter_bytes else 0
        count = in_a_step(group, lambda record: 1)
        table.add_row(*key, str(count), f"{size:,}", f"{share:.3f} ×")
    return table


def compared_table(planned: Sequence[Collective], compiled: Sequence[Collective]) -> RenderableType:
    """Return a table of a step's planned communication beside that of the compiled step.

    A "?" stands for a loop whose length is not in the compiled text because it depends on the
    device.
    """
    table = new_table("bytes of one step's communication: planned, and as compiled", "kind",
                      "mesh axis", ">in a loop", ">count", ">planned", ">compiled",
                      ">device sends")  # fmt: skip
    plans, groups = by_kind(planned), by_kind(compiled)
    unknown = False
    for key in {**plans, **groups}:
        names = key[0], ", ".join(key[1])
        bytes_planned = f"{in_a_step(plans.get(key, ()), lambda record: record.bytes):,}"
        group = groups.get(key, [])
        if any(record.trips is None for record in group):
            unknown = True
            table.add_row(*names, "?", "?", bytes_planned, "?", "?")
            continue
        table.add_row(
            *names,
            str(in_a_step(group, lambda record: int(record.in_loop))),
            str(in_a_step(group, lambda record: 1)),
            bytes_planned,
            f"{in_a_step(group, lambda record: record.bytes):,}",
            human_bytes(in_a_step(group, lambda record: record.bytes_sent)),
        )
    if not unknown:
        return table
    return Group(table, Text("?: in a loop of which the compiled text does not tell the length."))
