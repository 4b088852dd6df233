"""What the compiler made of the program that a run trains with, beside what its plan says.

It is read once, after the first epoch, from what JAX holds of the compiled program and of its
trace: nothing is traced or compiled again. `run.toml` keeps it:

    [compiled]
    function = "loop"                   # over steps; or "step"
    seconds = 3.2                       # of tracing and compiling
    state_bytes = 12_000_000            # on a device
    batch_bytes = 4_000_000             # of a loop all data that are there
    temporary_bytes = 7_000_000
    peak_bytes = 23_100_000             # all of it, as the compiler reports it
    planned_peak_bytes = 22_800_000
    collectives = 12                    # in a step
    planned_collectives = 14
    differs = ["all-reduce over data"]  # bytes that are not those of the plan

    [compiled.options]                  # of XLA's compiler, where a run has any
    xla_gpu_enable_pipelined_all_gather = true

    [compiled.sent."all-reduce over data"]
    count = 2
    bytes = 40_000
    planned_count = 4
    planned_bytes = 39_996
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from plurax.analysis.estimate import human_seconds
from plurax.collective import Collective, by_kind, in_a_step
from plurax.execute.program import Program
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import memory
from plurax.trace.clock import names_of
from plurax.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class CompiledFigures:
    """Figures of the compiled step, or loop over steps, that a run trains with.

    **Fields:** as in `run.toml` (see the module); `sent`, by name of a kind and its mesh axes;
    `options`, of the compiler.
    Where nothing says what is planned, as for members, planned figures are None.
    """

    function: str
    seconds: float
    state_bytes: int
    batch_bytes: int
    temporary_bytes: int
    peak_bytes: int
    planned_peak_bytes: int | None
    sent: Mapping[str, Mapping[str, int]]
    options: Mapping[str, bool | int | float | str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, compiled: jax.stages.Compiled) -> "CompiledFigures | None":
        """Read a compiled step or loop of a program; None for another function."""
        record = program.compile_record(compiled)
        if record is None:
            return None
        held, planned = memory(compiled), program.read_traced(record)
        state = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(program.state_shapes)
        )
        batch, several = max(0, held.arguments - state), program.mesh.size > 1
        peak = planned.peak if planned else None
        if peak is not None and record.looped and several:
            peak += batch  # the data, which are not planned
        sent = [] if not several else collectives(
            compiled.as_text() or "", program.mesh, unknown_trips=1
        )  # fmt: skip
        return cls(
            "loop" if record.looped else "step",
            round(record.seconds, 3),
            state,
            batch,
            held.temporaries,
            held.peak,
            peak,
            _sent(sent, planned.collectives if planned else None),
            program.compiler_options,
        )

    def table(self) -> dict[str, Any]:
        """Return the table `[compiled]` of `run.toml`."""
        apart = ("options", "sent")
        values = {k: v for k, v in vars(self).items() if k not in apart and v is not None}
        values["collectives"] = sum(one["count"] for one in self.sent.values())
        if self.planned_peak_bytes is not None:
            planned = (one["planned_count"] for one in self.sent.values())
            values["planned_collectives"] = sum(planned)
        values["differs"] = [
            name for name, one in self.sent.items()
            if one["bytes"] != one.get("planned_bytes", one["bytes"])
        ]  # fmt: skip
        options = {"options": dict(self.options)} if self.options else {}
        return {**values, **options, "sent": {name: dict(one) for name, one in self.sent.items()}}


def figures_text(table: Mapping[str, Any]) -> str:
    """Return the table `[compiled]` of a `run.toml` in one line; "" where it lacks figures."""

    def beside(name: str, text: Callable[[float], str]) -> str:
        planned = table.get(f"planned_{name}")
        return f", planned {text(planned)}" if isinstance(planned, int) else ""

    seconds, peak, sent = (table.get(name) for name in ("seconds", "peak_bytes", "collectives"))
    if not (isinstance(seconds, int | float) and isinstance(peak, int) and isinstance(sent, int)):
        return ""
    plural = "" if sent == 1 else "s"
    several = f"; {sent} collective{plural} in a step{beside('collectives', str)}" if sent else ""
    held = f"{human_bytes(peak)} on a device{beside('peak_bytes', human_bytes)}"
    return f"compiled in {human_seconds(seconds)}: {held}{several}"


def _sent(
    compiled: Sequence[Collective], planned: Sequence[Collective] | None
) -> dict[str, dict[str, int]]:
    """Return counts and bytes in a step by kind and mesh axes, planned ones too where known."""
    groups, plans = by_kind(compiled), by_kind(planned or ())
    sent = {}
    for kind, axes in {**groups, **plans}:
        own = _counted("", groups.get((kind, axes), ()))
        if planned is not None:
            own |= _counted("planned_", plans.get((kind, axes), ()))
        sent[f"{kind} over {names_of(axes)}"] = own
    return sent


def _counted(prefix: str, group: Sequence[Collective]) -> dict[str, int]:
    return {
        f"{prefix}count": in_a_step(group, lambda one: 1),
        f"{prefix}bytes": in_a_step(group, lambda one: one.bytes),
    }
