"""From a plan's rules to the sharding of each parameter and named activation; ZeRO's shards."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.plan import Plan
from plurax.sharding.spec import AxisSizes, TensorSharding


class Rules:
    """The sharding rules of a plan, for a mesh.

    **Arguments:** `rules`, as `Plan.shardings`; `axes`, the sizes of the mesh axes over which
    tensors can be split. Entries of other axes count as whole.

    **Attributes:** `notes`, for each tensor that does not lie as its rule says, why, and how it
    lies instead.
    """

    def __init__(self, rules: Iterable[tuple[str, tuple[Any, ...]]], axes: AxisSizes) -> None:
        self.rules = tuple(rules)
        self.axes = axes
        self.notes: dict[str, str] = {}

    def find(self, name: str, shape: Sequence[int]) -> TensorSharding | None:
        """The sharding of the first rule whose pattern fits; None where none does.

        A dim that its shards would not divide is left whole, and noted.
        """
        for pattern, entries in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                return self._checked(name, shape, _aligned(entries, len(shape), name))
        return None

    def _checked(self, name: str, shape: Sequence[int], entries: Sequence[Any]) -> TensorSharding:
        full = TensorSharding.of(*entries)
        kept = tuple(tuple(a for a in entry if self.axes.get(a, 1) > 1) for entry in full.dims)
        sharding = TensorSharding(kept)
        for dim in sharding.indivisible_dims(shape, self.axes):
            ways = sharding.num_shards(dim, self.axes)
            self.notes[name] = f"dim {dim} is whole: {ways} shards do not divide {shape[dim]}"
            sharding = sharding.with_dim(dim, ())
        return sharding

    def check_used(self, paths: Sequence[str], names: Sequence[str]) -> None:
        """Raise `PlanError` where a rule fits neither a parameter nor a named activation."""
        for pattern, _ in self.rules:
            if not fnmatch.filter([*paths, *names], pattern):
                raise errors.plan_rule_unused(pattern, paths, names)


def _aligned(entries: tuple[Any, ...], rank: int, name: str) -> tuple[Any, ...]:
    """The entries for a tensor of some rank: `...` becomes whole dims."""
    if entries and entries[0] is ...:
        entries = entries[1:]
        missing = rank - len(entries)
        entries = (None,) * missing + entries if missing >= 0 else entries
    if len(entries) > rank:
        raise errors.spec_too_long(entries, rank, name)
    return entries + (None,) * (rank - len(entries))


def parameter_shardings(rules: Rules, params: PyTree) -> PyTree:
    """How each parameter lies by the rules; whole where there is none."""
    return jax.tree.map_with_path(
        lambda path, leaf: (
            rules.find(tree.path_name(path), leaf.shape) or TensorSharding.whole(len(leaf.shape))
        ),
        params,
    )


def zero_sharding(
    shape: Sequence[int], sharding: TensorSharding, plan: Plan, *, stacked: bool = False
) -> TensorSharding:
    """A parameter's sharding with one more dim, or part of one, split over `data`.

    The largest dim that divides; where none does, the one that needs the least filling up. Scalars
    and what holds no numbers stay whole. Where layers are `stacked` along the leading dim, that
    stays whole.
    """
    n = plan.data
    if n == 1 or 0 in shape:
        return sharding
    free = [
        dim
        for dim in range(1 if stacked else 0, len(shape))
        if not sharding.dims[dim] and shape[dim] > 1
    ]
    even = [dim for dim in free if shape[dim] % n == 0]
    if even:
        return sharding.with_dim(max(even, key=lambda dim: (shape[dim], dim)), ("data",))
    if plan.zero < 3:
        # A dim may be split over both: the shard over `tensor` is cut once more.
        for dim, entry in enumerate(sharding.dims):
            if entry == ("tensor",) and shape[dim] % (n * plan.tensor) == 0:
                return sharding.with_dim(dim, (*entry, "data"))
    if not free:
        return sharding
    filled = {dim: -(-shape[dim] // n) * n / shape[dim] for dim in free}
    return sharding.with_dim(min(free, key=lambda dim: filled[dim]), ("data",))


def filled_shape(
    shape: Sequence[int], sharding: TensorSharding, axes: AxisSizes
) -> tuple[int, ...]:
    """The shape of a tensor filled up so that its shards divide it."""
    shard = sharding.shard_shape(shape, axes)
    return tuple(size * sharding.num_shards(dim, axes) for dim, size in enumerate(shard))


def opt_state_shardings(state: PyTree, params: PyTree, lies: PyTree) -> PyTree:
    """For each leaf of an optimizer's state the sharding of the parameter it belongs to; others are
    whole."""
    shardings = jax.tree.leaves(lies, is_leaf=is_sharding)
    return jax.tree.map(
        lambda leaf, place: (
            shardings[place] if place >= 0 else TensorSharding.whole(len(leaf.shape))
        ),
        state,
        match_opt_state_to_params(state, params),
    )


def match_opt_state_to_params(state: PyTree, params: PyTree, dims: int | None = None) -> PyTree:
    """For each leaf of an optimizer's state the number of the parameter it belongs to, or -1.

    A leaf belongs to a parameter where the parameter's path ends its own, or stands last in it, and
    it has its shape, as Adam's moments do; with `dims`, where so many leading dims are the same.
    """
    known = {
        tuple(map(str, path)): (leaf.shape, place)
        for place, (path, leaf) in enumerate(jax.tree.leaves_with_path(params))
    }

    def find(path: tuple[Any, ...], leaf: Any) -> int:
        names = tuple(map(str, path))
        parts = [(a, b) for b in range(len(names), -1, -1) for a in range(b + 1)]
        for start, stop in parts:
            shape, place = known.get(names[start:stop], ((), -1))
            # A list of parameters has paths that stand in those of an optimizer's chain too.
            if stop < len(names) and not leaf.ndim:
                continue
            same = shape == leaf.shape if dims is None else shape[:dims] == leaf.shape[:dims]
            if place >= 0 and same and leaf.ndim >= (dims or 0):
                return place
        return -1

    return jax.tree.map_with_path(find, state)


def is_sharding(node: Any) -> bool:
    """Whether a node of a tree is a `TensorSharding`."""
    return isinstance(node, TensorSharding)


def megatron(
    column: Mapping[str, Sequence[Any]] | Sequence[str],
    row: Mapping[str, Sequence[Any]] | Sequence[str],
    *,
    head: Mapping[str, Sequence[Any]] | Sequence[str] = (),
    sequence: Mapping[str, Sequence[Any]] | Sequence[str] = (),
) -> dict[str, tuple[Any, ...]]:
    """Rules for a transformer: column- and row-parallel layers over `tensor`.

    The weights that begin a layer (queries, keys and values; the first of a perceptron) are split
    by their outputs, those that end it by their inputs. In between, heads and hidden units stay
    where they are, and a layer adds up over devices once in each direction
    (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

    **Arguments:** patterns of parameters' paths. A weight `(..., in, out)` of two dims, behind any
    leading ones, needs only its pattern; for others map the pattern to its entries.

    - `column`: weights that begin a layer.
    - `row`: weights that end one.
    - `head`: the weight `(width, vocabulary)` from which logits come. Cross entropy is then
      computed on shards of the vocabulary; the logits are never gathered.
    - `sequence`: names of activations `(tokens, width)` between layers, given by `plurax.name`, to
      be split by token. The sums become reduce-scatters and all-gathers of the same bytes, and
      what is computed between layers is divided too
      (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

    >>> megatron(column=["*/in"], row=["*/out"], sequence=["residual"])
    {'*/in': (Ellipsis, None, 'tensor'), '*/out': (Ellipsis, 'tensor', None), \
'residual': (Ellipsis, 'tensor', None)}
    """
    groups = (
        (column, (..., None, "tensor")),
        (row, (..., "tensor", None)),
        (head, (..., None, "tensor")),
        (sequence, (..., "tensor", None)),
    )
    rules: dict[str, tuple[Any, ...]] = {}
    for given, usual in groups:
        entries = given if isinstance(given, Mapping) else dict.fromkeys(given, usual)
        rules |= {pattern: tuple(spec) for pattern, spec in entries.items()}
    return rules
