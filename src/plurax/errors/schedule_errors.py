"""Pipeline schedules that cannot run, and networks that cannot be cut."""

from collections.abc import Sequence
from typing import Literal

from plurax.errors.kinds import PlanError


def schedule_not_work(text: str) -> PlanError:
    return PlanError(
        f"{text!r} in a schedule is not an action: write F, B or W (forward, backward, gradient of "
        "the weights), the microbatch and, where a device has several stages, a dot and the index "
        "of its chunk: F3, B2.1."
    )


def schedule_indivisible(name: str, devices: int, microbatches: int) -> PlanError:
    near = max(1, round(microbatches / devices)) * devices
    return PlanError(
        f"the schedule {name!r} processes microbatches in groups of pipeline={devices}, which does "
        f"not divide microbatches={microbatches}; "
        f"microbatches={near} works, and so does schedule='1f1b'."
    )


def schedule_has_no_chunks(name: str, chunks: int) -> PlanError:
    return PlanError(
        f"the schedule {name!r} has one stage on each device, and the plan asks for {chunks}; "
        "leave `stages` out, or use schedule='interleaved'."
    )


def schedule_too_long(name: str, devices: int, microbatches: int, chunks: int) -> PlanError:
    return PlanError(
        f"the schedule {name!r} for {devices} devices × {microbatches} microbatches × {chunks} "
        "stages on each is too long to write down; take fewer microbatches."
    )


def schedule_of_other_sizes(found: Sequence[int], wanted: Sequence[int]) -> PlanError:
    names = ("devices", "microbatches", "stages on each")
    has, needs = (
        ", ".join(f"{size} {name}" for size, name in zip(sizes, names, strict=True))
        for sizes in (found, wanted)
    )
    return PlanError(f"the schedule written by hand is for {has}; the plan has {needs}.")


def schedule_twice(device: int, work: str) -> PlanError:
    return PlanError(
        f"the schedule cannot run: device {device} runs {work} twice; every action runs once."
    )


def schedule_out_of_order(device: int, work: str, need: str) -> PlanError:
    return PlanError(
        f"the schedule cannot run: device {device} runs {work} before {need}, on which it depends."
    )


def schedule_forwards_out_of_order(device: int, work: str, before: str) -> PlanError:
    return PlanError(
        f"on device {device} the schedule has {before} before {work}, and model state passes from "
        "each microbatch to the next: write the forwards of a stage in the order of their "
        "microbatches, as all named schedules do."
    )


def schedule_incomplete(device: int, work: str) -> PlanError:
    return PlanError(
        f"the schedule cannot run: device {device} never runs {work}; every device runs F and B of "
        "every microbatch for each of its stages, and W for all of them or for none."
    )


def schedule_deadlock(waiting: Sequence[str]) -> PlanError:
    return PlanError(
        "the schedule cannot run: devices wait for each other forever: "
        + "; ".join(waiting)
        + ". Put what they wait for earlier in the list."
    )


def schedule_stores_too_much(device: int, most: int, stored: int) -> PlanError:
    return PlanError(
        f"the schedule stores too much: device {device} has the activations of {most} microbatches "
        f"at a time, and {stored} are allowed; start backward passes sooner, as '1f1b' does."
    )


def boundary_in_loop(name: str) -> PlanError:
    return PlanError(
        f"a plurax.stage_boundary is inside {name!r}, where a model cannot be split into stages: "
        "put it outside of loops, branches and jax.checkpoint (Plan(remat=...) rematerializes "
        "stages). To split layers that a loop repeats, build the task with plurax.stack."
    )


def too_few_boundaries(found: int, stages: int) -> PlanError:
    return PlanError(
        f"the plan has {stages} stages, and the model's plurax.stage_boundary calls split it into "
        f"{found}, one after another: add a call between any two layers, or build the task with "
        "plurax.stack, which can be split between any two layers. Without a change, "
        f"pipeline={found} works."
    )


def boundary_not_floating(dtype: str, shape: Sequence[int]) -> PlanError:
    return PlanError(
        f"a value of dtype {dtype} and shape {tuple(shape)} crosses a stage boundary, and only "
        "floating-point values can: compute it in the stage that uses it, or cast it."
    )


def state_of_several_stages(name: str, writer: int, readers: Sequence[int]) -> PlanError:
    return PlanError(
        f"the model state {name!r} is written by stage {writer} and read by "
        f"stage{'s' if len(readers) > 1 else ''} {' and '.join(map(str, readers))}. Stages work on "
        "several microbatches at a time, so each has model state of its own: keep one such leaf "
        "for each stage that reads it, move the plurax.stage_boundary so that one stage does both, "
        "or use pipeline=1."
    )


def layers_wrong_sum(
    layers: Sequence[int], found: int, model: Literal["stack", "boundaries"], even: Sequence[int]
) -> PlanError:
    there = {
        "stack": f"the stack has {found} layers",
        "boundaries": f"the model's plurax.stage_boundary calls split it into {found}, one after "
        "another",
    }
    works = f"layers={tuple(even)} works, the default" if all(even) else "take fewer stages"
    return PlanError(
        f"Plan(layers={tuple(layers)}) adds up to {sum(layers)} layers, and {there[model]}: "
        f"{works}."
    )


def too_few_layers(depth: int, pipeline: int, stages: int) -> PlanError:
    chunks = stages // pipeline
    near = max((n for n in range(1, pipeline + 1) if n * chunks <= depth), default=1)
    return PlanError(
        f"the plan has {stages} stages and the stack {depth} layers: every stage needs one. "
        f"pipeline={near} works" + (f", stages={near * chunks}." if chunks > 1 else ".")
    )


def optimizer_needs_stages(operation: str) -> PlanError:
    return PlanError(
        "under pipeline > 1 each stage's tensors are on that stage's devices only, and the "
        f"optimizer's {operation!r} reads tensors of several stages at once. Sums and norms over "
        "all parameters work; so does this optimizer with pipeline=1 and zero=1."
    )


def compare_needs_pipeline() -> PlanError:
    return PlanError(
        "--compare compares the schedules of a pipeline, and the plan has pipeline=1: add "
        "--plan.pipeline 4 --plan.microbatches 8, for example, or leave --compare out."
    )


def permute_in_stage() -> PlanError:
    return PlanError(
        "the model calls jax.lax.ppermute in its own jax.shard_map. All devices take part in a "
        "permute, but under pipeline > 1 only the devices of one stage run it, and would wait "
        "forever. Use jax.lax.all_gather, psum or all_to_all, or pipeline=1."
    )
