"""What one device does in one step: operations on values, with loops and branches nested.

A plan is traced once (`plurax.execute.recorder`), and all that is said of its step is read from the
`StepTrace` that this gives:

    what is asked                      is read by
    collectives                        `plurax.trace.collectives`
    bytes that are planned             `StepTrace.memory`
    which operations run as one        `plurax.trace.kernels`, by the fusion rules of a compiler
    memory of temporaries              `plurax.trace.liveness`
    flops and bytes moved              `plurax.trace.work`
    seconds on a machine               `plurax.trace.clock`

Example, `Plan(data=2)`, a layer of 512 x 512 on 8 rows of each device, forward and its gradient:

    Op           inputs                       outputs
    dot_general  x (8, 512), w (512, 512)     h (8, 512)       params["product"] = (8, 512, 512, 1)
    tanh         h                            a (8, 512)
    ...
    dot_general  x (8, 512), g (8, 512)       dw (512, 512)
    psum         dw                           dw (512, 512)    all-reduce over `data`
    mul, sub     w, dw                        w (512, 512)     from `StepTrace.update` on
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from plurax.pipeline.schedule import Schedule
from plurax.plan import Plan
from plurax.sharding.parameter_info import ParameterInfo

COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
"""The primitives that communicate, and the kind of each as `Collective.kind`."""


@final
class Value:
    """An array on one device: its `shape`, `dtype`, `size` (numbers) and `bytes`."""

    __slots__ = ("bytes", "dtype", "shape", "size")

    def __init__(self, aval: Any, order: Sequence[int] | None = None) -> None:
        self.shape, self.dtype = tuple(aval.shape), aval.dtype
        if order is not None:
            self.shape = tuple(self.shape[dim] for dim in order)
        self.size = math.prod(self.shape)
        extended = jnp.issubdtype(self.dtype, jax.dtypes.prng_key)
        self.bytes = self.size * (8 if extended else self.dtype.itemsize)


@final
class Op:
    """An operation: its primitive's `name` and `params`, the values it reads and computes, and the
    `blocks` of a loop (its body) or of a conditional (its branches); `trips` of a loop, 0
    if none is expected, None if unknown.

    Operands that are literals are left out of `inputs`.
    """

    __slots__ = ("blocks", "inputs", "name", "outputs", "params", "trips")

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        blocks: Sequence["Block"] = (),
        trips: int | None = 1,
    ) -> None:
        self.name, self.params = name, params
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.blocks, self.trips = list(blocks), trips


@final
class Block:
    """Operations in order, with `inputs` and `outputs`.

    `carried`, of a loop's body: for each carry the value at the start of an iteration and the one
    at its end. `outputs` may contain None, for a literal.
    """

    __slots__ = ("carried", "inputs", "ops", "outputs")

    def __init__(
        self,
        ops: list[Op],
        inputs: Sequence[Value],
        outputs: Sequence[Value | None],
        carried: Sequence[tuple[Value, Value | None]] = (),
    ) -> None:
        self.ops, self.inputs, self.outputs = ops, list(inputs), list(outputs)
        self.carried = list(carried)

    def all_ops(self) -> Iterator[Op]:
        """Yield the operations of this block and of the blocks inside."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.all_ops()


@dataclasses.dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one device of what a step is given and computes, XLA's temporaries aside.

    **Fields:** `parameters`, `optimizer` (its state), `model_state`, `gradients` (their reduced
    sums), `batch`.
    """

    parameters: int
    optimizer: int
    model_state: int
    gradients: int
    batch: int


@dataclasses.dataclass(frozen=True)
class PipelineActions:
    """What the actions of a pipeline consist of.

    The program has in the body of its loop over ticks one loop for each kind of action and part of
    a stage; a device runs in each tick those that the schedule says.

    **Fields:** `schedule`; `after`, for each stage that has an embedding, a head or another part of
    its own, whether the stage's layers come before it; `layers`, the number of layers of each
    stage.
    """

    schedule: Schedule
    after: Mapping[int, bool]
    layers: Sequence[int]

    def parts(self) -> list[tuple[str, int | None]]:
        """Return kind and part of each loop in the body of the tick loop, in order.

        A part is the number of a stage, or None for one layer.
        """
        parts: list[tuple[str, int | None]] = []
        kinds = {action.kind for line in self.schedule.actions for action in line}
        for kind in filter(kinds.__contains__, "FBW"):
            first = kind == "B"  # which goes through the parts backward
            parts += [(kind, stage) for stage, after in self.after.items() if after == first]
            parts += [(kind, None)] if any(self.layers) else []
            parts += [(kind, stage) for stage, after in self.after.items() if after != first]
        return parts

    def of_stage(self, stage: int) -> list[tuple[int | None, int]]:
        """Return the parts of a stage, each with how often it runs in an action."""
        own: list[tuple[int | None, int]] = [(stage, 1)] if stage in self.after else []
        return own + ([(None, self.layers[stage])] if any(self.layers) else [])

    def most_runs(self) -> Counter[tuple[str, int | None]]:
        """Return how often a step runs each of `parts`, on the device that does it most often."""
        most = Counter[tuple[str, int | None]]()
        for device, line in enumerate(self.schedule.actions):
            own = Counter[tuple[str, int | None]]()
            for (kind, chunk), count in Counter((a.kind, a.chunk) for a in line).items():
                for part, times in self.of_stage(chunk * self.schedule.devices + device):
                    own[kind, part] += count * times
            most |= own
        return most


def is_tick_loop(op: Op) -> bool:
    """Whether an operation is a loop over the ticks of a pipeline: loops in it may run or not."""
    return op.name == "scan" and any(inner.name == "while" for inner in op.blocks[0].ops)


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """What one device does in one step under a plan.

    **Fields:**

    - `plan`; `batch_size`, the examples of a step.
    - `block`: the operations, whose outputs begin with the new state.
    - `state`: the values of the old state, in whose memory the new one is; `arguments`, the state
      and the batch.
    - `update`: the index of the operation with which the optimizer's update begins.
    - `shardings`: of each parameter and of its optimizer state.
    - `partitioned`: whether the partitioner put collectives into it, as any plan but one that
      splits nothing but the batch needs.
    - `memory`: bytes on one device of what the step is given and computes.
    - `pipelines`: what the actions consist of, for each of its loops over the ticks of a pipeline.
    """

    plan: Plan
    batch_size: int
    block: Block
    state: Sequence[Value]
    arguments: Sequence[Value]
    update: int
    shardings: Sequence[ParameterInfo]
    partitioned: bool
    memory: PlannedMemory
    pipelines: Sequence[PipelineActions] = ()
