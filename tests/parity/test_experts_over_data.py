"""Experts split over `data`: rows are sent to their experts' devices, beside a step by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.parity import test_experts as mixtures
from tests.parity.test_experts import D, H, K
from tests.tiers import in_turns

import plurax as px
from plurax.execute.backends.choose import planned_task
from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.interpret import holds

pytestmark = pytest.mark.usefixtures("x64")

SPLIT = dict.fromkeys(("gate", "up", "down"), ("data", None, None))


# --- More ways to compute rows of experts ---------------------------------------------------------


def rectified(p, x):
    """With an operation that has a derivative of its own, and a scale of all experts."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jax.nn.relu(jax.lax.ragged_dot(rows, p["gate"], sizes))
    hidden = hidden * (1 + p["bias"][0])[None, :]
    return mixtures.back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def of_some_rows(p, x):
    """Tokens whose first expert is the last one are in no group: zeros, and exp(0) of zeros."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    sizes = sizes.at[-1].set(0)
    hidden = jnp.exp(jax.lax.ragged_dot(rows, p["gate"], sizes)) - rows[:, :H]
    y = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return mixtures.back(y + hidden.sum(1, keepdims=True), order, weights)


def read_in_between(p, x):
    """The hidden values are read elsewhere, and once more in the order of tokens."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jax.lax.ragged_dot(rows, p["gate"], sizes)
    hidden = jnp.tanh(hidden) + hidden[jnp.argsort(order)][order]
    y = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return mixtures.back(y + (hidden**2).sum(1, keepdims=True), order, weights)


def with_numbers(p, x):
    """Rows of truth values, and a number of parameters, beside rows that have a gradient."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jax.lax.ragged_dot(rows, p["gate"], sizes)
    kept = order[:, None] % K > 0
    hidden = jnp.where(kept, hidden, 0.1) * p["bias"].max()
    return mixtures.back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def normalized(p, x):
    """Of zeros, as a product of no group is, the derivative would be infinite."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jax.lax.ragged_dot(rows, p["gate"], sizes)
    hidden = hidden / jnp.sqrt((hidden**2).sum(1, keepdims=True)) * p["bias"][:1]
    return mixtures.back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def shifted(p, x):
    """The hidden values are a result, too, and depend on a value of all rows beside products."""
    rows, sizes, order, weights = mixtures.ordered(p, x)
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, p["gate"], sizes)) + p["bias"][:1]
    y = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return mixtures.back(y + hidden.sum(1, keepdims=True), order, weights)


def of_one_choice(p, x, scale=lambda p, hidden: hidden):
    """Each token has one expert (Switch)."""
    which = (x @ p["router"]).argmax(1)
    order = jnp.argsort(which)
    sizes = jnp.bincount(which, length=p["router"].shape[1])
    hidden = scale(p, jnp.tanh(jax.lax.ragged_dot(x[order], p["gate"], sizes)))
    y = jax.lax.ragged_dot(hidden, p["down"], sizes) + hidden.sum(1, keepdims=True)
    return y[jnp.argsort(order)]


def with_a_scale(p, x):
    return of_one_choice(p, x, lambda p, hidden: (hidden + 1) * p["bias"][:1])


def in_layers(p, x):
    """Dropless; a loop over layers, each with experts of its own."""
    layers = {name: jnp.stack([p[name], 0.5 * p[name]]) for name in SPLIT}

    def layer(x, own):
        return x + mixtures.sorted_rows({**p, **own}, x), None

    return jax.lax.scan(layer, x, layers)[0]


def buffers_in_layers(p, x):
    """A loop over layers, each with experts of its own, whose buffers hold all choices."""
    layers = {name: jnp.stack([p[name], 0.5 * p[name]]) for name in SPLIT}

    def layer(x, own):
        weights, which, _ = mixtures.chosen(p, x)
        choice = jax.nn.one_hot(which, p["router"].shape[1], dtype=x.dtype)
        y = mixtures.computed(own, jnp.einsum("nke,nd->end", choice, x))
        return x + jnp.einsum("nke,nk,end->nd", choice, weights, y), None

    return jax.lax.scan(layer, x, layers)[0]


MORE = [
    rectified, of_some_rows, read_in_between, with_numbers, normalized, shifted, in_layers,
    buffers_in_layers,
]  # fmt: skip
EVERY = [*mixtures.EVERY, *MORE]


def assert_as_by_hand(dispatch, kind="random", **fields):
    return mixtures.assert_as_by_hand(dispatch, px.Plan(shardings=SPLIT, **fields), kind)


@pytest.mark.parametrize(("count", "dispatch"), in_turns([2, 4], EVERY), ids=mixtures.name_of)
def test_rows_that_are_sent_equal_one_device(dispatch, count):
    """Also of dispatches whose experts' weights are gathered, since no rows are known."""
    assert_as_by_hand(dispatch, data=count)


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", [mixtures.sorted_rows, of_some_rows], ids=mixtures.name_of)
@pytest.mark.parametrize("kind", ["one expert", "no tokens", "ties"])
def test_any_choice_of_experts_equals_one_device(dispatch, kind):
    assert_as_by_hand(dispatch, kind, data=4)


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", [mixtures.sorted_rows, shifted], ids=mixtures.name_of)
def test_all_rows_on_one_device_are_sent_in_two_turns(dispatch):
    """Of 20 rows of each device 10 are sent to one in a turn."""
    plan = px.Plan(data=4, shardings=SPLIT)
    mixtures.assert_as_by_hand(dispatch, plan, "one device", experts=8)


PLANS = {
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 4, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3},
    "microbatches": {"data": 2, "microbatches": 4},
    "full": {"data": 4, "remat": "full"},
    "dots": {"data": 2, "remat": "dots"},
    "tensor": {"data": 2, "tensor": 2, "zero": 3, "microbatches": 2, "remat": "full"},
    "pipeline": {"data": 2, "pipeline": 2, "microbatches": 2},
    "pipeline, zero 3": {"data": 4, "pipeline": 2, "microbatches": 2, "zero": 3, "remat": "full"},
}


@pytest.mark.ci
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_another_parameter_is_gathered(zero):
    """What is no expert's can be split over `data` too: it is gathered where it is read."""
    rules = {**SPLIT, "in": (None, "data"), "bias": ("data", None)}
    plan = px.Plan(data=2, zero=zero, microbatches=2, shardings=rules)
    mixtures.assert_as_by_hand(mixtures.normed, plan)


@pytest.mark.ci
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_biases_of_experts_can_be_split_too(zero):
    rules = {**SPLIT, "bias": ("data", None)}
    plan = px.Plan(data=4, zero=zero, microbatches=2, shardings=rules)
    mixtures.assert_as_by_hand(mixtures.of_modules, plan)


@pytest.mark.ci
@pytest.mark.parametrize(
    "dispatch",
    [mixtures.sorted_rows, in_layers, mixtures.one_hot, buffers_in_layers],
    ids=mixtures.name_of,
)
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_equals_one_device(dispatch, name):
    fields = PLANS[name]
    rules = {**SPLIT, "in": (None, "tensor")} if "tensor" in fields else SPLIT
    mixtures.assert_as_by_hand(dispatch, px.Plan(shardings=rules, **fields))


# --- In a pipeline --------------------------------------------------------------------------------

STACKED = {f"*/{name}": (..., *rule) for name, rule in SPLIT.items()}


def stack_of_mixtures(kind="random", experts=mixtures.E, dispatch=mixtures.sorted_rows):
    """Four layers of experts between two products."""

    def layer(key):
        params = mixtures.start(key, kind, experts)
        return {name: leaf for name, leaf in params.items() if name not in ("in", "head")}

    def block(p, x, batch, keys):
        return x + dispatch(p, x.reshape(-1, D)).reshape(x.shape)

    def matrix(key):
        return jax.random.normal(key, (D, D)) * 0.5

    return px.stack(
        embed=(matrix, lambda w, batch, keys: jnp.tanh(batch["x"] @ w)),
        block=(layer, block),
        head=(matrix, lambda w, x, batch, keys: ((x @ w - batch["y"]) ** 2).mean((1, 2))),
        depth=4,
    )


def trained(plan, *of_stack):
    """The third batch is smaller, so that some rows are filled up."""
    batch = mixtures.batch_of()
    program = px.compile(stack_of_mixtures(*of_stack), optax.adam(1e-2), plan, batch)
    state = program.init(seed=0)
    for count in (8, 8, 5):
        state, metrics = program.step(state, models.cut(batch, count))
    return program, jax.device_get((program.to_canonical(state).params, metrics["loss"]))


PIPELINES = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe", "zero": 1},
    "interleaved": {"schedule": "interleaved", "zero": 2},
    "zb-h1": {"schedule": "zb-h1", "remat": "full"},
    "1f1b, zero 3": {"data": 4, "zero": 3, "remat": "dots"},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "mixture", [("random", 4), ("one device", 8), ("random", 4, mixtures.grouped)],
    ids=["random", "one device", "buffers"],
)  # fmt: skip
@pytest.mark.parametrize("name", PIPELINES)
def test_devices_of_a_stage_send_rows_to_each_other(name, mixture):
    """In as many turns as their own routing takes, while the other stage takes its own."""
    fields = {"data": 2, "pipeline": 2, "microbatches": 2, **PIPELINES[name]}
    program, ours = trained(px.Plan(shardings=STACKED, **fields), *mixture)
    assert models.max_rel_error(ours, trained(px.Plan(), *mixture)[1]) < 1e-10
    exchanges = {one.axes for one in program.collectives() if one.kind == "all-to-all"}
    assert exchanges == {("data",)}


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", [of_one_choice, with_a_scale], ids=mixtures.name_of)
def test_rows_that_devices_do_not_divide(dispatch):
    """Five rows on each of four devices: two slots for those of each, and two rows of no slot."""
    batch, loss = mixtures.batch_of(4), mixtures.loss_of(dispatch)
    program = px.compile(
        mixtures.task_of(dispatch), optax.sgd(0.1), px.Plan(data=4, shardings=SPLIT), batch
    )
    state, metrics = program.step(program.init(seed=0), batch)
    start = mixtures.start(jax.random.split(jax.random.key(0))[0])
    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, None).mean()))(start)
    expected = value, jax.tree.map(lambda p, g: p - 0.1 * g, start, grads)
    found = metrics["loss"], program.to_canonical(state).params
    assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10


# --- The rest of a program ------------------------------------------------------------------------


def test_rows_that_fill_a_batch_change_nothing():
    """Seven examples on four devices: the last row is padding, and is sent as any."""
    plan = px.Plan(data=4, shardings=SPLIT)
    batch = mixtures.batch_of(7)
    task = mixtures.task_of(mixtures.sorted_rows)
    program = px.compile(task, optax.sgd(0.1), plan, batch)
    state, metrics = program.step(program.init(seed=0), batch)

    def mean(params):
        return mixtures.loss_of(mixtures.sorted_rows)(params, batch, None).mean()

    start = mixtures.start(jax.random.split(jax.random.key(0))[0])
    value, grads = jax.jit(jax.value_and_grad(mean))(start)
    expected = value, jax.tree.map(lambda p, g: p - 0.1 * g, start, grads)
    found = metrics["loss"], program.to_canonical(state).params
    assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10


def predict(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    return mixtures.sorted_rows(params, x.reshape(-1, D)).reshape(x.shape)


@pytest.mark.ci
@pytest.mark.parametrize("coupled", [False, True], ids=["apart", "coupled"])
def test_predictions_and_evaluation_equal_one_device(coupled):
    """They send rows as well, also where the loss couples examples."""
    loss = mixtures.balanced if coupled else mixtures.loss_of(mixtures.sorted_rows)
    evaluate = lambda p, b: (predict(p, b) ** 2).mean((1, 2))  # noqa: E731
    task = px.Task(
        init=mixtures.start, loss=loss, predict=predict, evaluate=evaluate, coupled=coupled
    )
    batch, plan = mixtures.batch_of(13), px.Plan(data=4, shardings=SPLIT)
    closed = jax.make_jaxpr(planned_task(task, plan).predict)(
        mixtures.start(jax.random.key(0)), batch
    )
    assert holds(closed.jaxpr, AT_EXPERTS)
    results = []
    for each in (px.Plan(), plan):
        program = px.compile(task, optax.sgd(0.1), each, mixtures.batch_of())
        state = program.init(seed=0)
        results.append((program.predict(state, batch), program.evaluate(state, batch)["loss"]))
    assert models.max_rel_error(*results) < 1e-10


@pytest.mark.ci
def test_members_equal_one_device():
    """Of two networks, each on its own two devices, and both on the same two."""
    for fields in ({"member": 2, "chunk": 1}, {}):
        plan = px.Plan(data=2, shardings=SPLIT, **fields)
        task = mixtures.task_of(mixtures.sorted_rows)
        program = px.compile(task, optax.sgd(0.1), plan, mixtures.batch_of(), members=px.Members(2))
        assert "all-to-all" in {one.kind for one in program.collectives()}
        state, metrics = program.step(program.init(), mixtures.batch_of())
        params = program.to_canonical(state).params
        for seed in range(2):
            expected = mixtures.by_hand(mixtures.sorted_rows, seed=seed)
            found = jax.tree.map(lambda leaf, k=seed: leaf[k], (metrics["loss"], params))
            assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10


@pytest.mark.ci
def test_a_state_goes_on_under_another_plan():
    """Two steps with rows sent, then two with experts over `tensor`, as four of one device."""
    task, batch = mixtures.task_of(mixtures.sorted_rows), mixtures.batch_of()
    plans = [px.Plan(data=4, zero=1, shardings=SPLIT), px.Plan(tensor=2, shardings=mixtures.SPLIT)]
    ends = []
    for phases in ([px.Plan()], plans):
        state = None
        for plan in phases:
            program = px.compile(task, optax.adam(1e-2), plan, batch)
            own = program.init(seed=0) if state is None else program.from_canonical(state)
            for _ in range(4 // len(phases)):
                own, _ = program.step(own, batch)
            state = jax.device_get(program.to_canonical(own))
        ends.append(jax.device_get(state.params))
    assert models.max_rel_error(*ends) < 1e-10


def test_activations_are_not_split_by_rules_over_data():
    plan = px.Plan(data=2, shardings={**SPLIT, "choices": ("data", None)})
    task = mixtures.task_of(mixtures.named_one_hot)
    with pytest.raises(px.errors.PlanError, match="activation 'choices' is named"):
        px.compile(task, optax.sgd(0.1), plan, mixtures.batch_of())


@pytest.mark.ci
@pytest.mark.parametrize("loss", [mixtures.balanced, mixtures.dropping], ids=mixtures.name_of)
def test_a_balanced_load_is_that_of_the_whole_batch(loss):
    """Tokens of all devices are sorted together, and no rows are sent: all is exact."""
    task = px.Task(init=mixtures.start, loss=loss, coupled=True)
    plan = px.Plan(data=4, shardings=SPLIT, zero=1)
    program = px.compile(task, optax.sgd(mixtures.RATE), plan, mixtures.batch_of())
    state, metrics = program.step(program.init(seed=0), mixtures.batch_of())
    found = jax.device_get((metrics["loss"], program.to_canonical(state).params))
    expected = mixtures.coupled_by_hand(loss, 1)
    assert models.max_rel_error(found, jax.device_get(expected)) < 1e-10


def test_an_axis_that_splits_nothing_is_refused_beside_experts():
    """Rows that are sent to experts have a backward pass of their own, which uses no `tensor`."""
    task, plan = mixtures.task_of(rectified), px.Plan(data=2, tensor=2, shardings=SPLIT)
    with pytest.raises(px.errors.PlanError, match="splits anything over `tensor`"):
        px.compile(task, optax.sgd(0.1), plan, mixtures.batch_of())


def attending(params, batch, keys):
    """Attention, of whose tokens each has its experts."""
    x = batch["x"]
    scores = jnp.einsum("btd,bsd->bts", x @ params["in"], x)
    x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)
    rows = x.reshape(-1, D)
    y = (rows + mixtures.sorted_rows(params, rows)).reshape(x.shape)
    return ((y - batch["y"]) ** 2).mean((1, 2))


@pytest.mark.ci
@pytest.mark.parametrize("fields", [{"zero": 1}, {"zero": 3, "context_strategy": "ring"}], ids=str)
def test_beside_tokens_over_devices(fields):
    """Tokens are split over `context` for attention, and rows of experts are sent over `data`."""
    task, rng = px.Task(init=mixtures.init, loss=attending), np.random.default_rng(2)
    batch = {name: rng.normal(size=(4, 8, D)) for name in "xy"}
    plan = px.Plan(data=2, context=2, stream=2, shardings=SPLIT, **fields)
    program = px.compile(task, optax.sgd(0.1), plan, batch)
    start = program.init(seed=0)
    params = jax.device_get(program.to_canonical(start).params)
    state, metrics = program.step(start, batch)
    found = metrics["loss"], program.to_canonical(state).params

    loss, grads = jax.value_and_grad(lambda p: attending(p, batch, None).mean())(params)
    expected = loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10
