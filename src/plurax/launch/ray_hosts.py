"""Launchers on the hosts of a Ray cluster: Ray says where they run, and starts them.

On each host an actor starts one launcher as a process of its own, with the same command line that
one would write by hand; the first host's launcher leads the others. What they write comes back to
this terminal. When a host is lost, Ray puts a new actor on another, or on the same once it is back,
and its launcher joins the leader again; when the leader's host is lost, all launchers start anew.

Whoever reaches the ports of a Ray cluster can run code on it, so only one that asks for a token is
joined (`RAY_AUTH_MODE=token`, and `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.exit_codes import ExitCode, shell_code
from plurax.launch.gang import CHILD
from plurax.launch.host import collected_signals
from plurax.reaper import ALONE

KILLED = int(ExitCode.KILLED)
READY_SECONDS = 120.0
"""For the cluster to have enough hosts free."""
FINISH_SECONDS = 10.0
"""For the other launchers to end, once the leader's has."""
POLL_SECONDS = 0.2
"""That an actor waits for output before it answers."""


@dataclasses.dataclass(frozen=True)
class RayLaunch:
    """**Fields:** the cluster's `address` or "auto"; `hosts`, their number; `options` of each
    launcher; `program`, what stands after `--`; `restarts` after the loss of the leader's host.
    """

    address: str
    hosts: int
    options: tuple[str, ...]
    program: tuple[str, ...]
    restarts: int


def launch_on_ray(asked: RayLaunch) -> int:
    """Run launchers on hosts of a Ray cluster until all is over; return the exit code.

    Raises `ExperimentError` for a cluster without a token, that does not answer, or is too small,
    and `MissingPackageError` without Ray.
    """
    ray = _ray()
    try:
        ray.init(address=asked.address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise errors.ExperimentError(
            f"plurax launch --ray {asked.address}: there is no Ray cluster that answers, or it "
            f"refuses this token (RAY_AUTH_TOKEN_PATH). Ray says: {error}"
        ) from None
    received: list[int] = []
    try:
        with collected_signals(received):
            return _Driver(ray, asked, received).run()
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
    try:
        import ray
    except ImportError:
        raise errors.package_missing("plurax launch --ray", "ray", "ray") from None
    return ray


class _Driver:
    """Keeps a launcher on each host, and passes on their output and this process's signals."""

    def __init__(self, ray: Any, asked: RayLaunch, received: list[int]) -> None:
        self._ray, self._asked, self._received = ray, asked, received
        self._lines: dict[tuple[int, int], bytes] = {}
        self._token, self._attempt = secrets.token_hex(32), 0
        self._group = self._placed()
        self._actors: dict[int, Any] = {}
        self._polls: dict[Any, int] = {}
        self._coordinator = ""

    def run(self) -> int:
        """Start all launchers, anew when the leader's host is lost; return the exit code."""
        try:
            for restart in range(self._asked.restarts + 1):
                code = self._run_once()
                if code is not None:
                    return code
                self._say(f"host 0 is lost; starting all again (restart {restart + 1})")
                self._attempt += 1000  # more than the launchers have counted
                self._stop()
            return ExitCode.PEER_DIED
        finally:
            self._stop()
            self._ray.util.remove_placement_group(self._group)

    def _placed(self) -> Any:
        """Return a placement group with all GPUs of as many hosts as are asked for."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if len(nodes) < self._asked.hosts:
            raise errors.ExperimentError(
                f"plurax launch --ray --hosts {self._asked.hosts}: the cluster has {len(nodes)} "
                "nodes. Give a smaller number, or add nodes."
            )
        gpus = sorted((node["Resources"].get("GPU", 0) for node in nodes), reverse=True)
        self._gpus = gpus[self._asked.hosts - 1]
        bundle = {"CPU": 1.0} | ({"GPU": self._gpus} if self._gpus else {})
        bundles = [bundle] * self._asked.hosts
        group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(READY_SECONDS):
            self._ray.util.remove_placement_group(group)
            raise errors.ExperimentError(
                f"plurax launch --ray --hosts {self._asked.hosts}: within {READY_SECONDS:g} s the "
                f"cluster had no {self._asked.hosts} nodes with {_words(bundle)} free on each. "
                "Wait for its other jobs, or ask for fewer hosts."
            )
        return group

    def _run_once(self) -> int | None:
        """Run until the leader's launcher ends; return its exit code, or None if it is lost."""
        self._actors[0] = self._actor(0)
        try:
            address = self._actors[0].address.remote()
            self._coordinator = self._ray.get(address, timeout=READY_SECONDS)
        except self._ray.exceptions.RayError:
            return None
        for host in range(self._asked.hosts):
            self._start(host)
        while True:
            while self._received:
                self._actors[0].send.remote(self._received.pop(0))
            for host, code in self._ended(5):
                if host == 0:
                    self._finish()
                    return None if code in (None, KILLED) else code
                if code in (None, KILLED):
                    self._say(f"the launcher of host {host} is lost; starting it again")
                    self._start(host)

    def _ended(self, seconds: float) -> list[tuple[int, int | None]]:
        """Show what was written; return whose launcher has ended with which code, None if lost."""
        ended: list[tuple[int, int | None]] = []
        done, _ = self._ray.wait([*self._polls], timeout=seconds)
        for poll in done:
            host = self._polls.pop(poll)
            try:
                written, code = self._ray.get(poll)
            except self._ray.exceptions.RayError:
                self._actors.pop(host)
                ended.append((host, None))
                continue
            for stream, data in written:
                self._show(host, stream, data)
            if code is None:
                self._poll(host)
            else:
                ended.append((host, code))
        return ended

    def _poll(self, host: int) -> None:
        self._polls[self._actors[host].poll.remote(POLL_SECONDS)] = host

    def _actor(self, host: int) -> Any:
        """Return an actor on a host, which Ray starts as soon as there is one."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Scheduled

        strategy = Scheduled(self._group, placement_group_bundle_index=host)
        own = (sys.prefix, sys.base_prefix)
        found = map(os.path.abspath, filter(None, sys.path))
        folders = [folder for folder in found if not folder.startswith(own)]
        variables = {"PYTHONPATH": os.pathsep.join(folders)}
        return self._ray.remote(_RayHost).options(
            num_cpus=1,
            num_gpus=self._gpus,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": variables},
        ).remote()  # fmt: skip

    def _start(self, host: int) -> None:
        """Start the launcher of a host, once Ray has an actor there."""
        if host not in self._actors:
            self._actors[host] = self._actor(host)
        asked = self._asked
        place = ["--hosts", str(asked.hosts), "--host", str(host)]
        place += ["--coordinator", self._coordinator]
        arguments = [*place, *asked.options, "--", *asked.program]
        variables = {"PLURAX_TOKEN": self._token, "PLURAX_ATTEMPT": str(self._attempt)}
        self._actors[host].start.remote(arguments, str(Path.cwd()), variables)
        self._poll(host)

    def _finish(self) -> None:
        """Read what the other launchers say at their end, and show lines that have none."""
        until = time.monotonic() + FINISH_SECONDS
        while self._polls and time.monotonic() < until:
            self._ended(1)
        for host, stream in [place for place, rest in self._lines.items() if rest]:
            self._show(host, stream, b"\n")

    def _stop(self) -> None:
        """End all actors; what they have started ends with them."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._polls.clear()

    def _show(self, host: int, stream: int, data: bytes) -> None:
        """Write whole lines of a launcher's output; the rest waits for its end."""
        *lines, rest = (self._lines.pop((host, stream), b"") + data).split(b"\n")
        self._lines[host, stream] = rest
        out = (sys.stdout, sys.stderr)[stream]
        with contextlib.suppress(BrokenPipeError):
            out.write("".join(f"{line.decode(errors='replace')}\n" for line in lines))
            out.flush()

    def _say(self, words: str) -> None:
        print(f"plurax launch: {words}", file=sys.stderr, flush=True)


def _words(bundle: dict[str, float]) -> str:
    """Return resources as words."""
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items())


class _RayHost:
    """An actor: a launcher on a host, as a process that dies with it."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()

    def address(self) -> str:
        """Return this host's address, and a free port."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as listening:
            listening.bind((address, 0))
            return f"{address}:{listening.getsockname()[1]}"

    def start(self, arguments: Sequence[str], folder: str, variables: dict[str, str]) -> None:
        """Start the launcher in the folder that has the same path here."""
        here = [*ALONE, CHILD, str(os.getpid()), sys.executable, "-m", "plurax.cli", "launch"]
        self._popen = subprocess.Popen(
            [*here, *arguments],
            cwd=folder if Path(folder).is_dir() else None,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._pipes: list[Any] = [self._popen.stdout, self._popen.stderr]
        for number, pipe in enumerate(self._pipes):
            self._selector.register(pipe, selectors.EVENT_READ, number)

    def poll(self, seconds: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return what the launcher has written, and its exit code once it has ended."""
        assert self._popen is not None
        written = []
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 1 << 20)
            if data:
                written.append((key.data, data))
            else:
                pipe = self._pipes[key.data]
                self._selector.unregister(pipe)
                pipe.close()
        if self._selector.get_map() or self._popen.poll() is None:
            return written, None
        return written, shell_code(self._popen.returncode)

    def send(self, number: int) -> None:
        """Send a signal to the launcher."""
        if self._popen is not None:
            self._popen.send_signal(number)
