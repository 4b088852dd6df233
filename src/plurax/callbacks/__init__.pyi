from plurax.callbacks.early_stopping import EarlyStopping as EarlyStopping
from plurax.callbacks.ema import Ema as Ema
from plurax.callbacks.learning_rate import LearningRate as LearningRate
from plurax.callbacks.step_trace import Profile as Profile
