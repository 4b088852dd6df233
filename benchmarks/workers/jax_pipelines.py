"""A stack of layers in a pipeline under each plan, and on one device, in one process.

With `settings["work"]` `steps` there are a side `sequential` and one for each of `plans`. All start
from the same parameters, and after two steps their losses agree; the facts hold each one's memory
and the bubble of its schedule. With `compile` there is none, and the facts hold how long networks
of each depth take to compile.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
import optax

import plurax as px
from benchmarks import sizes, values
from benchmarks.networks import count_parameters, make_batch, make_stack
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.resident import growth
from benchmarks.workers.serve import Settings, Side, serve
from plurax.pipeline.schedule import make_schedule
from plurax.pipeline.simulation import simulate

AGREE = 1e-4


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    need_devices(settings["devices"])
    network = sizes.from_json(settings["network"])
    assert isinstance(network, sizes.Transformer)
    if settings["work"] == "compile":
        return {}, {"seconds": _compile_seconds(settings, network)}

    facts: dict[str, Any] = {"programs": {}}
    sides: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    plans = {"sequential": px.Plan(microbatches=settings["microbatches"])}
    plans |= {name: _plan(settings, name) for name in settings["plans"]}
    programs = {}
    # Memory first: what sides hold and free comes later.
    for name, plan in plans.items():
        programs[name], facts["programs"][name] = _program(settings, network, plan)
    for name, steps in programs.items():
        state, losses[name] = steps.first_two(params=values.params(network))
        sides[name] = carry(steps.one, state)
        np.testing.assert_allclose(losses[name], losses["sequential"], rtol=0, atol=AGREE)
    facts["losses"] = losses["sequential"]
    facts["parameters"] = count_parameters(values.params(network))
    return sides, facts


class Steps:
    """Steps of a program on a batch that is on the devices."""

    def __init__(self, program: px.Program, batch: Any) -> None:
        self.program, self._ready = program, program.place_batch(batch)

    def one(self, state: px.train.TrainState) -> px.train.TrainState:
        """A step."""
        return self.program.step_placed(state, self._ready)[0]

    def first_two(self, params: Any = None) -> tuple[px.train.TrainState, list[float]]:
        """The state after two steps, and their losses."""
        state, losses = self.program.init(0, params=params), []
        for _ in range(2):
            state, metrics = self.program.step_placed(state, self._ready)
            losses.append(float(metrics["loss"]))
        return jax.block_until_ready(state), losses


def _plan(settings: Settings, name: str) -> px.Plan:
    fields: dict[str, Any] = sizes.PIPELINES[name]
    return px.Plan(pipeline=settings["devices"], microbatches=settings["microbatches"], **fields)


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    return optax.adamw(settings["learning_rate"], weight_decay=settings["weight_decay"])


def _program(
    settings: Settings, network: sizes.Transformer, plan: px.Plan
) -> tuple[Steps, dict[str, Any]]:
    """A plan compiled, and what is known of it."""
    batch = make_batch(network, settings["batch"])
    begun = time.perf_counter()
    program = px.compile(make_stack(network), _optimizer(settings), plan, batch)
    compile_seconds = time.perf_counter() - begun
    steps = Steps(program, batch)
    return steps, {
        "compile_seconds": compile_seconds,
        "compiled_peak_per_device": program.memory().peak,
        "resident_of_all_devices": growth(steps.first_two),
        **_bubbles(plan),
    }


def _bubbles(plan: px.Plan) -> dict[str, float]:
    """The part of all devices' time in which they are idle; forward, gradient of the input and
    gradient of the weights taking as long as each other, and nothing to hand on."""
    if plan.pipeline == 1:
        return {}
    schedule = make_schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.virtual_stages)
    return {
        "bubble": simulate(schedule).bubble,
        "bubble_in_step": simulate(schedule, lockstep=True).bubble,
    }


def _compile_seconds(settings: Settings, network: sizes.Transformer) -> dict[str, list[float]]:
    """For each depth how long compiling took each time, depths in turn."""
    jax.config.update("jax_enable_compilation_cache", False)
    plan = _plan(settings, "1f1b")
    seconds: dict[str, list[float]] = {str(depth): [] for depth in settings["depths"]}

    def compiling(depth: int, plan: px.Plan) -> float:
        deep = dataclasses.replace(network, layers=depth)
        batch = make_batch(deep, settings["batch"])
        jax.clear_caches()
        begun = time.perf_counter()
        px.compile(make_stack(deep), _optimizer(settings), plan, batch)
        return time.perf_counter() - begun

    compiling(settings["depths"][0], px.Plan())  # loads what compiling needs
    for _ in range(settings["compilations"]):
        for depth in settings["depths"]:
            seconds[str(depth)].append(compiling(depth, plan))
    return seconds


if __name__ == "__main__":
    serve(build)
