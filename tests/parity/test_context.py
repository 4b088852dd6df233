"""Tokens over devices for many forms of attention, beside a step written by hand on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.tiers import in_turns
from tests.unit import test_stream as forms

import plurax as px
from plurax.errors import PlanError, ShardingWarning, StreamWarning
from plurax.partition.operators import RULES

B, TOKENS, BLOCK = 2, 24, 4
ROWS = ("of_queries", "of_keys", "keys")

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def tokens(monkeypatch):
    """Forms of attention over as many queries as keys, which several devices divide."""
    monkeypatch.setattr(forms, "T", TOKENS)
    monkeypatch.setattr(forms, "S", TOKENS)


def inputs():
    """Parameters, and a batch of what is projected to queries, keys and values."""
    p, *activations = forms.inputs()
    batch = {name: p.pop(name) for name in ROWS}
    batch["keys"] = jax.random.key_data(batch["keys"])
    batch |= dict(zip("qkv", activations, strict=True))
    draw = np.random.default_rng(1)
    width = (forms.H, forms.H)
    return p | {name: draw.standard_normal(width) * 0.5 for name in "QKV"}, batch


def loss_of(attention):
    def loss(params, batch, keys):
        rows = {name: batch[name] for name in ROWS[:2]}
        rows["keys"] = jax.random.wrap_key_data(batch["keys"])
        q, k, v = (jnp.einsum("btnh,hj->btnj", batch[n], params[n.upper()]) for n in "qkv")
        return jnp.sin(attention(params | rows, q, k, v)).reshape(len(q), -1).sum(1)

    return loss


@functools.cache
def step_by_hand(attention):
    params, batch = inputs()
    mean = lambda params: loss_of(attention)(params, batch, None).mean()  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return jax.device_get((value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)))


def step(attention, **fields):
    params, batch = inputs()
    task = px.Task(init=lambda key: params, loss=loss_of(attention))
    batch = jax.tree.map(np.asarray, batch)
    program = px.compile(task, optax.sgd(0.1), px.Plan(**{"stream": BLOCK} | fields), batch)
    state, metrics = program.step(program.init(seed=0), batch)
    return program, metrics["loss"], program.to_canonical(state).params


def assert_equal_to_one_device(attention, **fields):
    program, *found = step(attention, **fields)
    expected = step_by_hand(attention)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **forms.TOLERANCE), *map(
        jax.device_get, (tuple(found), expected)))  # fmt: skip
    return program


WITH_TOKENS = [forms.bias, forms.of_products_with_positions]
SENT = {"ring": "collective-permute", "gather": "all-gather", "heads": "all-to-all"}


@pytest.mark.parametrize("attention", forms.VARIANTS, ids=lambda f: f.__name__)
def test_a_ring_equals_one_device(attention):
    """Keys are sent, and no value is gathered that has them.

    But for gradients of parameters that have tokens, since parameters are whole.
    """
    program = assert_equal_to_one_device(attention, context=2, context_strategy="ring")
    keys = B * TOKENS * forms.H * 8
    sent = {one.kind for one in program.collectives() if one.bytes >= keys // 2}
    gathered = {"all-gather"} if attention in WITH_TOKENS else set()
    assert sent - {"all-reduce"} == {"collective-permute"} | gathered


@pytest.mark.slow
@pytest.mark.parametrize("attention", forms.VARIANTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", ["gather", "heads"])
def test_any_attention_equals_one_device(attention, strategy):
    assert_equal_to_one_device(attention, context=2, context_strategy=strategy)


@pytest.mark.ci
@pytest.mark.parametrize("attention", [forms.causal, forms.dropout], ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("count", [3, 4, 8])
def test_any_number_of_devices(attention, strategy, count):
    assert_equal_to_one_device(attention, context=count, context_strategy=strategy)


BETWEEN = {"heads": {"all-gather", "reduce-scatter"}, "heads+ring": {"collective-permute"}}


@pytest.mark.ci
@pytest.mark.parametrize(
    "attention",
    [forms.causal, forms.dropout, forms.groups_of_heads, forms.bias, forms.segments],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(("strategy", "count"), in_turns(BETWEEN, [6, 8]))
def test_heads_are_exchanged_within_groups_of_devices(attention, strategy, count):
    """Among 2 of 6 devices, 4 of 8, and 2 of either where there are two heads of keys."""
    program = assert_equal_to_one_device(attention, context=count, context_strategy=strategy)
    kinds = {one.kind for one in program.collectives()}
    assert kinds >= {"all-to-all"} | BETWEEN[strategy]


@pytest.mark.slow
@pytest.mark.parametrize("attention", forms.VARIANTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", BETWEEN)
def test_any_attention_within_groups_equals_one_device(attention, strategy):
    assert_equal_to_one_device(attention, context=8, context_strategy=strategy)


LOOPS = {forms.dropout, forms.dropout_before_the_quotient, forms.in_a_loop_over_layers}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("attention", "way"),
    in_turns(forms.VARIANTS, [("gather", 2), ("heads", 2), ("heads", 8), ("heads+ring", 2)]),
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value)),
)
def test_a_block_of_all_keys_is_attention_as_it_is_written(attention, way):
    """Of 8 devices 2 exchange heads, and keys are gathered over 4 groups of them."""
    strategy, count = way
    program = assert_equal_to_one_device(
        attention, context=count, context_strategy=strategy, stream=TOKENS
    )
    loops = [line for line in program.compiled_step.as_text().splitlines() if " while(" in line]
    assert attention in LOOPS or not loops


def of_fewer_heads(heads):
    """Return attention of all heads, and then of another number of them."""

    def attention(p, q, k, v):
        x = forms.causal(p, q, k, v)
        x = x.reshape(*x.shape[:2], -1)[..., : heads * forms.H].reshape(*x.shape[:2], heads, -1)
        more = forms.causal(p, x, k[:, :, :heads], v[:, :, :heads])
        return jnp.concatenate([x, more], axis=2)

    return attention


@pytest.mark.ci
@pytest.mark.parametrize("strategy", BETWEEN)
@pytest.mark.parametrize(("heads", "rows", "exchanged"), [(2, 3, 2), (3, 3, 4), (1, 2, 2)])
def test_all_attention_has_the_same_groups(heads, rows, exchanged, strategy, monkeypatch):
    """Of 4 and 2 heads those of 2; three heads of three rows are not exchanged, and keys are
    gathered; of one head rows are."""
    for name, size in {"B": rows, "T": 32, "S": 32}.items():  # four ranges on eight devices
        monkeypatch.setattr(forms, name, size)
    attention = of_fewer_heads(heads)
    program = assert_equal_to_one_device(attention, context=8, context_strategy=strategy)
    text = program.compiled_step.as_text()
    groups = re.findall(r"= .* all-to-all\(.*replica_groups=\{\{([\d,]*)\}", text)
    assert {len(group.split(",")) for group in groups} == {exchanged}


@pytest.mark.ci
def test_what_reads_other_tokens_finds_them_in_groups():
    """A shift, a convolution and a cumulative sum over tokens that groups of devices have."""
    assert_equal_to_one_device(over_tokens, context=8, context_strategy="heads+ring")


def test_blocks_of_which_one_needs_all_queries_do_not_go_around(monkeypatch):
    """In a turn devices have different blocks, so that none may wait for another's."""
    monkeypatch.delitem(RULES, "threefry2x32")
    with pytest.warns(ShardingWarning, match="threefry2x32"):
        program = assert_equal_to_one_device(forms.dropout, context=2, context_strategy="ring")
    assert "collective-permute" not in {one.kind for one in program.collectives()}


def over_tokens(p, q, k, v):
    """A cumulative sum, a shift, a sort and a convolution over tokens, before attention."""
    k = jnp.roll(k, 1, axis=1) + jnp.sort(k, axis=1)
    rows = v.reshape(len(v), TOKENS, -1)
    kernel = jnp.ones((3, rows.shape[2], rows.shape[2])) / 8
    numbers = ("NWC", "WIO", "NWC")
    v = jax.lax.conv_general_dilated(rows, kernel, (1,), "SAME", dimension_numbers=numbers)
    return forms.causal(p, jnp.cumsum(q, axis=1), k, v.reshape(q.shape))


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_what_reads_other_tokens_gathers_them(strategy):
    program = assert_equal_to_one_device(over_tokens, context=2, context_strategy=strategy)
    assert "all-gather" in {one.kind for one in program.collectives()}


def masked_and_not(p, q, k, v):
    """Causal attention, and then attention to all."""
    return forms.plain(p, forms.causal(p, q, k, v), k, v)


@pytest.mark.ci
def test_attention_without_a_mask_takes_the_order_of_that_with_one():
    """Or its queries would be gathered and brought back to the order of their places."""
    program = assert_equal_to_one_device(masked_and_not, context=2, context_strategy="ring")
    gathered = [one.bytes for one in program.collectives() if one.kind == "all-gather"]
    assert max(gathered, default=0) < B * TOKENS * forms.H * 8 // 2


def test_tokens_that_devices_do_not_divide_say_so():
    with pytest.raises(PlanError, match="no attention was found whose queries and keys 5 devices"):
        step(forms.plain, context=5)


def test_attention_that_cannot_be_computed_in_blocks_says_so():
    with (
        pytest.warns(StreamWarning, match="sort at"),
        pytest.raises(PlanError, match=r"Plan\(context=2\): no attention was found"),
    ):
        step(forms.sorted_keys, context=2)


def test_heads_that_devices_do_not_divide_stay_and_keys_are_gathered():
    program = assert_equal_to_one_device(forms.plain, context=3, context_strategy="heads")
    kinds = {one.kind for one in program.collectives()}
    assert "all-gather" in kinds
    assert "all-to-all" not in kinds


@pytest.mark.ci
@pytest.mark.parametrize("strategy", SENT)
def test_what_a_strategy_sends(strategy):
    program, *_ = step(forms.causal, context=2, context_strategy=strategy)
    assert SENT[strategy] in {one.kind for one in program.collectives()}
