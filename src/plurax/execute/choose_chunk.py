"""Choose a population's chunk and batch dim: from shapes and the device, or by measuring.

`fit` and `compile` use `choose_plan`: the rule of `chunk_rule.py`, then a look at the compiled
program's peak memory where the estimate comes near the budget. `plurax.ensemble.tune` uses
`measure_plan`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from plurax import hlo as compiled_hlo
from plurax.execute.autotune import Candidate, Run, autotune, timed_runner
from plurax.execute.backends.choose import needs_partitioner
from plurax.execute.chunk_rule import choose_chunk, even_chunk
from plurax.execute.layouts.state_layout import place_start
from plurax.execute.population import Population
from plurax.mesh import memory_budget
from plurax.plan import Plan

ROOM = 16
"""An upper bound on the temporaries of one member of a chunk, in multiples of its step's bytes."""

Lower = Callable[[Population], jax.stages.Lowered]
"""Lowers the program that training will run most: the loop over resident data, or the step."""


def choose_plan(make: Callable[[Plan], Population], plan: Plan, lower: Lower) -> Population:
    """Return the population under the plan with `chunk` and `batch_dim` chosen, its step within the
    memory budget."""
    population = make(plan)
    if needs_partitioner(population.example.task, plan):
        # `batch_dim="minor"` is for unpartitioned members; a partitioned step keeps major.
        plan = dataclasses.replace(plan, batch_dim=plan.batch_dim or "major")
    if plan.chunk is not None and plan.batch_dim is not None:
        return population if population.plan == plan else make(plan)
    mesh = population.mesh
    members, work = population.layout.slots // plan.member, population.work()
    chosen = choose_chunk(plan, members, work, mesh.devices.flat[0].platform)
    budget = memory_budget(mesh)
    # Compile to read the peak memory only where the estimate comes near the budget: a compilation
    # takes seconds, the estimate nothing.
    while (
        plan.chunk is None
        and (chunk := chosen.chunk or 1) > 1
        and (members + ROOM * chunk) * work.bytes > budget
        and compiled_hlo.memory(lower(make(chosen)).compile()).peak > budget
    ):
        chosen = dataclasses.replace(chosen, chunk=even_chunk(members, max(1, chunk // 4)))
    return make(chosen)


def measure_plan(
    make: Callable[[Plan], Population],
    plan: Plan,
    lower: Lower,
    arguments: tuple[PyTree, ...],
    *,
    looped: bool,
) -> tuple[Plan, list[Candidate]]:
    """Measure a plan's open choices by timing the loop (`looped`) or the step.

    **Arguments:** `arguments`, those of the loop or step after the members.

    **Returns:** the plan with its choices, and every candidate measured.
    """
    example = make(plan)
    like = example.layout.abstract(example.mesh)
    start = place_start(example.example.task, example.layout, example.mesh)
    init = jax.jit(example.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))

    def build(plan: Plan) -> tuple[int, Callable[[], Run]]:
        compiled = lower(make(plan)).compile()

        def run() -> Run:
            state = init(*example.arguments, start)
            return timed_runner(compiled, state, (*example.arguments, *arguments), looped)

        return compiled_hlo.memory(compiled).peak, run

    dtype: Any = jnp.result_type(*jax.tree.leaves(like.params))
    tolerance = 2e-2 if plan.precision == "bfloat16" else 1e-4
    tolerance = 1e-9 if dtype == jnp.float64 else tolerance
    if plan.batch_dim is None and needs_partitioner(example.example.task, plan):
        plan = dataclasses.replace(plan, batch_dim="major")
    members = example.layout.slots // plan.member
    return autotune(plan, members, build, memory_budget(example.mesh), tolerance)
