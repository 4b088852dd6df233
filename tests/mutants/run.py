"""Change one thing at a time in a module and see whether its tests notice; by cosmic-ray.

    make test-mutants MODULE=resample

Works on a copy of the project; nothing of the checkout is changed. Prints every mutant that
survived as a diff, and how many were killed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

# The rules of the house are quickly asked, and hold for all.
ALWAYS = "tests/test_architecture.py::test_values_are_frozen"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def command(python: str, tests: list[str]) -> str:
    """What judges a mutant: the first test that fails ends it."""
    return f"{python} -m pytest -x -q -p no:xdist -p no:randomly {' '.join([ALWAYS, *tests])}"


def sample(session: Path, draw: int, skip: list[str]) -> None:
    """Leave out the operators of `skip`, and of the rest all but `draw`, evenly over the file.

    A place that can be changed in ten ways is drawn once: else operators between two numbers,
    which nearly every test notices, would be most of what is drawn.
    """
    with use_db(str(session), WorkDB.Mode.open) as database:
        places: dict[Any, list[Any]] = {}
        pending = list(database.pending_work_items)
        for item in pending:
            if not any(name in item.mutations[0].operator_name for name in skip):
                change = item.mutations[0]
                place = (str(change.module_path), change.start_pos)
                places.setdefault(place, []).append(item)
        # The same draw every time.
        groups = [
            sorted(
                group, key=lambda one: (one.mutations[0].operator_name, one.mutations[0].occurrence)
            )
            for _, group in sorted(places.items())
        ]
        step = max(1.0, len(groups) / draw) if draw else 1.0
        drawn = range(int(len(groups) / step))
        kept = {groups[int(n * step)][n % len(groups[int(n * step)])].job_id for n in drawn}
        if not draw:
            kept = {item.job_id for group in groups for item in group}
        left_out = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
        for item in pending:
            if item.job_id not in kept:
                database.set_result(item.job_id, left_out)


def report(session: Path) -> int:
    """Print the survivors and the count; the number of survivors."""
    with use_db(str(session), WorkDB.Mode.open) as database:
        done = [
            result for _, result in database.completed_work_items
            if result.worker_outcome is WorkerOutcome.NORMAL
        ]  # fmt: skip
    survivors = [result for result in done if result.test_outcome is TestOutcome.SURVIVED]
    for result in survivors:
        print(
            "\n".join(
                line for line in result.diff.splitlines() if line.startswith(("@@", "+", "-"))
            )
        )
        print()
    share = 100 * (len(done) - len(survivors)) / max(1, len(done))
    print(f"killed {len(done) - len(survivors)} of {len(done)} mutants ({share:.0f} %)")
    return len(survivors)


def main() -> None:
    """Parse, copy, mutate, report."""
    modules = tomllib.loads((HERE / "modules.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", choices=sorted(modules))
    parser.add_argument("--draw", type=int, help="how many mutants; 0 for all")
    parser.add_argument("--python", default=sys.executable, help="which Python runs the tests")
    given = parser.parse_args()
    module = modules[given.module]
    with tempfile.TemporaryDirectory(prefix="plurax-mutants-") as folder:
        for name in ("src", "tests", "docs", "examples", "benchmarks"):
            shutil.copytree(
                ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in ("pyproject.toml", "README.md", "Makefile"):
            shutil.copy(ROOT / name, folder)
        os.environ["PYTHONPATH"] = str(Path(folder, "src"))
        os.environ.setdefault("PLURAX_TEST_CACHE", str(Path(folder, "cache")))
        os.chdir(folder)
        config, session = Path("cosmic-ray.toml"), Path("session.sqlite")
        judged = command(given.python, module["tests"])
        start = time.monotonic()
        subprocess.run(judged.split(), check=True)  # unchanged, all pass
        # A mutant may turn for ever: several times as long as it takes unchanged is killed.
        limit = 15 + 2 * (time.monotonic() - start)
        paths = [f"src/plurax/{path}" for path in module["paths"]]
        config.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(paths)}\ntimeout = {limit:.0f}.0\n"
            f"excluded-modules = []\ntest-command = {json.dumps(judged)}\n"
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        tool = str(Path(sys.executable).with_name("cosmic-ray"))
        subprocess.run([tool, "init", str(config), str(session)], check=True)
        draw = module["draw"] if given.draw is None else given.draw
        # `|` stands in annotations for the most part, where a change is an error at import.
        sample(session, draw, ["BitOr"])
        subprocess.run([tool, "exec", str(config), str(session)], check=True)
        sys.exit(bool(report(session)))


if __name__ == "__main__":
    main()
