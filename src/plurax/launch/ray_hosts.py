"""Hosts of a Ray cluster: an actor on each has the processes there, and Ray carries the messages.

The program that the user has started is the driver, which leads: it calls `exchange` of every actor
again and again, with orders, and gets reports and output back. When a host is lost, Ray places a
new actor on another, or on the same once it is back.

    driver  ── orders ──►  actor on host 0   Gang: processes 0, 1
    (leads) ◄─ reports ──  actor on host 1   Gang: processes 2, 3

Whoever reaches the ports of a Ray cluster can run code on it, so only one that asks for a token is
joined (`RAY_AUTH_MODE=token`, and `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).
"""

import contextlib
import dataclasses
import io
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.exit_codes import ExitCode
from plurax.launch.events import Events
from plurax.launch.folders import LaunchFolders
from plurax.launch.host import Host, collected_signals
from plurax.launch.hosts import HostEvent, Hosts, Joined, Lost, Received
from plurax.launch.launcher import lead
from plurax.launch.network_hosts import free_port
from plurax.launch.output import Output
from plurax.launch.protocol import Message
from plurax.launch.settings import Settings
from plurax.lazy import imported

READY_SECONDS = 120.0
"""For the cluster to have enough hosts free."""
FINISH_SECONDS = 10.0
"""For the actors to end what they have, once all is over."""
Written = tuple[bytes, bytes]
"""What goes to the terminal: to its standard output, and its standard error."""


def launch_on_ray(address: str, settings: Settings, logs: Path | None, events: Events) -> int:
    """Run a gang on hosts of a Ray cluster until it is over; return its exit code.

    **Arguments:** `address` of the cluster, or "auto"; `logs`, the folder of the processes' output
    on each host, or None for a temporary one.

    Raises `ExperimentError` for a cluster without a token, that does not answer, or is too small,
    and `MissingPackageError` without Ray.
    """
    ray = _ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise errors.ExperimentError(
            f"plurax launch --ray {address}: there is no Ray cluster that answers, or it "
            f"refuses this token (RAY_AUTH_TOKEN_PATH). Ray says: {error}"
        ) from None
    signals: list[int] = []
    try:
        with collected_signals(signals):
            return lead(settings, RayHosts(ray, settings, logs), signals, events)
    finally:
        ray.shutdown()


def _ray() -> Any:
    """Import Ray for a cluster that asks for a token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise errors.ExperimentError(
            "plurax launch --ray: whoever reaches a Ray cluster can run code on it, so plurax uses "
            "only one that asks for a token. Start every node of the cluster with "
            "RAY_AUTH_MODE=token, and set here RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, "
            "with the cluster's token."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    return imported("ray", "plurax launch --ray", "ray", "ray")


class RayHosts(Hosts):
    """An actor on each of some hosts, with all GPUs that every one of them has."""

    def __init__(self, ray: Any, settings: Settings, logs: Path | None) -> None:
        self._ray, self._settings, self._logs = ray, settings, logs
        self._lines: dict[tuple[int, int], bytes] = {}  # without an end yet, by host and stream
        self._bundle, self._group = self._placed()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}
        self._orders: dict[int, list[Message]] = {}
        self._addresses: dict[int, str] = {}  # of the actors that have answered
        self._heard: dict[int, float] = {}
        for host in range(settings.hosts):
            self._start(host)

    def wait(self) -> list[HostEvent]:
        """Wait until an actor answers; return what it reports, or that it is lost."""
        answered, _ = self._ray.wait([*self._calls], timeout=self._settings.limits.poll)
        events = [event for call in answered for event in self._answer(call)]
        silence, now = self._settings.limits.silence, time.monotonic()
        # Ray lets a call to a host that is cut off wait for minutes.
        silent = [host for host in self._addresses if now - self._heard[host] > silence]
        reason = f"nothing was heard of it for {silence:g} s"
        return events + [self._lose(host, reason) for host in silent]

    def send(self, host: int, order: Message) -> None:
        """Leave an order for the next call of an actor, or drop it."""
        if order["do"] == "drop":
            self._ray.kill(self._actors[host])
        elif host in self._addresses:
            self._orders[host].append(order)

    def coordinator(self, host: int) -> str:
        """Return the address of an actor's host, and the free port that it named last."""
        return self._addresses[host]

    def close(self, code: int) -> None:
        """Let the actors kill what still runs, show what they say at last, and end them."""
        calls = {call: host for call, host in self._calls.items() if host in self._addresses}
        calls |= {self._actors[host].finish.remote(code): host for host in self._addresses}
        answered, _ = self._ray.wait([*calls], num_returns=len(calls), timeout=FINISH_SECONDS)
        for call in filter({*answered}.__contains__, calls):  # of one actor, in their order
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._show(calls[call], self._ray.get(call)[0])
        for host, stream in [place for place, rest in self._lines.items() if rest]:
            self._show(host, (b"", b"\n") if stream else (b"\n", b""))
        for actor in self._actors.values():
            self._ray.kill(actor)  # what they have started ends with them
        self._ray.util.remove_placement_group(self._group)

    def _placed(self) -> tuple[dict[str, float], Any]:
        """Return what is asked of each host, and a placement group of as many as are asked for."""
        hosts = self._settings.hosts
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if len(nodes) < hosts:
            raise errors.ExperimentError(
                f"plurax launch --ray --hosts {hosts}: the cluster has {len(nodes)} "
                "nodes. Give a smaller number, or add nodes."
            )
        gpus = sorted((node["Resources"].get("GPU", 0) for node in nodes), reverse=True)[hosts - 1]
        bundle = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
        group = self._ray.util.placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
        if not group.wait(READY_SECONDS):
            self._ray.util.remove_placement_group(group)
            words = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
            raise errors.ExperimentError(
                f"plurax launch --ray --hosts {hosts}: within {READY_SECONDS:g} s the "
                f"cluster had no {hosts} nodes with {words} free on each. "
                "Wait for its other jobs, or ask for fewer hosts."
            )
        return bundle, group

    def _actor(self, host: int) -> Any:
        """Return an actor, which Ray places as soon as there is a host for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Scheduled

        own = (sys.prefix, sys.base_prefix)
        paths = map(os.path.abspath, filter(None, sys.path))
        folders = [path for path in paths if not path.startswith(own)]
        options = self._ray.remote(RayHost).options(
            num_cpus=1,
            num_gpus=self._bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=Scheduled(self._group, placement_group_bundle_index=host),
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}},
        )
        return options.remote(self._settings, self._logs, str(Path.cwd()))

    def _start(self, host: int) -> None:
        """Have an actor for a host, and call it."""
        self._actors[host], self._orders[host] = self._actor(host), []
        self._addresses.pop(host, None)
        self._call(host)

    def _call(self, host: int) -> None:
        orders, self._orders[host] = self._orders[host], []
        self._calls[self._actors[host].exchange.remote(orders)] = host

    def _answer(self, call: Any) -> list[HostEvent]:
        """Read the answer of an actor, and call it again; start another one where it is lost."""
        host = self._calls.pop(call)
        try:
            written, reports, address = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            reason, *_ = str(error).splitlines()
            return [self._lose(host, reason.rstrip("."))]
        joined = [] if host in self._addresses else [Joined(host, self._settings.processes)]
        self._addresses[host], self._heard[host] = address, time.monotonic()
        self._show(host, written)
        self._call(host)
        return [*joined, *(Received(host, report) for report in reports)]

    def _lose(self, host: int, reason: str) -> Lost:
        """Give an actor up, and start another one."""
        self._calls = {call: other for call, other in self._calls.items() if other != host}
        self._ray.kill(self._actors[host])
        self._start(host)
        return Lost(host, f"{reason}; Ray starts it again")

    def _show(self, host: int, written: Written) -> None:
        """Write whole lines of a host's output; the rest waits for its end."""
        for stream, data in enumerate(written):
            *lines, rest = (self._lines.pop((host, stream), b"") + data).split(b"\n")
            self._lines[host, stream] = rest
            out = (sys.stdout, sys.stderr)[stream]
            with contextlib.suppress(BrokenPipeError):
                out.write("".join(f"{line.decode(errors='replace')}\n" for line in lines))
                out.flush()


class RayHost:
    """An actor: the processes of a gang on one host. It has to be called again and again."""

    def __init__(self, settings: Settings, logs: Path | None, folder: str) -> None:
        if Path(folder).is_dir():  # where the driver was started, if that is there on this host
            os.chdir(folder)
        self._folders = LaunchFolders(logs)
        self._terminal = (io.BytesIO(), io.BytesIO())
        settings = dataclasses.replace(
            settings,
            command=(sys.executable, *settings.command[1:]),  # where Python is on this host
            logs=self._folders.logs,
            status=self._folders.status,
        )
        self._host = Host(settings, Output(settings.logs, self._terminal))

    def exchange(self, orders: list[Message]) -> tuple[Written, list[Message], str]:
        """Obey orders, then wait until something happens, for a short time at most.

        Returns output, reports, and this host's address with a port that is free now.
        """
        import ray

        for order in orders:
            self._host.gang.obey(order)
        self._host.wait()
        name = ray.util.get_node_ip_address()
        return self._taken_output(), self._host.taken_reports(), f"{name}:{free_port(name)}"

    def finish(self, code: int) -> tuple[Written]:
        """Kill what still runs, and say where its output stays; return the last that is shown."""
        self._host.close()
        logs = self._folders.close(code)
        if code != ExitCode.DONE and logs != self._folders.asked:
            said = f"plurax launch: the output of this host is in {logs}\n"
            self._terminal[1].write(said.encode())
        return (self._taken_output(),)

    def _taken_output(self) -> Written:
        out, error = (stream.getvalue() for stream in self._terminal)
        for stream in self._terminal:
            stream.seek(0)
            stream.truncate()
        return out, error
