"""Rows of `benchmarks.gpu_rows` on this machine's device: a step of plurax, and the same by hand.

Sides are the names of rows; each measures its row whole, and answers with the seconds of every
round, what a step was expected to take and hold, and what it holds. A side that is not measured,
since the compiler has no room for it, answers with the reason.
"""

import collections
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import plurax as px
from benchmarks.gpu_rows import OPTIMIZER, QUICK, ROWS, GpuRow, random_batch, step_by_hand
from benchmarks.networks import count_parameters
from benchmarks.workers.serve import Settings, Side, serve
from plurax.analysis.compiled_schedule import walk_schedule
from plurax.analysis.machine_timings import measure_machine
from plurax.hlo.memory import memory
from plurax.hlo.text import parse

Step = Callable[[Any], Any]
AGREE = {"float32": 1e-3, "bfloat16": 2e-2}
"""By precision how far losses may be apart, as a share: of float32 a GPU's products are TF32."""


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    rows = QUICK if settings["quick"] else ROWS
    device = jax.devices()[0]
    machine = px.Machine.preset("H100-80GB" if "H100" in device.device_kind else "H200-141GB")

    begun = time.perf_counter()
    own = measure_machine()
    facts = {
        "device": device.device_kind,
        "rows": list(rows),
        "machine": own.to_toml(),
        "measured_in": time.perf_counter() - begun,
    }

    def side(name: str) -> Side:
        def run(units: int) -> dict[str, Any]:
            try:
                return measure(name, rows[name](), (machine, own), settings)
            except Exception as error:  # told, row by row
                return {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}

        return run

    return {name: side(name) for name in rows}, facts


def measure(
    name: str, row: GpuRow, machines: tuple[px.Machine, px.Machine], settings: Settings
) -> dict[str, Any]:
    """Time a row's step beside each by hand, in turns."""
    batch = random_batch(row)
    begun = time.perf_counter()
    program = px.compile(row.task, OPTIMIZER, row.plan, batch)
    compiled = program.compiled_step
    seconds = time.perf_counter() - begun
    state = program.init(0)
    params = jax.tree.map(jnp.copy, state.params)
    answer: dict[str, Any] = {
        "parameters": count_parameters(params),
        "compile_seconds": {"plurax": seconds},
        "bytes": {"plurax": _bytes(compiled)},
        "losses": {},
    }
    answer |= _expected(row, program, compiled, *machines)
    _keep(name, "plurax", compiled.as_text() or "")

    placed = program.place_batch(batch)
    steps: dict[str, tuple[Step, Any, jax.Array]] = {}
    state, first = program.step_placed(state, placed)
    state, second = program.step_placed(state, placed)
    answer["losses"]["plurax"] = [float(first["loss"]), float(second["loss"])]
    steps["plurax"] = (lambda state: program.step_placed(state, placed)[0], state)
    on_device = jax.device_put(batch)
    for label, losses in row.by_hand.items():
        step = step_by_hand(row, losses)
        own = jax.tree.map(jnp.copy, params)
        start = (own, OPTIMIZER.init(own))
        begun = time.perf_counter()
        try:
            by_hand = step.lower(start, on_device).compile()  # type: ignore[attr-defined]
            answer["compile_seconds"][label] = time.perf_counter() - begun
            answer["bytes"][label] = _bytes(by_hand)
            _keep(name, label, by_hand.as_text() or "")
            start, first = step(start, on_device)
            start, second = step(start, on_device)
            answer["losses"][label] = [float(first), float(second)]
            np.testing.assert_allclose(
                answer["losses"][label],
                answer["losses"]["plurax"],
                rtol=AGREE[row.plan.precision],
                err_msg=f"{name}, {label}",
            )
        except (jax.errors.JaxRuntimeError, RuntimeError) as error:
            answer.setdefault("left_out", {})[label] = str(error).splitlines()[0][:200]
            continue
        steps[label] = (lambda state, step=step: step(state, on_device)[0], start)
    answer["seconds_of"] = _rounds(steps, settings["rounds"], settings["turn"])
    answer["kernels"] = {label: _kernels(name, label, *pair) for label, pair in steps.items()}
    stats = jax.devices()[0].memory_stats() or {}
    answer["peak_in_use"] = stats.get("peak_bytes_in_use")
    return answer


def _expected(
    row: GpuRow,
    program: px.Program,
    compiled: jax.stages.Compiled,
    machine: px.Machine,
    measured: px.Machine,
) -> dict[str, Any]:
    """What is estimated before the step is compiled, and along the compiler's schedule.

    By the published rates of the machine, and by those that `plurax machine` measured.
    """
    estimate = px.estimate(row.task, OPTIMIZER, row.plan, row.batch, machine)
    by_measured = px.estimate(row.task, OPTIMIZER, row.plan, row.batch, measured)
    walked = walk_schedule(parse(compiled.as_text() or ""), program.mesh, machine)
    return {
        "estimated": estimate.seconds,
        "estimated_by_measured_rates": by_measured.seconds,
        "between": estimate.between,
        "parts": estimate.parts(),
        "planned_peak": estimate.peak,
        "walked": walked.seconds,
        "product_flops": estimate.product_flops,
    }


def _bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    held = memory(compiled)
    return {"peak": held.peak, "temporaries": held.temporaries}


def _rounds(steps: dict[str, Any], rounds: int, turn: float) -> dict[str, list[float]]:
    """Seconds of a step of each side in each round, in turns of about `turn` seconds."""
    units, states = {}, {}
    for label, (step, state) in steps.items():
        state, _ = _run(step, state, 2)
        state, taken = _run(step, state, 3)
        units[label] = min(200, max(1, round(turn / taken)))
        states[label] = state
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for round_ in range(rounds):
        order = list(steps) if round_ % 2 == 0 else list(steps)[::-1]
        for label in order:
            states[label], taken = _run(steps[label][0], states[label], units[label])
            seconds[label].append(taken)
    for label, (step, _) in steps.items():
        steps[label] = (step, states[label])
    return seconds


def _run(step: Step, state: Any, units: int) -> tuple[Any, float]:
    jax.block_until_ready(state)
    begun = time.perf_counter()
    for _ in range(units):
        state = step(state)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - begun) / units


# --- Kernels --------------------------------------------------------------------------------------


def _kernels(name: str, label: str, step: Step, state: Any) -> dict[str, float] | None:
    """How many kernels a step starts, and the seconds that they run, by the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(2):
                state = step(state)
            jax.block_until_ready(state)
        (path, *_) = list(Path(folder).rglob("*.xplane.pb")) or [None]
        if path is None:
            return None
        data = jax.profiler.ProfileData.from_file(str(path))
        found: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    stats = dict(event.stats)
                    operation = str(stats.get("hlo_op", ""))
                    found[f"{operation} | {event.name}"][0] += 1
                    found[f"{operation} | {event.name}"][1] += event.duration_ns * 1e-9
    if not found:
        return None
    _keep(name, f"{label}.kernels", json.dumps(found, indent=0))
    count, seconds = (sum(each[i] for each in found.values()) / 2 for i in (0, 1))
    return {"count": count, "seconds": seconds}


def _keep(name: str, label: str, text: str) -> None:
    """Write what a row was compiled to, and its kernels, where `PLURAX_BENCH_KEEP` says."""
    folder = os.environ.get("PLURAX_BENCH_KEEP")
    if folder:
        words = f"{name}--{label}".replace(" ", "_").replace("/", "_").replace(",", "")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{words}.gz").write_bytes(gzip.compress(text.encode()))


if __name__ == "__main__":
    serve(build)
