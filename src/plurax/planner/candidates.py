"""The plans among which a search chooses, and what each costs at the least.

A candidate fixes what an integer program over shardings does not: the sizes of the mesh axes, the
ZeRO stage, microbatches, remat and the schedule. Looking at one closely takes a trace, so each
candidate first gets a lower bound, which takes a few additions:

    seconds    products at the peak rate / devices x bubble + update + activations from stage to
               stage, + gradients over `data`, which GPUs send meanwhile: there the longer of both
    bytes      parameters, gradients and optimizer state, as ZeRO, tensor and pipeline split them,
               and what the forward pass keeps for the backward pass

    GPT of 1.2e15 operations a step, 8 devices of 125e12 operations per second
    data=8                      1.20 s + gradients over 8 devices        at least 1.24 s
    data=4, pipeline=2, m=4     1.20 s x 5/4 (GPipe) + ...               at least 1.52 s

A candidate whose bound is above the best plan found is never looked at.
"""

import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import new_state
from plurax.execute.placement import leading_dim
from plurax.execute.rows import abstract_rows
from plurax.freezing import trained
from plurax.jaxpr.compat import Scan
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.remat import POLICIES
from plurax.machine import Machine
from plurax.pipeline.schedule import SCHEDULES, named, splits_backward
from plurax.plan import Plan, Precision, Remat, chunks_of
from plurax.planner.costs import (
    REDUCTION,
    Home,
    TimeCosts,
    held_bytes,
    least_together,
    pipeline_seconds,
    reduced_share,
    reduction_seconds,
    update_bytes,
)
from plurax.planner.experts import ROWS, in_proportion, used_devices
from plurax.planner.graph import Graph, graph_of
from plurax.planner.lockstep import stage_times, ticks_of_step
from plurax.planner.sizes import Sizes
from plurax.sharding.annotations import Boundary, activation_names, annotations_in
from plurax.sharding.axes import Axes
from plurax.state import TrainState
from plurax.task import Task
from plurax.trace.clock import rates_of_replicas

# Costs know nothing of copies to the host's memory.
REMATS: tuple[Remat, ...] = tuple(policy for policy in POLICIES if policy != "offload")


@dataclasses.dataclass(frozen=True)
class StepTotals:
    """What a step of the whole batch needs on one device, in one microbatch.

    **Fields:** `seconds` of all operations, `products` among them; `forward`, the share of the
    operations of products in the forward pass, and `layers`, in the equal layers of a stack;
    `kept`, bytes that the forward pass keeps for the backward pass; `kinds`, the seconds on each
    kind of device, of which `seconds` are the least.
    """

    seconds: float
    kinds: Mapping[Machine, float]
    products: float
    forward: float
    layers: float
    kept: float


@dataclasses.dataclass(frozen=True)
class Model:
    """What the bounds of all candidates need to know of a task.

    **Fields:** `like`, the training state as `jax.ShapeDtypeStruct`s; `totals`, by remat policy;
    `parameters` that are trained, others that are `frozen`, and `optimizer`, the bytes of each;
    `tied`, those of parameters that the first and the last stage hold; `activations`, those that
    one stage sends to the next for the whole batch; `batch_size`; `layers`, the largest number of
    stages into which the model can be cut; `precision`; `names`, of activations; `coupled`, whether
    the loss couples examples; `pads`, whether `data` may be a number that does not divide them.
    """

    like: TrainState
    totals: Mapping[Remat, StepTotals]
    parameters: int
    frozen: int
    optimizer: int
    tied: int
    activations: int
    batch_size: int
    layers: int
    precision: Precision
    names: Sequence[str]
    coupled: bool
    pads: bool = False

    def share(self, sizes: Sizes) -> float:
        """Return what of a batch the rows of a microbatch are, padding among them."""
        return -(-self.batch_size // sizes.parts) / self.batch_size


def model_of(
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: PyTree,
    precision: Precision,
    machine: Machine,
    remats: Sequence[Remat] = REMATS,
    rules: Sequence[tuple[str, tuple[Any, ...]]] = (),
) -> Model:
    """Return what bounds need, from one trace for each remat policy.

    Weights of experts that `rules` split over `data` are left out: no device reduces their
    gradients, and each updates some. A device multiplies with the weights of its experts alone.
    """
    like: TrainState = jax.eval_shape(lambda: new_state(task, optimizer, jax.random.key(0)))
    args = like.params, like.model_state, abstract_rows(batch)
    leaves = tree.named_leaves(like.params)
    whole = {path: leaf for path, leaf in leaves.items() if not _is_over_data(path, rules)}
    trains = tree.named_leaves(trained(task.frozen, like.params))
    parameters = tree.byte_count({path: whole[path] for path in trains if path in whole})
    groups = 1 if len(whole) == len(leaves) else machine.devices
    totals: dict[Remat, StepTotals] = {}
    for remat in remats:
        fun = gradient(task, precision, remat=remat)
        closed = jax.make_jaxpr(fun)(*args)
        graph = graph_of(closed, args, Axes({}), searched=(), frozen=task.frozen)
        totals[remat] = _totals(graph, machine, task.stack.depth if task.stack else 0, groups)
    depth = task.stack.depth if task.stack else 0
    marked, activations = _boundaries(graph.traced.jaxpr, depth)
    return Model(
        like,
        totals,
        parameters=parameters,
        frozen=tree.byte_count(whole) - parameters,
        optimizer=int(
            tree.byte_count(like.opt_state) * parameters / max(tree.byte_count(trains), 1)
        ),
        tied=tied_bytes(task, like.params),
        activations=activations,
        batch_size=leading_dim(batch),
        layers=depth or 1 + marked,
        precision=precision,
        names=activation_names(annotations_in(graph.traced.jaxpr)),
        coupled=task.coupled,
    )


def _is_over_data(path: str, rules: Sequence[tuple[str, tuple[Any, ...]]]) -> bool:
    """Whether the first rule for a parameter splits it over `data`."""
    entries = next((some for name, some in rules if fnmatch.fnmatchcase(path, name)), ())
    return any("data" in (entry if isinstance(entry, tuple) else (entry,)) for entry in entries)


def _totals(graph: Graph, machine: Machine, depth: int, groups: int) -> StepTotals:
    kinds = [kind for _, kind in machine.groups] or [machine]
    costs = {kind: TimeCosts(_least_rates(kind)) for kind in kinds}
    seconds = dict.fromkeys(costs, 0.0)
    forward = layers = every = products = 0.0
    for node in graph.nodes:
        (strategy,) = node.strategies
        if node.kind != "parameter":
            for kind, cost in costs.items():
                own = cost.strategy(graph, node, strategy)
                seconds[kind] += own / (groups if node.kind == "ragged_dot_general" else 1)
        if strategy.flops:
            own = node.trips * strategy.flops
            every += own
            forward += 0 if node.backward else own
            layers += own if depth and not node.trips % depth else 0
            products += node.trips
    kept = sum(
        math.prod(value.tensor.shape) * value.tensor.itemsize
        for value in graph.values
        if value.kept and value.varying
    )
    least, shares = min(seconds.values()), (forward / (every or 1), layers / (every or 1))
    return StepTotals(least, seconds, products, *shares, kept)


def _least_rates(machine: Machine) -> Machine:
    """Return a machine as bounds see it: kernels start at once, and where there is a fast memory,
    all that they read and write may be there. GPT of 8 layers on v5e, 4 rows of 512 tokens each:

        traffic of 4 rows counted      data=4, pipeline=2, microbatches of 1 row >= 36 ms
        estimated                      31 ms, since a row leaves the fast memory only to be kept
    """
    bandwidth = _AT_ONCE if machine.fast_memory else machine.memory_bandwidth
    return dataclasses.replace(machine, overhead=0.0, memory_bandwidth=bandwidth)


_AT_ONCE = 1e30
"""Bytes per second of a memory that takes no time."""


def tied_bytes(task: Task, parameters: PyTree) -> int:
    """Return the bytes of the parameters that the embedding and the head of a stack share."""
    names = task.stack.tied if task.stack else ()
    return sum(tree.byte_count(parameters["embed"][name]) for name in names)


def homes_of(task: Task, parameters: PyTree, pipeline: int) -> dict[str, Home]:
    """Return the homes of the parameters that not all stages of a pipeline have.

    Those of a stack's embedding are on one stage, those of its head on another: the larger of both
    takes all the time, and is as much as both together take on the average where they are equal.
    Those that both have, `tied`, all devices update. Parts between boundaries are equal.
    """
    sizes = {path: tree.byte_count(leaf) for path, leaf in tree.named_leaves(parameters).items()}
    if pipeline == 1 or task.stack is None:
        return {} if pipeline == 1 else dict.fromkeys(sizes, (1.0, True))
    tied, homes = {f"embed/{name}" for name in task.stack.tied}, dict[str, Home]()
    parts = [[path for path in sizes if path.startswith(f"{part}/")] for part in ("embed", "head")]
    every = sum(sizes[path] for path in itertools.chain(*parts))
    for part in parts:
        share = sum(sizes[path] for path in part) / max(every, 1)
        homes |= dict.fromkeys(part, (pipeline * share, True))
    return homes | dict.fromkeys(tied, (float(pipeline), False))


def _boundaries(jaxpr: Any, depth: int) -> tuple[int, int]:
    """Return the number of `stage_boundary`s in a traced gradient, and the bytes that cross one.

    The layers of a stack, `depth` of them, hand each other the carry of their loop.
    """
    tags, crossing = set(), [0]
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "annotate" and isinstance(eqn.params["tag"], Boundary):
            if not eqn.params["transposed"]:
                tags.add(eqn.params["tag"])
                crossing.append(_bytes(eqn.outvars))
        elif eqn.primitive.name == "scan" and eqn.params["length"] == depth:
            return len(tags), _bytes(eqn.outvars[: Scan.of(eqn).num_carry])
    return len(tags), max(crossing)


def _bytes(variables: Sequence[Any]) -> int:
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)


@dataclasses.dataclass(frozen=True)
class CandidatePlan:
    """A plan to be looked at: the least `seconds` and `memory` (bytes on one device) of a step.

    `sizes` take the place of those of the plan `pinned`.
    """

    sizes: Sizes
    pinned: Plan
    seconds: float
    memory: float

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan. Raises `PlanError` if the sizes do not go with what is pinned."""
        fields = self.sizes._asdict()
        stages = fields.pop("virtual_stages")
        if self.pinned.stages is None and stages != chunks_of(self.sizes.schedule):
            fields["stages"] = self.sizes.pipeline * stages
        return dataclasses.replace(self.pinned, **fields)


def candidates(
    model: Model,
    machine: Machine,
    devices: int,
    pinned: Plan,
    fields: Collection[str],
    limit: float = math.inf,
) -> Iterator[CandidatePlan]:
    """Yield every plan for some devices that agrees with `pinned`, with its bounds.

    The seconds of one that needs more than `limit` bytes are infinite.

    A plan may leave devices unused: it uses a number that divides them, or one that experts use.
    Those `fields` of `pinned` are kept.
    """
    # Others, such as `layers`, may not go with all sizes.
    doubtful = not {*_SIZES, *Sizes._fields, "precision", "shardings"}.issuperset(fields)
    # Strategies of equations say how `tensor` is used.
    split = pinned.strategies is not None and len(pinned.strategies) > 0
    bounds = _Bounds(model, machine, pinned, limit)
    for sizes in _every_sizes(model, machine, devices, pinned, fields):
        if split and sizes.tensor == 1:
            continue
        candidate = CandidatePlan(sizes, pinned, *bounds.of(sizes))
        if doubtful:
            try:
                candidate.plan  # noqa: B018
            except errors.PlanError:
                continue
        yield candidate


def _every_sizes(
    model: Model, machine: Machine, devices: int, pinned: Plan, fields: Collection[str]
) -> Iterator[Sizes]:
    pins = {name: getattr(pinned, name) for name in fields}

    def choices(field: str, every: Sequence[Any]) -> Sequence[Any]:
        return [pins[field]] if field in pins else every

    most = devices // (pinned.member * pinned.context)
    counts = sorted({*_divisors(most), *(n for n in used_devices(machine) if n <= most)})
    meshes = (mesh for used in counts for mesh in _meshes(used))
    for data, pipeline, tensor in meshes:
        if any(pins.get(k, n) != n for k, n in zip(_SIZES, (data, pipeline, tensor), strict=True)):
            continue
        if pipeline > model.layers:
            continue
        every = _all_microbatches(model, machine, data, pipeline, tensor)
        rest = 0 if model.pads else model.batch_size % data
        for microbatches in choices("microbatches", every):
            uneven = isinstance(microbatches, tuple)
            if (pipeline > 1 or len(microbatches) != data) if uneven else rest:
                continue
            schedules = [*_schedules(pipeline, microbatches, model.layers, pinned, fields)]
            for zero, remat, (schedule, stages) in itertools.product(
                choices("zero", tuple(REDUCTION) if data * pinned.context > 1 else (0,)),
                choices("remat", tuple(model.totals)),
                schedules,
            ):
                if uneven and zero > 1:
                    continue
                if remat != "none" and "schedule" not in fields and splits_backward(schedule):
                    continue  # both gradients would compute the forward pass again
                yield Sizes(data, pipeline, tensor, microbatches, zero, remat, schedule, stages)


_SIZES = ("data", "pipeline", "tensor")

_FEW = 24
"""Divisors of the rows of a device that are all considered."""

_SAVED = 0.02
"""Of a step, what twice as many stages on each device save at the least: seconds are as sure."""


def _meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield all sizes of `data`, `pipeline` and `tensor` whose product is `devices`.

    >>> list(_meshes(3))
    [(1, 1, 3), (1, 3, 1), (3, 1, 1)]
    """
    for data in _divisors(devices):
        for pipeline in _divisors(devices // data):
            yield data, pipeline, devices // data // pipeline


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _all_microbatches(
    model: Model, machine: Machine, data: int, pipeline: int, tensor: int
) -> list[int | tuple[int, ...]]:
    """Return the numbers of microbatches that are considered on a mesh."""
    rows, rest = divmod(model.batch_size, data)
    every: list[Any] = [] if rest else _microbatches(rows, pipeline)
    if rest and rows and model.pads:  # the rows of a device, and rows that are halved often
        padded = rows + 1, 1 << rows.bit_length()
        every = sorted({m for some in padded for m in _microbatches(some, pipeline)})
    if pipeline == 1 and not model.coupled:
        every += in_proportion(machine, data, tensor, model.batch_size, model.precision)
    return every


def _microbatches(rows: int, pipeline: int) -> list[int]:
    """Return how often the rows of a device may be divided.

    All divisors where they are few; of many one for each doubling, and those that leave as few rows
    as experts try. A pipeline with fewer microbatches than stages leaves devices idle.

    >>> _microbatches(48, 1), _microbatches(48, 4)
    ([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], [4, 6, 8, 12, 16, 24, 48])
    """
    every = _divisors(rows)
    if len(every) > _FEW:
        doublings = {n.bit_length(): n for n in reversed(every)}
        few = {rows // size for size in ROWS if rows % size == 0}
        every = sorted({*doublings.values(), *few})
    return [n for n in every if n >= pipeline] or [rows]


def _schedules(
    pipeline: int, microbatches: int, layers: int, pinned: Plan, fields: Collection[str]
) -> Iterator[tuple[Any, int]]:
    """Yield schedules, each with a number of stages that a device may have under it."""
    every = [pinned.schedule] if "schedule" in fields else SCHEDULES if pipeline > 1 else ["1f1b"]
    for schedule in every:
        known = named(schedule)
        if "schedule" not in fields and known and known.groups and microbatches % pipeline:
            continue
        usual = chunks_of(schedule)
        stages = pinned.stages or pipeline * usual
        if "stages" not in fields and usual > 1:
            several = _virtual_stages(usual, pipeline, microbatches, layers)
            yield from zip(itertools.repeat(schedule), several)
        elif stages <= layers and stages % pipeline == 0:
            yield schedule, stages // pipeline


def _virtual_stages(usual: int, pipeline: int, microbatches: int, layers: int) -> Iterator[int]:
    """Yield how many stages each device of a pipeline may have under a schedule with several.

    One number for each doubling, with equal stages where there is one, as long as it saves a
    fiftieth of a step: of `v m + p - 1` turns at most `p - 1` are idle.

    >>> [*_virtual_stages(2, 8, 8, 96)], [*_virtual_stages(2, 8, 256, 96)]
    ([2, 4, 12], [2])
    """
    most, doubled = layers // pipeline, usual
    while doubled <= most and (doubled == usual or pipeline - 1 > _SAVED * doubled * microbatches):
        some = range(doubled, min(2 * doubled, most + 1))
        yield next((v for v in some if layers % (pipeline * v) == 0), doubled)
        doubled *= 2


class _Bounds:
    """The least seconds of a step and the least bytes on one device, of candidates of one mesh.

    Candidates are many, a quarter of a million for a thousand devices, and share what they send:
    that is computed once. The seconds of those that need more than `limit` bytes are not.
    """

    def __init__(self, model: Model, machine: Machine, pinned: Plan, limit: float) -> None:
        self._model, self._machine, self._pinned, self._limit = model, machine, pinned, limit
        self._reduced = reduced_share(pinned, machine, itemsize=4)
        self._held = functools.cache(
            lambda n, *how: held_bytes(model.parameters / n, model.optimizer / n, *how)
        )
        self._between_stages = functools.cache(self._between_stages_once)
        self._over_data = functools.cache(self._over_data_once)
        self._replicas = functools.cache(self._replicas_once)

    def of(self, sizes: Sizes) -> tuple[float, float]:
        """Return the least seconds, infinite if they do not count, and the least bytes."""
        memory = self._memory(sizes)
        return (self._seconds(sizes) if memory <= self._limit else math.inf), memory

    def _memory(self, sizes: Sizes) -> float:
        model, shards, context = self._model, sizes.tensor * sizes.pipeline, self._pinned.context
        # A pipeline keeps as many microbatches as it has stages, each of one stage.
        kept = model.totals[sizes.remat].kept * model.share(sizes) / (shards * context)
        known = named(sizes.schedule)
        every = known is not None and known.stores_all
        most = sizes.most_microbatches
        kept *= most if every else min(sizes.pipeline, most)
        frozen = held_bytes(
            model.frozen / shards, 0.0, sizes.data * context, sizes.zero, frozen=True
        )
        return self._held(shards, sizes.data * context, sizes.zero) + frozen + kept

    def _seconds(self, sizes: Sizes) -> float:
        model, machine, context = self._model, self._machine, self._pinned.context
        data = sizes.data * context  # devices over which gradients are reduced
        totals, shards = model.totals[sizes.remat], sizes.tensor * sizes.pipeline
        seconds = self._computing(sizes) / (shards * context)
        starts = machine.start_seconds * totals.products
        seconds += starts * sizes.most_microbatches / sizes.pipeline
        seconds *= _waiting(sizes, totals, model.layers)
        own = model.parameters / shards, model.optimizer / shards
        seconds += machine.traffic_seconds(update_bytes(*own, data, sizes.zero))
        if sizes.pipeline > 1:
            seconds += self._between_stages(data, sizes.tensor, *_schedule_of(sizes))
        if data > 1:
            sending = self._over_data(data, shards, sizes.zero, sizes.most_microbatches)
            seconds = least_together(machine, seconds, sending)
        return seconds

    def _computing(self, sizes: Sizes) -> float:
        """Return the seconds in which all microbatches of the slowest replica are computed."""
        totals = self._model.totals[sizes.remat]
        most = [sizes.most_microbatches * totals.seconds]
        if self._machine.groups and sizes.pipeline == 1:
            replicas = self._replicas(sizes.data, sizes.tensor, sizes.microbatches)
            most = [count * totals.kinds[kind] for kind, count in replicas.items()] or most
        return max(most) * self._model.share(sizes)

    def _replicas_once(self, data: int, tensor: int, microbatches: Any) -> dict[Machine, int]:
        plan = Plan(data=data, tensor=tensor, microbatches=microbatches, member=self._pinned.member)
        try:
            return rates_of_replicas(plan, self._machine)
        except errors.MachineError:
            return {}  # refused where it is looked at, with the reason

    def _between_stages_once(
        self, data: int, tensor: int, schedule: Any, pipeline: int, microbatches: int, chunks: int
    ) -> float:
        # Of `tensor`, each device may send its part.
        activations = self._model.activations / (data * microbatches * tensor)
        ticks = ticks_of_step(schedule, pipeline, microbatches, chunks)
        return pipeline_seconds(
            self._machine, activations, self._model.tied / tensor, ticks, pipeline, stride=tensor,
            mesh_devices=data * pipeline * tensor * self._pinned.member,
        )  # fmt: skip

    def _over_data_once(self, data: int, shards: int, zero: int, microbatches: int) -> float:
        gathered = 0.5 if self._model.precision == "bfloat16" else 1.0
        return reduction_seconds(
            self._machine, self._model.parameters / shards, data, zero, microbatches,
            stride=shards, mesh_devices=data * shards * self._pinned.member, gathered=gathered,
            reduced=self._reduced,
        )  # fmt: skip


def _waiting(sizes: Sizes, totals: StepTotals, layers: int) -> float:
    """Return the seconds of a step by those in which a device of its pipeline computes.

    Without a pipeline 1. The slowest stage has the most layers, and ticks wait for backwards.
    """
    if sizes.pipeline == 1:
        return 1.0
    stages = sizes.pipeline * sizes.virtual_stages
    largest = totals.layers * math.ceil(layers / stages) * stages / layers
    times = stage_times(*_schedule_of(sizes), totals.forward)
    return max(1.0, largest) * times / (sizes.most_microbatches * sizes.virtual_stages)


def _schedule_of(sizes: Sizes) -> tuple[Any, int, int, int]:
    return sizes.schedule, sizes.pipeline, sizes.most_microbatches, sizes.virtual_stages
