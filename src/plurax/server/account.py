"""What servers and workers did in a run: applied, refused, lost, sent, waited for."""

from collections import Counter, deque
from collections.abc import Collection
from typing import Any

import numpy as np

LATEST = 10_000
"""Pushes and pulls whose seconds are kept: a run of days has millions."""


class Account:
    """What servers and workers did; `fit` returns it as `Fit.servers`.

    **Attributes:**

    - `updates`: updates of the parameters; in `sync` steps, else pushes.
    - `staleness`: for each number of versions between the parameters of a gradient and its update,
      how many pushes had it.
    - `rejected`: pushes that changed nothing, by reason (`plurax.server.messages.Reason`).
    - `lost_updates`: for each shard how many updates it lost by its deaths (not in `sync`): its
      version when it ended less the version of the snapshot that it was restarted from.
    - `repeated`: steps that were taken again after a server's death (`sync` alone).
    - `dropped_examples`: examples of parts that came after the quorum.
    - `reassigned`: tickets that went to another worker: of a lost one, or whose parameters or
      gradients did not come.
    - `restarts`: names of the workers and servers that ended and were started again, in order.
    - `pushed_bytes`, `pulled_bytes`: between workers and servers.
    - `push_seconds`, `pull_seconds`: of the latest `LATEST`, from the call to the answer.
    - `waited_seconds`: for each worker, how long it waited for others.
    - `worker_steps`: for each worker, how many gradients it gave.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.staleness: Counter[int] = Counter()
        self.rejected: Counter[str] = Counter()
        self.lost_updates: Counter[int] = Counter()
        self.repeated = 0
        self.dropped_examples = 0
        self.reassigned = 0
        self.restarts: list[str] = []
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.push_seconds: deque[float] = deque(maxlen=LATEST)
        self.pull_seconds: deque[float] = deque(maxlen=LATEST)
        self.waited_seconds: dict[int, float] = {}
        self.worker_steps: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Account of {self.updates} updates; print it>"

    def __str__(self) -> str:
        lines = [f"{self.updates} updates, staleness {self.mean_staleness:.2f} on average"]
        most = max(self.staleness.values(), default=1)
        for versions, count in sorted(self.staleness.items()):
            lines.append(f"  {versions:>3}  {count:>7}  {'#' * max(1, round(40 * count / most))}")
        refused = ", ".join(f"{count} {why}" for why, count in sorted(self.rejected.items()))
        lines.append(f"rejected: {refused or 'none'}; lost: {sum(self.lost_updates.values())}")
        if self.repeated or self.reassigned or self.dropped_examples:
            lines.append(
                f"steps computed again: {self.repeated}; tickets reassigned: {self.reassigned}; "
                f"examples dropped after the quorum: {self.dropped_examples}"
            )
        if self.restarts:
            lines.append(f"started again: {', '.join(self.restarts)}")
        lines.append(
            f"pushed {_size(self.pushed_bytes)}, pulled {_size(self.pulled_bytes)}; "
            f"{_milliseconds('push', self.push_seconds)}; "
            f"{_milliseconds('pull', self.pull_seconds)}"
        )
        waited = ", ".join(
            f"{self.waited_seconds.get(w, 0.0):.1f}" for w in sorted(self.worker_steps)
        )
        lines.append(f"workers waited for others, in seconds: {waited or '-'}")
        return "\n".join(lines)

    @property
    def mean_staleness(self) -> float:
        """The mean over the pushes that were applied."""
        pushes = sum(self.staleness.values())
        return sum(v * count for v, count in self.staleness.items()) / pushes if pushes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values, the seconds of pushes and pulls as percentiles."""
        plain = dict(vars(self))
        for name in ("push_seconds", "pull_seconds"):
            plain[name] = _percentiles(plain[name])
        return {
            name: {str(key): count for key, count in sorted(value.items())}
            if isinstance(value, dict)
            else value
            for name, value in plain.items()
        }


def _percentiles(seconds: Collection[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentile, `{}` of nothing."""
    if not seconds:
        return {}
    values = np.percentile([*seconds], [50, 95, 99])
    return dict(zip(("p50", "p95", "p99"), map(float, values), strict=True))


def _milliseconds(what: str, seconds: Collection[float]) -> str:
    parts = [f"{name} {value * 1e3:.1f} ms" for name, value in _percentiles(seconds).items()]
    return f"{what} {', '.join(parts) or '-'}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
