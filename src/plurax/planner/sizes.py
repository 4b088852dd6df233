"""What a search varies."""

from typing import Any, NamedTuple

from plurax.plan import Remat, most_of, parts_of


class Sizes(NamedTuple):
    """What a search varies: fields of a plan, and the stages on each device of a pipeline."""

    data: int
    pipeline: int
    tensor: int
    microbatches: int | tuple[int, ...]
    zero: int
    remat: Remat
    schedule: Any
    virtual_stages: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.pipeline * self.tensor

    @property
    def most_microbatches(self) -> int:
        """The number of microbatches of the device of `data` that has the most."""
        return most_of(self.microbatches)

    @property
    def parts(self) -> int:
        """The number of microbatches of a step, on all devices of `data`."""
        return parts_of(self.microbatches, self.data)


def doublings(devices: int) -> list[int]:
    """Return the powers of two that divide a number of devices.

    >>> doublings(24)
    [1, 2, 4, 8]
    """
    return [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
