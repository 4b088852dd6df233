from plurax.execute.layouts.parameter_info import ParameterInfo as ParameterInfo
from plurax.sharding.axes import Axes as Axes
from plurax.sharding.reshard import ReshardStep as ReshardStep
from plurax.sharding.reshard import apply_moves as apply_moves
from plurax.sharding.reshard import plan_reshard as plan_reshard
from plurax.sharding.rules import megatron as megatron
from plurax.sharding.spec import TensorSharding as TensorSharding
