"""Pipeline schedules that cannot run, and networks that cannot be cut."""

from collections.abc import Sequence

from plurax.errors.kinds import PlanError


def schedule_not_work(text: str) -> PlanError:
    return PlanError(
        f"{text!r} in a schedule is no work: write F, B or W (forward, backward, gradient of the "
        "weights), the microbatch and, where a device has several stages, a dot and the number of "
        "its chunk: F3, B2.1."
    )


def schedule_indivisible(name: str, devices: int, microbatches: int) -> PlanError:
    near = max(1, round(microbatches / devices)) * devices
    return PlanError(
        f"the schedule {name!r} takes microbatches in rounds of as many as there are devices, and "
        f"pipeline={devices} does not divide microbatches={microbatches}; "
        f"microbatches={near} works, and so does schedule='1f1b'."
    )


def schedule_has_no_chunks(name: str, chunks: int) -> PlanError:
    return PlanError(
        f"the schedule {name!r} has one stage on each device, and the plan asks for {chunks}; "
        "leave `stages` out, or use schedule='interleaved'."
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
        f"the schedule cannot run: device {device} does {work} twice; every unit of work is done "
        "once."
    )


def schedule_out_of_order(device: int, work: str, need: str) -> PlanError:
    return PlanError(
        f"the schedule cannot run: device {device} does {work} before {need}, on which it depends."
    )


def schedule_forwards_out_of_order(device: int, work: str, before: str) -> PlanError:
    return PlanError(
        f"on device {device} the schedule has {before} before {work}, and model state passes from "
        "each microbatch to the next: write the forwards of a stage in the order of their "
        "microbatches, as all schedules do that have a name."
    )


def schedule_incomplete(device: int, work: str) -> PlanError:
    return PlanError(
        f"the schedule cannot run: device {device} never does {work}; every device does F and B of "
        "every microbatch through each of its stages, and W of all or of none."
    )


def schedule_deadlock(waiting: Sequence[str]) -> PlanError:
    return PlanError(
        "the schedule cannot run: devices wait for each other for ever: "
        + "; ".join(waiting)
        + ". Put what they wait for earlier in the list."
    )


def schedule_stores_too_much(device: int, most: int, stored: int) -> PlanError:
    return PlanError(
        f"the schedule stores too much: device {device} has the activations of {most} microbatches "
        f"at a time, and {stored} are allowed; begin backwards sooner, as '1f1b' does."
    )


def boundary_in_loop(name: str) -> PlanError:
    return PlanError(
        f"a plurax.stage_boundary stands inside {name!r}, where a model cannot be cut: put it "
        "outside of loops, branches and jax.checkpoint (Plan(remat=...) computes again what should "
        "be). Layers that a loop repeats can be cut where the task is made by plurax.stack."
    )


def too_few_boundaries(pieces: int, stages: int) -> PlanError:
    near = f"pipeline={pieces} works" if pieces > 1 else "pipeline=1 works without"
    return PlanError(
        f"the plan has {stages} stages, and plurax.stage_boundary marks cut the model into "
        f"{pieces}, one behind the other: put a mark between any two layers, or make the task by "
        f"plurax.stack, whose layers can be cut anywhere. As it is, {near}."
    )


def boundary_not_floating(dtype: str, shape: Sequence[int]) -> PlanError:
    return PlanError(
        f"what crosses a stage boundary must be floating point, and a value of dtype {dtype}, "
        f"shape {tuple(shape)}, does: compute it where it is used, or cast it."
    )


def state_of_several_stages(name: str, writer: int, readers: Sequence[int]) -> PlanError:
    return PlanError(
        f"the model state {name!r} is written by stage {writer} and read by "
        f"stage{'s' if len(readers) > 1 else ''} {' and '.join(map(str, readers))}. Stages work on "
        "several microbatches at a time, so each has model state of its own: keep one such leaf "
        "for each stage that reads it, move the plurax.stage_boundary so that one stage does both, "
        "or use pipeline=1."
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
        "under pipeline > 1 the optimizer works on the tensors of each stage where they live, and "
        f"{operation!r} takes those of several stages at once. Sums and norms over all parameters "
        "work; so does this optimizer with pipeline=1 and zero=1."
    )


def compare_needs_pipeline() -> PlanError:
    return PlanError(
        "--compare puts the schedules of a pipeline side by side, and the plan has pipeline=1: add "
        "--plan.pipeline 4 --plan.microbatches 8, say, or leave --compare out."
    )


def permute_in_stage() -> PlanError:
    return PlanError(
        "the model permutes tensors itself (jax.lax.ppermute in a jax.shard_map of its own), in "
        "which all devices take part, and under pipeline > 1 a stage does its work alone. "
        "jax.lax.all_gather, psum and all_to_all work there; so does this model with pipeline=1."
    )
