"""A schedule as numbers: for each tick and device what it does, and where what it needs lies.

Everything a device stores has a slot, given out like registers: free again when what was in it has
been used. Hence the memory of 1F1B does not depend on the number of microbatches.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from plurax.pipeline.schedule import Action, Schedule, ticks

FIELDS = (
    "kind",  # 0 nothing, 1 F, 2 B, 3 W
    "microbatch",
    "chunk",
    "kept",  # slot of what the backward pass needs
    "left",  # slot of what the gradient of the weights needs besides
    "edge",  # slot of what an embedding, head or marked stage keeps
    "edge_left",
    "x",  # slot in which what it works on has arrived
    "cotangent",
    "arriving_x",  # slot for what arrives at the end of the tick; the last is for nothing
    "arriving_cotangent",
)
KIND = {"F": 1, "B": 2, "W": 3}

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class SlotTable:
    """A schedule as numbers.

    **Fields:** `columns`, int32 `(ticks, devices, fields)`, a field's place being that in `FIELDS`;
    `slots`, how many each store has (`kept`, `left`, `edge`, `edge_left`, `x`, `cotangent`).
    """

    columns: np.ndarray
    slots: dict[str, int]


def make_slot_table(schedule: Schedule, edges: Sequence[int]) -> SlotTable:
    """The table of a schedule; `edges` are the stages that have a piece besides layers."""
    at = {
        (device, work): tick
        for tick, column in enumerate(ticks(schedule))
        for device, work in enumerate(column)
        if work is not None
    }
    length = 1 + max(at.values())
    columns = np.zeros((length, schedule.devices, len(FIELDS)), np.int32)
    slots: dict[str, int] = {}
    for store, (starts, uses) in _stores(schedule, at, edges).items():
        slots[store] = 0
        for device in range(schedule.devices):
            intervals = {key: span for (where, key), span in starts.items() if where == device}
            given, count = _slots(intervals)
            slots[store] = max(slots[store], count)
            for key, slot in given.items():
                for tick, field in uses[device, key]:
                    columns[tick, device, FIELDS.index(field)] = slot + 1
    for store, field in (("x", "arriving_x"), ("cotangent", "arriving_cotangent")):
        place = FIELDS.index(field)
        arriving = columns[:, :, place]
        columns[:, :, place] = np.where(arriving == 0, slots[store] + 1, arriving)
    # So far slot 0 was none; from now on slots count from 0, and what has none reads any.
    for field in FIELDS[3:]:
        place = FIELDS.index(field)
        columns[:, :, place] = np.maximum(columns[:, :, place] - 1, 0)
    for (device, work), tick in at.items():
        columns[tick, device, :3] = KIND[work.kind], work.microbatch, work.chunk
    return SlotTable(columns, slots)


Key = tuple[int, Action]
Store = tuple[dict[Key, Interval], dict[Key, list[tuple[int, str]]]]


def _stores(
    schedule: Schedule, at: dict[tuple[int, Action], int], edges: Sequence[int]
) -> dict[str, Store]:
    """For each store, from when to when something is in it, and the ticks and fields that say so.

    What arrives at the end of tick `t` is there from `t + 0.5` on.
    """
    stores: dict[str, Store] = {
        name: ({}, {}) for name in ("kept", "left", "edge", "edge_left", "x", "cotangent")
    }

    def put(name: str, key: Key, span: Interval, uses: list[tuple[int, str]]) -> None:
        stores[name][0][key] = span
        stores[name][1][key] = uses

    last = "W" if schedule.split else "B"
    for (device, work), tick in at.items():
        key = (device, work)
        if work.kind == "F":
            done = [at.get((device, work._replace(kind=kind))) for kind in ("B", last)]
            used = [tick, *(t for t in done if t is not None)]
            put("kept", key, (tick, max(used)), [(t, "kept") for t in used])
            if schedule.stage(device, work) in edges:
                put("edge", key, (tick, max(used)), [(t, "edge") for t in used])
        if work.kind == "B" and schedule.split:
            end = at[device, work._replace(kind="W")]
            put("left", key, (tick, end), [(t, "left") for t in (tick, end)])
            if schedule.stage(device, work) in edges:
                put("edge_left", key, (tick, end), [(t, "edge_left") for t in (tick, end)])
        for other, need in schedule.dependencies(device, work):
            if need.kind == work.kind:
                name = "x" if work.kind == "F" else "cotangent"
                sent = at[other, need]
                put(name, key, (sent + 0.5, tick), [(sent, f"arriving_{name}"), (tick, name)])
    return stores


def _slots(intervals: dict[Action, Interval]) -> tuple[dict[Action, int], int]:
    """A slot for each interval, no two at a time in one; and how many there are."""
    busy: list[float] = []
    given = {}
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        free = next((slot for slot, until in enumerate(busy) if until < start), len(busy))
        busy[free:] = [end, *busy[free + 1 :]]
        given[key] = free
    return given, len(busy)
