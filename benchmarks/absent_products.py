"""What matrix products and kernels reach of a TPU's published rates, by its own compiler's cycles.

    python -m benchmarks.absent_products
    python -m benchmarks.absent_products v5e:2x4

The compiler of a TPU writes the cycles that it expects of each kernel into the program. From those
of bfloat16 products that compute for twice as long as they read follow the `product_efficiency` and
the `half_dim` of `presets.toml`; from kernels that read two large arrays and write one, the
`efficiency`, of memory traffic. Neither is a measurement, and no published run is read.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import plurax as px
from plurax.analysis.compiled_schedule import walk_schedule
from plurax.analysis.machine_model import ProductTime, fit_products
from plurax.hlo.text import parse
from plurax.targets import Target

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
SIZES = (384, 512, 768, 1024, 2048, 3072, 4096, 8192)
PRODUCTS = [
    *((size, size, size) for size in SIZES if size >= 2048),
    *((8192, size, 4096) for size in SIZES),
    *((8192, 4096, size) for size in SIZES),
    *((16384, size, size) for size in SIZES),
]
"""The dims m, n, k: tokens, and the widths of layers."""
KERNELS: list[Callable[..., Any]] = [
    lambda a, b: jnp.tanh(a) * b,
    lambda a, b: jax.nn.gelu(a) + b,
    lambda a, b: jnp.where(a > 0, a, b),
]


def seconds(target: Target, fun: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any) -> float:
    """Compile a function, and return the compiler's cycles for its kernels as seconds."""
    device = SingleDeviceSharding(px.topology(target.name)[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=device) for shape in shapes]
    module = parse(jax.jit(fun).lower(*args).compile().as_text())
    mesh = jax.sharding.Mesh(np.array(px.topology(target.name)[:1]), ("device",))
    return walk_schedule(module, mesh, target.machine, target.clock).computing


def main() -> int:
    """Print for each target what products and traffic reach."""
    parser = argparse.ArgumentParser("python -m benchmarks.absent_products", description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS)
    jax.config.update("jax_platforms", "cpu")
    for name in parser.parse_args().targets:
        target = Target.of(name)
        machine = target.machine
        peak, bandwidth = machine.flops["bfloat16"], machine.memory_bandwidth
        times = []
        for m, n, k in PRODUCTS:
            flops, moved = 2.0 * m * n * k, 2 * (m * k + k * n + m * n)
            if flops / peak > 2 * moved / bandwidth:
                took = seconds(target, jnp.matmul, (m, k), (k, n), dtype=jnp.bfloat16)
                times.append(ProductTime("bfloat16", flops, min(m, n, k), 1, took))
        rates, half_dim = fit_products(times, machine.overhead)
        shape = (16384, 1024)
        moved = 3 * 4 * shape[0] * shape[1]
        traffic = statistics.median(
            moved / bandwidth / seconds(target, kernel, shape, shape, dtype=jnp.float32)
            for kernel in KERNELS
        )
        print(f"{name:10} {len(times)} products: {rates['bfloat16'] / peak:.2f} of the peak, half "
              f"of it at a smallest dim of {half_dim:.0f}; traffic {traffic:.2f}",
              flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
