"""Check that a plan computes what one device computes, for a user's task.

Problem. Another plan adds numbers in another order, so results differ by rounding, and how much
depends on the task. A fixed tolerance either hides a missing term or reports rounding. Therefore
the tolerance is measured: one device computes the batch in two orders of sums, and the difference
between them is the noise of this task. Example, `Plan(data=4)`:

    expected     Plan()                   one device, one order of sums
    again        Plan(), rows reversed    one device, the same rows in another order
    noise        max |again - expected| / max |expected|          2e-7 for the gradient
    tolerance    FACTOR * noise + roundings of the dtype          3e-6 + 8e-6
    found        Plan(data=4)             error 3e-7              the same, up to rounding
    a gradient divided by 4 in one place  error 7.5e-1            reported as the first difference
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from plurax import errors, tree
from plurax.distributed.global_arrays import fetch, own_devices
from plurax.execute.check import check_kinds
from plurax.execute.compile import compile as compile_
from plurax.execute.placement import leading_dim
from plurax.notebook import html_table
from plurax.plan import Plan
from plurax.task import Task
from plurax.validate import whole_number

FACTOR = 16.0
"""The multiple of the difference between two orders of sums that is allowed."""
PRECISION_FACTOR = 4.0
"""The multiple of the difference between two precisions that is allowed."""
ROUNDINGS = 64
"""The number of roundings allowed, for a dtype of at least 32 bits."""
FEW_ROUNDINGS = 4
"""The same for a shorter dtype, where 64 roundings would hide a missing term."""

_MARK = {True: "yes", False: "NO"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one tensor between the plan and one device.

    **Fields:** `where`: the kind of tensor, `loss`, `gradient`, `parameters`, `optimizer`, of a
    stateful task `model state`, or `updates left out`; `path` of the tensor; `error`, the largest
    difference relative to the tensor's largest number, infinite where there is none: integers and
    booleans that are not equal, another shape or dtype, NaN on either side (which equals nothing,
    not even NaN); `tolerance`.
    """

    where: str
    path: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within rounding."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        name = f"{self.where} {self.path}".strip()
        if math.isinf(self.error):
            return f"{name}: is not the same (NaN, or another integer, shape or dtype)"
        return f"{name}: differs by {self.error:.1e}, allowed {self.tolerance:.1e}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    **Fields:** `plan`; `steps`; `differences`, one for each tensor, in the order in which a fault
    would spread: loss and gradient of the first step, then parameters and the optimizer's state
    after the last; `noise`, the difference between two orders of sums on one device, or under
    `precision="bfloat16"` between the two precisions.
    """

    plan: Plan
    steps: int
    differences: tuple[Difference, ...]
    noise: float

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs, or None."""
        return next((difference for difference in self.differences if not difference.ok), None)

    @property
    def ok(self) -> bool:
        """Whether the plan computes what one device computes."""
        return self.first is None

    def __repr__(self) -> str:
        wrong = sum(not difference.ok for difference in self.differences)
        found = f"{wrong} of {len(self.differences)} tensors differ"
        return f"Verification(Plan({self.plan.sizes_text()}), {self.steps} steps: {found})"

    def _repr_html_(self) -> str:
        rows = [
            (one.where, one.path, f"{one.error:.1e}", f"{one.tolerance:.1e}", _MARK[one.ok])
            for one in self.differences
        ]
        columns = ["tensor", "path", "difference", "allowed", "same"]
        return html_table(repr(self), columns, rows)

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
        if self.plan.precision == "float32":
            return (
                f"(Allowed is {FACTOR:.0f} times what another order of sums changes on one device, "
                f"{self.noise:.1e}, and some roundings.)"
            )
        return (
            f"(Allowed is {PRECISION_FACTOR:.0f} times what {self.plan.precision} itself changes "
            f"on one device, {self.noise:.1e}, and some roundings.)"
        )


def _check_sums(plan: Plan) -> None:
    """Raise `PlanError` for a plan whose sums are rounded."""
    if plan.reduce_dtype is not None:
        raise errors.PlanError(
            f"plurax.verify: under reduce_dtype={plan.reduce_dtype!r} devices round gradients "
            "before they add them up, and one device adds up none: what differs by rounding would "
            "hide what is wrong. Verify the same plan without it: "
            "dataclasses.replace(plan, reduce_dtype=None)."
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

    It runs on CPU devices, virtual ones where there are too few cores, so that a plan for any
    machine can be checked on this one; call `plurax.virtual_devices` first.

    **Arguments:** `task`, `optimizer`, `plan` and `batch` as for `compile`, the batch with real
    data; `steps`, the number of steps on it; `seed` of initialisation and dropout.

    **Returns:** a `Verification`; `first` names the first tensor that differs. The tolerance is
    measured: one device also computes the same rows in reversed order, and `FACTOR` times that
    difference is allowed, plus 64 roundings of the tensor's dtype (4 for a 16-bit dtype). Under
    `precision="bfloat16"` one device also computes in float32, and 4 times that difference is
    allowed. A wrong reduction or sharding differs by orders of magnitude more.

    Raises `PlanError` where there are too few CPU devices, and for a plan with `reduce_dtype`.

    >>> import jax.numpy as jnp, optax, plurax as px
    >>> task = px.Task(
    ...     init=lambda key: {"w": jnp.ones(3)},
    ...     loss=lambda params, batch, keys: (batch["x"] @ params["w"]) ** 2,
    ... )
    >>> verify(task, optax.adam(0.1), Plan(data=1, microbatches=2), {"x": jnp.ones((4, 3))}).ok
    True
    """
    if whole_number(steps) is None:
        raise errors.BatchError(f"steps={steps!r}: give a whole number of steps, at least 1.")
    check_kinds(task, optimizer, plan, None)
    _check_sums(plan)
    devices = jax.devices("cpu")
    plan.check_devices(len(devices))
    plan.padded_size(leading_dim(batch))  # before one device trains
    # The microbatches determine which examples a coupled loss compares: use the same number.
    on_one = Plan(
        precision=plan.precision,
        microbatches=plan.most_microbatches if task.couples_microbatches else 1,
    )

    def everything(used: Plan, trained: Task = task) -> dict[str, dict[str, Any]]:
        # What one device computes every process computes on a device of its own.
        where = devices if used is plan else own_devices(devices)
        program = compile_(trained, recording(optimizer), used, batch, devices=where)
        state = program.init(seed)
        for step in range(steps):
            state, metrics = program.step(state, batch)
            if step == 0:
                gradient, _ = program.to_canonical(state).opt_state
                first = fetch({"loss": metrics["loss"], "gradient": gradient})
        kept = program.to_canonical(state)
        last = {
            "parameters": kept.params,
            "optimizer": kept.opt_state[1],
            "model state": kept.model_state,
            "updates left out": kept.skipped,
        }
        return {
            "loss": tree.named_leaves({"of the first step": first["loss"]}),
            "gradient": tree.named_leaves(first["gradient"]),
            **{name: tree.named_leaves(part) for name, part in fetch(last).items()},
        }

    expected = everything(on_one)
    again = expected if task.coupled else everything(on_one, reordered(task))
    full = None
    if plan.precision != "float32":
        full = everything(dataclasses.replace(on_one, precision="float32"))
    allowed, noise = _allowed(expected, again, full)
    found = everything(plan)
    differences = [
        Difference(where, path, _error(found[where][path], leaf), allowed[where] + _rounding(leaf))
        for where, leaves in expected.items()
        for path, leaf in leaves.items()
    ]
    return Verification(plan, steps, tuple(differences), noise)


def _allowed(
    expected: dict[str, Any], again: dict[str, Any], full: dict[str, Any] | None
) -> tuple[dict[str, float], float]:
    """Return the allowed difference of each kind of tensor, without roundings, and the noise.

    **Arguments:** results of one device; the same in another order of sums; where the plan computes
    in a lower precision, in full precision.
    """
    noise = _farthest(again, expected)
    # In one step rounding does not change half of the digits. More than that is a loss that reads
    # the order of its rows, and would be the fault that is looked for.
    for where in ("loss", "gradient"):
        eps = max(map(_epsilon, expected[where].values()), default=0.0)
        noise[where] = min(noise[where], math.sqrt(eps))
    lower = noise if full is None else _farthest(full, expected)
    measured = max(lower.values())
    # A loss is one number and may agree by chance: allow it what its gradient is allowed.
    lower["loss"] = max(lower["loss"], lower["gradient"])
    if full is None:
        return {where: FACTOR * far for where, far in noise.items()}, measured
    # Another order of sums is rounded in the lower precision too, so one factor covers both.
    return {w: PRECISION_FACTOR * max(noise[w], far) for w, far in lower.items()}, measured


def _farthest(computed: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest finite difference of each kind of tensor."""
    return {
        where: max(
            (
                e
                for p, leaf in leaves.items()
                if math.isfinite(e := _error(computed[where][p], leaf))
            ),
            default=0.0,
        )
        for where, leaves in expected.items()
    }


def reordered(task: Task) -> Task:
    """Return a task that computes the rows of a batch, with their keys, from the last to the first.

    All rows stay in one call: a part of them would change a loss that couples rows and does not say
    so, and the tolerance would contain the fault.
    """
    loss = task.loss

    def backwards(rows: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[::-1], rows)

    return dataclasses.replace(
        task,
        loss=lambda params, batch, keys: backwards(loss(params, backwards(batch), backwards(keys))),
        stack=None,
    )


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer whose state is `(gradient of the last step, the optimizer's state)`."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.zeros_like, params), inner.init(params)

    def update(
        grads: PyTree, state: tuple[PyTree, PyTree], params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        updates, new = inner.update(grads, state[1], params, **extra)
        return updates, (grads, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _error(computed: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected number; infinite for NaN."""
    computed, expected = _numbers(computed), _numbers(expected)
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        return math.inf
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0 if np.array_equal(computed, expected) else math.inf
    # Compute differences in float64 at least: in 16 bits they would be rounded themselves.
    wide = np.promote_types(expected.dtype, np.float64) if _known(expected) else np.float64
    computed, expected = computed.astype(wide), expected.astype(wide)
    with np.errstate(invalid="ignore"):
        # Equal infinities differ by nothing; their difference would be NaN.
        apart = np.where(computed == expected, 0.0, np.abs(computed - expected))
    worst = float(np.max(apart, initial=0.0))
    scale = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0))
    if not math.isfinite(worst):
        return math.inf
    return worst / scale if scale else worst


def _numbers(leaf: Any) -> np.ndarray:
    """Return a leaf as a NumPy array; of a random key its words."""
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def _known(array: np.ndarray) -> bool:
    """Return whether a dtype is one of NumPy's (bfloat16 is not)."""
    return bool(np.issubdtype(array.dtype, np.inexact))


def _rounding(leaf: Any) -> float:
    """Return the allowed roundings of a tensor's dtype, relative to its largest number."""
    eps = _epsilon(leaf)
    return (ROUNDINGS if eps < 1e-6 else FEW_ROUNDINGS) * eps


def _epsilon(leaf: Any) -> float:
    """Return one rounding of a tensor's dtype, 0 for integers."""
    dtype = _numbers(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.eps)
