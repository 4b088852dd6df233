"""The shardings of a candidate and its seconds: solve its graph, and say the solution as a plan.

The graph of one device's microbatch is solved on the machine, and the solution becomes rules for
parameters and the few strategies of equations that the partitioner would not choose by itself.
That takes a second, so candidates share solutions: one for each size of `tensor`, remat policy and
eight-fold range of rows in a microbatch. The seconds of another candidate follow from it:

    solved      tensor=4, 2 rows in each of 8 microbatches: 100 ms for one without parameters
    candidate   data=2, pipeline=2, tensor=4, 4 microbatches of 1 row under 1F1B
    rows        half as many: 50 ms, of two stages 25 ms each
    schedule    2 ticks of forwards, 8 of backwards, which take twice as long: 150 ms
    parameters  their gradients over `data` and their update, of one stage, are computed anew
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.analysis.estimate import human_seconds
from plurax.execute.initial_state import initial
from plurax.execute.placement import leading_dim
from plurax.freezing import frozen_leaves
from plurax.machine import Machine
from plurax.partition.pins import check
from plurax.pipeline.stages import even_layers
from plurax.plan import Plan, Remat
from plurax.planner import exact
from plurax.planner.candidates import tied_bytes
from plurax.planner.costs import (
    TimeCosts,
    held_bytes,
    parameter_bytes,
    pipeline_seconds,
    reduction_seconds,
    sends_meanwhile,
)
from plurax.planner.fewest import Walk, fewest_strategies, rules_of, strategies_of
from plurax.planner.graph import Graph
from plurax.planner.lockstep import StagedModel, Stages, fastest_stages, ticks_of_step
from plurax.planner.origins import readers
from plurax.planner.parts import parts_of
from plurax.planner.problem import Pins, Problem, Ticks, Within
from plurax.planner.profile import Share
from plurax.planner.rule_strategies import decided_by_rules
from plurax.planner.solved_candidate import Sharded
from plurax.planner.step_graph import KnownGraphs, graph_of_step
from plurax.sharding.rules import Rules
from plurax.sharding.spec import TensorSharding
from plurax.strategies import Strategy, axes_of, entries_of, entries_text
from plurax.task import Task
from plurax.trace.clock import rates_of_replicas, rates_of_stages

_BACKWARD = 2 / 3
"""The share of a gradient's products that are in its backward pass."""

_EXPOSED = 0.25
"""The share of a collective that is not hidden, where devices send while they compute: in estimates
of a dozen models on GPUs between nothing and a third."""

_SAME = 1 + 1e-4  # of costs: no estimate of so near a solution was lower

_APART = 8
"""Candidates share a solution if the rows of their microbatches differ by no larger factor."""


class TensorSearch:
    """Finds the shardings of candidates of one task.

    **Arguments:** `task`; `batch`, as `jax.ShapeDtypeStruct`s; `costs`, a function from a candidate
    to what the solver minimises; `ratios`, for each parameter the bytes of its optimizer state by
    its own; `machine`, if its devices differ: stages on faster ones get more
    layers; `memory`, the bytes that a device may use: where whole parameters would take more than
    half of them, all large ones are split; `activations`, the bytes of the whole batch that one
    stage sends to the next; `tokens`, which returns the dims of parameters that are those of
    tokens: `context` splits these, and `tensor` cannot split them again.
    """

    def __init__(
        self,
        task: Task,
        batch: PyTree,
        costs: Callable[[Plan], TimeCosts],
        ratios: Mapping[str, float] | None = None,
        machine: Machine | None = None,
        memory: float = math.inf,
        activations: int = 0,
        tokens: Callable[[], Mapping[str, Collection[int]]] = dict,
    ) -> None:
        self._tokens = functools.cache(tokens)
        self._machine, self._memory, self._activations = machine, memory, activations
        self._ratios = ratios or {}
        self._task, self._batch, self._costs = task, batch, costs
        self._batch_size = leading_dim(batch)
        self._depth = task.stack.depth if task.stack else 0
        # By `tensor`, remat, whether parameters must be split, and whether there are rules alone.
        self._found: dict[tuple[int, Remat, bool, bool], list[Sharded]] = {}
        self._preferred: dict[str, Sharded] = {}
        self._known = KnownGraphs()
        # For a remat policy, why pinned strategies are of another model.
        self._other: dict[Remat, errors.PlanError] = {}
        params, _ = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
        self._tied, leaves = tied_bytes(task, params), tree.named_leaves(params)
        self._shapes = {path: leaf.shape for path, leaf in leaves.items()}
        self._frozen = {*itertools.compress(leaves, frozen_leaves(task.frozen, params))}
        self._sizes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items()}

    def plan(self, plan: Plan, *, fewest: bool = False) -> Plan:
        """Return a candidate with the best shardings over `tensor`.

        With `fewest`, only those strategies of equations that make a difference. Raises `PlanError`
        if nothing is worth splitting.
        """
        plan = dataclasses.replace(plan, layers=self.layers(plan))
        if plan.tensor == 1:
            return plan
        solved = self.exactly(plan)
        rules = {**dict(plan.rules), **rules_of(solved.shardings)}
        if not solved.splits_products:
            raise errors.search_splits_nothing(plan.sizes_text())
        strategies = solved.strategies
        if _by_rules(self._task, plan):
            strategies = []
        elif fewest:
            strategies = fewest_strategies(solved.walk, solved.shardings, strategies, solved.moving)
        if plan.strategies is not None:
            given = {one.path: one for one in plan.strategies.equations}
            strategies = [*given.values(), *(one for one in strategies if one.path not in given)]
        pinned = solved.walk.pinned(strategies)
        return dataclasses.replace(plan, shardings=rules, strategies=pinned)

    def explain(self, plan: Plan, name: str) -> str:
        """Return how a parameter is split under a candidate, and what the best step costs if it
        is split otherwise.

        Raises `PlanError` if there is no such parameter.
        """
        if name not in self._shapes:
            raise errors.parameter_unknown(name, list(self._shapes))
        title = f"{name} {self._shapes[name]} under {plan.sizes_text()}"
        if plan.tensor == 1:
            return f"{title}\n  is not split over `tensor`, of which there is one device"
        solved = self.sharded(plan)
        graph, chosen = solved.graph, solved.shardings[name]
        shard = chosen.shard_shape(self._shapes[name], graph.axes.sizes)
        lines = [title, f"  is {_text(chosen)}, {shard} on each of {plan.tensor} devices"]
        if read := readers(graph, name):
            lines.append(f"  is read at {', '.join(read)}")
        now = human_seconds(solved.solution.cost)
        lines.append(f"  otherwise a step ({now} by the costs of the search) takes")
        for strategy in graph.nodes[graph.index(name)].strategies:
            (other,) = strategy.outputs
            if other != chosen:
                lines.append(f"    {_text(other)}: {self._otherwise(solved, name, other)}")
        return "\n".join(lines)

    def _otherwise(self, solved: Sharded, name: str, other: TensorSharding) -> str:
        """Return what the best step costs if a parameter is split otherwise."""
        if any(other.dims[dim] for dim in self._tokens().get(name, ())):
            return "not its tokens, which `context` splits"
        try:
            pins = {**solved.pins, name: (other,)}
            solution = exact.solve(solved.graph, solved.costs, pins)
        except errors.PlanError:
            return "not with what is pinned"
        more = solution.cost - solved.solution.cost
        change = f"{human_seconds(abs(more))} {'less' if more < 0 else 'more'}"
        return f"{change}, {more / solved.solution.cost:+.1%}" if more else "as long"

    def splits(self, plan: Plan) -> bool:
        """Whether the devices of `tensor`, if there are several, share any matrix product."""
        return plan.tensor == 1 or self.sharded(plan).splits_products

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step under a candidate, from a solution that it shares."""
        slowest = self._slowest(plan)
        solved = self.sharded(plan)
        once, reduction = solved.parameter_seconds(self._costs(plan))
        once, reduction = once + solved.profile.once, reduction - self._messages_shared(plan)
        if plan.pipeline > 1:
            model, sent = self._staged(plan), self._between_stages(plan)
            stages = self._stages(plan, model)
            if model.parts:  # which have their own updates
                once -= sum(part.update for part in model.parts)
            return stages.seconds + (once + reduction) / plan.pipeline + sent
        rows = self._share(plan, solved)
        starts = solved.starts * plan.context  # as costs of all tokens have them
        seconds = rows * (solved.profile.seconds - starts) + solved.starts
        seconds *= slowest
        if self._machine is not None and sends_meanwhile(self._machine):
            # Behind the backward pass of the last microbatch, from ZeRO 2 on behind all of them.
            beside = seconds if plan.zero >= 2 else seconds / plan.most_microbatches
            reduction = max(0.0, reduction - _BACKWARD * beside)
        return seconds + once + reduction

    def _between_stages(self, plan: Plan) -> float:
        """Return the seconds in which the stages of a candidate send to each other."""
        if self._machine is None:
            return 0.0
        assert isinstance(plan.schedule, str | tuple)
        ticks = ticks_of_step(
            plan.schedule, plan.pipeline, plan.most_microbatches, plan.virtual_stages
        )
        activations = self._activations / plan.data / plan.context / plan.most_microbatches
        return pipeline_seconds(
            self._machine, activations, self._tied / plan.tensor, ticks, plan.pipeline,
            stride=plan.tensor, mesh_devices=plan.devices,
        )  # fmt: skip

    def _messages_shared(self, plan: Plan) -> float:
        """Return the seconds of messages over `data` that parameters of one bucket share.

        The solver's costs are of one parameter at a time, each with messages of its own.
        """
        if self._machine is None or plan.data == 1:
            return 0.0
        shards = plan.pipeline * plan.tensor
        buckets = math.ceil(sum(self._sizes.values()) / shards / plan.bucket_bytes)
        empty = reduction_seconds(
            self._machine, 0.0, plan.data, plan.zero, plan.most_microbatches,
            stride=shards, mesh_devices=plan.devices,
        )  # fmt: skip
        return max(0, len(self._sizes) - buckets) * empty

    def memory(self, plan: Plan) -> tuple[float, float]:
        """Return the bytes that a device holds under a candidate: of parameters, and others.

        Parameters come with gradients and optimizer state. Others are what is kept for the backward
        pass; temporaries beside them are not counted.
        """
        solved = self.sharded(plan)
        graph, profile = solved.graph, solved.profile
        own: dict[bool, float] = {True: 0.0, False: 0.0}
        gradients = 0.0
        for path, sharding in solved.shardings.items():
            tensor = graph.parameters[path]
            in_layers = not self._depth or path.startswith("blocks/")
            own[in_layers] += parameter_bytes(graph, path, sharding, plan, self._ratios)
            size = sharding.shard_bytes(tensor.shape, tensor.itemsize, graph.axes.sizes)
            size = 0 if path in graph.frozen else size
            gradients += size / (2 if plan.precision == "bfloat16" else 1)
        copies = profile.copies / (plan.data if plan.zero == 3 else 1)
        if plan.pipeline > 1:
            stages = self._stages(plan, self._staged(plan))
            share = stages.most / sum(stages.layers)
            return own[True] * share + own[False], copies * share + stages.kept
        rows = self._share(plan, solved)
        kept = copies + rows * profile.kept
        # Those of a microbatch beside their sum, or beside their shards, until they are reduced.
        if self._depth and (plan.most_microbatches > 1 or (plan.data > 1 and plan.zero >= 2)):
            kept += gradients
        return own[True] + own[False], kept

    def layers(self, plan: Plan) -> tuple[int, ...] | None:
        """Return the layers of each stage of a candidate, or None where they are equal."""
        if plan.pipeline == 1 or plan.layers is not None:
            return None if plan.layers is None else tuple(plan.layers)
        model = self._staged(plan)
        if not self._depth and not model.parts:
            return None
        found = fastest_stages(model).layers
        return None if found == even_layers(model.depth, plan.total_stages) else found

    def _stages(self, plan: Plan, model: StagedModel) -> Stages:
        """Return the stages of a candidate; which layers are fastest is found for its estimate."""
        return model.balanced_stages() if plan.layers is None else model.stages(plan.layers)

    def _staged(self, plan: Plan) -> StagedModel:
        solved = self.sharded(plan)
        rows = self._share(plan, solved)
        assert isinstance(plan.schedule, str | tuple)
        profile = solved.profile
        parts: tuple[Share, ...] = ()
        if len(profile.parts) >= plan.total_stages:  # or the estimate says that there are too few
            updates = solved.updates(self._costs(plan))
            parts = tuple(
                dataclasses.replace(part.times(rows), update=update)
                for part, update in zip(profile.parts, updates, strict=True)
            )
        depth = self._depth or len(parts) or sum(plan.layers or (1,) * plan.total_stages)
        return StagedModel(
            plan.schedule,
            plan.pipeline,
            plan.most_microbatches,
            plan.virtual_stages,
            depth,
            profile.layers.times(rows),
            profile.embedding.times(rows),
            profile.head.times(rows),
            self._speeds(plan),
            parts,
        )

    def _slowest(self, plan: Plan) -> float:
        """Return the microbatches that the slowest device has time for while the slowest replica
        computes its own. Raises `MachineError` if devices of one replica differ."""
        machine = self._machine
        if machine is None or not machine.groups or plan.pipeline > 1:
            return plan.most_microbatches
        replicas = rates_of_replicas(plan, machine)
        slowest, *each = self._product_seconds(plan, [machine, *replicas])
        return max(map(operator.mul, replicas.values(), each)) / slowest

    def _product_seconds(self, plan: Plan, machines: Sequence[Machine]) -> list[float]:
        dtype = "bfloat16" if plan.precision == "bfloat16" else "float32"
        return [one.product_seconds(4096, 4096, 4096, dtype) for one in machines]

    def _speeds(self, plan: Plan) -> tuple[float, ...] | None:
        """Return how fast the devices at each place of the pipeline are, if the machine's differ.

        Speeds are relative to the slowest. Raises `MachineError` if those of one place differ.
        """
        machine = self._machine
        if machine is None or not machine.groups:
            return None
        every = [machine, *rates_of_stages(plan, machine)]
        slowest, *each = self._product_seconds(plan, every)
        return tuple(slowest / seconds for seconds in each)

    def sent_for_a_row(self, plan: Plan) -> tuple[float, float]:
        """Return the rows of a microbatch, and the seconds of collectives over `tensor` for one.

        A solution is of all tokens, of which `context` gives each device a share.
        """
        found = self.sharded(plan)
        return found.rows_of_a_microbatch, found.seconds_sent / found.rows / plan.context

    def sharded(self, plan: Plan) -> Sharded:
        """Return the solution for a candidate, found now or shared with another."""
        return self._of(plan) or self._shared(plan) or self._search(plan)

    def has_solved(self, tensor: int, remat: Remat) -> bool:
        """Whether there is a solution of a size of `tensor` and a remat policy."""
        return any(key[:2] == (tensor, remat) for key in self._found)

    def is_solved(self, plan: Plan) -> bool:
        """Whether there is a solution that a candidate shares."""
        return self._shared(plan) is not None

    def _shared(self, plan: Plan) -> Sharded | None:
        lean = self._lean(plan)
        return self._nearest(plan, lean, _APART) or (
            None if lean else self._nearest(plan, True, _APART)
        )

    def exactly(self, plan: Plan) -> Sharded:
        """Return a solution whose strategies are of a candidate's equations, and suit its rows."""
        if plan.pipeline > 1:
            return self.sharded(plan)  # stages have rules only
        return self._of(plan) or self._nearest(plan, self._lean(plan), 1.0) or self._search(plan)

    def others(self, plan: Plan) -> Iterator[Sharded]:
        """Yield other solutions of a candidate, where a quarter of each collective is exposed.

        None where a plan has strategies and hides nothing: with remat only gradients over `data`
        are sent meanwhile. Of machines that never do, the same shardings without strategies: what
        is sent is in a TPU's large memory, and more of a reduce-scatter and an all-gather than of
        one reduction. What is hidden behind computation only the estimate of a program knows, and
        what is fused: so of stages the first one has small parameters whole, since a residual
        stream that a few positions split by tokens is that for all that follows; and the last one
        has parameters as if all sending were hidden, with few sums to be reduced, since what a
        product's kernel would compute of its result is a kernel of its own behind a reduction.
        """
        by_rules, machine = _by_rules(self._task, plan), self._machine
        meanwhile = machine is not None and sends_meanwhile(machine)
        hides = plan.remat == "none" and meanwhile
        if plan.tensor == 1 or (meanwhile and not (by_rules or hides)):
            return
        solved = self.exactly(plan)
        if not (by_rules or hides):
            if solved.strategies:
                yield dataclasses.replace(solved, strategies=[])
            return
        costs = dataclasses.replace(solved.costs, exposed=_EXPOSED)
        known = [(solved.shardings, solved.strategies)]
        ticks = self._ticks(plan, solved)
        if ticks is not None:
            costs = solved.costs if not hides else costs
        ways = [(True, None), (False, None)] if plan.pipeline > 1 else [(False, None)]
        of_costs = [(costs, *way) for way in [(False, ticks)] * (ticks is not None) + ways]
        if not by_rules:
            of_costs.append((dataclasses.replace(costs, exposed=0.0, apart=True), False, None))
        for costs, plain, of_stages in of_costs:
            within = self._within(solved.graph, plan, solved.pins, plain=plain)
            solution = exact.solve(solved.graph, costs, solved.pins, within=within, ticks=of_stages)
            same = Problem(solved.graph, costs).cost(solved.solution.choice)
            if not by_rules and same <= solution.cost * _SAME:
                continue
            if costs.apart:  # equations have what takes least time with these parameters
                own: Pins = {path: (one,) for path, one in solution.parameters.items()}
                pins, costs = {**solved.pins, **own}, solved.costs
                solution = exact.solve(solved.graph, costs, pins, within=within)
            other = dataclasses.replace(
                solved,
                shardings=dict(solution.parameters),
                solution=solution,
                costs=costs,
                strategies=[] if by_rules else strategies_of(solved.graph, solution),
            )
            said = other.shardings, other.strategies
            if said not in known:
                known.append(said)
                yield other

    def _ticks(self, plan: Plan, solved: Sharded) -> Ticks | None:
        """Return the ticks of stages that have parts of a model, of which the slowest counts."""
        model = self._staged(plan) if plan.pipeline > 1 else None
        if model is None or not model.parts:
            return None
        layers = self.layers(plan) or even_layers(model.depth, plan.total_stages)
        nodes = [
            (part, "update" if node.trips < plan.most_microbatches
             else "backward" if node.backward else "forward")
            for part, node in zip(parts_of(solved.graph), solved.graph.nodes, strict=True)
        ]  # fmt: skip
        return model.ticks(layers, nodes)

    def prefer(self, plan: Plan, solved: Sharded) -> None:
        """Let a candidate have this solution, whatever layers its stages have."""
        self._preferred[dataclasses.replace(plan, layers=None).sizes_text()] = solved

    def take_rules(self, plan: Plan, other: Plan) -> None:
        """Let a candidate have the solution of another, which differs in what it recomputes, where
        that has no strategies of single equations."""
        if _by_rules(self._task, plan):
            self.prefer(plan, self.exactly(other))

    def _of(self, plan: Plan) -> Sharded | None:
        return self._preferred.get(dataclasses.replace(plan, layers=None).sizes_text())

    def _nearest(self, plan: Plan, lean: bool, apart: float) -> Sharded | None:
        """Return the known solution for rows nearest to a candidate's, if there is one."""
        rows, key = self._rows(plan), (plan.tensor, plan.remat, lean, _by_rules(self._task, plan))
        known = [
            (max(rows / one.rows_of_a_microbatch, one.rows_of_a_microbatch / rows), index, one)
            for index, one in enumerate(self._found.get(key, ()))
        ]
        nearest = min(known, default=None, key=lambda entry: entry[:2])
        return nearest[2] if nearest and nearest[0] <= apart else None

    def _rows(self, plan: Plan) -> int:
        return -(-self._batch_size // plan.parts)

    def _share(self, plan: Plan, solved: Sharded) -> float:
        """Return what a device has of a microbatch, by what it has of that of a solution.

        A solution is of all tokens: a device with half of them takes half as long, and keeps half.
        """
        return self._rows(plan) / plan.context / solved.rows_of_a_microbatch

    def _lean(self, plan: Plan) -> bool:
        """Whether parameters must be split over `tensor` for a candidate to fit.

        Otherwise the solver may split rows instead, which is data parallelism over `tensor`.
        """
        whole = sum(
            held_bytes(
                size,
                size * self._ratios.get(path, 0.0),
                plan.data,
                plan.zero,
                frozen=path in self._frozen,
            )
            for path, size in self._sizes.items()
        )
        return plan.tensor > 1 and whole / plan.pipeline > 0.5 * self._memory

    def _within(
        self, graph: Graph, plan: Plan, pins: Pins, *, plain: bool = False
    ) -> Within | None:
        """Return the strategies among which a candidate's are chosen; None: all.

        Tokens that are split over `context` are not split again, which the graph does not know.
        Where parameters must be split, every large one is split as far as it can be; if `plain`, no
        small one is split.
        """
        lean, tokens = self._lean(plan), self._tokens() if plan.tensor > 1 else {}
        if not lean and not plain and not any(tokens.values()):
            return None
        large, within = sum(self._sizes.values()) / 100, []
        for node in graph.nodes:
            choices = list(range(len(node.strategies)))
            if node.kind == "parameter" and node.path not in pins:
                every = [strategy.outputs[0] for strategy in node.strategies]
                own = tokens.get(node.path, ())
                choices = [k for k in choices if not any(every[k].dims[dim] for dim in own)]
                if plain and self._sizes[node.path] <= large:
                    choices = [k for k in choices if not every[k].axes]
                elif lean and self._sizes[node.path] > large:
                    tensor = graph.parameters[node.path]
                    whole = tensor.shape, tensor.itemsize, graph.axes.sizes
                    shards = {k: every[k].shard_bytes(*whole) for k in choices}
                    choices = [k for k in choices if shards[k] == min(shards.values())]
            within.append(choices)
        return within

    def _search(self, plan: Plan) -> Sharded:
        whole, lean, by_rules = plan, self._lean(plan), _by_rules(self._task, plan)
        if plan.remat in self._other and plan.tensor > 1:
            raise self._other[plan.remat]
        # Stages are not in the graph: it is of the whole model.
        plan = dataclasses.replace(plan, pipeline=1, schedule="1f1b", stages=None, layers=None)
        graph = graph_of_step(self._task, plan, self._batch, self._known, by_rules=by_rules)
        costs = self._costs(whole)
        rules = Rules(plan.rules, graph.axes.mesh)
        ruled = {path: rules.find(path, one.shape) for path, one in graph.parameters.items()}
        pins: Pins = {path: (one,) for path, one in ruled.items() if one is not None}
        if plan.strategies is not None and graph.searched:
            try:
                check(graph.traced.jaxpr, plan.strategies)
            except errors.PlanError as error:
                self._other[plan.remat] = error
                raise
            pins = {**pins, **dict(map(_pin, plan.strategies.equations))}
        graph = decided_by_rules(graph) if by_rules else graph
        within = self._within(graph, whole, pins)
        solution = exact.solve(graph, costs, pins, within=within)
        strategies = [] if by_rules else strategies_of(graph, solution)
        shardings = dict(solution.parameters)
        walk = Walk(graph, rules.find)
        solved = Sharded(
            plan, self._batch_size, shardings, strategies, graph, solution, costs, pins, walk,
            self._depth,
        )  # fmt: skip
        key = (plan.tensor, plan.remat, lean, by_rules)
        self._found.setdefault(key, []).append(solved)
        return solved


def _by_rules(task: Task, plan: Plan) -> bool:
    """Whether a plan has no strategies: for equations of a stage, and of a share of the tokens.

    Nor those of a coupled loss over `data`: its step computes on all rows, the graph on those of
    one device, and the sizes decide what remat computes again.
    """
    return plan.pipeline > 1 or plan.context > 1 or (task.coupled and plan.data > 1)


def _pin(strategy: Strategy) -> tuple[str, tuple[TensorSharding | None, ...]]:
    """Return what a strategy pins: a node of the graph, and the shardings of its inputs."""
    inputs = tuple(
        TensorSharding(*axes_of(entries)) if entries else None for entries in strategy.inputs
    )
    equation = strategy.path.rpartition("/")[2].isdigit()
    return strategy.equation if equation else strategy.path, inputs


def _text(sharding: TensorSharding) -> str:
    return entries_text(entries_of(sharding.dims, sharding.partial))
