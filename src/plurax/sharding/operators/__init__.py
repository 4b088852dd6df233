"""For each operation: which shards it needs, what a device computes, and how the result lies.

A rule takes the divider, an equation and what its inputs hold, and returns a `Value` (or `Late`)
for each result. Operations without a rule take whole tensors, which is always right.
"""

from plurax.primitives import ELEMENTWISE, REDUCTIONS
from plurax.sharding.operators import elementwise, moving, products, random, tables
from plurax.sharding.operators.common import Rule
from plurax.sharding.operators.common import bind as bind
from plurax.sharding.operators.common import by_default as by_default

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE | {"device_put"}, elementwise.elementwise),
    **dict.fromkeys(REDUCTIONS, elementwise.reduction),
    **dict.fromkeys(
        ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], moving.along("axis")
    ),
    **dict.fromkeys(
        [
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_gather_add",
            "select_and_scatter_add",
        ],
        moving.windows,
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
        moving.matrices,
    ),
    **dict.fromkeys(
        [
            "scatter",
            "scatter-mul",
            "scatter_mul",
            "scatter-min",
            "scatter_min",
            "scatter-max",
            "scatter_max",
        ],
        tables.scatter,
    ),
    "sort": moving.along("dimension"),
    "split": moving.along("axis"),
    "top_k": moving.along("axis"),
    "lu_pivots_to_permutation": moving.along("", last=True),
    "dot_general": products.dot_general,
    "conv_general_dilated": products.convolution,
    "broadcast_in_dim": moving.broadcast_in_dim,
    "reshape": moving.reshape,
    "transpose": moving.transpose,
    "squeeze": moving.squeeze,
    "rev": moving.rev,
    "slice": moving.slice_,
    "dynamic_slice": moving.dynamic_slice,
    "dynamic_update_slice": moving.dynamic_update_slice,
    "pad": moving.pad,
    "concatenate": moving.concatenate,
    "stack": moving.stack,
    "unstack": moving.unstack,
    "tile": moving.tile,
    "fft": moving.fft,
    "gather": tables.gather,
    "scatter-add": tables.scatter_add,
    "scatter_add": tables.scatter_add,
    **dict.fromkeys(["random_fold_in", "random_clone"], elementwise.elementwise),
    **dict.fromkeys(
        ["random_bits", "random_split", "random_unwrap", "random_wrap", "bitcast_convert_type"],
        random.drawn,
    ),
    "optimization_barrier": moving.barrier,
    "reshard": moving.as_it_lies,
}
"""By the names of JAX's primitives. Those without a rule go by `by_default`."""
