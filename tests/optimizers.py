"""Optimizers and wrappers of optax under plans, beside a step written by hand.

    python -m tests.optimizers

writes the table of `docs/guides/optimizers.md` anew.
"""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import plurax as px

RATE, STEPS = 1e-2, 3
FEATURES, WIDTHS, CLASSES = 5, (8, 6), 7


def decayed(p):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, p)


def labels(p):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", p)


def adam():
    return optax.adam(RATE)


def first(*transforms):
    return optax.chain(*transforms, adam())


def last(*transforms):
    return optax.chain(optax.scale_by_adam(), *transforms, optax.scale(-RATE))


Make = Callable[[], optax.GradientTransformation]
ALIASES: dict[str, Make] = {
    name: functools.partial(
        getattr(optax, name), RATE, **({"key": 0} if name == "noisy_sgd" else {})
    )
    for name in (
        "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw",
        "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd",
        "novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "polyak_sgd", "radam",
        "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
    )
}  # fmt: skip
ALIASES |= {
    "adafactor, factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "adamw, masked decay": lambda: optax.adamw(RATE, mask=decayed),
    "sgd, momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "rmsprop, centered": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
}
CONTRIB: dict[str, Make] = {
    f"contrib.{name}": functools.partial(getattr(contrib, name), *args)
    for name, args in {
        "acprop": (RATE,), "ademamix": (RATE,), "adopt": (RATE,), "cocob": (RATE,),
        "dadapt_adamw": (), "dog": (), "dowg": (), "galore": (RATE, 2), "madgrad": (RATE,),
        "momo": (RATE,), "momo_adam": (RATE,), "muon": (RATE,), "prodigy": (),
        "schedule_free_adamw": (), "schedule_free_sgd": (RATE,), "simplified_ademamix": (RATE,),
    }.items()
}  # fmt: skip
CONTRIB |= {
    "contrib.mechanize": lambda: contrib.mechanize(adam()),
    "contrib.normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(RATE)),
    "contrib.reduce_on_plateau": lambda: optax.chain(
        adam(), contrib.reduce_on_plateau(patience=1, accumulation_size=1, rtol=0.5)
    ),
    "contrib.sam": lambda: contrib.sam(
        adam(), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2
    ),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam()),
}
WRAPPERS: dict[str, Make] = {
    "chain, clip_by_global_norm": lambda: first(optax.clip_by_global_norm(0.1), optax.clip(0.05)),
    "adaptive_grad_clip": lambda: first(optax.adaptive_grad_clip(0.01)),
    "add_noise": lambda: first(optax.add_noise(0.1, 0.5, 0)),
    "apply_every": lambda: first(optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
    "centralize": lambda: first(optax.centralize()),
    "clip_by_block_rms": lambda: first(optax.clip_by_block_rms(0.1)),
    "conditionally_transform": lambda: first(
        optax.conditionally_transform(optax.scale(2.0), lambda step, **_: step > 0)
    ),
    "ema": lambda: first(optax.ema(0.9)),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: first(optax.freeze({"first": True, "bias": False, "second": False,
                                          "out": False})),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(RATE, 0.0, 9)
    ),
    "keep_params_nonnegative": lambda: first(optax.keep_params_nonnegative()),
    "masked": lambda: optax.masked(adam(), decayed),
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
    "normalize_by_update_norm": lambda: last(optax.normalize_by_update_norm()),
    "partition": lambda: optax.partition({"matrix": adam(), "vector": optax.sgd(RATE)}, labels),
    "partition, muon and adam": lambda: optax.partition(
        {"matrix": contrib.muon(RATE), "vector": adam()}, labels
    ),
    "scale_by_param_block_norm": lambda: last(optax.scale_by_param_block_norm()),
    "scale_by_param_block_rms": lambda: last(optax.scale_by_param_block_rms()),
    "scale_by_trust_ratio": lambda: last(optax.scale_by_trust_ratio()),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 9)),
    "contrib.schedule_free": lambda: contrib.schedule_free(
        optax.adamw(RATE, b1=0.0), RATE, state_dtype=jnp.float64
    ),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask={"first": True, "bias": False, "second": False, "out": False}
    ),
    "skip_not_finite": lambda: optax.MultiSteps(
        adam(), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "zero_nans": lambda: first(optax.zero_nans()),
}  # fmt: skip
OPTIMIZERS = ALIASES | CONTRIB | WRAPPERS
TAKES_VALUE = {"polyak_sgd", "contrib.momo", "contrib.momo_adam", "contrib.reduce_on_plateau"}

PLANS = {
    "data=2": px.Plan(data=2),
    "zero=1": px.Plan(data=3, zero=1),
    "zero=2": px.Plan(data=3, zero=2, microbatches=2),
    "zero=3": px.Plan(data=3, zero=3),
    "tensor=2": px.Plan(
        tensor=2,
        shardings={"first": (None, "tensor"), "bias": ("tensor",), "second": ("tensor", None)},
    ),
    "pipeline=2": px.Plan(pipeline=2, microbatches=2),
}
"""By the column of the table. Three devices divide no dim of the first and the last parameter."""


def start():
    rng = np.random.default_rng(1)
    sizes = {"first": (FEATURES, WIDTHS[0]), "second": WIDTHS, "out": (WIDTHS[1], CLASSES)}
    params = {name: rng.normal(size=size) * 0.4 for name, size in sizes.items()}
    return {**params, "bias": np.full(WIDTHS[0], 0.1)}


def loss(params, batch, keys=None):
    x = px.pipeline.stage_boundary(jnp.tanh(batch["x"] @ params["first"] + params["bias"][None]))
    logits = jnp.tanh(x @ params["second"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def rows(count=12):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(count, FEATURES)),
        "y": rng.integers(0, CLASSES, count).astype(np.int32),
    }


@functools.cache
def by_hand(name):
    """Parameters and optimizer's state after some steps of plain JAX and optax on one device."""
    optimizer, batch = OPTIMIZERS[name](), rows()
    extra = TAKES_VALUE if name in TAKES_VALUE else ()

    @jax.jit
    def step(params, opt_state):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch).mean())(params)
        given = {"value": value} if extra else {}
        updates, opt_state = optimizer.update(grads, opt_state, params, **given)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.asarray, start())
    opt_state = jax.jit(optimizer.init)(params)
    for _ in range(STEPS):
        params, opt_state = step(params, opt_state)
    return _plain((params, opt_state))


def planned(name, plan):
    """The same under a plan, and the program."""
    task = px.Task(init=lambda key: jax.tree.map(jnp.asarray, start()), loss=loss)
    program = px.compile(task, OPTIMIZERS[name](), plan, rows())
    state = program.init(params=jax.tree.map(jnp.asarray, start()))
    for _ in range(STEPS):
        state, _ = program.step(state, rows())
    state = program.to_canonical(state)
    return _plain((state.params, state.opt_state)), program


def _plain(tree):
    """As NumPy arrays; random keys as their numbers."""

    def plain(leaf):
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(plain, tree)


def same(got, expected, tolerance=1e-10):
    """Whether structure, shapes, dtypes and non-finite places are equal, and numbers nearly."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        return False
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.allclose(a, b, rtol=0, atol=tolerance * _largest(b), equal_nan=True)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


def _largest(array):
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return max(finite.max(initial=0), 1e-30)


# --- The table in the docs ------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "optimizers.md"
MARKS = ("<!-- table: written by python -m tests.optimizers -->\n", "<!-- end of the table -->\n")


def cell(name, column):
    """What the table says of an optimizer under a plan, whose numbers are right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got, program = planned(name, PLANS[column])
        except px.errors.PlanError:
            return "refused"
    if not same(got, by_hand(name)):
        return "WRONG"
    gathered = sum(
        one.bytes * one.trips
        for one in program.planned_collectives()
        if one.operation and one.kind in ("all-gather", "all-to-all")
    )
    whole = sum(leaf.nbytes for leaf in start().values())
    return f"gathers {gathered / whole:.1f} P" if gathered else "yes"


def row(name):
    """A line of the table."""
    shown = name.replace("contrib.", "`contrib.` ", 1) if name.startswith("contrib.") else name
    return f"| {shown} | " + " | ".join(cell(name, column) for column in PLANS) + " |\n"


def table():
    """The whole table, as it stands in the docs."""
    lines = ["| optax | " + " | ".join(f"`{column}`" for column in PLANS) + " |\n"]
    lines.append("|---" * (len(PLANS) + 1) + "|\n")
    return "".join([*lines, *map(row, OPTIMIZERS)])


def documented():
    """The table that stands in the docs."""
    return PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0].strip() + "\n"


if __name__ == "__main__":
    px.virtual_devices(8)
    jax.config.update("jax_enable_x64", True)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(documented(), table()), encoding="utf-8")
