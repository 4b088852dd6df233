"""Small tasks and data that many tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px

FEATURES, HIDDEN, CLASSES = 5, 16, 3


def data(count, *, weights=False, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    batch = {
        "x": rng.normal(size=(count, FEATURES)).astype(dtype),
        "y": rng.integers(0, CLASSES, count).astype(np.int32),
    }
    if weights:
        batch["w"] = rng.integers(1, 9, count).astype(dtype)
    return batch


def init(key, dtype=jnp.float32):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (FEATURES, HIDDEN), dtype) * 0.5,
        "bias": jnp.zeros(HIDDEN, dtype),
        "out": jax.random.normal(second, (HIDDEN, CLASSES), dtype) * 0.3,
    }


def logits(params, x, key=None):
    hidden = jnp.tanh(x @ params["hidden"] + params["bias"])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
    return hidden @ params["out"]


def example_loss(params, example, key):
    """Cross entropy with dropout, for one example."""
    out = logits(params, example["x"], key)
    right = (jnp.argmax(out) == example["y"]).astype(out.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(out, example["y"]), {"accuracy": right}


def evaluate(params, batch):
    out = logits(params, batch["x"])
    right = (jnp.argmax(out, -1) == batch["y"]).astype(out.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"]), {"accuracy": right}


def mlp_task(*, weights=False, dtype=jnp.float32):
    return px.Task(
        init=lambda key: init(key, dtype),
        loss=px.per_example(example_loss),
        predict=lambda params, inputs: logits(params, inputs["x"]),
        evaluate=evaluate,
        weight=(lambda batch: batch["w"]) if weights else None,
    )


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def normed_task(dtype=jnp.float32):
    """A coupled, stateful task: batch normalisation over the real examples of a microbatch."""

    def make(key):
        return init(key, dtype), {"mean": jnp.zeros(HIDDEN, dtype), "seen": jnp.zeros((), dtype)}

    def loss(params, state, batch, keys, mask):
        hidden = batch["x"] @ params["hidden"]  # a bias here would have no gradient
        real = mask[:, None]
        count = mask.sum().astype(hidden.dtype)
        mean = jnp.where(real, hidden, 0).sum(0) / count
        var = jnp.where(real, (hidden - mean) ** 2, 0).sum(0) / count
        normed = (hidden - mean) / jnp.sqrt(var + 1e-3)
        out = jnp.tanh(normed + params["bias"]) @ params["out"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        state = {"mean": 0.9 * state["mean"] + 0.1 * mean, "seen": state["seen"] + count}
        return entropy, {"top": out.max(-1)}, state

    def score(params, state, batch):
        out = jnp.tanh(batch["x"] @ params["hidden"] - state["mean"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])

    return px.Task(
        init=make,
        loss=loss,
        evaluate=score,
        predict=lambda params, state, inputs: inputs["x"] @ params["hidden"] - state["mean"],
        coupled=True,
        stateful=True,
    )


def contrastive_task(dtype=jnp.float32):
    """A coupled task without state: each example against all others of its microbatch."""

    def loss(params, batch, keys, mask):
        z = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"])
        other = jnp.tanh(z @ params["out"])
        near = other @ other.T + jnp.where(mask[None, :], 0, -jnp.inf).astype(z.dtype)
        # The last term keeps a lone example from having no gradient at all.
        return jax.nn.logsumexp(near, axis=1) - 0.5 * jnp.sum(other * other, axis=1)

    return px.Task(init=lambda key: init(key, dtype), loss=loss, coupled=True)


def cut(batch, count):
    return jax.tree.map(lambda leaf: leaf[:count], batch)


def worst(a, b):
    """The largest difference of two trees, relative to the largest element of each leaf."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / max(np.max(np.abs(y)), 1e-30))
        for x, y in pairs
    )


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
