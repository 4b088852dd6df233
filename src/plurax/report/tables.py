"""Show a plan on a machine as text."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from plurax.collective import Collective
from plurax.hlo import Memory
from plurax.plan import Plan
from plurax.tree import human_bytes


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


def memory_table(memory: Memory, predicted: int | None = None) -> Table:
    """Return a table of bytes on one device during a step, and of the predicted peak."""
    table = Table(title="memory per device, from the compiled step", title_justify="left")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
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


def collectives_table(collectives: Sequence[Collective], parameter_bytes: int) -> Table | str:
    """Return a table of one step's communication, by kind, mesh axis and place."""
    if not collectives:
        return "communication: none"
    table = Table(title="communication of one step, from the compiled step", title_justify="left")
    for column, justify in (
        ("kind", "left"),
        ("mesh axis", "left"),
        ("where", "left"),
        ("count", "right"),
        ("bytes", "right"),
        ("of the parameters", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for found in collectives:
        where = "in a loop" if found.in_loop else "once a step"
        key = (found.kind, ", ".join(found.axes), where)
        times = found.trips or 1
        counts[key] += times
        sizes[key] += times * found.bytes
    for key, count in counts.items():
        share = sizes[key] / parameter_bytes if parameter_bytes else 0
        table.add_row(*key, str(count), f"{sizes[key]:,}", f"{share:.3f} ×")
    return table
