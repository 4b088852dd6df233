"""A program: one task, one optimizer and one plan, compiled for one size of batch."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from plurax import errors, inspect, tree
from plurax.execute.gradient import Totals, check_parameters, evaluation, gradient
from plurax.execute.in_flight import InFlight
from plurax.execute.loop import make_loop
from plurax.execute.placement import Placed, Placement, chunks, is_arrays, leading_dim
from plurax.execute.predict import make_predict, predict_stream
from plurax.execute.rows import number_rows
from plurax.execute.step import Metrics, make_step
from plurax.execute.totals import coupled, data_parallel
from plurax.mesh import replicated, split_rows
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task


class Program:
    """A compiled training step and what goes with it. Made by `plurax.compile`.

    **Attributes:** `task` and `plan`, as given; `mesh`, the `jax.sharding.Mesh` of the plan;
    `batch_size`, examples of the largest batch a step takes.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        batch: PyTree,
        mesh: Mesh,
    ) -> None:
        if plan.member > 1:
            raise errors.plan_has_members(plan.member)
        self.task = task
        self.plan = plan
        self.mesh = mesh
        self.batch_size = leading_dim(batch)
        self._optimizer = optimizer
        self._placement = Placement(batch, plan.padded_size(self.batch_size), split_rows(mesh))
        # Evaluation goes by microbatches, so that it fits where training does.
        size = -(-self.batch_size // plan.microbatches)
        self._evaluation = Placement(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch),
            Plan(data=plan.data).padded_size(size),
            split_rows(mesh),
        )
        self._init = jax.jit(self._new_state, out_shardings=replicated(mesh))
        self._state_like = self._on_mesh(
            jax.eval_shape(self._new_state, jax.eval_shape(lambda: jax.random.key(0)))
        )
        self._in_flight = InFlight(mesh)
        spread = coupled if task.coupled else data_parallel
        fun = gradient(task, plan.precision, plan.batch_dim)
        self._step_function = make_step(spread(fun, mesh, plan.microbatches), optimizer)
        self._predicts: dict[Any, tuple[Placement, jax.stages.Compiled]] = {}
        self._loops: dict[Any, jax.stages.Compiled] = {}

    # --- Training -----------------------------------------------------------------------------

    def init(self, seed: int = 0, *, params: PyTree = None) -> TrainState:
        """A fresh state: parameters made in place, in their sharding.

        The same seed gives the same state under every plan. With `params` (a tree like the task's
        own) training starts from them.
        """
        state = self._init(jax.random.key(seed))
        if params is None:
            return state
        opt_state = jax.jit(self._optimizer.init)(params)
        return self.place(dataclasses.replace(state, params=params, opt_state=opt_state))

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One update from a batch of at most `batch_size` examples.

        The state given is used up (its memory is reused). Metrics are device scalars: `loss` and
        the task's own metrics, weighted means over the batch; `grad_norm`; `weight`; `examples`;
        `skipped`, 1 where loss or gradient was not finite and the update was left out.

        Raises `BatchError` for a batch or state that does not fit.
        """
        return self._run(self.compiled_step, state, *self._placement.fill(batch))

    def place_batch(self, batch: PyTree) -> Placed:
        """Put a batch on the devices ahead of its step; for `step_placed`."""
        return self._placement.place(batch)

    def step_placed(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Like `step`, for a batch that `place_batch` has put on the devices."""
        return self._run(self.compiled_step, state, *placed)

    def loop(
        self, state: TrainState, data: PyTree, epoch: Placed, first: int, stop: int
    ) -> tuple[TrainState, Metrics]:
        """Steps `first` to `stop` of an epoch in one compiled loop, data staying on the devices.

        **Arguments:**

        - `data`: what `place_data` returned.
        - `epoch`: what `place_epoch` returned: the examples of each step.
        - `first`, `stop`: any range of the epoch's steps; one compiled program serves all.

        **Returns:** the state, and metrics with a leading dim of the epoch's steps, zero outside
        the range.
        """
        compiled = self.compile_loop(data, epoch)
        return self._run(compiled, state, data, *epoch, np.int32(first), np.int32(stop))

    def compile_loop(self, data: PyTree, epoch: Placed) -> jax.stages.Compiled:
        """The compiled loop for data and epochs of these shapes."""
        leaves, structure = jax.tree.flatten((data, *epoch))
        key = (structure, *(leaf.shape for leaf in leaves))
        if key not in self._loops:
            loop = make_loop(self._step_function, self.mesh)
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                (data, *epoch),
            )
            self._loops[key] = (
                jax.jit(loop, donate_argnums=0, out_shardings=replicated(self.mesh))
                .lower(self._state_like, *like, self._count(), self._count())
                .compile()
            )
        return self._loops[key]

    def place_epoch(self, rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]) -> Placed:
        """Put the order of an epoch on the devices, for `loop`.

        **Arguments:**

        - `rows`: which example of the data stands in each place of each step.
        - `counts`: how many places of each step are real; the others repeat them.
        """
        places = np.arange(self._placement.rows) % counts[:, None]
        rows = np.take_along_axis(rows, places, axis=1).astype(np.int32)
        columns = jax.sharding.NamedSharding(self.mesh, P(None, "data"))
        return Placed(
            jax.device_put(rows, columns),
            jax.device_put(counts.astype(np.int32), replicated(self.mesh)),
        )

    def place_data(self, data: PyTree) -> PyTree:
        """Put a whole data set on every device of the mesh, for `loop`."""
        return jax.device_put(data, replicated(self.mesh))

    def place(self, state: TrainState) -> TrainState:
        """Put a state from elsewhere (a checkpoint, another plan) on this program's devices."""
        self._check_state(state)
        shardings = jax.tree.map(lambda like: like.sharding, self._state_like)
        # A copy: the first step will reuse the memory, and what was given stays the caller's.
        return jax.device_put(jax.tree.map(jnp.copy, state), shardings)

    # --- Inference ----------------------------------------------------------------------------

    def predict(
        self, state: TrainState, inputs: PyTree | Iterable[PyTree], *, chunk: int | None = None
    ) -> Any:
        """Outputs of the task's `predict` for any number of inputs, as NumPy arrays.

        **Arguments:**

        - `inputs`: a tree of arrays with a common leading dim, or an iterable of such trees (a
          generator, a list): the result is then an iterator with one output per item.
        - `chunk`: rows at a time, default `batch_size`. The last chunk is filled up and cut, so
          there is one compilation.

        While a chunk computes, the one before is copied to the host.
        """
        if not is_arrays(inputs):
            return self._predict_stream(state, iter(inputs), chunk)
        return next(self._predict_stream(state, iter([inputs]), chunk))

    def _predict_stream(
        self, state: TrainState, batches: Iterator[PyTree], chunk: int | None
    ) -> Iterator[PyTree]:
        first = next(batches, None)
        if first is None:
            return
        placement, compiled = self._predict_program(first, chunk or self.batch_size)

        def chained() -> Iterator[PyTree]:
            yield first
            yield from batches

        def run(rows: PyTree) -> PyTree:
            return compiled(state.params, state.model_state, rows)

        yield from predict_stream(run, placement, chained())

    def _predict_program(self, inputs: PyTree, chunk: int) -> tuple[Placement, jax.stages.Compiled]:
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((chunk, *np.shape(leaf)[1:]), leaf.dtype), inputs
        )
        key = (jax.tree.structure(like), *((x.shape, x.dtype) for x in jax.tree.leaves(like)))
        if key not in self._predicts:
            rows = Plan(data=self.plan.data).padded_size(chunk)
            placement = Placement(like, rows, split_rows(self.mesh))
            function = make_predict(self.task, self.plan.precision, self.mesh)
            compiled = (
                jax.jit(function, out_shardings=split_rows(self.mesh))
                .lower(self._state_like.params, self._state_like.model_state, placement.abstract())
                .compile()
            )
            self._predicts[key] = (placement, compiled)
        return self._predicts[key]

    def evaluate(self, state: TrainState, data: PyTree | Iterable[PyTree]) -> dict[str, float]:
        """Weighted means of loss and metrics over all examples of `data`, each counted once.

        `data` is a tree of arrays with any leading dim, or an iterable of such trees. Sums over
        chunks are in float64 on the host.
        """
        parts = []
        for batch in chunks(data, self._evaluation.size):
            placed = self._evaluation.place(batch)
            part = self._compiled_evaluate(state.params, state.model_state, *placed)
            self._in_flight.started(part.loss)
            parts.append(part)
        if not parts:
            raise errors.batch_is_empty()
        host = jax.device_get(parts)
        # NaN, not an exception, where no example has weight: as in a step.
        weight = sum(float(part.weight) for part in host) or math.nan
        means = {"loss": sum(float(part.loss) for part in host) / weight}
        for name in host[0].metrics:
            means[name] = sum(float(part.metrics[name]) for part in host) / weight
        return means

    @functools.cached_property
    def _compiled_evaluate(self) -> jax.stages.Compiled:
        evaluate = evaluation(self.task, self.plan.precision)
        split = self.mesh.shape["data"] > 1

        def local(params: PyTree, model_state: PyTree, batch: PyTree, count: Any) -> Totals:
            size = jax.tree.leaves(batch)[0].shape[0]
            first = jax.lax.axis_index("data") * size if split else 0
            rows = number_rows(batch, jax.random.key(0), count, first)
            totals = evaluate(params, model_state, rows)
            return jax.lax.psum(totals, "data") if split else totals

        function = local
        if split:
            function = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(P(), P(), P("data"), P()),
                out_specs=P(),
                axis_names={"data"},
                check_vma=False,
            )
        like = self._state_like
        return (
            jax.jit(function)
            .lower(like.params, like.model_state, self._evaluation.abstract(), self._count())
            .compile()
        )

    # --- Reading the compiled step ------------------------------------------------------------

    @functools.cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """The compiled step, `(state, rows, count) -> (state, metrics)`."""
        return (
            jax.jit(self._step_function, donate_argnums=0, out_shardings=replicated(self.mesh))
            .lower(self._state_like, self._placement.abstract(), self._count())
            .compile()
        )

    def hlo(self) -> str:
        """The text of the compiled step."""
        return self.compiled_step.as_text() or ""

    def collectives(self) -> list[inspect.Collective]:
        """The collectives of one step, read from the compiled program."""
        return inspect.collectives(self.hlo(), self.mesh)

    def memory(self) -> inspect.Memory:
        """Bytes on one device during a step, as the compiler reports them."""
        return inspect.memory(self.compiled_step)

    @property
    def state_shapes(self) -> TrainState:
        """The state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._state_like

    # --- Inside -------------------------------------------------------------------------------

    def _new_state(self, key: Any) -> TrainState:
        init_key, run_key = jax.random.split(key)
        made = self.task.init(init_key)
        if self.task.stateful:
            if not (isinstance(made, tuple) and len(made) == 2):
                raise errors.init_needs_model_state()
            params, model_state = made
        else:
            params, model_state = made, ()
        check_parameters(params)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(zero, params, self._optimizer.init(params), model_state, run_key, zero)
        # One dtype for good: a weakly typed leaf would change type in the first step.
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), state)

    def _run(self, compiled: jax.stages.Compiled, state: TrainState, *args: Any) -> Any:
        if state.step.is_deleted():
            raise errors.state_was_donated()
        try:
            state, metrics = compiled(state, *args)
            self._in_flight.started(metrics["loss"])
            return state, metrics
        except (TypeError, ValueError):
            self._check_state(state)
            like = jax.tree.leaves(self._state_like)
            for leaf, want in zip(jax.tree.leaves(state), like, strict=True):
                if not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim):
                    raise errors.state_elsewhere(str(leaf.sharding), str(want.sharding)) from None
            raise

    def _check_state(self, state: TrainState) -> None:
        expected, given = tree.describe(self._state_like), tree.describe(state)
        if expected != given:
            raise errors.state_mismatch(expected, given)

    def _on_mesh(self, like: PyTree) -> PyTree:
        whole = replicated(self.mesh)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), like
        )

    def _count(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32)
