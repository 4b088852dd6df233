"""A library's kernel of attention over devices, beside attention as equations and one device.

    python -m benchmarks.kernel_attention 8xH100 v5p:2x2x2      # compiled for machines not here

A causal transformer of two layers on one sequence in bfloat16, rematerialized layer by layer:

    kernel       cuDNN's attention on GPUs, JAX's flash attention in Pallas on TPUs
    equations    attention as it is written, with `stream=512`
    one device   the kernel on as many tokens as each of the eight devices has, which attend to
                 these alone: what a device holds without those of others

Each by `Plan(context=8, context_strategy=...)`. Bytes are what each device receives, read from the
compiled program.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import plurax as px
from benchmarks.compiled_steps import StepOfPlurax
from benchmarks.long_context import as_written, run

DEVICES, WIDTH, HEADS, SIZE, LAYERS = 8, 1024, 8, 128, 2
TOKENS = (32768, 131072)


def of_cudnn(q: Any, k: Any, v: Any) -> Any:
    """cuDNN's causal attention of `(B, T, N, H)`."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def of_pallas(q: Any, k: Any, v: Any) -> Any:
    """The same by JAX's kernel for TPUs."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash_attention(q, k, v, causal=True, sm_scale=SIZE**-0.5).swapaxes(1, 2)


def task_of(attention: Callable[..., Any]) -> px.Task:
    """A transformer of attention and an MLP, in bfloat16."""
    heads = WIDTH, HEADS, SIZE
    shapes = {"q": heads, "k": heads, "v": heads, "o": (HEADS, SIZE, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def init(key: Any) -> Any:
        return {
            name: 0.02 * jax.random.normal(key, (LAYERS, *shape), jnp.bfloat16)
            for name, shape in shapes.items()
        }

    def layer(x: Any, own: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, own[name]) for name in "qkv")
        x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v).astype(x.dtype), own["o"])
        return x + jax.nn.gelu(x @ own["up"]) @ own["down"], None

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
        return jnp.mean(x.astype(jnp.float32) ** 2, (1, 2))

    return px.Task(init=init, loss=loss)


def elsewhere(target: str) -> None:
    """Print what a machine's compiler makes of each."""
    # This machine has no cuDNN to ask for its version.
    cudnn.check_cudnn_version = lambda *_: 91000
    cudnn.check_compute_capability = lambda *_: None
    kernel = of_cudnn if "H100" in target or "B200" in target else of_pallas
    devices = px.topology(target)[:DEVICES]
    for tokens in TOKENS:
        for strategy in ("ring", "gather", "heads"):
            fields = {"context": DEVICES, "context_strategy": strategy, "stream": 512}
            _line(target, tokens, f"{strategy}, kernel", kernel, fields, devices)
            _line(target, tokens, f"{strategy}, equations", as_written, fields, devices)
        own = {"data": DEVICES}
        _line(target, tokens, "one device", kernel, own, devices, rows=DEVICES)


def _line(
    target: str, tokens: int, name: str, attention: Any, fields: Any, devices: Any, rows: int = 1
) -> None:
    batch = {"x": jax.ShapeDtypeStruct((rows, tokens // rows, WIDTH), jnp.bfloat16)}
    started = time.perf_counter()
    plan = px.Plan(remat="full", **fields)
    program = px.compile(task_of(attention), optax.sgd(1e-3), plan, batch, devices=devices)
    step, seconds = StepOfPlurax(program), time.perf_counter() - started
    received = sum(one.bytes * (one.trips or 1) for one in step.sent if one.kind != "all-reduce")
    print(
        f"{target:10} {tokens:7,} tokens, {name:17} {step.temporaries / 2**20:7,.0f} MiB, "
        f"{received / 2**20:7,.0f} MiB received, compiled in {seconds:3.0f} s",
        flush=True,
    )


def here() -> None:
    """A CPU has no such kernel."""
    print("Name the machines to compile for: 8xH100, v5p:2x2x2.")


if __name__ == "__main__":
    sys.exit(run(str(__doc__), here, elsewhere))
