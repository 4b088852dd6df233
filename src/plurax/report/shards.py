"""How a network lies on the devices, and what a step communicates: tables and a picture."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from plurax.execute.state_shardings import Parameter
from plurax.inspect import Collective, Memory
from plurax.report.tables import human_bytes
from plurax.sharding.divide import Record
from plurax.sharding.sharding import Sharding

Key = tuple[str, str]


def shards_table(parameters: Sequence[Parameter]) -> Table:
    """Each parameter: its sharding, the shard of one device, its bytes; and the optimizer's."""
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
        if one.note:
            table.add_row("", f"[yellow]{one.note}[/yellow]")
    total = sum(one.bytes for one in parameters)
    table.add_section()
    table.add_row(
        "all", "", "", "", f"{total:,}", f"{sum(p.optimizer_bytes for p in parameters):,}"
    )
    return table


def _dims(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _axes(sharding: Sharding) -> str:
    """Which dims are split over which axes."""
    split = [f"{d}: {' '.join(axes)}" for d, axes in enumerate(sharding.dims) if axes]
    return ", ".join(split) or "whole"


def compared_table(planned: Sequence[Record], found: Sequence[Collective]) -> Table:
    """What the plan has a step communicate, beside what the compiled step does."""
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
        plan_bytes[record.kind, ", ".join(record.axes)] += record.bytes * record.trips
    counts: Counter[Key] = Counter()
    looped: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    wires: dict[Key, float] = {}
    for one in found:
        key = (one.stands_for or one.kind, ", ".join(one.axes))
        times = one.trips or 1
        counts[key] += times
        looped[key] += times if one.in_loop else 0
        sizes[key] += times * one.bytes
        wires[key] = wires.get(key, 0.0) + times * one.wire
    for key in {**plan_bytes, **sizes}:
        table.add_row(
            *key,
            str(looped[key]),
            str(counts[key]),
            f"{plan_bytes[key]:,}",
            f"{sizes[key]:,}",
            human_bytes(wires.get(key, 0.0)),
        )
    return table


def kinds_of_memory(parameters: Sequence[Parameter], memory: Memory) -> dict[str, int]:
    """Bytes on one device by kind; arguments that are no parameters are optimizer and batch."""
    params = sum(one.bytes for one in parameters)
    return {
        "parameters": params,
        "optimizer's state and batch": max(0, memory.arguments - params),
        "temporaries": memory.temporaries,
        "outputs that reuse nothing": memory.outputs - memory.aliased,
        "code": memory.code,
    }


def draw_plan(
    title: str,
    parameters: Sequence[Parameter],
    memory: Memory,
    found: Sequence[Collective],
    path: str | Path,
) -> None:
    """Memory per device by kind, and bytes that a device sends by collective and axis, as PNG."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    sizes = kinds_of_memory(parameters, memory)
    kinds = {kind: size for kind, size in sizes.items() if size > 1e-3 * memory.peak}
    _bars(left, kinds, f"memory per device: {human_bytes(memory.peak)}")
    sent: dict[str, float] = {}
    for one in found:
        name = f"{one.stands_for or one.kind}\nover {', '.join(one.axes)}"
        sent[name] = sent.get(name, 0.0) + one.wire * (one.trips or 1)
    if sent:
        _bars(right, sent, f"sent by a device in a step: {human_bytes(sum(sent.values()))}")
    else:
        right.text(0.5, 0.5, "no communication", ha="center", va="center")
        right.axis("off")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _bars(axis: Axes, sizes: dict[str, float] | dict[str, int], title: str) -> None:
    names, values = list(sizes), list(sizes.values())
    places = range(len(names))
    axis.barh(places, values, color="#3f51b5", height=0.6)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(max(len(names), 4) - 0.5, -0.5)
    largest = max(values)
    for place, value in zip(places, values, strict=True):
        axis.text(value + 0.02 * largest, place, human_bytes(value), va="center", fontsize=8)
    axis.set_xlim(0, 1.25 * largest)
    axis.set_xticks([])
    axis.set_title(title, fontsize=9.5)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
