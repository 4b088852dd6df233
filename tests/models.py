"""Small tasks and data that many tests share."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from tests.promotion import row

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


def normals(key, dtype, *shapes):
    """Normal numbers of each shape. Drawn at once, they compile in a fraction of the time."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = jnp.split(jax.random.normal(key, (sum(sizes),), dtype), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def init(key, dtype=jnp.float32):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (FEATURES, HIDDEN), dtype) * 0.5,
        "bias": jnp.zeros(HIDDEN, dtype),
        "out": jax.random.normal(second, (HIDDEN, CLASSES), dtype) * 0.3,
    }


def logits(params, x, key=None):
    hidden = jnp.tanh(x @ params["hidden"] + row(params["bias"], x))
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
    return hidden @ params["out"]


def example_loss(params, example, key):
    """Cross entropy with dropout, for one example."""
    out = logits(params, example["x"], key)
    right = (jnp.argmax(out) == example["y"].astype(int)).astype(out.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(out, example["y"]), {"accuracy": right}


def evaluate(params, batch):
    out = logits(params, batch["x"])
    right = (jnp.argmax(out, -1) == batch["y"].astype(int)).astype(out.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"]), {"accuracy": right}


def weighted(rows, features, outputs):
    """Random examples for a regression, each with a weight of its own."""
    x, y = jax.random.split(jax.random.key(1))
    return {
        "x": jax.random.normal(x, (rows, features)),
        "y": jax.random.normal(y, (rows, outputs)),
        "weight": jnp.linspace(0.5, 2.0, rows),
    }


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
        var = jnp.where(real, (hidden - mean[None]) ** 2, 0).sum(0) / count
        normed = (hidden - mean[None]) / jnp.sqrt(var + 1e-3)[None]
        out = jnp.tanh(normed + params["bias"][None]) @ params["out"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        state = {"mean": 0.9 * state["mean"] + 0.1 * mean, "seen": state["seen"] + count}
        return entropy, {"top": out.max(-1)}, state

    def score(params, state, batch):
        out = jnp.tanh(batch["x"] @ params["hidden"] - state["mean"][None]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])

    return px.Task(
        init=make,
        loss=loss,
        evaluate=score,
        predict=lambda params, state, inputs: inputs["x"] @ params["hidden"] - state["mean"][None],
        coupled=True,
        stateful=True,
    )


def contrastive_task(dtype=jnp.float32):
    """A coupled task without state: each example against all others of its microbatch."""

    def loss(params, batch, keys, mask):
        z = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
        other = jnp.tanh(z @ params["out"])
        near = other @ other.T + jnp.where(mask[None, :], 0, -jnp.inf).astype(z.dtype)
        # The last term keeps a lone example from having no gradient at all.
        return jax.nn.logsumexp(near, axis=1) - 0.5 * jnp.sum(other * other, axis=1)

    return px.Task(init=lambda key: init(key, dtype), loss=loss, coupled=True)


def cut(batch, count):
    return jax.tree.map(lambda leaf: leaf[:count], batch)


def max_rel_error(a, b):
    """The largest difference of two trees, relative to the largest element of each leaf of `b`.

    NaN where either has one, so that every bound fails. Raises `AssertionError`, with the leaf's
    path, where the trees differ in structure, or two leaves in shape or dtype.
    """
    got, want = (jax.tree_util.tree_flatten_with_path(tree) for tree in (a, b))
    assert got[1] == want[1], f"{got[1]} is not {want[1]}"
    return max_or_nan(
        [_apart(path, x, y) for (path, x), (_, y) in zip(got[0], want[0], strict=True)]
    )


def max_or_nan(values):
    """The largest of some numbers, 0 of none; NaN if one is NaN, as Python's `max` is not."""
    return float(np.max(np.asarray(values, np.float64), initial=0))


def _apart(path, x, y):
    x, y = np.asarray(x), np.asarray(y)
    where = jax.tree_util.keystr(path)
    assert x.shape == y.shape, f"{where}: shape {x.shape} is not {y.shape}"
    assert x.dtype == y.dtype, f"{where}: dtype {x.dtype} is not {y.dtype}"
    wide = np.complex128 if np.iscomplexobj(y) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    return max_or_nan(np.abs(x - y)) / max(max_or_nan(np.abs(y)), 1e-30)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


# --- Networks to split ----------------------------------------------------------------------------

WIDTH, HEADS, DEPTH, TOKENS, WORDS = 12, 6, 2, 6, 12


def text(count, seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return {
        "words": rng.integers(0, WORDS, (count, tokens)).astype(np.int32),
        "next": rng.integers(0, WORDS, (count, tokens)).astype(np.int32),
    }


def transformer_init(key, dtype=jnp.float32):
    keys = iter(jax.random.split(key, 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, dtype) * 0.4

    return {
        "embedding": normal(WORDS, WIDTH),
        "blocks": {
            "norm": jnp.ones((DEPTH, WIDTH), dtype),
            "qkv": normal(DEPTH, WIDTH, 3, HEADS, WIDTH // HEADS),
            "attention_out": normal(DEPTH, HEADS, WIDTH // HEADS, WIDTH),
            "hidden": normal(DEPTH, WIDTH, 4 * WIDTH),
            "bias": jnp.zeros((DEPTH, 4 * WIDTH), dtype),
            "out": normal(DEPTH, 4 * WIDTH, WIDTH),
        },
        "head": normal(WIDTH, WORDS),
    }


def transformer_logits(params, words, key=None):
    def normalised(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain[None]

    def dropped(x, key):
        if key is None:
            return x
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def block(x, scanned):
        layer, key = scanned
        q, k, v = jnp.einsum("td,dchk->cthk", normalised(x, layer["norm"]), layer["qkv"])
        scores = jnp.einsum("thk,shk->hts", q, k)
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        mixed = jnp.einsum("hts,shk,hkd->td", weights, v, layer["attention_out"])
        x = px.sharding.name(x + dropped(mixed, key), "residual")
        hidden = jax.nn.gelu(x @ layer["hidden"] + layer["bias"][None])
        return px.sharding.name(x + hidden @ layer["out"], "residual"), None

    x = px.sharding.name(params["embedding"][words], "residual")
    keys = None if key is None else jax.random.split(key, DEPTH)
    x, _ = jax.lax.scan(block, x, (params["blocks"], keys))
    return x @ params["head"]


def transformer_task(dtype=jnp.float32):
    def loss(params, example, key=None):
        logits = transformer_logits(params, example["words"], key)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, example["next"])
        return entropy.mean(), {"worst": entropy.max()}

    return px.Task(
        init=lambda key: transformer_init(key, dtype),
        loss=px.per_example(loss),
        predict=lambda params, batch: jax.vmap(lambda w: transformer_logits(params, w))(
            batch["words"]
        ),
        evaluate=lambda params, batch: jax.vmap(lambda example: loss(params, example))(batch),
        weight=lambda batch: 1 + (batch["words"][:, 0] % 3).astype(dtype),
    )


def megatron(sequence=False):
    return px.sharding.megatron(
        column={
            "*/qkv": (..., "tensor", None),
            "*/hidden": (..., "tensor"),
            "*/bias": (..., "tensor"),
        },
        row={"*/attention_out": (..., "tensor", None, None), "*/out": (..., "tensor", None)},
        head=["head"],
        sequence=["residual"] if sequence else [],
    )


def attention_task(width, heads, dtype=jnp.float32):
    """Causal attention with a residual, of one layer."""

    def init(key):
        keys = jax.random.split(key, 2)
        shape = (width, 3, heads, width // heads)
        return {
            "qkv": jax.random.normal(keys[0], shape, dtype) * 0.1,
            "out": jax.random.normal(keys[1], (heads, width // heads, width), dtype) * 0.1,
        }

    def outputs(params, x):
        q, k, v = jnp.einsum("btd,dchk->cbthk", x, params["qkv"])
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        seen = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        return x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["out"])

    return px.Task(
        init=init,
        loss=lambda params, batch, keys: (outputs(params, batch["x"]) ** 2).mean((1, 2)),
        predict=lambda params, inputs: outputs(params, inputs["x"]),
    )


def images(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, 6, 6, 3)).astype(dtype),
        "y": rng.integers(0, CLASSES, count).astype(np.int32),
    }


def convolutional_task(dtype=jnp.float32, channels=12):
    """A small residual convolutional network with dropout."""

    def make(key):
        keys = jax.random.split(key, 4)
        normal = lambda key, *shape: jax.random.normal(key, shape, dtype) * 0.3  # noqa: E731
        return {
            "stem": normal(keys[0], 3, 3, 3, channels),
            "first": normal(keys[1], 3, 3, channels, channels),
            "second": normal(keys[2], 3, 3, channels, channels),
            "head": normal(keys[3], channels, CLASSES),
        }

    def conv(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params, batch, keys=None):
        x = jax.nn.relu(conv(batch["x"], params["stem"]))
        inner = jax.nn.relu(conv(x, params["first"]))
        if keys is not None:
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, inner.shape[1:]))(keys)
            inner = jnp.where(kept, inner / 0.9, 0)
        x = jax.nn.relu(x + conv(inner, params["second"]))
        pooled = jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        logits = pooled.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    return px.Task(init=make, loss=loss, evaluate=loss)


CHANNELS = {"first": (..., "tensor"), "second": (None, None, "tensor", None), "stem": (None,)}
"""The two convolutions of a residual block, split as a perceptron is: outputs, then inputs."""


# --- Networks to cut into stages ------------------------------------------------------------------

LAYERS = 11  # no multiple of 2, 3, 4 or 8


def _dropped(x, keys):
    if keys is None:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, x.shape[1:]))(keys)
    return jnp.where(kept, x / 0.9, 0)


def transformer_stack(dtype=jnp.float32, depth=LAYERS, tied=True, attention=None):
    """A stack of transformer layers; the head's table is the embedding's.

    `attention`: of queries, keys and values `(B, T, N, H)`; None: as equations.
    """

    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
        "attention_out": (HEADS, WIDTH // HEADS, WIDTH),
        "hidden": (WIDTH, 2 * WIDTH),
        "out": (2 * WIDTH, WIDTH),
    }

    def layer(key):
        arrays = normals(key, dtype, *shapes.values())
        scaled = {name: array * 0.15 for name, array in zip(shapes, arrays, strict=True)}
        return {**scaled, "bias": jnp.zeros(2 * WIDTH, dtype)}

    def block(params, x, batch, keys):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.einsum("btd,dchk->cbthk", normed, params["qkv"])
        if attention is None:
            scores = jnp.einsum("bthk,bshk->bhts", q, k)
            seen = jnp.tril(jnp.ones(scores.shape[2:], bool))
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
            mixed = jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["attention_out"])
        else:
            mixed = jnp.einsum("bthk,hkd->btd", attention(q, k, v), params["attention_out"])
        x = px.sharding.name(x + _dropped(mixed, keys), "residual")
        hidden = jax.nn.gelu(x @ params["hidden"] + row(params["bias"], x))
        return px.sharding.name(x + hidden @ params["out"], "residual")

    def head(params, x, batch, keys):
        entropy = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, x, batch), batch["next"]
        )
        return entropy.mean(1), {"worst": entropy.max(1)}

    def logits(params, x, batch):
        return (x * row(params["gain"], x)) @ params["table"].T

    own = {} if tied else {"table": jnp.ones((WORDS, WIDTH), dtype)}
    return px.stack(
        embed=(
            lambda key: {"table": jax.random.normal(key, (WORDS, WIDTH), dtype) * 0.15},
            lambda params, batch, keys: px.sharding.name(
                params["table"][batch["words"]], "residual"
            ),
        ),
        block=(layer, block),
        head=(lambda key: {"gain": jnp.ones(WIDTH, dtype), **own}, head),
        depth=depth,
        predict=logits,
        tied=["table"] if tied else [],
        weight=lambda batch: 1 + (batch["words"][:, 0] % 3).astype(dtype),
    )


def perceptron_stack(dtype=jnp.float32, depth=LAYERS):
    """A stack of small layers, without a name or a key in it."""

    def normal(key, *shape):
        return jax.random.normal(key, shape, dtype) * 0.5

    def loss(params, x, batch, keys):
        return optax.softmax_cross_entropy_with_integer_labels(x @ params, batch["y"])

    return px.stack(
        embed=(lambda key: normal(key, FEATURES, 6), lambda w, batch, keys: batch["x"] @ w),
        block=(
            lambda key: {"hidden": normal(key, 6, 6)},
            lambda params, x, batch, keys: x + _dropped(jnp.tanh(x @ params["hidden"]), keys),
        ),
        head=(lambda key: normal(key, 6, CLASSES), loss),
        depth=depth,
        predict=lambda w, x, inputs: x @ w,
    )


def marked_task(dtype=jnp.float32):
    """Layers of different widths with skips across stages, cut by marks."""
    widths = (FEATURES, 16, 7, 12, 7, 16, 9, 6, CLASSES)

    def init(key):
        kernels = normals(key, dtype, *itertools.pairwise(widths))
        layers = {
            f"layer{n}": {"w": kernel * 0.4, "b": jnp.zeros(kernel.shape[1], dtype)}
            for n, kernel in enumerate(kernels)
        }
        return {"scale": jnp.ones((), dtype), **layers}

    def outputs(params, x, key=None):
        known = {}
        *inner, last = (params[f"layer{n}"] for n in range(len(widths) - 1))
        for n, layer in enumerate(inner):
            x = x @ layer["w"] + row(layer["b"], x)
            x = jnp.tanh(x) * params["scale"]
            if key is not None and n in (1, 4):
                kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, x.shape)
                x = jnp.where(kept, x / 0.9, 0)
            if n in (3, 4):  # from layers of the same width, two and four before
                x = x + known[{3: 1, 4: 0}[n]]
            x = known[n] = px.pipeline.stage_boundary(x)
        return x @ last["w"] + row(last["b"], x)

    def example(params, row, key):
        out = outputs(params, row["x"], key)
        entropy = optax.softmax_cross_entropy_with_integer_labels(out, row["y"])
        return entropy, {"top": out.max()}

    def evaluate(params, batch):
        out = outputs(params, batch["x"])
        entropy = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        return entropy, {"top": out.max(-1)}

    return px.Task(
        init=init,
        loss=px.per_example(example),
        evaluate=evaluate,
        predict=lambda params, inputs: outputs(params, inputs["x"]),
    )


def compilations(run):
    """How many programs XLA was asked for while `run` ran."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            seen.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
        )
    )
    try:
        run()
    finally:
        jax.monitoring.clear_event_listeners()
    return len(seen)


def uneven_parts(widths, batch=4096):
    """Residual perceptrons of some widths between stage boundaries; its batch."""

    def init(key):
        each = enumerate(widths)
        return {f"{i}": {"up": jnp.zeros((1024, n)), "down": jnp.zeros((n, 1024))} for i, n in each}

    def loss(params, batch, keys):
        x = batch["x"]
        for i in range(len(widths)):
            x = px.pipeline.stage_boundary(x) if i else x
            x = x + jax.nn.relu(x @ params[f"{i}"]["up"]) @ params[f"{i}"]["down"]
        return (x**2).mean(-1)

    return px.Task(init=init, loss=loss), {"x": jax.ShapeDtypeStruct((batch, 1024), jnp.float32)}
