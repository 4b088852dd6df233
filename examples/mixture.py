"""A mixture of eight small experts beside the dense network of equal work, on four kinds of text.

The texts are on every machine with Python and NumPy: the reference that `help("for")` prints,
Python code, C headers, and the names of Unicode characters, 96 KiB of each. A network guesses each
byte from the twelve before it; every tenth window of 64 bytes is held out.

Both networks are an embedding, a matrix, one perceptron and a head. The dense perceptron has 132
hidden units. In the mixture a router picks two of eight experts with 64 hidden units each, for each
byte: 32 x 8 multiply-adds to choose and 2 x (2 x 32 x 64) to compute, as many as 2 x 32 x 132. So
the mixture has 3.9 times the weights in its perceptron, and no more work.

    python examples/mixture.py                                          # both networks, 3 seeds
    plurax train examples/mixture.py --devices 4 --output runs/mixture  # the mixture on 4 devices
    plurax report runs/mixture                                          # with its load by expert

Run as a script, it prints what both reach on held-out text, how evenly the experts are chosen, and
what a step sends when one rule for each matrix gives four virtual devices two experts each.

XLA multiplies all rows by all experts where it compiles `ragged_dot` for CPUs, so that the mixture
takes longer there.

Shape suffixes: B windows, T bytes of a window, N bytes of all windows, C bytes before one, D width,
E experts, F hidden units of an expert, K chosen experts, R rows of experts (N * K), V bytes.
"""

import collections
import inspect
import math
import tarfile
import unicodedata
from argparse import ArgumentParser
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Int, Key

import plurax as px

CONTEXT, TOKENS = 12, 64
LETTERS, LETTER, WIDTH = 128, 16, 32
EXPERTS, CHOSEN, HIDDEN = 8, 2, 64
DENSE = CHOSEN * HIDDEN + EXPERTS // 2  # hidden units for the work of experts and router
BALANCE = 0.01

Kind = Literal["mixture", "dense"]
Params = dict[str, Array]
Batch = dict[str, Array]


# --- Texts ------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """Text of four kinds."""
    code = (inspect.getmodule(of) for of in (ArgumentParser, tarfile.TarFile))
    headers = sorted(Path(np.get_include()).rglob("*.h"))
    names = ((place, unicodedata.name(chr(place), "")) for place in range(0x3000))
    return {
        "reference": "\n".join(topics[name] for name in sorted(topics)),
        "code": "\n".join(inspect.getsource(module) for module in code if module),
        "headers": "\n".join(path.read_text(encoding="utf-8") for path in headers),
        "names": "\n".join(f"{place:X} {name}" for place, name in names if name),
    }


SOURCES = ("reference", "code", "headers", "names")


def windows(text: str, size: int) -> Int[np.ndarray, "B C+T"]:
    """The first `size` bytes of a text as windows of `TOKENS` bytes, with the `CONTEXT` before."""
    text_N = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)[:size]
    starts = np.arange((text_N.size - CONTEXT) // TOKENS) * TOKENS
    return text_N[starts[:, None] + np.arange(CONTEXT + TOKENS)]


def load_data(size: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Windows to train on and every tenth, held out: `bytes` and `source`, the kind of text."""
    cut = {name: windows(text, size) for name, text in texts().items()}
    every = {
        "bytes": np.concatenate([cut[name] for name in SOURCES]),
        "source": np.repeat(np.arange(4, dtype=np.int32), [len(cut[name]) for name in SOURCES]),
    }
    held_out = np.concatenate([np.arange(len(cut[name])) % 10 == 9 for name in SOURCES])
    train = {name: values[~held_out] for name, values in every.items()}
    return train, {name: values[held_out] for name, values in every.items()}


# --- The networks -----------------------------------------------------------------------------


def init(key: Key[Array, ""], kind: Kind) -> Params:
    """The matrices; those of experts have the experts as their first dim."""
    keys = jax.random.split(key, 5)
    experts, hidden = ((EXPERTS,), HIDDEN) if kind == "mixture" else ((), DENSE)

    def matrix(key: Key[Array, ""], *shape: int) -> Array:
        return jax.random.normal(key, shape) / math.sqrt(shape[-2])

    params = {
        "letters": jax.random.normal(keys[0], (LETTERS, LETTER)),
        "read": matrix(keys[1], CONTEXT * LETTER, WIDTH),
        "up": matrix(keys[2], *experts, WIDTH, hidden),
        "down": matrix(keys[3], *experts, hidden, WIDTH),
        "out": jnp.zeros((WIDTH, LETTERS)),
    }
    return params if kind == "dense" else {**params, "router": matrix(keys[4], WIDTH, EXPERTS)}


def mixture(
    params: Params, x_ND: Float[Array, "N D"], scores_NE: Float[Array, "N E"]
) -> tuple[Float[Array, "N D"], Float[Array, "N E"]]:
    """Each row through its two experts, and which those were; no row is dropped."""
    best_NK, chosen_NK = jax.lax.top_k(scores_NE, CHOSEN)
    order_R = jnp.argsort(chosen_NK.reshape(-1))
    sizes_E = jnp.bincount(chosen_NK.reshape(-1), length=EXPERTS)
    place_R = order_R // CHOSEN
    hidden_RF = jax.nn.gelu(jax.lax.ragged_dot(x_ND[place_R], params["up"], sizes_E))
    y_RD = jax.lax.ragged_dot(hidden_RF, params["down"], sizes_E)
    weight_NK = best_NK / best_NK.sum(axis=1, keepdims=True)
    y_RD = y_RD * weight_NK.reshape(-1)[order_R, None]
    picked_NE = jax.nn.one_hot(chosen_NK, EXPERTS).mean(axis=1)
    return jnp.zeros_like(x_ND).at[place_R].add(y_RD), picked_NE


def normalised(x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Each vector scaled to a mean square of 1."""
    return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-6)


def network(
    params: Params, batch: Batch
) -> tuple[Float[Array, "B T V"], Float[Array, "B E"], Float[Array, "B E"]]:
    """Logits of each byte, and by window the mean scores and the shares of the experts."""
    letters_BSL = params["letters"][batch["bytes"]]
    before = [letters_BSL[:, place : place + TOKENS] for place in range(CONTEXT)]
    x_BTD = jax.nn.gelu(jnp.concatenate(before, axis=2) @ params["read"])
    normal_BTD = normalised(x_BTD)
    if "router" in params:
        rows_ND = normal_BTD.reshape(-1, WIDTH)
        scores_NE = jax.nn.softmax(rows_ND @ params["router"])
        y_ND, picked_NE = mixture(params, rows_ND, scores_NE)
        y_BTD = y_ND.reshape(x_BTD.shape)
        scores_BE, shares_BE = (
            of.reshape(-1, TOKENS, EXPERTS).mean(axis=1) for of in (scores_NE, picked_NE)
        )
    else:
        y_BTD = jax.nn.gelu(normal_BTD @ params["up"]) @ params["down"]
        scores_BE = shares_BE = jnp.zeros((x_BTD.shape[0], 0))
    return normalised(x_BTD + y_BTD) @ params["out"], scores_BE, shares_BE


def measured(params: Params, batch: Batch) -> tuple[Array, Array, dict[str, Any]]:
    """Mean cross entropy (B,), what an uneven load costs (B,), and metrics."""
    logits_BTV, scores_BE, shares_BE = network(params, batch)
    next_BT = batch["bytes"][:, CONTEXT:].astype(jnp.int32)
    entropy_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, next_BT)
    losses_B = entropy_BT.mean(axis=1)
    # Of each window by itself, so that examples stay independent of each other.
    uneven_B = EXPERTS * jnp.sum(scores_BE * shares_BE, axis=1)
    shares = {f"expert {i}": shares_BE[:, i] for i in range(shares_BE.shape[1])}
    return losses_B, uneven_B, {"bits_per_byte": losses_B / math.log(2.0), **shares}


def loss(params: Params, batch: Batch, keys: Key[Array, "B"]) -> tuple[Array, dict[str, Array]]:
    """What training minimises: cross entropy, and a little for an uneven load."""
    losses_B, uneven_B, metrics = measured(params, batch)
    return losses_B + BALANCE * uneven_B, metrics


def evaluate(params: Params, batch: Batch) -> tuple[Array, dict[str, Any]]:
    """Cross entropy alone, and bits per byte of each kind of text."""
    losses_B, _, metrics = measured(params, batch)
    of_source_BS = jax.nn.one_hot(batch["source"], len(SOURCES))
    sums = {"bits": of_source_BS * metrics["bits_per_byte"][:, None], "windows": of_source_BS}

    def finish(sums: dict[str, np.ndarray]) -> dict[str, float]:
        return dict(zip(SOURCES, sums["bits"] / sums["windows"], strict=True))

    return losses_B, {**metrics, "bits": px.metrics.Metric(sums, finish)}


def experiment(
    kind: Kind = "mixture",
    size: int = 98_304,
    epochs: int = 1,
    batch_size: int = 8,
    learning_rate: float = 0.03,
) -> px.Experiment:
    """The mixture, or the dense network of equal work, on `size` bytes of each kind of text.

    With several devices each has its share of the windows and its own experts.
    """
    data, held_out = load_data(size)
    steps = epochs * -(-len(data["source"]) // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, max(1, steps // 20), steps, end_value=0.1 * learning_rate
    )
    return px.Experiment(
        task=px.Task(init=lambda key: init(key, kind), loss=loss, evaluate=evaluate),
        optimizer=optax.adamw(schedule, b2=0.95, weight_decay=0.1),
        data=data,
        evaluation=held_out,
        plan=px.Plan(data=jax.device_count(), shardings=BY_EXPERT if kind == "mixture" else {}),
        epochs=epochs,
        batch_size=batch_size,
        seed=0,
    )


# --- Both networks, and the mixture on four devices ---------------------------------------------

BY_EXPERT = {"up": ("data", None, None), "down": ("data", None, None)}
"""The experts are split over the devices, and rows are sent to the device of their expert."""


def compare(size: int, epochs: int, seeds: int) -> None:
    """Train both networks on one device, all seeds in one program, and print a table."""
    print(f"{'bits per byte, held out':26}{'all':>7}{'±':>7}", *(f"{name:>10}" for name in SOURCES))
    for kind in ("dense", "mixture"):
        made = vars(experiment(kind, size, epochs))
        alone = {"plan": px.Plan(), "members": px.Members(seeds), "progress": False}
        result = px.fit(**{**made, **alone})
        of_seeds = {
            name.removeprefix("eval_"): np.asarray(values)
            for name, values in result.history[-1]["members"].items()
            if name.startswith("eval_")
        }
        bits = of_seeds["bits_per_byte"]
        kinds = (f"{of_seeds[f'bits_{name}'].mean():10.3f}" for name in SOURCES)
        print(f"{kind:26}{bits.mean():7.3f}{bits.std(ddof=1):7.3f}", *kinds)
    shares_ES = np.stack([of_seeds[f"expert {i}"] for i in range(EXPERTS)])
    print(f"\nshares of the {EXPERTS} experts, {1 / EXPERTS:.1%} each if they were even:")
    for seed, (low, high) in enumerate(zip(shares_ES.min(0), shares_ES.max(0), strict=True)):
        print(f"  seed {seed}: {low:.1%} to {high:.1%}")


def split(size: int) -> None:
    """Take ten steps of the mixture on one device and on all, and print losses and bytes."""
    made = experiment(size=size)
    batches = [
        {name: x[start :: len(x) // 64][:64] for name, x in made.data.items()}
        for start in range(10)
    ]
    print()
    for plan in (px.Plan(), made.plan):
        program = px.compile(made.task, made.optimizer, plan, batches[0])
        state = program.init(seed=0)
        for batch in batches:
            state, metrics = program.step(state, batch)
        sent = collections.Counter[str]()
        for each in program.collectives():
            # A balanced router takes one turn; further ones are a loop of no known length.
            sent[each.kind] += each.bytes * (each.trips or 0)
        experts = state.params["up"].addressable_shards[0].data.shape[0]
        listed = ", ".join(f"{kind} {size:,}" for kind, size in sent.items()) or "nothing"
        print(f"{plan.sizes_text()}: {metrics['bits_per_byte']:.5f} bits per byte in step 10")
        print(f"  a device has {experts} experts and sends in a step, in bytes: {listed}")


def main(size: int = 98_304, epochs: int = 1, seeds: int = 3, virtual: int = 4) -> None:
    """Compare both networks, then split the experts of the mixture over devices.

    **Arguments:** `virtual`, the number of virtual CPU devices, or 0 for the devices of this
    machine.
    """
    if virtual:
        px.virtual_devices(virtual)
    compare(size, epochs, seeds)
    split(size)


if __name__ == "__main__":
    tyro.cli(main)
