"""Run a step on every device, manual over as many axes of the mesh as its model allows.

A plan that splits only the batch is manual over `data` alone, so that the model may constrain
shardings over the other axes, or have a `jax.shard_map` of its own. Beside axes that are not manual
JAX lowers each operation with a constraint on its sharding, and the compiler takes 1.3 times as
long: a transformer of 12 layers, written out, is 13,131 operations for 7,948.

`jax.debug.print`, `jax.pure_callback` and the libraries that use them (the error checks of Diffrax)
call a Python function on the host, once per device; cuDNN's attention brings a partitioner of its
own (`jax.custom_partitioning`), a kernel in Pallas has none. XLA takes them only in a
`jax.shard_map` that is manual over all axes. So the step is traced first:

    the traced step holds                     runs manual over
    a kernel in Pallas                        all axes, traced again: it knows the mesh of its trace
    a call of the host, cuDNN's attention     all axes, the equations of that trace
    shardings of the model's own              `data`, from that trace
    none of these                             all axes, the equations of that trace
    an ordered `jax.debug.print`, devices > 1 nothing: JAX orders the prints of one device only

Only for a kernel it is traced again: over all axes JAX gives constants another type than what is
computed, which the checkpointed loops of Equinox, and so the solvers of Diffrax, refuse.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from plurax import errors
from plurax.jaxpr.compat import AS_EQUATIONS, CUSTOM_PARTITIONED, HOST_CALLS, open_jaxpr
from plurax.jaxpr.interpret import all_equations, interpret, source_line
from plurax.partition.manual import eval_manual_body

_ALL_MANUAL = HOST_CALLS | CUSTOM_PARTITIONED
_OWN_SHARDINGS = frozenset(["reshard", "shard_map", "sharding_constraint"])
"""What a model says of the mesh itself."""


def on_most_axes(
    fun: Callable[..., Any],
    mesh: Mesh,
    axes: set[str],
    kinds: Mapping[str, Any],
    takes: str,
    gives: str,
) -> Callable[..., Any]:
    """Return `fun` on every device by `jax.shard_map`, manual over `axes`, or all where it may be.

    `kinds` maps a letter to the `PartitionSpec`s of a kind of value; `takes` and `gives` have one
    letter for each argument and result. Raises `PlanError` where it is traced if it prints in order
    and the mesh has several devices.
    """
    every, out = set(mesh.axis_names), tuple(kinds[kind] for kind in gives)
    manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    spread = functools.partial(
        manual,
        fun,
        in_specs=tuple(kinds[kind] for kind in takes),
        out_specs=out if len(out) > 1 else out[0],
    )

    def over_all_axes(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        """Apply the `shard_map` of the trace, manual over all axes."""
        body = open_jaxpr(eqn.params["jaxpr"])
        return manual(
            lambda *shards: eval_manual_body(*body, shards),
            in_specs=eqn.params["in_specs"],
            out_specs=list(eqn.params["out_specs"]),
            axis_names=every,
        )(*inputs)

    def run(*args: Any) -> Any:
        # Inline, it is the `shard_map` alone, of whose body there is one trace.
        mapped = jax.jit(spread(axis_names=axes), inline=AS_EQUATIONS)
        closed, shapes = jax.make_jaxpr(mapped, return_shape=True)(*args)
        equations = list(all_equations(closed.jaxpr))
        calls = [eqn for eqn in equations if eqn.primitive.name in _ALL_MANUAL]
        for eqn in calls:
            # The class of the effect is private. JAX runs an ordered `io_callback` everywhere.
            ordered = any(type(one).__name__ == "OrderedDebugEffect" for one in eqn.effects)
            if ordered and mesh.size > 1:
                raise errors.PlanError(
                    "jax.debug.print or jax.debug.callback with ordered=True at "
                    f"{source_line([eqn])}: JAX orders them on one device only, and the plan has "
                    f"{mesh.size}. Leave out ordered=True, or train on one device, Plan()."
                )
        kernels = any(eqn.primitive.name in ("pallas_call", "attend") for eqn in equations)
        if kernels and axes != every:
            return spread(axis_names=every)(*args)
        if axes == every or (not calls and (mesh.size == 1 or _says_how(equations))):
            return mapped(*args)
        flat = jax.tree.leaves(args)
        results = interpret(closed.jaxpr, closed.consts, flat, {"shard_map": over_all_axes})
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _says_how(equations: Sequence[Any]) -> bool:
    """Whether something is sharded by the model, beside the `shard_map` of the step itself."""
    return sum(eqn.primitive.name in _OWN_SHARDINGS for eqn in equations) > 1
