"""Files and arguments given to the command line."""

from collections.abc import Sequence

from plurax.errors import hints
from plurax.errors.kinds import BatchError, ExperimentError, MissingPackageError, PlanError


def package_missing(what: str, package: str, extra: str) -> MissingPackageError:
    return MissingPackageError(
        f"{what} needs {package}, which is not installed. Install it with "
        f"`pip install 'plurax[{extra}]'`."
    )


def estimate_one_network(command: str) -> ExperimentError:
    return ExperimentError(
        f"plurax {command} is for one network, and this experiment has members, or a task that is "
        "a function of hyperparameters. plurax plan shows what a population's program holds."
    )


def diff_needs_two_plans(arguments: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"plurax plan {' '.join(arguments)}: --diff compares two plan files, which come first. "
        "Write plurax plan a.toml b.toml --diff FILE, where FILE defines experiment()."
    )


def verify_one_network() -> ExperimentError:
    return ExperimentError(
        "plurax verify compares one network under a plan with the same on one device, and this "
        "experiment has members, or a task that is a function of hyperparameters. A "
        "member is trained exactly as one network; verify the task of one of them."
    )


def experiment_missing_file(path: str) -> ExperimentError:
    return ExperimentError(f"{path}: no such file; give a Python file that defines experiment().")


def run_file_unreadable(path: str, reason: str) -> ExperimentError:
    return ExperimentError(
        f"{path} cannot be read: {reason}. Mend it, or give the experiment file in place of the "
        "run's folder."
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


def folder_is_no_run(folder: str, command: str) -> ExperimentError:
    return ExperimentError(
        f"{folder} is a folder without a run.toml, so it is not that of a run. Write plurax "
        f"{command} FILE, where FILE is Python that defines experiment(), or the folder that "
        "plurax train wrote."
    )


def run_without_file(folder: str, command: str) -> ExperimentError:
    return ExperimentError(
        f"{folder} does not say which FILE it was trained from: plurax train did not write it. Add "
        f"the file that defines experiment(): plurax {command} {folder} FILE"
    )


def run_file_moved(folder: str, file: str, command: str) -> ExperimentError:
    return ExperimentError(
        f"{folder} was trained from {file}, which is not there any more. Say where it is now: "
        f"plurax {command} {folder} FILE"
    )


def experiment_missing_function(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} does not define experiment(). Add:\n\n"
        "    def experiment():\n"
        "        return plurax.Experiment(task=..., optimizer=..., data=..., "
        "batch_size=..., epochs=...)\n"
    )


def experiment_wrong_arguments(said: str) -> ExperimentError:
    return ExperimentError(
        f"plurax.Experiment: {said}; its arguments are those of plurax.fit, by the same names."
    )


def experiment_wrong_type(path: str, kind: str) -> ExperimentError:
    return ExperimentError(
        f"{path}: experiment() returned {kind}; it must return plurax.Experiment(...)."
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


def predict_failed(reason: str, path: str, given: str, data: str) -> BatchError:
    return BatchError(
        f"the task's predict cannot take what {path} holds:\n{reason}\n"
        f"  {path} holds:\n{given}\n  the data of the experiment hold:\n{data}"
    )


def not_written(path: str, reason: str) -> ExperimentError:
    return ExperimentError(f"{path} could not be written: {reason}")


def unknown_command(given: str, known: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{given!r} is not a command.{hints.did_you_mean(given, known)} The commands are "
        f"{', '.join(known)}; plurax --help explains them."
    )


def no_experiment_file(command: str) -> ExperimentError:
    return ExperimentError(
        f"name the experiment file: plurax {command} FILE (it comes first). "
        "FILE is Python that defines experiment(); plurax --help shows an example."
    )


def devices_not_understood(value: str) -> PlanError:
    return PlanError(
        f"--devices {value}: give a number of virtual CPU devices, or 'cores' for one per core."
    )


def file_is_there(path: str) -> ExperimentError:
    return ExperimentError(
        f"{path} is there already, and is not written over. Give another name or folder, or move "
        "it away."
    )


def example_unknown(name: str, known: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{name!r} is not an example.{hints.did_you_mean(name, known)} The examples are "
        f"{', '.join(known)}; plurax examples says what each is."
    )


def inputs_not_found(path: str) -> BatchError:
    return BatchError(f"{path}: no such file; --inputs wants a .npy or .npz file.")


def inputs_not_arrays(path: str, reason: str) -> BatchError:
    return BatchError(f"{path} is not a .npy or .npz file of plain arrays: {reason}")


def missing_extra(package: str, extra: str) -> ImportError:
    return ImportError(
        f"{package} is not installed; install it with pip install 'plurax[{extra}]'."
    )
