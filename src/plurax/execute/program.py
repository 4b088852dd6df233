"""Compile one task, one optimizer and one plan for one batch size."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from plurax import errors, tree
from plurax import hlo as compiled_hlo
from plurax.execute.backends.pipelined import PipelinedBackend
from plurax.execute.backends.sharded import ShardedBackend, microbatch, needs_partitioner
from plurax.execute.dispatch_limiter import DispatchLimiter
from plurax.execute.epoch_loop import make_loop
from plurax.execute.evaluate import (
    check_evaluation,
    device_evaluation,
    evaluation_placement,
    weighted_means,
)
from plurax.execute.gradient import Totals, evaluation, gradient
from plurax.execute.initial_state import check_place, check_state, new_state, same_shapes
from plurax.execute.layouts.state_shardings import ParameterInfo
from plurax.execute.mask import MaskWarning, mask_not_read, reads_mask
from plurax.execute.placement import Placed, Placement, device_data, leading_dim
from plurax.execute.predict import Predictor, make_predict
from plurax.execute.step import Metrics, make_step, whole_update
from plurax.execute.totals import coupled_totals, data_parallel, uneven_totals
from plurax.mesh import on_devices, replicated, split_rows, within
from plurax.partition.partitioner import Record
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task
from plurax.validate import check_seed


class Program:
    """The compiled functions of one network; `plurax.compile` returns it.

    **Attributes:** `task` and `plan`, as given; `mesh`, the `jax.sharding.Mesh` of the plan;
    `batch_size`, the number of examples in the largest batch a step takes.
    """

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        plan: Plan,
        batch: PyTree,
        mesh: Mesh,
        *,
        exact: bool = False,
    ) -> None:
        if plan.member > 1:
            raise errors.plan_has_members(plan.member)
        self.task, self.plan, self.mesh = task, plan, mesh
        self.batch_size = leading_dim(batch)
        self._optimizer = optimizer
        rows = plan.padded_size(self.batch_size)
        # An `exact` program adds no padding: rows that do not divide go to every device.
        self._rows_split = rows == self.batch_size or not exact
        self._placement = (
            Placement(batch, rows, split_rows(mesh))
            if self._rows_split
            else Placement(batch, self.batch_size, replicated(mesh))
        )
        self._of_size: dict[int, Program] = {}
        self._evaluation = evaluation_placement(batch, plan, mesh)
        self._in_flight = DispatchLimiter(mesh)
        self._sharded: ShardedBackend | PipelinedBackend | None = None
        fresh = functools.partial(new_state, task, optimizer)
        whole = jax.eval_shape(fresh, jax.eval_shape(lambda: jax.random.key(0)))
        self._fills = exact or not task.coupled or self._reads_mask(whole)
        # A pipeline needs microbatches of one size: it can neither skip padding nor replicate rows.
        odd = plan.pipeline > 1 and not self._rows_split
        if odd or (not self._fills and rows != self.batch_size):
            raise errors.mask_not_read(self.batch_size, plan.data * plan.microbatches)
        # A plan that splits only the batch runs the task's functions unchanged: XLA may fuse them.
        if needs_partitioner(task, plan):
            rows = microbatch(self._placement.like, plan, coupled=task.coupled)
            kind = PipelinedBackend if plan.pipeline > 1 else ShardedBackend
            self._sharded = made = kind(task, optimizer, plan, mesh, rows)
            self._state_like = made.state.abstract_state(mesh)
            if self._rows_split:
                self._step_function = self._spread(made.step(), "sd.", "s.")
            else:
                assert isinstance(made, ShardedBackend)
                self._step_function = self._spread(made.step(split=False), "s..", "s.")
        else:
            self._state_like = self._on_mesh(whole)
            fun = gradient(task, plan.precision, plan.batch_dim, plan.remat, ordered=True)
            if not task.coupled:
                total = data_parallel(fun, mesh, plan.microbatches)
            else:
                totals = coupled_totals if self._rows_split else uneven_totals
                total = totals(fun, plan.microbatches)
            self._step_function = make_step(total, whole_update(optimizer))
        self._step_function = self._alone(self._step_function)
        self._kept_like = whole
        self._state_shardings = jax.tree.map(lambda like: like.sharding, self._state_like)
        self._init = jax.jit(self._fresh, out_shardings=self._state_shardings)
        self._predictor = Predictor(self._compile_predict, mesh, plan.pipeline_pieces)
        self._loops: dict[Any, jax.stages.Compiled] = {}

    # --- Training -----------------------------------------------------------------------------

    def init(self, seed: int = 0, *, params: PyTree = None) -> TrainState:
        """Return a fresh state, its parameters created in their sharding.

        The same seed gives the same state under every plan. With `params`, a tree like the task's
        parameters, training starts from them.
        """
        state = self._init(jax.random.key(check_seed(seed)))
        if params is None:
            return state
        # The optimizer's state may depend on the parameters, so it is created from the given ones.
        opt_state = jax.jit(self._optimizer.init)(params)
        fresh = dataclasses.replace(self.to_canonical(state), params=params, opt_state=opt_state)
        return self.place(fresh)

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Update the state once from a batch of at most `batch_size` examples.

        The input state is donated: its memory is reused and it cannot be read again. Metrics are
        device scalars: `loss` and the task's metrics, weighted means over the batch; `grad_norm`;
        `weight`; `examples`; `skipped`, 1 where loss or gradient was not finite and the update was
        left out.

        Raises `BatchError` for a batch or state that does not fit.
        """
        program = self if self._fills else self._for_size(self._placement.check(batch))
        return program._run(program.compiled_step, state, *program._placement.fill(batch))

    def place_batch(self, batch: PyTree) -> Placed:
        """Put a batch on the devices ahead of its step, for `step_placed`. Raises `BatchError`."""
        program = self if self._fills else self._for_size(self._placement.check(batch))
        return program._placement.place(batch)

    def step_placed(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Update the state from a batch that `place_batch` has put on the devices."""
        program = self if self._fills else self._for_size(leading_dim(placed.rows))
        return program._run(program.compiled_step, state, *placed)

    def loop(
        self, state: TrainState, data: PyTree, epoch: Placed, first: int, stop: int
    ) -> tuple[TrainState, Metrics]:
        """Run steps `first` to `stop` of an epoch in one compiled loop over data on the devices.

        **Arguments:**

        - `data`: as `place_data` returned them.
        - `epoch`: as `place_epoch` returned it: rows `(S, N)` and counts `(S,)`.
        - `first`, `stop`: any range of the epoch's S steps; one compiled program runs every range.

        **Returns:** the state, and metrics of shape `(S,)`, zero outside the range.
        """
        if not self._fills and (np.asarray(epoch.size) != self.batch_size).any():
            return self._loop_by_size(state, data, epoch, first, stop)
        compiled = self.compile_loop(data, epoch)
        return self._run(compiled, state, data, *epoch, np.int32(first), np.int32(stop))

    def _loop_by_size(
        self, state: TrainState, data: PyTree, epoch: Placed, first: int, stop: int
    ) -> tuple[TrainState, Metrics]:
        """Run `loop` for a loss that allows no padding: a program for each run of equal sizes."""
        found: dict[str, Any] = {}
        for program, order, start, end in self._by_size(epoch):
            begin, finish = max(first, start), min(stop, end)
            if begin >= finish:
                continue
            state, metrics = program._run(
                program.compile_loop(data, order), state, data, *order,
                np.int32(begin - start), np.int32(finish - start),
            )  # fmt: skip
            for name, values in metrics.items():
                every = found.setdefault(name, np.zeros(len(epoch.size), values.dtype))
                every[begin:finish] = values[begin - start : finish - start]
        return state, found

    def _by_size(self, epoch: Placed) -> Iterator[tuple["Program", Placed, int, int]]:
        """Split an epoch where the batch size changes.

        Yields, for each run of equal sizes: its program, its order, its first step and its end.
        """
        sizes = np.asarray(epoch.size)
        edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
        for start, end in itertools.pairwise(edges):
            program = self._for_size(int(sizes[start]))
            rows = np.asarray(epoch.rows)[start:end, : sizes[start]]
            yield program, program.place_epoch(rows, sizes[start:end]), start, end

    def compile_loop(self, data: PyTree, epoch: Placed) -> jax.stages.Compiled:
        """Return the compiled loop for data and epochs of these shapes."""
        if not self._fills and len(set(np.asarray(epoch.size).tolist())) > 1:
            compiled = [one.compile_loop(data, order) for one, order, *_ in self._by_size(epoch)]
            return compiled[0]
        leaves, structure = jax.tree.flatten((data, *epoch))
        key = (structure, *(leaf.shape for leaf in leaves))
        if key not in self._loops:
            loop = make_loop(self._step_function, self._placement.sharding)
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                (data, *epoch),
            )
            self._loops[key] = (
                jax.jit(loop, donate_argnums=0, out_shardings=self._out_shardings)
                .lower(self._state_like, *like, self._count(), self._count())
                .compile()
            )
        return self._loops[key]

    def place_epoch(self, rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]) -> Placed:
        """Put the order of an epoch on the devices, for `loop`.

        **Arguments:**

        - `rows`: `(S, B)`, the index of the example in each row of each step.
        - `counts`: `(S,)`, how many rows of each step are real; padding repeats them.
        """
        # Row i of a step holds example i mod count, as in `rows.py`.
        places = np.arange(self._placement.rows) % counts[:, None]
        rows = np.take_along_axis(rows, places, axis=1).astype(np.int32)
        columns = jax.sharding.NamedSharding(
            self.mesh, P(None, "data") if self._rows_split else P()
        )
        return Placed(
            jax.device_put(rows, columns),
            jax.device_put(counts.astype(np.int32), replicated(self.mesh)),
        )

    def place_data(self, data: PyTree) -> PyTree:
        """Put a whole data set on every device of the mesh, for `loop`. Raises `BatchError`."""
        return device_data(data, replicated(self.mesh))

    def place(self, state: TrainState) -> TrainState:
        """Put a state from elsewhere (a checkpoint, another plan) on this program's devices.

        Raises `BatchError` where structure, shapes or dtypes differ from `canonical_shapes`.
        """
        check_state(state, self._kept_like)
        # Copy: the first step donates the state, and the caller's arrays must stay valid.
        state = jax.device_put(jax.tree.map(jnp.copy, state), self._kept_shardings)
        if self._sharded is not None and self._sharded.state.is_padded:
            state = jax.jit(self._sharded.state.pad, out_shardings=self._state_shardings)(state)
        return state

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the state with unpadded shapes, as any plan accepts it, for checkpoints.

        The arrays are unchanged except where the plan padded a dim that its shards do not divide.
        """
        return state if self._sharded is None else self._sharded.state.unpad(state)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Pad a state that has the shapes of `to_canonical`; return any other state unchanged."""
        if self._sharded is None or not self._sharded.state.is_padded:
            return state
        # This runs in every step, so it compares shapes only; paths are formatted for errors alone.
        return self.place(state) if same_shapes(state, self._kept_like) else state

    # --- Inference ----------------------------------------------------------------------------

    def predict(
        self, state: TrainState, inputs: PyTree | Iterable[PyTree], *, chunk: int | None = None
    ) -> Any:
        """Return outputs of the task's `predict` for any number of inputs, as NumPy arrays.

        **Arguments:**

        - `inputs`: a tree of arrays with a common leading dim, or an iterable of such trees (a
          generator, a list), for which the result is an iterator with one output per item.
        - `chunk`: rows at a time, default `batch_size`. The last chunk is padded and its outputs
          cut, so that there is one compilation.

        While a chunk computes, the outputs of the previous one are copied to the host.
        """
        state = self.from_canonical(state)
        states = (state.params, state.model_state)
        return self._predictor(states, inputs, self.batch_size if chunk is None else chunk)

    def _compile_predict(self, rows: PyTree) -> jax.stages.Compiled:
        if self._sharded is not None:
            function = self._spread(self._sharded.predict(), "p.d", "d")
        else:
            function = self._alone(make_predict(self.task, self.plan.precision, self.mesh))
        like = self._state_like
        return (
            jax.jit(function, out_shardings=split_rows(self.mesh))
            .lower(like.params, like.model_state, rows)
            .compile()
        )

    def evaluate(self, state: TrainState, data: PyTree | Iterable[PyTree]) -> dict[str, float]:
        """Return weighted means of loss and metrics over all examples of `data`, each counted once.

        `data` is a tree of arrays with any leading dim, or an iterable of such trees. Sums over
        chunks are in float64 on the host.
        """

        state = self.from_canonical(state)

        def run(placed: Placed) -> Totals:
            part = self._compiled_evaluate(state.params, state.model_state, *placed)
            self._in_flight.started(part.loss)
            return part

        means = weighted_means(run, self._evaluation, data)
        return {name: float(mean) for name, mean in means.items()}

    def check_evaluation(self, data: PyTree | Iterable[PyTree]) -> None:
        """Raise the errors of `evaluate` for these data, without compiling or computing."""
        check = within(self.mesh, check_evaluation)
        check(self.task, self.plan.precision, self._evaluation, self._kept_like, data)

    @functools.cached_property
    def _compiled_evaluate(self) -> jax.stages.Compiled:
        size = self.mesh.shape["data"]
        if self._sharded is not None:
            function = self._spread(self._sharded.evaluate(), "p.d.", ".")
        else:
            evaluate = evaluation(self.task, self.plan.precision)
            function = self._alone(device_evaluation(evaluate, size))
            if size > 1:
                function = self._spread(function, "..d.", ".")
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
            jax.jit(self._step_function, donate_argnums=0, out_shardings=self._out_shardings)
            .lower(self._state_like, self._placement.abstract(), self._count())
            .compile()
        )

    def hlo(self) -> str:
        """Return the text of the compiled step."""
        return self.compiled_step.as_text() or ""

    def collectives(self) -> list[compiled_hlo.Collective]:
        """Return the collectives of one step, read from the compiled program."""
        return compiled_hlo.collectives(self.hlo(), self.mesh)

    def planned_collectives(self) -> list[Record]:
        """Return the collectives that the partitioner inserts in one step, before XLA compiles.

        Empty for a plan that splits nothing but the batch. Collectives in a `jax.shard_map` of the
        model's code are not included.
        """
        if self._sharded is None:
            return []
        self.compiled_step  # noqa: B018  traced here
        return self._sharded.collectives()

    @property
    def shardings(self) -> list[ParameterInfo]:
        """The sharding of each parameter and of its optimizer state."""
        params = tree.named_leaves(self._kept_like.params)
        if self._sharded is None:
            return [ParameterInfo.whole(path, leaf) for path, leaf in params.items()]
        return self._sharded.state.parameters()

    def memory(self) -> compiled_hlo.Memory:
        """Return bytes per device during a step, as the compiler reports them."""
        return compiled_hlo.memory(self.compiled_step)

    @property
    def state_shapes(self) -> TrainState:
        """The state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._state_like

    @property
    def canonical_shapes(self) -> TrainState:
        """The state that `to_canonical` returns, as a tree of `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            self._kept_like,
            self._kept_shardings,
        )

    # --- Inside -------------------------------------------------------------------------------

    def _run(self, compiled: jax.stages.Compiled, state: TrainState, *args: Any) -> Any:
        if state.step.is_deleted():
            raise errors.state_was_donated()
        state = self.from_canonical(state)
        try:
            state, metrics = compiled(state, *args)
            self._in_flight.started(metrics["loss"])
            return state, metrics
        except (TypeError, ValueError):
            check_state(state, self._state_like)
            check_place(state, self._state_like)
            raise

    def _reads_mask(self, whole: TrainState) -> bool:
        return reads_mask(self.task, whole, self._placement.like, within(self.mesh, self.task.loss))

    def _for_size(self, size: int) -> "Program":
        """Return this program, or one for exactly `size` rows if the loss ignores its mask."""
        if size == self.batch_size:
            return self
        if size not in self._of_size:
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype),
                self._placement.like,
            )
            one = Program(self.task, self._optimizer, self.plan, like, self.mesh, exact=True)
            unit = self.plan.data * self.plan.microbatches
            warnings.warn(mask_not_read(size, self.batch_size, unit), MaskWarning, stacklevel=3)
            self._of_size[size] = one
        return self._of_size[size]

    def _fresh(self, key: Any) -> TrainState:
        state = new_state(self.task, self._optimizer, key)
        return state if self._sharded is None else self._sharded.state.pad(state)

    @property
    def _kept_shardings(self) -> PyTree:
        """Shardings of the canonical state: the program's, but replicated where a dim is padded."""
        return jax.tree.map(
            lambda kept, own: own.sharding if kept.shape == own.shape else replicated(self.mesh),
            self._kept_like,
            self._state_like if self._sharded is None else self._sharded.state.tree_like(self.mesh),
        )

    @property
    def _out_shardings(self) -> tuple[Any, Any]:
        """Output shardings of a step or a loop: the input state's, and replicated metrics."""
        return self._state_shardings, replicated(self.mesh)

    def _alone(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """On a mesh of one device, trace `fun` inside the mesh: a model may name its axes."""
        return within(self.mesh, fun) if self.mesh.size == 1 else fun

    def _spread(self, fun: Callable[..., Any], takes: str, gives: str) -> Callable[..., Any]:
        """Run `fun` on every device, its arguments and results split by kind.

        Letters of `takes` and `gives`: `s`, state; `p`, parameters; `d`, rows split over `data`;
        `.`, replicated.
        """
        specs = self._sharded.state.specs if self._sharded is not None else None
        kinds = {"s": specs, "p": specs and specs.params, "d": P("data"), ".": P()}
        # A plan that splits only the batch leaves the other axes to the partitioner.
        axes = {"data"} if self._sharded is None else set(self.mesh.axis_names)
        return on_devices(fun, self.mesh, axes, kinds, takes, gives)

    def _on_mesh(self, like: PyTree) -> PyTree:
        whole = replicated(self.mesh)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), like
        )

    def _count(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32)
