"""What a search varies."""

from typing import Any, NamedTuple

from plurax.plan import Remat


class Sizes(NamedTuple):
    """What a search varies: fields of a plan, and the stages on each device of a pipeline."""

    data: int
    pipeline: int
    tensor: int
    microbatches: int
    zero: int
    remat: Remat
    schedule: Any
    virtual_stages: int
