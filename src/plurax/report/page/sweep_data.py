"""The sweeps among some runs: hyperparameters beside metrics, one row for each network.

A sweep is a table that `px.sweep` wrote, a population whose members have hyperparameters of their
own, or several runs whose settings differ.
"""

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plurax.plan import Plan
from plurax.report.page.embed import json_value
from plurax.report.page.run_data import RunData
from plurax.report.run_series import ENDS, crowds_low, is_number, metrics_of
from plurax.sweeps.importance import importance
from plurax.validate import rises

Row = dict[str, Any]

FEWEST_ROWS = 4
"""Networks that are compared as a sweep; fewer stand in the table of runs."""
MOST_ROWS = 5000
"""Networks of a sweep that are drawn: the first ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class SweepData:
    """A table of networks.

    **Fields:** `title`; `names` of hyperparameters and `metrics`; `rows`, each with all of them and
    `label`, what the network is called.
    """

    title: str
    names: Sequence[str]
    metrics: Sequence[str]
    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """Return what the page draws: columns, their importance, and which metrics rise."""
        columns = [*self.names, *self.metrics]
        shown = self.rows[:MOST_ROWS]
        return {
            "title": self.title,
            "names": list(self.names),
            "metrics": list(self.metrics),
            "rising": [metric for metric in self.metrics if rises(metric)],
            "logs": [
                name
                for name in self.names
                if all(map(is_number, self._column(name))) and crowds_low(self._column(name))
            ],
            "labels": [row["label"] for row in shown],
            "rows": json_value([[row.get(column) for column in columns] for row in shown]),
            "left_out": len(self.rows) - len(shown),
            "importance": {
                metric: json_value(
                    [importance(self._column(name), self._numbers(metric)) for name in self.names]
                )
                for metric in self.metrics
            },
        }

    def _column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def _numbers(self, name: str) -> list[float]:
        return [v if is_number(v) else math.nan for v in self._column(name)]


def sweeps(runs: Sequence[RunData], folders: Iterable[Path]) -> list[SweepData]:
    """Return the sweeps in the folders of runs, in `folders` of runs, and among the runs."""
    tables = []
    places = dict.fromkeys([*folders, *(run.path for run in runs)])
    for folder in places:
        for path in sorted(folder.glob("*.csv")):
            table = _read_table(path)
            tables += [] if table is None else [table]
    tables += [members for run in runs if (members := _of_members(run)) is not None]
    among = _of_runs(runs)
    return tables if among is None else [*tables, among]


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between some rows, missing ones included."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({_key(row.get(name)) for row in rows}) > 1]


def _key(value: Any) -> str:
    return str(float(value)) if is_number(value) else repr(value)


def _read_table(path: Path) -> SweepData | None:
    """Return a table that `Sweep.save_csv` wrote, None for another file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            if not {"bucket", "member", "seed", "loss"} <= {*columns}:
                return None
            rows = [{name: _parsed(row[name]) for name in columns} for row in reader]
    except (OSError, ValueError, csv.Error, KeyError):
        return None
    # Shape settings, hyperparameters, metrics from `loss` on, then `frozen` and `seconds`.
    first, last = columns.index("loss"), columns.index("frozen") if "frozen" in columns else None
    names = [name for name in columns[:first] if name not in ("bucket", "member", "seed")]
    metrics = columns[first:last]
    for row in rows:
        row["label"] = f"member {row['member']}" + (
            f" of bucket {row['bucket']}" if any(other["bucket"] != 0 for other in rows) else ""
        )
    title = f"{path.parent.name}/{path.name}"
    names = [name for name in names if len({_key(row[name]) for row in rows}) > 1]
    return _table(title, names, metrics, rows)


def _of_members(run: RunData) -> SweepData | None:
    """Return the members of a population with hyperparameters of their own."""
    values, count = run.series.last.get("members"), run.series.members or 0
    prefix = "members.hyper."
    if not isinstance(values, dict):
        return None
    # An array of each member, such as a confusion matrix, is no column.
    values = {name: v for name, v in values.items() if not any(isinstance(x, list) for x in v)}
    hyper = {
        name.removeprefix(prefix): column
        for name, column in run.settings.items()
        if name.startswith(prefix) and isinstance(column, list) and len(column) == count
    }
    rows = [
        {name: column[i] for name, column in (hyper | values).items() if i < len(column)}
        | {"label": f"member {i}"}
        for i in range(count)
    ]
    names = [name for name in differing(rows) if name in hyper]
    return _table(f"members of {run.name}", names, list(values), rows)


def _of_runs(runs: Sequence[RunData]) -> SweepData | None:
    """Return runs as a sweep over the numbers and short texts that differ between them."""
    settings = aligned_settings(runs)
    names = [
        name
        for name in differing(settings)
        if not name.startswith(SURROUNDINGS)
        and all(
            is_number(values.get(name)) or isinstance(values.get(name), str) for values in settings
        )
    ]
    # A text that is different in nearly every run is a name, not a choice.
    names = [
        name
        for name in names
        if is_number(settings[0][name])
        or len({values[name] for values in settings}) <= max(2, len(runs) // 2)
    ]
    names = [name for name in names if name != "seed"] or names
    metrics = shared_metrics(runs)
    rows = [
        {**{name: values[name] for name in names}, **{m: run.series.final.get(m) for m in metrics},
         "label": run.name}
        for run, values in zip(runs, settings, strict=True)
    ]  # fmt: skip
    return _table(f"the {len(runs)} runs", names, metrics, rows)


def shared_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics that every run reports after an epoch, those of the evaluation first."""
    names = [
        name
        for name in metrics_of(runs[0].series.final if runs else {})
        if not name.endswith(ENDS) and all(is_number(run.series.final.get(name)) for run in runs)
    ]
    return sorted(names, key=lambda name: (not name.startswith("eval_"), names.index(name)))


HIDDEN = ("started", "plan.", "members.hyper.", "members.seeds", "options.machine", "command.",
          "options.progress", "compiled.")  # fmt: skip
"""How names in `run.toml` begin that no comparison shows; fields of the plan come from the plan."""


ORDER = ("file", "experiment.", "batch_size", "epochs", "seed", "plan.", "members")
"""How the names begin that stand first."""
SURROUNDINGS = ("versions.", "devices.", "git.", "file")
"""What a run was trained with and is no hyperparameter."""


def compared_settings(run: RunData) -> dict[str, Any]:
    """Return what a run was started with, as far as one compares it with other runs."""
    plan = {} if run.plan is None else {
        f"plan.{name}": value for name, value in vars(run.plan).items()
        if isinstance(value, int | float | str) and value != getattr(Plan(), name, None)
    }  # fmt: skip
    own = {
        name.removeprefix("options."): value
        for name, value in run.settings.items()
        if not name.startswith(HIDDEN) and value != "None"  # as `run.toml` writes None
    }
    settings = plan | own
    if run.series.batch_size:
        settings.setdefault("batch_size", run.series.batch_size)
    if run.series.members and "members.count" not in settings:
        settings["members"] = run.series.members
    if "git.commit" in settings:
        settings["git.commit"] = str(settings["git.commit"])[:10]
    file = run.settings.get("command.file")
    settings |= {} if file is None else {"file": Path(str(file)).name}

    def place(name: str) -> int:
        return next((at for at, begin in enumerate(ORDER) if name.startswith(begin)), len(ORDER))

    return {name: settings[name] for name in sorted(settings, key=place)}


def aligned_settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the settings of runs; a field of a plan that others set has its default there."""
    settings = [compared_settings(run) for run in runs]
    named = dict.fromkeys(name for own in settings for name in own if name.startswith("plan."))
    defaults = {name: getattr(Plan(), name.removeprefix("plan."), None) for name in named}
    return [
        own if run.plan is None else {name: value for name, value in defaults.items()
                                      if value is not None} | own
        for run, own in zip(runs, settings, strict=True)
    ]  # fmt: skip


def _table(
    title: str, names: Sequence[str], metrics: Sequence[str], rows: Sequence[Row]
) -> SweepData | None:
    if not names or not metrics or len(rows) < FEWEST_ROWS:
        return None
    return SweepData(title, names, metrics, rows)


def _parsed(text: str | None) -> Any:
    if text is None:
        raise ValueError  # a line with too few columns
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
