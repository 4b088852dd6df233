"""What the compilers of GPUs and TPUs make of a kernel whose tokens are split over devices."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    CausalMask,
    MultiHeadMask,
    make_splash_mha,
)

import plurax as px

pytestmark = pytest.mark.ci

ROWS, TOKENS, WIDTH, HEADS, SIZE = 2, 2048, 64, 8, 128
RANGES = 4


def of_cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def of_pallas(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash_attention(q, k, v, causal=True, sm_scale=SIZE**-0.5).swapaxes(1, 2)


def of_splash(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q * SIZE**-0.5, k, v))
    mask = MultiHeadMask([CausalMask((q.shape[2],) * 2)] * q.shape[1])
    kernel = make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


KERNELS = {
    "cudnn": ("8xH100", of_cudnn, "__cudnn$fmhaSoftmax"),
    "flash": ("v5p:2x2x1", of_pallas, "tpu_custom_call"),
    "splash": ("v5p:2x2x1", of_splash, "tpu_custom_call"),
}
"""Target, call, and what the compiled kernel is called."""


def compiled(name, plan, monkeypatch, tokens=TOKENS, members=None):
    # This machine has no cuDNN to ask for its version.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda *_: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: None)
    target, attention, _ = KERNELS[name]

    def init(key):
        shape = WIDTH, HEADS, SIZE
        return {name: jax.random.normal(key, shape, jnp.bfloat16) for name in "qkvo"}

    def loss(params, batch, keys):
        x = batch["x"]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        x = x + jnp.einsum("btnh,dnh->btd", attention(q, k, v), params["o"])
        return jnp.mean(x.astype(jnp.float32) ** 2, (1, 2))

    batch = {"x": jax.ShapeDtypeStruct((2 * ROWS, tokens, WIDTH), jnp.bfloat16)}
    devices = px.topology(target)[:4]
    return px.compile(
        px.Task(init=init, loss=loss), optax.sgd(0.1), plan, batch, devices=devices, members=members
    )


def sent(collectives):
    """Bytes by kind, but for the sums of gradients."""
    counts = collections.Counter()
    for one in collectives:
        counts[one.kind] += one.bytes * one.trips
    return counts - collections.Counter({"all-reduce": counts["all-reduce"]})


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "fields",
    [{"data": 4}, {"data": 2, "member": 2, "chunk": 1}, {"data": 2, "tensor": 2}],
    ids=["data", "members", "tensor"],
)
def test_kernels_compile_where_tokens_are_whole(name, fields, monkeypatch):
    """Mosaic refuses a mesh that is not manual over all axes; heads are split, not gathered."""
    members = px.Members(2) if "member" in fields else None
    shardings = dict.fromkeys("qkvo", (None, "tensor", None)) if "tensor" in fields else {}
    program = compiled(name, px.Plan(**fields, shardings=shardings), monkeypatch, 512, members)
    assert KERNELS[name][2] in program.compiled_step.as_text()
    assert not sent(program.planned_collectives())


@pytest.mark.parametrize("strategy", ["ring", "gather", "heads"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compute_on_what_a_device_has(name, strategy, monkeypatch):
    """Its own keys under a causal mask, and the keys of each range without one: in a ring before
    its loop, in it and behind it."""
    plan = px.Plan(context=4, stream=512, context_strategy=strategy)
    program = compiled(name, plan, monkeypatch)
    _, _, call = KERNELS[name]
    text = program.compiled_step.as_text()
    planned = sent(program.planned_collectives())
    if name != "cudnn":
        planned.pop("reduce-scatter", None)  # on TPUs an all-reduce and a slice
    assert planned == sent(program.collectives())
    forward = {"ring": 1 + 3 * RANGES, "gather": 1 + RANGES, "heads": 1}[strategy]
    if name == "cudnn":
        calls = text.count(f'"{call}"'), text.count(f'"{call}Backward"')
        assert calls == (forward, forward)
    else:  # two kernels of the backward pass
        assert text.count(f'custom_call_target="{call}"') == 3 * forward
    keys = 2 * ROWS * TOKENS * HEADS * SIZE * 2
    formula = {
        "ring": {"collective-permute": (4 * 3 + 2 * 4) * keys // 4},
        "gather": {"all-gather": 2 * keys, "reduce-scatter": 2 * keys // 4},
        "heads": {"all-to-all": 8 * keys // 4},
    }[strategy]
    assert sent(program.planned_collectives()) == formula
