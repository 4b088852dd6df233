"""Plans that cannot run."""

from collections.abc import Iterable

from plurax.errors import hints
from plurax.errors.kinds import OutOfMemoryError, PlanError


def plan_field_not_positive(field: str, value: object) -> PlanError:
    hints = {
        **dict.fromkeys(["chunk", "stages"], "leave it out to have it chosen"),
        "bucket_bytes": "bucket_bytes=1 sends each tensor on its own",
    }
    hint = hints.get(field, f"{field}=1 means 'not used'")
    return PlanError(
        f"Plan({field}={value!r}): {field} must be a whole number of at least 1; {hint}."
    )


def plan_field_not_a_choice(field: str, value: object, choices: Iterable[object]) -> PlanError:
    names = ", ".join(repr(choice) for choice in choices)
    return PlanError(f"Plan({field}={value!r}): {field} must be one of {names}.")


def plan_schedule_unknown(value: object, names: Iterable[str]) -> PlanError:
    names = list(names)
    hint = hints.did_you_mean(value.lower(), names) if isinstance(value, str) else ""
    return PlanError(
        f"Plan(schedule={value!r}): the schedules that have a name are {', '.join(names)}.{hint} "
        "One written by hand is a list with one line for each device: "
        "['F0 F1 B0 B1', 'F0 B0 F1 B1']."
    )


def plan_stages_indivisible(stages: int, pipeline: int) -> PlanError:
    near = max(1, round(stages / pipeline)) * pipeline
    return PlanError(
        f"Plan(stages={stages}, pipeline={pipeline}): every device needs the same number of "
        f"stages; stages={near} works."
    )


def plan_layers_not_counts(given: object) -> PlanError:
    return PlanError(
        f"Plan(layers={given!r}): give the number of layers of each stage, at least 1, in the "
        "order of the stages: layers=(2, 3, 3, 2)."
    )


def plan_layers_wrong_length(layers: tuple[int, ...], stages: int) -> PlanError:
    numbers = f"{len(layers)} number{'s' if len(layers) != 1 else ''}"
    return PlanError(
        f"Plan(layers={layers}) has {numbers} of layers, and the plan has {stages} "
        f"stage{'s' if stages > 1 else ''} (`pipeline`, or `stages`): give one for each stage."
    )


def plan_offload_in_stages(pipeline: int) -> PlanError:
    return PlanError(
        f"Plan(remat='offload', pipeline={pipeline}): a pipeline stores its residuals in buffers "
        "on the device, not in the host's memory. Use remat='full', which stores least, or "
        "remat='dots'."
    )


def plan_minor_divided() -> PlanError:
    return PlanError(
        "Plan(batch_dim='minor') with tensor > 1, pipeline > 1 or zero > 0: the batch in the minor "
        "dim is for small networks that are not partitioned. Use batch_dim='major'."
    )


def plan_shardings_not_rules(given: object) -> PlanError:
    return PlanError(
        f"Plan(shardings={given!r}): give a dict of rules, the path of a parameter -> one entry "
        "for each dim: {'out/kernel': (None, 'tensor')}."
    )


def plan_rule_not_a_spec(pattern: str, entries: object) -> PlanError:
    return PlanError(
        f"Plan(shardings={{{pattern!r}: {entries!r}}}): a rule has one entry for each dim in a "
        "tuple, None for a dim that is not split or the name of a mesh axis: (None, 'tensor')."
    )


def plan_rule_unknown_axis(pattern: str, entries: tuple[object, ...], name: object) -> PlanError:
    return PlanError(
        f"Plan(shardings={{{pattern!r}: {entries!r}}}): rules split dims over 'tensor', and "
        f"not over {name!r}. For a dim that is not split write None, which is 'replicated' in a "
        "TOML file; ... may come first. To split parameters over `data`, use zero=3."
    )


def plan_rule_unused(pattern: str, paths: Iterable[str], names: Iterable[str]) -> PlanError:
    known = [*paths, *names]
    hint = hints.did_you_mean(pattern.strip("*/"), known, cutoff=0.4)
    return PlanError(
        f"the sharding rule {pattern!r} matches no parameter and no named activation.{hint} "
        f"Parameters: {', '.join(paths) or 'none'}. Named activations: "
        f"{', '.join(names) or 'none'}."
    )


def plan_tensor_unused(tensor: int, paths: Iterable[str], names: Iterable[str]) -> PlanError:
    paths, names = list(paths), list(names)
    example = paths[0] if paths else "*"
    return PlanError(
        f"Plan(tensor={tensor}): no rule and no annotation splits anything over `tensor`, so "
        f"{tensor} devices would each do the same work. Say what is split: Plan(tensor={tensor}, "
        f"shardings={{{example!r}: (..., 'tensor')}}) for parameters and activations named by "
        "plurax.name, plurax.sharding.megatron for the rules of a transformer, plurax.shard in the "
        f"model for an operator. Or use data={tensor}, which splits the batch and needs no rules. "
        f"Parameters: {', '.join(paths) or 'none'}. "
        f"Named activations: {', '.join(names) or 'none'}."
    )


def plan_needs_devices(axes: dict[str, int], needed: int, available: int, fits: str) -> PlanError:
    sizes = " × ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
    have = "1 is available" if available == 1 else f"{available} are available"
    return PlanError(
        f"the plan needs {needed} devices ({sizes}) and {have}; {fits} would fit. "
        f"To rehearse the plan on CPU, start with {needed} virtual devices: "
        f"plurax.virtual_devices({needed}) before any other use of JAX, "
        f"or --devices {needed} on the command line."
    )


def cache_mixes_collectives(directory: str, flag: str) -> PlanError:
    return PlanError(
        f"JAX's compilation cache is on ({directory}), and a program for several CPU devices that "
        "XLA loads from it computes wrong numbers: its collectives receive each other's data. Call "
        "plurax.virtual_devices(...) before any other use of JAX, which prevents it; or "
        f"start with XLA_FLAGS={flag}; or turn the cache off with "
        'jax.config.update("jax_enable_compilation_cache", False). Only CPU devices are '
        "affected."
    )


def plan_unknown_key(key: str, known: Iterable[str], source: str) -> PlanError:
    known = list(known)
    hint = hints.did_you_mean(key, known)
    return PlanError(
        f"{source}: {key!r} is not a field of a plan.{hint} The fields are {', '.join(known)}."
    )


def plan_in_a_file(source: str, error: PlanError) -> PlanError:
    return PlanError(f"{source} is not a plan that can run: {error}")


def plan_is_none(given: object) -> PlanError:
    if isinstance(given, str):
        way = f"plurax.Plan.load({given!r}) reads one from a file."
    else:
        way = "Write plan=plurax.Plan(data=4); plurax.Plan(**settings) takes a dict."
    return PlanError(f"the plan is a {type(given).__name__}, and must be a plurax.Plan. {way}")


def plan_not_toml(source: str, reason: str) -> PlanError:
    return PlanError(
        f"{source} is not a plan in TOML ({reason}). A plan looks like:\n\n"
        "    data = 4\n    microbatches = 8\n"
    )


def out_of_memory(
    plan: str, needs: str, ways: Iterable[str], saved: str, reason: str
) -> OutOfMemoryError:
    listed = "".join(f"\n  - {way}" for way in ways)
    return OutOfMemoryError(
        f"out of memory under Plan({plan}){needs}. What needs less:{listed}\n"
        f"plurax plan FILE shows the memory of a plan before it runs. {saved}\n  ({reason})"
    )


def memory_is_full(reason: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"out of memory: {reason}\nA plan with more zero, or over more devices, needs less "
        "on each; data given as an iterable or a Grain data set are read a batch at a time."
    )


def devices_not_positive(count: object) -> PlanError:
    return PlanError(
        f"{count!r} virtual devices: give a whole number of at least 1, as in "
        "plurax.virtual_devices(8), or --devices 8 on the command line."
    )


def devices_already_started(wanted: int, have: int) -> PlanError:
    return PlanError(
        f"virtual_devices({wanted}) came too late: JAX already runs with {have} device(s) and "
        "cannot change their number. Call it before the first array, random key or "
        "jax.devices() of the process."
    )


def plan_strategies_in_stages(pipeline: int) -> PlanError:
    return PlanError(
        f"Plan(pipeline={pipeline}, strategies=...): the strategies are of the equations of the "
        "whole differentiated loss, and a pipeline differentiates stage by stage. Remove "
        "[strategies]; the shardings of parameters hold in a pipeline too."
    )


def strategies_not_a_table(given: object) -> PlanError:
    return PlanError(
        f"Plan(strategies={given!r}): the strategies of equations are a table with `traced`, which "
        "identifies the model, and `equations`, a list of tables with `equation` and `inputs`. A "
        "search writes them; to do without, remove [strategies]."
    )


def strategy_not_an_equation(given: object) -> PlanError:
    return PlanError(
        f"the plan has a strategy for equation {given!r}: an equation is a path and an operator, "
        "such as '14/3 dot_general', or an operand of a loop, such as '14/carry0 scan'."
    )


def strategy_wrong_entries(equation: str, given: object) -> PlanError:
    return PlanError(
        f"the plan's strategy of equation {equation!r} has the inputs {given!r}: give a list for "
        'each operand, with "replicated" or the name of a mesh axis for each dim, or [] to leave '
        "the operand open."
    )


def strategy_of_another_model(equation: str, where: str, found: str | None) -> PlanError:
    at = f" at {where}" if where else ""
    there = "has no such equation" if found is None else f"has a {found} there"
    return PlanError(
        f"the plan has a strategy for equation {equation}{at}, and the differentiated loss "
        f"{there}: the strategies were found for another model, another precision or remat, or by "
        "another version of JAX. Search again, or remove [strategies]."
    )


def strategies_of_another_model(wanted: str, found: str) -> PlanError:
    return PlanError(
        f"the plan's strategies were found for a differentiated loss {wanted}, and this one is "
        f"{found}: another model, another precision or remat, or another version of JAX. Search "
        "again, or remove [strategies]."
    )


def strategy_does_not_fit(equation: str, inputs: object, shapes: object) -> PlanError:
    return PlanError(
        f"the plan's strategy of equation {equation} has the inputs {inputs!r}, and the operands "
        f"have the shapes {shapes}: give one list for each operand with one entry for each dim."
    )
