"""cuDNN's attention under every plan, against attention written out on one device.

A CPU has no cuDNN: where these tests run, its two operations are computed by their definition.
What a GPU's compiler makes of them is asserted in `tests/absent`.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import mlir
from tests.tiers import in_turns

import plurax as px
from plurax.errors import ShardingWarning
from plurax.jaxpr.interpret import all_equations
from plurax.jaxpr.remat import rematerialized

cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
FORWARD = cudnn._dot_product_attention_fwd_p_wrapper
BACKWARD = cudnn._dot_product_attention_bwd_p_wrapper

ROWS, TOKENS, WIDTH, HEADS, SIZE = 8, 6, 16, 4, 8
BTNH, BNTH = 0, 1
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}

pytestmark = pytest.mark.usefixtures("x64")


# --- By definition --------------------------------------------------------------------------------


def forward(q, k, v, bias=None, *, scale, causal, heads_first=False):
    """Return the result and the log-sum-exp of each row, of heads in groups too."""
    if heads_first:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = scores if bias is None else scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return out.swapaxes(1, 2) if heads_first else out, jax.nn.logsumexp(scores, axis=-1)


def by_definition(*operands, layout, mask_type, scale, variadic_args, **params):
    bias = operands[3] if variadic_args[0] else None
    out, sums = forward(
        *operands[:3], bias, scale=scale, causal=mask_type.name == "CAUSAL",
        heads_first=layout == BNTH,
    )  # fmt: skip
    return [out, sums.astype(jnp.float32)]


def backward_by_definition(*operands, **params):
    *inputs, _, _, gradient = operands

    def out(q, k, v):
        return by_definition(q, k, v, *inputs[3:], **params)[0]

    return jax.vjp(out, *inputs[:3])[1](gradient)


@pytest.fixture(scope="module", autouse=True)
def lowered():
    for primitive, fun in ((FORWARD, by_definition), (BACKWARD, backward_by_definition)):
        mlir.register_lowering(primitive, mlir.lower_fun(fun), platform="cpu")


def fused(layout, causal, bias=None, dropout=0.0):
    """Return a function of q, k and v whose operations are cuDNN's, as JAX makes them."""
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    params = {
        "scale": SIZE**-0.5, "seed": 1, "dropout_rate": dropout, "mask_type": mask,
        "layout": layout, "sliding_window_length": None,
        "variadic_args": (bias is not None, False),
    }  # fmt: skip
    none = jnp.zeros((0,))

    def rest(q):
        return [none if bias is None else bias.astype(q.dtype), *[none] * 6]

    @jax.custom_vjp
    def attention(q, k, v):
        return run(q, k, v)[0]

    def run(q, k, v):
        out, sums = FORWARD.bind(q, k, v, *rest(q), is_training=True, **params)
        return out, (q, k, v, sums, out)

    def back(kept, gradient):
        q, k, v, sums, out = kept
        return tuple(BACKWARD.bind(q, k, v, *rest(q), sums, out, gradient, **params))

    attention.defvjp(run, back)
    return attention


# --- A model --------------------------------------------------------------------------------------


def task_of(attention, key_heads=HEADS, heads_first=False):
    """A residual layer of attention, and what it is of the same numbers by definition."""
    shapes = {
        "q": (WIDTH, HEADS, SIZE), "k": (WIDTH, key_heads, SIZE), "v": (WIDTH, key_heads, SIZE),
        "o": (HEADS, SIZE, WIDTH),
    }  # fmt: skip

    def init(key):
        keys = jax.random.split(key, len(shapes))
        return {
            name: 0.3 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(params, batch, keys):
        order = "bnth" if heads_first else "btnh"
        q, k, v = (jnp.einsum(f"btd,dnh->{order}", batch["x"], params[name]) for name in "qkv")
        out = jnp.einsum(f"{order},nhd->btd", attention(q, k, v), params["o"])
        return jnp.mean((batch["x"] + jnp.tanh(out) - batch["y"]) ** 2, (1, 2))

    return px.Task(init=init, loss=loss)


def batch():
    numbers = np.random.default_rng(0).normal(size=(2, ROWS, TOKENS, WIDTH))
    return {"x": numbers[0], "y": numbers[1]}


def trained(task, plan):
    program = px.compile(task, optax.adam(1e-2), plan, batch())
    state = program.init()
    for _ in range(3):
        state, metrics = program.step(state, batch())
    return jax.device_get(state.params), float(metrics["loss"]), program


HEADS_SPLIT = {"q": (None, "tensor", None), "o": ("tensor", None, None)}
KEYS_SPLIT = HEADS_SPLIT | {"k": HEADS_SPLIT["q"], "v": HEADS_SPLIT["q"]}
PLANS = {
    "one": {},
    "data": {"data": 4},
    "zero 3": {"data": 4, "zero": 3},
    "microbatches, dots": {"data": 2, "microbatches": 2, "remat": "dots"},
    "full": {"data": 2, "zero": 1, "remat": "full"},
    "tensor": {"tensor": 2, "shardings": KEYS_SPLIT},
    "tensor of 4": {"tensor": 4, "shardings": KEYS_SPLIT},
    "data, tensor, zero 3": {"data": 2, "tensor": 2, "zero": 3, "shardings": KEYS_SPLIT},
    "queries alone": {"data": 2, "tensor": 2, "shardings": HEADS_SPLIT},
}


@functools.cache
def reference(key_heads, causal, heads_first):
    def attention(q, k, v):
        return forward(q, k, v, scale=SIZE**-0.5, causal=causal, heads_first=heads_first)[0]

    return trained(task_of(attention, key_heads, heads_first), px.Plan())[:2]


@pytest.mark.parametrize(
    ("layout", "key_heads", "plan"), in_turns([BTNH, BNTH], [4, 2, 1], PLANS, odd=True)
)
def test_any_plan_equals_one_device(layout, key_heads, plan):
    causal, heads_first, sizes = layout == BTNH, layout == BNTH, dict(PLANS[plan])
    if key_heads == 1 and "shardings" in sizes:
        sizes["shardings"] = HEADS_SPLIT  # one head of keys has no parts
    params, loss = reference(key_heads, causal, heads_first)
    task = task_of(fused(layout, causal), key_heads, heads_first)
    with warnings.catch_warnings():
        if (plan, key_heads) == ("tensor of 4", 2):
            warnings.simplefilter("ignore", ShardingWarning)  # 4 parts of 2 heads are none
        ours, our_loss, _ = trained(task, px.Plan(**sizes))
    np.testing.assert_allclose(our_loss, loss, **TOLERANCE)
    for name, leaf in params.items():
        np.testing.assert_allclose(ours[name], leaf, **TOLERANCE, err_msg=name)


@pytest.mark.ci
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_split_heads_send_what_megatron_sends(key_heads):
    """The sum over heads forward and none of q, k and v; of a single key its gradients' parts."""
    split = KEYS_SPLIT if key_heads > 1 else HEADS_SPLIT
    plan = px.Plan(tensor=2, shardings=split)
    _, _, program = trained(task_of(fused(BTNH, True), key_heads), plan)
    kinds = {one.kind for one in program.collectives()}
    assert kinds == {"all-reduce"}
    task = task_of(lambda q, k, v: forward(q, k, v, scale=1.0, causal=True)[0], key_heads)
    written_out = trained(task, plan)[2]

    def bytes_of(program):
        return sum(one.bytes for one in program.collectives() if one.bytes > 64)

    assert bytes_of(program) <= bytes_of(written_out)


@pytest.mark.parametrize("shape", [(1, HEADS), (ROWS, HEADS), (ROWS, 1), (1, 1)])
def test_a_bias_is_split_where_it_is_whole(shape):
    bias = np.random.default_rng(1).normal(size=(*shape, TOKENS, TOKENS))

    def attention(q, k, v):
        return forward(q, k, v, bias, scale=SIZE**-0.5, causal=False)[0]

    expected = trained(task_of(attention, 2), px.Plan())
    plan = px.Plan(tensor=2, shardings=KEYS_SPLIT)
    ours = trained(task_of(fused(BTNH, False, jnp.asarray(bias)), 2), plan)
    for name, leaf in expected[0].items():
        np.testing.assert_allclose(ours[0][name], leaf, **TOLERANCE, err_msg=name)


def test_what_cannot_be_split_is_gathered_and_said():
    """Dropout draws by the place of a score in the whole."""
    task = task_of(fused(BTNH, True, dropout=0.1), 4)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ShardingWarning)
        trained(task, px.Plan(tensor=2, shardings=KEYS_SPLIT))
    said = [str(one.message) for one in raised if one.category is ShardingWarning]
    assert [one.split("`")[1] for one in said] == [FORWARD.name, BACKWARD.name]
    assert all("has no sharding rule" in one for one in said)


@pytest.mark.parametrize("causal", [True, False])
def test_its_products_are_counted(causal):
    """Forward two, backward five, of which a causal mask leaves half: written out they are six."""
    machine = px.Machine.preset("8xH100-80GB")

    def flops(attention, plan):
        task = task_of(attention, HEADS)
        return px.estimate(task, optax.adam(1e-2), plan, batch(), machine).product_flops

    def written_out(q, k, v):
        return forward(q, k, v, scale=1.0, causal=causal)[0]

    for plan in (px.Plan(), px.Plan(data=2, tensor=2, shardings=KEYS_SPLIT)):
        one = 2 * TOKENS**2 * SIZE * HEADS * ROWS / plan.devices
        counted = 7 * one / 2 if causal else 7 * one
        assert flops(fused(BTNH, causal), plan) == flops(written_out, plan) - 6 * one + counted


@pytest.mark.parametrize(
    ("remat", "again"), [("none", 0), ("dots", 0), (0.01, 0), (0.5, 0), ("full", 1)]
)
def test_who_keeps_products_keeps_what_attention_returned(remat, again):
    """No share counts it: its derivative needs more than its result, which a name would keep."""

    def loss(x, attention):
        h = jnp.tanh(x @ jnp.eye(WIDTH, HEADS * SIZE)).reshape(ROWS, TOKENS, HEADS, SIZE)
        return jnp.sum(jnp.sin(attention(h, h, h)))

    fun = functools.partial(loss, attention=fused(BTNH, causal=True))
    again_by = jax.grad(rematerialized(fun, remat, at_once=False))
    jaxpr = jax.make_jaxpr(again_by)(jnp.ones((ROWS, TOKENS, WIDTH))).jaxpr
    calls = [eqn for eqn in all_equations(jaxpr) if eqn.primitive is FORWARD]
    assert len(calls) == 1 + again
