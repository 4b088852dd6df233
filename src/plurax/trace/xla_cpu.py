"""What XLA's CPU compiler makes of a program: rules as data.

The recorded step is the same for every machine; which of its operations run as one kernel is the
compiler's choice. These are the rules of `InstructionFusion` on CPU, by which
`plurax.trace.kernels` and `plurax.trace.liveness` decide. `xla_gpu` and `xla_tpu` have those of
other machines.

Sources: XLA's `instruction_fusion.cc` (https://openxla.org/xla/hlo_passes), and compiled programs.
"""

from plurax.jaxpr.compat import ELEMENTWISE
from plurax.trace.compiler_rules import CompilerRules

FUSIBLE = ELEMENTWISE | frozenset([
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "iota",
    "operand", "order_after", "pad", "rev", "row", "select_n", "slice", "split", "transpose",
])  # fmt: skip
"""Operations that can be computed number by number inside the kernel that reads them."""

IN_PLACE = frozenset(["stack", "dynamic_update_slice"])
"""Operations that write a part of their first operand, and fuse what they write."""

MOVES = frozenset([
    "concatenate", "dynamic_slice", "gather", "operand", "pad", "rev", "row", "slice", "split",
    "transpose",
])  # fmt: skip
"""Operations that a reduction reads from memory."""

EXPENSIVE = frozenset([
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma",
    "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2",
    "logistic", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
])  # fmt: skip
"""Elementwise operations that are not computed twice."""

RULES = CompilerRules(
    fusible=FUSIBLE,
    in_place=IN_PLACE,
    moves=MOVES,
    expensive=EXPENSIVE,
    is_copied=lambda arrays, readers: arrays <= 1,
    overwrites_reduced=True,
    hoists_casts=False,
    hoists_masks=False,
    fuses_epilogues=False,
    fuses_operands=False,
    joins_kernels=False,
    overlaps=False,
    sums_in_place=False,
    skips_groups=False,
    order="breadth first",
    size=lambda value, multiplied: value.bytes,
    margin=0.0,
)
"""Memory on CPU."""
