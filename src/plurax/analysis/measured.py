"""What a step took, held and sent, beside its estimate.

Memory and bytes are read from the compiled program that ran, seconds are by the clock. Example:

    predicted  12.3 ms a step, 340.0 MiB on a device, 1.2 MiB sent, on 8xA100-80GB
    measured   13.1 ms a step (+6 %), 352.0 MiB (+4 %), 1.2 MiB
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from plurax.analysis.estimate import Estimate, human_seconds
from plurax.hlo.compiled_collectives import collectives
from plurax.hlo.memory import memory
from plurax.tree import human_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class Measured:
    """What a step took, held and sent, beside its estimate.

    **Fields:**

    - `estimate`: the `Estimate` of the step.
    - `peak`: the most bytes that a device holds, as the compiler reports them.
    - `bytes_sent`: by a device in a step, from the compiled program's collectives; a loop whose
      length depends on the data counts one trip, as in the estimate.
    - `seconds`: of a step by the wall clock, with all that training waits for; None if none was
      timed.
    """

    estimate: Estimate
    peak: int
    bytes_sent: float
    seconds: float | None = None

    @classmethod
    def of(cls, estimate: Estimate, compiled: jax.stages.Compiled, mesh: Mesh) -> "Measured":
        """Return what a compiled step, or a compiled loop over steps, holds and sends."""
        found = collectives(compiled.as_text() or "", mesh, unknown_trips=1)
        sent = sum(one.bytes_sent * (one.trips or 1) for one in found)
        return cls(estimate, memory(compiled).peak, sent)

    def to_json(self) -> dict[str, Any]:
        """Return both as values that JSON holds, with the machine and its correction.

        Of the prediction also `memory` by kind, in bytes, and `parts`, seconds by what a device
        does.
        """
        machine, predicted = self.estimate.machine, self.estimate
        measured = {"peak": self.peak, "bytes_sent": self.bytes_sent}
        return {
            "machine": machine.name,
            "correction": machine.correction,
            "predicted": {
                "peak": predicted.peak,
                "bytes_sent": predicted.total_sent,
                "seconds": predicted.seconds,
                "memory": dict(predicted.memory),
                "parts": {name: part for name, part in predicted.parts().items() if part},
            },
            "measured": measured if self.seconds is None else measured | {"seconds": self.seconds},
        }

    def figures(self) -> str:
        """Return what was measured in one line, each with how far it is off the predicted one."""
        said = self.estimate
        sizes = [(self.peak, said.peak), (self.bytes_sent, said.total_sent)]
        parts = [f"{human_bytes(found)}{_off(found, expected)}" for found, expected in sizes]
        if self.seconds is not None:
            off = _off(self.seconds, self.estimate.seconds)
            parts.insert(0, f"{human_seconds(self.seconds)} a step{off}")
        return ", ".join(parts)

    def line(self) -> str:
        """Return `figures` with what they are: without seconds, what was only compiled."""
        return f"{'compiled ' if self.seconds is None else 'measured '}  {self.figures()}"

    def __repr__(self) -> str:
        return f"Measured({self.figures()})"

    def __str__(self) -> str:
        return f"{predicted_line(self.estimate)}\n{self.line()}"


def predicted_line(estimate: Estimate) -> str:
    """Return an estimate in one line."""
    machine = estimate.machine
    learned = "" if machine.correction == 1 else f" (seconds × {machine.correction:g}, by runs)"
    return (
        f"predicted  {human_seconds(estimate.seconds)} a step, {human_bytes(estimate.peak)} on a "
        f"device, {human_bytes(estimate.total_sent)} sent, on {machine.name}{learned}"
    )


def _off(measured: float, said: float) -> str:
    """Return how far a measured figure is off the predicted one, "" for less than half a percent.

    >>> _off(13.1, 12.3), _off(1000, 1001), _off(0, 0), _off(5, 0)
    (' (+7 %)', '', '', ' (instead of none)')
    """
    if not said:
        return " (instead of none)" if measured else ""
    percent = round(100 * (measured / said - 1))
    return f" ({percent:+} %)" if percent else ""
