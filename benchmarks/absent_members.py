"""Steps of many small networks compiled for machines that are not here, beside `jax.vmap`.

    python -m benchmarks.absent_members H100 v5e:2x2 --cases "1,000 small"     a line for each side

By hand is the step of one network and Optax's Adam, mapped over the members: as it stands
(`vmap`), and with an update that is left out where the loss or the norm of the gradients is not
finite, as plurax leaves it out (`vmap, skipping`). All sides run on one device, with whole state
donated, and are read by the walk of `plurax.analysis.compiled_for`. The epoch's loop is plurax's.
Run it where the compilers are installed: pip install 'plurax[tpu,cuda]'.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plurax as px
from benchmarks import absent
from plurax.hlo.text import Instruction, Module, parse
from plurax.targets import Target

OPTIMIZER = optax.adam(1e-3)
BY_HAND = ("vmap", "vmap, skipping")
SIDES = ("plurax", *BY_HAND, "plurax, epoch")


@dataclasses.dataclass(frozen=True)
class Case:
    """Networks with two hidden layers: so many `members`, None for one without a member dim."""

    members: int | None
    widths: tuple[int, ...]
    rows: int = 64

    def init(self, key: Any) -> Any:
        """Return the parameters of one network."""
        sizes = list(itertools.pairwise(self.widths))
        return [
            {"w": jax.random.normal(key, (a, b)) * a**-0.5, "b": jnp.zeros(b)}
            for key, (a, b) in zip(jax.random.split(key, len(sizes)), sizes, strict=True)
        ]

    def loss(self, params: Any, batch: Any, keys: Any = None) -> jax.Array:
        """Return losses `(B,)`."""
        *hidden, last = params
        x = batch["x"]
        for p in hidden:
            x = jnp.tanh(x @ p["w"] + p["b"][None])
        logits = x @ last["w"] + last["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    @property
    def matrix_bytes(self) -> int:
        """The bytes of the smallest matrix, of all members."""
        smallest = min(a * b for a, b in itertools.pairwise(self.widths))
        return 4 * smallest * (self.members or 1)

    def batch(self, rows: int) -> Any:
        """Return the shapes of so many examples."""
        return {
            "x": jax.ShapeDtypeStruct((rows, self.widths[0]), jnp.float32),
            "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }


CASES = {
    "1,000 small": Case(1000, (16, 40, 40, 10)),
    "100 larger": Case(100, (64, 256, 256, 10)),
    "one": Case(None, (256, 2048, 2048, 10), 1024),
}


# --- Both sides -----------------------------------------------------------------------------------


def by_hand(case: Case, device: jax.Device, *, skip: bool) -> tuple[jax.stages.Compiled, Mesh]:
    """Compile the step of a case as users of plain JAX write it."""
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: case.loss(p, batch).mean())(params)
        updates, new = OPTIMIZER.update(grads, state, params)
        result = optax.apply_updates(params, updates), new
        norm = optax.tree.norm(grads)
        if skip:
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            result = jax.tree.map(lambda n, o: jnp.where(finite, n, o), result, (params, state))
        return *result, (loss, norm)

    def init(key: Any) -> Any:
        params = case.init(key)
        return params, OPTIMIZER.init(params)

    keys = jax.eval_shape(lambda: jax.random.key(0))
    if case.members is not None:
        init, step = jax.vmap(init), jax.vmap(step, in_axes=(0, 0, None))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), case.members))
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(step, in_shardings=whole, out_shardings=whole, donate_argnums=(0, 1))
    return jitted.lower(*jax.eval_shape(init, keys), case.batch(case.rows)).compile(), mesh


def by_plurax(
    case: Case, device: jax.Device, *, epoch: bool = False
) -> tuple[jax.stages.Compiled, Mesh, px.Plan]:
    """Compile the step of a case, or the loop over an epoch of it, and return the plan chosen."""
    task = px.Task(init=case.init, loss=case.loss)
    data = px.train.ArrayData(case.batch(8 * case.rows), case.rows)
    members = None if case.members is None else px.Members(case.members)
    program = px.compile(
        task, OPTIMIZER, px.Plan(), case.batch(case.rows), devices=[device], members=members,
        data=None if members is None else data,
    )  # fmt: skip
    compiled = program.compiled_step
    if epoch:
        order = () if members else program.place_epoch(*data.epoch_order(0))
        compiled = program.compile_loop(program.place_data(data.arrays), order)
    return compiled, program.mesh, program.plan


def measure(target: Target, case: Case, side: str) -> tuple[dict[str, Any], Module]:
    """Compile a side of a case for a machine, and return what it comes to, and the program."""
    device, chosen = target.devices()[0], {}
    if side in BY_HAND:
        compiled, mesh = by_hand(case, device, skip=side != "vmap")
    else:
        compiled, mesh, plan = by_plurax(case, device, epoch=side != "plurax")
        chosen = {"chunk": plan.chunk, "batch_dim": plan.batch_dim}
    module = parse(compiled.as_text() or "")
    figures = absent.figures(compiled, mesh, target) | chosen
    figures["kernels"] = len(kernels(module))
    figures["copies"] = len(copies(module, case.matrix_bytes))
    figures["branches"] = branches(module)
    return figures, module


# --- What a text has ------------------------------------------------------------------------------

NOT_RUN = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while",
     "opt-barrier", "partition-id", "replica-id", "call", "conditional", "iota")
)  # fmt: skip


def kernels(module: Module, name: str | None = None) -> list[Instruction]:
    """Return the instructions that a device runs: those of loops and branches, each once.

    What an asynchronous copy starts counts, and what waits for it does not.
    """
    found = []
    for one in module.computations.get(name or module.entry, ()):
        if one.opcode in ("while", "call", "conditional"):
            inner = one.attribute(r"body=%?([\w.\-]+)")
            for called in [inner] if inner else one.called():
                found += kernels(module, called)
        elif one.opcode not in NOT_RUN and not one.opcode.endswith("-done"):
            found.append(one)
    return found


def copies(module: Module, smallest: int) -> list[Instruction]:
    """Return the copies of arrays of at least so many bytes, those to a TPU's fast memory aside."""
    return [
        one
        for one in kernels(module)
        if one.opcode in ("copy", "copy-start") and one.bytes >= smallest and "S(1)" not in one.type
    ]


def branches(module: Module) -> int:
    """Return how many conditionals are in the bodies of loops whose length is data."""
    return sum(
        one.opcode == "conditional"
        for loops in module.computations.values()
        for loop in loops
        if loop.opcode == "while" and module.trips(loop) is None
        for one in module.computations[loop.attribute(r"body=%?([\w.\-]+)") or ""]
    )


def main() -> int:
    """Compile, and print a line for each machine, case and side, in JSON."""
    name = "python -m benchmarks.absent_members"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("machines", nargs="+")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for machine, case, side in itertools.product(options.machines, options.cases, options.sides):
        line = {"machine": machine, "case": case, "side": side}
        try:
            line |= measure(Target.of(machine), CASES[case], side)[0]
        except jax.errors.JaxRuntimeError as error:  # a compiler may fail at a program
            line["failed"] = str(error).splitlines()[0]
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
