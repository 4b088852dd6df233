"""What a compiler decides, as a value: one for each platform, in a file of its own.

The recorded step is the same for every machine. Which of its operations run as one kernel, in which
order kernels run, and how large an array is in memory, is the compiler's choice. `xla_cpu`,
`xla_gpu` and `xla_tpu` have these rules as data; `plurax.trace.kernels` and `plurax.trace.liveness`
follow them.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from plurax.jaxpr.compat import REDUCTIONS
from plurax.trace.step_trace import Value

Order = Literal["breadth first", "least memory"]


@dataclasses.dataclass(frozen=True)
class CompilerRules:
    """The rules of one compiler.

    **Fields:**

    - `fusible`: operations that can be computed number by number inside the kernel that reads them.
    - `in_place`: operations that write a part of their first operand, and fuse what they write.
    - `moves`: operations that a reduction reads from memory.
    - `expensive`: elementwise operations that are not computed twice.
    - `is_copied`: whether an operation that reads so many arrays as large as its result is computed
      in each of so many kernels that read it, rather than written to memory once.
    - `overwrites_reduced`: whether a result may take the memory of an operand that a reduction
      reads too. Where a softmax is one kernel it reads its operand twice, and may not.
    - `hoists_casts`: whether float32 that a loop only multiplies is rounded once before the loop.
    - `hoists_masks`: whether a broadcast of a mask, the same in every iteration, is written to
      memory once before a loop.
    - `fuses_epilogues`: whether a matrix product computes the elementwise operations after it, and
      those that have one reader are fused before it is decided what that reads.
    - `fuses_operands`: whether a product computes elementwise what it multiplies, and reads other
      results too in the operations after it, and what is scattered as one number of a row is
      selected.
    - `joins_kernels`: whether kernels over the same numbers are joined to one with several outputs
      (`plurax.trace.several_outputs`). Seconds count that, memory does not.
    - `overlaps`: whether collectives run beside other work, for which gradients wait.
    - `sums_in_place`: whether an all-reduce writes to the memory of what it reads.
    - `skips_groups`: whether `ragged_dot` multiplies rows with the weights of their group alone.
    - `order`: of kernels.
    - `size`: the bytes of an array in memory; the flag says that nothing but products reads it.
    - `margin`: the share of the planned peak by which a compiled one may be larger.
    - `least_margin`: bytes by which it may be larger, however small it is.
    """

    fusible: frozenset[str]
    in_place: frozenset[str]
    moves: frozenset[str]
    expensive: frozenset[str]
    is_copied: Callable[[float, int], bool]
    overwrites_reduced: bool
    hoists_casts: bool
    hoists_masks: bool
    fuses_epilogues: bool
    fuses_operands: bool
    joins_kernels: bool
    overlaps: bool
    sums_in_place: bool
    skips_groups: bool
    order: Order
    size: Callable[[Value, bool], int]
    margin: float
    least_margin: int = 0

    def margin_of(self, peak: int) -> int:
        """Return the bytes by which a compiler may need more than a planned peak."""
        return max(int(peak * self.margin), self.least_margin)

    @property
    def readers(self) -> frozenset[str]:
        """Operations into which others are fused."""
        products = frozenset(["dot_general"] if self.fuses_operands else [])
        return self.fusible | REDUCTIONS | self.in_place | products
