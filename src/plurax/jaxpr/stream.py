"""Stream attention over its keys: blocks of keys one after another, and no array of T × S.

`follow_dim` cuts out of a traced function what lies between a product of queries and keys and the
sums over the keys, and `key_blocks` evaluates it on one block of keys after another. Here a
function is searched for such products, also in loops over layers, and evaluated in blocks.

    product                               streamed over
    q · k of two activations              keys, if there are more than `block`
    x · w of an activation, a parameter   nothing: no array of it grows with tokens by tokens
    a · b of two embeddings, with labels  nothing: a gather takes the keys apart; a warning says so

A kernel of a library (`attention_kernels.py`) is left as it is, but where tokens are split over
devices: there it computes on blocks of keys as well (`kernel_blocks.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, PyTree

from plurax import errors
from plurax.jaxpr.as_written import as_written
from plurax.jaxpr.attention_kernels import calls_kernel, kernel_of
from plurax.jaxpr.bodies import Body, Regions, by_jaxpr
from plurax.jaxpr.context import Context
from plurax.jaxpr.equal_dims import shape_of
from plurax.jaxpr.follow_dim import Region, candidates, follow, own_dims
from plurax.jaxpr.forms import NotFollowedError
from plurax.jaxpr.interpret import all_equations, source_line, variables
from plurax.jaxpr.kernel_blocks import KernelBlocks, KernelRegion, on_all_keys
from plurax.jaxpr.key_blocks import KeyBlocks
from plurax.jaxpr.masked_queries import WORTHWHILE, Queries, seen_queries
from plurax.jaxpr.over_tokens import dims_of_tokens, over_tokens
from plurax.jaxpr.token_order import BY_PLACES
from plurax.user_frames import warn


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """The keys of a block, how tokens are split over devices, if they are, and whether queries that
    see none of the keys of a block are left out.

    **Fields:** `worthwhile`, the share of the work for which tokens are put in another order;
    `orders`, of each attention whether they were; `groups`, among how many devices heads were
    exchanged, 1 where they were not.
    """

    size: int
    context: Context | None
    skip: bool
    worthwhile: float = WORTHWHILE
    orders: list[bool] = dataclasses.field(default_factory=list)
    groups: set[int] = dataclasses.field(default_factory=set)

    def fresh(self) -> "StreamOptions":
        """Return the same for another function."""
        return dataclasses.replace(self, orders=[], groups=set())

    def again(self) -> "StreamOptions | None":
        """Return how a function is streamed again, so that all attention has one order and the same
        groups; None if it has."""
        several = self.groups - {1}
        if self.context is not None and len(self.groups) > 1 and self.context.common is None:
            common = math.gcd(*several)
            context = dataclasses.replace(
                self.context, common=common if common > 1 else min(several)
            )
            return dataclasses.replace(self, context=context)
        if len(set(self.orders)) > 1 and self.worthwhile < 1:
            # Attention of which no key is masked would gather what is in order from all devices.
            return dataclasses.replace(self, worthwhile=1)
        return None

    @property
    def fewest(self) -> int:
        """Attention to so many keys, or fewer, is left as it is."""
        return self.size if self.context is None else 1


def streamed(
    fun: Callable[..., PyTree],
    block: int | None,
    context: Context | None = None,
    *,
    skip: bool = False,
) -> Callable[..., PyTree]:
    """Return the same function with attention in blocks of keys; apply it before differentiation.

    **Arguments:** `fun`, a function of trees of arrays, its first argument the parameters; `block`,
    the keys of a block. None: `fun` is returned; `context`, over which devices tokens are split;
    `skip`: whether queries that a mask hides a block from are left out of it; they are sliced, so
    their dim must not be split over devices.

    Warns with `StreamWarning` of a product of activations with more keys that cannot be
    streamed, with the line of the equation that is at fault.

    >>> import jax, jax.numpy as jnp
    >>> def attention(params, x):
    ...     return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x
    >>> x = jax.random.normal(jax.random.key(0), (1, 6, 2))
    >>> bool(jnp.allclose(streamed(attention, 2)(None, x), attention(None, x)))
    True
    """
    if block is None:
        return fun

    options = StreamOptions(block, context, skip)
    if context is None:
        return by_jaxpr(fun, _regions_of(options).evaluate)
    return over_tokens(fun, functools.partial(_traced, fun, options), context.devices)


def attention_keys(fun: Callable[..., PyTree], *args: PyTree) -> tuple[int, int]:
    """Return the most keys of attention by a function's equations, and by kernels; 0 without any.

    **Arguments:** as for `streamed`; `args`, as `jax.ShapeDtypeStruct`s.
    """
    written, of_kernels, options = [0], [0], StreamOptions(1, None, skip=False)

    def find(body: Body) -> list[Region]:
        regions = _regions(body.eqns, body.results, body.of_rows, options)
        kernels = [(eqn, kernel_of(eqn)) for eqn in body.eqns]
        written.extend(region.size for region in regions)
        of_kernels.extend(KernelRegion(e, kernel).tokens[1] for e, kernel in kernels if kernel)
        return []

    jax.eval_shape(by_jaxpr(fun, Regions(find, lambda *_: [], _has_attention).evaluate), *args)
    return max(written), max(of_kernels)


def tokens_of_arguments(
    fun: Callable[..., PyTree], block: int, context: Context, *args: PyTree
) -> list[set[int]]:
    """Return for each leaf of a function's arguments the dims that are those of tokens.

    **Arguments:** as for `streamed`; `args`, as `jax.ShapeDtypeStruct`s.
    """
    closed, _ = _traced(fun, StreamOptions(block, context, False), *args)
    return dims_of_tokens(closed.jaxpr, context.devices)


def _traced(fun: Callable[..., PyTree], options: StreamOptions, *args: PyTree) -> Any:
    """Return the jaxpr of a function whose attention is annotated, and the shapes of its results.

    It is traced again where its attention has several orders or groups.
    """
    while True:
        own = options.fresh()
        in_blocks = by_jaxpr(fun, _regions_of(own).evaluate)
        jaxpr, shapes = jax.make_jaxpr(in_blocks, return_shape=True)(*args)
        again = own.again()
        if again is None:
            return jaxpr, shapes
        options = again


def _regions_of(options: StreamOptions) -> Regions:
    """Return how attention is found, and evaluated in blocks."""

    context = options.context

    def find(body: Body) -> list[Region | KernelRegion]:
        regions = _regions(body.eqns, body.results, body.of_rows, options)
        return [*regions, *([] if context is None else _kernels(body.eqns, context))]

    def apply(
        region: Region | KernelRegion, body: Body, values: Mapping[Any, Any]
    ) -> Sequence[Any]:
        if isinstance(region, KernelRegion):
            return [_by_kernel(region, options, *(values[var] for var in region.reads()))]
        if context is not None and options.size >= region.size and context.gathers(region):
            options.groups.add(context.devices // context.groups(region))
            return as_written(region, context, body.eqns, values)
        queries = functools.partial(
            seen_queries, eqns=body.eqns, inputs=body.inputs, constants=body.constants
        )
        stream = _key_blocks(region, options, queries)
        inputs = [values[var] for var, _ in region.inputs]
        return stream(inputs, [values[var] for var in stream.beside])

    return Regions(find, apply, _has_products if context is None else _has_attention)


def _key_blocks(region: Region, options: StreamOptions, find: Callable[..., Queries]) -> KeyBlocks:
    """Return a region in blocks, without the queries that `find` proves to see none of a group."""
    # Under `context` keys that are fewer than those of a block are a block.
    context, size = options.context, min(options.size, region.size)
    if context is None or not context.splits(region):
        return KeyBlocks(region, size, None, find(region, size) if options.skip else None)
    block = context.block(region, size)
    options.groups.add(context.devices // context.groups(region))
    if not options.skip:
        return KeyBlocks(region, block, context)
    if context.groups(region) == 1:
        return KeyBlocks(region, block, context, find(region, block))
    # A range of tokens in the order of their places is that of a few devices.
    order = context.order(region)
    if order is not None:
        smaller = context.block(region, size, order)
        seen = find(region, smaller, order=order, worthwhile=options.worthwhile)
        options.orders.append(seen.order == order)
        if seen.order == order:
            return KeyBlocks(region, smaller, context, seen)
    return KeyBlocks(region, block, context)


def with_kernels(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function with kernels as operations whose rows and heads may be split.

    Those of libraries may not (Pallas), or not under `jax.vmap` over any dim (cuDNN).
    """

    def find(body: Body) -> list[KernelRegion]:
        kernels = [(eqn, kernel_of(eqn)) for eqn in body.eqns]
        regions = [KernelRegion(eqn, kernel) for eqn, kernel in kernels if kernel is not None]
        return [one for one in regions if one.kernel.reason_against(*one.tokens) is None]

    def apply(region: KernelRegion, _: Body, values: Mapping[Any, Any]) -> Sequence[Any]:
        return [on_all_keys(region.kernel, *(values[var] for var in region.reads()))]

    return by_jaxpr(fun, Regions(find, apply, _has_kernels).evaluate)


def _by_kernel(region: KernelRegion, options: StreamOptions, *operands: Array) -> Array:
    """Return the result of a kernel on parts of the keys, or of the heads."""
    context, order = options.context, BY_PLACES
    assert context is not None
    groups, rank = region.groups(context), operands[0].ndim
    options.groups.add(context.devices // groups)
    if groups == 1:
        return KernelBlocks(region.kernel, context, groups, order, rank).with_heads(*operands)
    if options.skip and region.order(context).devices > 1:
        options.orders.append(region.kernel.causal or options.worthwhile == 1)
        order = region.order(context) if options.orders[-1] else BY_PLACES
    return KernelBlocks(region.kernel, context, groups, order, rank)(*operands)


def _kernels(eqns: Sequence[Any], context: Context) -> list[KernelRegion]:
    """Return the calls of kernels, and warn of those that need all tokens on each device."""
    regions: list[KernelRegion] = []
    for eqn in eqns:
        kernel = kernel_of(eqn)
        if kernel is not None:
            region = KernelRegion(eqn, kernel)
            reason = region.reason_against(context)
            regions += [region] if reason is None else []
        elif calls_kernel(eqn):
            reason = (
                "it has a bias, segments, lengths of rows, dropout, a window or another mask, or "
                "mapped rows"
            )
        else:
            continue
        if reason is not None:
            warn(
                f"Plan(context={context.devices}): the attention by a kernel at "
                f"{source_line([eqn]) or 'unknown'} is computed with all tokens on each device, "
                f"because {reason}. Attention that is written as equations has no such limit.",
                errors.StreamWarning,
            )
    return regions


def _has_attention(jaxpr: Any) -> bool:
    """Whether any product or kernel in a jaxpr may be attention."""
    return _has_kernels(jaxpr) or _has_products(jaxpr)


def _has_kernels(jaxpr: Any) -> bool:
    """Whether any function in a jaxpr has a derivative of its own, as kernels have."""
    return any(eqn.primitive.name == "custom_vjp_call" for eqn in all_equations(jaxpr))


def _has_products(jaxpr: Any) -> bool:
    """Whether any product in a jaxpr has dims that both operands share, as attention has."""
    return any(
        eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]
        for eqn in all_equations(jaxpr)
    )


def _regions(
    eqns: Sequence[Any], results: Sequence[Any], of_rows: set[Any], options: StreamOptions
) -> list[Region]:
    """Return what can be streamed, and warn of products that cannot be."""
    regions: list[Region] = []
    taken: set[int] = set()
    # What follows from a product that is refused and has half its entries: those of the product.
    whole: dict[Any, int] = {}
    for index, eqn in enumerate(eqns):
        refused: list[NotFollowedError] = []
        dims = candidates(eqn, of_rows)
        follows = [whole[var] for var in variables(eqn.invars) if var in whole]
        if follows and not dims:
            least = min(follows)
            whole |= {var: least for var in eqn.outvars if 2 * math.prod(shape_of(var)) >= least}
        if id(eqn) in taken or follows:
            continue
        able: list[Region] = []
        for place, dim in dims:
            if shape_of(eqn.invars[place])[dim] <= options.fewest:
                continue
            try:
                region = follow(eqns, results, index, place, dim)
            except NotFollowedError as error:
                refused.append(error)
                continue
            if taken.isdisjoint(region.ids()):
                able.append(region)
        if able:
            # That of the queries, which nothing sums before the loss, may be followed as well.
            regions.append(min(able, key=lambda region: len(region.eqns)))
            taken |= regions[-1].ids()
        elif refused:
            entries, *read = (math.prod(shape_of(v)) for v in (*eqn.outvars, *eqn.invars))
            grows = _grows(eqn, options.size)
            if grows:
                _warn(eqn, max(refused, key=lambda error: error.reductions))
            if grows or entries > max(read):  # weights by values are no array of queries by keys
                whole[eqn.outvars[0]] = entries
    return regions


def _grows(eqn: Any, size: int) -> bool:
    """Whether both operands of a product have more than so many tokens: of fewer keys no array
    grows with tokens by tokens."""
    shapes = (shape_of(atom) for atom in eqn.invars)
    pairs = zip(shapes, own_dims(eqn), strict=True)
    return all(any(shape[dim] > size for dim in dims) for shape, dims in pairs)


def _warn(eqn: Any, refused: NotFollowedError) -> None:
    shape = "×".join(map(str, shape_of(eqn.outvars[0])))
    warn(
        f"Plan(stream=...): the product of shape {shape} at {source_line([eqn]) or 'unknown'} is "
        f"computed whole, because {refused.eqn.primitive.name} at "
        f"{source_line([refused.eqn]) or 'unknown'} cannot be computed in blocks: "
        f"{refused.reason}.",
        errors.StreamWarning,
    )
