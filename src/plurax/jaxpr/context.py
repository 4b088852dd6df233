"""Split the tokens of a sequence over devices: which values have tokens, and where they begin.

Attention says which dim is that of tokens: the queries' dim, and the keys'. From there it is
followed back through the equations, by dims that are one index, to the values that have it first.
These are split over the mesh axis `context`, and all that is computed from them follows.

    a language model, tokens (B, 1025), width 512            split over context=4

    x = tokens[:, :-1]             (B, 1024)                 begins here: (B, 256) on a device
    h = table[x]                   (B, 1024, 512)            begins here: a gather is not followed
    h = h + positions              (B, 1024, 512)            follows
    loop over layers: carry h      (B, 1024, 512)            follows
      q, k, v = ...                (B, 1024, 8, 64)          annotated: attention reads them
      o = attention                (B, 1024, 8, 64)          follows q
    loss = mean(-log p)            (B,)                      partial sums over context

Parameters are not split: what meets tokens split over devices is cut there, without communication.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from plurax.jaxpr.annotate import OverContext, over_context
from plurax.jaxpr.compat import Scan, called_jaxpr, inner_jaxprs, is_plain_call
from plurax.jaxpr.equal_dims import equal_dims, shape_of
from plurax.jaxpr.follow_dim import Region
from plurax.jaxpr.interpret import bind, evaluate, flat_equations
from plurax.plan import ContextStrategy


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices over which tokens are split, and how queries meet the keys of other devices."""

    devices: int
    strategy: ContextStrategy

    def block(self, region: Region, block: int) -> int:
        """Return the keys of a block, so that each device has whole blocks of its own keys."""
        if self.exchanges_heads(region):
            return block
        return nearest_divisor(region.size // self.devices, block)

    def splits(self, region: Region) -> bool:
        """Whether the devices divide a region's keys and queries."""
        sizes = region.size, _tokens(region)[1]
        return all(size % self.devices == 0 for size in sizes)

    def of_inputs(self, region: Region, arrays: Sequence[Array]) -> list[Array]:
        """Return a region's inputs, split over `context` by tokens, and then by heads if asked."""
        (tokens, _), head = _tokens(region), self._heads(region)
        labels = _labels_of_inputs(region)
        split = []
        for array, (var, key), known in zip(arrays, region.inputs, labels, strict=True):
            dims = [d for d, label in known.items() if label == tokens]
            dims += [] if key is None else [key]
            if dims and shape_of(var)[dims[0]] > 1:
                array = over_context(array, dims[0])
            heads = [d for d, label in known.items() if label == head and shape_of(var)[d] > 1]
            if heads:
                array = over_context(array, heads[0], tokens=False)
            split.append(array)
        return split

    def of_results(self, region: Region, arrays: Sequence[Array]) -> list[Array]:
        """Return a region's results with their tokens split over `context`."""
        tokens, _ = _tokens(region)
        split = []
        for var, array in zip(region.results, arrays, strict=True):
            labels = region.labels[var]
            has = tokens in labels
            split.append(over_context(array, labels.index(tokens)) if has else array)
        return split

    def of_places(self, region: Region, places: Array, label: int) -> Array:
        """Return the places along a dim, split over `context` if its label is that of tokens.

        Where heads are exchanged each device has all tokens.
        """
        split = label == _tokens(region)[0] and not self.exchanges_heads(region)
        return over_context(places, 0) if split else places

    def exchanges_heads(self, region: Region) -> bool:
        """Whether each device has all tokens, for a share of the heads."""
        return self._heads(region) is not None

    def _heads(self, region: Region) -> int | None:
        """Return the label of the heads that are exchanged for tokens, if devices divide them."""
        if self.strategy != "heads":
            return None
        sizes = _sizes(region)
        divided = [label for label in region.shared if sizes[label] % self.devices == 0]
        return divided[-1] if divided else None


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of a number that is nearest to a size, by their ratio.

    >>> nearest_divisor(1024, 300), nearest_divisor(1024, 2048)
    (256, 1024)
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return min(divisors, key=lambda n: max(n, size) / min(n, size))


def _sizes(region: Region) -> dict[int, int]:
    """Return the sizes of a region's labels."""
    sizes: dict[int, int] = {}
    for var, labels in region.labels.items():
        for label, size in zip(labels, shape_of(var), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return sizes


def _tokens(region: Region) -> tuple[int, int]:
    """Return the label of the queries' tokens, and their number.

    A product's operand may have more dims of its own, such as heads that share keys.
    """
    sizes = _sizes(region)
    own = [(label, sizes[label]) for label in region.queries]
    equal = [pair for pair in own if pair[1] == region.size]
    return max(equal or own, key=lambda pair: pair[1])


def _labels_of_inputs(region: Region) -> list[dict[int, int]]:
    """Return for each input of a region the labels of its dims, by the dim."""
    labels: dict[Any, dict[int, int]] = {source: {} for source in region.inputs}
    for eqn in (*region.eqns, *(eqn for eqn, _ in region.reductions)):
        result = len(eqn.invars)
        known = {(result, d): n for d, n in enumerate(region.labels.get(eqn.outvars[0], ()))}
        for _ in range(2):  # a dim that a product's operands share is known from its result
            for left, right in equal_dims(eqn):
                for one, other in ((left, right), (right, left)):
                    if other in known:
                        known.setdefault(one, known[other])
        for (place, dim), label in known.items():
            source = region.read.get((id(eqn), place))
            if source is not None:
                labels[source].setdefault(dim, label)
    return [labels[source] for source in region.inputs]


# --- Where tokens begin ---------------------------------------------------------------------------


def split_from_start(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function with tokens split over `context` from where they begin.

    **Arguments:** `fun`, a function of trees of arrays, its first argument the parameters, in which
    the inputs of attention are annotated.
    """

    @functools.wraps(fun)
    def split(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        jaxpr = closed.jaxpr
        flat = flat_equations(jaxpr.eqns, jaxpr.outvars, inline=is_plain_call)
        dims = _Dims()
        dims.walk(flat.eqns)
        parameters = len(jax.tree.leaves(args[0]))
        whole = {*jaxpr.invars[:parameters], *jaxpr.constvars, *flat.constants}
        starts = dims.starts(flat.eqns, [v for v in jaxpr.invars if v not in whole])

        def begun(variables: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
            pairs = zip(variables, arrays, strict=True)
            return [over_context(x, starts[v]) if v in starts else x for v, x in pairs]

        leaves = begun(jaxpr.invars, [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)])
        inputs = zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *leaves), strict=True)
        out = evaluate(
            flat.eqns,
            {**flat.constants, **dict(inputs)},
            flat.results,
            default=lambda eqn, arrays: begun(eqn.outvars, bind(eqn, arrays)),
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return split


_PARTS = ("concatenate", "dynamic_slice", "pad", "slice", "split")
"""Operations that leave dims of equal size as they are."""


class _Dims:
    """The dims of tokens, followed back from where attention reads them.

    **Attributes:** `of`, for each variable its dim.
    """

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}
        self._begin: set[Any] = set()

    def _add(self, atom: Any, dim: int | None) -> None:
        if dim is not None and not isinstance(atom, Literal) and shape_of(atom)[dim] > 1:
            self.of.setdefault(atom, dim)

    def walk(self, eqns: Sequence[Any]) -> None:
        """Follow the dims back through equations."""
        for eqn in reversed(eqns):
            name = eqn.primitive.name
            tag = eqn.params.get("tag")
            if isinstance(tag, OverContext) and tag.tokens:
                self._add(eqn.invars[0], tag.dim)
            elif name == "scan":
                self._through_scan(eqn)
            elif inner_jaxprs(eqn):
                self._through_call(eqn)
            else:
                self._through(eqn)

    def _through(self, eqn: Any) -> None:
        """Follow the dims of results to the operands that have them."""
        pairs = list(equal_dims(eqn))
        for var in eqn.outvars:
            dim = self.of.get(var)
            if dim is None:
                continue
            sources = [one for one, other in pairs if other == (len(eqn.invars), dim)]
            if eqn.primitive.name in _PARTS:
                shape = shape_of(var)
                like = [(p, shape_of(atom)) for p, atom in enumerate(eqn.invars)]
                same = [p for p, own in like if len(own) == len(shape) and own[dim] == shape[dim]]
                sources = [(place, dim) for place in same]
            for place, source in sources:
                self._add(eqn.invars[place], source)
            if not sources:
                self._begin.add(var)

    def _through_call(self, eqn: Any) -> None:
        """Follow dims through a call with a derivative of its own, or one that is rematerialized.

        Of branches and `while` loops nothing is known: their results begin.
        """
        bodies = inner_jaxprs(eqn)
        if len(bodies) != 1 or len(bodies[0].invars) != len(eqn.invars):
            self._begin.update(var for var in eqn.outvars if var in self.of)
            return
        body, _ = called_jaxpr(eqn)
        self._into(body.outvars, eqn.outvars, 0)
        self.walk(body.eqns)
        self._into(eqn.invars, body.invars, 0)

    def _through_scan(self, eqn: Any) -> None:
        """Follow dims through a loop; what it carries has them in every iteration."""
        scan = Scan.of(eqn)
        body, carried = scan.body, scan.num_carry
        consts, carry, xs = scan.split(body.invars)
        outer = scan.split(eqn.invars)
        self._into(body.outvars[:carried], eqn.outvars[:carried], 0)
        self._into(body.outvars[carried:], eqn.outvars[carried:], -1)
        for _ in range(2):  # from a carry to what the iteration before returned
            self.walk(body.eqns)
            self._into(body.outvars[:carried], carry, 0)
        self._into(outer[0], consts, 0)
        self._into(outer[1], carry, 0)
        self._into(outer[2], xs, 1)

    def _into(self, targets: Sequence[Any], sources: Sequence[Any], shift: int) -> None:
        """Give targets the dims of sources, shifted for the rows of a loop's stacks."""
        for target, source in zip(targets, sources, strict=True):
            dim = None if isinstance(source, Literal) else self.of.get(source)
            if dim is not None and dim + shift >= 0:
                self._add(target, dim + shift)

    def starts(self, eqns: Sequence[Any], inputs: Sequence[Any]) -> Mapping[Any, int]:
        """Return the inputs and results of equations at which tokens begin, with their dims."""
        begin = [var for eqn in eqns for var in eqn.outvars if var in self._begin]
        return {var: self.of[var] for var in (*inputs, *begin) if var in self.of}
