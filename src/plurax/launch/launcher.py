"""The launcher of this host: it leads the others, or follows the one that does."""

import time

from plurax.exit_codes import ExitCode
from plurax.launch.events import Events
from plurax.launch.follower import follow
from plurax.launch.host import this_host
from plurax.launch.hosts import Hosts, Joined, Received
from plurax.launch.network_hosts import NetworkHosts
from plurax.launch.output import Output
from plurax.launch.settings import Settings
from plurax.launch.supervisor import Supervisor


def launch(settings: Settings, events: Events, output: Output | None = None) -> int:
    """Run this host's processes of a gang until it is over; return the gang's exit code."""
    with this_host(settings, output or Output(settings.logs)) as host:
        if settings.host > 0:
            return follow(settings, host, events)
        return lead(settings, NetworkHosts(settings, host), host.signals, events)


def lead(settings: Settings, hosts: Hosts, signals: list[int], events: Events) -> int:
    """Lead the hosts of a gang until it is over; return its exit code.

    **Arguments:** `signals`, to which those that this process receives are appended.
    """
    code = int(ExitCode.FAILED)
    try:
        supervisor = Supervisor(settings, hosts.send, events, hosts.coordinator, time.monotonic())
        while supervisor.code is None:
            happened, now = hosts.wait(), time.monotonic()
            while signals:
                supervisor.pass_on(signals.pop(0), now)
            for event in happened:
                if isinstance(event, Joined):
                    supervisor.joined(event.host, event.processes, now, event.attempt)
                elif isinstance(event, Received):
                    supervisor.received(event.host, event.message, now)
                else:
                    supervisor.lost(event.host, event.reason, now)
            supervisor.tick(now)
        code = supervisor.code
    finally:
        hosts.close(code)
    return code
