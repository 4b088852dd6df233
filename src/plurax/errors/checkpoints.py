"""Checkpoints that cannot be written or read."""

from collections.abc import Iterable

from plurax.errors.kinds import CheckpointError


def checkpoint_none(directory: str) -> CheckpointError:
    return CheckpointError(f"{directory} holds no checkpoint; train with this directory first.")


def checkpoint_all_damaged(directory: str, reasons: Iterable[str]) -> CheckpointError:
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    return CheckpointError(
        f"no checkpoint in {directory} can be restored, and training does not silently start "
        f"from scratch:\n{listed}\nMove the directory away to start anew."
    )


def checkpoint_mismatch(directory: str, expected: str, given: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {directory} was written by another task or optimizer.\n"
        f"  the program holds:\n{expected}\n  the checkpoint holds:\n{given}\n"
        "Use another directory, or the task and optimizer it was written with."
    )


def checkpoint_other_run(directory: str, field: str, saved: object, now: object) -> CheckpointError:
    return CheckpointError(
        f"the run saved in {directory} has {field}={saved!r} and this one {field}={now!r}; "
        "continuing would not be the same training. Use the same value, or another directory."
    )


def output_has_run(directory: str, step: int) -> CheckpointError:
    return CheckpointError(
        f"{directory} already holds a run, saved at step {step}. To continue it, say resume=True "
        "(--resume on the command line); to start anew, choose another output directory."
    )


def checkpoint_not_written(directory: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint could not be written to {directory}: {reason}")


def path_is_a_url(path: str, scheme: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: plurax writes to the file system of this machine, and {scheme}:// is another. "
        "Mount the bucket and give the path where it is mounted, or write to a folder and copy it."
    )
