"""Experiment files, runs and the command line."""

from collections.abc import Sequence

from plurax.errors import hints
from plurax.errors.kinds import ExperimentError, MissingPackageError


def package_missing(what: str, package: str, extra: str) -> MissingPackageError:
    return MissingPackageError(
        f"{what} needs {package}, which is not installed. Install it with "
        f"`pip install 'plurax[{extra}]'`."
    )


def run_file_unknown(path: str, name: str, known: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{path} has {name}, which plurax does not know.{hints.did_you_mean(name, known)} Write it "
        "as it was, or remove it; plurax train FILE writes the file anew."
    )


def run_file_value(path: str, name: str, value: object, kind: str) -> ExperimentError:
    return ExperimentError(
        f"{path} has {name} = {value!r}, and it is {kind} there. Write it as it was, or remove it; "
        "plurax train FILE writes the file anew."
    )


def run_without_file(folder: str, command: str) -> ExperimentError:
    return ExperimentError(
        f"{folder} does not say which FILE it was trained from: plurax train did not write it. Add "
        f"the file that defines experiment(): plurax {command} {folder} FILE"
    )


def experiment_failed(path: str, reason: str) -> ExperimentError:
    return ExperimentError(f"{path} could not be loaded:\n{reason}")


def experiment_exits(path: str, reason: str) -> ExperimentError:
    return ExperimentError(
        f"{path} ends the process before anything is trained:\n{reason}\n"
        "Put what only `python FILE` should do under if __name__ == '__main__'."
    )


def user_code_failed(reason: str) -> ExperimentError:
    return ExperimentError(f"your code raised an exception:\n{reason}")


def not_written(path: str, reason: str) -> ExperimentError:
    return ExperimentError(f"{path} could not be written: {reason}")


def unknown_command(given: str, known: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{given!r} is not a command.{hints.did_you_mean(given, known)} The commands are "
        f"{', '.join(known)}; plurax --help explains them."
    )


def missing_extra(package: str, extra: str) -> ImportError:
    return ImportError(
        f"{package} is not installed; install it with pip install 'plurax[{extra}]'."
    )


def report_not_a_run(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} is not the folder of a run: there is no metrics.jsonl in it, nor in the folders "
        "in it. Give the output directory of a run, such as runs/digits."
    )
