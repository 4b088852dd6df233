"""Run a sweep: numeric settings as one population, settings that change shapes in buckets.

Members of a population share one compiled program, so their arrays need equal shapes. Settings that
change shapes (a width, a batch size) each need another program: one bucket per combination.
Example, `members=Members(5, ...)`, `shapes=grid(width=[16, 64], batch_size=[32])`:

    bucket 0    task(width=16), batch_size=32    one program, 5 members    rows 0 to 4
    bucket 1    task(width=64), batch_size=32    one program, 5 members    rows 5 to 9

With `num_parallel=2` both buckets train at once, each on its group of `plan.devices` devices.
"""

import csv
import dataclasses
import inspect
import itertools
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from plurax import errors
from plurax.disk import replacing
from plurax.distributed.global_arrays import fetch, is_primary, process_count
from plurax.ensemble.select import export_member
from plurax.execute.population import HyperFn
from plurax.loop.hook import StateHook
from plurax.members import Grid, Hyper, Members
from plurax.plan import Plan
from plurax.progress.console_progress import new_console
from plurax.state import TrainState
from plurax.sweeps.importance import importance
from plurax.task import Task
from plurax.train.fit import Fit, fit
from plurax.validate import Mode, sign_of_mode

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The result of `sweep`: one table over all members of all buckets.

    **Fields:**

    - `rows`: one for each member: `bucket`, its shape settings, `member`, `seed`,
      hyperparameters, the last value of every metric (`loss`, `eval_loss`, ...), `frozen`, and
      `seconds`, the time of its bucket divided by its members.
    - `fits`: for each bucket its shape settings and the `Fit`.
    """

    rows: list[Row]
    fits: list[tuple[Hyper, Fit]]

    def __repr__(self) -> str:
        return f"Sweep({len(self.rows)} members in {len(self.fits)} buckets)"

    def best(self, metric: str | None = None, *, mode: Mode = "min") -> Row:
        """Return the row with the smallest metric (`mode="max"`: largest) of members not frozen.

        The default metric is `eval_loss`, or `loss` where nothing was evaluated. Raises
        `MembersError` for an unknown metric or mode, and where nothing was trained.
        """
        metric, sign = self.metric(metric), sign_of_mode(mode)
        rows = [row for row in self.rows if not row["frozen"] and np.isfinite(row[metric])]
        if not rows:
            raise errors.MembersError(
                f"all {len(self.rows)} members of the sweep are frozen: loss or gradient was not "
                "finite in each. Smaller learning rates may help."
            )
        return min(rows, key=lambda row: sign * row[metric])

    def metric(self, name: str | None = None) -> str:
        """Return the metric of that name, or the default one. Raises `MembersError`."""
        if not self.rows:
            raise errors.sweep_without_rows()
        if name is None:
            return "eval_loss" if "eval_loss" in self.rows[0] else "loss"
        if name not in self.rows[0]:
            raise errors.sweep_no_metric(name, self.rows[0])
        return name

    def importance(self, metric: str | None = None) -> dict[str, float]:
        """Return which share of a metric's ranks each setting explains by itself, 0 to 1.

        The settings are those of shapes and the hyperparameters, the most important first; those
        that are equal in all rows are left out. Two that matter only together explain nothing by
        themselves. The default metric is that of `best`. Raises `MembersError` as `best` does.
        """
        metric = self.metric(metric)
        names = itertools.takewhile(lambda name: name != "loss", self.rows[0])
        columns = {name: [row[name] for row in self.rows] for name in names}
        scores = [row[metric] for row in self.rows]
        shares = {
            name: importance(values, scores).share
            for name, values in columns.items()
            if name not in ("bucket", "member", "seed") and len({*map(str, values)}) > 1
        }
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def state(self, row: Row) -> TrainState:
        """Return the state of a row's member, as one network's."""
        result, index = self._at(row)
        return export_member(result.state, index)

    def history(self, row: Row) -> list[Row]:
        """Return every metric of a row's member, one row per epoch."""
        result, index = self._at(row)
        return [
            {
                "epoch": epoch_row["epoch"],
                "step": epoch_row["step"],
                **_values(epoch_row["members"], index),
            }
            for epoch_row in result.history
        ]

    def _at(self, row: Row) -> tuple[Fit, int]:
        if row not in self.rows:
            raise errors.MembersError(f"this is not a row of this sweep: {row}.")
        result = self.fits[row["bucket"]][1]
        numbers = [one["member"] for one in _members(result).table()]
        return result, numbers.index(row["member"])

    def to_pandas(self, *, history: bool = False) -> Any:
        """Return the table as a `pandas.DataFrame`; with `history` one row per member and epoch.

        Raises `MembersError` without pandas.
        """
        try:
            import pandas
        except ImportError:
            raise errors.MembersError(
                "to_pandas needs pandas: pip install pandas. Without it, rows is a list of dicts "
                "and save_csv writes a file."
            ) from None
        if not history or not self.rows:
            return pandas.DataFrame(self.rows)
        names = [name for name in self.rows[0] if name not in self.history(self.rows[0])[0]]
        return pandas.DataFrame(
            [
                {**{n: row[n] for n in names}, **one}
                for row in self.rows
                for one in self.history(row)
            ]
        )

    def save_csv(self, path: str | Path) -> None:
        """Write the table as comma-separated values. Raises `MembersError` where it is empty."""
        if not self.rows:
            raise errors.sweep_without_rows()
        with replacing(Path(path)) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)


def sweep(
    task: Task | HyperFn | Callable[..., Task | HyperFn],
    optimizer: Any,
    data: PyTree,
    *,
    members: Members,
    shapes: Grid | Sequence[Hyper] = ({},),
    plan: Plan = Plan(),  # noqa: B008  frozen
    batch_size: int | None = None,
    num_parallel: int = 1,
    output: str | Path | None = None,
    progress: bool = True,
    devices: Sequence[jax.Device] | None = None,
    **options: Any,
) -> Sweep:
    """Train every setting of a sweep, with one compiled program for each shape.

    **Arguments:**

    - `task`: with shapes, a function `task(width=..., ...)` of a shape's settings that returns a
      `Task`, or a function of hyperparameters that returns one; else as for `fit`.
    - `optimizer`, `data`, `members`, `plan`: as for `fit`. Every bucket has the same members.
    - `shapes`: settings that change shapes or code: a `grid`, or a list of dicts. `batch_size`
      among them is passed to `fit`, the others to `task`.
    - `num_parallel`: buckets trained at once, each on other devices; the plan is that of one
      bucket.
    - `output`: a directory with one of `fit` for each bucket, and `table.csv`.
    - `options`: of `fit`: `epochs`, `evaluation`, `resume`, ...

    Callbacks begin anew in each bucket; what one keeps is of the last.

    Raises the errors of `fit`, `PlanError` where `num_parallel` plans do not fit the devices, and
    `TaskError` for callbacks with a state where buckets train at once.
    """
    buckets = _buckets(shapes)
    names = list(dict.fromkeys(name for shape in buckets for name in shape))
    settings = [name for name in names if name != "batch_size"]
    if settings:
        _check_takes(task, settings, buckets)
    if num_parallel > 1:
        _check_callbacks(options.get("callbacks", ()), num_parallel)
    available = list(jax.devices() if devices is None else devices)
    Plan(member=plan.devices * num_parallel).check_devices(len(available))
    # A bucket takes a free group of devices from the queue and puts it back when it is done.
    groups: queue.SimpleQueue[list[jax.Device]] = queue.SimpleQueue()
    for group in _device_groups(available, plan, num_parallel):
        groups.put(group)
    console = new_console(progress and is_primary())

    def run(shape: Hyper) -> Fit:
        group = groups.get()
        settings = {name: value for name, value in shape.items() if name != "batch_size"}
        maker: Any = task
        try:
            result = fit(
                maker(**settings) if settings else task,
                optimizer,
                data,
                members=members,
                plan=plan,
                batch_size=shape.get("batch_size", batch_size),
                output=None if output is None else Path(output) / _name(shape),
                progress=False,
                devices=group,
                **options,
            )
        finally:
            groups.put(group)
        console.print(_line(shape, result))
        return result

    results = _run_all(run, buckets, num_parallel)
    fits = [pair for pair in zip(buckets, results, strict=False) if pair[1].history]
    table = Sweep([row for i, pair in enumerate(fits) for row in _rows(i, names, *pair)], fits)
    if output is not None and table.rows and is_primary():
        table.save_csv(Path(output) / "table.csv")
    return table


def _check_callbacks(callbacks: Any, num_parallel: int) -> None:
    """Raise `TaskError` for a callback that would follow several runs; `fit` checks all others."""
    for callback in callbacks if isinstance(callbacks, Sequence) else ():
        if isinstance(callback, StateHook) and not isinstance(callback, type):
            raise errors.TaskError(
                f"the callback {type(callback).__name__} follows one run at a time, and "
                f"num_parallel={num_parallel} buckets train at once. Leave num_parallel out."
            )


def _check_takes(task: Any, names: Sequence[str], buckets: Sequence[Hyper]) -> None:
    """Raise `MembersError` where the task is no function of the settings of each bucket."""
    if isinstance(task, Task):
        listed = ", ".join(names)
        raise errors.MembersError(
            f"the shapes of the sweep set {listed}, and the task is already a Task. Give a "
            f"function that builds it: def task({listed}): return plurax.Task(...)."
        )
    signature = inspect.signature(task)
    for shape in buckets:
        settings = {name: value for name, value in shape.items() if name != "batch_size"}
        try:
            signature.bind(**settings)
        except TypeError as error:
            listed = ", ".join(settings)
            raise errors.MembersError(
                f"the shapes of the sweep call task({listed}), and its function takes {signature}: "
                f"{error}. Give both the same names; batch_size alone is not the task's."
            ) from None


def _device_groups(
    devices: list[jax.Device], plan: Plan, num_parallel: int
) -> list[list[jax.Device]]:
    """Return the devices of each bucket that runs at the same time.

    Of several processes one bucket has all devices: of two at once each process would start the
    steps in an order of its own. Raises `PlanError` for more.
    """
    if process_count() == 1:
        return [devices[i * plan.devices : (i + 1) * plan.devices] for i in range(num_parallel)]
    if num_parallel > 1:
        raise errors.PlanError(
            f"num_parallel={num_parallel} is for one process, and there are {process_count()}. "
            "Leave it out: each bucket has the devices of all processes, one after another."
        )
    return [devices]


def _buckets(shapes: Any) -> list[Hyper]:
    """Return the settings of each bucket. Raises `MembersError`."""
    if isinstance(shapes, Grid):
        return shapes.settings()
    listed = isinstance(shapes, Sequence) and all(isinstance(one, Mapping) for one in shapes)
    if not listed or not shapes:
        raise errors.MembersError(
            f"sweep(shapes={shapes!r}): give plurax.ensemble.grid(width=[32, 64]), or a list of at "
            "least one dict of settings, [{'width': 32}, {'width': 64}]."
        )
    return [dict(one) for one in shapes]


def _run_all(run: Callable[[Hyper], Fit], buckets: list[Hyper], num_parallel: int) -> list[Fit]:
    if num_parallel > 1:
        with ThreadPoolExecutor(num_parallel) as pool:
            return list(pool.map(run, buckets))
    # Run on the main thread, where `fit` handles Ctrl-C; the table has what is done by then.
    results: list[Fit] = []
    for shape in buckets:
        results.append(run(shape))
        if results[-1].interrupted:
            break
    return results


def _line(shape: Hyper, result: Fit) -> str:
    """Return the line that is printed when a bucket is done."""
    if not result.history:
        return f"{_name(shape)}: stopped before its first report"
    last = result.history[-1]
    return (
        f"{_name(shape)}: {_members(result).count} members, loss {last['loss']:.4f} "
        f"({last['loss_best']:.4f} to {last['loss_worst']:.4f}), {_seconds(result):.1f} s"
    )


def _members(result: Fit) -> Members:
    members = result.program.members
    assert members is not None
    return members


def _name(shape: Hyper) -> str:
    return ",".join(f"{name}={value}" for name, value in shape.items()) or "members"


def _seconds(result: Fit) -> float:
    return float(sum(row["seconds"] for row in result.history))


def _values(members: Row, index: int) -> Row:
    """Return a member's numbers; arrays, such as a confusion matrix, have no place in a table."""
    return {
        name: _value(values, index)
        for name, values in members.items()
        if not isinstance(values[index], list)
    }


def _value(values: list[Any], index: int) -> float:
    """Return a member's value, NaN where it had not joined yet or the value is missing."""
    value = values[index] if index < len(values) else None
    return math.nan if value is None else float(value)


def _rows(bucket: int, names: list[str], shape: Hyper, result: Fit) -> list[Row]:
    last = result.history[-1]["members"]
    table = _members(result).table()
    skipped = fetch(result.state.skipped)
    return [
        {
            "bucket": bucket,
            **{name: shape.get(name) for name in names},
            **row,
            **_values(last, index),
            "frozen": bool(skipped[index]),
            "seconds": _seconds(result) / len(table),
        }
        for index, row in enumerate(table)
    ]
