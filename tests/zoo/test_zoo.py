"""Networks of many kinds under every plan, against a training step written by hand.

What each of these programs sends is what its recorded step sends, too.

A new model is one line of `MODELS`, a new plan one of `plans.PLANS`. A default run takes each model
and each plan with two models (`plans.DEFAULT`), `make test-all` all pairs.
"""

import functools
import re
import warnings

import jax
import numpy as np
import pytest

import plurax as px
from tests import models
from tests.zoo import by_hand, physics, plans, sequences, sets, vision
from tests.zoo.recorded import assert_recorded_is_compiled

MODELS = {
    "vision transformer": vision.VIT,
    "batch norm": vision.RESNET,
    "unet": vision.UNET,
    "gru": sequences.GRU,
    "bilstm": sequences.BILSTM,
    "state space": sequences.SSM,
    "experts": sequences.MOE,
    "autoregressive": sequences.MADE,
    "spiking": sequences.SPIKING,
    "fourier": physics.FNO,
    "pinn": physics.PINN,
    "neural ode": physics.ODE,
    "equilibrium": physics.DEQ,
    "implicit": physics.IMPLICIT,
    "branch": physics.CLIPPED,
    "graph": sets.GRAPH,
    "contrastive": sets.CONTRASTIVE,
    "recommender": sets.RECOMMENDER,
    "diffusion": sets.DIFFUSION,
}
SIZES = (7, 4)
"""Of the batches, the first of which the program is compiled for."""


def task(model):
    loss = functools.partial(model.loss, px.pipeline.stage_boundary)
    return px.Task(
        init=model.init,
        loss=loss,
        weight=model.weight,
        coupled=model.coupled,
        stateful=model.stateful,
    )


@functools.cache
def trainer(name, microbatches):
    return by_hand.trainer(MODELS[name], microbatches)


@functools.cache
def wanted(name, seed, microbatches):
    with jax.enable_x64(True):
        return trainer(name, microbatches)(SIZES, seed)


def trained(model, plan, members):
    batches = model.batches(SIZES)
    program = px.compile(task(model), by_hand.optimizer(), plan, batches[0], members=members)
    state = program.init() if members else program.init(seed=0)
    rows = []
    for batch in batches:
        state, metrics = program.step(state, batch)
        rows.append(jax.device_get(metrics))
    assert program.replicas.check(state) == []
    state = jax.device_get(program.to_canonical(state))
    return program, (state.params, state.opt_state, state.model_state), rows


def pairs():
    default = plans.chosen()
    for model in MODELS:
        for plan in plans.PLANS:
            if plan.startswith("uneven") and MODELS[model].coupled:
                continue  # refused: its replicas communicate in every microbatch
            marks = [] if (model, plan) in default else pytest.mark.slow
            yield pytest.param(model, plan, marks=marks, id=f"{model}-{plan}")


WITHOUT_RULE: dict[str, set[str]] = {}
"""Of each model the operations that have no sharding rule, so that their operands are gathered."""


@pytest.mark.parametrize(("name", "planned"), [*pairs()])
def test_as_by_hand(x64, name, planned):
    model, fields = MODELS[name], plans.PLANS[planned]
    plan = px.Plan(**fields, shardings=model.rules if fields.get("tensor", 1) > 1 else ())
    members = px.Members(2) if planned.startswith("members") else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", px.errors.ShardingWarning)
        program, got, rows = trained(model, plan, members)
        if members is None:
            assert_recorded_is_compiled(name, program, task(model), model.batches(SIZES)[0])
    gathered = [re.match(r"`(.*?)` at .* has no rule", str(one.message)) for one in said]
    assert {one[1] for one in gathered if one} <= WITHOUT_RULE.get(name, set())
    microbatches = plan.microbatches if model.coupled else 1
    alone = [wanted(name, seed, microbatches) for seed in range(2 if members else 1)]
    pick = (
        (lambda tree, k: jax.tree.map(lambda leaf: leaf[k], tree))
        if members
        else lambda tree, k: tree
    )
    for k, (state, expected) in enumerate(alone):
        assert models.max_rel_error(pick(got, k), state) < 1e-10
        for row, want in zip(pick(rows, k), expected, strict=True):
            assert row.keys() == want.keys()
            np.testing.assert_allclose(
                [row[name] for name in want],
                list(want.values()),
                rtol=1e-10,
                err_msg=str(list(want)),
            )


def test_a_default_run_takes_every_network_and_every_plan_with_two():
    default = plans.chosen()
    assert {model for model, _ in default} == set(MODELS)
    for plan in plans.PLANS:
        assert sum(pair[1] == plan for pair in default) >= 2, plan
