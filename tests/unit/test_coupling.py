"""A loss that couples examples and does not say so is refused; one that does not never is."""

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from tests.zoo.test_zoo import MODELS
from tests.zoo.test_zoo import task as zoo_task

import plurax as px
from plurax.execute import coupling
from plurax.execute.initial_state import initial
from plurax.jaxpr.product_dims import product_operations
from plurax.jaxpr.row_dependence import row_dependence
from plurax.jaxpr.row_rules import DOES, MAY
from plurax.mesh import make_mesh
from plurax.state import TrainState

# The batch has as many rows as examples have features, and as many tokens.
SHAPES = {
    "x": ((6, 6), np.float32),
    "y": ((6,), np.float32),
    "tokens": ((6, 6), np.int32),
    "image": ((6, 8, 8, 3), np.float32),
}
BATCH = {name: jax.ShapeDtypeStruct(*shape) for name, shape in SHAPES.items()}


def init(key):
    """Return zeros, as linear models start; what they multiply must be noticed all the same."""
    shapes = {"w": (6,), "m": (6, 6), "table": (10, 6), "kernel": (3, 3, 3, 4)}
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def error(b, x, w):
    return (x @ w - b["y"]) ** 2


def centred(x):
    return x - x.mean(axis=0, keepdims=True)


with_rule = jax.custom_vjp(centred)
with_rule.defvjp(lambda x: (centred(x), None), lambda _, cotangent: (cotangent,))


def contrastive(p, b, keys):
    a = b["x"] @ p["m"]
    return optax.softmax_cross_entropy_with_integer_labels(a @ a.T, jnp.arange(len(a)))


def centred_in_a_scan(p, b, keys):
    def layer(x, w):
        return x - w * x.mean(axis=0, keepdims=True), None

    return lax.scan(layer, b["x"], p["w"])[0].sum(axis=1)


def centred_in_jit(p, b, keys):
    @jax.jit
    def network(x):
        return (x - x.mean(axis=0, keepdims=True)) @ p["w"]

    return (network(b["x"]) - b["y"]) ** 2


def until_all_are_small(p, b, keys):
    x = lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: 0.7 * x, b["x"])
    return error(b, x, p["w"])


def halves(p, b, keys):
    one, other = jnp.split(b["x"] @ p["m"], 2)
    return jnp.tile((one * other).sum(axis=1), 2)


def batch_norm(p, b, keys):
    norm = nn.BatchNorm(use_running_average=False, use_bias=False, use_scale=False)
    x, _ = norm.apply({"batch_stats": norm.init(keys[0], b["x"])["batch_stats"]}, b["x"],
                      mutable=["batch_stats"])  # fmt: skip
    return error(b, x, p["w"])


def of_tokens(p, b, keys):
    return (centred(p["table"][b["tokens"]]) ** 2).sum(axis=(1, 2))


def in_a_branch(p, b, keys):
    more = b["x"].sum() > 0
    return lax.cond(more, lambda x: x @ p["w"] + 1, lambda x: x @ p["w"], b["x"])


COUPLED = {
    "standardise": lambda p, b, k: error(b, centred(b["x"]) / b["x"].std(axis=0)[None], p["w"]),
    "centre": lambda p, b, k: error(b, centred(b["x"]), p["w"]),
    "no gradient": lambda p, b, k: error(b, lax.stop_gradient(centred(b["x"])), p["w"]),
    "log_softmax": lambda p, b, k: jax.nn.log_softmax(b["x"] @ p["w"]),
    "batch norm": batch_norm,
    "contrastive": contrastive,
    "roll": lambda p, b, k: error(b, jnp.roll(b["x"], 1, axis=0), p["w"]),
    "flip": lambda p, b, k: error(b, b["x"][::-1], p["w"]),
    "cumsum": lambda p, b, k: error(b, jnp.cumsum(b["x"], axis=0), p["w"]),
    "sort": lambda p, b, k: error(b, jnp.sort(b["x"], axis=0), p["w"]),
    "top_k": lambda p, b, k: (b["x"] @ p["w"] - lax.top_k(b["y"], 2)[0].sum()) ** 2,
    "median": lambda p, b, k: (b["x"] @ p["w"] - jnp.median(b["y"])) ** 2,
    "halves": halves,
    "pairs": lambda p, b, k: jnp.abs(b["y"][:, None] - b["y"][None, :]).sum(axis=1),
    "in a scan": centred_in_a_scan,
    "in a map": lambda p, b, k: lax.map(lambda x: (x - b["x"].mean(axis=0)) @ p["w"], b["x"]),
    "in custom_vjp": lambda p, b, k: error(b, with_rule(b["x"]), p["w"]),
    "in jit": centred_in_jit,
    "in remat": lambda p, b, k: error(b, jax.checkpoint(centred)(b["x"]), p["w"]),
    "in a branch": in_a_branch,
    "in a while": until_all_are_small,
    "of tokens": of_tokens,
    "of a metric": lambda p, b, k: (b["y"] * p["w"][0], {"rank": b["y"] - b["y"].max()}),
    "one for all": lambda p, b, k: jnp.broadcast_to(b["y"].mean(), b["y"].shape),
}


def logits(p, b):
    return p["table"][b["tokens"]] @ p["table"].T


def tokens_flat(p, b, keys):
    rows, length = b["tokens"].shape
    flat = logits(p, b).reshape(rows * length, -1)
    losses = optax.softmax_cross_entropy_with_integer_labels(flat, b["tokens"].reshape(-1))
    return losses.reshape(rows, length).mean(axis=1)


def time_first(p, b, keys):
    x = p["table"][b["tokens"]].swapaxes(0, 1)
    return jnp.tanh(x.reshape(-1, 6)).reshape(x.shape).sum(axis=(0, 2))


def recurrent(p, b, keys):
    def step(h, x):
        h = jnp.tanh(h @ p["m"] + x[:, None])
        return h, h

    h, outputs = lax.scan(step, jnp.zeros((len(b["y"]), 6)), b["x"].T, reverse=True)
    return outputs.sum(axis=(0, 2)) + h.sum(axis=1)


def no_layers(p, b, keys):
    return lax.scan(lambda x, w: (x * w, None), b["x"], p["w"][:0])[0].sum(axis=1)


def row_by_row(p, b, keys):
    def set_row(index, losses):
        return losses.at[index].set(b["x"][index] @ p["w"])

    return lax.fori_loop(0, len(b["y"]), set_row, jnp.zeros(len(b["y"])))


def attention(p, b, keys):
    x = p["table"][b["tokens"]]
    causal = jnp.tri(x.shape[1], dtype=bool)[None]
    scores = jnp.where(causal, jnp.einsum("btd,bsd->bts", x, x), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x).sum(axis=(1, 2))


def convolution(p, b, keys):
    x = nn.max_pool(
        lax.conv_general_dilated(
            b["image"], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (2, 2),
        (2, 2),
    )
    return jax.image.resize(x, (*x.shape[:1], 8, 8, 4), "bilinear").mean(axis=(1, 2, 3))


def own_kernels(p, b, keys):
    """`vmap` makes one convolution of them, rows in the groups of its features."""

    def example(image, scale):
        return lax.conv_general_dilated(
            image[None], scale * p["kernel"], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ).sum()  # fmt: skip

    return jax.vmap(example)(b["image"], b["y"])


def dropout(p, example, key):
    kept = jax.random.bernoulli(key, 0.5, example["x"].shape)
    return jnp.where(kept, example["x"], 0) @ p["w"]


def until_small(p, b, keys):
    def example(x):
        return lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: 0.7 * x, x).sum()

    return jax.vmap(example)(b["x"])


def matrices(p, b, keys):
    a = b["x"][:, :, None] * b["x"][:, None, :] + jnp.eye(6)[None]
    solved = jax.vmap(jnp.linalg.solve)(a, b["x"]).sum(axis=1)
    return solved + jnp.linalg.eigvalsh(a).sum(axis=1) + jnp.linalg.slogdet(a)[1]


def counts(p, b, keys):
    rows = jnp.arange(len(b["y"]))
    bags = jnp.zeros((len(rows), 10)).at[rows[:, None], b["tokens"]].add(1.0)
    return (bags @ p["table"]).sum(axis=1)


def diagonal(p, b, keys):
    products = b["x"] @ p["m"] @ b["x"].T
    own = jnp.eye(len(products), dtype=bool)
    return jnp.diagonal(products) + jnp.where(own, products, 0).sum(axis=1)


PER_EXAMPLE = {
    "labels": lambda p, b, k: logits(p, b)[jnp.arange(len(b["y"])), 0, b["tokens"][:, 0]],
    "labels along": lambda p, b, k: jnp.take_along_axis(b["x"], b["tokens"], axis=1).sum(axis=1),
    "one-hot": lambda p, b, k: (jax.nn.one_hot(b["tokens"], 10) @ p["table"]).sum(axis=(1, 2)),
    "sort of an example": lambda p, b, k: jnp.sort(b["x"], axis=1) @ p["w"],
    "order of an example": lambda p, b, k: b["x"][
        jnp.arange(len(b["y"]))[:, None], jnp.argsort(b["x"], axis=1)
    ].sum(axis=1),
    "vmap": lambda p, b, k: jax.vmap(lambda x, y: (x @ p["w"] - y) ** 2)(b["x"], b["y"]),
    "per_example": px.per_example(dropout),
    "mean of a vmap": lambda p, b, k: error(
        b, jax.vmap(jax.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i"))(b["x"]), p["w"]
    ),
    "permutation": lambda p, b, k: jax.vmap(jax.random.permutation)(k, b["x"]) @ p["w"],
    "gamma": lambda p, b, k: jax.vmap(jax.random.gamma)(k, 1 + b["y"] ** 2),
    "tokens flat": tokens_flat,
    "time first": time_first,
    "flipped twice": lambda p, b, k: (b["x"][::-1] @ p["w"])[::-1],
    "rolled twice": lambda p, b, k: jnp.roll(jnp.roll(b["x"], 1, axis=0) @ p["w"], -1),
    "recurrent": recurrent,
    "a map": lambda p, b, k: lax.map(lambda one: one[0] @ p["w"] - one[1], (b["x"], b["y"])),
    "row by row": row_by_row,
    "no layers": no_layers,
    "a list of rows": lambda p, b, k: jnp.stack([x @ p["w"] for x in b["x"]]),
    "attention": attention,
    "convolution": convolution,
    "own kernels": own_kernels,
    "until small": until_small,
    "matrices": matrices,
    "fourier": lambda p, b, k: jnp.abs(jnp.fft.fft(b["x"])).sum(axis=1),
    "counts": counts,
    "segments": lambda p, b, k: jax.vmap(lambda x, t: jax.ops.segment_sum(x, t, 10).max())(
        b["x"], b["tokens"]
    ),
    "diagonal": diagonal,
    "padding": lambda p, b, k: jnp.pad(b["x"], ((1, 2), (0, 1)))[1:-2, :-1] @ p["w"],
    "constants": lambda p, b, k: b["y"] * p["m"].mean() + jnp.arange(len(b["y"]), dtype="f4"),
    "a gradient": lambda p, b, k: jax.grad(lambda x: jnp.tanh(x).sum())(b["x"]).sum(axis=1),
    "interpolated": lambda p, b, k: jnp.interp(b["y"], jnp.arange(6.0), p["w"]),
}  # fmt: skip


def experts(p, b, keys):
    """Tokens of all examples, in the order of their experts and back."""
    x, expert = p["table"][b["tokens"]].reshape(-1, 6), b["tokens"].reshape(-1) % 3
    order = jnp.argsort(expert)
    kernels = jnp.ones((3, 6, 6), x.dtype)
    y = lax.ragged_dot(x[order], kernels, jnp.bincount(expert, length=3))
    return y[jnp.argsort(order)].reshape(len(b["y"]), -1).sum(axis=1)


def packed(p, b, keys):
    """Examples in one sequence; none reads another by its mask."""
    x, row = b["x"] @ p["m"], jnp.cumsum(jnp.ones_like(b["y"]))
    scores = jnp.where(row[:, None] == row[None, :], x @ x.T, -jnp.inf)
    return (jax.nn.softmax(scores) @ x).sum(axis=1)


def noticed(p, b, keys):
    """A check over all rows, that changes none."""
    fine = jnp.all(jnp.isfinite(b["x"]))
    return jnp.where(fine, b["x"] @ p["w"], jnp.nan)


TO_RUN = {"experts": experts, "packed": packed, "a check": noticed}
"""Per example, which no trace shows."""


def levels(loss, rows=coupling.ROWS):
    """Return the highest level of a row of the results in another row, by the trace alone."""
    batch = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in BATCH.items()}
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    closed = jax.make_jaxpr(loss)(jax.eval_shape(init, jax.random.key(0)), batch, keys)
    rest = len(jax.tree.leaves((batch, keys)))
    given = [index >= len(closed.jaxpr.invars) - rest for index in range(len(closed.jaxpr.invars))]
    return max(one.others().max() for one in row_dependence(closed, given, rows))


def check(loss, batch=BATCH, **more):
    task = px.Task(init=init, loss=loss, **more)
    params, model_state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    like = TrainState(None, params, None, model_state, None, None)
    coupling.check_loss(task, like, batch, make_mesh(px.Plan()))


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_loss_is_refused(name):
    with pytest.raises(px.errors.TaskError) as error:
        check(COUPLED[name])
    assert "depends on the rows of other examples, which meet at " in str(error.value)
    assert f"{__file__}:" in str(error.value)


@pytest.mark.parametrize("name", PER_EXAMPLE)
@pytest.mark.parametrize("rows", [coupling.ROWS, 6])
def test_a_loss_of_an_example_is_known_by_its_trace(name, rows):
    assert levels(PER_EXAMPLE[name], rows) == 0


@pytest.mark.parametrize("name", TO_RUN)
def test_what_no_trace_shows_is_run(name):
    assert levels(TO_RUN[name]) > 0
    check(TO_RUN[name])


@pytest.mark.parametrize("name", [n for n, model in MODELS.items() if not model.coupled])
def test_the_zoo_is_per_example_by_its_trace(x64, name, monkeypatch):
    traced = []
    monkeypatch.setattr(coupling, "_is_seen", lambda *args: pytest.fail("it is run"))
    monkeypatch.setattr(
        coupling, "row_dependence", lambda *args: traced.append(name) or row_dependence(*args)
    )
    task, model = zoo_task(MODELS[name]), MODELS[name]
    params, state = jax.eval_shape(lambda: initial(task, jax.random.key(0)))
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, model.batches([8])[0]))
    like = TrainState(None, params, None, state, None, None)
    coupling.check_loss(task, like, batch, make_mesh(px.Plan()))
    assert traced


def test_the_line_is_that_of_the_user():
    """`x.mean` was traced before, for other lines."""
    centred(jnp.ones((coupling.ROWS, 6)))

    def loss(p, b, keys):
        x = b["x"]
        mean = x.mean(axis=0)  # this line
        return (x - mean[None]) @ p["w"]

    with pytest.raises(
        px.errors.TaskError, match=r"test_coupling.py:\d+: mean = x.mean\(axis=0\)  # this"
    ):
        check(loss)


def data(rows=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1)}


@pytest.mark.parametrize("plan", [{}, {"data": 2}, {"microbatches": 4}, {"data": 2, "tensor": 2}])
def test_it_is_refused_before_compiling(plan):
    task = px.Task(init=init, loss=COUPLED["standardise"])
    with pytest.raises(px.errors.TaskError, match=r"say Task\(..., coupled=True\)"):
        px.compile(task, optax.sgd(0.1), px.Plan(**plan), data())


def test_members_are_refused_too():
    task = px.Task(init=init, loss=COUPLED["centre"])
    members = px.Members(seeds=range(2))
    with pytest.raises(px.errors.TaskError, match="depends on the rows of other examples"):
        px.compile(task, optax.sgd(0.1), px.Plan(), data(), members=members)


@pytest.mark.parametrize("name", ["evaluate", "predict", "metrics", "weight"])
def test_other_functions_keep_rows_apart(name):
    def mixed(params, batch):
        return error({"y": jnp.zeros(len(batch["x"]))}, centred(batch["x"]), params["w"])

    functions = {
        "evaluate": mixed,
        "predict": mixed,
        "metrics": lambda params, batch: {"m": px.metrics.mean(mixed(params, batch))},
        "weight": lambda batch: jax.nn.softmax(batch["y"]),
    }
    task = px.Task(
        init=init, loss=lambda p, b, k: error(b, b["x"], p["w"]), **{name: functions[name]}
    )

    def used():
        program = px.compile(task, optax.sgd(0.1), px.Plan(data=2), data())
        state = program.init()
        return (
            program.predict(state, data()) if name == "predict" else program.evaluate(state, data())
        )

    where = "Task.loss" if name == "metrics" else f"Task.{name}"
    with pytest.raises(
        px.errors.TaskError, match="row i of its result must depend on row i"
    ) as error_:
        used()
    assert where in str(error_.value)


def test_a_network_too_large_to_run_is_warned_of(monkeypatch):
    monkeypatch.setattr(coupling, "MOST_BYTES", 0)
    with pytest.warns(UserWarning, match="cannot run it here to be sure"):
        check(COUPLED["centre"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Only a decision depends on other rows.
        assert levels(noticed) == MAY < levels(COUPLED["centre"]) == DOES
        check(noticed)


def test_activations_too_large_to_compute_here_are_warned_of(monkeypatch):
    def wide(p, b, keys):
        return (centred(b["x"])[:, :, None] * jnp.ones((1, 1, 1000))).mean(-1) @ p["w"]

    with pytest.raises(px.errors.TaskError):
        check(wide)
    monkeypatch.setattr(coupling, "MOST_BYTES", 10_000)  # more than its parameters
    with pytest.warns(UserWarning, match="cannot run it here to be sure"):
        check(wide)


def test_products_that_would_take_long_are_not_run(monkeypatch):
    monkeypatch.setattr(coupling, "MOST_FLOPS", 0)
    with pytest.warns(UserWarning, match="cannot run it here to be sure"):
        check(COUPLED["centre"])


def test_what_cannot_be_run_is_told_what_to_write(monkeypatch):
    """Of a loss in two functions what is written for each example belongs in the second one."""
    monkeypatch.setattr(coupling, "MOST_FLOPS", 0)

    def outputs(p, b, keys):
        return centred(b["x"]) @ p["w"]

    loss = px.over_batch(outputs, lambda outputs, b, mask: jnp.where(mask, outputs**2, 0))
    task = px.Task(init=init, loss=loss, coupled=True)
    with pytest.warns(UserWarning, match="compute what reads all examples in the second function"):
        px.compile(task, optax.sgd(0.1), px.Plan(microbatches=2), BATCH)


def test_operations_of_products_are_counted():
    """(2, 5, 4) by (2, 4, 3), three times; (5, 4) by (8, 4, 3), each row by each group."""

    def products(x, w, groups, sizes):
        def layer(total, _):
            return total + jnp.einsum("bmk,bkn->bmn", x, w).sum(), None

        return lax.scan(layer, jax.lax.ragged_dot(x[0], groups, sizes).sum(), None, length=3)[0]

    shapes = ((2, 5, 4), "float32"), ((2, 4, 3), "float32"), ((8, 4, 3), "float32"), ((8,), "int32")
    closed = jax.make_jaxpr(products)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    expected = 3 * 2 * 2 * 5 * 4 * 3 + 2 * 5 * 4 * 3 * 8
    assert coupling._total(closed.jaxpr, product_operations) == expected


def test_a_loop_that_does_not_end_on_random_rows():
    def endless(p, b, keys):
        x = lax.while_loop(lambda x: jnp.isfinite(x).all(), lambda x: x * 1.0, centred(b["x"]))
        return x @ p["w"]

    with pytest.raises(px.errors.TaskError):
        check(endless)


def test_a_check_of_numbers_that_raises_is_not_heard_of(caplog, capfd):
    """Nor is what the loss prints: the rows are not the user's."""

    def increasing(x):
        raise ValueError("times must increase")

    def loss(p, b, keys):
        x = b["x"]
        order = jnp.argsort(b["tokens"][:, 0])
        found = jnp.any(x[:, 1] < x[:, 0])  # by `cond`, as `equinox.error_if` has it
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = lax.cond(found, lambda x: jax.pure_callback(increasing, like, x), lambda x: x, x)
        jax.debug.print("printed {}", x.sum())
        return error(b, x[order][jnp.argsort(order)], p["w"])

    with pytest.warns(UserWarning, match="plurax cannot run it here to be sure"):
        px.compile(px.Task(init=init, loss=loss), optax.sgd(0.1), px.Plan(), BATCH)
    assert not caplog.records
    assert "printed" not in "".join(capfd.readouterr())


def test_a_call_of_the_host_that_mixes_rows_is_seen():
    def loss(p, b, keys):
        like = jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype)
        x = jax.pure_callback(lambda x: np.roll(x, 1, axis=0), like, b["x"])
        return error(b, x, p["w"])

    with pytest.raises(px.errors.TaskError, match="depends on the rows of other examples"):
        px.compile(px.Task(init=init, loss=loss), optax.sgd(0.1), px.Plan(), BATCH)


def test_a_loss_for_a_batch_of_one_size():
    """What cannot be traced for a few rows is for as many as there are."""

    def of_six(p, b, keys):
        x = b["x"].reshape(3, 2, 6)
        return ((x - x.mean(axis=1, keepdims=True)).reshape(6, 6) + 0 * b["x"]) @ p["w"]

    with pytest.raises(px.errors.TaskError, match="depends on the rows of other"):
        check(of_six)


def test_declared_it_is_accepted():
    def loss(params, batch, keys, mask):
        return COUPLED["centre"](params, batch, keys)

    task = px.Task(init=init, loss=loss, coupled=True)
    program = px.compile(task, optax.sgd(0.1), px.Plan(data=2), data())
    program.step(program.init(), data())
    plain = dataclasses.replace(task, coupled=False, loss=COUPLED["centre"])
    with pytest.raises(px.errors.TaskError):
        px.compile(plain, optax.sgd(0.1), px.Plan(), data())


def test_a_search_refuses_what_compile_refuses():
    machine = px.Machine.preset("8xH100-80GB")
    batch = jax.eval_shape(lambda: data())
    with pytest.raises(
        px.errors.TaskError, match=r"(?s)test_coupling\.py:.*say Task\(..., coupled=True\)"
    ):
        px.search(px.Task(init=init, loss=COUPLED["centre"]), optax.sgd(0.1), batch, machine)


# --- Backward passes written by hand --------------------------------------------------------------


def with_backward(backward):
    """Return a product with this backward pass: `(x, w, cotangent) -> (of x, of w)`."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, c: backward(*kept, c))
    return lambda p, b, k: (product(jnp.tanh(b["x"] @ p["m"]), p["m"]).sum(1) - b["y"]) ** 2


BACKWARD_MIXES = {
    "for the input": lambda x, w, c: ((c - c.mean(0, keepdims=True)) @ w.T, x.T @ c),
    "for the parameter": lambda x, w, c: (c @ w.T, x.T @ (c - c.mean(0, keepdims=True))),
    "by a norm": lambda x, w, c: (c @ w.T, x.T @ c / jnp.linalg.norm(x.T @ c)),
}
BACKWARD_APART = {
    "as it is": lambda x, w, c: (c @ w.T, x.T @ c),
    "clipped by row": lambda x, w, c: (jnp.clip(c, -1, 1) @ w.T, x.T @ jnp.clip(c, -1, 1)),
    "wrong, but by row": lambda x, w, c: (jnp.sin(c) @ w.T, x.T @ (c * x)),
}


@pytest.mark.parametrize("name", BACKWARD_MIXES)
def test_a_backward_pass_that_mixes_examples_is_refused(name):
    loss = with_backward(BACKWARD_MIXES[name])
    assert levels(loss) == 0
    with pytest.raises(
        px.errors.TaskError, match=r"backward pass of a jax\.custom_vjp mixes"
    ) as error:
        check(loss)
    assert f"{__file__}:" in str(error.value)


@pytest.mark.parametrize("name", BACKWARD_APART)
def test_a_backward_pass_by_example_is_accepted(name):
    check(with_backward(BACKWARD_APART[name]))
