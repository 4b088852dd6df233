"""Does a plan compute what one device computes? A check for a user's own task."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import tree
from plurax.execute.compile import compile as compile_
from plurax.execute.placement import leading_dim
from plurax.plan import Plan
from plurax.task import Task

FACTOR = 16.0
"""How many times the difference that another order of sums makes is still the same."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a tensor under the plan is from the same on one device.

    **Fields:** `where`: what was compared, `loss`, `gradient`, `parameters` or `optimizer`; `path`
    of the tensor; `error`, the largest difference relative to the tensor's largest number;
    `tolerance`.
    """

    where: str
    path: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        name = f"{self.where} {self.path}".strip()
        return f"{name}: differs by {self.error:.1e}, allowed {self.tolerance:.1e}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found.

    **Fields:** `plan`; `steps`; `differences`, one for each tensor, in the order in which a fault
    would spread: loss and gradient of the first step, then parameters and optimizer's state after
    the last; `noise`, the difference that another order of sums makes on one device.
    """

    plan: Plan
    steps: int
    differences: tuple[Difference, ...]
    noise: float

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs."""
        return next((difference for difference in self.differences if not difference.ok), None)

    @property
    def ok(self) -> bool:
        """Whether the plan computes what one device computes."""
        return self.first is None

    def __str__(self) -> str:
        worst = max(self.differences, key=lambda difference: difference.error)
        if self.first is None:
            return (
                f"Plan({self.plan.sizes_text()}) computes what one device computes: "
                f"{len(self.differences)} tensors after {self.steps} steps; "
                f"the largest difference is that of {worst}. {self._allowed()}"
            )
        wrong = [difference for difference in self.differences if not difference.ok]
        return (
            f"Plan({self.plan.sizes_text()}) does NOT compute what one device computes. "
            f"The first tensor that differs is {self.first}; "
            f"{len(wrong)} of {len(self.differences)} do. {self._allowed()}"
        )

    def _allowed(self) -> str:
        return (
            f"(Allowed is {FACTOR:.0f} times what another order of sums changes on one device, "
            f"{self.noise:.1e}, and some roundings.)"
        )


def verify(
    task: Task,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    *,
    steps: int = 3,
    seed: int = 0,
) -> Verification:
    """Train some steps under a plan and on one device, and compare every tensor.

    Runs on CPU devices, virtual ones where there are too few cores, so that a plan for any machine
    can be checked on this one; call `plurax.virtual_devices` first.

    **Arguments:** `task`, `optimizer`, `plan` and `batch` as for `compile`, the batch being real
    data; `steps` to take with it; `seed` of initialisation and dropout.

    **Returns:** a `Verification`; `first` names the first tensor that differs. What is allowed is
    measured: the batch is also worked through in another order of sums on one device, and `FACTOR`
    times the difference that this makes, with 64 roundings of the tensor's dtype, is still the
    same. A wrong reduction or sharding is larger by orders of magnitude.

    Raises `PlanError` where there are too few CPU devices.

    >>> import jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: {"w": jnp.ones(3)},
    ...     loss=lambda params, batch, keys: (batch["x"] @ params["w"]) ** 2,
    ... )
    >>> verify(task, optax.adam(0.1), Plan(data=1, microbatches=2), {"x": jnp.ones((4, 3))}).ok
    True
    """
    devices = jax.devices("cpu")
    plan.check_devices(len(devices))
    # Which examples a coupled loss compares is said by the microbatches: the same on one device.
    pieces = plan.microbatches if task.coupled else 1
    one = Plan(precision=plan.precision, microbatches=pieces)
    size = leading_dim(batch)
    pieces = next((n for n in (2, 3, 5, 7) if size >= n), 1)
    other = dataclasses.replace(one, microbatches=pieces)

    def run(used: Plan, by: optax.GradientTransformation, count: int) -> dict[str, PyTree]:
        program = compile_(task, by, used, batch, devices=devices)
        state, losses = program.init(seed), []
        for _ in range(count):
            state, metrics = program.step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        kept = program.kept(state)
        return jax.device_get(
            {"loss": losses, "parameters": kept.params, "optimizer": kept.opt_state}
        )

    def everything(used: Plan) -> dict[str, dict[str, Any]]:
        recorded = run(used, recorder(), 1)
        trained = run(used, optimizer, steps)
        return {
            "loss": tree.named_leaves({"of the first step": recorded["loss"][0]}),
            "gradient": tree.named_leaves(recorded["optimizer"]),
            "parameters": tree.named_leaves(trained["parameters"]),
            "optimizer": tree.named_leaves(trained["optimizer"]),
        }

    expected = everything(one)
    again = everything(other) if pieces > 1 and not task.coupled else expected
    noise = {
        where: max((_error(again[where][p], leaf) for p, leaf in leaves.items()), default=0.0)
        for where, leaves in expected.items()
    }
    found = everything(plan)
    differences = [
        Difference(
            where,
            path,
            _error(found[where][path], leaf),
            FACTOR * noise[where] + 64 * _rounding(leaf, plan),
        )
        for where, leaves in expected.items()
        for path, leaf in leaves.items()
    ]
    return Verification(plan, steps, tuple(differences), max(noise.values()))


def recorder() -> optax.GradientTransformation:
    """An optimizer that changes nothing and keeps the gradient as its state."""

    def update(grads: PyTree, _state: PyTree, _params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.zeros_like, grads), grads

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _error(found: Any, expected: Any) -> float:
    if not np.issubdtype(np.asarray(expected).dtype, np.inexact):
        return 0.0 if np.array_equal(found, expected) else math.inf
    scale = float(np.max(np.abs(expected), initial=0.0))
    worst = float(np.max(np.abs(np.asarray(found) - expected), initial=0.0))
    if math.isnan(worst):
        return 0.0 if np.array_equal(found, expected, equal_nan=True) else math.inf
    return worst / scale if scale else worst


def _rounding(leaf: Any, plan: Plan) -> float:
    """The relative distance of neighbouring numbers in which a tensor is computed."""
    dtype = np.asarray(leaf).dtype
    if not np.issubdtype(dtype, np.inexact):
        return 0.0
    return 2.0**-7 if plan.precision == "bfloat16" else float(np.finfo(dtype).eps)
