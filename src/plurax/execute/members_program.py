"""Compile a population (a task, an optimizer, a plan and members) for one batch size."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from plurax import errors, tree
from plurax import hlo as compiled_hlo
from plurax.execute.autotune import Candidate, Run, autotune, timed_runner
from plurax.execute.backends.sharded import needs_partitioner
from plurax.execute.chunk_rule import choose_chunk, even_chunk
from plurax.execute.dispatch_limiter import DispatchLimiter
from plurax.execute.evaluate import check_evaluation, evaluation_placement, weighted_means
from plurax.execute.gradient import Totals
from plurax.execute.initial_state import check_place, check_state, new_state
from plurax.execute.mask import reads_mask
from plurax.execute.placement import Placed, Placement, device_data, is_arrays, leading_dim
from plurax.execute.population import HyperFn, Population, TaskAndOptimizer, network
from plurax.execute.predict import Predictor
from plurax.execute.reads import EpochSpec
from plurax.execute.step import Metrics
from plurax.members import MemberArrays, Members
from plurax.mesh import memory_budget, replicated, split_rows, within
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task

CALLS = 128
"""The largest number of steps in one call of the compiled loop, which returns metrics of each."""


ROOM = 16
"""An upper bound on the temporaries of one member of a chunk, in multiples of its step's bytes."""

ANY_ROWS = 2**31 - 1
"""The number of rows assumed for resampling where no data are resident and no row is drawn."""


class MembersProgram:
    """The compiled functions of a population; `plurax.compile` returns it.

    The methods are those of a `Program`; every leaf of the state and of the metrics has a leading
    dim of members.

    **Attributes:** `members`, `mesh` and `batch_size`; `count`, the number of members; `plan`, with
    its `chunk` and `batch_dim` chosen; `chose`, whether the caller left either of them open.
    """

    def __init__(
        self,
        task: Task | HyperFn,
        optimizer: Any,
        plan: Plan,
        batch: PyTree,
        mesh: Mesh,
        members: Members,
        *,
        reading: EpochSpec | None = None,
        data: PyTree = None,
    ) -> None:
        if members.hyper and isinstance(task, Task) and hasattr(optimizer, "update"):
            raise errors.members_need_a_function("optimizer")
        self._task, self._optimizer = task, optimizer
        self.members = members
        self.mesh = mesh
        self.batch_size = leading_dim(batch)
        self.count = members.count
        self.reading = reading
        self.slots = -(-self.count // plan.member) * plan.member
        """Members on the devices: `count` rounded up to a multiple of the mesh axis `member`."""
        self._in_flight = DispatchLimiter(mesh)
        self._hyper = {name: jnp.asarray(value) for name, value in members.hyper_of(0).items()}
        self._cohort = members.cohort(reading.count if reading else ANY_ROWS)
        self._placement = Placement(batch, plan.padded_size(self.batch_size), split_rows(mesh))
        self._evaluation = evaluation_placement(batch, plan, mesh)
        self._population = functools.partial(
            Population, task, optimizer, self._hyper, mesh=mesh, batch=self._placement.like
        )
        one = network(task, optimizer, self._hyper)
        self._fills = not one.task.coupled or self._reads_mask(one)
        # A coupled loss (one that mixes examples, such as batch norm) must ignore padding rows by
        # its mask; if it does not, only batch sizes that need no padding are valid.
        unit = plan.data * plan.microbatches
        if not self._fills and self.batch_size % unit:
            raise errors.mask_not_read(self.batch_size, unit)
        self._check_size(reading.length % self.batch_size if reading else 0)
        # `batch_dim="minor"` is chosen for unpartitioned members only; a partitioned step keeps
        # major.
        if needs_partitioner(one.task, plan) and plan.batch_dim is None:
            plan = dataclasses.replace(plan, batch_dim="major")
        self.plan = plan
        self._predictor = Predictor(self._compile_predict, mesh, plan.pipeline_pieces)
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._data_like = None if data is None else self._whole(data)
        self.chose = plan.chunk is None or plan.batch_dim is None
        if self.chose:
            self.plan = self._choose()
        self._built = self._population(plan=self.plan)

    def of(self, members: Members) -> "MembersProgram":
        """Return a program with this program's plan for other members.

        For as many members as this program has, with the same hyperparameter names and dtypes, it
        shares the compiled programs. Raises `MembersError` for members of another resampling where
        data are resident.
        """
        if self.reading and members.resample != self.reading.resample:
            raise errors.members_read_otherwise(self.reading.resample, members.resample)
        if members.count == self.count and self._same_hyper(members):
            # Share everything compiled; only the arrays of the members differ.
            other = copy.copy(self)
            other.members = members
            other._cohort = members.cohort(self.reading.count if self.reading else ANY_ROWS)
            other.__dict__.pop("_everyone", None)
            return other
        other = MembersProgram(
            self._task,
            self._optimizer,
            self.plan,
            self._placement.like,
            self.mesh,
            members,
            reading=self.reading,
        )
        other._data_like, other.chose = self._data_like, self.chose
        return other

    def _same_hyper(self, members: Members) -> bool:
        """Return whether `members` has this program's hyperparameter names and dtypes."""
        mine, theirs = (
            {name: jnp.asarray(value).dtype for name, value in hyper.items()}
            for hyper in (self._hyper, members.hyper_of(0))
        )
        return mine == theirs

    def choice_text(self) -> str:
        """Return a sentence that names the chosen `chunk` and `batch_dim`, and the method."""
        chosen = f"chunk={self.plan.chunk}, batch_dim={self.plan.batch_dim}"
        how = "from the shapes and the device (plurax.ensemble.tune measures instead)"
        return f"{chosen}: chosen {how}"

    def _reads_mask(self, one: TaskAndOptimizer) -> bool:
        like = jax.eval_shape(lambda: new_state(*one, jax.random.key(0)))
        loss = within(self.mesh, one.task.loss)
        return reads_mask(one.task, like, self._placement.like, loss)

    def _check_size(self, size: int) -> None:
        """Raise `BatchError` where a batch of this size needs padding that the loss would read."""
        if not self._fills and size not in (0, self.batch_size):
            raise errors.mask_not_read_by_members(size, self.batch_size)

    # --- Training -----------------------------------------------------------------------------

    @functools.cached_property
    def _everyone(self) -> MemberArrays:
        """All members as arrays `(slots,)` on the devices; repeated members fill the slots."""
        # Repeated members compute valid numbers; their results are cut from every output.
        filled = np.arange(self.slots) % self.count
        return jax.device_put(self._cohort.take(filled), self._by_member)

    def init(self) -> TrainState:
        """Return fresh states; each member's equals that of a single network with its seed."""
        if "init" not in self._compiled:
            made = jax.jit(self._built.init, out_shardings=self._state_shardings)
            lowered = {"init": made.lower(self._like(self._everyone))}
            if self._data_like is not None and "loop" not in self._compiled:
                # The loop runs next. A compilation uses one core, so compile both at the same time.
                lowered["loop"] = self._lower_loop(self._built, self._data_like)
            self._compile_together(lowered)
        return self._compiled["init"](self._everyone)

    def _compile_together(self, lowered: dict[str, jax.stages.Lowered]) -> None:
        with ThreadPoolExecutor(len(lowered)) as pool:
            started = {name: pool.submit(one.compile) for name, one in lowered.items()}
            self._compiled |= {name: future.result() for name, future in started.items()}

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Update every member once from the same batch of at most `batch_size` examples.

        As `Program.step`; metrics have shape `(members,)`. A member whose loss or gradient was not
        finite keeps its last state from then on (`skipped` counts the steps). Raises `BatchError`.
        """
        self._check_size(leading_dim(batch))
        return self.step_placed(state, self._placement.fill(batch))

    def place_batch(self, batch: PyTree) -> Placed:
        """Put a batch on the devices ahead of its step, for `step_placed`. Raises `BatchError`."""
        self._check_size(leading_dim(batch))
        return self._placement.place(batch)

    def step_placed(self, state: TrainState, placed: Placed) -> tuple[TrainState, Metrics]:
        """Update every member from a batch that `place_batch` has put on the devices."""
        state, metrics = self._run(self.compiled_step, state, self._everyone, *placed)
        return state, {name: value[: self.count] for name, value in metrics.items()}

    def place_data(self, data: PyTree) -> PyTree:
        """Put a whole data set on every device of the mesh, for `loop`. Raises `BatchError`."""
        return device_data(data, replicated(self.mesh))

    def loop(
        self, state: TrainState, data: PyTree, first: int, stop: int
    ) -> tuple[TrainState, Metrics]:
        """Run steps `first` to `stop`, counted from the start of training, in one compiled loop.

        **Arguments:** `data`, as `place_data` returned them; `stop - first` is at most `CALLS`. The
        range may cross epochs, and one compiled program runs every range.

        **Returns:** the state, and metrics `(slots, CALLS)` of which the first `stop - first`
        columns are set.
        """
        assert stop - first <= CALLS
        compiled = self.compile_loop(data)
        bounds = np.int32(first), np.int32(stop)
        return self._run(compiled, state, self._everyone, data, *bounds)

    def compile_loop(self, data: PyTree) -> jax.stages.Compiled:
        """Return the compiled loop for data of the shapes of `reading`."""
        if "loop" not in self._compiled:
            self._compiled["loop"] = self._lower_loop(self._built, self._whole(data)).compile()
        return self._compiled["loop"]

    def _lower_loop(self, built: Population, data: PyTree) -> jax.stages.Lowered:
        assert self.reading is not None, "loop needs a reading"
        loop = functools.partial(built.loop, self.reading, CALLS)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        jitted = jax.jit(loop, donate_argnums=0, out_shardings=self._out_shardings)
        return jitted.lower(self.state_shapes, self._like(self._everyone), data, count, count)

    def _whole(self, data: PyTree) -> PyTree:
        """Return the shapes and dtypes of data, replicated over the mesh."""
        whole = replicated(self.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype), sharding=whole
            ),
            data,
        )

    def place(self, state: TrainState) -> TrainState:
        """Put a state of `count` members on this program's devices, copying it.

        Raises `MembersError` for the state of one network or of another number of members, and
        `BatchError` where structure, shapes or dtypes differ.
        """
        filled = self._filled(state)
        copied = jax.tree.map(jnp.copy, state) if filled is state else filled
        return jax.device_put(copied, self._state_shardings)

    def _filled(self, state: TrainState) -> TrainState:
        """Pad a state of `count` members to `slots` members and to the plan's padded shapes."""
        if state.step.ndim == 0:
            raise errors.state_of_one_network()
        given = state.step.shape[0]
        if given not in (self.count, self.slots):
            raise errors.members_in_state(given, self.count)
        whole = state
        if given != self.slots:
            fill = np.arange(self.slots) % given
            state = jax.tree.map(lambda leaf: leaf[fill], state)
        # A plan that shards a dim unevenly pads it; a canonical state has the unpadded shapes.
        divided = self._example.partitioned
        if divided is not None and tree.describe(state) != tree.describe(self.state_shapes):
            state = jax.vmap(divided.state.pad, spmd_axis_name="member")(state)
        if state is not whole:
            state = jax.device_put(state, self._state_shardings)
        check_state(state, self.state_shapes)
        return state

    def to_canonical(self, state: TrainState) -> TrainState:
        """Return the state without padded dims and without the members that fill the slots."""
        if self._example.partitioned is not None:
            state = jax.vmap(self._example.partitioned.state.unpad, spmd_axis_name="member")(state)
        if self.slots == self.count:
            return state
        return jax.tree.map(lambda leaf: leaf[: self.count], state)

    # --- Inference ----------------------------------------------------------------------------

    def predict(
        self, state: TrainState, inputs: PyTree | Iterable[PyTree], *, chunk: int | None = None
    ) -> Any:
        """Return every member's outputs for any number of inputs: NumPy arrays `(members, N, ...)`.

        As `Program.predict`: for an iterable of inputs it returns an iterator of outputs.
        """
        states = (self._filled(state), self._everyone)
        outputs = self._predictor(states, inputs, self.batch_size if chunk is None else chunk)
        return (
            self._members_first(outputs) if is_arrays(inputs) else map(self._members_first, outputs)
        )

    def _members_first(self, outputs: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0)[: self.count], outputs)

    def _compile_predict(self, rows: PyTree) -> jax.stages.Compiled:
        cohort = self._like(self._everyone)
        return jax.jit(self._built.predict).lower(self.state_shapes, cohort, rows).compile()

    def evaluate(self, state: TrainState, data: PyTree | Iterable[PyTree]) -> dict[str, np.ndarray]:
        """Return every member's weighted means over all of `data`, by name, each `(members,)`."""
        state = self._filled(state)

        def run(placed: Placed) -> Totals:
            part = self._compiled_evaluate(state, self._everyone, *placed)
            self._in_flight.started(part.loss)
            return part

        means = weighted_means(run, self._evaluation, data)
        return {name: mean[: self.count] for name, mean in means.items()}

    def check_evaluation(self, data: PyTree | Iterable[PyTree]) -> None:
        """Raise the errors of `evaluate` for these data, without compiling or computing."""
        one = self._example.make(self._hyper)
        fresh = functools.partial(new_state, one.task, one.optimizer)
        state = jax.eval_shape(lambda: fresh(jax.random.key(0)))
        check = within(self.mesh, check_evaluation)
        check(one.task, self.plan.precision, self._evaluation, state, data)

    @property
    def _compiled_evaluate(self) -> jax.stages.Compiled:
        if "evaluate" not in self._compiled:
            count = jax.ShapeDtypeStruct((), jnp.int32)
            cohort = self._like(self._everyone)
            self._compiled["evaluate"] = (
                jax.jit(self._built.evaluate)
                .lower(self.state_shapes, cohort, self._evaluation.abstract(), count)
                .compile()
            )
        return self._compiled["evaluate"]

    # --- Reading the compiled program ---------------------------------------------------------

    @property
    def compiled_step(self) -> jax.stages.Compiled:
        """The compiled step, `(state, cohort, rows, count) -> (state, metrics)`."""
        if "step" not in self._compiled:
            self._compiled["step"] = self._lower_step(self._built).compile()
        return self._compiled["step"]

    def _lower_step(self, built: Population) -> jax.stages.Lowered:
        count = jax.ShapeDtypeStruct((), jnp.int32)
        cohort = self._like(self._everyone)
        jitted = jax.jit(built.step, donate_argnums=0, out_shardings=self._out_shardings)
        return jitted.lower(self.state_shapes, cohort, self._placement.abstract(), count)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled loop if there is one, else the compiled step."""
        return self._compiled.get("loop") or self.compiled_step

    def hlo(self) -> str:
        """Return the text of the compiled loop if it has been compiled, else of the step."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[compiled_hlo.Collective]:
        """Return the collectives of the compiled program; none is over the mesh axis `member`."""
        return compiled_hlo.collectives(self.hlo(), self.mesh)

    def memory(self) -> compiled_hlo.Memory:
        """Return bytes per device, as the compiler reports them."""
        return compiled_hlo.memory(self.compiled)

    @functools.cached_property
    def state_shapes(self) -> TrainState:
        """The state as a tree of `jax.ShapeDtypeStruct`s with their shardings."""
        return self._example.state_like(self.slots)

    @functools.cached_property
    def _example(self) -> Population:
        """A population under the current plan, whether or not its chunk is chosen yet."""
        return self._population(plan=self.plan)

    @property
    def _state_shardings(self) -> PyTree:
        return jax.tree.map(lambda like: like.sharding, self.state_shapes)

    @property
    def _out_shardings(self) -> tuple[Any, Any]:
        """Output shardings of a step or a loop: the input state's, and metrics split by member."""
        return self._state_shardings, self._by_member

    @functools.cached_property
    def canonical_shapes(self) -> TrainState:
        """The state that `to_canonical` returns, as a tree of `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(self.to_canonical, self.state_shapes)

    # --- Inside -------------------------------------------------------------------------------

    @property
    def _by_member(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("member"))

    def _like(self, values: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values
        )

    def _run(self, compiled: jax.stages.Compiled, state: TrainState, *args: Any) -> Any:
        if state.step.is_deleted():
            raise errors.state_was_donated()
        if state.step.shape != (self.slots,):
            state = self._filled(state)
        try:
            state, metrics = compiled(state, *args)
        except (TypeError, ValueError):
            check_state(state, self.state_shapes)
            check_place(state, self.state_shapes)
            raise
        self._in_flight.started(metrics["loss"])
        return state, metrics

    def _choose(self) -> Plan:
        """Return the plan with `chunk` and `batch_dim` chosen, its step within the memory
        budget.
        """
        members = self.slots // self.plan.member
        work = self._example.work()
        plan = choose_chunk(self.plan, members, work, self.mesh.devices.flat[0].platform)
        budget = memory_budget(self.mesh)
        # Compile to read the peak memory only where the estimate comes near the budget: a
        # compilation takes seconds, the estimate nothing.
        while (
            self.plan.chunk is None
            and (chunk := plan.chunk or 1) > 1
            and (members + ROOM * chunk) * work.bytes > budget
            and compiled_hlo.memory(self._lower_under(plan).compile()).peak > budget
        ):
            plan = dataclasses.replace(plan, chunk=even_chunk(members, max(1, chunk // 4)))
        return plan

    def _lower_under(self, plan: Plan) -> jax.stages.Lowered:
        """Lower the loop over resident data, or without data the step, under another plan."""
        built = self._population(plan=plan)
        if self._data_like is None:
            return self._lower_step(built)
        return self._lower_loop(built, self._data_like)

    def measure(self, plan: Plan, data: PyTree) -> tuple[Plan, list[Candidate]]:
        """Measure a plan's open choices by timing the loop over `data`, or the step if None.

        **Returns:** the plan with its choices, and every candidate measured.
        """
        init = jax.jit(self._example.init, out_shardings=self._state_shardings)
        looped = self._data_like is not None
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._placement.like)
        placed = (self.place_data(data),) if looped else self._placement.place(zeros)

        def build(plan: Plan) -> tuple[int, Callable[[], Run]]:
            compiled = self._lower_under(plan).compile()
            arguments = (self._everyone, *placed)
            needed = compiled_hlo.memory(compiled).peak
            return needed, lambda: timed_runner(compiled, init(self._everyone), arguments, looped)

        dtype = jnp.result_type(*jax.tree.leaves(self.state_shapes.params))
        tolerance = 2e-2 if self.plan.precision == "bfloat16" else 1e-4
        tolerance = 1e-9 if dtype == jnp.float64 else tolerance
        if self.plan.batch_dim == "major" and self._example.partitioned is not None:
            plan = dataclasses.replace(plan, batch_dim="major")
        members = self.slots // self.plan.member
        return autotune(plan, members, build, memory_budget(self.mesh), tolerance)
