"""Take members out of a population's state, join states, and export a member as one network."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from plurax import errors
from plurax.distributed.global_arrays import gather, own_devices
from plurax.state import TrainState


def take_members(state: TrainState, indices: Sequence[int]) -> TrainState:
    """Return a copy of the state of some members of a population, leaves `(len(indices), ...)`.

    Raises `MembersError` for an index out of range, or the state of one network.
    """
    chosen = np.asarray([_checked(state, index) for index in indices], np.int32)
    return jax.tree.map(lambda leaf: leaf[chosen], state)


def join_members(*states: TrainState) -> TrainState:
    """Concatenate states to one population, in order.

    Raises `MembersError` where their structures, shapes or dtypes differ.
    """
    expected = jax.tree.map(_kind, states[0])
    for other in states[1:]:
        if jax.tree.map(_kind, other) != expected:
            raise errors.MembersError(
                "join_members: the states differ in structure, shape or dtype; only members of the "
                "same task and optimizer can be put together."
            )
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)


def export_member(state: TrainState, index: int) -> TrainState:
    """Return a member as the state of one network, to continue training or predict alone.

    To put it on the devices, call `Program.place` of a program compiled for one network with the
    member's hyperparameters. Raises `MembersError` for an index out of range.
    """
    chosen = _checked(state, index)
    # Of several processes each gets the member on a device of its own.
    device = min(own_devices(state.step.devices()), key=lambda device: device.id)
    member = jax.tree.map(lambda leaf: leaf[chosen], state)
    if not state.step.is_fully_addressable:
        member = jax.tree.map(lambda leaf: leaf.addressable_data(0), gather(member))
    return jax.device_put(member, device)


def _kind(leaf: jax.Array) -> str:
    return f"{leaf.dtype}{leaf.shape[1:]}"


def _checked(state: TrainState, index: int) -> int:
    if state.step.ndim == 0:
        raise errors.state_of_one_network()
    count = state.step.shape[0]
    if not 0 <= index < count:
        raise errors.member_not_there(index, count)
    return int(index)
