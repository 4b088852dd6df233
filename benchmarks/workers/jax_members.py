"""Populations of small networks in JAX: plurax, and by hand in one program or one after another.

For each number of networks K of `settings["counts"]` the sides `plurax, K`, `vmap, K` and, where
`settings["scan"]` says so, `scan, K`, each of which trains all of them once. With
`settings["limits"]` also `matrix product` and `triad`, and `halving, K` for each K there.
"""

import operator
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

import plurax as px
from benchmarks import by_hand, sizes
from benchmarks.networks import count_parameters, make_task
from benchmarks.workers.jax_setup import carry, need_devices
from benchmarks.workers.serve import Settings, Side, serve

Sides = dict[str, Side]
Facts = dict[str, Any]


def build(settings: Settings) -> tuple[Sides, Facts]:
    need_devices(settings["devices"])
    task = make_task(sizes.from_json(settings["network"]))
    optimizer = optax.adam(sizes.LEARNING_RATE)
    data = dict(np.load(settings["data"]))
    rows = data.pop("rows", None)
    sides: Sides = {}
    facts: Facts = {"parameters": count_parameters(task.init(jax.random.key(0)))}
    for count in settings["counts"]:
        begun = time.perf_counter()
        program = _program(settings, task, optimizer, data, count)
        program.init()  # compiles the loop too
        seconds = time.perf_counter() - begun
        sides[f"plurax, {count}"] = _training(program, data, settings["steps"])
        facts[str(count)] = {
            "chunk": program.plan.chunk,
            "batch_dim": program.plan.batch_dim,
            "plurax_compile_seconds": seconds,
        }
        mine = None if rows is None else rows[:count]
        scan = settings["scan"]
        by, compiled = _by_hand(task, optimizer, settings["steps"], data, mine, count, scan)
        sides |= by
        facts[str(count)] |= compiled
        if count == max(settings["counts"]) and "limits" in settings:
            sides |= _halving(program, data, settings["limits"])
    if "limits" in settings:
        sides |= _machine(settings["limits"])
    return sides, facts


# ---- plurax ------------------------------------------------------------------------------------


def _program(
    settings: Settings,
    task: px.Task,
    optimizer: optax.GradientTransformation,
    data: dict[str, np.ndarray],
    count: int,
) -> px.Program:
    """Compiled; the chunk and the place of the batch dim chosen by measurement."""
    members = px.Members(count, resample=px.ensemble.bootstrap()) if settings["resampled"] else None
    members = members or px.Members(count)
    plan = px.Plan(member=settings["devices"], **settings["plan"])
    source = px.train.ArrayData(data, settings["batch"], shuffle=settings["resampled"])
    assert source.batches_per_epoch == settings["steps_per_epoch"]
    batch = source.example_batch()
    return px.compile(task, optimizer, plan, batch, members=members, data=source)


def _training(program: px.Program, data: dict[str, np.ndarray], steps: int) -> Side:
    placed = program.place_data(data)
    return carry(lambda state: program.loop(state, placed, (), 0, steps)[0], program.init())


def _halving(program: px.Program, data: dict[str, np.ndarray], limits: Settings) -> Sides:
    """The first members of a population, trained on with the plan that was chosen for all."""
    sides: Sides = {}
    for count in limits["halving"]:
        whole = count == program.members.count
        left = program if whole else program.of(program.members.take(range(count)))
        sides[f"halving, {count}"] = _training(left, data, limits["halving_steps"])
    return sides


# ---- by hand -----------------------------------------------------------------------------------


def _by_hand(
    task: px.Task,
    optimizer: optax.GradientTransformation,
    steps: int,
    data: dict[str, np.ndarray],
    rows: np.ndarray | None,
    count: int,
    scan: bool,
) -> tuple[Sides, Facts]:
    """All networks in one program, and with `scan` a program for one, called for each of them."""
    train = by_hand.make_training(task.loss, optimizer, steps)

    def init(key: Array) -> by_hand.State:
        params = task.init(key)
        return params, optimizer.init(params)

    state = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), count))
    placed = jax.device_put(data)
    of_all = jax.device_put(rows)
    at_once = jax.jit(jax.vmap(train, in_axes=(0, None, 0)), donate_argnums=0)
    begun = time.perf_counter()
    compiled_all = at_once.lower(state, placed, of_all).compile()
    facts = {"vmap_compile_seconds": time.perf_counter() - begun}
    sides: Sides = {}
    if scan:
        # Before the first turn of the others, which is given the state and overwrites it.
        host = jax.device_get(state)
        states = [jax.device_put(jax.tree.map(operator.itemgetter(i), host)) for i in range(count)]
        of_each = [None if rows is None else jax.device_put(rows[i]) for i in range(count)]
        one = jax.jit(train, donate_argnums=0)
        begun = time.perf_counter()
        compiled_one = one.lower(states[0], placed, of_each[0]).compile()
        facts["scan_compile_seconds"] = time.perf_counter() - begun

        def each(states: list[by_hand.State]) -> list[by_hand.State]:
            return [compiled_one(s, placed, r)[0] for s, r in zip(states, of_each, strict=True)]

        sides[f"scan, {count}"] = carry(each, states)
    sides[f"vmap, {count}"] = carry(lambda state: compiled_all(state, placed, of_all)[0], state)
    return sides, facts


# ---- the machine -------------------------------------------------------------------------------


def _machine(limits: Settings) -> Sides:
    """A large matrix product, and `a + s * b` on arrays larger than any cache."""
    a, b = jax.random.normal(jax.random.key(0), (2, limits["matrix"], limits["matrix"]))
    x, y = jnp.ones((2, limits["triad"]))
    product = jax.jit(jnp.matmul)
    triad = jax.jit(lambda x, y: x + 0.5 * y)
    return {
        "matrix product": carry(lambda _: product(a, b), a),
        "triad": carry(lambda _: triad(x, y), x),
    }


if __name__ == "__main__":
    serve(build)
