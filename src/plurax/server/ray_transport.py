"""Workers and servers as Ray actors: processes of this machine, or of a cluster.

Arrays go through Ray's object stores: what a process returns is written once into memory that the
processes of its node share, and read there without a copy.

Whoever reaches the ports of a Ray cluster can run code on it. So token authentication is on: a
cluster started here gets a token of its own, in a file that only this user can read, and a cluster
at an address must be joined with its token (`RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).

Source: Moritz et al. 2018, "Ray: A Distributed Framework for Emerging AI Applications".
"""

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from plurax import errors
from plurax.execute.program_cache import TRACING
from plurax.mesh import cpu_devices
from plurax.server.servers import Servers
from plurax.server.transport import Actor, ActorGoneError, ResultLostError, Transport

SETTINGS = (
    *TRACING, "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_enable_compilation_cache",
)  # fmt: skip
"""The JAX settings of this process that its workers and servers have too."""

LEAST_STORE_BYTES = 256 << 20
"""Of memory that processes share, where Ray runs on this machine alone."""
SHARED_MEMORY = Path("/dev/shm")


class RayTransport(Transport):
    """Runs each worker and server as a Ray actor.

    **Arguments:** `servers`; `store_bytes`, what is in the object store at most.

    Raises `MissingPackageError` without Ray, and `PlanError` for a cluster that does not answer or
    refuses the token, and for a store that is too small: Ray would write to disk.
    """

    def __init__(self, servers: Servers, store_bytes: int = 0) -> None:
        self._ray = _ray(servers.address)
        self._own = not self._ray.is_initialized()
        if self._own and servers.address is None:
            self._start(servers, store_bytes)
        elif self._own:
            self._join(str(servers.address))
        store = int(self._ray.cluster_resources().get("object_store_memory", 0))
        if store_bytes > store:
            self.close()
            raise errors.servers_store_too_small(store_bytes, store, "the cluster's nodes have")
        self._pings: dict[str, tuple[Any, float]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._here = self._ray.get_runtime_context().get_node_id()
        self._head = str(self._ray.get_runtime_context().gcs_address)
        # Pings are answered on a thread of their own.
        host = type("Host", (_Host,), {"ping": self._ray.method(concurrency_group="ping")(_ping)})
        self._host = self._ray.remote(concurrency_groups={"ping": 1})(host)

    def _start(self, servers: Servers, store_bytes: int) -> None:
        """Start Ray on this machine."""
        store_bytes = max(store_bytes + store_bytes // 4, LEAST_STORE_BYTES)
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else store_bytes
        if store_bytes > free:
            raise errors.servers_store_too_small(store_bytes, free, f"{SHARED_MEMORY} has")
        with warnings.catch_warnings():
            # Its processes are started by fork and exec at once, which no thread of JAX is in.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            self._ray.init(
                address="local",
                num_cpus=servers.workers + servers.shards,
                object_store_memory=store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )

    def _join(self, address: str) -> None:
        """Join a running cluster."""
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise errors.servers_not_reached(address, str(error)) from None

    def start(self, name: str, make: Callable[..., Any], *args: Any, devices: int) -> Actor:
        """Start the object `make(*args)` in a process, a worker with some devices."""
        gpus = devices if devices and jax.default_backend() == "gpu" else 0
        # A process imports what it is sent before its first line of ours runs.
        own = (sys.prefix, sys.base_prefix)
        folders = [folder for folder in sys.path if folder and not folder.startswith(own)]
        variables = {"PYTHONPATH": os.pathsep.join(folders)}
        variables |= {} if gpus else {"JAX_PLATFORMS": "cpu"}
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0,
                   "runtime_env": {"env_vars": variables}}  # fmt: skip
        settings = {key: getattr(jax.config, key, None) for key in SETTINGS}
        handle = self._host.options(**options).remote(settings, devices, make, *args)
        return Actor(name, handle)

    def call(self, actor: Actor, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a method; return a reference to each of its results."""
        found = actor.handle.call.options(num_returns=returns).remote(method, *args)
        return [found] if returns == 1 else found

    def put(self, value: Any) -> Any:
        """Put a value into the object store; return a reference."""
        return self._ray.put(value)

    def wait(self, references: Collection[Any], seconds: float) -> list[Any]:
        """Return those that have a result or an error, once there is one or the time is over."""
        done, rest = self._ray.wait([*references], timeout=seconds, fetch_local=False)
        if rest:  # all that are there, not one at a time
            done += self._ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
        return done

    def get(self, reference: Any) -> Any:
        """Return a result. Raises `ActorGoneError`, or what the method raised."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayActorError as error:
            raise ActorGoneError(str(error)) from error
        except exceptions.ObjectLostError as error:
            raise ResultLostError(str(error)) from error
        except exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None

    def stop(self, actor: Actor) -> None:
        """Kill a worker's or a server's process."""
        self._pings.pop(actor.name, None)
        self._ray.kill(actor.handle)
        node, pid = self._places.pop(actor.name, (None, 0))
        if node == self._here:
            # A process that is stopped (SIGSTOP) does not read Ray's message.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def silent(self, actors: Collection[Actor], seconds: float) -> list[Actor]:
        """Return those that have not answered a ping for so long, on the monotonic clock.

        Before its first answer a process is starting, and nobody is missed.
        """
        self._check_head()
        now, silent = time.monotonic(), []
        for actor in actors:
            ping, since = self._pings.get(actor.name, (None, now))
            if ping is not None and self._ray.wait([ping], timeout=0)[0]:
                with contextlib.suppress(ActorGoneError):
                    self._places[actor.name] = self.get(ping)
                ping, since = None, now
            if ping is None:
                ping = actor.handle.ping.remote()
            self._pings[actor.name] = ping, since
            if actor.name in self._places and now - since > seconds:
                silent.append(actor)
        return silent

    def _check_head(self) -> None:
        """Raise `PlanError` where the head of the cluster has ended: nothing can be restarted."""
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            self._own = False  # there is nobody to say good-bye to
            raise errors.servers_head_gone(self._head, str(error)) from None

    def close(self) -> None:
        """End all processes, and Ray where it was started here."""
        if self._own:
            self._ray.shutdown()


class _Host:
    """What runs in a worker's or a server's process."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        devices: int,
        make: Callable[..., Any],
        *args: Any,
    ) -> None:
        for name, value in settings.items():
            with contextlib.suppress(AttributeError):
                jax.config.update(name, value)
        if devices > 1:
            cpu_devices(devices)
        self._make, self._args = make, args
        self._made: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; the first call makes it."""
        if self._made is None:
            self._made = self._make(*self._args)
        return getattr(self._made, method)(*args)


def _ping(self: Any) -> tuple[str, int]:
    """Return the node and the process's id; a busy worker answers too."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


def _ray(address: str | None) -> Any:
    """Import Ray, with token authentication on: Ray reads these variables once, when imported."""
    if "ray" not in sys.modules and address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_new_token())
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise errors.servers_need_token(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise errors.package_missing("Servers(transport='ray')", "ray", "ray") from None
    return ray


def _new_token() -> Path:
    """Write a token to a file that only this user can read; it is removed with this process."""
    folder = tempfile.mkdtemp(prefix="plurax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path
