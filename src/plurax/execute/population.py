"""Train many networks in one program: members split over devices and run in chunks.

Problem. A population of K small networks must train in one compiled program, use every device, and
fit in memory. Running all K at once needs K times the temporaries of one network; running one at a
time leaves the device idle. Members must not communicate, and each must compute what it would
compute alone.

Each member runs the one-network step of `step.py`. Three transformations nest, from the inside
out: `vmap` over the members of a chunk and a `fori_loop` over the chunks of a device
(`over_members`), `shard_map` over the mesh axis `member`. No collective crosses that axis.

Example: `Plan(member=2, chunk=4)`, 18 members, a parameter of shape `(3, 5)`:

    state on all devices      (18, 3, 5)   split over `member`
    state on one device       ( 9, 3, 5)   what `over_members` receives: chunks of 4, 4 and 1
    loss of one step          ( 9,)        per device; (18,) for the population

`choose_chunk.py` chooses chunks that divide the members evenly where it can.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from plurax import errors
from plurax.distributed.global_arrays import put
from plurax.execute.backends.backend import Backend
from plurax.execute.backends.choose import make_backend, planned_task
from plurax.execute.compact_layout import with_compact_gradients
from plurax.execute.compiler_options import Options
from plurax.execute.gradient import Totals
from plurax.execute.initial_state import new_state
from plurax.execute.layouts.members_layout import MembersLayout
from plurax.execute.manual_axes import on_most_axes
from plurax.execute.over_members import over_members, traced_once
from plurax.execute.reads import EpochSpec, Reads
from plurax.execute.rows import Chunk
from plurax.execute.step import Gradients, Metrics, gradient_specs
from plurax.execute.step_functions import StepFunctions
from plurax.members import Hyper, MemberArrays, Members
from plurax.mesh import on_accelerator, platform_of
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task

MAX_STEPS_PER_CALL = 128
"""The largest number of steps in one call of the compiled loop, which returns metrics of each."""

ANY_ROWS = 2**31 - 1
"""The number of rows assumed for resampling where no data are resident and no row is drawn."""

HyperFn = Callable[[Hyper], Any]


class TaskAndOptimizer(NamedTuple):
    """Hold the task and the optimizer of one member."""

    task: Task
    optimizer: optax.GradientTransformation


def task_and_optimizer(task: Task | HyperFn, optimizer: Any, hyper: Hyper) -> TaskAndOptimizer:
    """Build a member's task and optimizer, calling those that are functions of `hyper`.

    Raises `TaskError` where such a function needs a hyperparameter that `hyper` lacks, or needs the
    Python value of one (inside the compiled program hyperparameters are tracers).
    """
    made_task = task if isinstance(task, Task) else _call("task", task, hyper)
    made_optimizer = optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        made_optimizer = _call("optimizer", optimizer, hyper)
    return TaskAndOptimizer(made_task, made_optimizer)


def example_network(
    task: Task | HyperFn, optimizer: Any, members: Members | None
) -> TaskAndOptimizer:
    """Return the task and the optimizer of one network, or of the first member."""
    if members is None:
        assert isinstance(task, Task)
        return TaskAndOptimizer(task, optimizer)
    return task_and_optimizer(task, optimizer, first_hyper(members))


def first_hyper(members: Members) -> Hyper:
    """Return the first member's hyperparameters, of the strong types that a program computes in."""
    return {name: jnp.asarray(values[0]) for name, values in members.hyper_arrays().items()}


def _call(what: str, maker: HyperFn, hyper: Hyper) -> Any:
    try:
        inspect.signature(maker).bind(hyper)
    except TypeError as error:
        raise errors.TaskError(
            f"{what}={getattr(maker, '__name__', maker)} is called with one argument, the dict of "
            f"a member's hyperparameters, and cannot be: {error}. Write a function of that dict, "
            f"such as lambda hyper: ...(hyper[{next(iter(hyper), 'learning_rate')!r}])."
        ) from None
    except ValueError:  # a signature is not known of all functions
        pass
    try:
        returned = maker(hyper)
    except KeyError as error:
        if error.args and error.args[0] not in hyper and isinstance(error.args[0], str):
            # Only a KeyError for a name that `hyper` lacks is about hyperparameters; pass on
            # others.
            names = ", ".join(repr(one) for one in hyper) or "none"
            raise errors.TaskError(
                f"{what}(hyper) asked for the hyperparameter {error.args[0]!r}, which "
                f"Members(hyper=...) does not give; it gives {names}."
            ) from None
        raise
    except jax.errors.ConcretizationTypeError as error:
        reason = str(error).splitlines()[0]
        raise errors.TaskError(
            f"{what}(hyper) asked for the value of a hyperparameter while the program was traced "
            f"({reason}). Every member has its own value, so it cannot decide what code runs: "
            "compute with it (jnp.where, jnp.minimum) instead of branching on it. Multiply a "
            "schedule of optax that asks for its peak: lambda step: hyper['learning_rate'] * "
            "optax.warmup_cosine_decay_schedule(0, 1, 100, 1000)(step)."
        ) from error
    fits = isinstance(returned, Task) if what == "task" else hasattr(returned, "update")
    if not fits:
        wanted = "a plurax.Task" if what == "task" else "a transformation of optax"
        raise errors.TaskError(
            f"{what}(hyper) returned a {type(returned).__name__}, and must return {wanted}: it is "
            "called with a dict of hyperparameters."
        )
    return returned


class Population(StepFunctions):
    """The functions of a population's program for one plan.

    **Arguments:**

    - `task`, `optimizer`: or functions of a member's hyperparameters that return them.
    - `plan`: with its `chunk` chosen.
    - `mesh`; `batch`, of the largest size as `jax.ShapeDtypeStruct`s.
    - `members`.
    - `reads`: how members read data that stay on the devices; None where they are not resident.
    - `options` of the compiler.
    """

    layout: MembersLayout

    def __init__(
        self,
        task: Task | HyperFn,
        optimizer: Any,
        plan: Plan,
        mesh: Mesh,
        batch: PyTree,
        members: Members,
        reads: EpochSpec | None = None,
        options: Options = (),
    ) -> None:
        self._task, self._optimizer = task, optimizer
        self.plan, self.mesh, self.batch, self.options = plan, mesh, batch, options
        self.members, self.count, self._reading = members, members.count, reads
        self.example = example_network(task, optimizer, members)
        self.backend = make_backend(*self.example, plan, mesh, batch)
        self.layout = MembersLayout(self.backend.layout, members.count, mesh)
        self.metrics_sharding = NamedSharding(mesh, P("member"))
        self.outputs_sharding = NamedSharding(mesh, P("data", "member"))

    def of(self, members: Members) -> "Population":
        """Return the population for as many other members, with hyperparameters of equal names and
        dtypes, so that programs compiled for one serve the other."""
        other = copy.copy(self)
        other.members = members
        other.__dict__.pop("arguments", None)
        return other

    def abstract_of(self, count: int) -> "Population":
        """Return the population of `count` members, with `jax.ShapeDtypeStruct`s for arguments."""
        other = copy.copy(self)
        other.layout = MembersLayout(self.backend.layout, count, self.mesh)

        def many(x: Any) -> jax.ShapeDtypeStruct:
            shape = (other.layout.slots, *x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.metrics_sharding)

        word = jax.ShapeDtypeStruct((), np.uint32)
        arrays = jax.tree.map(many, MemberArrays(word, word, word, first_hyper(self.members)))
        other.__dict__["arguments"] = (arrays,)
        return other

    @functools.cached_property
    def arguments(self) -> tuple[MemberArrays]:
        """The members as arrays `(slots,)` on the devices; repeated members fill the slots."""
        arrays = self.members.arrays(self._reading.count if self._reading else ANY_ROWS)
        # Repeated members compute valid numbers; their results are cut from every output.
        filled = np.arange(self.layout.slots) % self.members.count
        return (put(arrays.take(filled), self.metrics_sharding),)

    # --- One member ---------------------------------------------------------------------------

    def make(self, hyper: Hyper) -> TaskAndOptimizer:
        """Return the task and the optimizer of a member with these hyperparameters."""
        return task_and_optimizer(self._task, self._optimizer, hyper)

    def new_state(self, member: MemberArrays, start: Mapping[str, jax.Array]) -> TrainState:
        """Return a fresh state of one member, equal to that of one network with its seed."""
        network = self.make(member.hyper)
        return new_state(network.task, network.optimizer, jax.random.key(member.seeds), start)

    @property
    def _selects(self) -> bool:
        return on_accelerator(self.mesh)

    def _over_members(self, step: Callable[..., Any], state: TrainState) -> Callable[..., Any]:
        """Return an update of one member as that of all."""
        # What devices send stays outside of branches, where all of it is counted and merged. Where
        # the optimizer keeps no arrays nothing is read twice.
        keeps = any(leaf.ndim > 1 for leaf in jax.tree.leaves(state.opt_state))
        in_branch = keeps and not self._selects and self.mesh.size == self.plan.member
        return over_members(step, self.plan.chunk, in_branch=in_branch)

    def _backend(self, member: MemberArrays) -> Backend:
        task, optimizer = self.make(member.hyper)
        if platform_of(self.mesh) == "tpu":
            optimizer = with_compact_gradients(optimizer)
        return self.backend.of(planned_task(task, self.plan, member=True), optimizer)

    def trim(self, values: PyTree) -> PyTree:
        """Drop the members that fill the slots, from leaves `(slots, ...)`."""
        if self.layout.slots == self.members.count:
            return values  # to slice a metric takes 25 µs
        return jax.tree.map(lambda leaf: leaf[: self.members.count], values)

    def outputs(self, values: PyTree) -> PyTree:
        """Return predictions `(N, slots, ...)` as `(K, N, ...)`."""
        return self.trim(jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), values))

    # --- The population -----------------------------------------------------------------------

    def init(self, arrays: MemberArrays, start: Mapping[str, jax.Array]) -> TrainState:
        """Return fresh states of all members, leaves `(K, ...)`; all begin at `start`, by path."""

        # `lax.map` rather than `vmap`: only one member's temporaries exist at a time, and the body
        # for one member compiles in half the time of the body for many.
        def init_all(arrays: MemberArrays, start: Mapping[str, jax.Array]) -> TrainState:
            return jax.lax.map(
                lambda member: self.backend.own(self.new_state(member, start)), arrays
            )

        states: TrainState = self._spread(init_all, "m.", "s")(arrays, start)
        return states

    def step(
        self, state: TrainState, arrays: MemberArrays, batch: PyTree, count: Int[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        """Update every member once from the same batch. Metrics have shape `(K,)`.

        `batch` has leaves `(N, ...)`, of which the first `count` rows are real.
        """

        def member_step(
            state: TrainState, member: MemberArrays, batch: PyTree, count: Array
        ) -> tuple[TrainState, Metrics]:
            return self._backend(member).step(freeze=True, select=self._selects)(
                state, batch, count
            )

        return self._spread(self._over_members(member_step, state), "smd.", "sm")(
            state, arrays, batch, count
        )

    def gradients(
        self, state: TrainState, arrays: MemberArrays, batch: PyTree, count: Int[Array, ""]
    ) -> Gradients:
        """Return every member's sums over the same batch, leaves `(K, ...)`."""

        def sums_of(state: TrainState, member: MemberArrays, batch: PyTree, count: Array) -> Any:
            return (), self._backend(member).gradients()(state, batch, count)

        fun = self._spread(over_members(sums_of, self.plan.chunk, keep=False), "smd.", "mg")
        sums: Gradients = fun(state, arrays, batch, count)[1]
        return sums

    def apply(
        self, state: TrainState, arrays: MemberArrays, sums: Gradients
    ) -> tuple[TrainState, Metrics]:
        """Update every member from its sums."""

        def member_apply(pair: tuple[TrainState, Gradients], member: MemberArrays) -> Any:
            state, metrics = self._backend(member).apply(freeze=True, select=self._selects)(*pair)
            return (state, pair[1]), metrics

        def apply_all(state: TrainState, sums: Gradients, arrays: MemberArrays) -> Any:
            (state, _), metrics = self._over_members(member_apply, state)((state, sums), arrays)
            return state, metrics

        return self._spread(apply_all, "sgm", "sm")(state, sums, arrays)

    def check_order(self, order: tuple[Any, ...]) -> None:
        """Raise `BatchError` unless members compute their own orders."""
        if order or self._reading is None:
            passed = "a program compiled without data"
            if order:
                passed = f"an order of {len(order)} arrays"
            raise errors.BatchError(
                "members read their data each in its own order, and program.loop was given "
                f"{passed}. Compile with px.compile(..., members=members, data=data), and give () "
                "as the order."
            )

    def loop(
        self,
        state: TrainState,
        arrays: MemberArrays,
        data: PyTree,
        first: Int[Array, ""],
        stop: Int[Array, ""],
    ) -> tuple[TrainState, Metrics]:
        """Run steps `first` to `stop`, counted from the start of training, over resident data.

        Metrics have shape `(K, MAX_STEPS_PER_CALL)`; the first `stop - first` columns are set, the
        rest are zero.
        """
        assert self._reading is not None, "see `check_order`"
        reading = self._reading
        plan = self.plan
        rows = plan.placed_rows(reading.batch_size)
        reads = Reads(reading, rows, plan.replica_microbatches)

        def member_loop(
            state: TrainState, member: MemberArrays, data: PyTree, first: Array, stop: Array
        ) -> tuple[TrainState, Metrics]:
            step = traced_once(self._backend(member).step(freeze=True, select=self._selects))

            @traced_once
            def rows_at(t: Array) -> Array:
                return reads.block_rows(member, t)

            def take(rows: Array, t: Array) -> tuple[PyTree, Array]:
                return reads.take(data, rows, t), reads.count(t % reading.steps)

            # If every step reads the same rows, gather them once, outside the loop.
            once = take(rows_at(jnp.int32(0)), jnp.int32(0)) if reads.fixed else None

            def steps(t: Array, stop: Array, rows: Array, carry: tuple[TrainState, Metrics]) -> Any:
                def body(t: Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
                    state, metrics = carry
                    state, now = step(state, *(once or take(rows, t)))
                    return state, jax.tree.map(lambda a, x: a.at[t - first].set(x), metrics, now)

                return jax.lax.fori_loop(t, stop, body, carry)

            # The order of a block of steps is computed at once: of one it is mostly overhead.
            def block(carry: tuple[Array, Any]) -> tuple[Array, Any]:
                end = jnp.minimum(stop, reads.block_end(carry[0]))
                return end, steps(carry[0], end, rows_at(carry[0]), carry[1])

            shapes = jax.eval_shape(lambda: step(state, *(once or take(rows_at(first), first)))[1])
            empty = jax.tree.map(lambda s: jnp.zeros((MAX_STEPS_PER_CALL,), s.dtype), shapes)
            if once:
                return steps(first, stop, first, (state, empty))
            return jax.lax.while_loop(lambda c: c[0] < stop, block, (first, (state, empty)))[1]

        return self._spread(over_members(member_loop, self.plan.chunk), "sm...", "sm")(
            state, arrays, data, first, stop
        )

    def evaluate(
        self,
        params: PyTree,
        model_state: PyTree,
        arrays: MemberArrays,
        batch: PyTree,
        chunk: Chunk,
    ) -> Totals:
        """Return every member's totals over the same batch, without gradient; leaves `(K,)`."""

        def member_evaluate(
            states: tuple[PyTree, PyTree], member: MemberArrays, batch: PyTree, chunk: Chunk
        ) -> tuple[Any, Any]:
            return (), self._backend(member).evaluate()(*states, batch, chunk)

        chunked = over_members(member_evaluate, self.plan.chunk, keep=False)
        states = (params, model_state)
        return self._spread(chunked, "pmd.", "mm")(states, arrays, batch, chunk)[1]

    def predict(
        self, params: PyTree, model_state: PyTree, arrays: MemberArrays, inputs: PyTree
    ) -> PyTree:
        """Return every member's outputs for the same inputs: leaves `(B, K, ...)`, rows leading."""

        def infer(
            states: tuple[PyTree, PyTree], member: MemberArrays, inputs: PyTree
        ) -> tuple[Any, PyTree]:
            return (), self._backend(member).predict()(*states, inputs)

        def rows_first(states: Any, arrays: MemberArrays, inputs: PyTree) -> PyTree:
            _, outputs = over_members(infer, self.plan.chunk, keep=False)(states, arrays, inputs)
            return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outputs)

        # Rows lead so that the host can copy outputs chunk by chunk, as for one network
        # (`predict.py`).
        return self._spread(rows_first, "pmd", "o")((params, model_state), arrays, inputs)

    # --- Spreading ----------------------------------------------------------------------------

    def _spread(self, fun: Callable[..., Any], takes: str, gives: str) -> Callable[..., Any]:
        """Run `fun` on every device, its arguments and results split by kind.

        Letters of `takes` and `gives`: `s`, states; `p`, their parameters and model states; `g`,
        gradients; `m`, split over `member`; `d`, rows split over `data`; `o`, outputs; `.`,
        replicated.
        """
        if self.mesh.size == 1:
            return fun
        specs, members = self.layout.specs, P("member")
        sums = gradient_specs(members, self.layout.gradient_specs, specs.model_state)
        kinds = {
            "g": sums,
            "s": specs, "p": (specs.params, specs.model_state), "m": P("member"),
            "d": P("data"), "o": P("data", "member"), ".": P(),
        }  # fmt: skip
        # Not over axes that the members' plan does not split: see `manual_axes.py`.
        axes = {"member", *self.backend.manual_axes}
        return on_most_axes(fun, self.mesh, axes, kinds, takes, gives)
