"""The graph of a step: equations, loop boundaries and parameters, with their shard strategies.

The nodes are the live equations of the differentiated loss of one microbatch, with calls evaluated
in place, and identities where a sharding is decided without an equation:

    node          inputs -> outputs            decides
    an equation   operands -> results          how it is computed
    const         a loop's constant -> inside  its sharding in every iteration
    row           a stack -> one row           the sharding of the stack, leading dim replicated
    carry         start, end of an iteration   one sharding for the start, each iteration and the
                  -> inside, after the loop    end
    stack         a row -> the stack           the sharding of the stacked results
    parameter     gradient -> parameter        the sharding in which both are stored
    argument      -> a batch leaf              replicated: it is one device's rows
    output        a total ->                   replicated

A loop's body is in the graph once, and `trips` says how often its equations run. Nodes are found by
`path`: the index of an equation in each enclosing call and loop, as `14/3`, then `14/const0`,
`14/row2`, `14/carry1` and `14/stack0`; parameters by their name.

A value is produced by one node and read by others. If a reader takes another sharding, the value is
resharded, once for all readers of that sharding. Zeros are created in any sharding: they are no
values of the graph, and their readers have no input there.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import PyTree

from plurax import tree
from plurax.errors import PlanError
from plurax.freezing import frozen_leaves
from plurax.jaxpr.compat import (
    REMAT,
    Scan,
    call_operands,
    called_jaxpr,
    is_call_or_remat,
    is_linear,
    is_recomputed,
    is_transposed,
)
from plurax.partition.annotation_resolver import AnnotationResolver, NameRule
from plurax.partition.pins import equations
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import ValueVersions
from plurax.pipeline.cut import has_boundaries
from plurax.planner.shard_strategies import ShardStrategy, StrategyFinder, Tensor, every_sharding
from plurax.sharding.annotations import Boundary
from plurax.sharding.axes import Axes
from plurax.sharding.spec import TensorSharding

Place = tuple[int, Tensor]
"""A place among the operands or the results of a node, and the tensor that is there."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A reader of a value: the index of the node, which of its inputs, and how often per step."""

    node: int
    input: int
    trips: float


@dataclasses.dataclass(frozen=True)
class GraphValue:
    """A value: its shape and dtype, the node and output that produce it, and its readers.

    `kept` says whether it is kept from the forward to the backward pass; `varying`, whether it
    depends on the batch, or on parameters and constants alone.
    """

    tensor: Tensor
    node: int
    output: int
    uses: tuple[Use, ...]
    kept: bool = False
    varying: bool = True


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the graph.

    **Fields:** `kind`, as in the table above, or the operator of an equation; `path`; `strategies`,
    of which one is chosen; `trips`, how often it runs per step; `backward`, whether it is part of
    the backward pass; `part`, how many stage boundaries of a model are before it.
    """

    kind: str
    path: str
    strategies: tuple[ShardStrategy, ...]
    trips: float
    backward: bool = False
    part: int = 0

    @property
    def decides(self) -> bool:
        """Whether it is an equation, or a boundary of a loop."""
        return self.kind not in (*_GIVEN, "output")

    @property
    def boundary(self) -> bool:
        """Whether it is a boundary of a loop, and not an equation whose operator is called so."""
        return self.decides and not self.path.rpartition("/")[2].isdigit()

    def pin(self, choice: int) -> tuple[TensorSharding, ...]:
        """Return the shardings that say a strategy in a plan: those of the inputs.

        Of a loop's boundary, one: of a `row` and of a `stack` that of one row.
        """
        strategy = self.strategies[choice]
        if self.boundary:
            return (strategy.inputs if self.kind == "stack" else strategy.outputs)[:1]
        return strategy.inputs


@dataclasses.dataclass(frozen=True)
class Graph:
    """The graph of a step.

    **Fields:** `axes` of the mesh; `searched`, the axes over which operators may be split; `nodes`;
    `values` that are read by some node; `parameters`, for each parameter's path its shape and
    dtype; `traced`, the closed jaxpr of which it is the graph, and `args`, what that was traced
    with; `frozen`, the paths of parameters without a gradient; `meets`, where rules decide
    (`plurax.planner.rule_strategies`), for an input, by node and place, the nodes and outputs that
    a partial sum of it meets further on.
    """

    axes: Axes
    searched: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: tuple[GraphValue, ...]
    parameters: Mapping[str, Tensor]
    traced: Any = None
    args: tuple[PyTree, ...] = ()
    frozen: frozenset[str] = frozenset()
    meets: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = dataclasses.field(
        default_factory=dict
    )

    @functools.cached_property
    def equations(self) -> dict[str, Any]:
        """The equations by their paths."""
        return dict(equations(self.traced.jaxpr))

    @functools.cached_property
    def reads(self) -> dict[tuple[int, int], GraphValue]:
        """The value that each input of a node reads; none where zeros are created."""
        return {(use.node, use.input): value for value in self.values for use in value.uses}

    @functools.cached_property
    def far(self) -> Mapping[str, tuple[list[Place], list[Place]]]:
        """By the paths of nodes, operands and results that are in the large memory of a TPU.

        Parameters and what is computed of them alone, rows of stacks, and what is stacked or kept
        for the backward pass.
        """
        far: dict[str, tuple[list[Place], list[Place]]] = {
            node.path: ([], []) for node in self.nodes if node.decides
        }
        for value in self.values:
            producer = self.nodes[value.node]
            readers = [(self.nodes[use.node], use.input) for use in value.uses]
            if value.kept or not value.varying or producer.kind == "row":
                for reader, place in readers:
                    if reader.decides:
                        far[reader.path][0].append((place, value.tensor))
            stacked = any(reader.kind == "stack" for reader, _ in readers)
            if producer.decides and (value.kept or stacked):
                far[producer.path][1].append((value.output, value.tensor))
        return far

    def index(self, name: str) -> int:
        """Return the index of a node by the name of its parameter or the path of its equation.

        A path may be followed by the operator, `"14/3 dot_general"`: a parameter may be called 14.
        Raises `KeyError` if there is none.
        """
        matches = [
            (node.kind != "parameter", index)
            for index, node in enumerate(self.nodes)
            if name in (node.path, f"{node.path} {node.kind}")
        ]
        if not matches:
            raise KeyError(name)
        return min(matches)[1]


def graph_of(
    closed: Any,
    args: tuple[PyTree, PyTree, PyTree],
    axes: Axes,
    *,
    searched: Sequence[str] = ("tensor",),
    trips: int = 1,
    named: NameRule | None = None,
    finder: StrategyFinder | None = None,
    frozen: Sequence[str] = (),
) -> Graph:
    """Return the graph of a task's gradient.

    **Arguments:**

    - `closed`: the traced `(params, model_state, rows) -> (totals, model_state)`, whose totals end
      with the gradient, as `plurax.execute.gradient.gradient` returns it.
    - `args`: its arguments as `jax.ShapeDtypeStruct`s, `rows` those of one device's microbatch.
    - `axes`, of the mesh; `searched`, those over which operators may be split.
    - `trips`: microbatches per step.
    - `named`: a function from an annotation's name and shape to its sharding, or None.
    - `finder`, of `axes` and `searched`: by default a new one.
    - `frozen`: patterns of parameters that have no gradient.
    """
    builder = _GraphBuilder(finder or StrategyFinder(axes, searched), named)
    params = tree.named_leaves(args[0])
    leaves = [*params.values(), *jax.tree.leaves(args[1:])]
    inputs: list[_TracedValue] = [builder.value(_tensor(leaf)) for leaf in leaves]
    assert len(inputs) == len(closed.jaxpr.invars)
    for value in inputs[len(params) :]:
        value.varying = True
    results = builder.evaluate(closed.jaxpr, closed.consts, inputs, "", trips)
    held = frozenset(itertools.compress(params, frozen_leaves(frozen, args[0])))
    sums = len(results) - len(jax.tree.leaves(args[1]))
    first = sums - len(params) + len(held)
    grads = iter(results[first:sums])
    for path, value in zip(params, inputs, strict=False):
        builder.parameter(path, value, None if path in held else next(grads))
    for index, value in enumerate(inputs[len(params) :]):
        builder.fixed("argument", f"argument{index}", [], [value], trips)
    # Totals are reduced once per step; model state is replicated after each microbatch.
    for index, value in enumerate(results[:first]):
        builder.fixed("output", f"output{index}", [value], [], 1)
    for index, value in enumerate(results[sums:]):
        builder.fixed("output", f"state{index}", [value], [], trips)
    shapes = {path: value.tensor for path, value in zip(params, inputs, strict=False)}
    nodes, values = tuple(builder.nodes), builder.read_values()
    return Graph(axes, tuple(searched), nodes, values, shapes, closed, args, held)


class _TracedValue:
    """A value while the graph is built.

    **Attributes:** `root`, the value itself, or the value of which it is an alias; `producer`, the
    node and output that produce a root; `uses`; `backward`, whether the backward pass computes it;
    `kept`, of a root, whether the backward pass reads what the forward pass computed; `varying`,
    whether it depends on the batch.
    """

    def __init__(self, tensor: Tensor, backward: bool, root: "_TracedValue | None" = None) -> None:
        self.tensor, self.backward, self.root = tensor, backward, root or self
        self.producer: tuple[int, int] | None = None
        self.uses: list[Use] = []
        self.kept = False
        self.varying: bool = root is not None and root.varying


class _GraphBuilder:
    """Collects nodes and values in the order of evaluation."""

    def __init__(self, finder: StrategyFinder, named: NameRule | None) -> None:
        self._finder, self.axes, self.searched = finder, finder.axes, finder.searched
        self.nodes: list[Node] = []
        self._values: list[_TracedValue] = []
        self._named = named or (lambda name, shape: None)
        self._context = RuleContext(finder.axes)
        self._obeyed: set[Any] = set()
        self._backward, self._part = False, 0
        self._boundaries: dict[Boundary, int] = {}

    # --- Values and nodes -------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> _TracedValue:
        """Return a new value."""
        value = _TracedValue(tensor, self._backward)
        self._values.append(value)
        return value

    def node(
        self,
        kind: str,
        path: str,
        inputs: Sequence[_TracedValue],
        outputs: Sequence[_TracedValue],
        strategies: Sequence[ShardStrategy],
        trips: float,
        input_trips: Sequence[float] = (),
    ) -> None:
        """Add a node; `input_trips` are how often its inputs are read, if not all `trips` times."""
        index = len(self.nodes)
        self.nodes.append(Node(kind, path, tuple(strategies), trips, self._backward, self._part))
        for number, value in enumerate(inputs):
            times = input_trips[number] if input_trips else trips
            if not value.tensor.zero:
                value.uses.append(Use(index, number, times))
                value.root.kept |= self._backward and not value.root.backward
        varying = any(value.varying for value in inputs)
        for number, value in enumerate(outputs):
            value.producer = (index, number)
            value.varying |= varying

    def fixed(
        self,
        kind: str,
        path: str,
        inputs: list[_TracedValue],
        outputs: list[_TracedValue],
        trips: float,
    ) -> None:
        """Add a node whose inputs and outputs are replicated."""
        strategy = ShardStrategy(tuple(map(_whole, inputs)), tuple(map(_whole, outputs)))
        self.node(kind, path, inputs, outputs, [strategy], trips)

    def parameter(self, path: str, value: _TracedValue, grad: _TracedValue | None) -> None:
        """Add a parameter, stored as it is chosen; a gradient comes to it once a step."""
        grad = grad or self.value(dataclasses.replace(value.tensor, zero=True))
        choices = self._every(value.tensor)
        strategies = [ShardStrategy((one,), (one,)) for one in choices]
        self.node("parameter", path, [grad], [value], strategies, 1)
        value.varying = False  # in a step, whatever is made of its gradient

    def read_values(self) -> tuple[GraphValue, ...]:
        """Return the values that some node reads."""
        values, seen = [], set()
        for value in self._values:
            producer = value.root.producer
            if producer is None or not value.uses:
                continue
            # A value and its aliases are kept once.
            kept = value.root.kept and producer not in seen
            seen.add(producer)
            kept &= self.nodes[producer[0]].kind not in _GIVEN
            uses = tuple(value.uses)
            values.append(GraphValue(value.tensor, *producer, uses, kept, value.varying))
        return tuple(values)

    def _every(self, tensor: Tensor, *, partial: bool = False) -> tuple[TensorSharding, ...]:
        if jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key):
            return (TensorSharding.replicated(len(tensor.shape)),)
        return every_sharding(tensor.shape, self.axes, self.searched, partial=partial)

    # --- Equations --------------------------------------------------------------------------------

    def evaluate(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[_TracedValue],
        inside: str,
        trips: float,
    ) -> list[_TracedValue]:
        """Add the live equations of a jaxpr, and return its results."""
        known = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(const, trips)

        def read(atom: Any) -> _TracedValue:
            return self._constant(atom.val, trips) if isinstance(atom, Literal) else known[atom]

        for index, eqn in _live(jaxpr):
            inputs = [read(atom) for atom in eqn.invars]
            before = self._backward
            # Differentiation marks what it transposes.
            self._backward |= is_transposed(eqn)
            outputs = self._equation(eqn, inputs, f"{inside}{index}", trips)
            self._backward = before
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, constant: Any, trips: float) -> _TracedValue:
        """Return a constant; numeric scalars that are zero may be created in any sharding."""
        known = isinstance(constant, np.ndarray | np.generic | int | float)
        zero = known and not np.shape(constant) and not constant and not isinstance(constant, bool)
        tensor = _tensor(jax.typeof(constant))
        value = self.value(dataclasses.replace(tensor, zero=bool(zero)))
        if not zero:
            self.fixed("constant", f"constant{len(self.nodes)}", [], [value], trips)
        return value

    def _equation(
        self, eqn: Any, inputs: list[_TracedValue], path: str, trips: float
    ) -> list[_TracedValue]:
        name = eqn.primitive.name
        if is_call_or_remat(eqn):
            if name in REMAT and is_recomputed(eqn):
                inputs = [self._alias(value) for value in inputs]
                self._part = 0 if has_boundaries(called_jaxpr(eqn)[0]) else self._part
            operands = call_operands(eqn, inputs)
            return self.evaluate(*called_jaxpr(eqn), operands, f"{path}/", trips)
        if name == "scan":
            return self._scan(eqn, inputs, path, trips)
        if name in ("annotate", "sharding_constraint"):
            return self._annotation(eqn, inputs[0], path, trips)
        tensors = [_tensor(var.aval) for var in eqn.outvars]
        if inputs and inputs[0].tensor.zero and (is_linear(eqn) or name == "broadcast_in_dim"):
            return [self.value(dataclasses.replace(one, zero=True)) for one in tensors]
        outputs = [self.value(one) for one in tensors]
        strategies = self._finder.of(eqn, [value.tensor for value in inputs])
        if name == "shard_map":
            strategies = (self._by_hand(eqn),)
        self.node(name, path, inputs, outputs, strategies, trips)
        return outputs

    def _alias(self, value: _TracedValue) -> _TracedValue:
        """Return a value as it enters a recomputed part, where it is resharded once more.

        The partitioner orders its inputs after the cotangent, so that copies made before cannot be
        used within, but of a partial sum what it was reduced to (`Problem.shared`).
        """
        alias = _TracedValue(value.tensor, value.backward, value.root)
        self._values.append(alias)
        return alias

    def _annotation(
        self, eqn: Any, value: _TracedValue, path: str, trips: float
    ) -> list[_TracedValue]:
        """Fix the sharding of an annotated value; that of its cotangent stays open."""
        tag, transposed = eqn.params.get("tag"), eqn.params.get("transposed", False)
        if isinstance(tag, Boundary):
            before = self._boundaries.setdefault(tag, len(self._boundaries))
            self._part = before if transposed else before + 1
        every = self._every(value.tensor)
        if transposed and tag not in self._obeyed:
            return [value]
        if not transposed:
            every = self._obeying(eqn, value, every)
            if not every:
                return [value]
            self._obeyed.add(tag)
        out = self.value(dataclasses.replace(value.tensor, zero=False))
        strategies = [ShardStrategy((one,), (one,)) for one in every]
        self.node(eqn.primitive.name, path, [value], [out], strategies, trips)
        return [out]

    def _obeying(
        self, eqn: Any, value: _TracedValue, every: Sequence[TensorSharding]
    ) -> tuple[TensorSharding, ...]:
        """Return the shardings that an annotation leaves as they are; none if it says nothing."""
        resolver = AnnotationResolver(self.axes, self._named, operator.attrgetter("value"))
        tensor, targets = value.tensor, []
        for one in every:
            given = ValueVersions(self._context.spec(tensor.shape, tensor.dtype, one))
            try:
                target = resolver.of(eqn, given)
            except PlanError:
                # The constraint uses an axis that this sharding has on an open dim.
                continue
            if target is None:
                return ()
            targets.append(target)
        # Several, where an entry of the constraint is left open.
        return tuple(dict.fromkeys(targets))

    def _by_hand(self, eqn: Any) -> ShardStrategy:
        """Return the only strategy of a model's own `jax.shard_map`."""

        def known(spec: Any, var: Any) -> TensorSharding:
            return self._context.of_spec(spec, len(var.aval.shape))

        params = eqn.params
        return ShardStrategy(
            tuple(map(known, params["in_specs"], eqn.invars)),
            tuple(map(known, params["out_specs"], eqn.outvars)),
        )

    # --- Loops ------------------------------------------------------------------------------------

    def _scan(
        self, eqn: Any, inputs: list[_TracedValue], path: str, trips: float
    ) -> list[_TracedValue]:
        """Add a loop's boundaries and its body, once."""
        scan = Scan.of(eqn)
        consts, starts, stacks = scan.split(inputs)
        within = trips * scan.length
        args = [self._const(value, f"{path}/const{i}", trips) for i, value in enumerate(consts)]
        carried = [self.value(dataclasses.replace(one.tensor, zero=False)) for one in starts]
        for value in carried:
            value.varying = True  # what an iteration adds is not known yet
        rows = [self._row(value, f"{path}/row{i}", trips) for i, value in enumerate(stacks)]
        results = self.evaluate(
            scan.body, scan.body_consts, [*args, *carried, *rows], f"{path}/", within
        )
        ends = results[: scan.num_carry]
        outputs = []
        for index, (start, inner, end) in enumerate(zip(starts, carried, ends, strict=True)):
            after = self.value(inner.tensor)
            # Only zeros can start as a partial sum.
            partial = start.tensor.zero and start.tensor.floating
            strategies = [
                ShardStrategy((one, one), (one, one))
                for one in self._every(inner.tensor, partial=partial)
            ]
            where = f"{path}/carry{index}"
            self.node(
                "carry", where, [start, end], [inner, after], strategies, trips, [trips, within]
            )
            outputs.append(after)
        for index, row in enumerate(results[scan.num_carry :]):
            outputs.append(self._stack(row, scan.length, f"{path}/stack{index}", within))
        return outputs

    def _const(self, value: _TracedValue, path: str, trips: float) -> _TracedValue:
        """Return a constant of a loop as its body sees it: reduced, and resharded before it."""
        inner = self.value(value.tensor)
        if not value.tensor.zero:
            strategies = [ShardStrategy((one,), (one,)) for one in self._every(value.tensor)]
            self.node("const", path, [value], [inner], strategies, trips)
        return inner

    def _row(self, value: _TracedValue, path: str, trips: float) -> _TracedValue:
        """Return one row of a stacked input, whose leading dim is replicated."""
        tensor = Tensor(value.tensor.shape[1:], value.tensor.dtype)
        inner = self.value(tensor)
        strategies = [
            ShardStrategy((TensorSharding(((), *one.dims)),), (one,)) for one in self._every(tensor)
        ]
        self.node("row", path, [value], [inner], strategies, trips)
        return inner

    def _stack(self, row: _TracedValue, length: int, path: str, within: float) -> _TracedValue:
        """Return a stacked result; its rows may stay partial sums."""
        tensor = row.tensor
        out = self.value(Tensor((length, *tensor.shape), tensor.dtype))
        strategies = [
            ShardStrategy((one,), (TensorSharding(((), *one.dims), one.partial),))
            for one in self._every(tensor, partial=tensor.floating)
        ]
        self.node("stack", path, [row], [out], strategies, within)
        return out


_GIVEN = ("parameter", "argument", "constant")


def _whole(value: _TracedValue) -> TensorSharding:
    return TensorSharding.replicated(len(value.tensor.shape))


def _tensor(like: Any) -> Tensor:
    return Tensor(tuple(like.shape), like.dtype)


def _live(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yield the index and the equation of each equation on which a result depends, in order."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = []
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            live.append((index, eqn))
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return iter(live[::-1])
