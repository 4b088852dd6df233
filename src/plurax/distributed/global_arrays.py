"""Arrays over the devices of one process or of many: put them there, fetch them to the host.

JAX calls an array *addressable* where its devices belong to this process. Of an array over many
processes each holds only its own shards. Example, 2 processes with 2 devices each, rows `f32[8, 3]`
split over `data`:

    process 0    holds rows 0 1 | 2 3        put reads rows 0 to 3 of what it is given
    process 1    holds rows 4 5 | 6 7        put reads rows 4 to 7
    fetch        all-gathers on the devices, and returns f32[8, 3] to both

Every function here is called by all processes, in the same order, like a collective.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from plurax import errors

T = TypeVar("T")

MEASURE_IN_ONE = "Each process has a clock of its own. Measure in one, and give its result to all."


def process_count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def process_index() -> int:
    """Return the index of this process."""
    return jax.process_index()


def check_alone(what: str, instead: str) -> None:
    """Raise `ProcessError` where there are several processes; `instead` says what to do."""
    if jax.process_count() > 1:
        raise errors.ProcessError(
            f"{what} is for one process, and there are {jax.process_count()}. {instead}"
        )


def is_primary() -> bool:
    """Return whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def own_devices(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Return the devices that belong to this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def is_absent(device: jax.Device) -> bool:
    """Return whether a device is described for its compiler, and not here (`plurax.topology`)."""
    return getattr(device.client, "runtime_type", "") == "compile_only_runtime"


def check_here(devices: Iterable[jax.Device] | None) -> None:
    """Raise `PlanError` for devices of which the first is not here (`plurax.topology`)."""
    known = list(devices or ())
    if known and is_absent(known[0]):
        raise errors.devices_are_absent(len(known), known[0].device_kind)


def described_devices(devices: Iterable[jax.Device]) -> list[str]:
    """Return the names of devices, of several processes each with its process."""
    if jax.process_count() == 1:
        return [str(device) for device in devices]
    return [f"{device} of process {device.process_index}" for device in devices]


def put(values: PyTree, shardings: PyTree) -> PyTree:
    """Return a tree of arrays with the given shardings, a tree like it or one for all.

    Leaves may be arrays of the host, of this process's devices, or of all processes. Of the first
    two every process gives the whole array, and only its own shards are read. For devices that are
    not here the leaves are `jax.ShapeDtypeStruct`s.
    """
    if isinstance(shardings, NamedSharding) and is_absent(next(iter(shardings.device_set))):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=shardings),
            values,
        )
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, values)
    return jax.tree.map(_put, values, shardings)


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding == sharding:
            return leaf
        return one_at_a_time(jax.jit(_same, out_shardings=sharding)(leaf))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.jit(lambda: leaf, out_shardings=sharding)()
    host = leaf if hasattr(leaf, "dtype") and not isinstance(leaf, jax.Array) else np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(values: PyTree) -> PyTree:
    """Return a tree of NumPy arrays, each whole, from arrays of one process or of many."""
    if jax.process_count() == 1 and jax.default_backend() == "cpu":
        # What is in the host's memory needs no copies that are started first, as `device_get` does,
        # which takes twice as long for the few numbers of a step.
        return jax.tree.map(np.asarray, values)
    if jax.process_count() == 1:
        return jax.device_get(values)
    leaves, structure = jax.tree.flatten(values)
    elsewhere = [index for index, leaf in enumerate(leaves) if not _is_here(leaf)]
    if elsewhere:
        whole = gather([leaves[index] for index in elsewhere])
        for index, leaf in zip(elsewhere, whole, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def gather(values: PyTree) -> PyTree:
    """Return arrays of many processes whole on every device of their mesh."""
    whole = jax.tree.map(lambda leaf: NamedSharding(leaf.sharding.mesh, PartitionSpec()), values)
    return one_at_a_time(jax.jit(_same, out_shardings=whole)(values))


def one_at_a_time(result: T) -> T:
    """Return what a program computes; between the CPUs of several processes once it is computed.

    Their collectives (Gloo) have no number that tells one program's from another's. Two programs in
    flight, which each process may run in another order, would receive each other's data: wrong
    numbers, or the end of the process ("Received data size doesn't match expected size").
    """
    leaves = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return result  # nothing runs yet
    if leaves and not leaves[0].is_fully_addressable and jax.default_backend() == "cpu":
        jax.block_until_ready(leaves)
    return result


def least(value: int) -> int:
    """Return the smallest of a number that each process gives."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.asarray([value], np.float64))))


def _is_here(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _same(values: PyTree) -> PyTree:
    return values
