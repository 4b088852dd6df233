"""Bring entries that devices have from one order to another: devices exchange shares.

Attention has tokens in the order of `jaxpr/token_order.py`, and an operation that asks for places,
such as a convolution, in that of their places. Each device sends each of its shares to the device
that has it in the other order, and no device needs all tokens:

    16 tokens on 2 devices      device 0                device 1
    shares of four ranges       0 1 4 5 8 9 12 13       2 3 6 7 10 11 14 15
    turn 0: keeps               4 5                     14 15
    turn 1: keeps               0 1                     10 11
    turn 2: sends               12 13                   6 7
    turn 3: sends               8 9                     2 3
    places                      0 ... 7                 8 ... 15

In a turn each device sends a share and receives one, by a collective permute. There are as
many turns as a device has shares, since a bipartite graph whose nodes have k edges each consists of
k perfect matchings (König 1916).

So are the parts of a value, as queries, keys and values that one product computes, or a gate and
what it multiplies: each device has a share of the value, and needs one of each part.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from plurax.partition.operators.common import (
    decided,
    local_shape,
    maybe_partial,
    with_replicated,
    with_rows_split,
)
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, InnerCollective, ValueVersions
from plurax.sharding.axes import Axes
from plurax.sharding.reshard import moved

MOST_TURNS = 8
"""Maximal number of shares of a device, each of which is sent by a collective of its own."""


def reorder(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Exchange the shares of a dim that is split over `context`, or gather one split otherwise."""
    (versions,), dim, outer = inputs, eqn.params["dim"], eqn.params["outer"]
    have, axes = maybe_partial(context, eqn.invars[0], versions), context.axes
    over, size = have.dims[dim], versions.shape[dim]
    whole = bool(over) and axes.mesh_axes(over) == ("context",) and over == axes.expand("context")
    devices = axes.size(over)
    share = math.gcd(size // devices, size // math.prod(outer))
    if not whole or not axes.permutes or size % devices:
        operand = with_replicated(versions, have, [dim])
        return with_rows_split(
            context, decided(context, eqn, inputs, [operand], operand.sharding), have
        )
    operand = with_replicated(versions, have, [])
    old = np.arange(size // share).reshape(*outer, -1).swapaxes(0, 1)
    exchange = ShareExchange(over, share, tuple(old.reshape(-1).tolist()), devices)
    decision = decided(context, eqn, inputs, [operand], operand.sharding)
    sent = exchange.sent(local_shape(context, operand), dim, versions.dtype)
    return dataclasses.replace(
        decision, execute=lambda array: [exchange.run(axes, array, dim)], sent=sent
    )


def of_parts(
    context: RuleContext,
    versions: ValueVersions,
    over: tuple[str, ...],
    sizes: Sequence[int],
    *,
    readers: int = 1,
    back: bool = False,
) -> "ShareExchange | None":
    """Return the exchange after which each device has a share of each part of a split dim.

    None where gathering the dim sends less, or devices do not divide the parts.

    **Arguments:** `versions`, of the value or of a part; `over`, the axes that split the dim, which
    has parts of `sizes`; `readers`, which could share a gathered value; `back`, whether devices
    have shares of the parts, and exchange them for one of the whole.
    """
    axes, devices = context.axes, context.axes.size(over)
    whole = axes.mesh_axes(over)
    if len(whole) != 1 or over != axes.expand(*whole) or whole == ("data",) or not axes.permutes:
        return None
    if versions.is_param and context.of_parameters(context.first(versions)):
        return None
    if not all(sizes) or any(size % devices for size in sizes):
        return None
    share = math.gcd(*(size // devices for size in sizes))
    if sum(sizes) // devices > MOST_TURNS * share:
        return None
    order, start = list[list[int]](), 0
    for size in sizes:
        order.append(list(range(start // share, (start + size) // share)))
        start += size
    old = [
        unit
        for device in range(devices)
        for part in order
        for unit in part[device * len(part) // devices : (device + 1) * len(part) // devices]
    ]
    old = np.argsort(old).tolist() if back else old
    exchange = ShareExchange(over, share, tuple(old), devices)
    gathered = start // devices * (devices - 1)
    return exchange if exchange.entries * readers < gathered else None


@dataclasses.dataclass(frozen=True)
class ShareExchange:
    """An exchange of shares of a dim.

    **Fields:** `over`, all of the mesh axis that splits the dim over `devices`; `share`, the
    entries of a share; `old`, for each share in the new order its place in the old one.
    """

    over: tuple[str, ...]
    share: int
    old: tuple[int, ...]
    devices: int

    @property
    def _turns(self) -> "list[_ShareTurn]":
        return _turns(self.devices, self.old)

    @property
    def _count(self) -> int:
        """The shares of a device."""
        return len(self.old) // self.devices

    @property
    def entries(self) -> int:
        """The entries of the dim that a device sends."""
        return self.share * sum(map(self._sends, self._turns))

    def _sends(self, turn: "_ShareTurn") -> bool:
        return turn.targets != tuple(range(self.devices))

    def sent(self, shape: Sequence[int], dim: int, dtype: Any) -> tuple[InnerCollective, ...]:
        """Return what is sent of shards of a shape."""
        shard = jax.ShapeDtypeStruct((*shape[:dim], self.share, *shape[dim + 1 :]), dtype)
        one = InnerCollective("collective-permute", self.over, shard)
        return (one,) * sum(map(self._sends, self._turns))

    def run(self, axes: Axes, array: Array, dim: int) -> Array:
        """Return this device's shares in the new order."""
        shape, device = array.shape, axes.index(self.over)
        (axis,) = axes.mesh_axes(self.over)
        shares = array.reshape(*shape[:dim], self._count, self.share, *shape[dim + 1 :])
        received = []
        for turn in self._turns:
            own = lax.dynamic_index_in_dim(shares, jnp.asarray(turn.taken)[device], dim, False)
            if self._sends(turn):
                pairs = list(enumerate(turn.targets))
                own = moved(functools.partial(lax.ppermute, axis_name=axis, perm=pairs), own, axes)
            received.append(own)
        places = np.argsort([turn.put for turn in self._turns], axis=0).T
        ordered = jnp.take(jnp.stack(received, dim), jnp.asarray(places)[device], axis=dim)
        return ordered.reshape(shape)


@dataclasses.dataclass(frozen=True)
class _ShareTurn:
    """Of each device the share that it takes, the device to which it goes, and the place of what
    comes."""

    taken: tuple[int, ...]
    targets: tuple[int, ...]
    put: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def _turns(devices: int, old: tuple[int, ...]) -> list[_ShareTurn]:
    """Return the turns in which devices exchange shares; `old`, for each its place before.

    >>> [turn.taken for turn in _turns(2, (0, 4, 1, 5, 2, 6, 3, 7))]
    [(1, 3), (0, 2), (3, 1), (2, 0)]
    >>> [turn.targets for turn in _turns(2, (0, 4, 1, 5, 2, 6, 3, 7))]
    [(0, 1), (0, 1), (1, 0), (1, 0)]
    """
    count = len(old) // devices
    # From each device, by the target, the shares that go there: where taken and where put.
    left: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(devices)]
    for new, was in enumerate(old):
        target = left[was // count].setdefault(new // count, [])
        target.append((was % count, new % count))
    return [_turn(left) for _ in range(count)]


def _turn(left: list[dict[int, list[tuple[int, int]]]]) -> _ShareTurn:
    """Take one share of each device, all to different devices."""
    source: dict[int, int] = {}  # by target

    def place(device: int, seen: set[int]) -> bool:
        for target in sorted(left[device], key=lambda target: target != device):
            if target not in seen:
                seen.add(target)
                if target not in source or place(source[target], seen):
                    source[target] = device
                    return True
        return False

    for device in range(len(left)):
        assert place(device, set()), "a regular bipartite graph has a perfect matching"
    targets = {device: target for target, device in source.items()}
    taken, put = [0] * len(left), [0] * len(left)
    for device, target in targets.items():
        taken[device], put[target] = left[device][target].pop()
        if not left[device][target]:
            del left[device][target]
    return _ShareTurn(tuple(taken), tuple(targets[d] for d in range(len(left))), tuple(put))
