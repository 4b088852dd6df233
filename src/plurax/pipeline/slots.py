"""Allocate buffer slots for a schedule, and write the schedule as a table of integers.

Between its ticks a device stores residuals (from F until B or W), weight residuals (from B until W)
and boundary activations and cotangents that have arrived but are not yet used. All of it must go
into buffers of fixed shape, because the ticks are one `lax.scan`. The schedule is known ahead, so
each stored value gets a slot of such a buffer as a register allocator would give it: a slot is free
again once its value has been used for the last time. The memory of 1F1B is then independent of the
number of microbatches.

Example: device 0 of 2 under 1F1B with 3 microbatches. Its residuals, in the store
`layer_residuals`:

    tick            0    1    2    3    4    5    6    7
    action          F0   F1   -    B0   F2   B1   -    B2
    microbatch 0    [ slot 0  ------- ]                        ticks 0 to 3
    microbatch 1         [ slot 1  ------------- ]             ticks 1 to 5
    microbatch 2                        [ slot 0  ------ ]     ticks 4 to 7: slot 0 is free again

    columns[:, 0, 0, FIELDS.index("layer_residuals")] = [0, 1, 0, 0, 0, 0, 0, 0]    of F; else any
    columns[:, 0, 1, FIELDS.index("layer_residuals")] = [0, 0, 0, 0, 0, 1, 0, 0]    of B
    slots["layer_residuals"] = 2

With 4 devices, `slots["layer_residuals"]` is 4 under 1F1B for 8 and for 64 microbatches, and 8 and
64 under GPipe.

Source: linear scan register allocation (Poletto & Sarkar 1999,
https://doi.org/10.1145/330249.330250); for intervals known ahead, without spilling, it uses the
fewest slots possible.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from plurax.pipeline.schedule import KINDS, Action, Schedule

FIELDS = (
    "runs",  # 1 where the device runs an action of the kind in the tick, otherwise 0
    "microbatch",
    "chunk",
    "layer_residuals",  # slot of the residuals of a stage's layers
    "layer_weight_residuals",  # slot of the weight residuals of a stage's layers
    "fn_residuals",  # slot of the residuals of a `StageFn`: embedding, head, marked stage
    "fn_weight_residuals",  # slot of the weight residuals of a `StageFn`
    "x",  # slot of the boundary activation that F reads
    "cotangent",  # slot of the cotangent that B reads
    "arriving_x",  # slot for what arrives at the end of the tick; `slots["x"]` if nothing does
    "arriving_cotangent",
)
STORES = FIELDS[3:9]

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class SlotTable:
    """A schedule as integers.

    **Fields:** `columns`, int32 `(ticks, devices, kinds, fields)`, with the kinds in the order of
    `KINDS` and the fields in that of `FIELDS`; `device_slots`, for each store in `STORES` the
    number of slots that each device uses.
    """

    columns: np.ndarray
    device_slots: dict[str, list[int]]

    @property
    def slots(self) -> dict[str, int]:
        """For each store the number of slots of the device that uses the most."""
        return {store: max(counts) for store, counts in self.device_slots.items()}


def make_slot_table(schedule: Schedule, fn_stages: Sequence[int]) -> SlotTable:
    """Return the table of a schedule.

    `fn_stages` are the stages that have a `StageFn`: its residuals are not stored with the layers'.
    Raises `PlanError` where devices of the schedule wait for each other for ever.
    """
    at = {
        (device, action): tick
        for tick, column in enumerate(schedule.ticks)
        for device, actions in enumerate(column)
        for action in actions
    }
    length = 1 + max(at.values())
    # While filling in, 0 is "no slot" and slot n is n + 1.
    columns = np.zeros((length, schedule.devices, len(KINDS), len(FIELDS)), np.int32)
    device_slots: dict[str, list[int]] = {}
    for store, (starts, uses) in _stores(schedule, at, fn_stages).items():
        device_slots[store] = []
        intervals: list[dict[Action, Interval]] = [{} for _ in range(schedule.devices)]
        for (device, key), span in starts.items():
            intervals[device][key] = span
        for device, own in enumerate(intervals):
            given, count = _slots(own)
            device_slots[store].append(count)
            for key, slot in given.items():
                for tick, kind, field in uses[device, key]:
                    columns[tick, device, KINDS.index(kind), FIELDS.index(field)] = slot + 1
    slots = SlotTable(columns, device_slots).slots
    # A device to which nothing is sent still receives zeros from `ppermute`: it writes them to one
    # more row, behind the slots.
    for store, field in (("x", "arriving_x"), ("cotangent", "arriving_cotangent")):
        index = FIELDS.index(field)
        arriving = columns[..., index]
        columns[..., index] = np.where(arriving == 0, slots[store] + 1, arriving)
    # Count slots from 0 again. "No slot" becomes slot 0: an action that has none does not use what
    # is read there.
    for field in FIELDS[3:]:
        index = FIELDS.index(field)
        columns[..., index] = np.maximum(columns[..., index] - 1, 0)
    for (device, (kind, microbatch, chunk)), tick in at.items():
        columns[tick, device, KINDS.index(kind), :3] = 1, microbatch, chunk
    return SlotTable(columns, device_slots)


Key = tuple[int, Action]
Use = tuple[int, str, str]
Store = tuple[dict[Key, Interval], dict[Key, list[Use]]]


def _stores(
    schedule: Schedule, at: dict[tuple[int, Action], int], fn_stages: Sequence[int]
) -> dict[str, Store]:
    """Return each store's values: when each is stored, and which table entries name its slot.

    A value's key is its device and the action that creates or receives it. Its interval is
    `(first tick, last tick)`, both inclusive; what arrives at the end of tick `t` starts at
    `t + 0.5`, so that it may take the slot of what tick `t` reads. Its table entries are
    ticks, kinds and fields.
    """
    stores: dict[str, Store] = {name: ({}, {}) for name in STORES}

    def put(name: str, key: Key, span: Interval, uses: list[Use]) -> None:
        stores[name][0][key] = span
        stores[name][1][key] = uses

    last = "W" if schedule.split else "B"
    for (device, action), tick in at.items():
        key = (device, action)
        own = ["layer"] + ["fn"] * (schedule.stage(device, action) in fn_stages)
        if action.kind == "F":
            # B and W both read the residuals of F. A schedule of forwards alone has neither.
            done = {k: at.get((device, Action(k, *action[1:]))) for k in ("B", last)}
            used = {"F": tick, **{kind: t for kind, t in done.items() if t is not None}}
            for name in (f"{part}_residuals" for part in own):
                put(name, key, (tick, max(used.values())), [(t, k, name) for k, t in used.items()])
        if action.kind == "B" and schedule.split:
            end = at[device, Action("W", *action[1:])]
            for name in (f"{part}_weight_residuals" for part in own):
                put(name, key, (tick, end), [(tick, "B", name), (end, "W", name)])
        for other, need in schedule.dependencies(device, action):
            # F depends on the previous stage's F, and B on the next stage's B: these are sends.
            if need.kind == action.kind:
                name = "x" if action.kind == "F" else "cotangent"
                sent = at[other, need]
                uses = [(sent, action.kind, f"arriving_{name}"), (tick, action.kind, name)]
                put(name, key, (sent + 0.5, tick), uses)
    return stores


def _slots(intervals: dict[Action, Interval]) -> tuple[dict[Action, int], int]:
    """Assign each interval a slot such that intervals of one slot do not overlap.

    Returns the slots by key and their number. Takes the intervals by their start, and for each the
    first slot that is free.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    slot_of: dict[Action, int] = {}
    count = 0
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        slot_of[key] = heapq.heappop(free)
        heapq.heappush(busy, (end, slot_of[key]))
    return slot_of, count
