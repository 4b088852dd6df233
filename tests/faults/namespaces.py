"""Two hosts on this machine: network namespaces that a pair of virtual devices joins.

    with two_hosts(folder) as hosts:
        Launch(..., prefix=hosts[1].prefix())

Each host has a name, `/etc/hosts` and `/dev/shm` of its own, which are gone with its processes.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess

import pytest

from tests.faults.run import LINK

NETWORK = "10.99.0"
"""Of every pair of hosts: namespaces do not see each other's addresses."""

ENTER = """
mount --bind "$0" /etc/hosts && mount --bind "$1" /dev/shm || exit
echo "$2" >/proc/sys/kernel/hostname && shift 2 && exec "$@"
"""

_numbers = itertools.count()


class HostNamespace:
    """A namespace that is a host. `index`: 0 or 1; `folder`, for its names and its shared memory.

    **Attributes:** `shared`, the folder that is its `/dev/shm`.
    """

    def __init__(self, index, folder):
        self.index, self.address = index, f"{NETWORK}.{index + 1}"
        self.namespace = f"plurax-{os.getpid()}-{next(_numbers)}"
        self._names = folder / f"{self.namespace}.hosts"
        self.shared = folder / f"{self.namespace}.shm"
        self.shared.mkdir()

    def prefix(self, **addresses):
        """Return the command that starts a command there; `addresses`, names that differ."""
        names = {"localhost": "127.0.0.1", **{f"host{i}": f"{NETWORK}.{i + 1}" for i in range(2)}}
        rows = {**names, **addresses}.items()
        self._names.write_text("".join(f"{address} {name}\n" for name, address in rows))
        own = (str(self._names), str(self.shared), f"host{self.index}")
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", ENTER, *own)

    def add(self):
        """Add the namespace. Raises `CalledProcessError`."""
        _call("ip", "netns", "add", self.namespace)

    def connect(self):
        """Connect it to its link."""
        _call("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", LINK)
        _call("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self.mend()

    def mend(self):
        """Let everything through its link again."""
        _call("ip", "-n", self.namespace, "link", "set", LINK, "up")
        if self.queue()["kind"] == "tbf":
            _call("tc", "-n", self.namespace, "qdisc", "delete", "dev", LINK, "root")

    def send_through(self, kind, *options):
        """Let its link send through a queue of the kernel: a kind of `tc`, with its options.

        Raises `CalledProcessError` where the kernel does not have that kind.
        """
        device = ("dev", LINK, "root")
        _call("tc", "-n", self.namespace, "qdisc", "replace", *device, kind, *options)

    def queue(self):
        """Return what the kernel has counted of what its link sends."""
        said = _call("tc", "-n", self.namespace, "-s", "-j", "qdisc", "show", "dev", LINK)
        return json.loads(said)[0]

    def kill_all(self):
        """Kill the processes there."""
        for pid in _call("ip", "netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self):
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


@contextlib.contextmanager
def two_hosts(folder):
    """Yield two hosts that are connected; skips the test where that is not permitted."""
    hosts = [HostNamespace(index, folder) for index in range(2)]
    try:
        try:
            _remove_those_of_the_dead()
            for host in hosts:
                host.add()
            first, second = (host.namespace for host in hosts)
            pair = ("type", "veth", "peer", "name", LINK, "netns", second)
            _call("ip", "link", "add", LINK, "netns", first, *pair)
            _call(*hosts[0].prefix(), "true")
            _call("tc", "-V")  # in /usr/sbin, which is not on everybody's path
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", error)
            pytest.skip(f"needs root, ip and tc: network namespaces ({said})")
        for host in hosts:
            host.connect()
        yield hosts
    finally:
        with contextlib.suppress(FileNotFoundError):
            for host in hosts:
                host.remove()


def _remove_those_of_the_dead():
    """Remove the namespaces of tests that were killed before they could."""
    for name in _call("ip", "netns", "list").split():
        if match := re.fullmatch(r"plurax-(\d+)-\d+", name):
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _call(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
