"""Trace chosen steps."""

from pathlib import Path

import jax

from plurax import errors
from plurax.loop.hook import NextStopHook, StartHook, StepHook, StopHook
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.validate import whole_number


class Profile(NextStopHook, StartHook, StepHook, StopHook):
    """Write a JAX trace of some steps, for XProf, TensorBoard or Perfetto.

    The steps run as they always do; the loop only ends a call before the first of them and after
    the last.

    **Arguments:** `steps`, the first and the last; `directory`, by default `profile` in the run's
    output.

    Raises `TaskError` for other steps, and without a directory.
    """

    def __init__(self, steps: tuple[int, int] = (10, 12), directory: str | Path | None = None):
        numbers = [whole_number(one) for one in steps] if isinstance(steps, tuple) else []
        first, last = numbers if len(numbers) == 2 else (None, None)
        if first is None or last is None or first > last:
            raise errors.TaskError(
                f"Profile(steps={steps!r}): give the first and the last step, such as (10, 12)."
            )
        self._first, self._last = first, last
        self._directory = None if directory is None else Path(directory)
        self._tracing = False

    def next_stop(self, step: int) -> int | None:
        """Return where the loop has to end a call: before the first step, and after the last."""
        ends = (self._first - 1, self._last)
        return next((end for end in ends if end > step), None)

    def on_start(self, run: Run) -> None:
        """Begin where the run begins."""
        if self._directory is None and run.output is None:
            raise errors.TaskError(
                "Profile() has no directory to write to: give Profile(directory='trace') or "
                "fit(output=...)."
            )
        self._look(run)

    def on_step(self, run: Run, row: Row) -> None:
        """Begin or end the trace, where the loop has ended a call."""
        if row["step"] == run.step:
            self._look(run)

    def on_stop(self, run: Run) -> None:
        """End the trace."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def _look(self, run: Run) -> None:
        if self._tracing and run.step >= self._last:
            jax.block_until_ready(run.state)
            self.on_stop(run)
        elif not self._tracing and run.step == self._first - 1:
            jax.block_until_ready(run.state)
            directory = self._directory or run.output / "profile"  # type: ignore[operator]
            jax.profiler.start_trace(directory)
            self._tracing = True
