"""Options of XLA's compiler, each beside none: what it makes of a step for machines not here.

    python -m benchmarks.compiler_options 8xH100 v6e:2x4 --plans data zero3     a line for each set

The step and the figures are those of `benchmarks.absent`, the sets of options `CANDIDATES`. Run it
where the compilers are installed: pip install 'plurax[tpu,cuda]'.
"""

import argparse
import json
import sys
from collections.abc import Mapping

import jax

import plurax as px
from benchmarks.absent import OPTIMIZER, Transformer, figures, make_plan
from benchmarks.absent import PLANS as PLANS_BESIDE_HAND
from plurax.targets import Target

Options = Mapping[str, bool | int | str]


def _all(prefix: str, names: str, value: bool | int) -> Options:
    return {f"{prefix}{name}": value for name in names.split()}


_COLLECTIVES = "all_gather reduce_scatter all_reduce"
_FUSIONS = "xla_tpu_enable_async_collective_fusion"
_COMBINE = {f"xla_gpu_{name}_combine_threshold_bytes": 2**20 for name in _COLLECTIVES.split()}
_PIPELINED = "xla_gpu_enable_pipelined_"
CANDIDATES: Mapping[str, Mapping[str, Options]] = {
    "gpu": {
        "no latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": False},
        "pipelined all-gather": {f"{_PIPELINED}all_gather": True},
        "pipelined reduce-scatter": {f"{_PIPELINED}reduce_scatter": True},
        "pipelined all-reduce": {f"{_PIPELINED}all_reduce": True},
        "double buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
        "combined up to 1 MiB": _COMBINE,
        "combined up to 1 GiB": dict.fromkeys(_COMBINE, 2**30),
        "two at a time": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
        "speed-of-light estimates": {"xla_gpu_enable_analytical_sol_latency_estimator": True},
    },
    # As MaxText sets them, benchmarks/xla_flags_library.py.
    "tpu": {
        "collective fusion": {
            **_all(_FUSIONS, "_fuse_all_gather _multiple_steps", True),
            _FUSIONS: True,
            "xla_tpu_overlap_compute_collective_tc": True,
            "xla_enable_async_all_gather": True,
        },
        "reductions fused": {
            **_all(_FUSIONS, "_fuse_all_reduce _fuse_reduce_scatter", True),
            **_all("xla_enable_async_", "all_reduce reduce_scatter_fusion", True),
        },
        "data parallelism": {
            "xla_tpu_enable_data_parallel_all_reduce_opt": True,
            "xla_tpu_data_parallel_opt_different_sized_ops": True,
        },
        "SparseCore": _all(
            "xla_tpu_enable_sparse_core_collective_offload_", _COLLECTIVES, True
        ),
    },
}  # fmt: skip


NAMES = ("data", "zero1", "zero3", "tensor")
PLANS = {name: {**PLANS_BESIDE_HAND[name], "microbatches": 2} for name in NAMES}


def measure(machine: str, names: list[str], model: Transformer, only: list[str] | None) -> None:
    """Compile plans for a machine with each set of options, and print a line for each."""
    target = Target.of(machine)
    devices = target.devices()
    candidates = {"none": {}, **CANDIDATES[target.machine.platform]}
    for name in names:
        plan, batch = make_plan(PLANS[name], len(devices)), model.batch(8 * len(devices))
        task = px.Task(init=model.init, loss=model.loss)
        for label, options in candidates.items():
            if only and label not in (*only, "none"):
                continue
            line = {"machine": machine, "plan": name, "options": label}
            try:
                program = px.compile(
                    task, OPTIMIZER, plan, batch, devices=devices, compiler_options=options
                )
            except (px.errors.ArgumentError, jax.errors.JaxRuntimeError) as error:
                print(json.dumps({**line, "refused": str(error).splitlines()[0]}), flush=True)
                continue
            compared = figures(program.compiled_step, program.mesh, target)
            print(json.dumps({**line, **compared}), flush=True)


def main() -> int:
    """Compile, and print a line for each machine, plan and set of options, in JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler_options")
    parser.add_argument("machines", nargs="+")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--options", nargs="+", help="these sets alone, beside none")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    model = Transformer(width=options.width, depth=options.depth)
    for machine in options.machines:
        measure(machine, options.plans, model, options.options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
