"""The contract of a state layout: how a program stores the training state on its devices.

The *canonical* state has the tensors as the task and the optimizer return them, and it is what
checkpoints hold. The *stored* state is what the compiled program takes: dims padded to the number
of shards, layers ordered by stage, tensors packed into buffers. A plan changes only the stored
form, so a checkpoint of one plan opens under any other.

Example: a parameter `f32[10, 6]` under `Plan(data=4, zero=3)`:

    canonical    f32[10, 6]
    stored       f32[12, 6], P("data"): f32[3, 6] on each device, two rows of zeros
"""

import abc

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from plurax.distributed.global_arrays import put
from plurax.mesh import replicated
from plurax.sharding.parameter_info import ParameterInfo
from plurax.state import TrainState
from plurax.task import Task
from plurax.tree import named_leaves
from plurax.weights.start import StartInit


class StateLayout(abc.ABC):
    """How a program stores the training state, and the way from and to the canonical form."""

    @property
    @abc.abstractmethod
    def specs(self) -> TrainState:
        """The `PartitionSpec`s of the stored state."""

    @property
    @abc.abstractmethod
    def varying_axes(self) -> PyTree:
        """Of each stored leaf the mesh axes along which devices hold different values.

        A tree like `specs`, of `frozenset`s; along the other axes all devices hold the same bits,
        which `ReplicaCheck` compares.
        """

    @property
    @abc.abstractmethod
    def names(self) -> PyTree:
        """The name of each stored leaf for people, a tree like `specs`."""

    @property
    @abc.abstractmethod
    def gradient_specs(self) -> PyTree:
        """The `PartitionSpec`s of reduced gradients, a tree like the stored parameters that are not
        frozen."""

    @property
    @abc.abstractmethod
    def canonical(self) -> TrainState:
        """The canonical state as `jax.ShapeDtypeStruct`s."""

    @property
    @abc.abstractmethod
    def is_canonical(self) -> bool:
        """Whether the stored state has the canonical shapes, so that nothing is converted."""

    @abc.abstractmethod
    def abstract(self, mesh: Mesh) -> TrainState:
        """Return the stored state as global `jax.ShapeDtypeStruct`s with shardings on `mesh`."""

    @abc.abstractmethod
    def from_canonical(self, state: TrainState) -> TrainState:
        """Return the stored form of a canonical state; to be called under `jax.jit`."""

    @abc.abstractmethod
    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the canonical form of a stored state."""

    @abc.abstractmethod
    def parameters(self) -> list[ParameterInfo]:
        """Return the sharding and size of each parameter."""

    @abc.abstractmethod
    def canonical_shardings(self, mesh: Mesh) -> PyTree:
        """Return shardings in which a canonical state is put on the devices before it is stored:
        as near to the stored ones as its shapes allow."""

    @abc.abstractmethod
    def check(self, state: TrainState) -> None:
        """Raise `BatchError` where a canonical state has other structure, shapes or dtypes."""


def stored_where_equal(canonical: TrainState, stored: TrainState, mesh: Mesh) -> PyTree:
    """Return the shardings of stored leaves, replicated where the canonical shape is another."""
    return jax.tree.map(
        lambda whole, leaf: leaf.sharding if whole.shape == leaf.shape else replicated(mesh),
        canonical,
        stored,
    )


def place_start(task: Task, layout: StateLayout, mesh: Mesh) -> dict[str, jax.Array]:
    """Return the weights that a task starts from by path, each in its sharding on a mesh.

    Of members, which all have the same, every device has them whole.
    """
    if not isinstance(task.init, StartInit):
        return {}
    like = named_leaves(layout.canonical.params)
    where = named_leaves(layout.canonical_shardings(mesh).params)
    weights = {}
    for name, array in task.init.weights.items():
        one = like[name].shape == array.shape
        weights[name] = put(array, where[name] if one else replicated(mesh))
    return weights
