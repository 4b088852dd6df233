"""How long a search takes, from nothing traced to a ranking; GPT of several sizes."""

import time
from typing import Any

import optax

import plurax as px
from benchmarks.gpt import Gpt
from benchmarks.workers.serve import Settings, Side, serve


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    model = Gpt(**settings["model"])
    machine = px.Machine.preset(settings["machine"], settings["nodes"])
    task, batch = model.task(), model.batch(settings["batch"])
    pinned = {"precision": "bfloat16"}
    begun = time.perf_counter()
    found = px.search(task, optax.adamw(1e-4), batch, machine, pinned=pinned)
    taken = time.perf_counter() - begun
    best = found.ranked[0]
    return {}, {
        "parameters": model.parameters,
        "seconds": taken,
        "plan": best.plan.sizes_text(),
        "step": best.seconds,
        "bytes": best.memory,
        "gap": found.gap,
    }


if __name__ == "__main__":
    serve(build)
