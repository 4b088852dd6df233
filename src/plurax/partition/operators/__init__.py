"""Operator rules: the shardings an operation needs and the sharding of its result.

A rule `rule(context, eqn, inputs)` takes the `ValueVersions` of an equation's inputs and returns a
`Decision`: the shardings that the operands must have, the results' shapes and shardings, and a
function from the operands' shards to the results' shards. It reads no array. An operation without a
rule gets replicated inputs, which is always right.
"""

from plurax.jaxpr.at_experts import AT_EXPERTS
from plurax.jaxpr.attention_kernels import ATTENTION
from plurax.jaxpr.compat import ELEMENTWISE, REDUCTIONS
from plurax.partition.operators import (
    attention,
    convolution,
    cumulative,
    elementwise,
    gather_scatter,
    irregular_products,
    products,
    random,
    sent_rows,
    shape_ops,
    share_exchange,
    shifts,
)
from plurax.partition.operators.common import Rule
from plurax.partition.operators.common import by_default as by_default
from plurax.partition.operators.own_rows import by_own_rows as by_own_rows

# To add an operator: a function in a module beside this one that returns a `Decision`, and its
# primitive in this table. One that works entry by entry is named in `compat.ELEMENTWISE` alone.
# Where it is not named, others take what is always right: `compat.CHEAP` (to be loaded, not
# recomputed), `jaxpr/row_rules.py` (rows may mix), `jaxpr/batch_minor.py` (batch-major),
# `sharding/factors.py` (dims kept apart), `trace/work.py`, `trace/liveness.py` (reads all, writes
# anew), the compilers' rules beside them (a kernel of its own).
RULES: dict[str, Rule] = {
    **dict.fromkeys([*ELEMENTWISE, "threefry2x32"], elementwise.elementwise),
    **dict.fromkeys(REDUCTIONS, elementwise.reduction),
    **dict.fromkeys(
        ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], cumulative.cumulative
    ),
    **dict.fromkeys(
        [
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_gather_add",
            "select_and_scatter_add",
        ],
        shape_ops.reduce_window,
    ),
    **dict.fromkeys(
        [
            "cholesky",
            "triangular_solve",
            "eigh",
            "eig",
            "svd",
            "lu",
            "qr",
            "geqrf",
            "householder_product",
        ],
        shape_ops.matrices,
    ),
    **dict.fromkeys(
        [
            "scatter",
            "scatter-mul",
            "scatter-min",
            "scatter-max",
        ],
        gather_scatter.scatter,
    ),
    **dict.fromkeys(ATTENTION, attention.attention),
    "sort": shape_ops.single_dim_rule("dimension"),
    "split": shifts.split,
    "top_k": shape_ops.single_dim_rule("axis"),
    "lu_pivots_to_permutation": shape_ops.single_dim_rule("", last=True),
    "dot_general": products.dot_general,
    "conv_general_dilated": convolution.convolution,
    "ragged_dot_general": irregular_products.ragged_dot,
    AT_EXPERTS: sent_rows.at_experts,
    "bcoo_dot_general": irregular_products.sparse_dot,
    "bcoo_dot_general_sampled": irregular_products.sampled_dot,
    "broadcast_in_dim": shape_ops.broadcast_in_dim,
    "reshape": shape_ops.reshape,
    "transpose": shape_ops.transpose,
    "squeeze": shape_ops.squeeze,
    "rev": shifts.rev,
    "reorder_tokens": share_exchange.reorder,
    "slice": shifts.slice_,
    "dynamic_slice": shape_ops.dynamic_slice,
    "dynamic_update_slice": shape_ops.dynamic_update_slice,
    "pad": shifts.pad,
    "concatenate": shifts.concatenate,
    "fft": shape_ops.fft,
    "gather": gather_scatter.gather,
    **dict.fromkeys(["scatter-add", "scatter-sub"], gather_scatter.scatter_add),
    **dict.fromkeys(["random_fold_in", "random_clone"], elementwise.elementwise),
    **dict.fromkeys(
        ["random_bits", "random_split", "random_unwrap", "random_wrap", "bitcast_convert_type"],
        random.random,
    ),
    **dict.fromkeys(["device_put", "optimization_barrier"], shape_ops.barrier),
    "reshard": shape_ops.unchanged,
}
"""Rules by the names of JAX's primitives; `by_default` is the rule of all others."""
