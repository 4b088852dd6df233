"""Lanes of a timeline: what each device of a pipeline, or each worker and server, does and when.

A picture (Matplotlib), the page (SVG) and, of a pipeline, the terminal (letters) draw them.

A worker's row in the timeline is read from the run's record, `servers.jsonl`. Example:

    {"event": "worker ready", "worker": 0, "life": 0, "at": 2.0}       waits from here
    {"event": "pull", "worker": 0, "sequence": 0, ..., "at": 2.1}      waits for parameters
    {"event": "compute", "worker": 0, "sequence": 0, ..., "at": 2.2}   computes
    {"event": "push", "worker": 0, "sequence": 0, ..., "at": 2.6}      waits for others
    {"event": "pull", "worker": 0, "sequence": 1, ..., "at": 3.0}      waits for parameters
    {"event": "compute", "worker": 0, "sequence": 1, ..., "at": 3.1}   computes
    {"event": "worker lost", "worker": 0, "life": 0, "at": 3.3}        what it computed is dropped

gives waits of 0.1 and 0.4 s, two pulls of 0.1 s, a gradient of 0.4 s, one of 0.2 s that was
dropped, and a cross; until its next `worker ready` it starts and compiles.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plurax.pipeline.schedule import Action, Schedule
from plurax.pipeline.simulation import Timeline, simulate
from plurax.server.record import Event

AS_SOON, LOCKSTEP = "as soon as each can", "in lockstep, as it runs here"
"""When a device starts an action: once it has its inputs, or together with the others."""

WORK = {
    "gradient": "computes a gradient",
    "dropped": "computes one that is dropped",
    "pulling": "pulls parameters",
    "waiting": "waits for others",
    "starting": "starts again and compiles",
}
"""What a worker does, in words."""


# --- Devices of a pipeline ------------------------------------------------------------------------


class Timelines(NamedTuple):
    """The two timelines of a schedule."""

    ideal: Timeline
    lockstep: Timeline

    def captioned(self, prefix: str = "") -> dict[str, Timeline]:
        """Return those that differ, by their captions."""
        if blocks(self.ideal) == blocks(self.lockstep):
            return {f"{prefix}{AS_SOON}, and {LOCKSTEP}": self.ideal}
        return {f"{prefix}{AS_SOON}": self.ideal, f"{prefix}{LOCKSTEP}": self.lockstep}


def timelines_of(schedule: Schedule) -> Timelines:
    """Return the timelines of a schedule. Raises `PlanError` where devices wait for ever."""
    return Timelines(simulate(schedule), simulate(schedule, lockstep=True))


class TimedAction(NamedTuple):
    """An action of a device in integer time: `start` and `end` in forwards through one stage."""

    start: int
    end: int
    action: Action


def blocks(timeline: Timeline) -> list[list[TimedAction]]:
    """Return each device's actions, in order."""
    lines: list[list[TimedAction]] = [[] for _ in timeline.schedule.actions]
    chunks = timeline.schedule.chunks
    for span in timeline.spans:
        start, end = round(span.start * chunks), round(span.end * chunks)
        lines[span.device].append(TimedAction(start, end, span.action))
    return lines


def lane_names(schedule: Schedule) -> list[str]:
    """Return the name of each device: its stages.

    >>> from plurax.pipeline.schedule import make_schedule
    >>> lane_names(make_schedule("interleaved", devices=4, microbatches=4, chunks=2))[1]
    'stages 1, 5'
    """
    word = "stage" if schedule.chunks == 1 else "stages"
    return [f"{word} {stages_of(schedule, device)}" for device in range(schedule.devices)]


def stages_of(schedule: Schedule, device: int) -> str:
    """Return the stages of a device as text."""
    return ", ".join(str(device + chunk * schedule.devices) for chunk in range(schedule.chunks))


def titled(caption: str, timeline: Timeline) -> str:
    """Return a caption with the idle time."""
    return f"{caption}: idle (bubble) {percent(timeline.bubble)}"


def percent(part: float) -> str:
    """Format a share between 0 and 1."""
    return f"{100 * part:.1f} %"


def kinds_of_work(schedule: Schedule) -> dict[str, str]:
    """Return the meaning of each letter, and its assumed duration."""
    if schedule.split:
        return {
            "F": "forward",
            "B": "gradient of input",
            "W": "gradient of weights, all as long",
        }
    return {"F": "forward", "B": "backward, as long as two forwards"}


# --- Workers and servers --------------------------------------------------------------------------


class Lane(NamedTuple):
    """A worker's or a server's row.

    **Fields:** `spans`, by kind their starts and lengths in seconds; `deaths`, when it ended, and a
    few words on each; `saved`, of a server when a snapshot of it was kept.
    """

    spans: dict[str, list[tuple[float, float]]]
    deaths: list[tuple[float, str]]
    saved: list[float]


def worker_lanes(events: Sequence[Event]) -> tuple[dict[str, Lane], list[float], float]:
    """Return the rows by name, when the run was resumed, and when it ended, in seconds."""
    starts = [event for event in events if event["event"] == "start"]
    servers = max((event["servers"]["shards"] for event in starts), default=0)
    workers = max((event["servers"]["workers"] for event in starts), default=0)
    names = [*(f"worker {i}" for i in range(workers)), *(f"server {i}" for i in range(servers))]
    lanes = {name: Lane({}, [], []) for name in names}
    doing: dict[str, tuple[str, float]] = {}
    resumed, offset, now = list[float](), 0.0, 0.0

    def begin(name: str, kind: str | None, closed: str | None = None) -> None:
        """End what a worker or server does (as `closed`, where that is known now)."""
        if name in doing:
            before, since = doing.pop(name)
            if now > since:
                lanes[name].spans.setdefault(closed or before, []).append((since, now - since))
        if kind is not None:
            doing[name] = kind, now

    for event in events:
        kind = event["event"]
        if kind == "start":
            for name in names:
                begin(name, None)
            resumed += [now] if now else []
            offset = now
            for index in range(event["servers"]["shards"]):
                begin(f"server {index}", "server")
            continue
        now = max(now, offset + event.get("at", 0.0))
        worker = f"worker {event.get('worker')}"
        if kind == "worker ready":
            begin(worker, "waiting")
        elif kind == "pull":
            # A gradient that the next pull comes after was not pushed.
            begin(worker, "pulling", "dropped" if _computes(doing, worker) else None)
        elif kind == "compute":
            begin(worker, "gradient")
        elif kind == "push":
            begin(worker, "waiting")
        elif kind == "worker lost":
            begin(worker, "starting", "dropped" if _computes(doing, worker) else None)
            lanes[worker].deaths.append((now, ""))
        elif kind == "server lost":
            server = f"server {event['server']}"
            lost = event["version"] - event["restored"]
            lanes[server].deaths.append((now, f"{lost} updates back"))
        elif kind == "saved":
            lanes[f"server {event['server']}"].saved.append(now)
    for name in names:
        begin(name, None)
    return lanes, resumed, now


def _computes(doing: Mapping[str, tuple[str, float]], worker: str) -> bool:
    return doing.get(worker, ("", 0.0))[0] == "gradient"
