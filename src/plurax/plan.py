"""A plan says how training is spread over devices, and knows no model. Imports no JAX."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from plurax import errors

Precision = Literal["float32", "bfloat16"]

BatchDim = Literal["major", "minor"]

MESH_AXES = ("member", "data")
"""The mesh axes in their one order; a new one arrives with the code that uses it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """How one training step is spread over devices.

    A plan is a value: frozen, comparable, hashable, saved as TOML and edited by hand. `Plan()` is
    one network on one device, and every other plan computes the same update.

    Raises `PlanError` for a value that can never run.

    >>> plan = Plan(data=4, microbatches=8)
    >>> plan
    Plan(data=4, microbatches=8)
    >>> plan == Plan.from_toml(plan.to_toml())
    True
    >>> Plan(data=0)
    Traceback (most recent call last):
        ...
    plurax.errors.kinds.PlanError: Plan(data=0): data must be a whole number of at least 1; \
data=1 means 'not used'.
    """

    data: int = 1
    """Over how many devices the batch is split (mesh axis `data`)."""
    microbatches: int = 1
    """In how many pieces, one after another, a device works through its share of the batch.
    Gradients are added up locally and reduced over devices once per step, so more microbatches
    need less memory and no more communication."""
    precision: Precision = "float32"
    """`bfloat16` casts parameters and floating inputs inside the loss and predict functions;
    parameters, sums, reduction, optimizer and model state keep their own dtype. `float32` casts
    nothing."""

    member: int = 1
    """Over how many devices the members of a population are spread (mesh axis `member`). Members
    never communicate."""
    chunk: int | None = None
    """How many members a device works on at a time, one chunk after another. None: chosen from
    compiled memory and a short measurement."""
    batch_dim: BatchDim | None = None
    """Where the batch lies inside the arrays of the gradient: `major`, as the task is written, or
    `minor`, turned so that vector units work along the batch. None: for members chosen by a short
    measurement and checked against the other, for one network `major`."""

    def __post_init__(self) -> None:
        for field in ("data", "microbatches", "member", "chunk"):
            if field == "chunk" and self.chunk is None:
                continue
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise errors.plan_field_not_positive(field, value)
        if self.precision not in get_args(Precision):
            raise errors.plan_field_not_a_choice("precision", self.precision, get_args(Precision))
        if self.batch_dim is not None and self.batch_dim not in get_args(BatchDim):
            raise errors.plan_field_not_a_choice("batch_dim", self.batch_dim, get_args(BatchDim))

    @property
    def axes(self) -> dict[str, int]:
        """Size of each mesh axis, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def devices(self) -> int:
        """How many devices the plan needs."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count

    def check_devices(self, available: int) -> None:
        """Raise `PlanError` if the plan needs more than `available` devices."""
        if self.devices > available:
            axis = "member" if self.member > 1 else "data"
            other = self.devices // self.axes[axis]
            fits = [f"{axis}={max(1, available // other)}"]
            fits += ["data=1"] if axis == "member" and self.data > available else []
            raise errors.plan_needs_devices(
                self.axes, self.devices, available, fits=" with ".join(fits)
            )

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"Plan({', '.join(changed)})"

    def explain(self, batch_size: int | None = None) -> str:
        """What the plan does, in words; with `batch_size` also how many examples go where.

        >>> print(Plan(data=2, microbatches=3).explain(batch_size=10))
        Plan(data=2, microbatches=3): 2 devices
          data=2: the batch is split over 2 devices; parameters are whole on each.
          microbatches=3: each device takes its share in 3 pieces, adds up the gradients,
            and reduces them over devices once, at the end of the step.
          precision=float32: nothing is cast.
          batch of 10: 2 devices × 3 microbatches × 2 examples, 2 of 12 places filled up.
        """
        count = self.devices
        lines = [f"{self!r}: {count} device{'s' if count > 1 else ''}"]
        if self.data > 1:
            lines.append(
                f"  data={self.data}: the batch is split over {self.data} devices; "
                "parameters are whole on each."
            )
        else:
            lines.append("  data=1: the whole batch goes to one device.")
        if self.microbatches > 1:
            lines.append(
                f"  microbatches={self.microbatches}: each device takes its share in "
                f"{self.microbatches} pieces, adds up the gradients,\n"
                "    and reduces them over devices once, at the end of the step."
            )
        if self.member > 1:
            lines.append(
                f"  member={self.member}: members are spread over {self.member} groups of devices "
                "and never communicate."
            )
        if self.chunk is not None:
            lines.append(f"  chunk={self.chunk}: a device works on {self.chunk} members at a time.")
        if self.batch_dim is not None:
            lines.append(
                f"  batch_dim={self.batch_dim}: the gradient is computed with the batch "
                + ("where the task has it." if self.batch_dim == "major" else "in the minor dim.")
            )
        cast = (
            "nothing is cast."
            if self.precision == "float32"
            else "the loss computes in bfloat16; parameters, sums and optimizer keep their dtype."
        )
        lines.append(f"  precision={self.precision}: {cast}")
        if batch_size is not None:
            places = self.padded_size(batch_size)
            line = (
                f"  batch of {batch_size}: {self.data} device{'s' if self.data > 1 else ''} × "
                f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''} × "
                f"{places // (self.data * self.microbatches)} examples"
            )
            filled = places - batch_size
            lines.append(line + (f", {filled} of {places} places filled up." if filled else "."))
        return "\n".join(lines)

    def padded_size(self, batch_size: int) -> int:
        """The smallest number of rows ≥ `batch_size` that splits evenly.

        >>> Plan(data=3, microbatches=2).padded_size(10)
        12
        """
        unit = self.data * self.microbatches
        return -(-batch_size // unit) * unit

    def to_toml(self) -> str:
        """The plan as TOML, all fields written out but those left to be chosen (None)."""
        lines = [
            f"{field.name} = {_toml_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the plan") -> "Plan":
        """A plan from TOML; fields left out keep their default. Raises `PlanError`."""
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise errors.plan_not_toml(source, str(error)) from None
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise errors.plan_unknown_key(key, known, source)
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a TOML file. Raises `PlanError` where it is not one."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise errors.plan_not_toml(str(path), error.strerror or str(error)) from None
        return cls.from_toml(text, source=str(path))


def _toml_value(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
