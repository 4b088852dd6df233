"""Checkpoints that cannot be written or read."""

from collections.abc import Iterable, Mapping, Sequence

from plurax.errors.kinds import CheckpointError, DiskError

MOST_LISTED = 12
"""Tensors that a message lists."""


def checkpoint_all_damaged(directory: str, reasons: Iterable[str]) -> CheckpointError:
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    return CheckpointError(
        f"no checkpoint in {directory} can be restored, and training does not silently start "
        f"from scratch:\n{listed}\nTo start from scratch, pass restart=True (--restart on "
        "the command line): the files are moved aside, not deleted."
    )


def checkpoint_mismatch(
    directory: str, differ: Mapping[str, tuple[str | None, str | None]]
) -> CheckpointError:
    """`differ`: what program and checkpoint hold, each None where it is not there, by path."""
    lines = [
        f"\n    {path}: {ours or 'nothing'} in the program, {saved or 'nothing'} in the checkpoint"
        for path, (ours, saved) in differ.items()
    ]
    left = len(lines) - MOST_LISTED
    more = f"\n    and {left} more" if left > 0 else ""
    return CheckpointError(
        f"the checkpoint in {directory} was written by another task or optimizer. What differs:"
        f"{''.join(lines[:MOST_LISTED])}{more}\n"
        "Use another directory, or the task and optimizer it was written with, with the same "
        "--experiment options: plurax takes them from the run's folder in place of FILE."
    )


def checkpoint_other_experiment(
    directory: str, changed: Mapping[str, tuple[object, object]]
) -> CheckpointError:
    """`changed`: what an argument was in the run and is now, by dotted name."""
    listed = "".join(
        f"\n    experiment.{name}: {saved!r} in the run, {now!r} now"
        for name, (saved, now) in changed.items()
    )
    before = " ".join(_option(name, saved) for name, (saved, _) in changed.items())
    after = " ".join(_option(name, now) for name, (_, now) in changed.items())
    return CheckpointError(
        f"the run saved in {directory} was trained with other arguments of experiment():{listed}\n"
        "run.toml, or a default of FILE, has changed since, and continuing would not be the same "
        f"training. To go on as before, write {before}; to go on with the new values from here on, "
        f"{after}; to start from scratch, --restart."
    )


def _option(name: str, value: object) -> str:
    """Return how the command line gives an argument of `experiment()`, by dotted name."""
    above, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--experiment.{above}{dot}{'' if value else 'no-'}{last}"
    if isinstance(value, list):
        return f"--experiment.{above}{dot}{last} {' '.join(map(str, value))}"
    return f"--experiment.{above}{dot}{last}={value}"


def checkpoint_not_newer(directory: str, step: int, newest: int) -> CheckpointError:
    return CheckpointError(
        f"step {step} cannot be saved to {directory}: another state is saved there, the newest of "
        f"step {newest}, and checkpoints follow the order of steps. Go on from the state that "
        "Checkpoints.restore gives, or use another directory."
    )


def checkpoint_not_written(directory: str, reason: str) -> DiskError:
    return DiskError(f"the checkpoint could not be written to {directory}: {reason}")


def checkpoint_too_slow(directory: str, seconds: float) -> DiskError:
    return DiskError(
        f"a checkpoint is still not written to {directory} after {seconds:g} s, and nothing waits "
        "longer. See whether the disk still answers; resume goes on from the checkpoint before."
    )


def weights_unknown(path: str, exists: bool) -> CheckpointError:
    if not exists:
        return CheckpointError(f"{path}: there are no weights; no such file or folder.")
    return CheckpointError(
        f"{path} is neither a .safetensors nor a .msgpack file, nor a folder with an Orbax "
        "checkpoint or the output of a run."
    )


def record_unreadable(path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not as it was written: {reason}. Restore it from a copy, or train in another "
        "folder."
    )


def weights_damaged(path: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: the weights cannot be read: {reason}")


def weights_differ(
    missing: Sequence[str],
    unused: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    strict: bool,
) -> CheckpointError:
    parts = [
        *(
            f"  {name}: the parameter has shape {wanted}, the weight {given}"
            for name, (wanted, given) in shapes.items()
        ),
        *(f"  {name}: no weight of this name" for name in (missing if strict else ())),
        *(f"  {name}: no parameter of this name" for name in (unused if strict else ())),
    ]
    more = f"\n  and {len(parts) - 20} more" if len(parts) > 20 else ""
    shown = "\n".join(parts[:20]) or "  no weight has the name of a parameter"
    way = "rename= changes names"
    way += "; strict=False starts the others as the task's init has them" if strict else ""
    return CheckpointError(f"the weights differ from the task's parameters:\n{shown}{more}\n{way}.")
