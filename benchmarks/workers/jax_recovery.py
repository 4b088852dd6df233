"""plurax with parameter servers whose processes are killed and stopped; a side for each mode.

A turn is one training, in which each kind of death is inflicted some times, one after the other:
a signal is sent when all processes are well and have made some updates since the last.
"""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.recovery import Event, Recovery, recovered
from benchmarks.workers.serve import Settings, Side, serve
from plurax.server.coordinator import Coordinator
from plurax.server.open import open_coordinator
from plurax.server.record import Record
from plurax.train.serve import run_spec, serve_iter

CALM = 20
"""Updates before a signal, in which all processes work."""
FOREVER = 1_000_000
"""Epochs."""


class WatchedRecord(Record):
    """A record that keeps its events since the last signal.

    **Attributes:** `since`, these; `committed`, the last batch that was committed, in `sync`.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 0)
        self.since, self.committed = list[Event](), None

    def write(self, event: Event) -> None:
        """Add an event."""
        super().write(event)
        if event["event"] == "struck":
            self.since = []
        self.since.append(event)
        self.committed = event["step"] if event["event"] == "commit" else self.committed


def train(settings: Settings, mode: str) -> dict[str, list[Recovery]]:
    """Train until all deaths have been recovered from; return for each kind what it took."""
    servers = px.Servers(shards=settings["servers"], workers=settings["workers"],
                         lease=settings["lease"], **settings["modes"][mode])  # fmt: skip
    network = sizes.Mlp(tuple(settings["network"]["widths"]))
    task, optimizer = make_task(network), optax.adam(sizes.LEARNING_RATE)
    examples = make_batch(network, settings["examples"])
    data = px.train.ArrayData(examples, settings["batch"] * servers.parts)
    like = data.example_batch()
    program = px.compile(task, optimizer, px.Plan(), like)
    state = program.init(0)
    spec = run_spec(servers, program, optimizer, data, like)
    with tempfile.TemporaryDirectory() as folder:
        record = WatchedRecord(Path(folder))
        canonical = program.to_canonical(state)
        with open_coordinator(spec, canonical, record) as coordinator:
            deaths = Deaths(settings["deaths"], coordinator, record)
            for _ in serve_iter(
                coordinator,
                program,
                state,
                data,
                stopping=deaths.over,
                epochs=FOREVER,
                report_every=FOREVER,
            ):
                deaths.updated()
    return deaths.samples


class Deaths:
    """Sends all signals, one after the other, and waits for the recovery from each.

    **Arguments:** `counts`, by name how often each is wanted.
    """

    def __init__(
        self, counts: dict[str, int], coordinator: Coordinator, record: WatchedRecord
    ) -> None:
        self.left = [name for name, count in counts.items() for _ in range(count)]
        self.samples: dict[str, list[Recovery]] = {name: [] for name in counts}
        self._coordinator, self._record = coordinator, record
        self._struck: str | None = None
        self._calm = 0

    def over(self) -> bool:
        """Return whether all signals were sent and recovered from."""
        return not self.left and self._struck is None

    def updated(self) -> None:
        """After an update: look whether all are well again, or send the next signal."""
        if self._struck is not None:
            found = recovered(self._record.since)
            if found is not None:
                self.samples[self._struck].append(found)
                self._struck, self._calm = None, 0
            return
        self._calm += all(slot.ready for slot in self._coordinator.workers)
        if self._calm > CALM and self.left:
            self._struck = self.left.pop(0)
            self._strike(self._struck)

    def _strike(self, name: str) -> None:
        import ray  # not before the transport, which sets its token

        prefix, number = sizes.DEATHS[name]
        every = (*self._coordinator.workers, *self._coordinator.shards)
        actors = [one.actor for one in every if one.actor.name.startswith(prefix)]
        places = ray.get([actor.handle.host.ping.remote() for actor in actors])
        names = [actor.name for actor in actors]
        self._coordinator.record("struck", processes=names, committed=self._record.committed)
        for _, pid in places:
            os.kill(pid, getattr(signal, number))


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    jax.config.update("jax_platforms", "cpu")

    def side(mode: str) -> Callable[[int], Any]:
        return lambda units: {"samples": train(settings, mode)}

    return {mode: side(mode) for mode in settings["modes"]}, {}


if __name__ == "__main__":
    serve(build)
