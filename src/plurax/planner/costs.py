"""What a strategy costs, and what it costs to reshard a value, in seconds.

The solver minimises one number: the sum over the nodes of the cost of the chosen strategy, and over
the values of the cost of each sharding that some reader needs and the producer does not give. Here
is the only place that says what these are.

    node               seconds per step
    a matrix product   trips x (the longer of its operations and its memory traffic, + overhead)
    another equation   trips x its memory traffic, and the all-reduces within it
    a parameter        the reduction of its gradient over `data`, and its update

A TPU's compiler leaves in its fast memory (`plurax.trace.fast_memory`) what one kernel computes and
later ones read, while there is room. An equation whose operands and results take less than half of
it reads from the large memory only what nobody has just computed, and writes there what is kept:

    GPT on v5e, 112 MiB of fast memory, 1 row of 512 tokens      bytes     traffic
    h = x w      x (512, 1024), w (1024, 4096), h (512, 4096)    26 MiB    w, 16 MiB
    a = gelu(h)  written                                          8 MiB    nothing
    4 rows       scores (4, 16, 512, 512), read and written     128 MiB    all

So is a solution costed (`near`). To find it, all traffic counts: what is sent leaves the fast
memory, and what that is is not known before.

    parameter of P bytes on one device, plan.data = n                     sent by each device
    zero 0             all-reduce, once                                   2 (n-1)/n P
    zero 1             reduce-scatter and all-gather, once                2 (n-1)/n P
    zero 2, m microbatches   reduce-scatter m times, all-gather once      (m + 1) (n-1)/n P
    zero 3, m microbatches   all-gather 2 m times, reduce-scatter m       3 m (n-1)/n P
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import optax
from jaxtyping import PyTree

from plurax import tree
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.planner.graph import Graph, Node
from plurax.planner.shard_strategies import ShardStrategy, Tensor
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import ReshardStep, plan_reshard
from plurax.sharding.rules import match_opt_state_to_params
from plurax.sharding.spec import TensorSharding
from plurax.trace.clock import collective_seconds, product_seconds
from plurax.trace.compilers import rules_of


def reshard_steps(
    axes: Axes, tensor: Tensor, source: TensorSharding, target: TensorSharding
) -> Sequence[ReshardStep] | None:
    """Return the steps of a reshard, none for zeros; None if it is impossible.

    A sum that is not partial cannot become partial.
    """
    if source == target or tensor.zero:
        return []
    if not target.partial <= source.partial:
        return None
    return plan_reshard(source, target, tensor.shape, tensor.itemsize, axes)


Home = tuple[float, bool]
"""Of a parameter that not all stages of a pipeline have: its seconds on the devices that have most
of such parameters, by those of a device on the average; and whether it is packed into a buffer."""


@dataclasses.dataclass(frozen=True)
class TimeCosts:
    """What the solver minimises: seconds on a machine. A cost of infinity forbids.

    **Fields:** `machine`; `plan`, of which `data`, `zero`, `microbatches` and `pipeline` count;
    `state_ratios`, for each parameter the bytes of its optimizer state by its own bytes; `exposed`,
    the share of a collective's seconds in which a device computes nothing; `near`, whether what
    stays in a fast memory is no traffic; `apart`, whether what is computed of a reduced sum, which
    no product's kernel computes, is a kernel; `homes`, of parameters that not all stages have
    (`plurax.planner.candidates.homes_of`).

    A graph is of all tokens. Where `context` splits these, seconds are of as many devices together:
    each starts kernels, and updates parameters.
    """

    machine: Machine
    plan: Plan = dataclasses.field(default_factory=Plan)
    state_ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exposed: float = 1.0
    near: bool = False
    apart: bool = False
    homes: Mapping[str, Home] = dataclasses.field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The factor by which costs become numbers that suit the solver: microseconds."""
        return 1e6

    def strategy(self, graph: Graph, node: Node, strategy: ShardStrategy) -> float:
        """Return the seconds of a node in one step."""
        if node.kind == "parameter":
            return self.plan.context * sum(self.parameter(graph, node.path, strategy.outputs[0]))
        fast_memory = self.machine.fast_memory if self.near else 0.0
        traffic = far_traffic(graph, node, strategy, fast_memory)
        seconds = self.machine.traffic_seconds(traffic)
        # Other equations mostly run in the kernel of a product or of each other.
        starts = _LOOKED_UP if _looks_up(node.kind, strategy) else 0
        if (dims := strategy.product) is not None:
            starts = 1
            seconds = product_seconds(self.machine, dims, strategy.dtype, traffic)
        seconds += self.plan.context * starts * self.machine.start_seconds
        for kind, over, sent in strategy.sent:
            seconds += self._collective(graph.axes, kind, sent, over)
        return node.trips * seconds

    def reshard(
        self, axes: Axes, tensor: Tensor, source: TensorSharding, target: TensorSharding
    ) -> float:
        """Return the seconds to reshard a value; a slice costs nothing."""
        steps = reshard_steps(axes, tensor, source, target)
        if steps is None:
            return math.inf
        seconds = 0.0
        for step in steps:
            if step.kind != "slice":
                seconds += self._collective(axes, step.kind, step.bytes_sent, step.axes)
            if self.apart and "reduce" in step.kind:
                seconds += self.machine.start_seconds
                seconds += self.machine.traffic_seconds(2 * step.bytes)
        return seconds

    def _collective(self, axes: Axes, kind: str, sent: float, over: Sequence[str]) -> float:
        parts, devices = self.plan.context, self._devices(axes)
        seconds = collective_seconds(self.machine, kind, sent / parts, over, axes.sizes, devices)
        # A collective is a kernel.
        return parts * (self.machine.start_seconds + self.exposed * seconds)

    def _devices(self, axes: Axes) -> int:
        return self.plan.data * self.plan.pipeline * axes.size(list(axes.sizes))

    def parameter(self, graph: Graph, path: str, sharding: TensorSharding) -> tuple[float, float]:
        """Return the seconds of a parameter's update, and of its gradient over `data`."""
        plan, tensor = self.plan, graph.parameters[path]
        size = sharding.shard_bytes(tensor.shape, tensor.itemsize, graph.axes.sizes)
        n, frozen = plan.data, path in graph.frozen
        state = size * self.state_ratios.get(path, 0.0)
        times, packed = self.homes.get(path, (1.0, False))
        moved = update_bytes(size, state, n, plan.zero, packed=packed)
        update, reduction = 0.0 if frozen else times * self.machine.traffic_seconds(moved), 0.0
        if n > 1:
            # ZeRO-3 gathers parameters as they are computed with.
            half = plan.precision == "bfloat16" and tensor.itemsize > 2
            reduction = times * reduction_seconds(
                self.machine,
                size,
                n,
                plan.zero,
                plan.most_microbatches,
                stride=plan.pipeline * graph.axes.size(list(graph.axes.sizes)),
                mesh_devices=self._devices(graph.axes),
                gathered=2 / tensor.itemsize if half else 1.0,
                reduced=reduced_share(plan, self.machine, tensor.itemsize),
                frozen=frozen,
            )
        return update, reduction


_LOOKED_UP = 6
"""Kernels that compute which indices are of a device's shard, and hide the others, at the least: a
GPT whose words are split starts fourteen to nineteen more for both passes."""


def far_traffic(graph: Graph, node: Node, strategy: ShardStrategy, fast_memory: float) -> float:
    """Return the bytes that one device reads from its large memory and writes there."""
    if not fast_memory or strategy.traffic > fast_memory / 2:
        return strategy.traffic
    operands, results = graph.far.get(node.path, ((), ()))
    shards = [(strategy.inputs[place], tensor) for place, tensor in operands]
    shards += [(strategy.outputs[place], tensor) for place, tensor in results]
    sizes = graph.axes.sizes
    far = sum(one.shard_bytes(tensor.shape, tensor.itemsize, sizes) for one, tensor in shards)
    return min(far, strategy.traffic)


def _looks_up(kind: str, strategy: ShardStrategy) -> bool:
    """Whether rows are looked up in a dim that is split, or added to one."""
    if kind == "gather":
        return bool(strategy.outputs[0].partial - strategy.inputs[0].partial)
    if kind == "scatter-add":
        split = {axis for axes in strategy.inputs[0].dims for axis in axes}
        return not split.issubset(axis for axes in strategy.inputs[2].dims for axis in axes)
    return False


def sends_meanwhile(machine: Machine) -> bool:
    """Whether a machine sends while it computes what neither waits for it nor it for that."""
    return rules_of(machine.platform).overlaps


def least_together(machine: Machine, computing: float, sending: float) -> float:
    """Return the least seconds of computing and sending: of both at a time, those of the longer."""
    return max(computing, sending) if sends_meanwhile(machine) else computing + sending


def update_bytes(
    params: float, state: float, data: int, zero: int, *, packed: bool = False
) -> float:
    """Return the bytes that the update of parameters moves on one device.

    It reads and writes the parameters and their optimizer state, and reads the gradients. Those of
    a stage that are `packed` into a buffer are taken out of it and put back, as a branch that only
    this stage takes, and what it returns is chosen where the loss is finite.

    **Arguments:** `params` and `state`, the bytes of each on one device without ZeRO.
    """
    own, kept = (9, 7) if packed else (3, 2)
    return (own * params + kept * state) / (data if zero else 1)


def reduced_share(plan: Plan, machine: Machine, itemsize: int) -> float:
    """Return the bytes that the reduction of a gradient sends, by those of its own dtype.

    CPUs round to the `reduce_dtype` of a plan, and send as without it.
    """
    rounded = plan.reduce_dtype is not None and machine.platform != "cpu" and itemsize > 2
    return 2 / itemsize if rounded else 1.0


def reduction_seconds(
    machine: Machine,
    size: float,
    data: int,
    zero: int,
    microbatches: int,
    *,
    stride: int,
    mesh_devices: int,
    gathered: float = 1.0,
    reduced: float = 1.0,
    frozen: bool = False,
) -> float:
    """Return the seconds in which `data` devices reduce a gradient of `size` bytes.

    **Arguments:** `zero`, the stage; `stride`, `mesh_devices`: as of `Machine.collective_seconds`;
    `gathered`, the bytes of a parameter as ZeRO-3 gathers it by its own; `reduced`, those of a
    gradient as it is added up by its own; `frozen`, whether there is none, and the parameter is
    only gathered.
    """
    seconds = 0.0
    for kind, count in REDUCTION[zero].items():
        if frozen and (kind != "all-gather" or zero < 3):
            continue
        repeated = count * (microbatches if kind in _PER_MICROBATCH[zero] else 1)
        sent = size * (data - 1) / data * (2 if kind == "all-reduce" else 1)
        if kind != "all-gather":
            sent *= reduced
        elif zero == 3:
            sent *= gathered
        seconds += repeated * machine.collective_seconds(
            kind, sent, data, stride, mesh_devices=mesh_devices
        )
    return seconds


def pipeline_seconds(
    machine: Machine,
    activations: float,
    tied: float,
    ticks: int,
    pipeline: int,
    *,
    stride: int,
    mesh_devices: int,
) -> float:
    """Return the seconds in which the stages of a pipeline send to each other in a step.

    Each tick sends the `activations` of a microbatch ahead and their gradient back, whatever the
    devices compute; the gradient of `tied` parameters, of the first and the last, is reduced once.

    **Arguments:** `activations`, `tied`: bytes; `stride`, `mesh_devices`: as of
    `Machine.collective_seconds`.
    """
    mesh = (pipeline, stride)
    sent = machine.collective_seconds(
        "collective-permute", activations, *mesh, mesh_devices=mesh_devices
    )
    reduced = 2 * tied * (pipeline - 1) / pipeline
    return 2 * ticks * sent + machine.collective_seconds(
        "all-reduce", reduced, *mesh, mesh_devices=mesh_devices
    )


# To add a level: a row in both tables, and what it splits in `update_bytes` and `held_bytes`.
REDUCTION: dict[int, dict[str, int]] = {
    0: {"all-reduce": 1},
    1: {"reduce-scatter": 1, "all-gather": 1},
    2: {"reduce-scatter": 1, "all-gather": 1},
    3: {"reduce-scatter": 1, "all-gather": 2},
}
"""For each ZeRO level, the collectives over `data` of a parameter, and how many."""

_PER_MICROBATCH: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset(),
    2: frozenset({"reduce-scatter"}),
    3: frozenset({"reduce-scatter", "all-gather"}),
}
"""Those of them that run for every microbatch."""


def state_ratios(optimizer: optax.GradientTransformation, params: PyTree) -> dict[str, float]:
    """Return for each parameter the bytes of its optimizer state by its own bytes.

    `params` are arrays or `jax.ShapeDtypeStruct`s.
    """
    state = jax.eval_shape(optimizer.init, params)
    paths = list(tree.named_leaves(params))
    sizes = [tree.byte_count(leaf) for leaf in jax.tree.leaves(params)]
    held = [0.0] * len(paths)
    owners = jax.tree.leaves(match_opt_state_to_params(state, params))
    for leaf, owner in zip(jax.tree.leaves(state), owners, strict=True):
        if owner >= 0:
            held[owner] += tree.byte_count(leaf)
    return {
        path: own / size if size else 0.0
        for path, own, size in zip(paths, held, sizes, strict=True)
    }


def parameter_bytes(
    graph: Graph, path: str, sharding: TensorSharding, plan: Plan, state_ratios: Mapping[str, float]
) -> float:
    """Return the bytes of a parameter, its gradient and its optimizer state on one device."""
    tensor = graph.parameters[path]
    size = sharding.shard_bytes(tensor.shape, tensor.itemsize, graph.axes.sizes)
    state = size * state_ratios.get(path, 0.0)
    return held_bytes(size, state, plan.data, plan.zero, frozen=path in graph.frozen)


def held_bytes(params: float, state: float, data: int, zero: int, *, frozen: bool = False) -> float:
    """Return the bytes of parameters, their gradients and their optimizer state on one device.

    **Arguments:** `params` and `state`, the bytes of each on one device without ZeRO; `frozen`,
    whether they have no gradients.
    """
    split = [data if zero >= level else 1 for level in (3, 2, 1)]
    gradients = 0.0 if frozen else params / split[1]
    return params / split[0] + gradients + state / split[2]
