"""What callbacks cost: `fit` with three of them, and without."""

from collections.abc import Iterator

from benchmarks import sizes
from benchmarks.harness import Row, Side, Skipped, WorkerSkippedError, compare, take_turns
from benchmarks.run import Run

TARGET = 1 / 1.01
"""As a speed: three callbacks may take a hundredth of the time."""


def callbacks(run: Run) -> Iterator[Row]:
    """A run of `fit` with early stopping, the learning rate and a table; and the same without."""
    for case in run.sizes.callbacks:
        settings = {"network": sizes.to_json(case.network), "batch": case.batch,
                    "steps": case.steps, "epochs": case.epochs}  # fmt: skip
        try:
            worker = run.jax("jax_callbacks", settings)
        except WorkerSkippedError as reason:
            yield Skipped("callbacks", case.name, str(reason))
            continue
        with worker:
            sides = [Side(worker, "with callbacks"), Side(worker, "without")]
            ours, theirs = take_turns(sides, case.repeats, warm_up=1)
            name = f"{case.name}, fit of {case.epochs} × {case.steps} steps, 3 callbacks"
            yield compare("callbacks", name, "no callbacks", ours, theirs, TARGET, worker.facts)
