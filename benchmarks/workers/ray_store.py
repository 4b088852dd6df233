"""Ray's object store used raw: what arrays can go from workers to servers and back at most.

`settings["workers"]` and `settings["servers"]` are actors on this machine. In an exchange a worker
puts a float32 array for each server into the store; the server reads it there, adds it to its own,
and answers with its own, which Ray puts into the store; the worker gets a view of it. Nothing is
computed, checked or copied besides. A worker has one exchange in flight. Tried too: references in
lists, slower for 1M parameters; two and three in flight, up to a tenth faster for 10M.

One side, `exchange`, in which each worker does its share of the units.
"""

import itertools
import os
import secrets
import time
from typing import Any

# Before Ray is imported: it reports its use, and writes a token into the home otherwise.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import numpy as np

from benchmarks.workers.serve import Settings, Side, SkippedError, serve

try:
    import ray
except ImportError as error:
    ray, MISSING = None, error

STORE_BYTES = 2**30


class Server:
    """Holds some of the parameters."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size, np.float32)

    def exchange(self, pushed: np.ndarray) -> np.ndarray:
        """Add what is pushed, a view of the store; return the values."""
        np.add(self.values, pushed, out=self.values)
        return self.values


class Worker:
    """Pushes and pulls as fast as it can."""

    def __init__(self, servers: list[Any], sizes: list[int]) -> None:
        self.servers = servers
        self.gradients = [np.zeros(size, np.float32) for size in sizes]

    def run(self, exchanges: int) -> list[float]:
        """Seconds of each exchange with all servers."""
        seconds = []
        for _ in range(exchanges):
            start = time.perf_counter()
            answers = [
                server.exchange.remote(ray.put(gradient))
                for server, gradient in zip(self.servers, self.gradients, strict=True)
            ]
            ray.get(answers)
            seconds.append(time.perf_counter() - start)
        return seconds


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    if ray is None:
        raise SkippedError(f"needs Ray, plurax[ray] ({MISSING})")
    servers, workers = settings["servers"], settings["workers"]
    ray.init(
        "local",
        num_cpus=servers + workers,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    parameters = sum((a + 1) * b for a, b in itertools.pairwise(settings["widths"]))
    whole, left = divmod(parameters, servers)
    sizes = [whole + (index < left) for index in range(servers)]
    holding = [ray.remote(Server).remote(size) for size in sizes]
    pushing = [ray.remote(Worker).remote(holding, sizes) for _ in range(workers)]

    def exchange(units: int) -> dict[str, list[float]]:
        assert units % workers == 0, (units, workers)
        found = ray.get([worker.run.remote(units // workers) for worker in pushing])
        return {"exchange": [seconds for one in found for seconds in one]}

    exchange(2 * workers)
    return {"exchange": exchange}, {"parameters": parameters, "sides": ["exchange"]}


if __name__ == "__main__":
    serve(build)
