"""Log the rows of a run to TensorBoard, MLflow, or Weights & Biases."""

import tomllib
from pathlib import Path
from typing import Any

from plurax.disk import log_errors
from plurax.event_file import EventFile
from plurax.lazy import imported
from plurax.loggers.logger import StepLogger
from plurax.loop.hook import StateHook
from plurax.loop.log_rows import Row, named_numbers
from plurax.loop.run import Run


class TensorBoard(StepLogger):
    """Write numbers to TensorBoard events in a directory; `output` has its own already."""

    def __init__(self, directory: str | Path, *, every: int = 10) -> None:
        super().__init__(every)
        self._directory = Path(directory)

    def _open(self, run: Run) -> None:
        with log_errors(self._directory):
            self._events = EventFile(self._directory, run.step + 1 if run.step else None)

    def _write(self, row: Row) -> None:
        self._events.scalars(named_numbers(row), row["step"])

    def _flush(self) -> None:
        with log_errors(self._directory):
            self._events.file.flush()

    def _close(self, run: Run) -> None:
        with log_errors(self._directory):
            self._events.file.close()


class Mlflow(StepLogger, StateHook):
    """Log to MLflow: settings as parameters, rows as metrics.

    A run that is resumed goes on in the same run of MLflow.

    **Arguments:** `experiment`, its name; `tracking_uri`, default what MLflow is set to (the
    environment variable `MLFLOW_TRACKING_URI`); `name`, of the run.

    Raises `MissingPackageError` without `mlflow` or `mlflow-skinny`.
    """

    def __init__(
        self,
        experiment: str = "plurax",
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        every: int = 10,
    ) -> None:
        super().__init__(every)
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._id: str | None = None
        self._mlflow = imported("mlflow", "Mlflow", "mlflow", "mlflow")

    def _open(self, run: Run) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        self._id = self._client.create_run(experiment, run_name=self._name).info.run_id
        for name, value in _settings(run).items():
            self._client.log_param(self._id, name, value)

    def _write(self, row: Row) -> None:
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(name, value, 0, row["step"]) for name, value in named_numbers(row).items()
        ]
        self._client.log_batch(self._id, metrics)

    def _close(self, run: Run) -> None:
        self._client.set_terminated(self._id, "FAILED" if run.failed else "FINISHED")

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"id": self._id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._id = state["id"]


class Wandb(StepLogger, StateHook):
    """Log to Weights & Biases: settings as configuration, rows as history.

    A run that is resumed goes on in the same run there.

    **Arguments:** `project`; `name`, of the run; `options`, further arguments of `wandb.init`, of
    which `config` is added to the settings.

    What you log besides, such as pictures, needs the step of the rows:
    `wandb.run.log({...}, step=run.step)` in a callback. Without it the client counts its own steps,
    and leaves out rows of a step before.

    Raises `MissingPackageError` without `wandb`.
    """

    def __init__(
        self, project: str = "plurax", *, name: str | None = None, every: int = 10, **options: Any
    ) -> None:
        super().__init__(every)
        self._options = {"project": project, "name": name, **options}
        self._id: str | None = None
        self._wandb = imported("wandb", "Wandb", "wandb", "wandb")

    def _open(self, run: Run) -> None:
        again = {"id": self._id, "resume": "allow"} if self._id else {}
        options = {**self._options, **again}
        options["config"] = {**_settings(run), **(options.get("config") or {})}
        self._run = self._wandb.init(**options)
        self._id = self._run.id

    def _write(self, row: Row) -> None:
        self._run.log(named_numbers(row), step=row["step"])

    def _close(self, run: Run) -> None:
        self._run.finish(exit_code=int(run.failed))

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"id": self._id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._id = state["id"]


def _settings(run: Run) -> dict[str, Any]:
    """Return what the run was started with: its settings, and the fields of its plan."""
    plan = tomllib.loads(run.program.plan.to_toml())
    members = {} if run.members is None else {"members": run.members.count}
    return {**run.settings, **{f"plan.{name}": value for name, value in plan.items()}, **members}
