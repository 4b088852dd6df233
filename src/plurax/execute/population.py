"""Train many networks in one program: members split over devices and run in chunks.

Problem. A population of K small networks must train in one compiled program, use every device, and
fit in memory. Running all K at once needs K times the temporaries of one network; running one at a
time leaves the device idle. Members must not communicate, and each must compute what it would
compute alone.

Each member runs the one-network step of `step.py`. Three transformations nest, from the inside
out: `vmap` over the members of a chunk, a `fori_loop` over the chunks of a device, `shard_map` over
the mesh axis `member`. No collective crosses that axis.

Example: `Plan(member=2, chunk=4)`, 18 members, a parameter of shape `(3, 5)`:

    state on all devices      (18, 3, 5)   split over `member`
    state on one device       ( 9, 3, 5)   what `_chunked` receives
    loop iteration 0          ( 4, 3, 5)   members 0 to 3, one `vmap`
    loop iteration 1          ( 4, 3, 5)   members 4 to 7
    after the loop            ( 1, 3, 5)   member 8: a second, smaller `vmap` is compiled for it
    loss of one step          ( 9,)        per device; (18,) for the population

Each chunk is read with `dynamic_slice` and written back with `dynamic_update_slice`, so the loop
holds one state of all members and the temporaries of one chunk. `chunk_rule.py` chooses chunks that
divide the members evenly where it can, to avoid compiling the remainder.
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
    """Hold the task and the optimizer of one member."""

    task: Task
    optimizer: optax.GradientTransformation


def network(task: Task | HyperFn, optimizer: Any, hyper: Hyper) -> TaskAndOptimizer:
    """Build a member's task and optimizer, calling those that are functions of `hyper`.

    Raises `TaskError` where such a function needs a hyperparameter that `hyper` lacks, or needs the
    Python value of one (inside the compiled program hyperparameters are tracers).
    """
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
            # Only a KeyError for a name that `hyper` lacks is about hyperparameters; pass on
            # others.
            raise errors.hyper_missing(what, error.args[0], hyper) from None
        raise
    except jax.errors.ConcretizationTypeError as error:
        reason = str(error).splitlines()[0]
        raise errors.hyper_needs_a_value(what, reason) from error


class Population:
    """Build the functions of a population's program for one plan; `MembersProgram` compiles them.

    **Arguments:** `task` and `optimizer`, or functions of a member's hyperparameters that return
    them; `hyper`, example hyperparameters; `plan`, its `chunk` chosen; `mesh`; `batch`, a tree of
    `jax.ShapeDtypeStruct`s of the largest batch.
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
        """Return the task and the optimizer of a member with these hyperparameters."""
        return network(self._task, self._optimizer, hyper)

    def new_state(self, member: MemberArrays) -> TrainState:
        """Return a fresh state of one member, equal to that of one network with its seed."""
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
        """Return the size and kind of one member's step, for `choose_chunk`."""
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
        """Return the states of `count` members as `jax.ShapeDtypeStruct`s with their shardings."""
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
        """Return fresh states of all members, leaves `(K, ...)`."""

        def fresh(member: MemberArrays) -> TrainState:
            state = self.new_state(member)
            return state if self.partitioned is None else self.partitioned.own(state)

        # `lax.map` rather than `vmap`: only one member's temporaries exist at a time, and the body
        # for one member compiles in half the time of the body for many.
        return self._spread(lambda cohort: jax.lax.map(fresh, cohort), "m", "s")(cohort)

    def step(
        self, state: TrainState, cohort: MemberArrays, batch: PyTree, count: Int[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        """Update every member once from the same batch. Metrics have shape `(K,)`.

        `batch` has leaves `(N, ...)`, of which the first `count` rows are real.
        """

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
        """Run steps `first` to `stop`, counted from the start of training, over resident data.

        Metrics have shape `(K, calls)`; the first `stop - first` columns are set, the rest are
        zero.
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

            # If every step reads the same rows, gather them once, outside the loop.
            once = take(rows_at(jnp.int32(0)), jnp.int32(0)) if reads.fixed else None

            def body(t: Array, carry: tuple[TrainState, Metrics, Array]) -> Any:
                state, metrics, rows = carry
                if once is None:
                    # Compute the row order for a block of steps: for one step alone the cost is
                    # mostly the overhead of small operations. The predicate depends on `t` alone,
                    # not on the member, so `cond` remains a branch under `vmap` instead of becoming
                    # a select that computes both.
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
        """Return every member's totals over the same batch, without gradient; leaves `(K,)`."""

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
        """Return every member's outputs for the same inputs: leaves `(B, K, ...)`, rows leading."""

        def one(state: TrainState, member: MemberArrays, inputs: PyTree) -> tuple[Any, PyTree]:
            if self.partitioned is not None:
                predict = self._sharded(member).predict()
            else:
                predict = device_predict(self.make(member.hyper).task, self.plan.precision)
            return (), predict(state.params, state.model_state, inputs)

        def rows_first(state: TrainState, cohort: MemberArrays, inputs: PyTree) -> PyTree:
            _, outputs = self._chunked(one, keep=False)(state, cohort, inputs)
            return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outputs)

        # Rows lead so that the host can copy outputs chunk by chunk, as for one network
        # (`predict.py`).
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
        """Return `(state, cohort, *shared) -> (state, results)` over all members of a device.

        It runs `plan.chunk` members at a time and writes each chunk's states back into the arrays
        they came from. With `keep=False`, `one` returns no state and the states are not written.
        """

        def run(state: PyTree, cohort: MemberArrays, *shared: Any) -> tuple[PyTree, PyTree]:
            members = cohort.seeds.shape[0]
            chunk = min(self.plan.chunk or members, members)

            def some(first: Any, size: int, state: PyTree) -> tuple[PyTree, PyTree]:
                def cut(leaf: Array) -> Array:
                    return jax.lax.dynamic_slice_in_dim(leaf, first, size)

                part = jax.tree.map(cut, (state, cohort))
                # `shared` (batch, data, step numbers) has no member dim and is closed over, not
                # mapped.
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
            # `vmap` needs a static size, so the remainder is one more call with a size of its own.
            carry = body(whole * chunk, rest, carry) if rest else carry
            return carry if keep else ((), carry[1])

        return run

    @property
    def specs(self) -> Any:
        """Return the `PartitionSpec`s of the members' states."""
        if self.partitioned is None:
            return P("member")
        return jax.tree.map(
            lambda spec: P("member", *spec),
            self.partitioned.state.specs,
            is_leaf=lambda x: isinstance(x, P),
        )

    def _spread(self, fun: Callable[..., Any], takes: str, gives: str) -> Callable[..., Any]:
        """Run `fun` on every device, its arguments and results split by kind.

        Letters of `takes` and `gives`: `s`, states; `m`, split over `member`; `d`, rows split over
        `data`; `.`, replicated.
        """
        if self.mesh.size == 1:
            return fun
        kinds = {"s": self.specs, "m": P("member"), "d": P("data"), ".": P()}
        return on_devices(fun, self.mesh, set(self.mesh.axis_names), kinds, takes, gives)
