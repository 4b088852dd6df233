"""The plans among which a search chooses, and what each costs at the least.

A candidate fixes what an integer program over shardings does not: the sizes of the mesh axes, the
ZeRO stage, microbatches, remat and the schedule. Looking at one closely takes a trace, so each
candidate first gets a lower bound, which takes a few additions:

    seconds    products at the peak rate / devices x bubble + update + gradients over `data`
    bytes      parameters, gradients and optimizer state, as ZeRO, tensor and pipeline split them,
               and what the forward pass keeps for the backward pass

    GPT of 1.2e15 operations a step, 8 devices of 125e12 operations per second
    data=8                      1.20 s + gradients over 8 devices        at least 1.24 s
    data=4, pipeline=2, m=4     1.20 s x (1 + 1/4) + ...                 at least 1.52 s

A candidate whose bound is above the best plan found is never looked at.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from plurax import errors
from plurax.execute.gradient import gradient
from plurax.execute.initial_state import new_state
from plurax.execute.placement import leading_dim
from plurax.execute.rows import abstract_rows
from plurax.jaxpr.interpret import all_equations
from plurax.machine import Machine
from plurax.plan import Plan, Precision, Remat
from plurax.planner.graph import graph_of
from plurax.sharding.annotations import Boundary
from plurax.sharding.axes import Axes
from plurax.state import TrainState
from plurax.task import Task

REMATS: tuple[Remat, ...] = ("none", "dots", "full")
SCHEDULES = ("1f1b", "interleaved", "zb-h1")


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a step of the whole batch needs on one device.

    **Fields:** `product_flops`, for each dtype the operations in matrix products, forward and
    backward, and `products`, their number if there is one microbatch; `kept`, bytes that the
    forward pass keeps for the backward pass.
    """

    product_flops: Mapping[str, float]
    products: float
    kept: float


@dataclasses.dataclass(frozen=True)
class Model:
    """What the bounds of all candidates need to know of a task.

    **Fields:** `like`, the training state as `jax.ShapeDtypeStruct`s; `totals`, by remat policy;
    `parameters` and `optimizer`, the bytes of each; `batch_size`; `layers`, the largest
    number of stages into which the model can be cut.
    """

    like: TrainState
    totals: Mapping[str, Totals]
    parameters: int
    optimizer: int
    batch_size: int
    layers: int


def model_of(
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: PyTree,
    precision: Precision,
    remats: Sequence[Remat] = REMATS,
) -> Model:
    """Return what bounds need, from one trace for each remat policy."""
    like: TrainState = jax.eval_shape(lambda: new_state(task, optimizer, jax.random.key(0)))
    rows = abstract_rows(batch)
    totals: dict[str, Totals] = {}
    for remat in remats:
        fun = gradient(task, precision, remat=remat)
        graph = graph_of(fun, (like.params, like.model_state, rows), Axes({}), searched=())
        flops: dict[str, float] = {}
        for node in graph.nodes:
            (strategy,) = node.strategies
            if strategy.flops:
                flops[strategy.dtype] = flops.get(strategy.dtype, 0) + node.trips * strategy.flops
        kept = sum(
            math.prod(value.tensor.shape) * value.tensor.itemsize
            for value in graph.values
            if value.kept
        )
        products = sum(node.trips for node in graph.nodes if node.strategies[0].flops)
        totals[remat] = Totals(flops, products, kept)
    layers = 1 + _boundaries(graph.traced.jaxpr) if task.stack is None else task.stack.depth
    return Model(
        like,
        totals,
        parameters=_bytes(like.params),
        optimizer=_bytes(like.opt_state),
        batch_size=leading_dim(batch),
        layers=layers,
    )


def _boundaries(jaxpr: Any) -> int:
    """Return the number of `stage_boundary`s in a traced gradient."""
    tags = {
        eqn.params["tag"]
        for eqn in all_equations(jaxpr)
        if eqn.primitive.name == "annotate" and not eqn.params["transposed"]
    }
    return sum(isinstance(tag, Boundary) for tag in tags)


def _bytes(like: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan to be looked at: the least `seconds` and `memory` (bytes on one device) of a step."""

    plan: Plan
    seconds: float
    memory: float


def candidates(
    model: Model, machine: Machine, devices: int, pinned: Plan, fields: Collection[str]
) -> Iterator[Candidate]:
    """Yield every plan for some devices that agrees with `pinned`, with its bounds.

    A plan may leave devices unused, as many as divide them: a small model is faster on few. Those
    `fields` of `pinned` are kept.
    """
    given = {name: getattr(pinned, name) for name in fields}

    def choices(field: str, every: Sequence[Any]) -> Sequence[Any]:
        return [given[field]] if field in given else every

    meshes = (mesh for used in _divisors(devices // pinned.member) for mesh in _meshes(used))
    for data, pipeline, tensor in meshes:
        if any(given.get(k, n) != n for k, n in zip(_SIZES, (data, pipeline, tensor), strict=True)):
            continue
        if model.batch_size % data or pipeline > model.layers:
            continue
        rows = model.batch_size // data
        for microbatches, zero, remat, schedule in itertools.product(
            choices("microbatches", _microbatches(rows, pipeline)),
            choices("zero", (0, 1, 2, 3) if data > 1 else (0,)),
            choices("remat", tuple(model.totals)),
            choices("schedule", SCHEDULES if pipeline > 1 else ("1f1b",)),
        ):
            if schedule == "interleaved" and 2 * pipeline > model.layers:
                continue
            try:
                plan = dataclasses.replace(
                    pinned,
                    data=data,
                    pipeline=pipeline,
                    tensor=tensor,
                    microbatches=microbatches,
                    zero=zero,
                    remat=remat,
                    schedule=schedule,
                )
            except errors.PlanError:
                # What is pinned, such as `stages` or `layers`, does not go with these sizes.
                continue
            yield Candidate(plan, *_bounds(model, machine, plan))


_SIZES = ("data", "pipeline", "tensor")


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


def _microbatches(rows: int, pipeline: int) -> list[int]:
    """Return how often the rows of a device may be divided: one divisor for each doubling.

    A pipeline with fewer microbatches than stages leaves devices idle.

    >>> _microbatches(48, 1), _microbatches(48, 4)
    ([1, 2, 4, 8, 16, 48], [4, 8, 16, 48])
    """
    chosen: dict[int, int] = {}
    for divisor in _divisors(rows):
        chosen.setdefault(divisor.bit_length(), divisor)
    usual = [n for n in chosen.values() if n >= pipeline]
    return usual or [rows]


def _bounds(model: Model, machine: Machine, plan: Plan) -> tuple[float, float]:
    """Return the least seconds of a step, and the least bytes on one device."""
    shards = plan.tensor * plan.pipeline
    split = [plan.data if plan.zero >= stage else 1 for stage in (3, 2, 1)]
    totals = model.totals[plan.remat]
    products = sum(
        machine.peak_seconds(flops, dtype) for dtype, flops in totals.product_flops.items()
    )
    seconds = products / (plan.devices // plan.member)
    seconds += machine.start_seconds * totals.products * plan.microbatches / plan.pipeline
    seconds *= 1 + bubble(plan)
    # The update reads and writes the parameters and the state, and reads the gradients.
    own = model.parameters / shards / (plan.data if plan.zero else 1)
    seconds += machine.traffic_seconds(3 * own + 2 * model.optimizer * own / model.parameters)
    if plan.data > 1:
        sent = 2 * model.parameters / shards * (plan.data - 1) / plan.data
        seconds += machine.collective_seconds(
            "all-reduce", sent, plan.data, shards, mesh_devices=plan.devices
        )
    # A pipeline keeps as many microbatches as it has stages, each of one stage.
    kept = totals.kept / plan.data / plan.microbatches / shards
    kept *= min(plan.pipeline, plan.microbatches)
    memory = model.parameters / shards * (1 / split[0] + 1 / split[1])
    memory += model.optimizer / shards / split[2]
    return seconds, memory + kept


def tensor_rows(model: Model, plan: Plan) -> float:
    """Return the rows of a step, in layers of one stage, that the devices of `tensor` share.

    What they send to each other is in proportion to it.
    """
    return model.batch_size / plan.data / plan.pipeline


def bubble(plan: Plan) -> float:
    """Return the time in which a device of a pipeline waits, relative to the time it computes."""
    idle = (plan.pipeline - 1) / plan.microbatches
    return idle / {"interleaved": plan.virtual_stages, "zb-h1": 3}.get(str(plan.schedule), 1)
