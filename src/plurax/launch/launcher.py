"""The launcher of this host: its loop over signals, processes and time."""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator

from plurax.launch.events import Events
from plurax.launch.gang import Gang
from plurax.launch.output import Output
from plurax.launch.settings import Settings
from plurax.launch.supervisor import Message, Supervisor

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(settings: Settings, events: Events, output: Output | None = None) -> int:
    """Run a gang on this host until it is over; return its exit code."""
    selector = selectors.DefaultSelector()
    reports: list[Message] = []
    gang = Gang(settings, output or Output(settings.logs), selector, reports.append)
    orders: list[Message] = []
    supervisor = Supervisor(
        settings,
        lambda host, order: orders.append(order),
        events,
        lambda: f"127.0.0.1:{free_port()}",
        time.monotonic(),
    )
    try:
        with _signals(selector) as received:
            supervisor.joined(0, settings.processes, time.monotonic())
            while supervisor.code is None:
                while orders:
                    gang.obey(orders.pop(0))
                for key, _ in selector.select(settings.limits.poll):
                    key.data()
                gang.tick()
                while received:
                    supervisor.asked(received.pop(0), time.monotonic())
                while reports:
                    supervisor.received(0, reports.pop(0), time.monotonic())
                supervisor.tick(time.monotonic())
    finally:
        gang.close()
        selector.close()
    return supervisor.code


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as listening:
        listening.bind((address, 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector) -> Iterator[list[int]]:
    """Collect the signals that ask for an end in a list, and let them wake the selector."""
    received: list[int] = []
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    selector.register(reading, selectors.EVENT_READ, lambda: os.read(reading, 4096))
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in SIGNALS
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        selector.unregister(reading)
        os.close(reading)
        os.close(writing)
