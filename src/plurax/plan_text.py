"""Say in words what a plan does."""

from collections.abc import Mapping
from typing import Any

ZERO_TEXTS = {
    1: "the optimizer's state is split over data.",
    2: "gradients and the optimizer's state are split over data;\n"
    "    each microbatch reduces its gradients to their shards.",
    3: "parameters, gradients and the optimizer's state are split over data;\n"
    "    parameters are gathered where they are used.",
}
REMAT_TEXTS: Mapping[str, str] = {
    "dots": "the backward pass recomputes all but matrix products.",
    "full": "the backward pass recomputes all but the inputs of layers.",
    "offload": "products with weights are stored in the host's memory until the backward pass.",
}

CONTEXT_TEXTS: Mapping[str, str] = {
    "gather": "each gathers the keys and values of all.",
    "ring": "keys and values go around in a ring, and each computes with those that it has.",
    "heads": "for attention each gets all tokens of a share of the heads.",
    "heads+ring": "for attention each gets its group's tokens of a share of the heads, and keys "
    "and values\n    go around between groups.",
}


def explained(plan: Any, batch_size: int | None = None) -> str:
    """Return what a `Plan` does, line by line; with `batch_size` also how examples are split."""
    count = plan.devices
    long = plan.shardings or plan.strategies
    short = f"Plan({plan.sizes_text()})" if long else repr(plan)
    lines = [f"{short}: {count} device{'s' if count > 1 else ''}"]
    if plan.data > 1:
        lines.append(
            f"  data={plan.data}: the batch is split over {plan.data} devices"
            + (
                "."
                if plan.zero == 3 or plan.tensor * plan.pipeline > 1 or plan.splits_experts
                else "; parameters are replicated."
            )
        )
    elif plan.context > 1:
        lines.append("  data=1: each device has tokens of all sequences of the batch.")
    else:
        lines.append("  data=1: the whole batch goes to one device.")
    if plan.most_microbatches > 1:
        # With `zero` of 2 and 3 each microbatch reduces; their own line says so.
        once = ",\n    and reduces them over devices once, at the end of the step."
        each = plan.microbatches
        share = f"its share in {each}" if isinstance(each, int) else "its number of equal"
        lines.append(
            f"  microbatches={each}: each device computes {share} microbatches, sums the "
            "gradients" + (once if plan.data > 1 and plan.zero < 2 else ".")
        )
    lines += _split_lines(plan)
    if plan.member > 1:
        lines.append(
            f"  member={plan.member}: members are split over {plan.member} groups of devices "
            "and never communicate."
        )
    if plan.chunk is not None:
        lines.append(f"  chunk={plan.chunk}: a device computes {plan.chunk} members at a time.")
    if plan.batch_dim is not None:
        lines.append(
            f"  batch_dim={plan.batch_dim}: the gradient is computed with the batch as the "
            + ("leading dim." if plan.batch_dim == "major" else "last dim.")
        )
    cast = (
        "nothing is cast."
        if plan.precision == "float32"
        else "the loss computes in bfloat16; parameters, sums and optimizer keep their dtype."
    )
    lines.append(f"  precision={plan.precision}: {cast}")
    if batch_size is not None:
        rows, each = plan.padded_size(batch_size), plan.microbatches
        number = f"{plan.data} device{'s' if plan.data > 1 else ''} × {each}"
        if not isinstance(each, int):
            number = f"{' + '.join(map(str, each))} = {plan.parts}"
        line = (
            f"  batch of {batch_size}: {number} "
            f"microbatch{'es' if plan.most_microbatches > 1 else ''} × "
            f"{rows // plan.parts} examples"
        )
        padding = rows - batch_size
        lines.append(line + (f"; {padding} of {rows} rows are padding." if padding else "."))
    return "\n".join(lines)


def _split_lines(plan: Any) -> list[str]:
    """Return the lines on how one network is split."""
    lines = []
    if plan.splits_experts:
        split = [name for name, rule in plan.rules if "data" in str(rule)]
        lines.append(
            f"  shardings: {', '.join(split)} are split over data; rows of `lax.ragged_dot` are "
            "sent to the\n    device of their expert, and any other operation gathers them."
        )
    if plan.pipeline > 1:
        named = plan.schedule if isinstance(plan.schedule, str) else "written by hand"
        each = (
            f",\n    of {', '.join(map(str, plan.layers))} layers; " if plan.layers else ";\n    "
        )
        lines.append(
            f"  pipeline={plan.pipeline}: the layers are split into {plan.total_stages} stages "
            f"on {plan.pipeline} devices{each}the schedule is {named}."
        )
    if plan.context > 1:
        lines.append(
            f"  context={plan.context}: the tokens of each sequence are split over {plan.context} "
            f"devices;\n    {CONTEXT_TEXTS[plan.context_strategy]}"
        )
    if plan.tensor > 1:
        lines.append(
            f"  tensor={plan.tensor}: tensors and operators are split over {plan.tensor} "
            f"devices,\n    by {len(plan.shardings)} rules and the annotations in the model."
        )
    if plan.strategies is not None and len(plan.strategies):
        first, *others = plan.strategies.lines()
        lines += [f"  strategies: {first}", *(f"    {line}" for line in others)]
    if plan.zero:
        over = "data" if plan.context == 1 else "data and context"
        text = ZERO_TEXTS[plan.zero].replace("over data", f"over {over}")
        lines.append(f"  zero={plan.zero}: {text}")
    if plan.reduce_dtype is not None:
        lines.append(
            f"  reduce_dtype={plan.reduce_dtype}: gradients are rounded to it before and after "
            "devices\n    add them up over data; all else keeps its dtype."
        )
    if plan.remat != "none":
        text = REMAT_TEXTS.get(plan.remat) or (
            f"the backward pass recomputes all but {plan.remat:.0%} of the bytes of matrix "
            "products, those with\n    the most operations for each byte."
        )
        lines.append(f"  remat={plan.remat}: {text}")
    if plan.stream is not None:
        lines.append(
            f"  stream={plan.stream}: attention is computed in blocks of {plan.stream} keys, and "
            "no array of\n    queries by keys is held."
        )
    return lines
