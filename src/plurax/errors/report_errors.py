"""Folders of runs given to `plurax report` and `plurax watch`."""

from plurax.errors.kinds import ExperimentError


def report_not_a_run(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} is not the folder of a run: there is no metrics.jsonl in it, nor in the folders "
        "in it. Give the output directory of a run: plurax report runs/digits."
    )
