"""One GPU: steps beside JAX by hand and PyTorch, what was planned beside what is measured.

Where `PLURAX_BENCH_KEEP` names a folder, each row leaves its programs and kernels there.
"""

import math
import statistics
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import sizes
from benchmarks.divided import check_same, divided_settings
from benchmarks.harness import (
    Check,
    Row,
    Side,
    Skipped,
    WorkerFailedError,
    WorkerSkippedError,
    compare,
    take_turns,
)
from benchmarks.members import members_settings
from benchmarks.run import Run

TARGET = 1 / 1.02
"""As a speed: a step may take 1.02 times as long as the one by hand."""
HOST_TARGET = MEMBERS_TARGET = 1 / 1.05
"""Of small steps, and of populations beside `vmap`."""
SAME = 1e-10
"""How far parameters in float64 may be from those of a step by hand."""
NO_TIME = "the time of this measurement was over"


def gpu(run: Run) -> Iterator[Row]:
    """Every row that needs a GPU, the most telling first, until the time is over."""
    case = run.sizes.gpu
    if run.platform != "gpu" and not case.quick:
        yield Skipped("gpu", "every row", "needs a GPU")
        return
    begun = time.monotonic()
    parts = {_parity: 0.2, _steps: 0.7, _members: 0.8, _deepest: 0.9, _torch: 1.0}
    for part, share in parts.items():
        try:
            yield from part(run, case, begun + 60 * case.minutes * share)
        except (WorkerSkippedError, WorkerFailedError) as reason:
            yield Skipped("gpu", part.__name__.strip("_"), str(reason)[-300:])


def _parity(run: Run, case: sizes.Gpu, until: float) -> Iterator[Row]:
    """Updates in float64 beside steps by hand on the processor."""
    with run.jax("jax_gpu_parity", {"quick": case.quick}) as worker:
        worker.run("compare")
        found = worker.answers["compare"][-1]["differences"]
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    wrong = {name: value for name, value in found.items() if not (numbers.get(name, 1.0) <= SAME)}
    yield Check(
        group="gpu",
        name=f"{len(found)} kinds of steps in float64, beside steps by hand on the processor",
        found=f"the largest difference {max(numbers.values(), default=math.nan):.1e}"
        + "".join(f"; {name}: {value}" for name, value in wrong.items()),
        wanted=f"at most {SAME:.0e}",
        reached=not wrong,
        facts=found,
    )


# --- Steps ----------------------------------------------------------------------------------------


def _steps(run: Run, case: sizes.Gpu, until: float) -> Iterator[Row]:
    """Each row of `gpu_rows`: its seconds by hand, its memory, and what was expected."""
    settings = {"quick": case.quick, "rounds": case.rounds, "turn": case.turn}
    expected: list[dict[str, Any]] = []
    worker = run.jax("jax_gpu", settings)
    try:
        for name in worker.facts["rows"]:
            if time.monotonic() > until:
                yield Skipped("gpu", name, NO_TIME)
                continue
            try:
                worker.run(name)
            except WorkerFailedError as error:
                yield Skipped("gpu", name, f"its worker stopped: {str(error).splitlines()[-1]}")
                worker.close()
                worker = run.jax("jax_gpu", settings)
                continue
            answer = worker.answers[name][-1]
            if "failed" in answer:
                yield Skipped("gpu", name, answer["failed"])
                continue
            expected.append(answer)
            yield from _step_rows(name, answer)
    finally:
        worker.close()
    yield _machine(worker.facts)
    yield from _accuracy(expected)


def _step_rows(name: str, answer: dict[str, Any]) -> Iterator[Row]:
    seconds = answer.pop("seconds_of")
    target = HOST_TARGET if min(seconds["plurax"]) < 5e-3 else TARGET
    for against, own in seconds.items():
        if against != "plurax":
            facts = {"kernels": answer["kernels"]}
            yield compare("gpu", name, against, seconds["plurax"], own, target, facts)
    for against, reason in answer.get("left_out", {}).items():
        yield Skipped("gpu", f"{name}, {against}", reason)
    measured = statistics.median(seconds["plurax"])
    answer["measured"] = measured
    low, high = answer["between"]
    held, planned = answer["bytes"]["plurax"]["peak"], answer["planned_peak"]
    bytes_of = {side: own["temporaries"] for side, own in answer["bytes"].items()}
    temporaries = bytes_of.pop("plurax")
    by_hand = _mib(min(bytes_of.values())) if bytes_of else "not compiled"
    rate = answer["product_flops"] / measured
    yield Check(
        group="gpu",
        name=f"{name}, as planned",
        found=f"{_ms(measured)}, estimated {_ms(answer['estimated'])} ({_ms(low)} to {_ms(high)}), "
        f"along the compiled schedule {_ms(answer['walked'])}; {rate / 1e12:.0f} TFLOP/s; "
        f"peak compiled {_mib(held)}, planned {_mib(planned)}; temporaries {_mib(temporaries)}, "
        f"the least by hand {by_hand}",
        wanted="within the interval",
        reached=low <= measured <= high,
        facts=answer,
    )


def _machine(facts: dict[str, Any]) -> Check:
    """The rates that `plurax machine` measures."""
    own = tomllib.loads(facts["machine"])
    rates = ", ".join(f"{name} {rate / 1e12:,.0f} TFLOP/s" for name, rate in own["flops"].items())
    return Check(
        group="gpu",
        name="what `plurax machine` measures",
        found=f"{rates}; memory {own['memory_bandwidth'] / 1e12:.2f} TB/s; "
        f"{1e6 * own['overhead']:.1f} µs to start a kernel; in {facts['measured_in']:.0f} s",
        wanted="",
        reached=None,
        facts=own,
    )


def _accuracy(rows: list[dict[str, Any]]) -> Iterator[Row]:
    """How near the estimates of all rows are."""
    if not rows:
        return
    seconds = [row["estimated"] / row["measured"] - 1 for row in rows]
    rates = [row["estimated_by_measured_rates"] / row["measured"] - 1 for row in rows]
    walked = [row["walked"] / row["measured"] - 1 for row in rows]
    peaks = [row["planned_peak"] / row["bytes"]["plurax"]["peak"] - 1 for row in rows]
    inside = sum(row["between"][0] <= row["measured"] <= row["between"][1] for row in rows)
    yield Check(
        group="gpu",
        name=f"{len(rows)} steps, as planned",
        found=f"seconds: mean error {_mean(seconds)}, from {min(seconds):+.0%} to "
        f"{max(seconds):+.0%}, {inside} within their interval; by measured rates {_mean(rates)}; "
        f"along the compiled schedule {_mean(walked)}; peaks beside the compiler's: "
        f"{_mean(peaks)}, from {min(peaks):+.0%} to {max(peaks):+.0%}",
        wanted="nine of ten within their interval",
        reached=inside >= 0.9 * len(rows),
        facts={},
    )


def _mean(errors: list[float]) -> str:
    return f"{statistics.mean(map(abs, errors)):.1%}"


# --- Populations, depth, PyTorch ------------------------------------------------------------------


def _members(run: Run, case: sizes.Gpu, until: float) -> Iterator[Row]:
    """Populations beside `vmap` by hand, in loops of whole epochs on the device."""
    for own in case.members:
        if time.monotonic() > until:
            yield Skipped("gpu", f"{own.name}, populations", NO_TIME)
            continue
        with ExitStack() as stack:
            settings = members_settings(run, own, stack) | {"scan": False}
            worker = stack.enter_context(run.jax("jax_members", settings))
            for count, repeats in own.repeats.items():
                sides = [Side(worker, f"{name}, {count}") for name in ("plurax", "vmap")]
                ours, theirs = take_turns(sides, repeats)
                yield compare(
                    "gpu",
                    f"{own.name}, {count:,} networks",
                    "JAX by hand, vmap of a scan",
                    ours,
                    theirs,
                    MEMBERS_TARGET,
                    worker.facts[str(count)],
                )


def _deepest(run: Run, case: sizes.Gpu, until: float) -> Iterator[Row]:
    """The deepest network that is said to fit, trained."""
    for remat in case.remat:
        name = f"the deepest GPT of width {case.model['width']} that is planned, remat={remat}"
        if time.monotonic() > until:
            yield Skipped("gpu", name, NO_TIME)
            continue
        settings = {
            "model": case.model, "rows": case.rows, "remat": remat, "deepest": case.deepest,
            "memory": case.memory,
        }  # fmt: skip
        try:
            with run.jax("jax_deepest", settings) as worker:
                facts = worker.facts
        except WorkerFailedError as error:
            yield Skipped("gpu", name, f"its worker stopped: {str(error).splitlines()[-1]}")
            continue
        trained = "failed" not in facts
        held = facts["peak_in_use"]
        yield Check(
            group="gpu",
            name=name,
            found=f"{facts['depth']:,} layers; peak planned {_mib(facts['planned_peak'])} and a "
            f"margin of {_mib(facts['margin'])} of {_mib(facts['memory'])}; "
            + (
                f"compiled {_mib(facts['compiled_peak'])}, in use "
                f"{'unknown' if held is None else _mib(held)}; a step {_ms(facts['seconds'])}, "
                f"estimated {_ms(facts['estimated'])}"
                if trained
                else facts["failed"]
            ),
            wanted="it trains",
            reached=trained,
            facts=facts,
        )


def _torch(run: Run, case: sizes.Gpu, until: float) -> Iterator[Row]:
    """A transformer in bfloat16 beside PyTorch's compiler."""
    network = case.network
    name = (
        f"bfloat16, width {network.width}, depth {network.depth}, "
        f"batch {network.batch} × {network.window}"
    )
    against = "PyTorch torch.compile"
    if time.monotonic() > until:
        yield Skipped("gpu", f"{name}, {against}", NO_TIME)
        return
    settings = divided_settings(run, network, 1)
    with ExitStack() as stack:
        try:
            other = stack.enter_context(run.peer(against, settings | {"way": "compiled"}))
            mine = stack.enter_context(run.jax("jax_one_gpu", settings))
        except WorkerSkippedError as reason:
            yield Skipped("gpu", f"{name}, {against}", str(reason))
            return
        check_same(mine, other)
        ours, theirs = take_turns([Side(mine, "plurax", 3), Side(other, "step", 3)], case.rounds)
        facts = mine.facts | {"tokens_per_step": network.batch * network.window}
        yield compare("gpu", name, against, ours, theirs, 1.0, facts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


def _mib(count: int) -> str:
    return f"{count / sizes.MIB:,.0f} MiB"
