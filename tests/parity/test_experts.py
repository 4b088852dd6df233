"""Mixtures of experts, their weights split over devices, beside a step written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models
from tests.promotion import row
from tests.tiers import in_turns

import plurax as px

B, T, D, H, E, K = 8, 5, 10, 6, 4, 2
CAPACITY = 3
"""Slots of an expert for an example, of whose choices some are dropped."""

pytestmark = pytest.mark.usefixtures("x64")


def init(key, experts=E):
    shapes = {
        "in": (D, D), "router": (D, experts), "preferred": (experts,), "gate": (experts, D, H),
        "up": (experts, D, H), "bias": (experts, H), "down": (experts, H, D), "head": (D, D),
    }  # fmt: skip
    arrays = models.normals(key, float, *shapes.values())
    return {name: array * 0.5 for name, array in zip(shapes, arrays, strict=True)}


SPLIT = dict.fromkeys(("gate", "up", "down"), ("tensor", None, None))
HIDDEN = {"gate": (None, None, "tensor"), "up": (None, None, "tensor"),
          "down": (None, "tensor", None)}  # fmt: skip


# --- Three ways of dispatch -----------------------------------------------------------------------


def chosen(p, x):
    """The weights of `K` experts for each token, and which they are."""
    scores = jax.nn.softmax(x @ p["router"] + row(p["preferred"], x))
    best, which = jax.lax.top_k(scores, K)
    return best / best.sum(-1, keepdims=True), which, scores


def places(which, experts):
    """The place of each choice among those of its expert, in the order of tokens."""
    one_hot = jax.nn.one_hot(which.reshape(-1), experts, dtype=jnp.int32)
    return ((jnp.cumsum(one_hot, 0) - 1) * one_hot).sum(-1)


def computed(p, buffers):
    """The experts' values of buffers `(E, C, D)`."""
    gate, up = (jnp.einsum("ecd,edh->ech", buffers, p[name]) for name in ("gate", "up"))
    return jnp.einsum("ech,ehd->ecd", jax.nn.silu(gate) * up, p["down"])


def one_hot(p, x, named=lambda choices: choices):
    """By products with zeros and ones (GShard, Switch): what is beyond the capacity is dropped."""
    weights, which, _ = chosen(p, x)
    experts = p["router"].shape[1]
    slot = jax.nn.one_hot(places(which, experts), CAPACITY, dtype=x.dtype)
    expert = named(jax.nn.one_hot(which.reshape(-1), experts, dtype=x.dtype))
    sent = (expert[:, :, None] * slot[:, None, :]).reshape(len(x), K, experts, CAPACITY)
    y = computed(p, jnp.einsum("nkec,nd->ecd", sent, x))
    return jnp.einsum("nkec,nk,ecd->nd", sent, weights, y)


def named_one_hot(p, x):
    """Each device computes the products of its own experts' slots."""
    return one_hot(p, x, lambda choices: px.sharding.name(choices, "choices"))


def in_buffers(p, x, *, add=False):
    """By indices into buffers `(E, C, D)`: what is beyond the capacity is dropped."""
    weights, which, _ = chosen(p, x)
    experts = p["router"].shape[1]
    at = which.reshape(-1), places(which, experts)
    zeros = jnp.zeros((experts, CAPACITY, D), x.dtype).at[at]
    rows = jnp.repeat(x, K, 0)
    buffers = zeros.add(rows, mode="drop") if add else zeros.set(rows, mode="drop")
    y = computed(p, buffers).at[at].get(mode="fill", fill_value=0)
    return jnp.einsum("nkd,nk->nd", y.reshape(len(x), K, D), weights)


def added_to_buffers(p, x):
    return in_buffers(p, x, add=True)


def of_modules(p, x):
    """Each expert is a module, with a bias; their values of the buffers under `jax.vmap`."""

    def module(gate, bias, down, rows):
        return jax.nn.relu(rows @ gate + row(bias, rows)) @ down

    return through_buffers(x, p, jax.vmap(module, in_axes=(0, 0, 0, 0)), "gate", "bias", "down")


def weights_first(p, x):
    """Weights on the left of products, and hidden values that are normalized between them."""

    def computed(gate, down, buffers):
        hidden = jnp.einsum("edh,ecd->ehc", gate.astype(x.dtype), buffers)
        hidden = jnp.exp(hidden - hidden.max(1, keepdims=True))
        hidden = hidden / hidden.sum(1, keepdims=True)
        return jnp.einsum("edh,ehc->ced", down.transpose(0, 2, 1), hidden).transpose(1, 0, 2)

    return through_buffers(x, p, computed, "gate", "down")


def through_buffers(x, p, computed, *names):
    """Tokens in buffers of all of them, through experts' functions of parameters and buffers."""
    weights, which, _ = chosen(p, x)
    chosen_ones = jax.nn.one_hot(which, p["router"].shape[1], dtype=x.dtype)
    buffers = jnp.einsum("nke,nd->end", chosen_ones, x)
    y = computed(*(p[name] for name in names), buffers)
    return jnp.einsum("nke,nk,end->nd", chosen_ones, weights, y)


def grouped(p, x):
    """Examples are a dim of their own in all buffers (GShard)."""
    groups = x.reshape(-1, T, D)
    weights, which, _ = chosen(p, groups)
    experts = p["router"].shape[1]
    slots = jax.nn.one_hot(jax.vmap(lambda w: places(w, experts))(which), CAPACITY, dtype=x.dtype)
    choice = jax.nn.one_hot(which, experts, dtype=x.dtype)
    slots = slots.reshape(*which.shape, CAPACITY)
    buffers = jnp.einsum("gske,gskc,gsd->egcd", choice, slots, groups)
    hidden = jax.nn.gelu(jnp.einsum("egcd,edh->egch", buffers, p["gate"]))
    y = jnp.einsum("egch,ehd->gecd", hidden, p["down"])
    return jnp.einsum("gske,gskc,gsk,gecd->gsd", choice, slots, weights, y).reshape(x.shape)


def ordered(p, x):
    """Rows in the order of their experts, how many each expert has, and the order."""
    weights, which, _ = chosen(p, x)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=p["router"].shape[1])
    return x[order // K], sizes, order, weights


def back(y, order, weights):
    y = y[jnp.argsort(order)].reshape(len(weights), K, -1)
    return jnp.einsum("nkd,nk->nd", y, weights)


def sorted_rows(p, x):
    """Dropless (Mixtral, MegaBlocks): rows in the order of their experts."""
    rows, sizes, order, weights = ordered(p, x)
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    return back(jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes), order, weights)


def added_to_tokens(p, x):
    """Dropless; each row is weighted where it is, and added to its token."""
    rows, sizes, order, weights = ordered(p, x)
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    y = y * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(y)


def fused(p, x):
    """Dropless; both first products are one."""
    rows, sizes, order, weights = ordered(p, x)
    both = jnp.concatenate([p["gate"], p["up"]], -1)
    hidden = jax.lax.ragged_dot(rows, both, sizes)
    hidden = jax.nn.gelu(hidden[:, :H]) * hidden[:, H:]
    return back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def normed(p, x):
    """Dropless; with a bias, a bound and a norm between the products."""
    rows, sizes, order, weights = ordered(p, x)
    which = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    hidden = jax.lax.ragged_dot(rows, p["gate"], sizes) + p["bias"][which]
    hidden = jnp.maximum(hidden, -0.1)
    hidden = hidden / (1 + jnp.abs(hidden).max(1, keepdims=True))
    first, second = jnp.split(jnp.concatenate([hidden, hidden**2], 1), 2, axis=1)
    hidden = jnp.pad(first[:, 1:], ((0, 0), (1, 0))) + second
    hidden = hidden * jax.lax.rsqrt((hidden**2).mean(1, keepdims=True) + 0.1)
    return back(jax.lax.ragged_dot(hidden, p["down"], sizes), order, weights)


def in_a_checkpoint(p, x):
    return jax.checkpoint(sorted_rows)(p, x)


def in_a_loop(p, x):
    """Dropless; two layers of the same experts."""
    return jax.lax.scan(lambda x, _: (x + sorted_rows(p, x), None), x, None, length=2)[0]


def counted_twice(p, x):
    """Dropless; the rows of one product are those of no other, as far as is known."""
    rows, sizes, order, weights = ordered(p, x)
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, p["gate"], sizes))
    return back(jax.lax.ragged_dot(hidden, p["down"], sizes[::-1][::-1]), order, weights)


DISPATCHES = [one_hot, in_buffers, added_to_buffers, sorted_rows]
DROPLESS = [sorted_rows, added_to_tokens, fused, normed, in_a_checkpoint, in_a_loop, counted_twice]
NAMED = {**SPLIT, "choices": (..., "tensor")}
BUFFERS = [of_modules, weights_first, grouped]
EVERY = [*DISPATCHES, *DROPLESS[1:], *BUFFERS]


# --- Beside a step by hand ------------------------------------------------------------------------


def loss_of(dispatch):
    def loss(params, batch, keys):
        x = jnp.tanh(batch["x"] @ params["in"])
        y = x + jax.vmap(lambda tokens: dispatch(params, tokens))(x) if apart(dispatch) else (
            x.reshape(-1, D) + dispatch(params, x.reshape(-1, D))).reshape(x.shape)  # fmt: skip
        y = px.pipeline.stage_boundary(y)
        return ((y @ params["head"] - batch["y"]) ** 2).mean((1, 2))

    return loss


def apart(dispatch):
    """Whether the capacity is that of an example, so that no example reads another."""
    apart = one_hot, named_one_hot, in_buffers, added_to_buffers, of_modules, weights_first
    return dispatch in apart


def batch_of(rows=B):
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(rows, T, D)) for name in "xy"}


def start(key, kind="random", experts=E):
    params = init(key, experts)
    if kind == "one expert":
        params["preferred"] = jnp.full(experts, -1e3).at[2].set(0.0)
    elif kind == "one device":  # of four; two experts
        params["preferred"] = jnp.full(experts, -1e3).at[jnp.array([4, 5])].set(0.0)
    elif kind == "no tokens":
        params["preferred"] = params["preferred"].at[jnp.array([0, 1])].set(-50.0)
    elif kind == "ties":
        params |= {name: jnp.zeros_like(params[name]) for name in ("router", "preferred")}
    return params


RATE = 0.1


@functools.cache
def by_hand(dispatch, kind="random", experts=E, seed=0):
    """The loss, and the parameters after a step, of one device."""
    params = start(jax.random.split(jax.random.key(seed))[0], kind, experts)
    mean = lambda p: loss_of(dispatch)(p, batch_of(), None).mean()  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return jax.device_get((value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)))


def task_of(dispatch, kind="random", experts=E):
    return px.Task(init=lambda key: start(key, kind, experts), loss=loss_of(dispatch))


def step(dispatch, plan, kind="random", experts=E):
    program = px.compile(task_of(dispatch, kind, experts), optax.sgd(RATE), plan, batch_of())
    state, metrics = program.step(program.init(seed=0), batch_of())
    return program, metrics["loss"], program.to_canonical(state).params


def assert_as_by_hand(dispatch, plan, kind="random", experts=E):
    program, *found = step(dispatch, plan, kind, experts)
    expected = by_hand(dispatch, kind, experts)
    assert models.max_rel_error(jax.device_get(tuple(found)), jax.device_get(expected)) < 1e-10
    return program


@pytest.mark.ci
def test_experts_of_members_equal_one_device():
    """Of two networks, each on its own devices."""
    plan = px.Plan(member=2, tensor=2, chunk=1, shardings=SPLIT)
    task = task_of(sorted_rows)
    program = px.compile(task, optax.sgd(RATE), plan, batch_of(), members=px.Members(2))
    state, metrics = program.step(program.init(), batch_of())
    params = program.to_canonical(state).params
    for seed in range(2):
        expected = by_hand(sorted_rows, seed=seed)
        found = jax.tree.map(lambda leaf, k=seed: leaf[k], (metrics["loss"], params))
        assert models.max_rel_error(jax.device_get(found), jax.device_get(expected)) < 1e-10


def name_of(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("count", "dispatch"), in_turns([2, 4], EVERY, odd=True), ids=name_of)
def test_experts_over_devices_equal_one_device(dispatch, count):
    assert_as_by_hand(dispatch, px.Plan(tensor=count, shardings=SPLIT))


@pytest.mark.ci
def test_named_choices_equal_one_device():
    assert_as_by_hand(named_one_hot, px.Plan(tensor=4, shardings=NAMED))


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", DISPATCHES, ids=name_of)
@pytest.mark.parametrize("kind", ["one expert", "no tokens", "ties"])
def test_any_choice_of_experts_equals_one_device(dispatch, kind):
    assert_as_by_hand(dispatch, px.Plan(tensor=4, shardings=SPLIT), kind)


PLANS = {
    "data": {"data": 2, "tensor": 2},
    "zero 1": {"data": 2, "tensor": 2, "zero": 1},
    "zero 3": {"data": 2, "tensor": 2, "zero": 3},
    "microbatches": {"tensor": 2, "microbatches": 4},
    "full": {"tensor": 2, "remat": "full"},
    "dots": {"tensor": 2, "remat": "dots"},
    "pipeline": {"pipeline": 2, "tensor": 2, "microbatches": 2},
    "everything": {"data": 2, "tensor": 4, "zero": 2, "microbatches": 2, "remat": "full"},
}
"""Name: the fields of the plan."""


@pytest.mark.ci
@pytest.mark.parametrize("dispatch", DISPATCHES, ids=name_of)
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_equals_one_device(dispatch, name):
    assert_as_by_hand(dispatch, px.Plan(shardings=SPLIT, **PLANS[name]))


# --- Layers in stages -----------------------------------------------------------------------------

DEPTH = 4
LAYERS = {
    f"{schedule}, {remat}": {"pipeline": 2, "microbatches": 4, "schedule": schedule, "remat": remat}
    for schedule in ("1f1b", "gpipe", "zb-h1")
    for remat in ("none", "dots", "full")
} | {"a loop": {}, "a loop, dots": {"remat": "dots"}}
"""Name: the fields of the plan."""


def layer(dispatch, p, x):
    """A mixture of the tokens of all examples, or, with a capacity, of each."""
    if dispatch is sorted_rows:
        return x + dispatch(p, x.reshape(-1, D)).reshape(x.shape)
    return x + jax.vmap(lambda tokens: dispatch(p, tokens))(x)


def layers_of(dispatch):
    """A task of `DEPTH` mixtures, one after another."""
    return px.stack(
        embed=(lambda key: {}, lambda p, batch, keys: batch["x"]),
        block=(init, lambda p, x, batch, keys: layer(dispatch, p, x)),
        head=(lambda key: {}, lambda p, x, batch, keys: ((x - batch["y"]) ** 2).mean((1, 2))),
        depth=DEPTH,
    )


def layers_program(dispatch, name):
    rules = {f"blocks/{key}": (None, *rule) for key, rule in SPLIT.items()}
    plan = px.Plan(tensor=2, shardings=rules, **LAYERS[name])
    return px.compile(layers_of(dispatch), optax.sgd(RATE), plan, batch_of())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "dispatch"),
    [(name, sorted_rows) for name in LAYERS]
    + [("1f1b, none", one) for one in DISPATCHES if one is not sorted_rows],
    ids=name_of,
)
def test_layers_of_experts_equal_one_device(dispatch, name):
    program = layers_program(dispatch, name)
    state, metrics = program.step(program.init(seed=0), batch_of())
    params = layers_of(dispatch).init(jax.random.split(jax.random.key(0))[0])

    def loss(params):
        x = jnp.asarray(batch_of()["x"])
        for index in range(DEPTH):
            p = jax.tree.map(lambda leaf, k=index: leaf[k], params["blocks"])
            x = layer(dispatch, p, x)
        return ((x - batch_of()["y"]) ** 2).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected = value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    found = jax.device_get((metrics["loss"], program.to_canonical(state).params))
    assert models.max_rel_error(found, jax.device_get(expected)) < 1e-10


# --- Losses that couple examples ------------------------------------------------------------------


def balanced(params, batch, keys, mask, dispatch=sorted_rows):
    """Experts of all tokens of a batch, their load balanced over these tokens (Switch)."""
    x = jnp.tanh(batch["x"] @ params["in"])
    y = (x.reshape(-1, D) + dispatch(params, x.reshape(-1, D))).reshape(x.shape)
    _, which, scores = chosen(params, x)
    real = mask[:, None, None]
    count = (mask.sum() * T).astype(x.dtype)
    picked = jax.nn.one_hot(which, scores.shape[-1], dtype=x.dtype).sum(-2)
    share = jnp.where(real, picked, 0).sum((0, 1)) / count
    wanted = jnp.where(real, scores, 0).sum((0, 1)) / count
    losses = ((y @ params["head"] - batch["y"]) ** 2).mean((1, 2))
    return losses + len(share) * (share * wanted).sum()


def dropping(params, batch, keys, mask):
    """The capacity is that of all tokens of a microbatch, of which some are dropped."""
    return balanced(params, batch, keys, mask, dispatch=added_to_buffers)


@functools.cache
def coupled_by_hand(loss, microbatches):
    """Microbatch `m` has the examples `m`, `m + microbatches`, and so on, of all devices."""
    params = start(jax.random.split(jax.random.key(0))[0])
    parts = [{k: v[m::microbatches] for k, v in batch_of().items()} for m in range(microbatches)]

    def mean(p):
        whole = [loss(p, part, None, jnp.ones(len(part["x"]), bool)).sum() for part in parts]
        return sum(whole) / B

    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return jax.device_get((value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)))


COUPLED = {
    "tensor": {"tensor": 4},
    "data": {"data": 2, "tensor": 2},
    "data alone": {"data": 4},
    "microbatches": {"data": 2, "tensor": 2, "microbatches": 2},
    "zero 3": {"data": 2, "tensor": 2, "zero": 3, "remat": "full"},
}


@pytest.mark.ci
@pytest.mark.parametrize("loss", [balanced, dropping], ids=name_of)
@pytest.mark.parametrize("name", COUPLED)
def test_a_balanced_load_is_that_of_the_whole_batch(loss, name):
    """However many devices there are; microbatches balance theirs and drop in theirs."""
    fields = COUPLED[name]
    rules = SPLIT if "tensor" in fields else {}
    task = px.Task(init=start, loss=loss, coupled=True)
    program = px.compile(task, optax.sgd(RATE), px.Plan(shardings=rules, **fields), batch_of())
    state, metrics = program.step(program.init(seed=0), batch_of())
    found = jax.device_get((metrics["loss"], program.to_canonical(state).params))
    expected = coupled_by_hand(loss, fields.get("microbatches", 1))
    assert models.max_rel_error(found, jax.device_get(expected)) < 1e-10


def test_microbatches_balance_their_own_load():
    whole, parts = (coupled_by_hand(balanced, count)[0] for count in (1, 2))
    assert abs(whole - parts) > 1e-4


def test_a_loss_that_balances_examples_unsaid_is_refused():
    def loss(params, batch, keys):
        return balanced(params, batch, keys, jnp.ones(len(batch["x"]), bool))

    task = px.Task(init=start, loss=loss)
    with pytest.raises(px.errors.TaskError, match="coupled=True"):
        px.compile(task, optax.sgd(RATE), px.Plan(), batch_of())
