"""Start the workers and servers of a run: the transports, by name, and who starts which."""

from collections.abc import Callable, Sequence

from plurax.server.account import Account
from plurax.server.asynchronous import Asynchronous
from plurax.server.coordinator import Coordinator
from plurax.server.record import Record
from plurax.server.residuals import Leaves
from plurax.server.run_spec import RunSpec
from plurax.server.servers import Where
from plurax.server.synchronous import Synchronous
from plurax.server.thread_transport import Threads
from plurax.server.transport import Transport
from plurax.state import TrainState


def _ray(spec: RunSpec) -> Transport:
    from plurax.server.ray_transport import RayTransport

    return RayTransport(spec.servers, spec.store_bytes)


# To add a transport: a row here, and its name in `Where` of `servers.py`.
TRANSPORTS: dict[Where, Callable[[RunSpec], Transport]] = {
    "ray": _ray,
    "threads": lambda spec: Threads(),
}


def open_coordinator(
    spec: RunSpec,
    state: TrainState,
    record: Record | None,
    note: Callable[[str], None] = lambda text: None,
    residuals: Sequence[Leaves] = (),
) -> Coordinator:
    """Return the coordinator of a run's mode, over the transport that its `Servers` name.

    `note` shows a line to the user; `residuals` is what the first workers have left to send.
    Raises `MissingPackageError` without Ray.
    """
    transport = TRANSPORTS[spec.servers.transport](spec)
    kind = Synchronous if spec.servers.mode == "sync" else Asynchronous
    try:
        return kind(spec, transport, state, Account(), record, note, residuals)
    except BaseException:
        transport.close()
        raise
