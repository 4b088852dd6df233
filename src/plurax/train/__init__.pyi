from plurax.execute.array_data import ArrayData as ArrayData
from plurax.execute.array_data import Position as Position
from plurax.execute.step import Gradients as Gradients
from plurax.state import TrainState as TrainState
from plurax.train.data import StreamData as StreamData
from plurax.train.iterate import StepOutput as StepOutput
from plurax.train.iterate import train_iter as train_iter
