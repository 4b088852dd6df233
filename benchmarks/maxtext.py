"""A step beside MaxText's own `train_compile`, compiled for TPUs that are not here.

    python -m benchmarks.maxtext                 all rows, into benchmarks/results/maxtext.json
    python -m benchmarks.maxtext --plans zero3 data --machines v5e:2x4 --texts FOLDER

Both sides train one network: the decoder of Llama 2 as MaxText configures it, or that of Mixtral
with its experts, here written in plain JAX. Sizes, global batch, remat, dtypes and optimizer are
the same; the numbers of parameters are compared. Both texts are read by one walk, that of
`plurax.analysis.compiled_for`: see `benchmarks.absent`. MaxText needs Python 3.12 and a newer JAX
than plurax does on 3.11, so both sides run in its environment, which `make bench-maxtext` installs.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import plurax as px
from benchmarks.absent import read_program
from benchmarks.harness import ROOT
from benchmarks.report import fill
from plurax.hlo.memory import Memory, memory
from plurax.targets import Target

GUIDE = ROOT / "docs" / "guides" / "compile-for.md"
STORED = Path(__file__).parent / "results" / "maxtext.json"
EXPERTS = ("gate", "up", "down")
CHOICES = 2
INSTALL = (
    "MaxText is not installed for {python}: `make bench-maxtext` installs it for Python 3.12, "
    "outside of the checkout, and runs this there"
)
# As MaxText's base.yml has them.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 3e-5, 15_000, 150_000, 3e-6),
        b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Llama:
    """A decoder of Llama 2 in bfloat16 whose layers are scanned; parameters are float32.

    **Fields:** `width` of the residual stream, `hidden` of an MLP, `depth`, `heads` of
    `width / heads` each, `words` of the vocabulary, `tokens` of an example, `rows` of a device;
    `experts`, MLPs in a layer of which each token takes `CHOICES`, as Mixtral has; 1: none.
    """

    width: int
    hidden: int
    depth: int
    heads: int
    words: int
    tokens: int
    rows: int
    experts: int = 1

    def init(self, key: Any) -> Any:
        """Return the parameters, layers stacked."""
        table, head, layers = jax.random.split(key, 3)
        return {
            "table": jax.random.normal(table, (self.words, self.width)),
            "layers": jax.vmap(self.init_layer)(jax.random.split(layers, self.depth)),
            "norm": jnp.ones(self.width),
            "head": jax.random.normal(head, (self.width, self.words)) * self.width**-0.5,
        }

    def init_layer(self, key: Any) -> Any:
        """Return the parameters of one layer. Queries start divided by the root of their size."""
        width, heads, size = self.width, self.heads, self.width // self.heads
        shapes = {
            "query": (width, heads, size), "key": (width, heads, size),
            "value": (width, heads, size), "out": (heads, size, width),
            "gate": (width, self.hidden), "up": (width, self.hidden), "down": (self.hidden, width),
        }  # fmt: skip
        if self.experts > 1:
            shapes |= {name: (self.experts, *shapes[name]) for name in EXPERTS}
            shapes["router"] = (width, self.experts)
        keys = jax.random.split(key, len(shapes))
        weights = {
            name: jax.random.normal(key, shape) * width**-0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        weights["query"] *= size**-0.5
        return {**weights, "norms": jnp.ones((2, width))}

    def layer(self, p: Any, x: jax.Array, batch: Any) -> jax.Array:
        """Return activations `(B, T, D)` after one layer; rules may split `residual` by tokens."""
        x = px.sharding.name(x, "residual")
        h = normed(x, p["norms"][0])
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", h, p[name].astype(x.dtype))
            for name in ("query", "key", "value")
        )
        q, k = (rotated(a, batch["inputs_position"]) for a in (q, k))
        segments = batch["inputs_segmentation"]
        same = segments[:, :, None] == segments[:, None, :]
        mask = (same & jnp.tril(jnp.ones((self.tokens, self.tokens), bool)))[:, None]
        scores = jnp.where(mask, jnp.einsum("bthk,bshk->bhts", q, k), jnp.asarray(-2e38, x.dtype))
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
        mixed /= weights.sum(-1, keepdims=True).transpose(0, 2, 1, 3)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"].astype(x.dtype))
        x = px.sharding.name(x, "residual")
        h = normed(x, p["norms"][1])
        if self.experts > 1:
            return x + mixture(p, h)
        gate, up = (h @ p[name].astype(x.dtype) for name in ("gate", "up"))
        return x + (jax.nn.silu(gate) * up) @ p["down"].astype(x.dtype)

    def loss(self, p: Any, batch: Any, keys: Any) -> jax.Array:
        """Return losses `(B,)`, of each example the mean over its tokens."""
        x = p["table"].astype(jnp.bfloat16)[batch["inputs"]]
        x, _ = jax.lax.scan(lambda x, p: (self.layer(p, x, batch), None), x, p["layers"])
        x = normed(x, p["norm"])
        logits = (x @ p["head"].astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weights = batch["targets_segmentation"] != 0
        return (losses * weights).sum(-1) / jnp.maximum(weights.sum(-1), 1)

    def task(self) -> px.Task:
        """Return the task. An example weighs as much as it has tokens."""
        return px.Task(
            init=self.init,
            loss=self.loss,
            weight=lambda batch: (batch["targets_segmentation"] != 0).sum(-1).astype(jnp.float32),
        )

    def batch(self, devices: int) -> Any:
        """Return the shapes of a batch, as MaxText's data pipelines give it."""
        shape = jax.ShapeDtypeStruct((self.rows * devices, self.tokens), jnp.int32)
        names = ("inputs", "inputs_position", "inputs_segmentation", "targets")
        return dict.fromkeys((*names, "targets_segmentation"), shape)

    def settings(self, attention: str) -> dict[str, Any]:
        """Return MaxText's settings for this network, with one of its ways to compute attention."""
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": CHOICES,
            "base_moe_mlp_dim": self.hidden,
            "megablox": False,
        }
        return {
            "decoder_block": "llama2" if self.experts == 1 else "mixtral",
            **(experts if self.experts > 1 else {}),
            "base_emb_dim": self.width,
            "base_mlp_dim": self.hidden,
            "base_num_decoder_layers": self.depth,
            "base_num_query_heads": self.heads,
            "base_num_kv_heads": self.heads,
            "head_dim": self.width // self.heads,
            "vocab_size": self.words,
            "max_target_length": self.tokens,
            "attention": attention,
        }


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return activations divided by their root mean square, in their own dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Return heads `(B, T, H, K)` rotated by their positions `(B, T)` (rotary embedding)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * rates
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def mixture(p: Any, x: jax.Array) -> jax.Array:
    """Return `(B, T, D)`, each token by its experts: rows sorted, none dropped."""
    weights, which = jax.lax.top_k(x @ p["router"].astype(x.dtype), CHOICES)
    weights = jax.nn.softmax(weights.astype(jnp.float32)).astype(x.dtype)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=p["router"].shape[1])
    rows = x.reshape(-1, x.shape[-1])[order // CHOICES]
    gate, up = (jax.lax.ragged_dot(rows, p[name].astype(x.dtype), sizes) for name in ("gate", "up"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"].astype(x.dtype), sizes)
    y = y[jnp.argsort(order)].reshape(*x.shape[:2], CHOICES, -1)
    return jnp.einsum("btkd,btk->btd", y, weights)


# --- Rows -----------------------------------------------------------------------------------------

SIZES = {
    "v5e:2x4": Llama(width=1024, hidden=4096, depth=8, heads=8, words=8192, tokens=1024, rows=8),
    "v5p:2x2x2": Llama(
        width=2048, hidden=7168, depth=16, heads=16, words=32_000, tokens=2048, rows=4
    ),
}
"""By machine, sizes that it can train. On v5p they are MaxText's own, with a smaller batch."""

LONG: dict[str, Any] = {"tokens": 8192, "rows": 1}
MIXED: dict[str, Any] = {"hidden": 2048, "experts": 8, "rows": 4}
OTHER_SIZES = {"context": LONG, "experts": MIXED}
"""By plan, what is otherwise than in `SIZES`: longer sequences, or experts."""

AXES = ("data", "fsdp", "context", "tensor", "expert")
"""MaxText's mesh axes that rows split something over, in its order."""

TOPOLOGIES = {"v5e:2x4": "v5e-8", "v5p:2x2x2": "v5p-16"}
"""Machines by MaxText's names, which count cores."""

PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero3": ({"zero": 3}, {"fsdp": 8}),
    "zero3, two microbatches": ({"zero": 3, "microbatches": 2}, {"fsdp": 8, "accumulate": 2}),
    "data": ({}, {"data": 8}),
    "zero1": ({"zero": 1}, {"data": 8, "zero1": True}),
    "tensor": ({"tensor": 4}, {"data": 2, "tensor": 4}),
    "context": (
        {"zero": 3, "context": 4, "stream": 1024},
        {"fsdp": 2, "context": 4, "attention": "flash"},
    ),
    "experts": (
        {
            "zero": 3,
            "shardings": {f"layers/{name}": (None, "data", None, None) for name in EXPERTS},
        },
        {"expert": 8},
    ),
}
"""Fields of plurax's plan, over as many devices as remain, and what MaxText is told."""


def model_of(machine: str, name: str) -> Llama:
    """Return the network of a row."""
    return dataclasses.replace(SIZES[machine], **OTHER_SIZES.get(name, {}))


def make_plan(fields: Mapping[str, Any], devices: int, **more: Any) -> px.Plan:
    """Return the plan of these fields over so many devices, with full remat."""
    fields = {**fields, **more}
    if "tensor" in fields:
        fields["shardings"] = px.sharding.megatron(
            column={
                **dict.fromkeys(("layers/query", "layers/key", "layers/value"),
                                (..., "tensor", None)),
                **dict.fromkeys(("layers/gate", "layers/up"), (..., "tensor")),
            },
            row={"layers/out": (..., "tensor", None, None), "layers/down": (..., "tensor", None)},
            head=["head"],
            # As MaxText's activations are between the products.
            sequence=["residual"],
        ) | {"table": ("tensor", None)}  # fmt: skip
    others = fields.get("tensor", 1) * fields.get("context", 1)
    return px.Plan(data=devices // others, remat="full", **fields)


def maxtext_settings(machine: str, model: Llama, told: Mapping[str, Any]) -> list[str]:
    """Return the arguments of MaxText's `train_compile` for a row."""
    pieces = told.get("accumulate", 1)
    settings = {
        **model.settings(told.get("attention", "dot_product")),
        "run_name": "plurax",
        "compile_topology": TOPOLOGIES[machine],
        "compile_topology_num_slices": 1,
        "per_device_batch_size": model.rows // pieces,
        "gradient_accumulation_steps": pieces,
        "remat_policy": "full",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "jax_cache_dir": "",
        "ici_data_parallelism": told.get("data", 1),
        "ici_fsdp_parallelism": told.get("fsdp", 1),
        "ici_context_parallelism": told.get("context", 1),
        "ici_tensor_parallelism": told.get("tensor", 1),
        "ici_expert_parallelism": told.get("expert", 1),
        "shard_optimizer_over_data": told.get("zero1", False),
    }
    return [f"{name}={value}" for name, value in settings.items()]


# --- Both sides -----------------------------------------------------------------------------------


def by_maxtext(machine: str, model: Llama, told: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a row by MaxText, in a process of its own, and return what `compiled` does."""
    arguments = maxtext_settings(machine, model, told)
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, "-m", "benchmarks.workers.maxtext_compile", folder, *arguments]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            # From the second row on this process has the library of TPUs loaded, too.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        done = subprocess.run(
            worker, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            lines = (done.stdout + done.stderr).strip().splitlines()[-20:]
            raise SystemExit("\n".join(["MaxText's train_compile failed:", *lines]))
        answer: dict[str, Any] = json.loads(answer.read_text())
    axes = {name: told.get(name, 1) for name in AXES}
    devices = np.array(Target.of(machine).devices()).reshape(tuple(axes.values()))
    return answer | {"memory": Memory(**answer["memory"]), "mesh": Mesh(devices, tuple(axes))}


def by_plurax(machine: str, model: Llama, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a row by plurax.

    Return the `text` of the program, its `memory` and `mesh`, the `flops` that the compiler counts,
    the number of `parameters` and the `seconds` of compiling.
    """
    devices = Target.of(machine).devices()
    plan, batch = make_plan(fields, len(devices)), model.batch(len(devices))
    started = time.perf_counter()
    program = px.compile(model.task(), OPTIMIZER, plan, batch, devices=devices)
    compiled = program.compiled_step
    seconds = time.perf_counter() - started
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return {
        "seconds": seconds,
        "text": compiled.as_text() or "",
        "memory": memory(compiled),
        "mesh": program.mesh,
        "flops": compiled.cost_analysis()["flops"],
        "parameters": sum(math.prod(one.shape) for one in shapes),
    }


def figures(compiled: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return what is compared of a side: a loop counts as often as it runs, except in `gflop`.

    Seconds of a kernel are not known to the compiler: those of its step are None.
    """
    held = compiled["memory"]
    unknown = dict.fromkeys(("hidden", "step_ms", "computing_ms"))
    return {
        "arguments_mib": held.arguments / 2**20,
        **read_program(compiled["text"], held, compiled["mesh"], target),
        **(unknown if "tpu_custom_call" in compiled["text"] else {}),
        "gflop": compiled["flops"] / 1e9,
        "parameters": compiled["parameters"],
        "seconds": compiled["seconds"],
    }


def measure(machine: str, name: str, texts: Path | None = None) -> dict[str, dict[str, Any]]:
    """Compile a row by both sides; by plurax with sums in float32 and in bfloat16.

    MaxText's are in bfloat16 where the compiler moves a cast before the reduction.
    """
    fields, told = PLANS[name]
    model = model_of(machine, name)
    narrow = {**fields, "reduce_dtype": "bfloat16"}
    sides = {
        "MaxText": by_maxtext(machine, model, told),
        "plurax": by_plurax(machine, model, fields),
        "plurax, sums in bfloat16": by_plurax(machine, model, narrow),
    }
    counts = {side: compiled["parameters"] for side, compiled in sides.items()}
    assert len(set(counts.values())) == 1, f"the sides train different networks: {counts}"
    if texts:
        for side, compiled in sides.items():
            (texts / f"{machine} {name} {side}.txt").write_text(compiled["text"])
    return {side: figures(compiled, Target.of(machine)) for side, compiled in sides.items()}


# --- The table ------------------------------------------------------------------------------------


SIDES = ("plurax", "plurax, sums in bfloat16", "MaxText")


def _figure(value: float | None, scale: float, digits: int) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def table(stored: Mapping[str, Any]) -> str:
    """Return the table of stored rows, each figure by `SIDES`."""
    lines = [
        "| machine | plan | temporaries, MiB | sent, MiB | hidden, % | a step, estimated, ms |",
        "|---|---|---|---|---|---|",
    ]
    for machine, rows in stored["rows"].items():
        for name, row in rows.items():
            columns = (
                " / ".join(_figure(row[side][figure], scale, digits) for side in SIDES)
                for figure, scale, digits in (
                    ("temporaries_mib", 1, 0), ("sent_mib", 1, 0), ("hidden", 100, 0),
                    ("step_ms", 1, 1),
                )
            )  # fmt: skip
            lines.append(f"| `{machine}` | {name} | {' | '.join(columns)} |")
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    days = sorted({day for rows in stored["dates"].values() for day in rows.values()})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return "\n".join([*lines, "", f"Compiled on {when} with {versions}."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each machine, plan and side in JSON, and store all of them.

    The table of the guide is written anew where they are stored in the usual file.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maxtext", description=__doc__)
    parser.add_argument("--machines", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--output", type=Path, default=STORED)
    parser.add_argument("--texts", type=Path, help="a folder for the compiled programs' texts")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("maxtext") is None:
        parser.exit(2, INSTALL.format(python=sys.executable) + "\n")
    jax.config.update("jax_platforms", "cpu")
    stored = json.loads(options.output.read_text()) if options.output.exists() else {}
    packages = ("maxtext", "jax", "libtpu", "flax", "optax")
    stored["versions"] = {name: importlib.metadata.version(name) for name in packages}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for machine in options.machines:
        for name in options.plans:
            found = measure(machine, name, options.texts)
            stored.setdefault("rows", {}).setdefault(machine, {})[name] = found
            stored.setdefault("dates", {}).setdefault(machine, {})[name] = today
            for side, values in found.items():
                line = {"machine": machine, "plan": name, "side": side, **values}
                print(json.dumps(line), flush=True)
            options.output.write_text(json.dumps(stored, indent=2) + "\n")
    if options.output == STORED:
        fill(GUIDE, table(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
