"""Memory of a step as planned, beside what the compilers of machines that are not here allocate.

    python -m benchmarks.absent_memory                      plan all rows, by stored compiled bytes
    python -m benchmarks.absent_memory --compile            compile them anew, and store the bytes
    python -m benchmarks.absent_memory --compile 8xH100 --rows gpt/data mlp/zero3

A row is a model under a plan. `temporaries` are what the compiler allocates beside arguments and
results; the peak is arguments + temporaries + outputs - aliased. Of TPUs they are read from the
compiler's table of buffers, since it reports more than these. Rules are written by looking at
`ROWS`; those of `CHECKED` are kept aside. A row with the name of an optimizer, `gru/zero 1/adamw`,
was drawn from other models and plans (`benchmarks.absent_models`). To compile all takes about an
hour on two cores, where the compilers are installed: pip install 'plurax[tpu,cuda]'. Planning needs
none of them.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import plurax as px
from benchmarks import absent, absent_models, gpt
from benchmarks.absent_models import matrices
from plurax.execute.recorder import record_step
from plurax.targets import Target
from plurax.trace.liveness import peak_bytes

STORED = Path(__file__).parent / "results" / "absent-memory.json"
MACHINES = ("8xH100", "v5p:2x2x2", "v5e:2x4")
OPTIMIZER = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class Model:
    """A task, the shapes of a batch for eight devices, and how it is split over `tensor`."""

    task: px.Task
    batch: Any
    shardings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sequence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def shapes(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of a batch."""
    return jax.ShapeDtypeStruct(shape, dtype)


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return losses `(B,)` of logits `(B, V)`."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# --- Models ---------------------------------------------------------------------------------------

GPT = gpt.Gpt(depth=6, width=768, heads=12, vocabulary=8192, tokens=512)


def scanned_gpt() -> Model:
    """GPT, its layers scanned."""
    return Model(GPT.task(), GPT.batch(64), gpt.MEGATRON)


def unrolled_gpt() -> Model:
    """GPT of three layers, written out."""
    sizes = {
        "qkv": (768, 3, 12, 64), "out": (12, 64, 768), "mlp_in": (768, 3072), "mlp_out": (3072, 768)
    }  # fmt: skip

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, 4)
        bias = {"mlp_bias": jnp.zeros(3072), "norm1": jnp.ones(768), "norm2": jnp.ones(768)}
        layers = [{**matrices(key, sizes), **bias} for key in keys]
        return {
            **matrices(top, {"table": (8192, 768), "position": (512, 768)}),
            "layers": layers,
            "norm": jnp.ones(768),
        }

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = gpt.embed(params, batch, keys)
        for layer in params["layers"]:
            x = gpt.block(layer, x, batch, keys)
        return gpt.losses(params, x, batch, keys)

    rules = {
        f"layers/*/{name.removeprefix('blocks/')}": spec[1:]
        for name, spec in gpt.MEGATRON.items()
        if name.startswith("blocks/")
    }
    return Model(px.Task(init=init, loss=loss), GPT.batch(64), {"table": ("tensor", None), **rules})


def vit() -> Model:
    """A vision transformer of four layers, written out, on 197 tokens."""
    width, heads = 384, 6
    sizes = {
        "qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width),
        "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, 5)
        outer = {"patch": (768, width), "position": (197, width), "head": (width, 1000)}
        norms = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
        return {
            **matrices(top, {**outer, "token": (1, width)}),
            "layers": [{**matrices(key, sizes), **norms} for key in keys],
        }

    def layer(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.einsum("btd,dchk->cbhtk", gpt.norm(x, p["norm1"]), p["qkv"])
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * (width // heads) ** -0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
        x = x + jnp.einsum("bhtk,hkd->btd", jnp.einsum("bhts,bhsk->bhtk", weights, v), p["out"])
        return x + jax.nn.gelu(gpt.norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        rows = batch["image"].shape[0]
        x = batch["image"].reshape(rows, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(rows, 196, 768) @ params["patch"]
        first = jnp.broadcast_to(params["token"], (rows, 1, width)).astype(x.dtype)
        x = jnp.concatenate([first, x], axis=1) + params["position"]
        for p in params["layers"]:
            x = layer(p, x)
        return entropy(x[:, 0] @ params["head"], batch["label"])

    batch = {"image": shapes(128, 224, 224, 3), "label": shapes(128, dtype=jnp.int32)}
    rules = {
        "layers/*/qkv": (None, None, "tensor", None), "layers/*/out": ("tensor", None, None),
        "layers/*/up": (None, "tensor"), "layers/*/down": ("tensor", None),
    }  # fmt: skip
    return Model(px.Task(init=init, loss=loss), batch, rules)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Return a convolution of images, channels last."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def group_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return images normalised over pixels and groups of 16 channels."""
    shape = x.shape
    x32 = x.reshape(*shape[:3], -1, 16).astype(jnp.float32)
    x32 -= x32.mean((1, 2, 4), keepdims=True)
    x32 *= jax.lax.rsqrt(jnp.mean(x32**2, (1, 2, 4), keepdims=True) + 1e-5)
    return x32.reshape(shape).astype(x.dtype) * gain


def resnet() -> Model:
    """A residual network of convolutions with group norm, on images of 64 x 64."""
    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2)]

    def init(key: Any) -> Any:
        top, *keys = jax.random.split(key, 1 + len(stages))
        blocks = []
        for key, (rows, columns, _) in zip(keys, stages, strict=True):
            sizes = {
                "first": (3, 3, rows, columns), "second": (3, 3, columns, columns),
                "skip": (1, 1, rows, columns),
            }  # fmt: skip
            norms = {"norm1": jnp.ones(columns), "norm2": jnp.ones(columns)}
            blocks.append({**matrices(key, sizes), **norms})
        return {**matrices(top, {"stem": (3, 3, 3, 64), "head": (256, 10)}), "blocks": blocks}

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = conv(batch["image"], params["stem"])
        for p, (_, _, stride) in zip(params["blocks"], stages, strict=True):
            y = jax.nn.relu(group_norm(conv(x, p["first"], stride), p["norm1"]))
            y = group_norm(conv(y, p["second"]), p["norm2"])
            x = jax.nn.relu(conv(x, p["skip"], stride) + y)
        return entropy(x.mean((1, 2)) @ params["head"], batch["label"])

    batch = {"image": shapes(256, 64, 64, 3), "label": shapes(256, dtype=jnp.int32)}
    return Model(px.Task(init=init, loss=loss), batch)


def mlp() -> Model:
    """Six dense layers with biases."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 6)
        widths = [512, 2048, 2048, 2048, 2048, 2048, 128]
        return [
            {**matrices(key, {"w": pair}), "b": jnp.zeros(pair[1])}
            for key, pair in zip(keys, itertools.pairwise(widths), strict=True)
        ]

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        h = batch["x"]
        for p in params[:-1]:
            h = jax.nn.gelu(h @ p["w"] + p["b"])
        return jnp.mean((h @ params[-1]["w"] + params[-1]["b"] - batch["y"]) ** 2, axis=1)

    columns, rows = (..., "tensor"), ("tensor", None)
    rules: dict[str, Any] = {"0/*": columns, "2/*": columns, "4/*": columns}
    rules |= {"1/w": rows, "3/w": rows, "5/w": rows}
    return Model(
        px.Task(init=init, loss=loss), {"x": shapes(16384, 512), "y": shapes(16384, 128)}, rules
    )


# --- Kept aside -----------------------------------------------------------------------------------


def transformer() -> Model:
    """The transformer of `benchmarks.absent`: layers scanned, activations in bfloat16."""
    model = absent.Transformer()
    return Model(px.Task(init=model.init, loss=model.loss), model.batch(64))


def language_model() -> Model:
    """The example: dropout, shards of tokens between layers under sequence parallelism."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "language_model.py"))
    batch = {"bytes": shapes(64, 513, dtype=jnp.uint8), "count": shapes(64, dtype=jnp.int32)}
    task = example["make_task"](512, 4, 8, 512)
    return Model(task, batch, example["shardings"](False), example["shardings"](True))


def lstm() -> Model:
    """A recurrent network: a loop over time."""

    def init(key: Any) -> Any:
        return matrices(
            key, {"embed": (1024, 512), "x": (512, 2048), "h": (512, 2048), "head": (512, 1024)}
        )

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        x = params["embed"][batch["words"]].swapaxes(0, 1)

        def turn(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(x.shape[1:], x.dtype)
        _, h = jax.lax.scan(turn, (zeros, zeros), x)
        return entropy(h.swapaxes(0, 1) @ params["head"], batch["words"]).mean(1)

    return Model(px.Task(init=init, loss=loss), {"words": shapes(512, 128, dtype=jnp.int32)})


def unet() -> Model:
    """Convolutions down and up again, what was there on the way down joined on the way up."""
    sizes = {
        "stem": (3, 3, 3, 64), "down": (3, 3, 64, 128), "deep": (3, 3, 128, 128),
        "up": (3, 3, 192, 64), "head": (3, 3, 64, 3),
    }  # fmt: skip

    def loss(params: Any, batch: Any, keys: Any) -> jax.Array:
        first = jax.nn.silu(conv(batch["image"], params["stem"]))
        x = jax.nn.silu(conv(first, params["down"], 2))
        x = jax.nn.silu(conv(x, params["deep"]))
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = jax.nn.silu(conv(jnp.concatenate([first, x], -1), params["up"]))
        return jnp.mean((conv(x, params["head"]) - batch["image"]) ** 2, axis=(1, 2, 3))

    task = px.Task(init=lambda key: matrices(key, sizes), loss=loss)
    return Model(task, {"image": shapes(128, 64, 64, 3)})


# --- Rows -----------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Model]] = {
    "gpt": scanned_gpt, "gpt unrolled": unrolled_gpt, "vit": vit, "resnet": resnet, "mlp": mlp,
    "transformer": transformer, "language model": language_model, "lstm": lstm, "unet": unet,
}  # fmt: skip

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "data, remat": {"data": 8, "remat": "full", "microbatches": 2},
    "data, bfloat16": {"data": 8, "precision": "bfloat16"},
    "zero 1": {"data": 8, "zero": 1, "microbatches": 2},
    "zero 2": {"data": 8, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 8, "zero": 3},
    "zero 3, remat": {"data": 8, "zero": 3, "remat": "full", "microbatches": 2},
    "zero 3, bfloat16": {"data": 8, "zero": 3, "remat": "full", "precision": "bfloat16"},
    "tensor": {"data": 2, "tensor": 4},
    "tensor, zero 3": {"data": 4, "tensor": 2, "zero": 3, "remat": "full"},
    "sequence": {"data": 4, "tensor": 2, "remat": "full"},
    "pipeline": {"data": 4, "pipeline": 2, "microbatches": 4, "remat": "full"},
    "pipeline, no remat": {"data": 4, "pipeline": 2, "microbatches": 8},
}

ROWS = {
    "gpt": [name for name in PLANS if name != "sequence"],
    "gpt unrolled": ["data", "zero 2", "zero 3", "zero 3, bfloat16", "tensor"],
    "vit": ["data", "data, bfloat16", "zero 1", "zero 3", "tensor"],
    "resnet": ["data", "data, bfloat16", "zero 2", "zero 3"],
    "mlp": ["data", "data, bfloat16", "zero 1", "zero 3", "tensor", "tensor, zero 3"],
}
CHECKED = {
    "transformer": ["data, remat", "zero 3, remat", "zero 2"],
    "language model": ["data", "sequence", "zero 3, bfloat16"],
    "lstm": ["data", "zero 3"],
    "unet": ["data", "zero 1"],
}


def row_of(name: str) -> tuple[Model, px.Plan]:
    """Return model and plan of a row, `gpt/zero 3`."""
    model, plan = name.split("/")
    built, sizes = MODELS[model](), dict(PLANS[plan])
    if sizes.get("tensor", 1) > 1:
        sizes["shardings"] = built.sequence if plan == "sequence" else built.shardings
    return built, px.Plan(**sizes)


def parts_of(name: str) -> tuple[px.Task, Any, px.Plan, Any]:
    """Return task, batch, plan and optimizer of a row."""
    if name.count("/") == 2:
        return absent_models.drawn(name)
    model, plan = row_of(name)
    return model.task, model.batch, plan, OPTIMIZER


def names(rows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of rows."""
    return [f"{model}/{plan}" for model, plans in rows.items() for plan in plans]


def compiled_bytes(machine: str, name: str, dumps: Path) -> dict[str, int]:
    """Compile a row for a machine, and return the bytes of a device.

    XLA writes its tables of buffers to the folder `dumps`.
    """
    task, batch, plan, optimizer = parts_of(name)
    devices = Target.of(machine).devices()
    held = px.compile(task, optimizer, plan, batch, devices=devices).memory()
    temporaries = held.temporaries
    if Target.of(machine).machine.platform == "tpu":
        tables = dumps.glob("*.jit_step.*.after_optimizations-buffer-assignment.txt")
        temporaries = allocated(max(tables, key=lambda path: path.stat().st_mtime).read_text())
    peak = held.arguments + temporaries + held.outputs - held.aliased
    return {"temporaries": temporaries, "peak": peak}


def allocated(table: str) -> int:
    """Return the bytes of temporaries in the large memory, by a TPU compiler's table of buffers.

    Allocations of a color are in other memories:

        allocation 250: size 243188224, preallocated-temp:
        allocation 254: size 117440512, color 1, preallocated-temp:
    """
    return sum(map(int, re.findall(r"^allocation \d+: size (\d+), preallocated-temp", table, re.M)))


def planned_bytes(name: str, machines: Iterable[str]) -> dict[str, int]:
    """Return the planned peak of a row on each machine."""
    task, batch, plan, optimizer = parts_of(name)
    planned = {}
    for target in machines:
        machine = Target.of(target).machine
        trace = record_step(task, optimizer, plan, batch, machine.platform)
        planned[target] = peak_bytes(trace, machine.platform, machine.fast_memory)
    return planned


def stored(path: Path = STORED) -> dict[str, Any]:
    """Return the compiled figures that are stored, by machine and row."""
    return json.loads(path.read_text()) if path.exists() else {"compiled": {}}


def store(machine: str, name: str, found: Mapping[str, float], path: Path = STORED) -> None:
    """Store what a compiler made of a row, with its version."""
    every = stored(path)
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
    every["versions"] = {package: importlib.metadata.version(package) for package in packages}
    every["date"] = datetime.date.today().isoformat()
    every["compiled"].setdefault(machine, {})[name] = dict(found)
    path.write_text(json.dumps(every, indent=2) + "\n")


def main() -> int:
    """Print planned beside compiled bytes of each row, and their mean and worst by machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.absent_memory", description=__doc__)
    parser.add_argument("machines", nargs="*", default=MACHINES)
    drawn = {row for rows in stored()["compiled"].values() for row in rows if row.count("/") == 2}
    every = [*names(ROWS), *names(CHECKED), *sorted(drawn)]
    parser.add_argument("--rows", nargs="+", default=every)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.compile:
        with tempfile.TemporaryDirectory() as folder:
            dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
            for machine, name in itertools.product(options.machines, options.rows):
                store(machine, name, compiled_bytes(machine, name, Path(folder)))
    compiled = stored()["compiled"]
    kinds = dict.fromkeys(names(ROWS), "looked at") | dict.fromkeys(names(CHECKED), "kept aside")
    errors: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for name in options.rows:
        there = [machine for machine in options.machines if name in compiled.get(machine, {})]
        for machine, planned in planned_bytes(name, there).items():
            peak = compiled[machine][name]["peak"]
            error = planned / peak - 1
            errors[machine, kinds.get(name, "drawn")].append(error)
            sizes = f"{planned / 2**20:9.1f} {peak / 2**20:9.1f} MiB"
            print(f"{machine:10} {name:42} {sizes} {error:+7.1%}", flush=True)
    for (machine, kind), own in sorted(errors.items()):
        mean = sum(map(abs, own)) / len(own)
        print(
            f"{machine:10} {len(own):2} rows {kind}: mean error {mean:.1%}, "
            f"from {min(own):+.1%} to {max(own):+.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
