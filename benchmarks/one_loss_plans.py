"""One small transformer, and the plans that shall train it to one loss.

`benchmarks.one_loss` trains under all of them and draws the losses; `tests/parity/test_one_loss.py`
holds that they agree.

The network is causal, of four layers, on windows of 64 bytes of the text that `help("for")` of
Python prints, with dropout; in the second one a mixture of experts stands in place of each
perceptron: four experts, two for each token, chosen by a router, none dropped, and the loss
balances their load over all tokens of a step. AdamW, a norm of gradients that is clipped, a rate
that rises and falls.

Shape suffixes: B batch, T tokens, D width, H heads, K width of a head, N tokens of the batch,
C choices of all tokens, L layers, S the share and the score of an expert, E experts.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from benchmarks.harness import ROOT

LAYERS, WIDTH, HEADS, HIDDEN, BYTES = 4, 32, 4, 128, 128
EXPERTS, CHOICES, OF_EXPERT = 4, 2, 64
TOKENS, BATCH, RATE, DROPOUT, BALANCE = 64, 8, 3e-3, 0.1, 0.01

# --- The networks ---------------------------------------------------------------------------------


def _drawn(key: Any, shapes: dict[str, tuple[int, ...]], scale: float) -> dict[str, Any]:
    """Normal numbers of all shapes, by one draw: a program with many takes long to compile."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    parts = jnp.split(scale * jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def _normalised(x: Any, gain: Any) -> Any:
    mean = jnp.mean(x**2, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * jnp.expand_dims(gain, (0, 1))


def _kept(keys: Any) -> Any:
    """What dropout keeps of a layer's two results, `(2, B, T, D)`, scaled up; else 0."""

    def of_window(key: Any) -> Any:
        kept = jax.random.bernoulli(key, 1 - DROPOUT, (2, TOKENS, WIDTH))
        return jnp.where(kept, 1 / (1 - DROPOUT), 0.0)

    return jax.vmap(of_window, out_axes=1)(keys)


def _attention(p: Any, x_BTD: Any) -> Any:
    q, k, v = jnp.einsum("btd,dchk->cbthk", x_BTD, p["qkv"])
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(WIDTH // HEADS)
    seen = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["attended"])


def _perceptron(p: Any, x_BTD: Any) -> Any:
    return jax.nn.relu(x_BTD @ p["up"]) ** 2 @ p["down"]


def _mixture(p: Any, x_BTD: Any) -> Any:
    """Each token through two experts: rows in the order of their experts, none is dropped."""
    x_ND = x_BTD.reshape(-1, WIDTH)
    best, which = jax.lax.top_k(jax.nn.softmax(x_ND @ p["router"]), CHOICES)
    order_C = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    token_C = order_C // CHOICES
    rows = x_ND[token_C]
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    weights = (best / best.sum(-1, keepdims=True)).reshape(-1)[order_C]
    return jnp.zeros_like(x_ND).at[token_C].add(y * weights[:, None]).reshape(x_BTD.shape)


def _load(p: Any, x_BTD: Any) -> Any:
    """The share of each expert of a window's choices, and its mean score: `(B, 1, S, E)`."""
    scores = jax.nn.softmax(x_BTD @ p["router"])
    chosen = jax.lax.top_k(scores, CHOICES)[1]
    picked = jax.nn.one_hot(chosen, EXPERTS, dtype=scores.dtype).mean(2)
    return jnp.stack([picked.mean(1), scores.mean(1)], 1)[:, None]


def _perceptron_shapes() -> dict[str, tuple[int, ...]]:
    return {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def _mixture_shapes() -> dict[str, tuple[int, ...]]:
    gate = (EXPERTS, WIDTH, OF_EXPERT)
    down = (EXPERTS, OF_EXPERT, WIDTH)
    return {"router": (WIDTH, EXPERTS), "gate": gate, "up": gate, "down": down}


ATTENTION_RULES = {
    "blocks/qkv": (..., "tensor", None),
    "blocks/attended": (..., "tensor", None, None),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """What stands behind attention in a layer, and the rules that split its weights.

    If `balanced`, the activations between layers are a pair, whose second one is the load of the
    experts of each layer, the last one first: `(B, L, S, E)`.
    """

    mixer: Callable[[Any, Any], Any]
    shapes: Callable[[], dict[str, tuple[int, ...]]]
    rules: dict[str, Any]
    balanced: bool = False

    def task(self) -> px.Task:
        """The whole network."""

        def init_block(key: Any) -> Any:
            shapes = {
                "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
                "attended": (HEADS, WIDTH // HEADS, WIDTH),
                **self.shapes(),
            }
            return _drawn(key, shapes, 0.1) | {"norm": jnp.ones(WIDTH), "second": jnp.ones(WIDTH)}

        def embed(p: Any, batch: Any, keys: Any) -> Any:
            x_BTD = _embed(p, batch)
            loads_BLSE = jnp.zeros((len(x_BTD), LAYERS, 2, EXPERTS), x_BTD.dtype)
            return (x_BTD, loads_BLSE) if self.balanced else x_BTD

        def block(p: Any, x: Any, batch: Any, keys: Any) -> Any:
            x_BTD, loads_BLSE = x if self.balanced else (x, None)
            first, second = _kept(keys)
            x_BTD += first * _attention(p, _normalised(x_BTD, p["norm"]))
            x_BTD = px.sharding.name(x_BTD, "residual")
            normalised = _normalised(x_BTD, p["second"])
            x_BTD += second * self.mixer(p, normalised)
            x_BTD = px.sharding.name(x_BTD, "residual")
            if not self.balanced:
                return x_BTD
            return x_BTD, jnp.concatenate([_load(p, normalised), loads_BLSE[:, :-1]], 1)

        head = px.over_batch(_outputs, _balanced_losses) if self.balanced else _losses
        return px.stack(
            embed=(_init_embed, embed), block=(init_block, block), head=(_init_head, head),
            depth=LAYERS,
        )  # fmt: skip


def _init_embed(key: Any) -> Any:
    return _drawn(key, {"bytes": (BYTES, WIDTH), "places": (TOKENS, WIDTH)}, 1.0)


def _embed(p: Any, batch: Any) -> Any:
    x_BTD = p["bytes"][batch["bytes"]] + p["places"][None]
    return px.sharding.name(x_BTD, "residual")


def _init_head(key: Any) -> Any:
    return {"norm": jnp.ones(WIDTH), **_drawn(key, {"out": (WIDTH, BYTES)}, 0.05)}


def _losses(p: Any, x_BTD: Any, batch: Any, keys: Any) -> Any:
    logits = _normalised(x_BTD, p["norm"]) @ p["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean(1)


def _outputs(p: Any, x: Any, batch: Any, keys: Any) -> Any:
    x_BTD, loads_BLSE = x
    return {"losses": _losses(p, x_BTD, batch, keys), "loads": loads_BLSE}


def _balanced_losses(outputs: Any, batch: Any, mask: Any) -> Any:
    """The losses, and for each expert of each layer its share times its score, of all tokens."""
    real = mask.astype(outputs["loads"].dtype)
    loads_LSE = jnp.einsum("b,blse->lse", real / real.sum(), outputs["loads"])
    return outputs["losses"] + BALANCE * EXPERTS * (loads_LSE[:, 0] * loads_LSE[:, 1]).sum()


DENSE = {"blocks/up": (..., "tensor"), "blocks/down": (..., "tensor", None)}
BY_EXPERT = {f"blocks/{name}": (..., "tensor", None, None) for name in ("gate", "up", "down")}
NETWORKS = {
    "dense": Network(_perceptron, _perceptron_shapes, ATTENTION_RULES | DENSE),
    "experts": Network(_mixture, _mixture_shapes, ATTENTION_RULES | BY_EXPERT, balanced=True),
}


def data(steps: int) -> dict[str, np.ndarray]:
    """Windows of text and the bytes that follow each: `(steps * BATCH, TOKENS)`, int32."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    rows = np.frombuffer(text, np.uint8)[: steps * BATCH * TOKENS + 1].astype(np.int32)
    shape = steps * BATCH, TOKENS
    return {"bytes": rows[:-1].reshape(shape), "next": rows[1:].reshape(shape)}


def optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW, its gradients clipped, its rate warmed up and decayed over so many steps."""
    rate = optax.warmup_cosine_decay_schedule(RATE / 10, RATE, steps // 10, steps, RATE / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


# --- The plans ------------------------------------------------------------------------------------

RING, GATHER, IN_HEADS = (
    {"context_strategy": strategy, "stream": 32} for strategy in ("ring", "gather", "heads")
)
BY_HAND = ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    **Fields:** `family`, under which it is drawn; `fields` of the plan, without rules; `said`, what
    the fields do not say; `sequence`, whether activations between layers are split by token;
    `owners`, whether experts are split over `data`, so that tokens are sent to them; `members` of
    the population of which it is the first; `servers`; `processes` that train together; `dense` and
    `experts`, which networks are trained so.
    """

    family: str
    fields: dict[str, Any]
    said: str = ""
    sequence: bool = False
    owners: bool = False
    members: int = 0
    servers: px.Servers | None = None
    processes: int = 1
    dense: bool = True
    experts: bool = True

    @property
    def sizes(self) -> str:
        """The fields as text, without a schedule by hand."""
        shown = {key: value for key, value in self.fields.items() if value is not BY_HAND}
        return px.Plan(**shown).sizes_text()

    @property
    def name(self) -> str:
        """What tests call it."""
        return ": ".join(text for text in (self.said, self.sizes) if text)

    def plan(self, network: Network) -> px.Plan:
        """The plan for a network: with `tensor`, its rules."""
        rules = dict(network.rules) if self.fields.get("tensor", 1) > 1 else {}
        if self.sequence:
            rules["residual"] = (..., "tensor", None)
        if self.owners:
            rules |= dict.fromkeys(BY_EXPERT, (..., "data", None, None))
        return px.Plan(**self.fields, shardings=rules)


def _servers(workers: int, shards: int) -> px.Servers:
    return px.Servers(workers=workers, shards=shards, mode="sync", transport="threads")


WAYS = (
    Way("one device", {}),
    Way("one device", {"microbatches": 4}),
    Way("one device", {"remat": "dots"}, experts=False),
    Way("one device", {"remat": "full"}),
    Way("one device", {"stream": 32}, experts=False),
    Way("data", {"data": 2}, experts=False),
    Way("data", {"data": 3, "microbatches": 2}, "rows that do not divide"),
    Way("data", {"data": 2, "microbatches": (3, 1)}, "unequal devices", experts=False),
    Way("data", {"data": 4}, experts=False),
    Way("data", {"data": 8}),
    Way("ZeRO", {"data": 8, "zero": 1}, experts=False),
    Way("ZeRO", {"data": 4, "zero": 2, "microbatches": 2}, experts=False),
    Way("ZeRO", {"data": 8, "zero": 3}),
    Way("tensor", {"tensor": 4}),
    Way("tensor", {"tensor": 4}, "activations by token", sequence=True),
    Way("context", {"context": 4, **RING}),
    Way("context", {"context": 8, **RING}, experts=False),
    Way("context", {"context": 4, **GATHER}, experts=False),
    Way("context", {"context": 4, **IN_HEADS}, experts=False),
    Way("pipelines", {"pipeline": 4, "microbatches": 4, "schedule": "gpipe"}, experts=False),
    Way("pipelines", {"pipeline": 4, "microbatches": 4}, experts=False),
    Way("pipelines", {"pipeline": 4, "microbatches": 8, "schedule": "eager-1f1b"}, experts=False),
    Way("pipelines", {"pipeline": 2, "microbatches": 4, "schedule": "interleaved"}),
    Way("pipelines", {"pipeline": 4, "microbatches": 4, "schedule": "zb-h1"}),
    Way("pipelines", {"pipeline": 2, "microbatches": 4, "layers": (1, 3)}, experts=False),
    Way("pipelines", {"pipeline": 2, "microbatches": 4, "schedule": BY_HAND}, "schedule by hand",
        experts=False),
    Way("experts over data", {"data": 4}, "experts over `data`", owners=True, dense=False),
    Way("experts over data", {"data": 2, "tensor": 2, "zero": 3}, "experts over `data`",
        owners=True, dense=False),
    Way("hybrids", {"data": 2, "tensor": 4}),
    Way("hybrids", {"data": 2, "tensor": 2, "zero": 3, "microbatches": 2, "remat": "full"}),
    Way("hybrids", {"data": 2, "context": 4, **RING, "zero": 3}),
    Way("hybrids", {"data": 2, "context": 2, "tensor": 2, **GATHER, "zero": 1}, experts=False),
    Way("hybrids", {"data": 2, "pipeline": 4, "microbatches": 2, "zero": 2}, experts=False),
    Way("hybrids", {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 2, "zero": 1}),
    Way("hybrids", {"pipeline": 2, "context": 2, "tensor": 2, "microbatches": 2, **IN_HEADS,
                    "schedule": "zb-h1"}, experts=False),
    Way("members", {"chunk": 2, "batch_dim": "major"}, "the first of two members", members=2),
    Way("members", {"member": 2, "data": 2, "zero": 1, "chunk": 1}, "the first of two members",
        members=2, experts=False),
    Way("servers", {}, "servers in sync, two workers", servers=_servers(2, 2), experts=False),
    Way("servers", {"data": 2, "zero": 2}, "servers in sync, three workers",
        servers=_servers(3, 1), experts=False),
    Way("two processes", {"data": 8, "zero": 1}, "two processes", processes=2),
    Way("two processes", {"tensor": 2}, "two processes", processes=2, experts=False),
    Way("two processes", {"pipeline": 2, "microbatches": 4}, "two processes", processes=2,
        experts=False),
)  # fmt: skip
DEVICES = 8
"""Virtual devices, all processes together."""


def ways(network: str) -> dict[str, Way]:
    """Those that train a network, by name; the first is one device."""
    return {way.name: way for way in WAYS if getattr(way, network)}


# --- Training -------------------------------------------------------------------------------------


class _Losses:
    """Collects the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, run: Any, row: dict[str, Any]) -> None:
        self.losses.append(row["loss"])


def train(network: str, way: Way, steps: int) -> list[float]:
    """Return the loss of each step, in the precision that JAX is set to."""
    taken = NETWORKS[network]
    if way.members:
        return _train_members(taken, way, steps)
    collected = _Losses()
    px.fit(
        taken.task(), optimizer(steps), data(steps), plan=way.plan(taken), batch_size=BATCH,
        shuffle=False, servers=way.servers, callbacks=[collected], progress=False,
    )  # fmt: skip
    assert len(collected.losses) == steps
    return collected.losses


def _train_members(network: Network, way: Way, steps: int) -> list[float]:
    """A loop of its own: `fit` logs the median of all members for each step."""
    rows = data(steps)
    batches = [{name: array[at : at + BATCH] for name, array in rows.items()}
               for at in range(0, steps * BATCH, BATCH)]  # fmt: skip
    program = px.compile(
        network.task(), optimizer(steps), way.plan(network), batches[0],
        members=px.Members(way.members),
    )  # fmt: skip
    state, losses = program.init(), []
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(metrics["loss"])
    return [float(each[0]) for each in losses]


def train_in_processes(
    pairs: Sequence[tuple[str, str]], steps: int, float64: bool
) -> dict[str, dict[str, list[float]]]:
    """Return the losses of each network under each way of several processes, here on this machine.

    `plurax launch` starts the two that train all of `pairs`, of a network and the name of a way.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "losses.json")
        asked = {"pairs": pairs, "steps": steps, "float64": float64, "path": str(path)}
        here = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "plurax", "launch", "--processes", "2", "--devices",
             str(DEVICES // 2), "--restarts", "0", "--", __file__, json.dumps(asked)],
            env={**os.environ, "PYTHONPATH": here}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"two processes did not train:\n{done.stdout}{done.stderr}")
        return json.loads(path.read_text())


def _trained_together(asked: dict[str, Any]) -> None:
    """What each of the processes does."""
    px.initialize()
    jax.config.update("jax_enable_x64", asked["float64"])
    found: dict[str, dict[str, list[float]]] = {}
    for network, name in asked["pairs"]:
        losses = train(network, ways(network)[name], asked["steps"])
        found.setdefault(network, {})[name] = losses
    if jax.process_index() == 0:
        Path(asked["path"]).write_text(json.dumps(found))


if __name__ == "__main__":
    _trained_together(json.loads(sys.argv[1]))
