"""Workers and servers as Ray actors: processes of this machine, or of a cluster.

What is called between two waits goes to a process in one message. On a cluster arrays go through
Ray's object stores; where Ray is started here, through memory that the processes share
(`plurax.server.shared_memory`), in half the time. Example, a worker pulls 2 MB from one server,
and both are processes of this machine:

    call(server, "pull", 1, 7, returns=2)    two `_Result`s that are not there yet
    wait                                     Ray sends [pull(1, 7)]; the process copies 2 MB into
                                             its file, and answers [20, Lent("server-0-a1/0", ...)]
    call(worker, "gradients", ticket, 7,     the second `_Result` is an argument: what is sent of
         result, returns=3)                  it is the `Lent`, and the process reads the file
    the result is dropped                    the server's next message says that its file is free

Whoever reaches the ports of a Ray cluster can run code on it. So token authentication is on: a
cluster started here gets a token of its own, in a file that only this user can read, and a cluster
at an address must be joined with its token (`RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).

Source: Moritz et al. 2018, "Ray: A Distributed Framework for Emerging AI Applications".
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from plurax import errors
from plurax.distributed.initialize import end_at_once
from plurax.execute.program_cache import TRACING
from plurax.lazy import imported
from plurax.locked_folder import LockedFolder
from plurax.mesh import cpu_devices
from plurax.reaper import Reaper
from plurax.server.servers import Servers
from plurax.server.shared_memory import FOLDER, Borrower, Lender, Lent, copied
from plurax.server.transport import Actor, ActorGoneError, ResultLostError, Transport

SETTINGS = (
    *TRACING, "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_enable_compilation_cache",
)  # fmt: skip
"""The JAX settings of this process that its workers and servers have too."""

MARK = "PLURAX_DRIVER"
"""A variable of the processes of Ray that belong to one run."""

REAP_SECONDS = 10.0
"""For the processes of Ray to end, once they are killed."""

LEAST_STORE_BYTES = 256 << 20
"""Of memory that processes share, where Ray runs on this machine alone."""


class RayTransport(Transport):
    """Runs each worker and server as a Ray actor.

    **Arguments:** `servers`; `store_bytes`, what is in the object store at most.

    Raises `MissingPackageError` without Ray, and `PlanError` for a cluster that does not answer or
    refuses the token, and for a store that is too small: Ray would write to disk.
    """

    def __init__(self, servers: Servers, store_bytes: int = 0) -> None:
        self._ray = _ray(servers.address)
        self._own = not self._ray.is_initialized()
        self._alone = self._own and servers.address is None
        self._shared: LockedFolder | None = None
        self._raylet: socket.socket | None = None
        self._reaper: Reaper | None = None
        with _own_sigterm():
            if self._alone:
                self._reaper = self._start(servers, store_bytes)
            elif self._own:
                self._join(str(servers.address))
        store = int(self._ray.cluster_resources().get("object_store_memory", 0))
        if store_bytes > store:
            self.close()
            raise errors.servers_store_too_small(store_bytes, store, "the cluster's nodes have")
        if self._alone and FOLDER.is_dir():
            self._shared = LockedFolder(FOLDER, "plurax-")
            if self._reaper is not None:
                self._reaper.tell(str(self._shared.path))
        self._unsent: list[_Call] = []
        self._messages: dict[Any, list[_Call]] = {}
        self._pings: dict[str, tuple[Any, float]] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._here = self._ray.get_runtime_context().get_node_id()
        self._head = str(self._ray.get_runtime_context().gcs_address)
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        self._raylet = socket.socket(socket.AF_UNIX)  # which the end of Ray's process here closes
        self._raylet.connect(str(nodes[self._here]["RayletSocketName"]))
        self._raylet.setblocking(False)
        # Pings are answered on a thread of their own.
        host = type(
            "Host", (_ActorHost,), {"ping": self._ray.method(concurrency_group="ping")(_ping)}
        )
        self._host = self._ray.remote(concurrency_groups={"ping": 1})(host)

    def _start(self, servers: Servers, store_bytes: int) -> Reaper:
        """Start Ray on this machine; return what ends it once this process is killed."""
        store_bytes = max(store_bytes + store_bytes // 4, LEAST_STORE_BYTES)
        free = shutil.disk_usage(FOLDER).free if FOLDER.is_dir() else store_bytes
        if store_bytes > free:
            raise errors.servers_store_too_small(store_bytes, free, f"{FOLDER} has")
        reaper, mark = Reaper(REAP_SECONDS), secrets.token_hex(16)
        # Two of Ray's processes would look for this one only once a minute.
        reaper.tell(f"={MARK}={mark}")
        with contextlib.ExitStack() as stack, _marked(mark), warnings.catch_warnings():
            stack.callback(reaper.close, REAP_SECONDS)
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
            stack.pop_all()
        return reaper

    def _join(self, address: str) -> None:
        """Join a running cluster."""
        # Ray would try for minutes where nobody answers.
        place = address.removeprefix("ray://")
        if place != "auto" and (reason := _unreachable(place)):
            raise errors.servers_not_reached(address, reason)
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
        settings = {key: getattr(jax.config, key, None) for key in SETTINGS}
        # It must be set before arrays that the task has in itself arrive: they would be rounded.
        variables["JAX_ENABLE_X64"] = "1" if settings["jax_enable_x64"] else "0"
        variables |= {} if gpus else {"JAX_PLATFORMS": "cpu"}
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0,
                   "enable_task_events": False, "runtime_env": {"env_vars": variables}}  # fmt: skip
        folder = None
        if self._shared is not None:
            folder = tempfile.mkdtemp(prefix=name.replace(" ", "-") + "-", dir=self._shared.path)
        args = tuple(arg.ref if isinstance(arg, _Result) else arg for arg in args)
        host = self._host.options(**options).remote(settings, folder, devices, make, *args)
        return Actor(name, _ActorProcess(host, folder))

    def call(
        self, actor: Actor, method: str, *args: Any, returns: int = 1, lasting: bool = False
    ) -> list[Any]:
        """Call a method, at the next `wait`; return a reference to each of its results."""
        results = [_Result(actor.handle) for _ in range(returns)]
        stored = lasting or (returns > 1 and self._shared is None)
        self._unsent.append(_Call(actor.handle, method, [*args], results, stored, lasting))
        return list(results)

    def put(self, value: Any) -> Any:
        """Put a value into the object store; return a reference."""
        result = _Result()
        result.ref = self._ray.put(value)
        return result

    def wait(self, references: Collection[Any], seconds: float) -> list[Any]:
        """Return those that have a result or an error, once there is one or the time is over."""
        self._send()
        until = time.monotonic() + seconds
        while not any(result.is_there for result in references) and self._messages:
            left = max(until - time.monotonic(), 0)
            answered, rest = self._ray.wait([*self._messages], timeout=left, fetch_local=False)
            if not answered:
                break
            if rest:  # all that are there, not one at a time
                more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)
                answered += more
            for ref in answered:
                self._receive(ref, self._messages.pop(ref))
        return [result for result in references if result.is_there]

    def _send(self) -> None:
        """Send each process the calls since the last time, those one after another together."""
        messages: dict[_ActorProcess, list[_Call]] = {}
        unsent, self._unsent = self._unsent, []
        for call in unsent:
            messages.setdefault(call.process, []).append(call)
            # What a call stores must be stored before the next may change it. On a cluster a
            # message fails as a whole, where what it was given is lost.
            if call.stored or self._shared is None:
                self._send_message(call.process, messages.pop(call.process))
        for process, calls in messages.items():
            self._send_message(process, calls)

    def _send_message(self, process: "_ActorProcess", calls: list["_Call"]) -> None:
        free, process.free = process.free, []
        refs: list[Any] = []
        requests = [call.request(refs) for call in calls]
        stored = [result for call in calls if call.stored for result in call.results]
        # One argument of bytes: Ray would look into each of the values.
        content = self._ray.cloudpickle.dumps((free, requests))
        remote = process.host.call.options(num_returns=1 + len(stored)).remote
        answer = remote(content, *refs)
        message, *stored_refs = answer if stored else [answer]
        for result, ref in zip(stored, stored_refs, strict=True):
            result.ref = ref
        self._messages[message] = calls

    def _receive(self, ref: Any, calls: list["_Call"]) -> None:
        """Take the answer to a message."""
        answers: list[Any] = [[None] * len(call.results) for call in calls]
        error = None
        try:
            answers = pickle.loads(self._answer(ref))
            for call in calls:
                if call.lasting and not self._alone:
                    self._fetch(call.results)
        except errors.PeerError:
            raise
        except Exception as raised:
            error = raised
        for call, values in zip(calls, answers, strict=True):
            call.args.clear()  # they were lent until now
            for result, value in zip(call.results, values, strict=True):
                result.is_there, result.value, result.error = True, value, error

    def _fetch(self, results: Sequence["_Result"]) -> None:
        """Store results on this machine: that of their process may end with it."""
        try:
            for result in results:
                result.ref = self._ray.put(self._answer(result.ref))
        except ResultLostError as error:
            raise ActorGoneError(str(error)) from error

    def _answer(self, ref: Any) -> Any:
        """Return what a reference of Ray's refers to."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayActorError as error:
            self._check_ray()
            raise ActorGoneError(str(error)) from error
        except exceptions.ObjectLostError as error:
            raise ResultLostError(str(error)) from error
        except exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None

    def get(self, reference: Any) -> Any:
        """Return a result. Raises `ActorGoneError`, or what the method raised."""
        if reference.error is not None:
            raise reference.error
        if reference.ref is not None:
            return self._answer(reference.ref)
        return copied(reference.value)

    def stop(self, actor: Actor) -> None:
        """Kill a worker's or a server's process."""
        self._pings.pop(actor.name, None)
        self._send()
        self._ray.kill(actor.handle.host)
        node, pid = self._places.pop(actor.name, (None, 0))
        if node == self._here:
            # A process that is stopped (SIGSTOP) does not read Ray's message.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def silent(self, actors: Collection[Actor], seconds: float) -> list[Actor]:
        """Return those that have not answered a ping for so long, on the monotonic clock.

        Before its first answer a process is starting, and nobody is missed.
        """
        self._check_ray()
        now, silent = time.monotonic(), []
        for actor in actors:
            ping, since = self._pings.get(actor.name, (None, now))
            if ping is not None and self._ray.wait([ping], timeout=0)[0]:
                with contextlib.suppress(ActorGoneError):
                    self._places[actor.name] = self._answer(ping)
                ping, since = None, now
            if ping is None:
                ping = actor.handle.host.ping.remote()
            self._pings[actor.name] = ping, since
            if actor.name in self._places and now - since > seconds:
                silent.append(actor)
        return silent

    def _check_ray(self) -> None:
        """Raise `PeerError` where Ray has ended, here or at the head: nothing can be restarted.

        Ray ends this process without a word as soon as it needs the store of a raylet that is gone.
        """
        gone = None
        if reason := _unreachable(self._head):
            gone = errors.PeerError(
                f"the head of the Ray cluster ({self._head}) has ended: {reason}. Workers and "
                "servers cannot be started again without it. Training stopped; what was saved last "
                "can be resumed."
            )
        elif self._raylet is not None and _is_closed(self._raylet):
            gone = errors.PeerError(
                "Ray's process on this machine (raylet) has ended. It was killed, perhaps for "
                "memory; its log is in /tmp/ray/session_latest/logs. Workers and servers cannot be "
                "started again without it. Training stopped; what was saved last can be resumed."
            )
        if gone is None:
            return
        # There is nobody to say good-bye to: Ray would wait for its head for a minute, before it
        # prints an error that nobody catches and at the end, and then end this process by itself.
        self._own = False
        sys.excepthook = end_at_once
        raise gone

    def close(self) -> None:
        """End all processes, and Ray where it was started here."""
        if self._raylet is not None:
            self._raylet.close()
        if self._own:
            self._ray.shutdown()
        if self._shared is not None:
            self._shared.close()
        if self._reaper is not None and self._own:
            self._reaper.dismiss()
        elif self._reaper is not None:
            self._reaper.close(REAP_SECONDS)


class _ActorProcess:
    """A worker's or a server's process.

    **Arguments:** `host`, of Ray; `folder`, in which it lends, which is removed with this.

    **Attributes:** `free`, files in it that nobody reads any more.
    """

    def __init__(self, host: Any, folder: str | None) -> None:
        self.host, self.free = host, list[str]()
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


class _Result:
    """A result of a call, which `process` answers.

    **Attributes:** `is_there`; then `value`, which may be lent; `ref`, where Ray stores it; or
    `error`.
    """

    is_there = False
    value: Any = None
    ref: Any = None
    error: Exception | None = None

    def __init__(self, process: _ActorProcess | None = None) -> None:
        self.process = process

    def __del__(self) -> None:
        if self.process is not None and isinstance(self.value, Lent):
            self.process.free.append(self.value.path)


@dataclasses.dataclass(frozen=True)
class _InStore:
    """An argument that Ray stores, by its index among those of a message."""

    index: int


_Request = tuple[str, list[Any], int, bool]
"""A call in a message: method, arguments, how many results, and whether Ray stores these."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that is not answered; `stored`, whether Ray stores its results; `lasting`."""

    process: _ActorProcess
    method: str
    args: list[Any]
    results: list[_Result]
    stored: bool
    lasting: bool

    def request(self, refs: list[Any]) -> _Request:
        """Return the request; references to what Ray stores of its arguments go to `refs`."""
        args = []
        for arg in self.args:
            if isinstance(arg, _Result) and arg.ref is not None:
                refs.append(arg.ref)
                arg = _InStore(len(refs) - 1)
            args.append(arg.value if isinstance(arg, _Result) else arg)
        return self.method, args, len(self.results), self.stored


class _ActorHost:
    """What runs in a worker's or a server's process."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: str | None,
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
        self._object: Any = None
        self._lender = None if folder is None else Lender(folder)
        self._borrower = Borrower()

    def call(self, content: bytes, *stored_args: Any) -> Any:
        """Call methods of the object; return the results of each, then those that Ray stores.

        The first call makes the object. `content` has the files of ours that are free, and the
        requests; `stored_args`, what Ray stores of their arguments.
        """
        if self._object is None:
            self._object = self._make(*self._args)
        free, requests = pickle.loads(content)
        if self._lender is not None:
            self._lender.take_back(free)
        answers, stored = list[Any](), list[Any]()
        for method, args, returns, is_stored in requests:
            args = [
                stored_args[arg.index] if isinstance(arg, _InStore) else self._borrower.borrow(arg)
                for arg in args
            ]
            returned = getattr(self._object, method)(*args)
            results = [returned] if returns == 1 else [*returned]
            if is_stored:
                stored += results
                results = [None] * len(results)
            elif self._lender is not None:  # before the next call changes it
                results = [self._lender.lend(result) for result in results]
            answers.append(results)
        answer = pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)
        return (answer, *stored) if stored else answer


def _unreachable(address: str) -> str | None:
    """Return why nobody answers at an address, or None."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _is_closed(peer: socket.socket) -> bool:
    """Return whether the other end of a connection, which never says anything, has ended."""
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which saves: Ray sets another, which ends at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _marked(mark: str) -> Iterator[None]:
    """Give the processes that are started a mark in their environment."""
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]


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
    # A wrong token is asked for once a second, twenty times, unless we say how often.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return imported("ray", "Servers(transport='ray')", "ray", "ray")


def _new_token() -> Path:
    """Write a token to a file that only this user can read; it is removed with this process."""
    folder = LockedFolder(Path(tempfile.gettempdir()), "plurax-token-")
    reaper = Reaper(REAP_SECONDS)
    reaper.tell(str(folder.path))

    def close() -> None:
        folder.close()
        reaper.dismiss()

    atexit.register(close)  # which keeps both until then: Ray may be started again
    path = folder.path / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path
