"""Many networks in one program: members spread over devices, in chunks, without a collective.

Each member is the one-network step of `step.py`. `vmap` runs a chunk of them, a loop runs chunk
after chunk, and `shard_map` spreads them over the mesh axis `member`; nothing crosses that axis.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from plurax import errors
from plurax.execute.backends.pipelined import PipelinedBackend
from plurax.execute.backends.sharded import ShardedBackend, microbatch, needs_partitioner
from plurax.execute.chunk_rule import MemberWork, work_of
from plurax.execute.evaluate import device_evaluation
from plurax.execute.gradient import Totals, evaluation, gradient
from plurax.execute.initial_state import new_state
from plurax.execute.placement import leading_dim
from plurax.execute.predict import device_predict
from plurax.execute.reads import EpochSpec, Reads
from plurax.execute.rows import Rows
from plurax.execute.step import Metrics, Step, make_step, whole_update
from plurax.execute.totals import coupled_totals, device_totals
from plurax.members import Hyper, MemberArrays
from plurax.mesh import on_devices, within
from plurax.plan import Plan
from plurax.state import TrainState
from plurax.task import Task

HyperFn = Callable[[Hyper], Any]


class TaskAndOptimizer(NamedTuple):
    """The task and the optimizer of one member."""

    task: Task
    optimizer: optax.GradientTransformation


def network(task: Task | HyperFn, optimizer: Any, hyper: Hyper) -> TaskAndOptimizer:
    """Call what is a function of the hyperparameters. Raises `TaskError`."""
    made_task = task if isinstance(task, Task) else _call("task", task, hyper)
    made_optimizer = optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        made_optimizer = _call("optimizer", optimizer, hyper)
    return TaskAndOptimizer(made_task, made_optimizer)


def _call(what: str, maker: HyperFn, hyper: Hyper) -> Any:
    try:
        return maker(hyper)
    except KeyError as error:
        if error.args and error.args[0] not in hyper and isinstance(error.args[0], str):
            raise errors.hyper_missing(what, error.args[0], hyper) from None
        raise
    except jax.errors.ConcretizationTypeError as error:
        reason = str(error).splitlines()[0]
        raise errors.hyper_needs_a_value(what, reason) from error


class Population:
    """The functions of a population's program, for one plan; to be compiled by `MembersProgram`.

    **Arguments:** `task` and `optimizer`, or functions of a member's hyperparameters that return
    them; `hyper`, an example of those; `plan`, its `chunk` chosen; `mesh`; `batch`, of the largest
    size, abstract.
    """

    def __init__(
        self,
        task: Task | HyperFn,
        optimizer: Any,
        hyper: Hyper,
        plan: Plan,
        mesh: Mesh,
        batch: PyTree,
    ) -> None:
        self._task, self._optimizer, self.hyper = task, optimizer, hyper
        self.plan = plan
        self.mesh = mesh
        example = self.make(hyper)
        self._split = mesh.shape["data"]
        self._microbatch = microbatch(batch, plan, coupled=example.task.coupled)
        self.partitioned: ShardedBackend | PipelinedBackend | None = None
        if needs_partitioner(example.task, plan):
            kind = PipelinedBackend if plan.pipeline > 1 else ShardedBackend
            self.partitioned = kind(*example, plan, mesh, self._microbatch)

    # --- One member ---------------------------------------------------------------------------

    def make(self, hyper: Hyper) -> TaskAndOptimizer:
        """The task and the optimizer of a member with these hyperparameters."""
        return network(self._task, self._optimizer, hyper)

    def new_state(self, member: MemberArrays) -> TrainState:
        """A fresh state of one member; the same as alone with its seed."""
        one = self.make(member.hyper)
        return new_state(one.task, one.optimizer, jax.random.key(member.seeds))

    def _sharded(self, member: MemberArrays) -> ShardedBackend | PipelinedBackend:
        assert self.partitioned is not None
        return self.partitioned.of(*self.make(member.hyper))

    def _step(self, member: MemberArrays) -> Step:
        if self.partitioned is not None:
            return self._sharded(member).step(freeze=True)
        one = self.make(member.hyper)
        fun = gradient(
            one.task, self.plan.precision, self.plan.batch_dim, self.plan.remat, ordered=True
        )
        if one.task.coupled:
            total = coupled_totals(fun, self.plan.microbatches)
        else:
            total = device_totals(fun, self._split, self.plan.microbatches)
        return make_step(total, whole_update(one.optimizer), freeze=True)

    def work(self) -> MemberWork:
        """What a step of one member is: for `choose`."""
        one = self.make(self.hyper)
        state = jax.eval_shape(lambda: new_state(one.task, one.optimizer, jax.random.key(0)))
        size = leading_dim(self._microbatch)
        rows = Rows(
            self._microbatch,
            jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size)),
            jax.eval_shape(lambda: jnp.zeros(size, bool)),
        )
        fun = within(self.mesh, gradient(one.task, self.plan.precision))
        traced = jax.make_jaxpr(fun)(state.params, state.model_state, rows)
        kept = (state.params, state.opt_state, state.model_state)
        return work_of(traced.jaxpr, kept, state.params)

    def state_like(self, count: int) -> TrainState:
        """The states of so many members, as `jax.ShapeDtypeStruct`s with their shardings."""
        if self.partitioned is None:
            word = jax.ShapeDtypeStruct((), jnp.uint32)
            one = jax.eval_shape(self.new_state, MemberArrays(word, word, word, self.hyper))
            specs = jax.tree.map(lambda _: P("member"), one)
        else:
            one, specs = self.partitioned.state.abstract_state(self.mesh), self.specs

        def many(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
            where = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=where)

        return jax.tree.map(many, one, specs)

    # --- The population -----------------------------------------------------------------------

    def init(self, cohort: MemberArrays) -> TrainState:
        """Fresh states of all members."""

        def fresh(member: MemberArrays) -> TrainState:
            state = self.new_state(member)
            return state if self.partitioned is None else self.partitioned.own(state)

        # One after another: beside its state a member needs room only while it is made, and what is
        # written for one compiles in half the time of what is written for many.
        return self._spread(lambda cohort: jax.lax.map(fresh, cohort), "m", "s")(cohort)

    def step(
        self, state: TrainState, cohort: MemberArrays, batch: PyTree, count: Int[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        """One update of every member from the same batch. Metrics have shape `(K,)`."""

        def one(
            state: TrainState, member: MemberArrays, batch: PyTree, count: Array
        ) -> tuple[TrainState, Metrics]:
            return self._step(member)(state, batch, count)

        return self._spread(self._chunked(one), "smd.", "sm")(state, cohort, batch, count)

    def loop(
        self,
        reading: EpochSpec,
        calls: int,
        state: TrainState,
        cohort: MemberArrays,
        data: PyTree,
        first: Int[Array, ""],
        stop: Int[Array, ""],
    ) -> tuple[TrainState, Metrics]:
        """Steps `first` to `stop`, counted from the start of training, over data on the devices.

        Metrics have shape `(K, calls)`; the first `stop - first` of them are set.
        """

        def one(
            state: TrainState, member: MemberArrays, data: PyTree, first: Array, stop: Array
        ) -> tuple[TrainState, Metrics]:
            step = self._step(member)
            reads = self._reads(reading)

            def rows_at(t: Array) -> Array:
                return reads.block_rows(member, t)

            def take(rows: Array, t: Array) -> tuple[PyTree, Array]:
                return reads.take(data, rows, t), reads.count(t % reading.steps)

            # Where every step reads the same rows, they are read once.
            once = take(rows_at(jnp.int32(0)), jnp.int32(0)) if reads.fixed else None

            def body(t: Array, carry: tuple[TrainState, Metrics, Array]) -> Any:
                state, metrics, rows = carry
                if once is None:
                    # The order of many steps at once: of one alone it is mostly overhead. The
                    # condition is the same for all members, and stays one under `vmap`.
                    begins = (t == first) | (t % reading.steps % reads.block == 0)
                    rows = jax.lax.cond(begins, lambda: rows_at(t), lambda: rows)
                state, now = step(state, *(once or take(rows, t)))
                set_ = jax.tree.map(lambda all_, new: all_.at[t - first].set(new), metrics, now)
                return state, set_, rows

            like = jax.eval_shape(lambda: rows_at(first))
            rows = jnp.zeros((0,) if once else like.shape, jnp.int32)
            shapes = jax.eval_shape(lambda: step(state, *(once or take(rows, first)))[1])
            empty = jax.tree.map(lambda s: jnp.zeros((calls,), s.dtype), shapes)
            state, metrics, _ = jax.lax.fori_loop(first, stop, body, (state, empty, rows))
            return state, metrics

        return self._spread(self._chunked(one), "sm...", "sm")(state, cohort, data, first, stop)

    def _reads(self, reading: EpochSpec) -> Reads:
        return Reads(reading, self.plan.padded_size(reading.batch_size), self._split)

    def evaluate(
        self, state: TrainState, cohort: MemberArrays, batch: PyTree, count: Int[Array, ""]
    ) -> Totals:
        """Every member's totals over the same batch, without gradient; leaves `(K,)`."""

        def one(
            state: TrainState, member: MemberArrays, batch: PyTree, count: Array
        ) -> tuple[Any, Any]:
            task = self.make(member.hyper).task
            if self.partitioned is not None:
                evaluate = self._sharded(member).evaluate()
            else:
                evaluate = device_evaluation(evaluation(task, self.plan.precision), self._split)
            return (), evaluate(state.params, state.model_state, batch, count)

        chunked = self._chunked(one, keep=False)
        return self._spread(chunked, "smd.", "mm")(state, cohort, batch, count)[1]

    def predict(self, state: TrainState, cohort: MemberArrays, inputs: PyTree) -> PyTree:
        """Every member's outputs for the same inputs: leaves `(B, K, ...)`, the rows leading."""

        def one(state: TrainState, member: MemberArrays, inputs: PyTree) -> tuple[Any, PyTree]:
            if self.partitioned is not None:
                predict = self._sharded(member).predict()
            else:
                predict = device_predict(self.make(member.hyper).task, self.plan.precision)
            return (), predict(state.params, state.model_state, inputs)

        def rows_first(state: TrainState, cohort: MemberArrays, inputs: PyTree) -> PyTree:
            _, outputs = self._chunked(one, keep=False)(state, cohort, inputs)
            return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outputs)

        return jax.shard_map(
            rows_first,
            mesh=self.mesh,
            in_specs=(self.specs, P("member"), P("data")),
            out_specs=P("data", "member"),
            axis_names=set(self.mesh.axis_names),
            check_vma=False,
        )(state, cohort, inputs)

    # --- Spreading ----------------------------------------------------------------------------

    def _chunked(
        self, one: Callable[..., tuple[Any, PyTree]], *, keep: bool = True
    ) -> Callable[..., tuple[Any, PyTree]]:
        """`(state, cohort, *shared) -> (state, results)` over all members of a device.

        A chunk at a time; the states are updated where they lie. With `keep=False` `one` returns
        no state.
        """

        def run(state: PyTree, cohort: MemberArrays, *shared: Any) -> tuple[PyTree, PyTree]:
            members = cohort.seeds.shape[0]
            chunk = min(self.plan.chunk or members, members)

            def some(first: Any, size: int, state: PyTree) -> tuple[PyTree, PyTree]:
                def cut(leaf: Array) -> Array:
                    return jax.lax.dynamic_slice_in_dim(leaf, first, size)

                part = jax.tree.map(cut, (state, cohort))
                return jax.vmap(lambda s, m: one(s, m, *shared))(*part)

            if chunk == members:
                return some(0, members, state)

            def put(all_: PyTree, new: PyTree, first: Any) -> PyTree:
                return jax.tree.map(
                    lambda a, n: jax.lax.dynamic_update_slice_in_dim(a, n, first, 0), all_, new
                )

            def body(first: Any, size: int, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                state, results = carry
                new, result = some(first, size, state)
                return (put(state, new, first) if keep else state), put(results, result, first)

            shapes = jax.eval_shape(lambda: some(0, chunk, state)[1])
            results = jax.tree.map(lambda s: jnp.zeros((members, *s.shape[1:]), s.dtype), shapes)
            whole = members // chunk
            carry = jax.lax.fori_loop(
                0, whole, lambda i, carry: body(i * chunk, chunk, carry), (state, results)
            )
            rest = members - whole * chunk
            carry = body(whole * chunk, rest, carry) if rest else carry
            return carry if keep else ((), carry[1])

        return run

    @property
    def specs(self) -> Any:
        """The `PartitionSpec`s of the members' states."""
        if self.partitioned is None:
            return P("member")
        return jax.tree.map(
            lambda spec: P("member", *spec),
            self.partitioned.state.specs,
            is_leaf=lambda x: isinstance(x, P),
        )

    def _spread(self, fun: Callable[..., Any], takes: str, gives: str) -> Callable[..., Any]:
        """`fun` on every device: states (s), what is split by member (m), by row (d), or whole."""
        if self.mesh.size == 1:
            return fun
        kinds = {"s": self.specs, "m": P("member"), "d": P("data"), ".": P()}
        return on_devices(fun, self.mesh, set(self.mesh.axis_names), kinds, takes, gives)
