"""A transformer written out layer by layer, and its step under each plan by hand, to be compiled.

Its layers are those of `examples/language_model.py` without dropout, one after another instead of
in a scan, so that the program grows with them. The step by hand does what `plurax.compile` makes a
step do, the global norm and the guard against non-finite values among it. On CPU XLA joins what
`jax.checkpoint` gathers or computes again with what was there before, so that by hand it has less
to compile there, and the program keeps more.

Shape suffixes as in the example.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from examples import language_model
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from benchmarks import split_by_hand
from benchmarks.sizes import Bytewise
from benchmarks.split_by_hand import Params, State

Layer = Callable[[Array, Params], Array]

normalised = jax.vmap(language_model.normalised, (0, None))
attention = jax.vmap(language_model.attention, (0, None))

MEGATRON: dict[str, tuple[Any, ...]] = {
    "*/query_key_value": (None, None, "tensor", None),
    "*/attention_out": ("tensor", None, None),
    "*/perceptron_in": (None, "tensor"),
    "*/perceptron_out": ("tensor", None),
}
"""The rules of a plan with `tensor`."""


def make_init(network: Bytewise) -> Callable[[Array], Params]:
    """`key -> params`, the blocks in a list."""
    width, size = network.width, network.width // network.heads
    block = {
        "attention_norm": (width,),
        "query_key_value": (width, 3, network.heads, size),
        "attention_out": (network.heads, size, width),
        "perceptron_norm": (width,),
        "perceptron_in": (width, 4 * width),
        "perceptron_out": (4 * width, width),
    }
    shapes = {
        "embedding": (language_model.BYTES, width),
        "position": (network.window, width),
        "norm": (width,),
        "output": (width, language_model.BYTES),
        "blocks": [block] * network.depth,
    }

    def init(key: Array) -> Params:
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            jnp.ones(shape) if len(shape) == 1 else 0.05 * jax.random.normal(k, shape)
            for k, shape in zip(keys, leaves, strict=True)
        )

    return init


def whole_layer(x_BTD: Array, block: Params) -> Array:
    """A layer on one device."""
    x_BTD += attention(normalised(x_BTD, block["attention_norm"]), block)
    normal_BTD = normalised(x_BTD, block["perceptron_norm"])
    return x_BTD + language_model.perceptron(normal_BTD, block)


def tensor_layer(x_BTD: Array, block: Params) -> Array:
    """A layer of which a device has some heads and hidden units."""
    copied, summed = split_by_hand.copied, split_by_hand.summed
    x_BTD += summed(attention(copied(normalised(x_BTD, block["attention_norm"])), block))
    normal_BTD = copied(normalised(x_BTD, block["perceptron_norm"]))
    return x_BTD + summed(language_model.perceptron(normal_BTD, block))


def losses(params: Params, bytes_BT: Array, layer: Layer = whole_layer) -> Array:
    """Mean cross entropy of each window, (B,)."""
    x_BTD = params["embedding"][bytes_BT[:, :-1]] + params["position"]
    for block in params["blocks"]:
        x_BTD = layer(x_BTD, block)
    logits_BTV = normalised(x_BTD, params["norm"]) @ params["output"]
    next_BT = bytes_BT[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, next_BT).mean(axis=1)


# ---- by hand -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split(split_by_hand.Split):
    """How it is split; `depth` layers, of which `remat` says what is computed again."""

    depth: int = 0
    remat: str = "none"

    @property
    def shards(self) -> Params:
        """As with a scan, but for the leading dim of layers, and the head is whole on each."""
        scanned = super().shards
        block = {name: P(*spec[1:]) for name, spec in scanned["blocks"].items()}
        output = scanned["output"] if self.zero else P()
        return {**scanned, "blocks": [block] * self.depth, "output": output}


def make_layer(split: Split) -> Layer:
    """A layer under this split."""
    if split.zero == 3:
        return jax.checkpoint(
            lambda x, block: whole_layer(x, split_by_hand.gathered(block, 0)),
            policy=split_by_hand.keep_no_gathered,
        )
    layer = tensor_layer if split.tensor > 1 else whole_layer
    if split.remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_saveable if split.remat == "dots" else None
    return jax.checkpoint(layer, policy=policy)


def make_step(
    split: Split, optimizer: optax.GradientTransformation, like: Params, examples: int
) -> tuple[Any, Any, Any]:
    """A jitted step `(state, bytes) -> (state, loss)`, and how the state and bytes lie.

    **Arguments:** `optimizer`, which works element by element; `like`, the shapes of whole
    parameters; `examples` of a batch.
    """
    layer = make_layer(split)

    def loss(params: Params, bytes_BT: Array) -> Array:
        if split.zero == 3:
            blocks = params["blocks"]
            others = {name: leaf for name, leaf in params.items() if name != "blocks"}
            params = {**split_by_hand.gathered(others, 0), "blocks": blocks}
        return jnp.sum(losses(params, bytes_BT, layer)) / examples

    def step(state: State, bytes_BT: Array) -> tuple[State, tuple[Array, Array]]:
        params, opt_state, count = state
        value, grads = jax.value_and_grad(loss)(params, bytes_BT)
        value, grads = split_by_hand.reduced(split, value, grads)
        norm = split_by_hand.global_norm(split, grads)
        mine = params
        if split.zero == 1:
            mine = jax.tree.map(split_by_hand.own_shard, params, split.shards)

        def update() -> tuple[PyTree, optax.OptState]:
            updates, after = optimizer.update(grads, opt_state, mine)
            return optax.apply_updates(mine, updates), after

        finite = jnp.isfinite(norm) & jnp.isfinite(value)
        params, opt_state = lax.cond(finite, update, lambda: (mine, opt_state))
        if split.zero == 1:
            params = split_by_hand.gathered(params, 0)
        return (params, opt_state, count + 1), (value, norm)

    mesh = split.mesh
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, like),
        split.shards,
        transform_non_params=lambda _: P(),
    )
    specs = (split.params, moments, P())
    if mesh.size > 1:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False
        )
    lies = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=split_by_hand.is_spec
    )
    outs = (lies, NamedSharding(mesh, P()))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=outs)
    return jitted, lies, NamedSharding(mesh, P("data"))
