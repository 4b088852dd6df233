"""The best plan of one block of a transformer, searched anew in each unit of work.

The block is that of `autoparallel_search`. Side `mesh given` has its mesh, where the search finds
ZeRO, the shardings and their estimates; side `search` finds the sizes of the mesh too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

import plurax as px
from benchmarks.workers.serve import Settings, Side, serve

Params = dict[str, Array]


def build(settings: Settings) -> tuple[dict[str, Side], dict[str, Any]]:
    shape = (settings["batch"], settings["tokens"], settings["width"])
    per_node = settings["devices"] // settings["nodes"]
    machine = px.Machine.preset(f"{per_node}xH100-80GB", settings["nodes"])
    sizes = dict(zip(("tensor", "data"), reversed(settings["mesh"]), strict=False))
    pinned = {"pipeline": 1, "microbatches": 1, "remat": "none"}
    plans: dict[str, str] = {}

    def search(side: str, pinned: dict[str, Any], units: int) -> None:
        for _ in range(units):
            found = px.search(
                _block(settings["width"], settings["heads"]),
                optax.sgd(0.1),
                {"x": jax.ShapeDtypeStruct(shape, jnp.float32)},
                machine,
                pinned=pinned,
            )
            plans[side] = found.best.sizes_text()

    sides: dict[str, Side] = {
        "search": functools.partial(search, "search", pinned),
        "mesh given": functools.partial(search, "mesh given", {"data": 1} | pinned | sizes),
    }
    for side in sides.values():
        side(1)  # what is imported and traced for the first time
    return sides, {"plans": plans}


def _block(width: int, heads: int) -> px.Task:
    """Attention, then a perceptron with ReLU, each added to its input; the loss is the mean."""
    shapes = {
        **dict.fromkeys(("q", "k", "v", "out"), (width, width)),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        return {
            name: 0.02 * jax.random.normal(one, shape)
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def losses(params: Params, batch: Params, keys: Any) -> Array:
        x_BTD = batch["x"]
        q, k, v = (
            (x_BTD @ params[name]).reshape(*x_BTD.shape[:2], heads, -1) for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
        x_BTD = x_BTD + mixed.reshape(x_BTD.shape) @ params["out"]
        x_BTD = x_BTD + jax.nn.relu(x_BTD @ params["up"]) @ params["down"]
        return x_BTD.mean((1, 2))

    return px.Task(init=init, loss=losses)


if __name__ == "__main__":
    serve(build)
