"""Recall over 16,384 tokens: attention as equations, its tokens split over devices.

Each token has a key and a value, and asks for the value of a random token before it, by the key of
that token. Who sees 1,024 tokens at a time cannot answer most of these questions, so the network is
trained twice: on sequences cut into pieces of 1,024 tokens, and on whole ones.

The network is one head of softmax attention, written as equations; one matrix reads queries and
keys. All scores of a sequence take 1.1 GB in float32, and its derivative needs several such arrays.
The plan computes them for 512 keys at a time (`stream`) and splits the tokens over the devices
(`context`), where keys and values go around in a ring.

    python examples/recall.py                      # on 8 virtual CPU devices, some minutes
    python examples/recall.py --virtual 0          # on the devices of this machine
    plurax train examples/recall.py --devices 8    # whole sequences alone

Run as a script, it prints how much of held-out sequences each of both networks recalls, and what a
step on a whole sequence takes under three plans. As written it is only compiled.

Shape suffixes: B batch, T tokens that ask, S tokens that are asked, K width of a key, H width of
the head, C values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Int, Key

import plurax as px

KEY, HEAD, VALUES = 32, 32, 16
INPUTS = ("key", "value", "query")

Data = dict[str, np.ndarray]
Params = dict[str, Array]


# --- Sequences --------------------------------------------------------------------------------


def sequences(count: int, tokens: int, seed: int) -> tuple[Data, Int[np.ndarray, "B T"]]:
    """Sequences and, for each token, how many tokens back its answer is."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, tokens, KEY)).astype(np.float32)
    values = rng.integers(VALUES, size=(count, tokens), dtype=np.int32)
    places = np.arange(tokens)
    asked = rng.integers(places + 1, size=(count, tokens))
    rows = np.arange(count)[:, None]
    data = {"key": keys, "value": values, "query": keys[rows, asked], "label": values[rows, asked]}
    return data, places - asked


def pieces(data: Data, tokens: int) -> Data:
    """The same sequences cut into pieces, each of them an example."""
    return {name: x.reshape(-1, tokens, *x.shape[2:]) for name, x in data.items()}


# --- The network ------------------------------------------------------------------------------


def init(key: Key[Array, ""]) -> Params:
    """A matrix for queries and keys, a vector for each value, a matrix for the answers."""
    keys = jax.random.split(key, 3)
    return {
        "match": jax.random.normal(keys[0], (KEY, HEAD)) / math.sqrt(KEY),
        "value": jax.random.normal(keys[1], (VALUES, HEAD)),
        "out": jax.random.normal(keys[2], (HEAD, VALUES)) / math.sqrt(HEAD),
    }


def logits(params: Params, batch: dict[str, Array]) -> Float[Array, "B T C"]:
    """Unnormalised log probabilities of the value that each token asks for."""
    q_BTH = batch["query"] @ params["match"]
    k_BSH = batch["key"] @ params["match"]
    v_BSH = params["value"][batch["value"]]
    scores_BTS = jnp.einsum("bth,bsh->bts", q_BTH, k_BSH) / math.sqrt(HEAD)
    place_T = jnp.arange(q_BTH.shape[1])
    causal_TS = place_T[:, None] >= place_T[None, :]
    weights_BTS = jax.nn.softmax(jnp.where(causal_TS[None], scores_BTS, -jnp.inf))
    return jnp.einsum("bts,bsh->bth", weights_BTS, v_BSH) @ params["out"]


def loss(
    params: Params, batch: dict[str, Array], keys: Key[Array, "B"] | None
) -> tuple[Float[Array, "B"], dict[str, Array]]:
    """Mean cross entropy of each sequence, and the share of its questions answered right."""
    out_BTC = logits(params, batch)
    entropy_BT = optax.softmax_cross_entropy_with_integer_labels(out_BTC, batch["label"])
    right_BT = jnp.argmax(out_BTC, axis=2) == batch["label"]
    return entropy_BT.mean(1), {"accuracy": right_BT.astype(jnp.float32).mean(1)}


def predict(params: Params, inputs: dict[str, Array]) -> Int[Array, "B T"]:
    """The value with which each token is answered."""
    return jnp.argmax(logits(params, inputs), axis=2)


def experiment(
    tokens: int = 16_384, window: int = 0, epochs: int = 3, block: int = 512
) -> px.Experiment:
    """Eight sequences, one in each step, and two held-out ones.

    A `window` cuts them into pieces of so many tokens, and those of one sequence are a step.
    """
    window = window or tokens
    data, held_out = (pieces(sequences(count, tokens, seed)[0], window)
                      for seed, count in enumerate((8, 2)))  # fmt: skip
    return px.Experiment(
        task=px.Task(init=init, loss=loss, predict=predict),
        optimizer=optax.adam(0.03),
        data=data,
        evaluation=held_out,
        plan=px.Plan(context=jax.device_count(), context_strategy="ring", stream=block),
        epochs=epochs,
        batch_size=tokens // window,
        seed=0,
    )


# --- What context buys ------------------------------------------------------------------------


def recalled(made: px.Experiment, tokens: int, near: int) -> list[float]:
    """Train, and return how much of held-out sequences of `tokens` is recalled.

    Of all tokens, of those whose answer is fewer than `near` tokens back, and of the others.
    """
    result = px.fit(**vars(made))
    inputs = {name: made.evaluation[name] for name in INPUTS}
    right = result.program.predict(result.state, inputs) == made.evaluation["label"]
    _, distance = sequences(2, tokens, seed=1)
    right, is_near = np.reshape(right, distance.shape), distance < near
    return [float(shares.mean()) for shares in (right, right[is_near], right[~is_near])]


def costs(made: px.Experiment, plan: px.Plan) -> list[float]:
    """MiB that a step holds on each device beside state and data, and MiB that each sends."""
    batch = {name: x[:1] for name, x in made.data.items()}
    program = px.compile(made.task, made.optimizer, plan, batch)
    sent = sum(one.bytes_sent * one.trips for one in program.collectives())
    return [program.memory().temporaries / 2**20, sent / 2**20]


def main(
    tokens: int = 16_384, window: int = 1024, epochs: int = 3, block: int = 512, virtual: int = 8
) -> None:
    """Train on pieces and on whole sequences, and compare plans.

    **Arguments:** `window`, the tokens of a piece; `block`, the keys that are computed at a time;
    `virtual`, the number of virtual CPU devices, or 0 for the devices of this machine.
    """
    if virtual:
        px.virtual_devices(virtual)
    whole = experiment(tokens, epochs=epochs, block=block)
    cut = experiment(tokens, window, epochs, block)
    few = {name: x[:4] for name, x in cut.data.items()}
    print(px.verify(cut.task, cut.optimizer, whole.plan, few))
    shares = {
        f"pieces of {window:,} tokens": recalled(cut, tokens, window),
        f"sequences of {tokens:,}": recalled(whole, tokens, window),
    }
    print(f"\n{'recalled, trained on':28}{'of all':>10}{f'< {window:,} back':>16}{'others':>10}")
    for name, (everywhere, near, far) in shares.items():
        print(f"{name:28}{everywhere:10.1%}{near:16.1%}{far:10.1%}")
    print(f"\n{f'a step on {tokens:,} tokens':28}{'MiB of a device':>18}{'MiB it sends':>18}")
    for plan in (px.Plan(), px.Plan(stream=block), whole.plan):
        name = f"context={plan.context}, stream={plan.stream}"
        held, sent = costs(whole, plan)
        print(f"{name:28}{held:18,.1f}{sent:18,.1f}")


if __name__ == "__main__":
    tyro.cli(main)
