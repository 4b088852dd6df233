"""What a launcher has on its host, whether it leads or follows."""

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

from plurax.launch.gang import Gang
from plurax.launch.output import Output
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings

SIGNALS: dict[int, int] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
"""What a launcher takes, and what it passes on: work outlives a terminal that hangs up."""


class Host:
    """This host's processes, what they report, and the signals that this launcher has got."""

    def __init__(self, settings: Settings, output: Output) -> None:
        self._settings = settings
        self.selector = selectors.DefaultSelector()
        self.reports: list[Message] = []
        self.signals: list[int] = []
        self.gang = Gang(settings, output, self.selector, self.reports.append)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until something happens, for a short time at most, and look after the processes."""
        seconds = self._settings.limits.poll if seconds is None else seconds
        for key, _ in self.selector.select(seconds):
            key.data()
        self.gang.tick()

    def taken_reports(self) -> list[Message]:
        """Return what was reported since the last call."""
        reports = [*self.reports]
        self.reports.clear()
        return reports

    def close(self) -> None:
        """Kill what still runs."""
        self.gang.close()
        self.selector.close()


@contextlib.contextmanager
def this_host(settings: Settings, output: Output) -> Iterator[Host]:
    """Yield this host; its signals end nothing but wake the selector, until all is closed."""
    host = Host(settings, output)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    host.selector.register(reading, selectors.EVENT_READ, lambda: os.read(reading, 4096))
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with collected_signals(host.signals):
            yield host
    finally:
        signal.set_wakeup_fd(wakeup)
        host.close()
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def collected_signals(received: list[int]) -> Iterator[None]:
    """Append the signals that ask for an end to a list, instead of ending."""
    before = {
        number: signal.signal(number, lambda number, _: received.append(SIGNALS[number]))
        for number in SIGNALS
        # One that was ignored stays so, as in a job in the background of a script.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
