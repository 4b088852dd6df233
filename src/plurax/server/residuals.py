"""What each worker has left to send: saved like the parameters, and redistributed.

A compression (`plurax.server.compression`) leaves a vector for each that a worker pushes, and which
parameters are in it depends on the number of servers. So what is saved of a worker are arrays like
the parameters. All of it goes to the workers of the resumed run: worker w of W begins with the sum
over the saved workers w, w + W, w + 2 W, ... Example, one parameter `(2,)`:

    worker                  0             1              2             3
    saved of 3 workers      [1.0 0.5]     [0.0 -2.0]     [0.25 0.0]
    2 workers               [1.25 0.5]    [0.0 -2.0]
    4 workers               [1.0 0.5]     [0.0 -2.0]     [0.25 0.0]    zeros
    sum of each             [1.25 -1.5]

Of as many workers or more, every bit stays as it was; of fewer, sums are rounded.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from plurax import tree
from plurax.server.compression import Residuals
from plurax.server.shard_layout import ShardLayout

Leaves = list[np.ndarray]
"""A worker's residuals, one array like each parameter, of float32 or wider."""


def zero_leaves(params: Sequence[Any]) -> Leaves:
    """Return the residuals of a worker that has nothing left to send.

    **Arguments:** `params`, arrays or `jax.ShapeDtypeStruct`s. The zeros are read-only.
    """
    return [np.broadcast_to(np.zeros((), tree.sum_dtype(p.dtype)), p.shape) for p in params]


def to_leaves(layout: ShardLayout, residuals: Sequence[Residuals]) -> Leaves:
    """Return a worker's residuals like the parameters, from those of each shard's vectors."""
    leaves = layout.whole(
        [
            layout.split(shard, [np.asarray(vector) for vector in vectors])
            for shard, vectors in enumerate(residuals)
        ]
    )
    return [leaves[index] for index in range(len(leaves))]


def from_leaves(layout: ShardLayout, leaves: Leaves) -> list[Residuals]:
    """Return a worker's residuals for each shard's vectors, from those like the parameters."""
    # Copies: what arrives from another process may be memory that others share.
    copies = dict(enumerate(map(jnp.array, leaves)))
    return [
        tuple(vector.reshape(-1) for vector in layout.join(shard, layout.pieces(shard, copies)))
        for shard in range(layout.shards)
    ]


def redistribute(saved: Sequence[Leaves], workers: int) -> list[Leaves]:
    """Return what each worker begins with that gets any; none of the sum is lost.

    **Arguments:** `saved`, of each worker; `workers`, how many there are now.

    >>> import numpy as np
    >>> saved = [[np.float32([number])] for number in (1.0, 0.0, 0.25)]
    >>> [[leaf.tolist() for leaf in one] for one in redistribute(saved, 2)]
    [[[1.25]], [[0.0]]]
    """
    shares = [saved[worker::workers] for worker in range(min(workers, len(saved)))]
    return [functools.reduce(_sum, share) for share in shares]


def _sum(one: Leaves, other: Leaves) -> Leaves:
    return [a + b for a, b in zip(one, other, strict=True)]
