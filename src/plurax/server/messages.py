"""What workers, servers and the coordinator send each other: plain data, arrays as bytes.

One step of a worker, with `mode="async"`, 2 shards, parameters of 3 MB:

    coordinator -> shards     pull
    shards      -> worker     Pulled, with vectors of 1.5 MB each
    coordinator -> worker     gradients(Ticket: the rows of batch 17, ...)
    worker      -> shards     Header: who, from which version, loss, norms; vectors of 1.5 MB each
    shards      -> coordinator  Reply: version 18, staleness 2, metrics; or why it was refused
"""

import dataclasses
from typing import Any, Literal

import numpy as np
from jaxtyping import PyTree

from plurax.execute.placement import leading_dim

Content = tuple[tuple[np.ndarray, ...], ...]
"""Vectors as they are pushed: of each its bytes, or the parts of its compression."""

Reason = Literal[
    "server restarted", "worker restarted", "duplicate", "late", "wrong layout", "damaged",
    "not finite", "too stale", "lost on the way",
]  # fmt: skip
"""Why a push was refused.

- `server restarted`: its gradient is of parameters that the server has lost since.
- `worker restarted`: its worker was given up, and its examples are another's.
- `duplicate`: it was taken before, or one that its worker sent later was.
- `late`: in `sync`, its step was updated without it.
- `wrong layout`: number, dtype or length of its vectors is not that of this shard.
- `damaged`: its header contradicts itself.
- `not finite`: its vectors are not finite, and its worker says they are.
- `too stale`: beyond `Servers.max_staleness`.
- `lost on the way`: the machine on which it was has ended.
"""
ON_THE_WAY: tuple[Reason, ...] = ("wrong layout", "damaged", "not finite", "lost on the way")
"""Reasons that do not follow from the order of pulls and pushes; they stand in the record."""


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Examples whose gradient one worker computes.

    **Fields:** `step`, the number of their batch in the run; `part`, which part of the batch, of
    `parts`; `first`, the index of the first example in the batch, from which random keys follow;
    `rows`, of arrays that the worker has, `(n,)`; or `batch`, the examples themselves.
    """

    step: int
    part: int
    parts: int
    first: int
    rows: np.ndarray | None = None
    batch: PyTree = None

    @property
    def examples(self) -> int:
        """How many examples they are."""
        return len(self.rows) if self.rows is not None else leading_dim(self.batch)


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A shard's parameters.

    **Fields:** `incarnation`, how often the server was restarted; `version`, how many pushes (in
    `sync` steps) it has applied; `vectors`, each as its bytes; `model_state`, leaves by index.
    """

    incarnation: int
    version: int
    vectors: tuple[np.ndarray, ...]
    model_state: dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a worker says of a gradient.

    **Fields:** `worker`, and `life`, how often it was restarted; `sequence`, a number that grows
    with each of its pushes; `step` and `part` of the ticket; `bases`, for each shard the
    incarnation and the version pulled; `layout`, of the vectors; `finite`, whether all of them are;
    `scalars`, sums over the examples and the model state after them, by the index of the leaf;
    `numbers`, those of all parameters that the optimizer needs (norms), by index; `sent`, the bytes
    of the vectors.
    """

    worker: int
    life: int
    sequence: int
    step: int
    part: int
    bases: tuple[tuple[int, int], ...]
    layout: str
    finite: bool
    scalars: dict[int, np.ndarray]
    numbers: dict[int, np.ndarray]
    sent: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a shard says of a push.

    **Fields:** `reason`, None where it was taken; `version`, after it; `staleness`, how many
    versions lay between the parameters of the gradient and its update; `metrics`, of the update,
    scalars, empty where there was none.
    """

    reason: Reason | None
    version: int
    staleness: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that a shard is restarted from.

    **Fields:** `version`; `leaves` of the state by index; `seen`, for each worker its life and the
    last sequence taken.
    """

    version: int
    leaves: dict[int, np.ndarray]
    seen: dict[int, tuple[int, int]]
