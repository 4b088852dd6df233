"""From a plan's rules to the shardings of parameters, named activations and optimizer state.

`Plan.shardings` maps patterns of names to entries for a tensor's dims; the first pattern that
matches a parameter's path counts. ZeRO adds the mesh axis `data` to one dim of a parameter, of its
gradient or of its optimizer state. A leaf of the optimizer's state has the sharding of the
parameter it belongs to, which is found by comparing paths and shapes.

    mesh data=4, tensor=2; rules {"*/in": (..., None, "tensor")}

    tensor                   shape       by the rules        with ZeRO
    block/in                 (16, 64)    (None, tensor)      (data, tensor)
    block/bias               (64,)       (None)              (data)
    block/scale              ()          ()                  ()
    opt/0/mu/block/in        (16, 64)    that of block/in    that of block/in
    opt/0/count              ()          ()                  ()
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.plan import Plan
from plurax.sharding.spec import REPLICAS, AxisSizes, TensorSharding


class Rules:
    """The sharding rules of a plan, for a mesh.

    **Arguments:** `rules`, as `Plan.shardings`; `axes`, the sizes of the mesh axes over which
    tensors can be split. Entries with other axes count as None.

    **Attributes:** `notes`, for each tensor whose sharding differs from its rule, the reason and
    the sharding it has.
    """

    def __init__(self, rules: Iterable[tuple[str, tuple[Any, ...]]], axes: AxisSizes) -> None:
        self.rules = tuple(rules)
        self.axes = axes
        self.notes: dict[str, str] = {}

    def find(self, name: str, shape: Sequence[int]) -> TensorSharding | None:
        """Return the sharding by the first rule that matches `name`, or None if none does.

        A dim that its shards do not divide is replicated, and so is a scalar for which a pattern
        has a leading `...`; both are noted in `notes`. Raises `PlanError` if the rule has more
        entries than the tensor has dims.
        """
        for pattern, entries in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                if not shape and entries[:1] == (...,) and pattern != name:
                    self.notes[name] = "a scalar has no dim to split"
                    return TensorSharding(())
                return self._checked(name, shape, _aligned(entries, len(shape), name))
        return None

    def _checked(self, name: str, shape: Sequence[int], entries: Sequence[Any]) -> TensorSharding:
        """Return the sharding without axes of one device, indivisible dims replicated."""
        full = TensorSharding.of(*entries)
        kept = tuple(tuple(a for a in entry if self.axes.get(a, 1) > 1) for entry in full.dims)
        sharding = TensorSharding(kept)
        for dim in sharding.indivisible_dims(shape, self.axes):
            num_shards = sharding.num_shards(dim, self.axes)
            self.notes[name] = (
                f"dim {dim} is not split: {num_shards} shards do not divide {shape[dim]}"
            )
            sharding = sharding.with_dim(dim, ())
        return sharding

    def check_used(self, paths: Sequence[str], names: Sequence[str]) -> None:
        """Raise `PlanError` if a rule matches neither a parameter nor a named activation."""
        for pattern, _ in self.rules:
            if not fnmatch.filter([*paths, *names], pattern):
                known = [*paths, *names]
                hint = errors.did_you_mean(pattern.strip("*/"), known, cutoff=0.4)
                raise errors.PlanError(
                    f"the sharding rule {pattern!r} matches no parameter and no named "
                    f"activation.{hint} Parameters: {', '.join(paths) or 'none'}. Named "
                    f"activations: {', '.join(names) or 'none'}."
                )


def _aligned(entries: tuple[Any, ...], rank: int, name: str) -> tuple[Any, ...]:
    """Return one entry per dim; a leading `...` stands for replicated dims."""
    if entries and entries[0] is ...:
        entries = entries[1:]
        missing = rank - len(entries)
        entries = (None,) * missing + entries if missing >= 0 else entries
    if len(entries) > rank:
        raise errors.spec_too_long(entries, rank, name)
    return entries + (None,) * (rank - len(entries))


def parameter_shardings(rules: Rules, params: PyTree) -> PyTree:
    """Return the sharding of each parameter by the rules, replicated where no rule matches."""
    return jax.tree.map_with_path(
        lambda path, leaf: (
            rules.find(tree.path_name(path), leaf.shape)
            or TensorSharding.replicated(len(leaf.shape))
        ),
        params,
    )


def zero_sharding(
    shape: Sequence[int], sharding: TensorSharding, plan: Plan, *, stacked: bool = False
) -> TensorSharding:
    """Return a parameter's sharding with `data` and `context` added to one dim, for ZeRO.

    The largest dim that their devices divide is split. If there is none, and below ZeRO-3, a dim
    split over `tensor` is split once more. Where neither goes over both axes, one does, the larger
    first; else the dim that needs the least padding is split over it.
    Scalars and empty tensors stay as they are, and so does what a rule splits over `data`. With
    `stacked` layers, the leading dim is never split.
    """
    axes = {axis: n for axis, n in plan.axes.items() if axis in REPLICAS and n > 1}
    if not axes or 0 in shape or "data" in sharding.axes:
        return sharding
    free = [
        dim
        for dim in range(1 if stacked else 0, len(shape))
        if not sharding.dims[dim] and shape[dim] > 1
    ]
    alone = sorted(((axis,) for axis in axes), key=lambda over: -axes[over[0]])
    choices = [tuple(axes), *alone] if len(axes) > 1 else alone
    # Prefer the dims that need no padding.
    for over in choices:
        n = math.prod(axes[axis] for axis in over)
        even = [dim for dim in free if shape[dim] % n == 0]
        if even:
            return sharding.with_dim(max(even, key=lambda dim: (shape[dim], dim)), over)
        # Below ZeRO-3 a dim may be split over both axes: each shard over `tensor` is cut again.
        for dim, entry in enumerate(sharding.dims if plan.zero < 3 else ()):
            if entry == ("tensor",) and shape[dim] % (n * plan.tensor) == 0:
                return sharding.with_dim(dim, (*entry, *over))
    if not free:
        return sharding
    # A dim that is split over several axes cannot be padded.
    n = axes[alone[0][0]]
    filled = {dim: -(-shape[dim] // n) * n / shape[dim] for dim in free}
    return sharding.with_dim(min(free, key=lambda dim: filled[dim]), alone[0])


def padded_shape(
    shape: Sequence[int], sharding: TensorSharding, axes: AxisSizes
) -> tuple[int, ...]:
    """Return the shape of a tensor padded so that its shards divide it."""
    shard = sharding.shard_shape(shape, axes)
    return tuple(size * sharding.num_shards(dim, axes) for dim, size in enumerate(shard))


def opt_state_shardings(
    state: PyTree, params: PyTree, param_shardings: PyTree, plan: Plan
) -> PyTree:
    """Return the sharding of each leaf of an optimizer's state.

    It is that of the parameter to which the leaf belongs. Under ZeRO other matrices, such as
    preconditioners, are split along a dim that the devices divide, but the first, which may count
    layers; all other leaves are replicated.
    """
    shardings = jax.tree.leaves(param_shardings, is_leaf=is_sharding)

    def find(leaf: Any, index: int) -> TensorSharding:
        whole = TensorSharding.replicated(len(leaf.shape))
        if index >= 0:
            return shardings[index]
        if not plan.zero or not jnp.issubdtype(leaf.dtype, jnp.number):
            return whole
        split = zero_sharding(leaf.shape, whole, plan, stacked=True)
        return whole if split.indivisible_dims(leaf.shape, plan.axes) else split

    return jax.tree.map(find, state, match_opt_state_to_params(state, params))


def match_opt_state_to_params(state: PyTree, params: PyTree, dims: int | None = None) -> PyTree:
    """Return for each leaf of an optimizer's state the index of its parameter, or -1.

    A leaf belongs to a parameter if it has the parameter's shape and its path contains the
    parameter's path, preferably at the end: `("0", "mu", "w")` belongs to `("w",)`, as Adam's
    moments do. With `dims`, only that many leading dims must have equal sizes.
    """
    known = {
        tuple(map(str, path)): (leaf.shape, index)
        for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(params))
    }

    def find(path: tuple[Any, ...], leaf: Any) -> int:
        names = tuple(map(str, path))
        # All parts of the path: those that end last come first, and of these the longest.
        parts = [(a, b) for b in range(len(names), -1, -1) for a in range(b + 1)]
        for start, stop in parts:
            shape, index = known.get(names[start:stop], ((), -1))
            # If the parameters are a list, their paths are indices, as are those in a chain of
            # optimizers: a scalar must match at the end of its path.
            if stop < len(names) and not leaf.ndim:
                continue
            same = shape == leaf.shape if dims is None else shape[:dims] == leaf.shape[:dims]
            if index >= 0 and same and leaf.ndim >= (dims or 0):
                return index
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
    """Return rules for a transformer: column- and row-parallel layers over `tensor`.

    The weights that begin a layer (queries, keys and values; the first of an MLP) are split by
    their outputs, those that end it by their inputs. In between, each device has its own heads and
    hidden units, and a layer needs one all-reduce in each direction (Shoeybi et al. 2019,
    https://arxiv.org/abs/1909.08053).

    **Arguments:** patterns of parameters' paths. A weight `(..., in, out)`, with any leading dims,
    needs only its pattern; for other weights map the pattern to its entries.

    - `column`: weights that begin a layer.
    - `row`: weights that end one.
    - `head`: the weight `(width, vocabulary)` that gives the logits. Cross entropy is then computed
      on shards of the vocabulary; the logits are never gathered.
    - `sequence`: names of activations `(tokens, width)` between layers, given by
      `plurax.sharding.name`, to be split by token. The all-reduces become reduce-scatters and
      all-gathers of the same bytes, and the operations between layers are split too
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
