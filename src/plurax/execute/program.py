"""A compiled task, optimizer and plan: one network or a population, for one batch size.

`Program` places states and batches on the devices, and compiles each function of a `StepFunctions`
(`Network` for one network, `Population` for many) when it is first called; `compile`, the step.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PyTree

from plurax import errors
from plurax import hlo as compiled_hlo
from plurax.collective import Collective
from plurax.distributed.global_arrays import put
from plurax.execute import evaluate, lowering
from plurax.execute.array_data import ArrayData
from plurax.execute.autotune import Candidate
from plurax.execute.batch_buffer import Buffers
from plurax.execute.choose_chunk import choose_plan, measure_plan
from plurax.execute.coupling import check_evaluate, check_predict, may_pad
from plurax.execute.dispatch_limiter import DispatchLimiter
from plurax.execute.epoch_loop import equal_sizes
from plurax.execute.gradient import Totals
from plurax.execute.hyperparams import Hyperparams
from plurax.execute.initial_state import check_stored, new_state, replace_params, same_shapes
from plurax.execute.layouts.parameter_info import ParameterInfo
from plurax.execute.layouts.state_layout import place_start
from plurax.execute.mask import mask_not_read
from plurax.execute.network import Network
from plurax.execute.placement import Placed, Placement, device_data, leading_dim
from plurax.execute.population import HyperFn, Population, example_network
from plurax.execute.predict import Predictor
from plurax.execute.replicas import ReplicaCheck
from plurax.execute.step import Gradients, Metrics
from plurax.execute.step_functions import StepFunctions
from plurax.execute.summary import as_table, in_a_line, summary
from plurax.members import Members
from plurax.mesh import replicated, split_rows, within
from plurax.plan import Plan
from plurax.state import TrainState, check_donatable, check_not_donated
from plurax.task import Task
from plurax.tree import with_rows
from plurax.user_frames import warn
from plurax.validate import check_seed


class Program:
    """The compiled functions of one network or of a population; `plurax.compile` returns it.

    Of a population every leaf of the state, of the metrics and of the outputs has a leading dim of
    members.

    **Attributes:** `task`, as given; `plan`, for a population with its `chunk` and `batch_dim`
    chosen; `members`, None for one network; `mesh`, the `jax.sharding.Mesh` of the plan;
    `batch_size`, the number of examples in the largest batch a step takes; `data`, the shapes and
    the order of the arrays that members read themselves, or None; `chose`, whether a population's
    plan left `chunk` or `batch_dim` open.
    """

    def __init__(
        self,
        task: Task | HyperFn,
        optimizer: Any,
        plan: Plan,
        batch: PyTree,
        mesh: Mesh,
        members: Members | None = None,
        data: ArrayData | None = None,
        *,
        exact: bool = False,
    ) -> None:
        if members is None and plan.member > 1:
            raise errors.plan_has_members(plan.member)
        if members and members.hyper and isinstance(task, Task) and hasattr(optimizer, "update"):
            raise errors.members_need_a_function("optimizer")
        self.task, self.mesh, self.members, self._optimizer = task, mesh, members, optimizer
        self.batch_size = leading_dim(batch)
        rows = plan.padded_size(self.batch_size)
        # An `exact` program adds no padding: rows that do not divide go to every device.
        split = rows == self.batch_size or not exact
        sharding = split_rows(mesh) if split else replicated(mesh)
        self._placement = Placement(batch, rows if split else self.batch_size, sharding)
        self._evaluation = evaluate.evaluation_placement(batch, plan, mesh)
        self._in_flight = DispatchLimiter(mesh)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._of_size: dict[int, Program] = {}
        self._example = example_network(task, optimizer, members)
        # A coupled loss (one that mixes examples, such as batch norm) must ignore padding rows by
        # its mask; if it does not, only batches that need no padding are valid.
        like = self._placement.like
        self._pads = exact or may_pad(self._example.task, self._new_state_like, like, mesh)
        # A pipeline needs microbatches of one size: it can neither skip padding nor replicate rows.
        odd = plan.pipeline > 1 and not split
        if odd or (not self._pads and rows != self.batch_size):
            raise errors.mask_not_read(self.batch_size, plan.data * plan.microbatches)
        # Shapes alone: a cached program must not keep anyone's data.
        self.data = None if data is None else data.abstract()
        self.chose = False
        if members is None:
            assert isinstance(task, Task)
            self._functions: StepFunctions = Network(task, optimizer, plan, mesh, like, sharding)
        else:
            if data is not None and data.ragged == "pad":
                self._check_size(data.draws % self.batch_size)
            self._functions = choose_plan(self._population, plan, self._lower_most_run)
            self.chose = self._functions.plan != plan
        parts = plan.forward_microbatches
        self._predictor = Predictor(self._trace_predict, mesh, parts, self.batch_size)

    @property
    def plan(self) -> Plan:
        """The plan; for a population with its `chunk` and `batch_dim` chosen."""
        return self._functions.plan

    def of(self, members: Members) -> "Program":
        """Return a program with this program's plan for other members.

        For as many members as this program has, with the same hyperparameter names and dtypes, it
        shares the compiled programs. Raises `MembersError` for members of another resampling where
        the members read data themselves, and where this program has no members.
        """
        mine, functions = self._members, self._functions
        assert isinstance(functions, Population)
        if self.data is not None and members.resample != self.data.resample:
            raise errors.members_read_otherwise(self.data.resample, members.resample)
        if members.count == mine.count and members.hyper_dtypes == mine.hyper_dtypes:
            # Share everything compiled; only the arrays of the members differ.
            other = copy.copy(self)
            other.members, other._functions = members, functions.of(members)
            return other
        other = Program(
            self.task, self._optimizer, self.plan, self._placement.like, self.mesh, members,
            self.data,
        )  # fmt: skip
        other.chose = self.chose
        return other

    # --- States -------------------------------------------------------------------------------

    def init(self, seed: int | None = None, *, params: PyTree = None) -> TrainState:
        """Return a fresh state, its parameters created in their sharding.

        The same seed (default 0) gives the same state under every plan. Training starts from
        `params`, a tree like the task's. A member's state equals that of one network with its seed.

        Raises `MembersError` for a seed or parameters where there are members.
        """
        if self.members is not None:
            if seed is not None or params is not None:
                raise errors.members_start_alone("seed" if params is None else "params")
            return self._compiled_init(*self._functions.arguments, self._start)
        key = jax.random.key(check_seed(0 if seed is None else seed))
        state: TrainState = self._init(key, self._start)
        if params is None:
            return state
        return self.place(replace_params(self.to_canonical(state), *self._example, params))

    @property
    def _start(self) -> dict[str, jax.Array]:
        return place_start(self._example.task, self._functions.layout, self.mesh)

    @functools.cached_property
    def _init(self) -> Any:
        return jax.jit(self._functions.init, out_shardings=self._state_shardings)

    @property
    def _compiled_init(self) -> jax.stages.Compiled:
        if "init" not in self._compiled:
            arguments = lowering.abstract((*self._functions.arguments, self._start))
            lowered = {"init": self._init.lower(*arguments)}
            if self.data is not None:  # the loop runs next
                data = lowering.abstract_data(self.data.arrays, self.mesh)
                if (key := lowering.loop_key(data, ())) not in self._compiled:
                    lowered[key] = lowering.lower_loop(self._functions, data)
            self._compiled |= lowering.compile_all(lowered)
        return self._compiled["init"]

    def place(self, state: TrainState) -> TrainState:
        """Put a state from elsewhere (a checkpoint, another plan) on this program's devices.

        Raises `BatchError` where structure, shapes or dtypes differ from `canonical_shapes`, and
        `MembersError` for the state of one network or of another number of members.
        """
        check_not_donated(state)
        layout = self._functions.layout
        # Copy: the first step donates the state, and the caller's arrays must stay valid.
        copied = jax.tree.map(jnp.copy, state)
        if same_shapes(copied, self.state_shapes):
            return put(copied, self._state_shardings)
        layout.check(copied)
        return self._stored(put(copied, layout.canonical_shardings(self.mesh)))

    @functools.cached_property
    def _stored(self) -> Any:
        return jax.jit(self._functions.layout.from_canonical, out_shardings=self._state_shardings)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the state with unpadded shapes, as any plan accepts it, for checkpoints.

        The arrays are unchanged except where the plan padded a dim that its shards do not divide.
        """
        check_not_donated(state)
        return self._functions.layout.to_canonical(state)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Pad a state that has the shapes of `to_canonical`; return any other state unchanged."""
        # This runs in every step, so it compares shapes only; paths are formatted for errors alone.
        layout = self._functions.layout
        if layout.is_canonical or not same_shapes(state, layout.canonical):
            return state
        return self.place(state)

    @functools.cached_property
    def replicas(self) -> ReplicaCheck:
        """The comparison of what several devices hold alike in a state."""
        return ReplicaCheck(self._functions.layout, self.mesh)

    @functools.cached_property
    def hyperparams(self) -> Hyperparams:
        """What `optax.inject_hyperparams` keeps in the optimizer's state, to read and to set."""
        return Hyperparams(self._functions.layout, self.members.count if self.members else None)

    # --- Training -----------------------------------------------------------------------------

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Update the state once from a batch of at most `batch_size` examples.

        Every member updates from the same batch. The input state is donated: its memory is reused
        and it cannot be read again. Metrics are device scalars, or `(members,)`: `loss` and the
        task's metrics, weighted means over the batch; `grad_norm`; `weight`; `examples`; `skipped`,
        1 where loss or gradient was not finite and the update was left out. A member with such a
        step keeps its last state from then on. On CPU a NumPy batch is read after this returns:
        where a loader reuses its memory, take `place_batch`, which copies, and `step_placed`.

        Raises `BatchError` for a batch or state that does not fit.
        """
        program = self if self._pads else self._for_size(self._placement.check(batch))
        return program._step(state, program._placement.fill(batch))

    def gradients(self, state: TrainState, batch: PyTree, *, first: int | None = None) -> Gradients:
        """Return the first half of `step`: the sums over a batch, reduced over devices.

        The state is not donated. The mean gradient is `grads / weight`; under ZeRO it is sharded,
        and in a pipeline packed into the buffers of the stages. Of one network `batch` may be a
        part of a step's batch, `first` the index of its first example: sums of parts add up.
        """
        gradients, arguments = self.gradients_call(state, batch, first)
        return gradients(*arguments)

    def gradients_call(self, state: TrainState, batch: PyTree, first: int | None) -> Any:
        """Return the jitted function and the arguments of `gradients`."""
        check_not_donated(state)
        program = self if self._pads else self._for_size(self._placement.check(batch))
        part = () if first is None else (np.int32(first),)
        arguments = (*self._functions.arguments, *program._placement.fill(batch), *part)
        return program._halves[0], (self.from_canonical(state), *arguments)

    def apply(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        """Return the second half of `step`: the state, updated from `gradients`, and the metrics.

        The state is donated. `apply(state, gradients(state, batch))` gives the state of
        `step(state, batch)`, bit for bit. (Of a pipeline the metric `grad_norm` may differ in its
        last bit: XLA adds up the stages' squares in another order.)
        """
        check_not_donated(state)
        _, apply = self._halves
        arguments = (*self._functions.arguments, gradients)
        state, metrics = apply(self.from_canonical(state), *arguments)
        return state, metrics if self.members is None else self._cut(metrics)

    @functools.cached_property
    def _halves(self) -> tuple[Any, Any]:
        functions = self._functions
        return jax.jit(functions.gradients), lowering.jitted_update(functions, functions.apply)

    def place_batch(self, batch: PyTree, *, local: bool = False) -> Placed:
        """Put a batch on the devices ahead of its step, for `step_placed`. Raises `BatchError`.

        NumPy arrays are copied. Where it is `local`, each process gives its own rows, equally many.
        """
        if local:
            return self._placement.place_own(batch)
        program = self if self._pads else self._for_size(self._placement.check(batch))
        return program._placement.place(batch)

    def step_placed(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Update the state from a batch that `place_batch` has put on the devices."""
        program = self if self._pads else self._for_size(leading_dim(placed.rows))
        return program._step(state, placed)

    @functools.cached_property
    def buffers(self) -> Buffers | None:
        """Memory for small batches, several of which a call of `loop` takes; None: it cannot."""
        alone = self.members is None and self._pads  # else each size needs a program of its own
        return Buffers.of(self._placement, self.mesh) if alone else None

    def _step(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        state, metrics = self._run(self.compiled_step, state, *placed)
        return state, metrics if self.members is None else self._cut(metrics)

    def loop(
        self, state: TrainState, data: PyTree, order: tuple[Any, ...], first: int, stop: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Run steps `first` to `stop` in one compiled loop over data on the devices.

        **Arguments:**

        - `data`: as `place_data` returned them.
        - `order`: of an epoch, as `place_epoch` returned it; `()` for members that read data
          themselves, each in its own order.
        - `first`, `stop`: steps of that epoch, or for members steps from the start of training, at
          most `MAX_STEPS_PER_CALL` of them. One compiled program runs every range.

        **Returns:** the state, and metrics `(S,)` of the epoch's S steps, zero outside the range;
        of members `(slots, MAX_STEPS_PER_CALL)`, of which the first `stop - first` columns are set.
        """
        if order and not self._pads and (np.asarray(order[1]) != self.batch_size).any():
            return self._loop_by_size(state, data, order, first, stop)
        compiled = self.compile_loop(data, order)
        return self._run(compiled, state, data, *order, np.int32(first), np.int32(stop))

    def _loop_by_size(
        self, state: TrainState, data: PyTree, epoch: tuple[Any, ...], first: int, stop: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Run `loop` for a loss that allows no padding: a program for each run of equal sizes."""
        found: dict[str, Any] = {}
        for program, order, start, end in self._by_size(epoch):
            begin, finish = max(first, start), min(stop, end)
            if begin >= finish:
                continue
            state, metrics = program.loop(state, data, order, begin - start, finish - start)
            for name, values in metrics.items():
                every = found.setdefault(name, np.zeros(len(epoch[1]), values.dtype))
                every[begin:finish] = values[begin - start : finish - start]
        return state, found

    def _by_size(self, epoch: tuple[Any, ...]) -> Iterator[tuple["Program", Placed, int, int]]:
        """Yield, for each run of equal batch sizes of an epoch: its program, order, start, end."""
        for size, rows, start, end in equal_sizes(*epoch):
            program = self._for_size(size)
            yield program, program.place_epoch(rows, np.full(end - start, size)), start, end

    def compile_loop(self, data: PyTree, order: tuple[Any, ...] = ()) -> jax.stages.Compiled:
        """Return the compiled loop for data and orders of these shapes."""
        if order and not self._pads and len(set(np.asarray(order[1]).tolist())) > 1:
            first, *_ = [one.compile_loop(data, part) for one, part, *_ in self._by_size(order)]
            return first
        data = lowering.abstract_data(data, self.mesh)
        key = lowering.loop_key(data, order)
        if key not in self._compiled:
            self._compiled[key] = lowering.lower_loop(self._functions, data, order).compile()
        return self._compiled[key]

    def place_epoch(self, rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]) -> Placed:
        """Put the order of an epoch on the devices, for `loop`.

        **Arguments:**

        - `rows`: `(S, B)`, the index of the example in each row of each step.
        - `counts`: `(S,)`, how many rows of each step are real; padding repeats them.
        """
        return self._placement.place_order(rows, counts)

    def place_data(self, data: PyTree, *, spread: bool = False) -> PyTree:
        """Put a data set on every device, for `loop`, or `spread` its rows over them."""
        return device_data(data, split_rows(self.mesh) if spread else replicated(self.mesh))

    # --- Inference ----------------------------------------------------------------------------

    def predict(
        self, state: TrainState, inputs: PyTree | Iterable[PyTree], *,
        chunk: int | None = None, local: bool = False,
    ) -> Any:  # fmt: skip
        """Return outputs of the task's `predict` for any number of inputs, as NumPy arrays.

        **Arguments:**

        - `inputs`: a tree of arrays, or what becomes one (a DataFrame); or an iterable of trees (a
          generator, a DataLoader), for which the result is an iterator with one output per item.
        - `chunk`: rows at a time, default `batch_size`, for many inputs more while no value on a
          device is larger than 4 MiB. The last one is padded: there is one compilation. With fewer
          inputs it is the next power of two.
        - `local`: each of several processes gives arrays of its own, and gets their outputs alone.

        **Returns:** leaves `(N, ...)`, or of a population `(members, N, ...)`.
        """
        states = (*self._inference_states(state), *self._functions.arguments)
        if local:
            chunk = chunk or self.batch_size
            return self._predictor.own(states, inputs, chunk, self.members is None)
        outputs = self._predictor(states, inputs, chunk)
        if self.members is None:
            return outputs
        many = isinstance(outputs, Iterator)

        def members_first(outputs: PyTree) -> PyTree:
            return self._cut(jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), outputs))

        return map(members_first, outputs) if many else members_first(outputs)

    def _trace_predict(self, rows: PyTree) -> jax.stages.Traced:
        check_predict(self._example.task, self._new_state_like, rows, self.mesh)
        predict = jax.jit(self._functions.predict, out_shardings=self._functions.outputs_sharding)
        return predict.trace(*self._abstract_inference(), rows)

    def evaluate(self, state: TrainState, data: PyTree | Iterable[PyTree]) -> dict[str, Any]:
        """Return weighted means of loss and metrics over all examples of `data`, each counted once.

        `data` is a tree of arrays with any leading dim, or an iterable of such trees. Means are
        floats, or of a population arrays `(members,)`; metrics over the data may be arrays.
        """
        states = (*self._inference_states(state), *self._functions.arguments)

        def run(placed: Placed) -> Totals:
            check_not_donated(states)
            part = self._compiled_evaluate(*states, *placed)
            self._in_flight.started(part.loss)
            return part

        return evaluate.evaluate_data(run, self._evaluation, data, self._finish, self.members)

    @functools.cached_property
    def _finish(self) -> dict[str, Any]:
        find, task = within(self.mesh, evaluate.finish_of), self._example.task
        return find(task, self.plan.precision, self._evaluation, self._new_state_like)

    def check_evaluation(self, data: PyTree | Iterable[PyTree]) -> None:
        """Raise the errors of `evaluate` for these data, without compiling or computing."""
        check, task = within(self.mesh, evaluate.check_evaluation), self._example.task
        check(task, self.plan.precision, self._evaluation, self._new_state_like, data)

    def metric_names(self, *, evaluated: bool) -> list[str]:
        """Return the names of the metrics in the row of an epoch; `evaluated`, `eval_...` too."""
        names, task = within(self.mesh, evaluate.metric_names), self._example.task
        return names(task, self.plan.precision, self._evaluation, self._new_state_like, evaluated)

    @property
    def _compiled_evaluate(self) -> jax.stages.Compiled:
        if "evaluate" not in self._compiled:
            lower, rows = jax.jit(self._functions.evaluate).lower, self._evaluation.abstract()
            check_evaluate(self._example.task, self._new_state_like, rows, self.mesh)
            arguments = *self._abstract_inference(), rows, lowering.COUNT
            self._compiled["evaluate"] = lower(*arguments).compile()
        return self._compiled["evaluate"]

    def _inference_states(self, state: TrainState) -> tuple[PyTree, PyTree]:
        state = self.from_canonical(state)
        if not same_shapes(state, self.state_shapes):
            self._functions.layout.check(state)
        return state.params, state.model_state

    def _abstract_inference(self) -> tuple[Any, ...]:
        like = self.state_shapes
        return like.params, like.model_state, *lowering.abstract(self._functions.arguments)

    # --- Reading the compiled program ---------------------------------------------------------

    @property
    def compiled_step(self) -> jax.stages.Compiled:
        """The compiled step: `(state, rows, count) -> (state, metrics)`; of a population
        `(state, members, rows, count)`."""
        if "step" not in self._compiled:
            self._compiled["step"] = lowering.lower_step(self._functions, self._placement).compile()
        return self._compiled["step"]

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; of members that read data themselves the loop, once compiled."""
        if self.data is None or self.members is None:
            return self.compiled_step
        key = lowering.loop_key(lowering.abstract_data(self.data.arrays, self.mesh), ())
        return self._compiled.get(key) or self.compiled_step

    def hlo(self) -> str:
        """Return the text of `compiled`."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[Collective]:
        """Return the collectives of one compiled step; none is over the mesh axis `member`."""
        return compiled_hlo.collectives(self.hlo(), self.mesh)

    def planned_collectives(self) -> list[Collective]:
        """Return the collectives that the partitioner inserts in one step, before XLA compiles.

        Those in a `jax.shard_map` of the model's code are not included.
        """
        self.compiled_step  # noqa: B018  traced here
        return self._functions.backend.planned_collectives()

    @property
    def shardings(self) -> list[ParameterInfo]:
        """The sharding of each parameter and of its optimizer state; of one member."""
        return self._functions.layout.parameters()

    def memory(self) -> compiled_hlo.Memory:
        """Return bytes per device during a step, as the compiler reports them."""
        return compiled_hlo.memory(self.compiled)

    @functools.cached_property
    def state_shapes(self) -> TrainState:
        """The state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._functions.layout.abstract(self.mesh)

    @property
    def canonical_shapes(self) -> TrainState:
        """The state that `to_canonical` returns, as a tree of `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            self._functions.layout.canonical,
            self._functions.layout.canonical_shardings(self.mesh),
        )

    def __repr__(self) -> str:
        return in_a_line(summary(self, self._compiled.get("step")))

    def _repr_html_(self) -> str:
        return as_table(summary(self, self._compiled.get("step")))

    def measure(self, plan: Plan, arrays: PyTree) -> tuple[Plan, list[Candidate]]:
        """Measure a plan's open choices by timing the loop over `arrays`, or if None the step.

        **Returns:** the plan with its choices, and every candidate measured.
        """
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._placement.like)
        data = self._placement.place(zeros) if arrays is None else (self.place_data(arrays),)
        looped = self.data is not None
        return measure_plan(self._population, plan, self._lower_most_run, data, looped=looped)

    def _population(self, plan: Plan) -> Population:
        like, reads = self._placement.like, self.data.epoch_spec if self.data else None
        return Population(self.task, self._optimizer, plan, self.mesh, like, self._members, reads)

    def _lower_most_run(self, functions: StepFunctions) -> jax.stages.Lowered:
        """Lower the loop over the members' data, or without data the step."""
        if self.data is None:
            return lowering.lower_step(functions, self._placement)
        return lowering.lower_loop(functions, lowering.abstract_data(self.data.arrays, self.mesh))

    # --- Inside -------------------------------------------------------------------------------

    @property
    def _members(self) -> Members:
        if self.members is None:
            raise errors.program_of_one_network()
        return self.members

    def _run(self, compiled: jax.stages.Compiled, state: TrainState, *args: Any) -> Any:
        if self.mesh.size > 1 or getattr(state.step, "is_deleted", bool)():
            check_donatable(state)  # of one device the program raises, and looks cost 4% of a step
        state = self.from_canonical(state)
        try:
            state, metrics = compiled(state, *self._functions.arguments, *args)
        except (TypeError, ValueError, RuntimeError) as error:
            if not isinstance(error, jax.errors.JaxRuntimeError):  # which may be out of memory
                check_donatable(state)
            if not same_shapes(state, self.state_shapes) and self.members is not None:
                self._functions.layout.check(state)
            check_stored(state, self.state_shapes)
            lowering.check_constants(error)
            raise
        self._in_flight.started(metrics["loss"])
        return state, metrics

    def _cut(self, values: PyTree) -> PyTree:
        """Drop the members that fill the slots, from leaves `(slots, ...)`."""
        return jax.tree.map(lambda leaf: leaf[: self._members.count], values)

    def _for_size(self, size: int) -> "Program":
        """Return this program, or one for exactly `size` rows if the loss ignores its mask."""
        self._check_size(size)
        if size == self.batch_size:
            return self
        if size not in self._of_size:
            like = with_rows(self._placement.like, size)
            one = Program(self.task, self._optimizer, self.plan, like, self.mesh, exact=True)
            said = mask_not_read(size, self.batch_size, self.plan.data * self.plan.microbatches)
            warn(said, errors.MaskWarning)
            self._of_size[size] = one
        return self._of_size[size]

    def _check_size(self, size: int) -> None:
        """Raise `BatchError` where members' batch of this size needs padding."""
        if self.members is not None and not self._pads and size not in (0, self.batch_size):
            raise errors.mask_not_read_by_members(size, self.batch_size)

    @functools.cached_property
    def _new_state_like(self) -> TrainState:
        """The state of one network, abstract."""
        return jax.eval_shape(lambda: new_state(*self._example, jax.random.key(0)))

    @property
    def _state_shardings(self) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.sharding, self.state_shapes)
