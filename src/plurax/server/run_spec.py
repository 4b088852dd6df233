"""What workers and servers need to know of a run, sent to each once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.compiler_options import Options
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import new_state
from plurax.execute.rows import abstract_rows
from plurax.execute.step import Gradients
from plurax.jaxpr.homes import NotCutError
from plurax.plan import Plan
from plurax.server.residuals import zero_leaves
from plurax.server.servers import Servers
from plurax.server.shard_layout import ShardLayout
from plurax.server.sharded_update import ShardedUpdate
from plurax.state import TrainState
from plurax.task import Task


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run with parameter servers: what does not change while it runs.

    **Fields:** `task`, `optimizer`, `servers`; `plan`, of a worker; `batch`, a worker's largest
    batch as `jax.ShapeDtypeStruct`s; `arrays`, the examples where workers read them by row, else
    None; `options` of the compiler, for workers.
    """

    task: Task
    optimizer: optax.GradientTransformation
    servers: Servers
    plan: Plan
    batch: PyTree
    arrays: PyTree = None
    options: Options = ()

    @functools.cached_property
    def state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s, its tensors whole."""
        like: TrainState = jax.eval_shape(
            lambda: new_state(self.task, self.optimizer, jax.random.key(0))
        )
        return like

    @functools.cached_property
    def sums(self) -> Gradients:
        """What a worker's gradient gives, as `jax.ShapeDtypeStruct`s, its tensors whole."""
        fun = gradient(self.task, self.plan.precision)
        rows = abstract_rows(self.batch)
        totals, model_state = jax.eval_shape(fun, self.state.params, self.state.model_state, rows)
        examples: Any = jax.ShapeDtypeStruct((), jnp.int32)
        weight, loss, metrics, grads = totals
        return Gradients(weight, loss, metrics, grads, model_state, examples)

    @property
    def layout(self) -> ShardLayout:
        """Which shard holds which parameter."""
        return self.update.layout

    @functools.cached_property
    def update(self) -> ShardedUpdate:
        """The update of the shards. Raises `PlanError` for an optimizer that has none.

        Of the large parameters those are cut that the optimizer lets us cut.
        """
        leaves, whole = jax.tree.leaves(self.state.params), set[int]()
        while True:
            layout = ShardLayout(leaves, self.servers.shards, whole)
            alone = self.servers.mode != "sync"
            try:
                return ShardedUpdate(self.optimizer, self.state, self.sums, layout, alone)
            except NotCutError as error:
                whole |= error.owners

    @functools.cached_property
    def store_bytes(self) -> int:
        """How much memory processes share at most: data, snapshots, and what is on its way."""
        params = tree.byte_count(self.state.params)
        zeros = zero_leaves(jax.tree.leaves(self.state.params)) if self.servers.feedback else []
        # The snapshot that is kept, and the next; of each worker what it pulls and pushes, twice.
        state = tree.byte_count((self.state.params, self.state.opt_state, self.state.model_state))
        # What it has left to send goes to it at the start, and comes for a checkpoint.
        worker = 4 * params + 2 * tree.byte_count(zeros)
        return tree.byte_count(self.arrays) + 2 * state + self.servers.workers * worker

    def check(self) -> None:
        """Raise `PlanError` for an optimizer whose update servers cannot compute in this mode."""
        update, servers = self.update, self.servers
        if servers.mode != "sync" and update.crossings:
            sums = {i: self.leaves[i] for i in (*update.grads, *update.scalars)}
            jax.eval_shape(update.worker_numbers, sums)

    def jitted(self, name: str, make: Callable[[], Callable[..., Any]], **options: Any) -> Any:
        """Return `jax.jit(make())`, the same for all workers and servers of a process."""
        if name not in self._jitted:
            self._jitted[name] = jax.jit(make(), **options)
        return self._jitted[name]

    @functools.cached_property
    def _jitted(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The leaves of `(state, sums)`, abstract."""
        return jax.tree.leaves((self.state, self.sums))

    @functools.cached_property
    def layout_name(self) -> str:
        """What a worker and a server compare, before one reads the other's vectors."""
        return str([self.layout.lengths(shard) for shard in range(self.servers.shards)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields; what is computed from them is computed anew where it arrives."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
