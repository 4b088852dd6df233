"""Describe how training is distributed over devices, independent of any model. Imports no JAX."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from plurax import errors
from plurax.disk import replace_file
from plurax.notebook import html_table
from plurax.plan_text import ZERO_TEXTS, explained
from plurax.reading import parse_toml, read_text, refusing
from plurax.strategies import Strategies, sharding_rules, spelled
from plurax.toml_writer import write_toml
from plurax.validate import changed_fields, changed_repr, whole_number

Precision = Literal["float32", "bfloat16"]

ReduceDtype = Literal["bfloat16"]

BatchDim = Literal["major", "minor"]

Shardings = tuple[tuple[str, tuple[Any, ...]], ...]

if TYPE_CHECKING:
    GivenShardings = Shardings | Mapping[str, Any]
    GivenStrategies = Strategies | Any
else:
    # Objects, or the command line would look for options in them.
    GivenShardings = GivenStrategies = object

RematPolicy = Literal["none", "dots", "full", "offload"]
Remat = RematPolicy | float

ScheduleName = Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1"]

ContextStrategy = Literal["gather", "ring", "heads", "heads+ring"]

CHUNKS: Mapping[str, int] = {"interleaved": 2}
"""Stages on each device where a plan does not say how many, of schedules that take several."""

MOST_PARTS = 2**16
"""Parts into which any batch may be split; more need an example each."""

MESH_AXES = ("member", "data", "pipeline", "context", "tensor")
"""The mesh axes, always in this order."""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """How one training step is distributed over devices.

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
    """Devices over which the batch is split (mesh axis `data`)."""
    microbatches: int | Sequence[int] = 1
    """Parts into which a device splits its share of the batch, processed one after another.
    Gradients are added up locally and reduced over devices once per step, so more microbatches
    need less memory and no more communication. A tuple has the number of each device of `data`,
    where these are not equally fast: all microbatches have the same number of rows."""
    precision: Precision = "float32"
    """`bfloat16` casts parameters and floating inputs inside the loss and predict functions;
    parameters, sums, reduction, optimizer and model state keep their own dtype. `float32` casts
    nothing."""

    member: int = 1
    """Devices over which the members of a population are split (mesh axis `member`). Members never
    communicate."""
    chunk: int | None = None
    """Members that a device processes at a time, one chunk after another. None: chosen from the
    shapes and the device; `plurax.ensemble.tune` measures instead."""
    batch_dim: BatchDim | None = None
    """The dim of the batch in the arrays of the gradient: `major`, as the task is written, or
    `minor`, transposed so that vector units work along the batch. None: for members chosen from the
    shapes and the device (`plurax.ensemble.tune` measures instead), for one network `major`."""

    pipeline: int = 1
    """Devices over which the layers are split, as consecutive stages (mesh axis `pipeline`): of a
    task that `plurax.stack` returned, or of a model with `plurax.pipeline.stage_boundary`."""
    stages: int | None = None
    """Stages into which the layers are split, a multiple of `pipeline`. None: one for each device,
    two for the schedule `interleaved`."""
    layers: Sequence[int] | None = None
    """The number of layers of each stage, in the order of the stages; of a model with
    `plurax.pipeline.stage_boundary`, the number of consecutive parts. None: as equal as can be,
    earlier stages having more."""
    schedule: ScheduleName | Sequence[str] = "1f1b"
    """The order in which the devices of a pipeline process the microbatches: a name, or by hand one
    line for each device, like `F0 F1 B0 B1`."""

    context: int = 1
    """Devices over which the tokens of each sequence are split (mesh axis `context`); needs
    `stream`."""
    context_strategy: ContextStrategy = "gather"
    """How queries meet the keys and values of other devices of `context`: all are gathered; they go
    around in a `ring` of devices, while each computes with those that it has; or `heads` are
    exchanged for tokens among as many devices as divide them, so that each has all their tokens of
    a share of the heads: beyond these keys are gathered, or with `heads+ring` go around."""
    tensor: int = 1
    """Devices over which tensors and operators are split (mesh axis `tensor`), according to
    `shardings` and the annotations `plurax.sharding.name` and `plurax.sharding.shard`."""
    zero: int = 0
    """What is split over `data` besides the batch (ZeRO), and over `context`: 1 the optimizer's
    state; 2 gradients too, reduced to their shards in every microbatch; 3 parameters too, gathered
    where they are used."""
    bucket_bytes: int = 4_000_000
    """With `zero`, the bytes of tensors that one collective gathers over `data`, or reduces
    to shards, and at most 8 tensors. With `zero=3` a device holds two such buckets of parameters:
    the one it computes with, and the next. 1: one collective per tensor."""
    reduce_dtype: ReduceDtype | None = None
    """The dtype in which gradients are added up over `data`. None: their own. `bfloat16`: each
    device rounds its sum, and sends half the bytes; microbatches, norm and optimizer keep the
    gradients' dtype. It changes numbers, so no search chooses it."""
    remat: Remat = "none"
    """What the backward pass recomputes instead of storing it: nothing; all but matrix products
    (`dots`); all but the inputs of layers, or outside a loop over layers of segments of equations
    (`full`); or all but products without batch dims, such as those with weights, which are stored
    in the host's memory (`offload`). A number between 0 and 1: as `dots`, but within that share
    of the bytes of products it stores those that take the most operations for each byte."""
    stream: int | None = None
    """The keys of a block of attention. Products of activations that are summed over their keys,
    as softmax attention is, are then computed block after block, and no array of queries by keys is
    held. None, or as many keys as there are: as the task is written."""
    shardings: GivenShardings = ()
    """The shardings of parameters and named activations, as a dict: pattern -> one entry for each
    dim: None for a dim that is not split, the name of a mesh axis, or several; a leading `...`
    stands for any number of such dims. The first pattern that matches a parameter's path or an
    activation's name counts."""
    strategies: GivenStrategies = None
    """The shard strategies of single equations, where a search found another one than the default
    (see `plurax.strategies`); they hold for one model."""

    def __post_init__(self) -> None:
        for field, checked in _FIELDS.items():
            object.__setattr__(self, field, checked(field, getattr(self, field)))
        self._check_together()
        if self.layers is not None:
            object.__setattr__(self, "layers", _layers(self.layers, self.total_stages))

    def _check_together(self) -> None:
        """Raise `PlanError` for fields that cannot go together."""
        self._check_uneven()
        if self.stages is not None and self.stages % self.pipeline:
            near = max(1, round(self.stages / self.pipeline)) * self.pipeline
            raise errors.PlanError(
                f"Plan(stages={self.stages}, pipeline={self.pipeline}): every device needs the "
                f"same number of stages; stages={near} works."
            )
        if self.strategies is not None and self.pipeline > 1:
            raise errors.PlanError(
                f"Plan(pipeline={self.pipeline}, strategies=...): the strategies are of the "
                "equations of the whole differentiated loss, and a pipeline differentiates "
                "stage by stage. Remove [strategies]; the shardings of parameters hold in a "
                "pipeline too."
            )
        if self.strategies is not None and self.context > 1:
            raise errors.PlanError(
                f"Plan(context={self.context}, strategies=...): the strategies were found for an "
                "operator that has all tokens. Remove [strategies]; the shardings of parameters "
                "hold beside `context` too."
            )
        if self.remat == "offload" and self.pipeline > 1:
            raise errors.PlanError(
                f"Plan(remat='offload', pipeline={self.pipeline}): a pipeline stores its residuals "
                "in buffers on the device, not in the host's memory. Use remat='full', which "
                "stores least, or remat='dots'."
            )
        if self.context > 1 and self.stream is None:
            raise errors.PlanError(
                f"Plan(context={self.context}): the tokens of a sequence are split where attention "
                "is computed in blocks of keys: give the keys of a block too, as in "
                f"Plan(context={self.context}, stream=512)."
            )
        if self.batch_dim == "minor" and self.partitioned:
            raise errors.plan_minor_divided()

    def _check_uneven(self) -> None:
        """Raise `PlanError` for numbers of microbatches that the rest of the plan does not take."""
        if isinstance(self.microbatches, int):
            return
        counts = tuple(self.microbatches)
        if len(counts) != self.data:
            numbers = f"{len(counts)} number{'s' if len(counts) != 1 else ''}"
            raise errors.PlanError(
                f"Plan(data={self.data}, microbatches={counts}) has {numbers} of microbatches: "
                "give one for each device of `data`, or one number for all of them."
            )
        if len(set(counts)) == 1:
            object.__setattr__(self, "microbatches", counts[0])
        elif self.pipeline > 1:
            raise errors.PlanError(
                f"Plan(microbatches={counts}, pipeline={self.pipeline}): the stages of all "
                "replicas follow one schedule, of one number of microbatches. Give faster devices "
                "more layers, Plan(layers=...), or leave out `pipeline`."
            )
        elif self.splits_experts:
            raise errors.PlanError(
                f"Plan(microbatches={counts}): a rule splits a parameter over `data`, whose "
                "devices send rows to each other in every microbatch, and these have different "
                "numbers of them. Give one number for all, or split the parameter over 'tensor'."
            )
        elif self.zero >= 2:
            raise errors.PlanError(
                f"Plan(microbatches={counts}, zero={self.zero}): from zero=2 on all devices of "
                "`data` communicate in every microbatch, and these have different numbers of them. "
                "Use zero=1, which splits the optimizer's state."
            )

    @property
    def replica_microbatches(self) -> tuple[int, ...]:
        """The number of microbatches of each device of `data`."""
        each = self.microbatches
        return (each,) * self.data if isinstance(each, int) else tuple(each)

    @property
    def permutes(self) -> bool:
        """Whether all devices compute the same at a time, and take part in a collective permute:
        without stages, and with as many microbatches on each device of `data`."""
        return self.pipeline == 1 and len({*self.replica_microbatches}) == 1

    @property
    def most_microbatches(self) -> int:
        """The number of microbatches of the device of `data` that has the most."""
        return most_of(self.microbatches)

    @property
    def parts(self) -> int:
        """The number of microbatches of a step, on all devices of `data`."""
        return parts_of(self.microbatches, self.data)

    @property
    def rules(self) -> Shardings:
        """`shardings` as pairs of a pattern and its entries, each pattern once."""
        return sharding_rules(self.shardings)

    @property
    def axes(self) -> dict[str, int]:
        """The size of each mesh axis, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def partitioned(self) -> bool:
        """Whether the step's jaxpr is partitioned equation by equation."""
        replicas = self.data > 1 and (self.zero > 0 or self.splits_experts)
        return self.tensor > 1 or self.context > 1 or self.pipeline > 1 or replicas

    @property
    def splits_experts(self) -> bool:
        """Whether a rule splits a parameter over `data`, as the weights of experts are."""
        entries = [e for _, rule in self.rules for e in rule if self.data > 1]
        return any("data" in (e if isinstance(e, tuple) else (e,)) for e in entries)

    @property
    def forward_microbatches(self) -> int:
        """The number of microbatches of a pipeline's forward-only call; 1 without a pipeline."""
        return self.most_microbatches if self.pipeline > 1 else 1

    @property
    def virtual_stages(self) -> int:
        """The number of stages on each device of the pipeline, as Megatron's virtual stages."""
        if self.stages is not None:
            return self.stages // self.pipeline
        return chunks_of(self.schedule)

    @property
    def total_stages(self) -> int:
        """The number of stages of the network."""
        return self.pipeline * self.virtual_stages

    @property
    def devices(self) -> int:
        """The number of devices the plan needs."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count

    def check_devices(self, available: int) -> None:
        """Raise `PlanError` if the plan needs more than `available` devices."""
        if self.devices > available:
            asked = " × ".join(f"{axis}={size}" for axis, size in self.axes.items() if size > 1)
            sizes = self.axes
            changed: dict[str, int] = {}
            # Suggest a plan that fits: shrink the largest axis first.
            for axis in sorted(sizes, key=lambda axis: -sizes[axis]):
                others = math.prod(sizes.values()) // sizes[axis]
                if math.prod(sizes.values()) > available:
                    sizes[axis] = changed[axis] = max(1, available // others)
            fits = " with ".join(f"{axis}={size}" for axis, size in changed.items())
            have = "1 is available" if available == 1 else f"{available} are available"
            raise errors.PlanError(
                f"the plan needs {self.devices} devices ({asked}) and {have}; {fits} would "
                f"fit. To rehearse the plan on CPU, start with {self.devices} virtual devices: "
                f"plurax.virtual_devices({self.devices}) before any other use of JAX, or --devices "
                f"{self.devices} on the command line."
            )

    def __repr__(self) -> str:
        return changed_repr(self)

    def _repr_html_(self) -> str:
        used = [pair for pair in changed_fields(self).items() if pair[0] not in _TABLES]
        rules = [(f"shardings[{pattern!r}]", entries) for pattern, entries in self.rules]
        if self.strategies is not None:
            rules += [(one.equation, one.inputs) for one in self.strategies.equations]
        title = f"Plan on {self.devices} device{'s' if self.devices > 1 else ''}"
        return html_table(title, ["field", "value"], [*used, *rules])

    def sizes_text(self) -> str:
        """Return the fields that differ from the default, without the sharding rules, as text."""
        short = dataclasses.replace(self, shardings=(), strategies=None)
        return repr(short).removeprefix("Plan(").removesuffix(")") or "one device"

    def explain(self, batch_size: int | None = None) -> str:
        """Return what the plan does, in words; with `batch_size` also how examples are split.

        >>> print(Plan(data=2, microbatches=3).explain(batch_size=10))
        Plan(data=2, microbatches=3): 2 devices
          data=2: the batch is split over 2 devices; parameters are replicated.
          microbatches=3: each device computes its share in 3 microbatches, sums the gradients,
            and reduces them over devices once, at the end of the step.
          precision=float32: nothing is cast.
          batch of 10: 2 devices × 3 microbatches × 2 examples; 2 of 12 rows are padding.
        """
        return explained(self, batch_size)

    def padded_size(self, batch_size: int) -> int:
        """Return the smallest number of rows ≥ `batch_size` that splits evenly.

        Raises `PlanError` for a plan with many more parts than there are examples.

        >>> Plan(data=3, microbatches=2).padded_size(10)
        12
        """
        unit = self.parts
        if unit > max(batch_size, MOST_PARTS):
            raise errors.PlanError(
                f"Plan(data={self.data}, microbatches={self.microbatches}) splits a batch of "
                f"{batch_size:,} examples into {unit:,} parts, and most of them would be padding; "
                f"microbatches={max(1, batch_size // self.data)} has an example in each."
            )
        return -(-batch_size // unit) * unit

    def placed_rows(self, batch_size: int) -> int:
        """Return the number of rows on all devices of `data`, which have room for equally many.

        >>> Plan(data=2, microbatches=(3, 1)).placed_rows(8)  # microbatches of 2
        12
        """
        rows = self.padded_size(batch_size) // self.parts
        return rows * self.most_microbatches * self.data

    def to_toml(self) -> str:
        """Return the plan as TOML, with all fields except those left open (None)."""
        return write_toml(self.table())

    def table(self) -> dict[str, Any]:
        """Return the plan as a table of TOML, which `Plan(**table)` takes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["shardings"] = {pattern: spelled(entries) for pattern, entries in self.rules}
        if self.strategies is not None:
            values["strategies"] = self.strategies.table()
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the plan") -> "Plan":
        """Parse a plan from TOML; missing fields have their default. Raises `PlanError`."""
        with refusing(lambda reason: errors.plan_not_toml(source, reason)):
            values = parse_toml(text)
        return cls.from_table(values, source)

    @classmethod
    def from_table(cls, values: Mapping[str, Any], source: str) -> "Plan":
        """Return the plan of a table that `source` has. Raises `PlanError`, which names it."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise errors.plan_unknown_key(key, known, source)
        try:
            return cls(**values)
        except errors.PlanError as error:
            raise errors.plan_in_a_file(source, error) from None

    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file."""
        replace_file(Path(path), self.to_toml().encode())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a TOML file. Raises `PlanError` for a file that is not a plan."""
        with refusing(lambda reason: errors.plan_not_toml(str(path), reason)):
            text = read_text(path)
        return cls.from_toml(text, source=str(path))


_TABLES = ("shardings", "strategies")
"""The fields that are tables in TOML, and rows of their own in a notebook."""


def most_of(microbatches: int | Sequence[int]) -> int:
    """Return the number of microbatches of the device that has the most."""
    return microbatches if isinstance(microbatches, int) else max(microbatches)


def parts_of(microbatches: int | Sequence[int], data: int) -> int:
    """Return the number of microbatches of a step on so many devices."""
    return microbatches * data if isinstance(microbatches, int) else sum(microbatches)


def chunks_of(schedule: str | Sequence[str]) -> int:
    """Return how many stages a device has where a plan does not say.

    >>> chunks_of("1f1b"), chunks_of("interleaved")
    (1, 2)
    """
    return CHUNKS.get(schedule, 1) if isinstance(schedule, str) else 1


def _schedule(schedule: Any) -> ScheduleName | tuple[str, ...]:
    """Return the name of a schedule, or its lines. Raises `PlanError`.

    Whether the lines can run depends on the microbatches and is checked later. A line that is not a
    list of actions is probably a misspelled name, which the command line passes as a list of one.
    """
    names: tuple[ScheduleName, ...] = get_args(ScheduleName)
    lines = (schedule,) if isinstance(schedule, str) else schedule
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise errors.plan_schedule_unknown(schedule, names)
    for name in names:
        if tuple(lines) == (name,):
            return name
    for line in lines:
        if not line.split() or not all(map(_WORK.fullmatch, line.split())):
            raise errors.plan_schedule_unknown(line, names)
    if isinstance(schedule, str) or not lines:
        raise errors.plan_schedule_unknown(schedule, names)
    return tuple(lines)


_WORK = re.compile(r"[A-Za-z]\d+(\.\d+)?")
"""Matches an action, `F0` or `B3.1`; the schedule knows which letters exist."""


def _layers(value: Any, stages: int) -> tuple[int, ...]:
    """Return the numbers of layers of all stages. Raises `PlanError` for other values."""
    layers = _whole_numbers(value)
    if layers is None:
        raise errors.PlanError(
            f"Plan(layers={value!r}): give the number of layers of each stage, at least 1, in the "
            "order of the stages: layers=(2, 3, 3, 2)."
        )
    if len(layers) != stages:
        numbers = f"{len(layers)} number{'s' if len(layers) != 1 else ''}"
        raise errors.PlanError(
            f"Plan(layers={layers}) has {numbers} of layers, and the plan has {stages} "
            f"stage{'s' if stages > 1 else ''} (`pipeline`, or `stages`): give one for each stage."
        )
    return layers


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    """Return several whole numbers of at least 1 as a tuple; None for other values."""
    # An array of NumPy is no `Sequence`.
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    counts = [whole_number(one) for one in value] if listed else [None]
    whole = tuple(count for count in counts if count is not None)
    return whole if len(whole) == len(counts) else None


# --- What each field may be -----------------------------------------------------------------------


def _whole(hint: str, optional: bool = False) -> Callable[[str, Any], int | None]:
    """Return the check of a whole number of at least 1; of None too where it is `optional`.

    **Arguments:** `hint`, how the message ends.
    """

    def checked(field: str, value: Any) -> int | None:
        number = whole_number(value)
        if number is None and not (optional and value is None):
            raise errors.PlanError(
                f"Plan({field}={value!r}): {field} must be a whole number of at least 1; "
                f"{hint.format(field=field)}."
            )
        return number

    return checked


def _one_of(*choices: Any, optional: bool = False) -> Callable[[str, Any], Any]:
    """Return the check of a value that is one of a few; of None too where it is `optional`."""

    def checked(field: str, value: Any) -> Any:
        number = whole_number(value, 0)  # NumPy's integers are whole numbers too; 3.0 is none
        given = value if number is None else number
        is_choice = isinstance(given, str | int) and not isinstance(given, bool)
        if (given is None and optional) or (is_choice and given in choices):
            return given
        names = ", ".join(map(repr, choices)) + (", or left out" if optional else "")
        raise errors.PlanError(f"Plan({field}={value!r}): {field} must be one of {names}.")

    return checked


def _remat(field: str, value: Any) -> Remat:
    """Return a policy of rematerialization, or the share of the bytes of products."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        policy: Remat = _one_of(*get_args(RematPolicy))(field, value)
        return policy
    if not 0 < (share := float(value)) < 1:
        raise errors.PlanError(
            f"Plan(remat={value!r}): a number is the share of the bytes of matrix products that is "
            "kept, more than 0 and less than 1. remat='full' keeps none of them, remat='dots' all."
        )
    return share


_SIZE = _whole("{field}=1 means 'not used'")
_MICROBATCHES = _whole(
    "{field}=1 means 'not used', and {field}=(3, 1) that one of two devices has more than the other"
)
_CHOSEN = _whole("leave it out to have it chosen", optional=True)
_FIELDS: Mapping[str, Callable[[str, Any], Any]] = {
    "shardings": lambda field, value: sharding_rules(value),
    "strategies": lambda field, value: None if value is None else Strategies.of(value),
    **dict.fromkeys(("data", "member", "pipeline", "context", "tensor"), _SIZE),
    "microbatches": lambda field, value: _whole_numbers(value) or _MICROBATCHES(field, value),
    **dict.fromkeys(("chunk", "stages"), _CHOSEN),
    "stream": _whole("leave it out to compute attention as it is written", optional=True),
    "bucket_bytes": _whole("bucket_bytes=1 sends each tensor on its own"),
    "precision": _one_of(*get_args(Precision)),
    "zero": _one_of(0, *ZERO_TEXTS),
    "context_strategy": _one_of(*get_args(ContextStrategy)),
    "remat": lambda field, value: _remat(field, value),
    "batch_dim": _one_of(*get_args(BatchDim), optional=True),
    "reduce_dtype": _one_of(*get_args(ReduceDtype), optional=True),
    "schedule": lambda field, value: _schedule(value),
}
"""Of each field the check that returns its value, or raises `PlanError`."""
