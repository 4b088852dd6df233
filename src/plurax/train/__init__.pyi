from plurax.state import TrainState as TrainState
from plurax.train.data import ArrayData as ArrayData
from plurax.train.data import Position as Position
from plurax.train.data import StreamData as StreamData
from plurax.train.iterate import StepOutput as StepOutput
from plurax.train.iterate import train_iter as train_iter
