"""Over which axes of the mesh a step is manual: losses that call the host, or say shardings."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equinox.internal import while_loop
from jax.experimental import io_callback
from tests import models

import plurax as px

HEARD: list[float] = []


def sines(x):
    """Sines computed by NumPy, as a solver in a library would be."""

    @jax.custom_jvp
    def on_host(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, like, x, vmap_method="expand_dims")

    on_host.defjvp(lambda x, change: (on_host(*x), jnp.cos(*x) * change[0]))
    return on_host(x)


def loss(params, batch, keys):
    x = sines(batch["x"] @ params["w"])
    jax.debug.print("the mean is {}", x.mean())
    io_callback(lambda value: HEARD.append(float(value)), None, jax.lax.stop_gradient(x).mean())
    return ((x - batch["y"]) ** 2).sum(1)


def predict(params, inputs):
    return sines(inputs["x"] @ params["w"])


def init(key):
    return {"w": jax.random.normal(key, (6, 4), float)}


TASK = px.Task(init=init, loss=loss, predict=predict)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 6)), "y": RNG.normal(size=(8, 4))}


def compiled(task=TASK, **fields):
    return px.compile(task, optax.sgd(0.1), px.Plan(**fields), BATCH)


def after_a_step(program):
    state = program.init() if program.members else program.init(seed=0)
    return jax.device_get(program.step(state, BATCH)[0].params)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": 2},
        {"data": 2, "microbatches": 2},
        {"data": 2, "zero": 3},
        {"tensor": 2, "shardings": {"w": (None, "tensor")}},
    ],
    ids=str,
)
# A tensor plan gathers the operands of `pure_callback`, and says so.
@pytest.mark.filterwarnings("ignore:`pure_callback`:plurax.errors.ShardingWarning")
def test_a_loss_that_calls_the_host_trains_alike_under_every_plan(x64, capfd, fields):
    wanted = after_a_step(compiled())
    capfd.readouterr(), HEARD.clear()
    program = compiled(**fields)
    assert models.max_rel_error(after_a_step(program), wanted) < 1e-10
    jax.effects_barrier()
    # Once per device and microbatch, of its own rows.
    times = program.plan.devices * program.plan.microbatches
    assert capfd.readouterr().out.count("the mean is ") == len(HEARD) == times


def by_platform(params, batch, keys):
    """A loss whose operations differ between platforms: those of `jnp.diagonal`, and its own."""
    spread = jnp.log(jnp.diagonal(params["w"].T @ params["w"])).sum()
    x = jax.lax.platform_dependent(batch["x"] @ params["w"], default=jnp.tanh, cuda=jnp.sin)
    return ((x - batch["y"]) ** 2).sum(1) - spread


@pytest.mark.parametrize("fields", [{"data": 2}, {"member": 2}], ids=str)
def test_a_loss_with_operations_of_a_platform_trains_as_by_hand(x64, fields):
    task = px.Task(init=init, loss=by_platform)
    members = px.Members(2) if "member" in fields else None
    program = px.compile(task, optax.sgd(0.1), px.Plan(**fields), BATCH, members=members)
    got = after_a_step(program)["w"]
    for seed in range(2 if members else 1):
        w = init(jax.random.split(jax.random.key(seed))[0])["w"]
        slope = jax.grad(lambda w: by_platform({"w": w}, BATCH, None).mean())(w)
        trained = got[seed] if members else got
        assert models.max_rel_error(trained, w - 0.1 * slope) < 1e-10


def test_predictions_and_evaluations_call_the_host_on_several_devices(x64):
    alone, program = compiled(), compiled(data=2)
    state = alone.init(seed=0)
    same = program.init(seed=0)
    np.testing.assert_allclose(program.predict(same, BATCH), alone.predict(state, BATCH))
    found, wanted = program.evaluate(same, BATCH), alone.evaluate(state, BATCH)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-12)


def looping(params, batch, keys, *, checked):
    """Losses through Equinox's checkpointed loop, which compares the types of what it closes over.

    With `checked`, by an error check on the host, as the solvers of Diffrax have it.
    """

    def loss(x, y):
        def body(carry):
            index, x = carry
            return index + 1, jnp.tanh(x @ params["w"] @ params["w"].T + x)

        if checked:
            x = eqx.error_if(x, jnp.isnan(x).any(), "a row is not finite")
        carry = (0, x)
        _, x = while_loop(lambda carry: carry[0] < 3, body, carry, kind="checkpointed", max_steps=4)
        return ((x[:4] - y) ** 2).sum()

    return jax.vmap(loss)(batch["x"], batch["y"])


@pytest.mark.ci
@pytest.mark.parametrize("members", [None, px.Members(seeds=range(4))], ids=["network", "members"])
@pytest.mark.parametrize("checked", [False, True])
def test_checkpointed_loops_of_equinox_train_alike(x64, members, checked):
    task = px.Task(init=init, loss=functools.partial(looping, checked=checked))

    def trained(plan):
        program = px.compile(task, optax.sgd(0.1), plan, BATCH, members=members)
        return after_a_step(program)

    wanted = trained(px.Plan())
    for plan in (px.Plan(data=2), px.Plan(data=2, member=2)):
        if members or plan.member == 1:
            assert models.max_rel_error(trained(plan), wanted) < 1e-10


def test_a_plan_that_splits_the_batch_alone_may_still_constrain_shardings():
    def constrained(params, batch, keys):
        x = batch["x"] @ params["w"]
        x = jax.lax.with_sharding_constraint(x, jax.P(None, "tensor"))
        return ((x - batch["y"]) ** 2).sum(1)

    compiled(px.Task(init=init, loss=constrained), data=2)


@pytest.mark.parametrize("fields", [{}, {"member": 2}, {"zero": 1}], ids=str)
def test_an_operation_is_lowered_without_a_constraint_on_its_sharding(fields):
    """Beside axes that are not manual each would have one, and the compiler twice the program."""
    task = px.Task(init=init, loss=lambda p, batch, keys: ((batch["x"] @ p["w"]) ** 2).sum(1))
    members = px.Members(seeds=range(2)) if "member" in fields else None
    plan = px.Plan(data=2, **fields)
    program = px.compile(task, optax.sgd(0.1), plan, BATCH, members=members)
    lowered = program.trace_evaluate().lower().as_text()
    assert "sdy.manual_computation" in lowered
    assert "sdy.sharding_constraint" not in lowered


@pytest.mark.parametrize("zero", [0, 1])
def test_prints_in_order_are_refused_on_several_devices_by_their_line(zero):
    def ordered(params, batch, keys):
        x = batch["x"] @ params["w"]
        jax.debug.print("{}", x.mean(), ordered=True)
        return ((x - batch["y"]) ** 2).sum(1)

    line = ordered.__code__.co_firstlineno + 2
    task = px.Task(init=init, loss=ordered)
    compiled(task)
    with pytest.raises(
        px.errors.PlanError, match=rf"test_manual_axes\.py:{line}.* Leave out ordered=True"
    ):
        compiled(task, data=2, zero=zero)


@pytest.mark.parametrize("fields", [{}, {"batch_dim": "minor"}, {"chunk": 2}], ids=str)
def test_members_call_the_host_where_the_plan_leaves_open_how_they_are_computed(fields):
    heard = []

    def loss(params, batch, keys):
        x = batch["x"] @ params["w"]
        jax.debug.callback(lambda mean: heard.append(float(mean)), x.mean())
        return ((x - batch["y"]) ** 2).sum(1)

    members = px.Members(seeds=range(4))
    program = px.compile(
        px.Task(init=init, loss=loss), optax.adam(0.1), px.Plan(**fields), BATCH, members=members
    )
    state = program.init()
    wanted = np.sort([(BATCH["x"] @ w).mean() for w in np.asarray(state.params["w"])])
    jax.block_until_ready(program.step(state, BATCH))
    jax.effects_barrier()
    np.testing.assert_allclose(np.sort(heard), wanted, rtol=1e-4)


def test_a_loop_that_each_example_ends_by_itself_beside_a_call_of_the_host(x64):
    """`vmap` of a `while_loop` in a loop leaves one condition per example."""

    def rounds(x):
        last = jnp.where(x[0] > 0, 4, 3)

        def turn(state):
            count, x = state
            inner = jax.lax.while_loop(lambda x: jnp.abs(x).sum() > 1, lambda x: x / 2, x + 1)
            return count + 1, inner

        return jax.lax.while_loop(lambda state: state[0] < last, turn, (0, x))[1]

    def counted(params, batch, keys):
        x = sines(jax.vmap(rounds)(batch["x"]) @ params["w"])
        return ((x - batch["y"]) ** 2).sum(1)

    one, two = (after_a_step(compiled(px.Task(init=init, loss=counted), data=n)) for n in (1, 2))
    assert models.max_rel_error(two, one) < 1e-10
