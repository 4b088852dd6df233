"""The transformer of `examples/language_model.py` split over devices by hand, in JAX and Optax.

What an expert writes inside `jax.shard_map`, for one network each time: which shards a device has,
and every collective. It computes what `plurax.compile` computes: the same loss and dropout masks,
gradients clipped by their global norm, AdamW. No weights, no guard against non-finite values, no
ragged batches.

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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

Params = dict[str, Any]
State = tuple[Params, optax.OptState, Array]
Step = Callable[[State, PyTree], tuple[State, Array]]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the network is split; the fields as those of `plurax.Plan`.

    **Fields:** `sequence`, activations between layers are split by token over `tensor`; `again`,
    what `sequence` gathers is not kept for the backward pass but gathered again.
    """

    data: int = 1
    tensor: int = 1
    zero: int = 0
    sequence: bool = False
    again: bool = False

    @property
    def mesh(self) -> Mesh:
        """Over the first devices."""
        count = self.data * self.tensor
        types = (AxisType.Auto, AxisType.Auto)
        devices = jax.devices()[:count]
        return jax.make_mesh((self.data, self.tensor), ("data", "tensor"), types, devices=devices)

    @property
    def shards(self) -> Params:
        """Which dim of gradients and the optimizer's state is split, and over which axis."""
        if self.tensor > 1:
            blocks = {
                "attention_norm": P(),
                "query_key_value": P(None, None, None, "tensor"),
                "attention_out": P(None, "tensor"),
                "perceptron_norm": P(),
                "perceptron_in": P(None, None, "tensor"),
                "perceptron_out": P(None, "tensor"),
            }
            whole = {"embedding": P(), "position": P(), "norm": P()}
            return {**whole, "blocks": blocks, "output": P(None, "tensor")}
        of_layer, of_all = (P(None, "data"), P("data")) if self.zero else (P(), P())
        blocks = dict.fromkeys(
            [
                "attention_norm",
                "query_key_value",
                "attention_out",
                "perceptron_norm",
                "perceptron_in",
                "perceptron_out",
            ],
            of_layer,
        )
        names = ["embedding", "position", "norm", "output"]
        return {**dict.fromkeys(names, of_all), "blocks": blocks}

    @property
    def params(self) -> Params:
        """How parameters lie between steps."""
        whole = self.zero == 1
        return jax.tree.map(lambda spec: P() if whole else spec, self.shards, is_leaf=is_spec)


# ---- collectives -------------------------------------------------------------------------------


@jax.custom_vjp
def copied(x: Array) -> Array:
    """Megatron's f: as it is, its gradient summed over `tensor`."""
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tensor"),))


@jax.custom_vjp
def summed(x: PyTree) -> PyTree:
    """Megatron's g: summed over `tensor`, its gradient as it is."""
    return lax.psum(x, "tensor")


summed.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, g: (g,))


def gathered(shards: PyTree, dim: int) -> PyTree:
    """Whole parameters; their gradients are reduced to shards."""
    return jax.tree.map(lambda x: lax.all_gather(x, "data", axis=dim, tiled=True), shards)


def keep_no_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """For `jax.checkpoint`: keep everything but what was gathered."""
    return primitive is not lax.all_gather_p


# ---- the network -------------------------------------------------------------------------------


def make_loss(split: Split) -> Callable[[Params, Array, Array], Array]:
    """`(params, bytes, keys) -> loss` of a device's examples, summed, on the shards it has."""

    def own(x: Array, dim: int) -> Array:
        """The tokens that this device has between layers."""
        if not split.sequence:
            return x
        size = x.shape[dim] // split.tensor
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)

    def dropped(x_BTD: Array, keys_B: Array, tokens: int) -> Array:
        def one(x_TD: Array, key: Array) -> Array:
            shape = (tokens, x_TD.shape[1])
            kept_TD = own(jax.random.bernoulli(key, 1.0 - language_model.DROPOUT, shape), 0)
            return jnp.where(kept_TD, x_TD / (1.0 - language_model.DROPOUT), 0.0)

        return jax.vmap(one)(x_BTD, keys_B)

    def enter(x_BTD: Array) -> Array:
        """Into a layer that is split by heads or hidden units."""
        if split.sequence:
            return lax.all_gather(x_BTD, "tensor", axis=1, tiled=True)
        return copied(x_BTD) if split.tensor > 1 else x_BTD

    def leave(x_BTD: Array) -> Array:
        """Out of it."""
        if split.sequence:
            return lax.psum_scatter(x_BTD, "tensor", scatter_dimension=1, tiled=True)
        return summed(x_BTD) if split.tensor > 1 else x_BTD

    normalised = jax.vmap(language_model.normalised, (0, None))
    attention = jax.vmap(language_model.attention, (0, None))

    def loss(params: Params, bytes_BT: Array, keys_B: Array) -> Array:
        text_BT, next_BT = bytes_BT[:, :-1], bytes_BT[:, 1:].astype(jnp.int32)
        tokens = text_BT.shape[1]

        def layer(x_BTD: Array, scanned: tuple[Params, Array]) -> tuple[Array, None]:
            block, keys_2B = scanned
            if split.zero == 3:
                block = gathered(block, 0)
            normal_BTD = enter(normalised(x_BTD, block["attention_norm"]))
            added_BTD = leave(attention(normal_BTD, block))
            x_BTD += dropped(added_BTD, keys_2B[0], tokens)
            normal_BTD = enter(normalised(x_BTD, block["perceptron_norm"]))
            added_BTD = leave(language_model.perceptron(normal_BTD, block))
            return x_BTD + dropped(added_BTD, keys_2B[1], tokens), None

        if split.zero == 3 or split.again:
            layer = jax.checkpoint(layer, policy=keep_no_gathered, prevent_cse=False)
        blocks = params["blocks"]
        if split.zero == 3:
            names = ("embedding", "position", "norm", "output")
            params = gathered({name: params[name] for name in names}, 0)
        layers = jnp.arange(blocks["attention_norm"].shape[0])
        keys_BL = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, layers))(keys_B)
        keys_BL2 = jax.vmap(jax.vmap(jax.random.split))(keys_BL)
        x_BTD = params["embedding"][own(text_BT, 1)] + own(params["position"], 0)
        x_BTD, _ = lax.scan(layer, x_BTD, (blocks, keys_BL2.transpose(1, 2, 0)))
        x_BTD = enter(normalised(x_BTD, params["norm"]))
        losses_BT = cross_entropy(x_BTD @ params["output"], next_BT, split.tensor > 1)
        return jnp.sum(jnp.mean(losses_BT, axis=1))

    return loss


def cross_entropy(logits_BTV: Array, next_BT: Array, parallel: bool) -> Array:
    """Of each byte; with `parallel` a device has some of the vocabulary."""
    if not parallel:
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, next_BT)
    size = logits_BTV.shape[-1]
    top_BT = lax.pmax(lax.stop_gradient(logits_BTV.max(axis=-1)), "tensor")
    logits_BTV -= top_BT[..., None]
    place_BT = next_BT - lax.axis_index("tensor") * size
    here_BT = (place_BT >= 0) & (place_BT < size)
    picked_BT1 = jnp.take_along_axis(logits_BTV, place_BT[..., None], axis=-1, mode="clip")
    label_BT, total_BT = summed(
        (jnp.where(here_BT, picked_BT1[..., 0], 0.0), jnp.sum(jnp.exp(logits_BTV), axis=-1))
    )
    return jnp.log(total_BT) - label_BT


# ---- the step ----------------------------------------------------------------------------------


def make_step(
    split: Split, optimizer: optax.GradientTransformation, clip: float, params: Params, key: Array
) -> tuple[Step, State, NamedSharding]:
    """A jitted step `(state, bytes) -> (state, loss)`, its first state, and how bytes lie.

    **Arguments:** `optimizer`, which works element by element; `clip`, the largest global norm;
    `params`, whole; `key`, from which each step's dropout comes.
    """
    mesh, loss = split.mesh, make_loss(split)
    opt_state = optimizer.init(params)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        opt_state,
        split.shards,
        transform_non_params=lambda _: P(),
    )
    specs = (split.params, moments, P())

    def step(state: State, bytes_BT: Array) -> tuple[State, Array]:
        params, opt_state, count = state
        share = bytes_BT.shape[0]
        numbers_B = lax.axis_index("data") * share + jnp.arange(share)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, count), numbers_B)
        total = share * split.data
        value, grads = jax.value_and_grad(lambda p: loss(p, bytes_BT, keys_B) / total)(params)
        value, grads = reduced(split, value, grads)
        norm = global_norm(split, grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
        mine = params
        if split.zero == 1:
            mine = jax.tree.map(own_shard, params, split.shards)
        updates, opt_state = optimizer.update(grads, opt_state, mine)
        params = optax.apply_updates(mine, updates)
        if split.zero == 1:
            params = jax.tree.map(
                lambda p, spec: lax.all_gather(p, "data", axis=_dim(spec), tiled=True),
                params,
                split.shards,
            )
        return (params, opt_state, count + 1), value

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False
    )
    lies = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    state = (jax.tree.map(jnp.copy, params), opt_state, jnp.zeros((), jnp.int32))
    where = NamedSharding(mesh, P("data"))
    jitted = jax.jit(spread, donate_argnums=0, out_shardings=(lies, NamedSharding(mesh, P())))
    return jitted, jax.device_put(state, lies), where


def reduced(split: Split, loss: Array, grads: Params) -> tuple[Array, Params]:
    """Loss and gradients summed over devices, to the shards of the update."""
    if split.sequence:
        # Devices saw different tokens between layers.
        partly = jax.tree.map(lambda spec: "tensor" not in spec, split.shards, is_leaf=is_spec)
        sums = lax.psum(jax.tree.map(lambda g, p: g if p else None, grads, partly), "tensor")
        grads = jax.tree.map(
            lambda g, s: g if s is None else s, grads, sums, is_leaf=lambda x: x is None
        )
    if split.data == 1:
        return loss, grads
    if not split.zero:
        return lax.psum((loss, grads), "data")
    if split.zero == 1:
        grads = jax.tree.map(
            lambda g, spec: lax.psum_scatter(g, "data", scatter_dimension=_dim(spec), tiled=True),
            grads,
            split.shards,
        )
    return lax.psum(loss, "data"), grads


def global_norm(split: Split, grads: Params) -> Array:
    """Of gradients of which some are in shards."""
    axis = "tensor" if split.tensor > 1 else "data"
    here, everywhere = [jnp.zeros(())], [jnp.zeros(())]
    for grad, spec in zip(
        jax.tree.leaves(grads), jax.tree.leaves(split.shards, is_leaf=is_spec), strict=True
    ):
        (here if axis in spec else everywhere).append(jnp.sum(jnp.square(grad)))
    total = sum(everywhere)
    if len(here) > 1:
        total += lax.psum(sum(here), axis)
    return jnp.sqrt(total)


def own_shard(x: Array, spec: P) -> Array:
    """A device's part of a whole tensor."""
    dim = _dim(spec)
    size = x.shape[dim] // lax.axis_size("data")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("data") * size, size, dim)


def _dim(spec: P) -> int:
    return list(spec).index("data")


def is_spec(node: Any) -> bool:
    return isinstance(node, P)
