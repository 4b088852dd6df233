"""Times every chunk and batch dim for a handful of populations: what the rule of choice rests on.

    python -m benchmarks.choosing OUTPUT.json

`plurax.execute.choose_chunk` picks without a clock; its test compares what it picks with this file.
"""

import dataclasses
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px

ROUNDS, STEPS = 7, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A population of networks of some widths: `convolutions` before them, if any."""

    name: str
    widths: tuple[int, ...]
    batch: int
    members: int
    chunks: tuple[int, ...]
    image: int = 0


CASES = (
    Case("spirals", (2, 32, 2), 100, 100, (1, 4, 10, 25, 100)),
    Case("digits", (64, 32, 10), 128, 32, (1, 4, 16, 32)),
    Case("regression", (8, 16, 16, 1), 32, 96, (4, 16, 32, 96)),
    Case("wide", (64, 256, 256, 10), 64, 16, (1, 4, 16)),
    Case("convolutional", (64, 10), 16, 16, (1, 4, 16), image=8),
)


def task(case: Case) -> px.Task:
    """The case's network, and cross entropy."""
    layers = list(zip(case.widths, case.widths[1:], strict=False))

    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(layers) + 1)
        params: dict[str, Any] = {
            f"layer{n}": {"w": jax.random.normal(keys[n], shape) / shape[0] ** 0.5,
                          "b": jnp.zeros(shape[1])}
            for n, shape in enumerate(layers)
        }  # fmt: skip
        if case.image:
            params["conv"] = jax.random.normal(keys[-1], (3, 3, 1, 4)) / 3
        return params

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        x = batch["x"]
        if case.image:
            image = x.reshape(-1, case.image, case.image, 1)
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(image, params["conv"], (2, 2), "SAME",
                                             dimension_numbers=dims)  # fmt: skip
            x = jax.nn.relu(x).reshape(x.shape[0], -1)
        for n in range(len(layers)):
            x = x @ params[f"layer{n}"]["w"] + params[f"layer{n}"]["b"]
            x = jax.nn.relu(x) if n + 1 < len(layers) else x
        if case.widths[-1] == 1:
            return (x[:, 0] - batch["y"]) ** 2
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"])

    return px.Task(init=init, loss=loss)


def batch(case: Case) -> dict[str, np.ndarray]:
    """Random inputs and labels."""
    rng = np.random.default_rng(0)
    width = case.image**2 or case.widths[0]
    return {
        "x": rng.normal(size=(case.batch, width)).astype(np.float32),
        "y": rng.integers(0, case.widths[-1], case.batch).astype(np.int32),
    }


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of a step of the whole population, wall and processor, for every candidate."""
    made = task(case)
    rows = batch(case)
    running: dict[tuple[int, str], list[Any]] = {}
    for chunk in case.chunks:
        for dim in ("major", "minor"):
            plan = px.Plan(chunk=chunk, batch_dim=dim)  # type: ignore[arg-type]
            program = px.compile(made, optax.adam(1e-2), plan, rows,
                                 members=px.Members(case.members))  # fmt: skip
            running[chunk, dim] = [program, program.init(), [], []]
    placed = next(iter(running.values()))[0].place_batch(rows)
    for _ in range(ROUNDS):
        for entry in running.values():
            program, state = entry[:2]
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                state, _ = program.step_placed(state, placed)
            jax.block_until_ready(state.params)
            entry[1] = state
            entry[2].append((time.perf_counter() - wall) / STEPS)
            entry[3].append((time.process_time() - cpu) / STEPS)
    return {
        "case": dataclasses.asdict(case),
        "milliseconds": [
            {"chunk": chunk, "batch_dim": dim,
             "wall": 1e3 * statistics.median(walls), "wall_least": 1e3 * min(walls),
             "cpu": 1e3 * statistics.median(cpus)}
            for (chunk, dim), (_, _, walls, cpus) in running.items()
        ],
    }  # fmt: skip


def main(output: Path) -> None:
    """Measure all cases, and write them with the machine."""
    found = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(jax.devices()),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "cases": [measure(case) for case in CASES],
    }
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
