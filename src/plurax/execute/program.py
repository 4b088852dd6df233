"""A compiled task, optimizer and plan: one network or a population, for one batch size.

`Program` places states and batches on the devices, and compiles each function of a `StepFunctions`
(`Network` for one network, `Population` for many) when it is first called; `compile`, the step.
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, PyTree

from plurax import errors
from plurax.collective import Collective
from plurax.distributed.global_arrays import is_absent, one_at_a_time
from plurax.execute.array_data import ArrayData
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.choose import needs_partitioner
from plurax.execute.batch_buffer import Buffers
from plurax.execute.choose_chunk import Candidate, choose_plan, measure_plan
from plurax.execute.compiled_functions import CompileRecord, lower_most_run
from plurax.execute.compiler_options import checked_options, try_options
from plurax.execute.coupling import may_pad
from plurax.execute.evaluate import Evaluator
from plurax.execute.hyperparams import Hyperparams
from plurax.execute.initial_state import new_state, replace_params
from plurax.execute.layouts.state_layout import place_start
from plurax.execute.network import Network
from plurax.execute.placement import Placed, Placement, device_data
from plurax.execute.population import HyperFn, Population, example_network
from plurax.execute.predict import Predictor
from plurax.execute.recorder import TracedStep, read_traced, record_network
from plurax.execute.replicas import ReplicaCheck
from plurax.execute.runner import ExactRunner, PaddedRunner
from plurax.execute.step import Gradients, Metrics
from plurax.execute.step_functions import StepFunctions
from plurax.execute.summary import as_table, in_a_line, summary
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import Memory, memory
from plurax.members import Members
from plurax.mesh import replicated, split_rows
from plurax.plan import Plan
from plurax.sharding.parameter_info import ParameterInfo
from plurax.state import TrainState, check_not_donated
from plurax.task import Task
from plurax.trace.collectives import planned_collectives
from plurax.tree import with_rows
from plurax.validate import check_seed


class Program:
    """The compiled functions of one network or of a population; `plurax.compile` returns it.

    Of a population every leaf of the state, of the metrics and of the outputs has a leading dim of
    members.

    **Attributes:** `task`, as given; `plan`, for a population with its `chunk` and `batch_dim`
    chosen; `members`, None for one network; `mesh`, the `jax.sharding.Mesh` of the plan;
    `batch_size`, the number of examples in the largest batch a step takes; `data`, the shapes and
    the order of the arrays that members read themselves, or None; `compiler_options`, with which
    all of it is compiled; `chose`, whether a population's plan left `chunk` or `batch_dim` open.
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
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        if members is None and plan.member > 1:
            raise errors.plan_has_members(plan.member)
        if members and members.hyper and isinstance(task, Task) and hasattr(optimizer, "update"):
            raise errors.MembersError(
                "Members(hyper=...) gives hyperparameters, and neither the task nor the optimizer "
                "is a function of them. Write the optimizer as a function: "
                "def optimizer(hyper): return optax.adam(hyper['learning_rate'])."
            )
        self.task, self.mesh, self.members, self._optimizer = task, mesh, members, optimizer
        self._absent = is_absent(mesh.devices.flat[0])
        self._options = checked_options(compiler_options)
        try_options(self._options, mesh)
        # Shapes alone: a cached program must not keep anyone's data.
        self.data = None if data is None else data.abstract()
        self._placement = Placement.of(batch, plan, mesh)
        self.batch_size = self._placement.size
        self._example = example_network(task, optimizer, members)
        like = jax.eval_shape(lambda: new_state(*self._example, jax.random.key(0)))
        # A coupled loss (one that mixes examples, such as batch norm) must ignore padding rows by
        # its mask; if it does not, only batches that need no padding are valid.
        pads = may_pad(self._example.task, like, self._placement.like, mesh)
        unit = plan.parts
        if not pads and self._placement.rows != self.batch_size:
            raise errors.mask_not_read(self.batch_size, unit)
        self._functions = self._choose(plan, pads=pads)
        self.chose = self.plan != plan
        runner = PaddedRunner(self._functions, self._placement, self.data)
        self._compiled, self._states = runner.compiled, runner.states
        self._runner = runner if pads else ExactRunner(runner, self._of_size, unit)
        inference = (self._functions, self._example.task, like)
        self._evaluator = Evaluator(*inference, batch, runner.in_flight)
        self._predictor = Predictor(*inference, self.batch_size)

    def _choose(self, plan: Plan, *, pads: bool) -> StepFunctions:
        """Return the functions of one network, or of members, with what their plan leaves open."""
        if self.members is None:
            like, sharding = self._placement.like, self._placement.sharding
            return self._network(plan, like, sharding)
        if not pads and self.data is not None and self.data.ragged == "pad":
            rest = self.data.draws % self.batch_size
            if rest:
                raise errors.mask_not_read_by_members(rest, self.batch_size)
        return choose_plan(self._population, plan, self._lower_most_run)

    def _of_size(self, size: int) -> PaddedRunner:
        """Return a runner for batches of exactly `size` rows, of one network."""
        plan, mesh = self.plan, self.mesh
        if self.members is not None:
            raise errors.mask_not_read_by_members(size, self.batch_size)
        # Rows that do not divide go to every device.
        split = plan.padded_size(size) == size
        if plan.pipeline > 1 and not split:  # whose microbatches have one size
            raise errors.mask_not_read(size, plan.parts)
        sharding = split_rows(mesh) if split else replicated(mesh)
        placement = Placement(with_rows(self._placement.like, size), size, sharding)
        return PaddedRunner(self._network(plan, placement.like, sharding), placement)

    @property
    def plan(self) -> Plan:
        """The plan; for a population with its `chunk` and `batch_dim` chosen."""
        return self._functions.plan

    @property
    def compiler_options(self) -> dict[str, bool | int | float | str]:
        """The options of XLA's compiler with which all functions are compiled, by name."""
        return dict(self._options)

    def of(self, members: Members) -> "Program":
        """Return a program with this program's plan for other members.

        For as many members as this program has, with the same hyperparameter names and dtypes, it
        shares the compiled programs. Raises `MembersError` for members of another resampling where
        the members read data themselves, and where this program has no members.
        """
        mine, functions = self._members, self._functions
        assert isinstance(functions, Population)
        if self.data is not None and members.resample != self.data.resample:
            raise errors.MembersError(
                "this program is compiled for members that read their data by "
                f"{self.data.resample!r}, and these read by {members.resample!r}; compile one for "
                "them (plurax.fit, plurax.compile)."
            )
        if members.count == mine.count and members.hyper_dtypes == mine.hyper_dtypes:
            # Share everything compiled; only the arrays of the members differ.
            other = copy.copy(self)
            other.members, other._functions = members, functions.of(members)
            other._runner = self._runner.of(other._functions)
            return other
        other = Program(
            self.task, self._optimizer, self.plan, self._placement.like, self.mesh, members,
            self.data, self.compiler_options,
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
        self._check_here()
        if self.members is not None:
            if seed is not None or params is not None:
                argument = "seed" if params is None else "params"
                raise errors.MembersError(
                    f"init({argument}=...) starts one network, and this program has members, each "
                    "with a seed of its own. Leave it out, and give the seeds to "
                    "plurax.Members(seeds)."
                )
            init = self._compiled.init_members(self._start)
            return one_at_a_time(init(*self._functions.arguments, self._start))
        key = jax.random.key(check_seed(0 if seed is None else seed))
        state: TrainState = one_at_a_time(self._compiled.init(key, self._start))
        if params is None:
            return state
        return self.place(replace_params(self.to_canonical(state), *self._example, params))

    @property
    def _start(self) -> dict[str, jax.Array]:
        return place_start(self._example.task, self._functions.layout, self.mesh)

    def place(self, state: TrainState) -> TrainState:
        """Put a state from elsewhere (a checkpoint, another plan) on this program's devices.

        Raises `BatchError` where structure, shapes or dtypes differ from `canonical_shapes`, and
        `MembersError` for the state of one network or of another number of members.
        """
        self._check_here()
        return self._states.place(state)

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the state with unpadded shapes, as any plan accepts it, for checkpoints.

        The arrays are unchanged except where the plan padded a dim that its shards do not divide.
        """
        return self._states.to_canonical(state)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Pad a state that has the shapes of `to_canonical`; return any other state unchanged."""
        return self._states.from_canonical(state)

    @functools.cached_property
    def replicas(self) -> ReplicaCheck:
        """The comparison of what several devices hold alike in a state."""
        return ReplicaCheck(self._functions.layout, self.mesh)

    @functools.cached_property
    def hyperparams(self) -> Hyperparams:
        """What `optax.inject_hyperparams` keeps in the optimizer's state, to read and to set."""
        return Hyperparams(self._functions.layout, self._functions.count)

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
        self._check_here()
        runner = self._runner.for_batch(batch)
        return runner.step(state, runner.placement.fill(batch))

    def gradients(self, state: TrainState, batch: PyTree, *, first: int | None = None) -> Gradients:
        """Return the first half of `step`: the sums over a batch, reduced over devices.

        The state is not donated. The mean gradient is `grads / weight`; under ZeRO it is sharded,
        and in a pipeline packed into the buffers of the stages. Of one network `batch` may be a
        part of a step's batch, `first` the index of its first example: sums of parts add up.
        """
        gradients, arguments = self.gradients_call(state, batch, first)
        return one_at_a_time(gradients(*arguments))

    def gradients_call(self, state: TrainState, batch: PyTree, first: int | None) -> Any:
        """Return the jitted function and the arguments of `gradients`."""
        self._check_here()
        check_not_donated(state)
        runner, functions = self._runner.for_batch(batch), self._functions
        part = () if first is None else (np.int32(first),)
        arguments = (*functions.arguments, *runner.placement.fill(batch), *part)
        return runner.compiled.gradients, (self.from_canonical(state), *arguments)

    def apply(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
        """Return the second half of `step`: the state, updated from `gradients`, and the metrics.

        The state is donated. `apply(state, gradients(state, batch))` gives the state of
        `step(state, batch)`, bit for bit. (Of a pipeline the metric `grad_norm` may differ in its
        last bit: XLA adds up the stages' squares in another order.)
        """
        self._check_here()
        check_not_donated(state)
        stored, functions = self.from_canonical(state), self._functions
        apply = self._compiled.apply
        state, metrics = one_at_a_time(apply(stored, *functions.arguments, gradients))
        return state, functions.trim(metrics)

    def place_batch(self, batch: PyTree, *, local: bool = False) -> Placed:
        """Put a batch on the devices ahead of its step, for `step_placed`. Raises `BatchError`.

        NumPy arrays are copied. Where it is `local`, each process gives its own rows, equally many.
        """
        self._check_here()
        if local:
            return self._placement.place_own(batch)
        return self._runner.for_batch(batch).placement.place(batch)

    def step_placed(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Update the state from a batch that `place_batch` has put on the devices."""
        self._check_here()
        return self._runner.for_rows(placed.rows).step(state, placed)

    @functools.cached_property
    def buffers(self) -> Buffers | None:
        """Memory for small batches, several of which a call of `loop` takes; None: it cannot."""
        # Members take no order, and in an `ExactRunner` each size needs a program of its own.
        takes = self.members is None and isinstance(self._runner, PaddedRunner)
        return Buffers.of(self._placement, self.mesh) if takes else None

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
        self._check_here()
        return self._runner.loop(state, data, order, first, stop)

    def compile_loop(self, data: PyTree, order: tuple[Any, ...] = ()) -> jax.stages.Compiled:
        """Return the compiled loop for data and orders of these shapes, of several batch sizes that
        of the first where the loss allows no padding."""
        return self._runner.compile_loop(data, order)

    def place_epoch(self, rows: Int[np.ndarray, "S B"], counts: Int[np.ndarray, "S"]) -> Placed:
        """Put the order of an epoch on the devices, for `loop`.

        **Arguments:**

        - `rows`: `(S, B)`, the index of the example in each row of each step.
        - `counts`: `(S,)`, how many rows of each step are real; padding repeats them.

        For devices that are not here the order stays as it is, for `compile_loop`.
        """
        if self._absent:
            return Placed(np.asarray(rows), np.asarray(counts))
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
          device is larger than 4 MiB, and for an eighth of it or less an eighth (or an eighth of
          that). The last one is padded: few programs are compiled for inputs of many lengths.
          A given chunk is for fewer inputs the next power of two.
        - `local`: each of several processes gives arrays of its own, and gets their outputs alone.

        **Returns:** leaves `(N, ...)`, or of a population `(members, N, ...)`.
        """
        self._check_here()
        states = (*self._states.for_inference(state), *self._functions.arguments)
        call = self._predictor.own if local else self._predictor
        return call(states, inputs, chunk)

    def evaluate(self, state: TrainState, data: PyTree | Iterable[PyTree]) -> dict[str, Any]:
        """Return weighted means of loss and metrics over all examples of `data`, each counted once.

        `data` is a tree of arrays with any leading dim, or an iterable of such trees. Arrays are
        taken as many rows at a time as in `predict`, but at least a microbatch. Means are floats,
        or of a population arrays `(members,)`; metrics over the data may be arrays.
        """
        self._check_here()
        states = (*self._states.for_inference(state), *self._functions.arguments)
        return self._evaluator(states, data)

    def check_evaluation(self, data: PyTree | Iterable[PyTree]) -> None:
        """Raise the errors of `evaluate` for these data, without compiling or computing."""
        self._evaluator.check(data)

    def metric_names(self, *, evaluated: bool) -> list[str]:
        """Return the names of the metrics in the row of an epoch; `evaluated`, `eval_...` too."""
        return self._evaluator.metric_names(evaluated=evaluated)

    # --- Compiling other functions than the step ----------------------------------------------

    def trace_gradients(self, batch: PyTree = None) -> jax.stages.Traced:
        """Trace `gradients` as a parameter server's worker calls it, and compute nothing.

        `.lower().compile()` compiles what this returns. A worker's batch may be part of a step's:
        the index of its first example is an argument (not of a population). `batch` matters where
        the loss allows no padding; by default it is the largest.
        """
        like = self._placement.like if batch is None else batch
        return self._runner.for_batch(like).compiled.trace_gradients()

    def trace_evaluate(self) -> jax.stages.Traced:
        """Trace the sums of `evaluate` over as many examples as a call of it takes."""
        return self._evaluator.trace()

    def trace_predict(self, inputs: PyTree, *, chunk: int | None = None) -> jax.stages.Traced:
        """Trace a call of `predict` for inputs like these, arrays or `jax.ShapeDtypeStruct`s.

        `chunk` is the number of rows, by default the batch size. Raises `TaskError` where the task
        has no `predict`.
        """
        return self._predictor.trace(inputs, chunk)

    # --- Reading the compiled program ---------------------------------------------------------

    @property
    def compiled_step(self) -> jax.stages.Compiled:
        """The compiled step: `(state, rows, count) -> (state, metrics)`; of a population
        `(state, members, rows, count)`."""
        return self._compiled.step

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; of members that read data themselves the loop, once compiled."""
        return self._compiled.most_run

    def hlo(self) -> str:
        """Return the text of `compiled`."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[Collective]:
        """Return the collectives of one compiled step; none is over the mesh axis `member`."""
        return collectives(self.hlo(), self.mesh)

    def planned_collectives(self) -> list[Collective]:
        """Return the collectives that the partitioner inserts in one step, before XLA compiles.

        Of a population those of one member. Those in a `jax.shard_map` of the model's code are not
        included.
        """
        if not needs_partitioner(self._example.task, self.plan):
            return []
        like, sharding = self._placement.like, self._placement.sharding
        network = self._network(self.plan, like, sharding, self._functions.backend)
        return planned_collectives(record_network(network, self._placement))

    def compile_record(self, compiled: jax.stages.Compiled) -> CompileRecord | None:
        """Return how a step or a loop of this program was compiled, None for another function."""
        return self._runner.record_of(compiled)

    def read_traced(self, record: CompileRecord) -> TracedStep | None:
        """Return what is planned for a step or a loop, from how it was traced; nothing is traced
        again. None for a population."""
        return read_traced(self._functions, record.jaxpr)

    @property
    def shardings(self) -> list[ParameterInfo]:
        """The sharding of each parameter and of its optimizer state; of one member."""
        return self._functions.layout.parameters()

    def memory(self) -> Memory:
        """Return bytes per device during a step, as the compiler reports them."""
        return memory(self.compiled)

    @property
    def state_shapes(self) -> TrainState:
        """The state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._states.shapes

    @property
    def canonical_shapes(self) -> TrainState:
        """The state that `to_canonical` returns, as a tree of `jax.ShapeDtypeStruct`s."""
        return self._states.canonical_shapes

    def __repr__(self) -> str:
        return in_a_line(summary(self, self._compiled.so_far.get("step")))

    def _repr_html_(self) -> str:
        return as_table(summary(self, self._compiled.so_far.get("step")))

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
        return Population(
            self.task, self._optimizer, plan, self.mesh, like, self._members, reads, self._options
        )

    def _network(
        self, plan: Plan, like: PyTree, rows: NamedSharding, backend: Backend | None = None
    ) -> Network:
        return Network(*self._example, plan, self.mesh, like, rows, backend, self._options)

    def _lower_most_run(self, functions: StepFunctions) -> jax.stages.Lowered:
        """Lower the loop over the members' data, or without data the step."""
        return lower_most_run(functions, self._placement, self.data)

    # --- Inside -------------------------------------------------------------------------------

    def _check_here(self) -> None:
        """Raise `PlanError` where the devices are those of `plurax.topology`."""
        if self._absent:
            raise errors.devices_are_absent(self.mesh.size, self.mesh.devices.flat[0].device_kind)

    @property
    def _members(self) -> Members:
        if self.members is None:
            raise errors.MembersError(
                "this program is compiled for one network, so it has no members to exchange; "
                "compile it with members=plurax.Members(...)."
            )
        return self.members
