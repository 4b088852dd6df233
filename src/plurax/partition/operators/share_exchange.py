"""Bring tokens that devices have from one order to another: devices exchange shares.

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
"""

import dataclasses
import functools
import math
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
from plurax.sharding.reshard import moved


def reorder(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Exchange the shares of a dim that is split over `context`, or gather one split otherwise."""
    (versions,), dim, outer = inputs, eqn.params["dim"], eqn.params["outer"]
    have, axes = maybe_partial(context, eqn.invars[0], versions), context.axes
    over, size = have.dims[dim], versions.shape[dim]
    whole = bool(over) and axes.mesh_axes(over) == ("context",) and over == axes.expand("context")
    devices = axes.size(over)
    share = math.gcd(size // devices, size // math.prod(outer))
    count = size // devices // share  # at most the four of a device, or thirds of them
    if not whole or not axes.permutes or size % devices:
        operand = with_replicated(versions, have, [dim])
        return with_rows_split(
            context, decided(context, eqn, inputs, [operand], operand.sharding), have
        )
    operand = with_replicated(versions, have, [])
    turns = _turns(devices, count, outer)
    sending = [turn for turn in turns if turn.targets != tuple(range(devices))]
    local = list(local_shape(context, operand))
    local[dim] = share
    sent = InnerCollective("collective-permute", over, jax.ShapeDtypeStruct(local, versions.dtype))

    def execute(array: Array) -> list[Array]:
        shape, device = array.shape, axes.index(over)
        shares = array.reshape(*shape[:dim], count, share, *shape[dim + 1 :])
        received = []
        for turn in turns:
            own = lax.dynamic_index_in_dim(shares, jnp.asarray(turn.taken)[device], dim, False)
            received.append(exchanged(own, turn) if turn in sending else own)
        places = np.argsort([turn.put for turn in turns], axis=0).T
        ordered = jnp.take(jnp.stack(received, dim), jnp.asarray(places)[device], axis=dim)
        return [ordered.reshape(shape)]

    def exchanged(own: Array, turn: _ShareTurn) -> Array:
        pairs = list(enumerate(turn.targets))
        return moved(lambda x: lax.ppermute(x, "context", pairs), own, axes)

    decision = decided(context, eqn, inputs, [operand], operand.sharding)
    return dataclasses.replace(decision, execute=execute, sent=(sent,) * len(sending))


@dataclasses.dataclass(frozen=True)
class _ShareTurn:
    """Of each device the share that it takes, the device to which it goes, and the place of what
    comes."""

    taken: tuple[int, ...]
    targets: tuple[int, ...]
    put: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def _turns(devices: int, count: int, outer: tuple[int, int]) -> list[_ShareTurn]:
    """Return the turns in which devices with `count` shares each exchange them.

    >>> [turn.taken for turn in _turns(2, 4, (2, 4))]
    [(1, 3), (0, 2), (3, 1), (2, 0)]
    >>> [turn.targets for turn in _turns(2, 4, (2, 4))]
    [(0, 1), (0, 1), (1, 0), (1, 0)]
    """
    first, second = outer
    within = devices * count // (first * second)  # shares of a part
    old = np.arange(devices * count).reshape(first, second, within).swapaxes(0, 1).reshape(-1)
    # From each device, by the target, the shares that go there: where taken and where put.
    left: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(devices)]
    for new, was in enumerate(old.tolist()):
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
