from plurax.errors.argument_errors import *  # noqa: F403
from plurax.errors.batch_errors import *  # noqa: F403
from plurax.errors.checkpoint_errors import *  # noqa: F403
from plurax.errors.experiment_errors import *  # noqa: F403
from plurax.errors.hints import *  # noqa: F403
from plurax.errors.kinds import ArgumentError as ArgumentError
from plurax.errors.kinds import BatchError as BatchError
from plurax.errors.kinds import CheckpointError as CheckpointError
from plurax.errors.kinds import DamagedCheckpointWarning as DamagedCheckpointWarning
from plurax.errors.kinds import DamagedLogWarning as DamagedLogWarning
from plurax.errors.kinds import DiskError as DiskError
from plurax.errors.kinds import ExperimentError as ExperimentError
from plurax.errors.kinds import MachineError as MachineError
from plurax.errors.kinds import MaskWarning as MaskWarning
from plurax.errors.kinds import MembersError as MembersError
from plurax.errors.kinds import MissingPackageError as MissingPackageError
from plurax.errors.kinds import NonFiniteWarning as NonFiniteWarning
from plurax.errors.kinds import OutOfMemoryError as OutOfMemoryError
from plurax.errors.kinds import PeerError as PeerError
from plurax.errors.kinds import PlanError as PlanError
from plurax.errors.kinds import PluraxError as PluraxError
from plurax.errors.kinds import ProcessError as ProcessError
from plurax.errors.kinds import ReplicaError as ReplicaError
from plurax.errors.kinds import RollbackWarning as RollbackWarning
from plurax.errors.kinds import RunStoppedError as RunStoppedError
from plurax.errors.kinds import SaveFailedWarning as SaveFailedWarning
from plurax.errors.kinds import SavingStoppedError as SavingStoppedError
from plurax.errors.kinds import ShardingWarning as ShardingWarning
from plurax.errors.kinds import StreamWarning as StreamWarning
from plurax.errors.kinds import TaskError as TaskError
from plurax.errors.machine_errors import *  # noqa: F403
from plurax.errors.member_errors import *  # noqa: F403
from plurax.errors.plan_errors import *  # noqa: F403
from plurax.errors.process_errors import *  # noqa: F403
from plurax.errors.source_errors import *  # noqa: F403
from plurax.errors.task_errors import *  # noqa: F403
