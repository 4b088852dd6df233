"""Seconds of a step as estimated, beside a walk along what the compilers of absent machines made.

    python -m benchmarks.absent_seconds                      estimate all rows, by stored seconds
    python -m benchmarks.absent_seconds --compile            compile them anew, and store these
    python -m benchmarks.absent_seconds --compile 8xH100 --rows gpt/data mlp/zero3

The rows are those of `absent_memory`, without pipelines, whose program says nothing of a schedule.
An estimate is made before anything is compiled, of kernels and overlaps as plurax expects them; the
walk is along the compiler's own schedule, with the same rates and links. So this measures how near
the expected program comes to the compiled one, not how near either is to a clock.

Of TPUs the walk takes the compiler's own cycles, so that rates differ, too.
"""

import argparse
import collections
import statistics
import sys
from pathlib import Path

import jax

import plurax as px
from benchmarks.absent_memory import CHECKED, OPTIMIZER, ROWS, names, row_of, store, stored
from plurax.targets import Target

STORED = Path(__file__).parent / "results" / "absent-seconds.json"
MACHINES = ("8xH100", "v5e:2x4")


def compiled_seconds(machine: str, name: str) -> dict[str, float]:
    """Compile a row for a machine; return the seconds of a walk, and of these of computing."""
    model, plan = row_of(name)
    compiled = px.analysis.compiled_for(model.task, OPTIMIZER, plan, model.batch, machine)
    return {"seconds": compiled.schedule.seconds, "computing": compiled.schedule.computing}


def estimated_seconds(machine: str, name: str) -> float:
    """Return the seconds of a row as estimated."""
    model, plan = row_of(name)
    target = Target.of(machine).machine
    return px.estimate(model.task, OPTIMIZER, plan, model.batch, target).seconds


def main() -> int:
    """Print estimated beside compiled seconds of each row, and their mean and worst by machine."""
    rows = [name for name in (*names(ROWS), *names(CHECKED)) if "pipeline" not in name]
    parser = argparse.ArgumentParser("python -m benchmarks.absent_seconds", description=__doc__)
    parser.add_argument("machines", nargs="*", default=MACHINES)
    parser.add_argument("--rows", nargs="+", default=rows)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.compile:
        for machine in options.machines:
            for name in options.rows:
                store(machine, name, compiled_seconds(machine, name), STORED)
    errors: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
    for machine in options.machines:
        compiled = stored(STORED)["compiled"].get(machine, {})
        for name in options.rows:
            if name in compiled:
                ours, theirs = estimated_seconds(machine, name), compiled[name]["seconds"]
                errors[machine, name in names(CHECKED)].append(ours / theirs - 1)
                print(f"{machine:10} {name:32} {1e3 * ours:8.3f} {1e3 * theirs:8.3f} ms "
                      f"{ours / theirs - 1:+7.1%}", flush=True)  # fmt: skip
    for (machine, checked), own in sorted(errors.items()):
        kind = "kept aside" if checked else "looked at"
        mean, middle = (f(list(map(abs, own))) for f in (statistics.mean, statistics.median))
        print(f"{machine:10} {len(own):2} rows {kind}: mean error {mean:.1%}, median {middle:.1%}, "
              f"from {min(own):+.1%} to {max(own):+.1%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
