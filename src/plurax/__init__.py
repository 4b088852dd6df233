"""Train neural networks in parallel on JAX: many on one device, one on many devices."""

from plurax.batch_size import FastestBatchSize as FastestBatchSize
from plurax.batch_size import MaxBatchSize as MaxBatchSize
from plurax.batch_size import fastest_batch_size as fastest_batch_size
from plurax.batch_size import max_batch_size as max_batch_size
from plurax.checkpoint import Checkpoints as Checkpoints
from plurax.checkpoint import DamagedCheckpointWarning as DamagedCheckpointWarning
from plurax.data import ArrayData as ArrayData
from plurax.data import Position as Position
from plurax.data import StreamData as StreamData
from plurax.errors import BatchError as BatchError
from plurax.errors import CheckpointError as CheckpointError
from plurax.errors import ExperimentError as ExperimentError
from plurax.errors import PlanError as PlanError
from plurax.errors import PluraxError as PluraxError
from plurax.errors import TaskError as TaskError
from plurax.execute.program import Program as Program
from plurax.execute.program import compile as compile
from plurax.experiment import Experiment as Experiment
from plurax.inspect import Collective as Collective
from plurax.inspect import Memory as Memory
from plurax.loop import Steps as Steps
from plurax.loop import training as training
from plurax.mesh import virtual_devices as virtual_devices
from plurax.plan import Plan as Plan
from plurax.state import TrainState as TrainState
from plurax.tally import NonFiniteWarning as NonFiniteWarning
from plurax.task import Task as Task
from plurax.task import per_example as per_example
from plurax.train import Fit as Fit
from plurax.train import fit as fit

__version__ = "0.1.0"
