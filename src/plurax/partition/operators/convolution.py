"""Convolutions, over a split sequence or image too.

Batch and channels are split as in a matrix product. Along a split spatial dim each device reads the
places that its own results need, some of its neighbours' (see `halos.py`):

    mesh context=4; x (2, 64, 8) is (None, context, None); kernel (4, 8, 8), causal

                            sum over         result                              halo
    y = conv(x, kernel)     the kernel's 4   y (2, 64, 8), (None, context, None)  3 columns of x
    dx = conv(dy, kernel)   the kernel's 4   dx, split alike                      3 columns of dy
    dk = conv(x, dy)        the 64 places    dk (4, 8, 8), partial={context}      3 columns of x

In the last one `dy` is the kernel: it is split over the places that are summed over.

Groups of channels, which a convolution keeps apart, are split as a batch of products: a convolution
by channel, as in Mamba or a ConvNeXt, sends nothing over `tensor`, nor do its derivatives. That by
the kernel has its groups where others have the batch (`batch_group_count`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from plurax.jaxpr.cpu_forms import convolve
from plurax.jaxpr.interpret import bind
from plurax.partition.operators.common import decided
from plurax.partition.operators.halos import Halo, Halos, halo, is_cheap
from plurax.partition.operators.products import SUMMED, choices, match_operands
from plurax.partition.rule_context import RuleContext
from plurax.partition.values import Decision, ValueVersions
from plurax.sharding.spec import TensorSharding


def convolution(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> Decision:
    """Convolve with batch, channels, their groups and spatial dims split."""
    numbers = eqn.params["dimension_numbers"]
    by_feature = eqn.params["feature_group_count"] > 1
    by_batch = eqn.params["batch_group_count"] > 1
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    labels: list[dict[int, Any]] = [dict.fromkeys(lhs), dict.fromkeys(rhs)]
    if not by_batch:
        labels[0][lhs[0]] = ("batch", 0)
    if not by_feature:
        labels[0][lhs[1]] = labels[1][rhs[1]] = ("sum", 0)
    if not by_batch and not by_feature:
        labels[1][rhs[0]] = ("right", 0)
    elif _divides_groups(context, eqn, inputs):
        labels[0][lhs[1 if by_feature else 0]] = labels[1][rhs[0]] = ("group", 0)
    spatial: dict[Any, Halo] = {}
    for place in range(len(lhs) - 2):
        known = _halo(context, eqn, inputs, place)
        if known is not None:
            label = known[0], place
            spatial[label] = known[1]
            labels[0][lhs[place + 2]] = label
            if label[0] == "window":
                labels[1][rhs[place + 2]] = label
    filled = ("batch", "space", "window")
    operands, split = match_operands(context, eqn, inputs, labels, filled=filled)
    dims: list[tuple[str, ...]] = [()] * len(out)
    dims[out[0]] = split.get(("batch", 0), ())
    dims[out[1]] = split.get(("right", 0), split.get(("group", 0), ()))
    for kind, place in spatial:
        if kind == "space":
            dims[out[place + 2]] = split.get((kind, place), ())
    summed = frozenset(a for label, entry in split.items() if label[0] in SUMMED for a in entry)
    parts = context.axes.expand
    read = {label: one for label, one in spatial.items() if split.get(label) == parts(one.axis)}
    changed = _without_padding(eqn, [place for _, place in read])
    for name in ("feature_group_count", "batch_group_count"):
        count = eqn.params[name]
        changed[name] = max(1, count // context.axes.size(split.get(("group", 0), ())))
    sharding = TensorSharding(tuple(dims), summed)
    decision = decided(context, eqn, inputs, operands, sharding)
    if read:
        read_of = Halos(tuple((lhs[place + 2], one) for (_, place), one in read.items()))
        operands = [dataclasses.replace(operands[0], halos=read_of), *operands[1:]]

    def execute(*arrays: Array) -> list[Array]:
        apply = convolve if context.axes.on_cpu else bind
        return apply(eqn, arrays, **changed)

    return dataclasses.replace(decision, operands=tuple(operands), execute=execute)


def _divides_groups(context: RuleContext, eqn: Any, inputs: list[ValueVersions]) -> bool:
    """Whether the axes that split the channels of an operand divide the groups of channels."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    count = max(params["feature_group_count"], params["batch_group_count"])
    of_groups = numbers.lhs_spec[params["feature_group_count"] > 1], numbers.rhs_spec[0]
    over = [
        sharding.dims[dim]
        for dim, one in zip(of_groups, inputs, strict=True)
        for sharding in choices(one)
    ]
    return all(count % context.axes.size(entry) == 0 for entry in over)


def _halo(
    context: RuleContext, eqn: Any, inputs: list[ValueVersions], place: int
) -> tuple[str, Halo] | None:
    """Return what devices read of a spatial dim of the first operand; None if it is gathered.

    `space`, for their part of the result, or `window`, for their part of the kernel.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    of, with_, to = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    over, over_kernel = (
        () if one.deferred else context.reduced(one).dims[spec[place + 2]]
        for one, spec in zip(inputs, (of, with_), strict=True)
    )
    size, kernel = inputs[0].shape[of[place + 2]], inputs[1].shape[with_[place + 2]]
    result = eqn.outvars[0].aval.shape[to[place + 2]]
    stride, between = params["window_strides"][place], params["rhs_dilation"][place]
    first, dilation = -params["padding"][place][0], params["lhs_dilation"][place]
    if not over or over_kernel not in ((), over) or kernel % context.axes.size(over_kernel):
        return None
    if over_kernel:
        reads = halo(
            context, over, size, kernel, first=first, stride=between,
            more=(result - 1) * stride, dilation=dilation,
        )  # fmt: skip
    else:
        reads = halo(
            context, over, size, result, first=first, stride=stride,
            more=(kernel - 1) * between, dilation=dilation,
        )  # fmt: skip
    if reads is None or not is_cheap(context, eqn.invars[0], inputs[0], reads):
        return None
    return "window" if over_kernel else "space", reads


def _without_padding(eqn: Any, places: Sequence[int]) -> dict[str, Any]:
    """Return the parameters for windows of some spatial dims, which are padded and dilated."""
    padding, dilation = list(eqn.params["padding"]), list(eqn.params["lhs_dilation"])
    for place in places:
        padding[place], dilation[place] = (0, 0), 1
    return {"padding": tuple(padding), "lhs_dilation": tuple(dilation)}
