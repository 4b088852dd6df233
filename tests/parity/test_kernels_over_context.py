"""Attention by a library's kernel whose tokens are split over devices, against that of one device.

A CPU has no such kernel: where these tests run, what a kernel computes is computed by its
definition, with the log-sum-exp that it is given. What the compilers of TPUs and GPUs make of the
kernels themselves is asserted in `tests/absent`.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import mlir
from tests import models
from tests.parity import test_fused_attention as whole
from tests.parity import test_stream_plans as stream_plans
from tests.tiers import in_turns

import plurax as px
from plurax.errors import StreamWarning
from plurax.jaxpr.attention_kernels import (
    PallasFlash,
    Splash,
    attend_backward_p,
    attend_p,
    attention_dims,
    kernel_of,
)
from plurax.jaxpr.interpret import all_equations

cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
splash = importlib.import_module(Splash.LIBRARY)
masks = importlib.import_module(Splash.LIBRARY.replace("_kernel", "_mask"))

ROWS, HEADS, SIZE = 4, whole.HEADS, whole.SIZE
STRATEGIES = ("ring", "gather", "heads", "heads+ring")

pytestmark = pytest.mark.usefixtures("x64")


# --- By definition --------------------------------------------------------------------------------


def scores_of(q, k, kernel):
    """Return the scores `(..., N, T, S)`, -inf where a causal mask hides a key."""
    q, k = (x if kernel.heads_first else x.swapaxes(-2, -3) for x in (q, k))
    k = jnp.repeat(k, q.shape[-3] // k.shape[-3], -3)
    scores = jnp.einsum("...th,...sh->...ts", q, k) * kernel.scale
    if cap := dict(getattr(kernel, "params", ())).get("attn_logits_soft_cap"):
        scores = cap * jnp.tanh(scores / cap)
    if not kernel.causal:
        return scores
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)


def by_definition(q, k, v, *, kernel):
    scores = scores_of(q, k, kernel)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return [weighted(jnp.exp(scores - lse[..., None]), v, kernel), lse]


def weighted(weights, v, kernel):
    v = v if kernel.heads_first else v.swapaxes(-2, -3)
    out = jnp.einsum(
        "...ts,...sh->...th", weights, jnp.repeat(v, weights.shape[-3] // v.shape[-3], -3)
    )
    return out if kernel.heads_first else out.swapaxes(-2, -3)


def backward_by_definition(q, k, v, out, lse, gradient, *, kernel):
    """Dao 2023, section 3.1, with the whole row's `out` and `lse`: each once more, differentiated.

    d weights = gradient · v;  d scores = weights (d weights - sum(gradient out))
    """
    weights = jnp.exp(scores_of(q, k, kernel) - lse[..., None])
    of_weights, of_v = jax.vjp(lambda w, v: weighted(w, v, kernel), weights, v)[1](gradient)
    delta = jnp.sum(gradient * out, -1)
    delta = delta if kernel.heads_first else delta.swapaxes(-1, -2)
    of_scores = weights * (of_weights - delta[..., None])
    whole = kernel.whole()
    of_q, of_k = jax.vjp(lambda q, k: scores_of(q, k, whole), q, k)[1](of_scores)
    return [of_q, of_k, of_v]


@pytest.fixture(scope="module", autouse=True)
def lowered():
    pairs = [
        (attend_p, by_definition), (attend_backward_p, backward_by_definition),
        (whole.FORWARD, whole.by_definition), (whole.BACKWARD, whole.backward_by_definition),
    ]  # fmt: skip
    for primitive, fun in pairs:
        mlir.register_lowering(primitive, mlir.lower_fun(fun), platform="cpu")
    with contextlib.ExitStack() as patched:  # what cuDNN says of float64, and of this machine
        for check in ("is_flash_attention", "layout", "cudnn_version", "compute_capability"):
            patched.enter_context(mock.patch.object(cudnn, f"check_{check}", return_value=91000))
        yield


# --- Kernels, as users call them ------------------------------------------------------------------


def of_cudnn(q, k, v, *, causal, heads_first=False, window=None, scale=SIZE**-0.5):
    """What `jax.nn.dot_product_attention` calls on a machine that has cuDNN."""
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    layout = "BNTH" if heads_first else "BTNH"
    return cudnn.dot_product_attention(
        q, k, v, scale=scale, mask_type=mask, qkv_layout=layout, sliding_window_length=window
    )


def of_flash(q, k, v, *, scale=SIZE**-0.5):
    return flash.flash_attention(q, k, v, causal=True, sm_scale=scale)


def of_splash(q, k, v, *, scale=SIZE**-0.5, mask=masks.CausalMask, **more):
    """Splash attention as MaxText calls it: one example, whose queries are scaled before."""
    heads, tokens = q.shape[-3:-1]
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask((tokens, tokens))] * heads), head_shards=1, q_seq_shards=1, **more
    )
    return jax.vmap(kernel)(q * jnp.asarray(scale, q.dtype), k, v)


PALLAS = pytest.mark.parametrize("attention", [of_flash, of_splash])


def written_out(q, k, v, *, causal, heads_first=False):
    """Softmax attention as equations, of heads in groups."""
    q, k, v = (x.swapaxes(1, 2) if heads_first else x for x in (q, k, v))
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btmgh,bsmh->bmgts", grouped, k) * SIZE**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    out = jnp.einsum("bmgts,bsmh->btmgh", jax.nn.softmax(scores), v).reshape(q.shape)
    return out.swapaxes(1, 2) if heads_first else out


# --- A layer --------------------------------------------------------------------------------------


task_of = whole.task_of


def batch(tokens):
    numbers = np.random.default_rng(0).normal(size=(2, ROWS, tokens, whole.WIDTH))
    numbers = numbers.astype(jnp.zeros(()).dtype)
    return {"x": numbers[0], "y": numbers[1]}


def trained(task, plan, tokens=32):
    program = px.compile(task, optax.adam(1e-2), plan, batch(tokens))
    state = program.init()
    for _ in range(3):
        state, metrics = program.step(state, batch(tokens))
    return jax.device_get((state.params, metrics["loss"])), program


@functools.cache
def by_equations(key_heads, causal, heads_first):
    attention = functools.partial(written_out, causal=causal, heads_first=heads_first)
    return trained(task_of(attention, key_heads, heads_first), px.Plan())[0]


FORMS = [(4, True, False), (2, True, True), (1, True, False), (4, False, True), (2, False, False)]


@pytest.mark.parametrize(
    ("form", "strategy", "devices"),
    in_turns(FORMS, STRATEGIES, [2, 4, 8], odd=True, of=3),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_any_form_equals_attention_on_one_device(form, strategy, devices):
    key_heads, causal, heads_first = form
    attention = functools.partial(of_cudnn, causal=causal, heads_first=heads_first)
    plan = px.Plan(context=devices, stream=8, context_strategy=strategy)
    ours, _ = trained(task_of(attention, key_heads, heads_first), plan)
    expected = by_equations(key_heads, causal, heads_first)
    assert models.max_rel_error(ours, expected) < 1e-10


def sent(program):
    """Return the bytes that a step sends, by kind, but for the sum of the gradients."""
    counts = collections.Counter()
    for one in program.collectives():
        counts[one.kind] += one.bytes * one.trips
    return counts - collections.Counter({"all-reduce": counts["all-reduce"]})


@pytest.mark.parametrize(
    ("key_heads", "strategy", "devices"),
    [
        *itertools.product([4, 2], STRATEGIES[:3], [2]),
        # Of two heads of keys equations exchange the four rows in their place.
        *((4, strategy, 8) for strategy in ("heads", "heads+ring")),
    ],
)
def test_it_sends_what_equations_send(key_heads, strategy, devices):
    """Nothing of queries, and of keys and values as often as the formulas of the guide say."""
    plan = px.Plan(context=devices, stream=8, context_strategy=strategy)
    _, kernel = trained(task_of(functools.partial(of_cudnn, causal=True), key_heads), plan)
    _, equations = trained(task_of(functools.partial(written_out, causal=True), key_heads), plan)
    assert sent(kernel) == sent(equations)
    assert sent(kernel)


@pytest.mark.parametrize("attention", [of_cudnn, written_out], ids=["kernel", "equations"])
def test_heads_split_over_tensor_are_exchanged_too(attention):
    """Of four heads on two devices of `tensor` two, among two of four devices of `context`."""
    heads = dict.fromkeys("qkv", (None, "tensor", None)) | {"o": ("tensor", None, None)}
    plan = px.Plan(context=4, tensor=2, stream=8, context_strategy="heads+ring", shardings=heads)
    ours, program = trained(task_of(functools.partial(attention, causal=True)), plan)
    assert models.max_rel_error(ours, by_equations(4, True, False)) < 1e-10
    assert sent(program).keys() == {"all-to-all", "collective-permute"}


@pytest.mark.ci
@PALLAS
def test_a_kernel_in_pallas_is_split_too(attention):
    """1,024 tokens in shares of 128, which are the fewest that its blocks have."""
    with jax.enable_x64(False):
        plan = px.Plan(context=2, stream=8, context_strategy="ring")
        ours, program = trained(task_of(attention, heads_first=True), plan, 1024)
        equations = functools.partial(written_out, causal=True, heads_first=True)
        expected, _ = trained(task_of(equations, heads_first=True), px.Plan(), 1024)
    assert models.max_rel_error(ours, expected) < 1e-5
    assert {one.kind for one in program.collectives()} == {"collective-permute", "all-reduce"}


@PALLAS
def test_heads_of_a_kernel_in_pallas_are_split(attention):
    """Under `tensor`: nothing is gathered, and heads that are summed are added up."""
    heads = dict.fromkeys("qkv", (None, "tensor", None)) | {"o": ("tensor", None, None)}
    with jax.enable_x64(False):
        plan = px.Plan(data=2, tensor=2, zero=1, shardings=heads)
        ours, program = trained(task_of(attention, heads_first=True), plan, 128)
        equations = functools.partial(written_out, causal=True, heads_first=True)
        expected, _ = trained(task_of(equations, heads_first=True), px.Plan(), 128)
    assert models.max_rel_error(ours, expected) < 1e-5
    kinds = {one.kind for one in program.collectives() if "tensor" in one.axes}
    assert kinds == {"all-reduce"}


FUSED = splash.BlockSizes(
    block_q=256, block_kv=256, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=256,
    block_kv_dkv_compute=128, use_fused_bwd_kernel=True,
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("attention", "key_heads"),
    [
        (of_flash, HEADS),
        (of_splash, 2),
        (functools.partial(of_splash, attn_logits_soft_cap=2.0, block_sizes=FUSED), HEADS),
    ],
    ids=["flash", "splash", "splash, capped and fused"],
)
def test_a_kernel_in_pallas_is_what_its_definition_says(attention, key_heads):
    """In Pallas' interpreter: forward, and backward on each half of the keys with the log-sum-exp
    of all; of 1e30 each gradient is zero."""
    from jax.experimental.pallas import tpu as pltpu  # a second to import

    numbers = np.random.default_rng(0).normal(size=(4, 1, HEADS, 256, 128)).astype(np.float32)
    with jax.enable_x64(False), pltpu.force_tpu_interpret_mode():
        q, k, v, gradient = map(jnp.asarray, numbers)
        q, k, v = 0.1 * q, k[:, :key_heads], v[:, :key_heads]
        causal = the_kernel(attention, q, k, v)
        for kernel in (causal, causal.whole()):
            for one, other in zip(
                kernel.forward(q, k, v), by_definition(q, k, v, kernel=kernel), strict=True
            ):
                np.testing.assert_allclose(one, other, atol=3e-5)
        out, lse = by_definition(q, k, v, kernel=kernel)
        halves = [
            kernel.backward(q, k[:, :, half], v[:, :, half], out, lse, gradient)
            for half in (slice(128), slice(128, 256))
        ]
        expected = backward_by_definition(q, k, v, out, lse, gradient, kernel=kernel)
        (of_q, *first), (more, *second) = halves
        for one, other, whole in zip(first, second, expected[1:], strict=True):
            np.testing.assert_allclose(jnp.concatenate([one, other], 2), whole, atol=3e-5)
        np.testing.assert_allclose(of_q + more, expected[0], atol=3e-5)
        nothing = kernel.backward(q, k, v, out, jnp.full_like(lse, 1e30), gradient)
        assert not any(np.any(np.asarray(one)) for one in nothing)


def kernels_in(attention, *arrays):
    kernels = map(kernel_of, all_equations(jax.make_jaxpr(attention)(*arrays).jaxpr))
    return [one for one in kernels if one is not None]


def the_kernel(attention, *arrays):
    (kernel,) = kernels_in(functools.partial(attention, scale=1.0), *arrays)
    return kernel


@pytest.mark.parametrize(
    ("queries", "keys", "sizes"),
    [(2048, 2048, (512, 1024, 512)), (768, 384, (384, 384, 384)), (128, 640, (128, 640, 128))],
)
def test_blocks_of_a_part_divide_it(queries, keys, sizes):
    blocks = flash.BlockSizes(
        block_q=512, block_k_major=1024, block_k=512, block_b=2, block_q_major_dkv=512,
        block_k_major_dkv=1024, block_k_dkv=512, block_q_dkv=256, block_k_major_dq=1024,
        block_k_dq=512, block_q_dq=512,
    )  # fmt: skip
    fitted = PallasFlash(True, 1.0, True, blocks)._sizes(queries, keys)
    assert (fitted.block_q, fitted.block_k_major, fitted.block_k) == sizes
    for name, size in vars(fitted).items():
        tokens = queries if "_q" in name else keys
        assert tokens % size == 0


def test_blocks_of_a_part_divide_it_in_splash_attention():
    blocks = splash.BlockSizes(
        block_q=512, block_kv=1024, block_kv_compute=512, block_q_dkv=256, block_kv_dkv=512,
        block_kv_dkv_compute=512, use_fused_bwd_kernel=True,
    )  # fmt: skip
    params = {"mask_value": -1e30, "attn_logits_soft_cap": None, "interpret": False}
    kernel = Splash(True, 1.0, True, blocks, tuple(params.items()))._kernel(2, 384, 640)
    fitted = kernel.kwargs["block_sizes"]
    assert (fitted.block_q, fitted.block_kv, fitted.block_kv_compute) == (384, 640, 128)
    assert (fitted.block_q_dkv, fitted.block_kv_dkv, fitted.block_kv_dkv_compute) == (128, 128, 128)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_examples_one_by_one(strategy):
    """Under `jax.vmap`, with rows in two dims; cuDNN's reshapes them to one."""

    def attention(q, k, v):
        return jax.vmap(lambda q, k, v: of_cudnn(*(x[None] for x in (q, k, v)), causal=True)[0])(
            q, k, v
        )

    plan = px.Plan(data=2, context=2, stream=8, context_strategy=strategy)
    ours, program = trained(task_of(attention, key_heads=2), plan)
    assert models.max_rel_error(ours, by_equations(2, True, False)) < 1e-10
    assert sent(program)


@pytest.mark.parametrize(
    ("axes", "found"), [((0, 0, 0, 0), True), ((1, 1, 1, 1), False), ((1, 1, 1, 0), False),
                        ((0, None, None, 0), False), ((2, 2, 2, 2), False)]
)  # fmt: skip
@PALLAS
def test_rows_of_a_kernel_in_pallas_stand_in_front(attention, axes, found):
    """Else it is left whole: Pallas puts the rows of results first."""
    *inside, out = axes
    arrays = [
        jnp.zeros((1, 2, 128, 128) if dim is None else shape_with(3, dim), jnp.float32)
        for dim in inside
    ]
    batched = jax.vmap(attention, tuple(inside), out)
    with jax.enable_x64(False):
        assert bool(kernels_in(batched, *arrays)) == found


def shape_with(size, dim):
    shape = [1, 2, 128, 128]
    shape.insert(dim, size)
    return shape


def local(shape):
    return masks.LocalMask(shape, (64, 0), 0)


def later(shape):
    return masks.CausalMask(shape, offset=1)


def by_numbers(shape):
    return masks.NumpyMask(np.tril(np.ones(shape, bool)))


@pytest.mark.parametrize(
    ("mask", "known"),
    [(masks.CausalMask, True), (masks.FullMask, False), (local, False), (later, False),
     (by_numbers, False)],
)  # fmt: skip
def test_splash_attention_is_known_by_its_mask(mask, known):
    """Of others only arrays say what they hide."""
    with jax.enable_x64(False):
        q = jnp.zeros((1, 2, 256, 128), jnp.float32)
        kernels = kernels_in(functools.partial(of_splash, mask=mask), q, q, q)
    assert [kernel.causal for kernel in kernels] == [True] * known


def test_splash_attention_with_a_mask_in_another_order_is_left():
    """As the balanced order of tokens is written by hand."""

    def reversed_rows(shape):
        mask = masks.CausalMask(shape)
        mask.q_sequence = mask.q_sequence[::-1]
        return mask

    with jax.enable_x64(False):
        q = jnp.zeros((1, 2, 256, 128), jnp.float32)
        assert not kernels_in(functools.partial(of_splash, mask=reversed_rows), q, q, q)


def test_kernels_of_other_sizes_are_left_as_they_are():
    """Blocks of a part are multiples of 128, and so are its tokens."""
    small = flash.BlockSizes.get_default(1, 1, 1, 1, 1)
    kernel = PallasFlash(True, 1.0, True, small)
    assert kernel.reason_against(256, 384) is None
    assert "a part would have 64" in kernel.reason_against(64, 256)
    halves = dataclasses.replace(small, block_q=64)
    assert "no multiples of 128" in dataclasses.replace(kernel, block_sizes=halves).reason_against(
        256, 256
    )


def test_queries_under_a_mask_are_whole():
    """It is one of places from the first query on."""
    q = jnp.zeros((1, 256, HEADS, 128), jnp.float32)
    for causal in (True, False):
        kernel = PallasFlash(causal, 1.0, False, None)
        eqn = jax.make_jaxpr(lambda q, k=kernel: attend_p.bind(q, q, q, kernel=k))(q).eqns[0]
        operands, results = attention_dims(eqn)
        token = None if causal else "T"
        assert operands[0] == results[0] == ("B0", token, "N", None)
        assert results[1] == ("B0", "N", token)


# --- A transformer --------------------------------------------------------------------------------

RING = {"context_strategy": "ring"}
TENSOR = {"tensor": 2, "shardings": stream_plans.megatron()}
PLANS = {
    "ring": {"context": 2, **RING},
    "ring of three": {"context": 3, **RING},
    "gathered": {"context": 3},
    "heads": {"context": 2, "context_strategy": "heads"},
    "uneven": {"data": 4, "context": 2, "microbatches": (1, 2, 1, 1)},
    "zero 1": {"data": 2, "context": 3, "zero": 1, **RING},
    "zero 3": {"data": 2, "context": 3, "zero": 3, "remat": "full", **RING},
    "dots, microbatches": {"context": 3, "remat": "dots", "microbatches": 2, **RING},
    "tensor": {"context": 2, **RING, **TENSOR},
    "sequence": {"context": 2, "tensor": 2, "shardings": stream_plans.megatron(True), **RING},
    "pipeline": {"pipeline": 2, "context": 2, "microbatches": 2},
    "heads in groups": {"context": 4, "context_strategy": "heads", "zero": 1},
    "heads and ring": {"context": 4, "data": 2, "zero": 3, "context_strategy": "heads+ring"},
    "heads and ring, tensor": {"context": 4, "context_strategy": "heads+ring", **TENSOR},
    "pipeline, heads": {"pipeline": 2, "context": 2, "context_strategy": "heads"},
}  # fmt: skip


def outputs_of(plan, attention=None, members=None):
    """Dropout, two sizes of batches, predict and evaluate."""
    task = models.transformer_stack(np.float64, depth=3, attention=attention)
    words = models.text(8, tokens=24)
    program = px.compile(task, optax.adam(1e-2), plan, words, members=members)
    state = program.init() if members else program.init(seed=3)
    for size in (8, 5):
        state, metrics = program.step(state, models.cut(words, size))
    outputs, evaluated = program.predict(state, words), program.evaluate(state, words)
    state = program.to_canonical(state)
    return jax.device_get((state.params, state.opt_state, metrics, evaluated, outputs))


def kernel(q, k, v):
    return of_cudnn(q, k, v, causal=True, scale=1.0)


@pytest.fixture(scope="module")
def as_equations():
    with jax.enable_x64(True):
        return outputs_of(px.Plan())


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_equals_one_device(as_equations, name):
    ours = outputs_of(px.Plan(stream=8, **PLANS[name]), kernel)
    assert models.max_rel_error(ours, as_equations) < 1e-10


@pytest.mark.ci
def test_members_equal_those_by_equations():
    three = px.Members(3)
    plan = px.Plan(member=3, context=2, stream=8, **RING)
    expected = outputs_of(px.Plan(chunk=1), members=three)
    assert models.max_rel_error(outputs_of(plan, kernel, three), expected) < 1e-10


# --- What cannot be split -------------------------------------------------------------------------

WHOLE = "is computed with all tokens on each device, because"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("attention", "devices", "reason"),
    [
        (lambda q, k, v: of_cudnn(q, k, v, causal=True, window=8), 2,
         "it has a bias, segments, lengths of rows, dropout, a window or another mask"),
        (lambda q, k, v: of_cudnn(q, k[:, :30], v[:, :30], causal=True), 2,
         "its causal mask is one of 32 queries and 30 keys"),
        (lambda q, k, v: of_cudnn(q, k[:, :30], v[:, :30], causal=False), 4,
         "4 devices do not divide 32 queries and 30 keys"),
    ],
)  # fmt: skip
def test_a_kernel_that_needs_all_tokens_says_so(attention, devices, reason):
    """Beside attention by equations, whose tokens are split."""

    def both(q, k, v):
        return attention(q, k, v) + written_out(q, k, v, causal=True)

    plan = px.Plan(context=devices, stream=8, **RING)
    with pytest.warns(StreamWarning, match=f"{WHOLE} {reason}") as raised:
        ours, _ = trained(task_of(both), plan)
    (said,) = {str(one.message) for one in raised if one.category is StreamWarning}
    assert "test_kernels_over_context.py" in said
    assert models.max_rel_error(ours, trained(task_of(both), px.Plan())[0]) < 1e-10


def test_a_kernel_that_needs_all_tokens_is_refused_where_nothing_else_is_split():
    plan = px.Plan(context=2, stream=8)
    with (
        pytest.warns(StreamWarning, match=WHOLE),
        pytest.raises(px.errors.PlanError, match="or a call of cuDNN's"),
    ):
        trained(task_of(lambda q, k, v: of_cudnn(q, k, v, causal=True, window=8)), plan)
