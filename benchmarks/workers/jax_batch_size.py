"""`max_batch_size`, and what the compiler says about the size it found and the next one."""

from typing import Any

import optax

import plurax as px
from benchmarks import sizes
from benchmarks.networks import make_batch, make_task
from benchmarks.workers.jax_setup import need_devices
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    plan = px.Plan(**settings["plan"])
    need_devices(plan.devices)
    network = sizes.from_json(settings["network"])
    task, optimizer = make_task(network), optax.adamw(sizes.LEARNING_RATE)
    example, memory = make_batch(network, 1), settings["memory"]

    found = px.analysis.max_batch_size(task, optimizer, plan, example, memory=memory)

    def peak(size: int) -> int:
        return px.compile(task, optimizer, plan, make_batch(network, size)).memory().peak

    facts = {
        "size": found.size,
        "compilations": found.compilations,
        "peak_bytes": peak(found.size),
        "next_peak_bytes": peak(found.size + 1),
        "memory": memory,
    }
    return {}, facts


if __name__ == "__main__":
    serve(build)
