"""The collectives of a recorded step: what they send, and how often they run.

They are listed before a compiler joins what can be joined, and only where something reads their
results. Example, `Plan(data=4, zero=3, microbatches=2)`, a kernel of 512 x 512, float32:

    recorded                                          listed
    scan, 2 microbatches
      all_gather w (128, 512) -> (512, 512)           all-gather      1 MiB      trips 2
      ...
      reduce_scatter dw (512, 512) -> (128, 512)      reduce-scatter  256 KiB    trips 2
    psum loss, weight                                 all-reduce      4 bytes, and 4 bytes

In a loop a collective counts once for each iteration, None if their number is known only while it
runs. Two loops count otherwise, because of what a compiler or a device makes of them:

- What is the same in every iteration of a `scan`, XLA computes once, before the loop.
- The loops in an iteration of a pipeline's loop over ticks are actions. One counts as often as on
  the device that runs it most often.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import final

from plurax.collective import Collective, ring_bytes_sent
from plurax.partition.scopes import BY_HAND, reason_of
from plurax.trace.flatten import axis_names, group_along_axis, group_size
from plurax.trace.step_trace import COLLECTIVES, Block, Op, PipelineActions, StepTrace, Value


def planned_collectives(trace: StepTrace) -> list[Collective]:
    """Return the collectives that the partitioner put into a step, in order.

    Those in a `jax.shard_map` of the model are left out. A plan that splits nothing but the batch
    is not partitioned, and has none.
    """
    if not trace.partitioned:
        return []
    return collectives_of(trace.block, trace.plan.axes, trace.pipelines, by_hand=False)


def every_collective(trace: StepTrace) -> list[Collective]:
    """Return all collectives of a step, in order."""
    return collectives_of(trace.block, trace.plan.axes, trace.pipelines)


def collectives_of(
    block: Block,
    sizes: Mapping[str, int],
    pipelines: Sequence[PipelineActions] = (),
    *,
    by_hand: bool = True,
) -> list[Collective]:
    """Return the collectives of a block, in order.

    **Arguments:** `sizes`, of the mesh axes; `pipelines`, whose loops over ticks the block has;
    `by_hand`, whether to include those in a `jax.shard_map` of the model.
    """
    walk = _CollectiveWalk(sizes, pipelines).block(block, 1)
    return [one for one, scopes in walk if by_hand or BY_HAND not in scopes]


@final
class _CollectiveWalk:
    """Walks blocks on a mesh of some `sizes`; `pipelines` say how often their actions run."""

    def __init__(self, sizes: Mapping[str, int], pipelines: Sequence[PipelineActions]) -> None:
        self._sizes, self._left = sizes, [*pipelines]
        # How often each action of the loop over ticks runs, inside of it.
        self._action_trips: dict[Op, int] = {}

    def block(
        self,
        block: Block,
        trips: int | None,
        stacks: Collection[Value] = (),
        outside: Mapping[Op, int | None] | None = None,
    ) -> Iterator[tuple[Collective, str]]:
        """Yield the collectives of a block that runs `trips` times, each with its scopes.

        `stacks` are the results of a loop that something reads; `outside` has the operations of its
        body that run outside, each with how often.
        """
        for op, read in _live(block, stacks):
            if op.name in COLLECTIVES:
                times = (outside or {}).get(op, trips)
                for value in op.outputs:
                    yield collective_of(op, value.bytes, self._sizes, times), op.params["scopes"]
            elif op.name == "scan":
                yield from self._scan(op, trips, read)
            elif op.name == "while":
                times = self._action_trips.get(op)
                yield from self.block(op.params["condition"], times)
                yield from self.block(op.blocks[0], times)
            else:
                for branch in op.blocks:
                    yield from self.block(branch, trips)

    def _scan(
        self, op: Op, trips: int | None, read: Collection[Value]
    ) -> Iterator[tuple[Collective, str]]:
        (body,), length = op.blocks, op.trips
        actions = [inner for inner in body.ops if inner.name == "while"]
        over_ticks = bool(self._left and actions and not self._action_trips)
        if over_ticks:
            pipeline = self._left.pop(0)
            length, times = len(pipeline.schedule.ticks), pipeline.most_runs()
            parts = [times[part] for part in pipeline.parts()]
            self._action_trips = dict(zip(actions, parts, strict=True))
        assert length is not None
        inside = None if trips is None else trips * length
        yield from self.block(body, inside, read, dict.fromkeys(_constant(body), trips))
        if over_ticks:
            self._action_trips = {}


def collective_of(op: Op, size: int, sizes: Mapping[str, int], trips: int | None = 1) -> Collective:
    """Return an operation that communicates, for results of `size` bytes, on a mesh of `sizes`."""
    kind, devices = COLLECTIVES[op.name], group_size(op.params, sizes)
    names = axis_names(op.params)
    axes = tuple(name for name, count in sizes.items() if name in names and count > 1)
    sent, reason = ring_bytes_sent(kind, size, devices), reason_of(op.params["scopes"])
    return Collective(
        kind, axes, size, sent, trips != 1, trips, *reason, group=group_along_axis(op.params)
    )


def _live(block: Block, stacks: Collection[Value]) -> list[tuple[Op, set[Value]]]:
    """Return the operations of which something reads a result, in order, and those results."""
    needed = {*stacks, *(value for value in block.outputs if value is not None)}
    live = []
    for op in reversed(block.ops):
        read = needed.intersection(op.outputs)
        if read:
            needed.update(op.inputs)
            live.append((op, read))
    return live[::-1]


def _constant(body: Block) -> list[Op]:
    """Return the operations of a loop's body whose results are the same in every iteration."""
    varying = {start for start, _ in body.carried}
    constant = []
    for op in body.ops:
        if op.name in ("order_after", "device_put"):  # each result is of one operand
            # Parameters do not wait for what is computed again from them (`free_on_cpu`).
            free = op.params.get("free_on_cpu", [True] * len(op.outputs))
            each = zip(op.inputs, op.outputs, free, strict=False)
            varying.update(out for into, out, own in each if into in varying or not own)
        elif op.name == "row" or op.blocks or not varying.isdisjoint(op.inputs):
            varying.update(op.outputs)
        else:
            constant.append(op)
    return constant
