"""Plans that cannot run: sizes, rules, schedules, shardings, what a search is pinned to."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from plurax.errors import hints
from plurax.errors.kinds import OutOfMemoryError, PlanError


def plan_schedule_unknown(value: object, names: Iterable[str]) -> PlanError:
    names = list(names)
    hint = hints.did_you_mean(value.lower(), names) if isinstance(value, str) else ""
    return PlanError(
        f"Plan(schedule={value!r}): the schedules that have a name are {', '.join(names)}.{hint} "
        "One written by hand is a list with one line for each device: "
        "['F0 F1 B0 B1', 'F0 B0 F1 B1']."
    )


def plan_minor_divided() -> PlanError:
    return PlanError(
        "Plan(batch_dim='minor') with tensor, context or pipeline > 1, zero > 0, or a rule that "
        "splits a parameter over `data`: the batch in the minor dim is for small networks that "
        "are not partitioned. Use batch_dim='major'."
    )


def plan_shardings_not_rules(given: object) -> PlanError:
    return PlanError(
        f"Plan(shardings={given!r}): give a dict of rules, the path of a parameter -> one entry "
        "for each dim: {'out/kernel': (None, 'tensor')}."
    )


def plan_unknown_key(key: str, known: Iterable[str], source: str) -> PlanError:
    known = list(known)
    hint = hints.did_you_mean(key, known)
    return PlanError(
        f"{source}: {key!r} is not a field of a plan.{hint} The fields are {', '.join(known)}."
    )


def plan_in_a_file(source: str, error: PlanError) -> PlanError:
    return PlanError(f"{source} is not a plan that can run: {error}")


def plan_is_none(value: object) -> PlanError:
    if isinstance(value, str):
        way = f"plurax.Plan.load({value!r}) reads one from a file."
    else:
        way = "Write plan=plurax.Plan(data=4); plurax.Plan(**settings) takes a dict."
    return PlanError(f"the plan is a {type(value).__name__}, and must be a plurax.Plan. {way}")


def plan_not_toml(source: str, reason: str) -> PlanError:
    return PlanError(
        f"{source} is not a plan in TOML ({reason}). A plan looks like:\n\n"
        "    data = 4\n    microbatches = 8\n"
    )


def memory_is_full(reason: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"out of memory: {reason}\nA plan with more zero, or over more devices, needs less "
        "on each; data given as an iterable or a Grain data set are read a batch at a time."
    )


def strategies_not_a_table(given: object) -> PlanError:
    return PlanError(
        f"Plan(strategies={given!r}): the strategies of equations are a table with `traced`, which "
        "identifies the model, and `equations`, a list of tables with `equation` and `inputs`. A "
        "search writes them; to do without, remove [strategies]."
    )


def strategy_wrong_entries(equation: str, given: object) -> PlanError:
    return PlanError(
        f"the plan's strategy of equation {equation!r} has the inputs {given!r}: give a list for "
        'each operand, with "replicated" or the name of a mesh axis for each dim, or [] to leave '
        "the operand open."
    )


def layers_wrong_sum(
    layers: Sequence[int], count: int, model: Literal["stack", "boundaries"], even: Sequence[int]
) -> PlanError:
    there = {
        "stack": f"the stack has {count} layers",
        "boundaries": f"the model's plurax.pipeline.stage_boundary calls split it into {count}, "
        "one after another",
    }
    works = f"layers={tuple(even)} works, the default" if all(even) else "take fewer stages"
    return PlanError(
        f"Plan(layers={tuple(layers)}) adds up to {sum(layers)} layers, and {there[model]}: "
        f"{works}."
    )


def optimizer_needs_stages(operation: str) -> PlanError:
    return PlanError(
        "under pipeline > 1 each stage's tensors are on that stage's devices only, and the "
        f"optimizer's {operation!r} reads tensors of several stages at once. Sums and norms over "
        "all parameters work; so does this optimizer with pipeline=1 and zero=1."
    )


def parameter_unknown(name: str, known: Sequence[str]) -> PlanError:
    near = difflib.get_close_matches(name, known, n=12, cutoff=0)
    more = f", and {len(known) - 12} more" if len(known) > 12 else ""
    return PlanError(
        f"no parameter is called {name!r}.{hints.did_you_mean(name, near, cutoff=0.4)} The "
        f"parameters are {', '.join(near)}{more}."
    )


def search_splits_nothing(plan: str) -> PlanError:
    return PlanError(
        f"Plan({plan}): splitting tensors or operators over `tensor` costs more than it saves, so "
        "there is nothing to split."
    )


def spec_too_long(spec: tuple[Any, ...], rank: int, name: str = "the tensor") -> PlanError:
    return PlanError(
        f"the sharding {spec} has {len(spec)} entries and {name} has {rank} "
        f"dim{'s' if rank != 1 else ''}: give one entry for each dim, None for a dim that is not "
        "split."
    )


def sharding_wrong_rank(what: str, shape: tuple[int, ...], sharding: str) -> PlanError:
    return PlanError(
        f"{what} has the shape {shape}, {len(shape)} dims, and the sharding {sharding} has another "
        "number of entries: give one for each dim, None for a dim that is not split."
    )


def sharding_unknown_axis(what: str, axis: str, axes: tuple[str, ...]) -> PlanError:
    return PlanError(
        f"the sharding of {what} names the mesh axis {axis!r}; the axes are {', '.join(axes)}."
    )


def by_hand_over_data(spec: Any) -> PlanError:
    return PlanError(
        f"jax.shard_map in the model splits over 'data' by {spec}, but the loss already gets "
        "the rows of one device only, and plurax sums over devices. Leave 'data' out of in_specs "
        "and out_specs."
    )
