"""The kinds of error that a user can cause, and of warnings; users have them as `plurax.errors`."""


class PluraxError(ValueError):
    """Base of every error that a user of plurax can cause."""


class ArgumentError(PluraxError, TypeError):
    """An argument that is not what its annotation says, or that a function does not take."""


class PlanError(PluraxError):
    """A plan that cannot run."""


class OutOfMemoryError(PlanError):
    """A plan that needs more memory than there is."""


class ShardingWarning(UserWarning):
    """A tensor is not sharded as a rule says, or is gathered for an operation without a rule."""


class StreamWarning(UserWarning):
    """Attention that `Plan(stream=...)` does not compute in blocks."""


class MaskWarning(UserWarning):
    """A batch needs a program for its exact size: the loss does not read its mask."""


class NonFiniteWarning(UserWarning):
    """A loss or gradient was not finite; the update was left out."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged: it was set aside or skipped, and an older one is used."""


class SaveFailedWarning(UserWarning):
    """A checkpoint or the log could not be written; training goes on."""


class DamagedLogWarning(UserWarning):
    """Lines of `metrics.jsonl` are missing, changed, or cannot be read."""


class RollbackWarning(UserWarning):
    """Steps in a row were bad, and training goes back to a checkpoint before them."""


class TaskError(PluraxError):
    """A task whose functions do not keep their contract."""


class BatchError(PluraxError):
    """Data that do not fit the program they are given to."""


class MembersError(PluraxError):
    """A population that cannot be made, or does not fit where it is used."""


class CheckpointError(PluraxError):
    """A checkpoint that cannot be written or read."""


class DiskError(CheckpointError):
    """A checkpoint or a log that the disk does not take."""


class RunStoppedError(PluraxError):
    """A run that began and cannot go on; started again it would stop again."""


class SavingStoppedError(CheckpointError, RunStoppedError):
    """Training stopped because the disk took no checkpoint for too long."""


class ExperimentError(PluraxError):
    """A file given to the command line that does not define a usable experiment."""


class MachineError(PluraxError):
    """A description of a machine that no estimate can use."""


class ReplicaError(PluraxError):
    """A device holds other bits than the devices with copies of the same values."""


class ProcessError(PluraxError):
    """Processes that cannot train together."""


class PeerError(ProcessError):
    """Another process has ended, or takes part no more."""


class MissingPackageError(PluraxError, ImportError):
    """A package that only some features need, and that is not installed."""
