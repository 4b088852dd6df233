"""Join the processes of a gang, before anything uses a device."""

import contextlib
import errno
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NoReturn

import jax

from plurax import errors
from plurax.distributed.compilation_cache import make_cache_safe
from plurax.distributed.environment import GangEnvironment, gang_of
from plurax.exit_codes import ExitCode
from plurax.timeouts import TIMEOUTS

LINKS = ("Gloo", "NCCL", "Connection", "connection", "coordination service")
"""Words in what JAX raises where another process is gone."""
INITIALIZE_SECONDS, SHUTDOWN_SECONDS = 900, 30
NOTICE_SECONDS = 30.0
"""How long a process waits for the others without a word."""


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    devices: int | None = None,
    local_devices: Sequence[int] | None = None,
) -> None:
    """Make this process one of several that train together; call it before any use of a device.

    Under `plurax launch` and in a step of Slurm (`srun`) nothing else has to be said. `plurax
    train` and the other commands call it themselves. Without a launcher, Slurm and arguments it
    does nothing: the same script runs alone.

    **Arguments:**

    - `coordinator`: `host:port` of process 0, where JAX's coordination service will listen.
    - `processes`, `process`: how many there are, and which one this is.
    - `devices`: virtual CPU devices of each process, for a rehearsal.
    - `local_devices`: the devices of its host that this process owns; default all.

    Raises `ProcessError` where JAX has been used before, where only some of the arguments are
    given, and where the others cannot be reached. Source: JAX, *Introduction to multi-controller
    JAX*, https://docs.jax.dev/en/latest/multi_process.html
    """
    gang = _chosen(coordinator, processes, process, devices, local_devices)
    if gang is None:
        return
    if jax.distributed.is_initialized():
        raise errors.ProcessError(
            "the processes are joined already. Call plurax.initialize() once, and not after "
            "jax.distributed.initialize()."
        )
    # An exception in one process would leave the others waiting in a collective until they time
    # out: Python ends, and JAX waits at the end for all processes. So end at once.
    sys.excepthook = end_at_once
    try:
        if gang.devices is not None:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", gang.devices)
        make_cache_safe()
        # `fit` has its own handler of SIGTERM, and JAX's would replace it.
        jax.config.update("jax_enable_preemption_service", False)
        _check_name(gang.address[0])
        with _waiting(gang):
            _join(gang)
    except RuntimeError:
        raise errors.ProcessError(
            "plurax.initialize() comes too late: JAX has been used in this process. Call it first, "
            "before any array is created and before jax.devices()."
        ) from None


def _join(gang: GangEnvironment) -> None:
    host, port = gang.address
    if gang.process:
        _wait_for(host, port, gang.process)
    else:
        _check_port(host, port)
    jax.distributed.initialize(
        gang.coordinator,
        gang.processes,
        gang.process,
        gang.local_devices,
        cluster_detection_method="deactivate",
        # By default JAX listens at every address of the host, to anyone.
        coordinator_bind_address=gang.coordinator if gang.process == 0 else None,
        initialization_timeout=INITIALIZE_SECONDS,
        heartbeat_timeout_seconds=int(TIMEOUTS.heartbeat),
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


def _check_port(host: str, port: int) -> None:
    """Raise `PeerError` where another program listens: JAX would not say so."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as JAX does
            listening.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise errors.PeerError(
                f"process 0 cannot listen at {host}:{port} for the others: {error}. `plurax "
                "launch` starts all of them again with another port; by hand, give a coordinator "
                "with a free one."
            ) from None


def _wait_for(host: str, port: int, process: int) -> None:
    """Wait until the coordinator listens: JAX would abort the process, without a word of where."""
    end = time.monotonic() + INITIALIZE_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                where = f"{host}:{port}"
                raise errors.ProcessError(
                    f"process {process} could not join the others at {where}: {error}. Does "
                    "process 0 run on that host, is the port free and open between the hosts, and "
                    "do all processes give the same number of processes?"
                ) from None
            time.sleep(0.1)  # nothing says when a port of another host opens: try again


@contextlib.contextmanager
def _waiting(gang: GangEnvironment) -> Iterator[None]:
    """Say after a while for what a process waits."""
    text = (
        f"process {gang.process} waits for all {gang.processes} processes at {gang.coordinator}, "
        f"for at most {INITIALIZE_SECONDS} s\n"
    )
    timer = threading.Timer(NOTICE_SECONDS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_name(coordinator: str) -> None:
    """Raise `ProcessError` where the others would look for this host at their own loopback.

    Collectives between CPUs (Gloo) connect to the address that a host's own name resolves to.
    """
    if jax.config.values["jax_platforms"] != "cpu" or _is_loopback(coordinator):
        return
    if _is_loopback(name := socket.gethostname()):
        raise errors.ProcessError(
            f"this host's name, {name}, resolves to its loopback address, and JAX's collectives "
            f"between CPUs give that to the other hosts (the coordinator is {coordinator}). Give "
            "the name its real address in /etc/hosts of this host."
        )


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False  # JAX says so


def exit_code(error: BaseException) -> ExitCode:
    """Return with which code a process ends after an error: 134 where another one has ended.

    That is the code of JAX's coordination service, which aborts a process (SIGABRT) whose peer is
    gone.
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, errors.ReplicaError):
        return ExitCode.CORRUPT
    if isinstance(error, errors.OutOfMemoryError | MemoryError) or _is_device_full(error):
        return ExitCode.OUT_OF_MEMORY
    if isinstance(error, errors.RunStoppedError):
        return ExitCode.PERMANENT
    if isinstance(error, errors.PeerError) or _is_lost_link(error):
        return ExitCode.PEER_DIED
    return ExitCode.MISTAKE if isinstance(error, errors.PluraxError) else ExitCode.FAILED


def _is_device_full(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _is_lost_link(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in str(error) for word in LINKS
    )


def leave(status: int) -> NoReturn:
    """End the process of a command that stopped.

    One of several ends at once, so that the others notice; and so does one whose peer has ended,
    for it would wait for that at its end, and one of which a thread still waits for a disk that
    does not answer.
    """
    others = [other for other in threading.enumerate() if other is not threading.main_thread()]
    waits = status == ExitCode.PEER_DIED or any(not other.daemon for other in others)
    if jax.distributed.is_initialized() or waits:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def end_at_once(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error that nobody catches, and end: a `sys.excepthook`.

    Where another process has ended, what this one was doing says nothing of why. Under a launcher,
    which says that, the trace goes to the file of this process's output alone.
    """
    code, log = exit_code(error), os.environ.get("PLURAX_LOG")
    if code != ExitCode.PEER_DIED or log is None:
        sys.__excepthook__(kind, error, trace)
    else:
        with contextlib.suppress(OSError), open(log, "a") as file:
            traceback.print_exception(kind, error, trace, file=file)
        is_ours = isinstance(error, errors.PluraxError)
        shown = error if is_ours else errors.process_ended("another process")
        print(f"error: {shown}", file=sys.stderr)
    leave(code)


def _chosen(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    devices: int | None,
    local_devices: Sequence[int] | None,
) -> GangEnvironment | None:
    if (coordinator, processes, process, devices, local_devices) == (None,) * 5:
        return gang_of(os.environ)
    if coordinator is None or processes is None or process is None:
        needed = {"coordinator": coordinator, "processes": processes, "process": process}
        missing = [name for name in needed if needed[name] is None]
        raise errors.ProcessError(
            f"plurax.initialize needs {' and '.join(missing)} too: plurax.initialize('host0:1234', "
            "processes=2, process=0). Under `plurax launch` and `srun` give no arguments."
        )
    owned = None if local_devices is None else tuple(local_devices)
    return GangEnvironment(coordinator, processes, process, devices, owned)
