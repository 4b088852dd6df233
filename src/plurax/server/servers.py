"""What a user says of parameter servers."""

import dataclasses
from typing import Any, Literal, get_args

from plurax import errors
from plurax.server.compression import Compression, get_codec
from plurax.validate import whole_number

Mode = Literal["sync", "bounded", "async"]
Correction = Literal["scale", "delay"]
Where = Literal["ray", "threads"]
IN_PROCESS: tuple[Where, ...] = ("threads",)
"""Transports within this process: memory is shared, and there is no address."""

MAX_PROCESSES = 10_000
"""The most workers, or servers, of a run."""


@dataclasses.dataclass(frozen=True)
class Servers:
    """Train with workers that compute gradients and servers that hold the parameters.

    **Fields:**

    - `shards`: how many servers; each holds some of the parameters with their optimizer state.
    - `workers`: how many workers; each has the devices of the plan.
    - `mode`: when a gradient is applied.
      - `sync`: a batch is divided among the workers, and their gradients are applied as one:
        `p[t + 1] = update(p[t], sum of gradients / sum of weights)`, as one device does.
      - `bounded`: each worker has a batch, applied when it comes:
        `p[v + 1] = update(p[v], gradient(p[v - staleness]))`. A worker that is more than
        `staleness` steps ahead of the slowest waits.
      - `async`: as `bounded`, without a bound.
    - `staleness`: of `bounded`, the largest number of steps that a worker may be ahead.
    - `quorum`: of `sync`, how many parts of a batch are enough for a step; later ones are dropped.
    - `correction`: of stale gradients. `scale` divides their step by their staleness (Zhang et al.
      2016); `delay` compensates to first order for the parameters having moved (DC-ASGD, Zheng et
      al. 2017).
    - `max_staleness`: gradients of parameters more versions old than this are rejected.
    - `compression`: of gradients on their way, see `plurax.server.compression`.
    - `snapshot_every`: updates between two snapshots from which an ended server is restarted.
    - `lease`: seconds without a sign of life after which a worker or server counts as ended.
    - `transport`: `ray`, processes on this machine or on a cluster; or `threads` of this process.
    - `address`: of a running Ray cluster; without it Ray runs on this machine while training does.

    Raises `PlanError` for fields that contradict each other.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server"; Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (the quorum).
    """

    shards: int = 1
    workers: int = 2
    mode: Mode = "sync"
    staleness: int | None = None
    quorum: int | None = None
    correction: Correction | None = None
    max_staleness: int | None = None
    compression: Compression | None = None
    snapshot_every: int = 50
    lease: float = 30.0
    transport: Where = "ray"
    address: str | None = None

    def __post_init__(self) -> None:
        for field in ("snapshot_every", "shards", "workers"):
            self._check_number(field, 1)
        for field in ("shards", "workers"):
            if getattr(self, field) > MAX_PROCESSES:
                raise errors.PlanError(
                    f"Servers({field}={getattr(self, field)}): each of them is a process, or a "
                    f"thread; give at most {MAX_PROCESSES:,}."
                )
        for field, names in (
            ("mode", get_args(Mode)), ("transport", get_args(Where)),
            ("correction", (None, *get_args(Correction))),
            ("compression", (None, *get_args(Compression))),
        ):  # fmt: skip
            if getattr(self, field) not in names:
                known = ", ".join(name for name in names if name is not None)
                raise errors.PlanError(
                    f"Servers({field}={getattr(self, field)!r}): {field} is one of {known}."
                )
        if self.mode == "bounded" and self.staleness is None:
            raise errors.PlanError(
                "Servers(mode='bounded'): say how many steps a worker may be ahead of the slowest, "
                "such as staleness=3; with staleness=0 all workers take each step together."
            )
        # What only some modes have.
        stale, joint = ("bounded", "async"), ("sync",)
        for field, modes in (
            ("staleness", ("bounded",)), ("quorum", joint), ("correction", stale),
            ("max_staleness", stale),
        ):  # fmt: skip
            if getattr(self, field) is not None and self.mode not in modes:
                others = " or ".join(f"mode={mode!r}" for mode in modes)
                raise errors.PlanError(
                    f"Servers(mode={self.mode!r}, {field}={getattr(self, field)!r}): {field} has "
                    f"no meaning in mode={self.mode!r}. Leave it out, or say {others}."
                )
        for field, least in (("staleness", 0), ("max_staleness", 0), ("quorum", 1)):
            if getattr(self, field) is not None:
                self._check_number(field, least)
        if self.quorum is not None and self.quorum > self.workers:
            raise errors.PlanError(
                f"Servers(workers={self.workers}, quorum={self.quorum}): a batch has as many "
                f"parts as there are workers, so a quorum is at most {self.workers}."
            )
        if isinstance(self.lease, bool) or not isinstance(self.lease, int | float) or (
            not self.lease > 0
        ):  # fmt: skip
            raise errors.PlanError(
                f"Servers(lease={self.lease!r}): a lease is a positive number of seconds."
            )
        if self.address is not None and self.transport in IN_PROCESS:
            raise errors.PlanError(
                f"Servers(transport={self.transport!r}, address={self.address!r}): only "
                "transport='ray' has an address."
            )

    def _check_number(self, field: str, least: int) -> None:
        value: Any = getattr(self, field)
        number = whole_number(value, least)
        if number is None:
            raise errors.PlanError(
                f"Servers({field}={value!r}): {field} is a whole number of at least {least}."
            )
        object.__setattr__(self, field, number)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is divided."""
        return self.workers if self.mode == "sync" else 1

    @property
    def feedback(self) -> bool:
        """Whether workers add to a gradient what their compression left out of the one before."""
        return get_codec(self.compression).feedback
