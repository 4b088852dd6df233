"""The rules of the house: who imports whom, what is public, how large things may grow."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plurax as px

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "plurax"
FILES = sorted(SOURCE.rglob("*.py"))

# Each floor may import from those above it in this list. Within a floor, a room may import from the
# rooms before it.
FLOORS = [
    ["tree", "errors", "validate", "user_frames"],
    ["resample", "plan", "state", "task", "members"],
    ["mesh", "hlo", "jaxpr"],
    ["sharding", "partition", "pipeline"],
    ["execute"],
    ["adapters", "analysis", "ensemble"],
    ["train", "sweeps"],
    ["experiment", "report", "cli"],
]
ORDER = [name for rooms in FLOORS for name in rooms]
PUBLIC = {
    "ArrayData", "BatchError", "Calibration", "CheckpointError", "Checkpoints", "Classification",
    "Collective", "DamagedCheckpointWarning", "Difference", "EpochSpec", "Experiment",
    "ExperimentError", "FastestBatchSize", "Fit", "Halving", "MaskWarning", "MaxBatchSize",
    "MaxMembers", "Members", "MembersError", "MembersProgram", "Memory", "MissingPackageError",
    "NonFiniteWarning", "Plan", "PlanError", "PluraxError", "Position", "Program", "Regression",
    "Schedule", "ShardingWarning", "StepOutput", "StreamData", "Sweep", "Task", "TaskError",
    "TensorSharding", "Timeline", "TrainState", "Tuning", "Verification", "accuracy", "bootstrap",
    "brier", "calibration", "check_schedule", "combine_classification", "combine_regression",
    "compile", "draw_schedules", "export_member", "fastest_batch_size", "fit", "fit_temperature",
    "grid", "join_members", "kfold", "log_uniform", "make_schedule", "max_batch_size",
    "max_members", "megatron", "name", "nll", "per_example", "shard", "simulate", "stack",
    "stage_boundary", "subsample", "successive_halving", "sweep", "take_members", "train_iter",
    "tune", "uniform", "verify", "virtual_devices",
}  # fmt: skip


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    own = room(path)
    if own == "__init__":
        return
    assert own in ORDER, f"{own} stands on no floor: give it one in FLOORS"
    for module in imports(path):
        assert "._src" not in module, f"private API: {module}"
        parts = module.split(".")
        if parts[0] == "plurax" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(own), (
                f"{own} imports {parts[1]}, which stands on the same or a higher floor"
            )


def test_there_are_at_most_eight_floors():
    assert len(FLOORS) <= 8
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms == set(ORDER)


def test_no_two_modules_have_one_name():
    names = [path.stem for path in FILES if path.stem != "__init__"]
    names += [
        path.parent.name for path in FILES if path.stem == "__init__" and path.parent != SOURCE
    ]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 600, "perhaps two rooms"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            documented = ast.get_docstring(node, clean=False)
            size = node.end_lineno - node.lineno - (documented or "").count("\n")
            # fit is the training loop: read top to bottom, it may be longer.
            assert size <= (110 if node.name == "fit" else 60), f"{node.name} has {size} lines"


def test_import_loads_nothing_slow():
    """What only some features need is imported where it is used."""
    slow = {"matplotlib", "orbax", "scipy", "tensorboardX", "tyro"}
    code = f"import sys, plurax; print(*sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_there_is_no_module_level_state():
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                assert all(name.isupper() or name.startswith("_") for name in names), path


def test_values_are_frozen():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            marks = getattr(node, "decorator_list", [])
            made = [mark for mark in map(ast.unparse, marks) if "dataclasses" in mark]
            assert all("frozen=True" in mark for mark in made), f"{path}: {node.name}"


def test_the_public_names():
    public = {name for name in vars(px) if not name.startswith("_")}
    modules = {path.stem for path in SOURCE.glob("*.py")} | {
        path.name for path in SOURCE.iterdir() if path.is_dir()
    }
    assert public - modules == PUBLIC


def test_plan_imports_no_jax():
    assert not [module for module in imports(SOURCE / "plan.py") if module.startswith("jax")]


def test_every_error_message_is_pinned_by_a_test():
    """Some words of each message stand in a test: `match=` or an assertion on its text."""
    tests = " ".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    tests = re.sub(r"\\(.)", r"\1", tests)
    loose = []
    builders = [ast.parse(path.read_text()).body for path in (SOURCE / "errors").glob("*.py")]
    for node in itertools.chain(*builders):
        if not isinstance(node, ast.FunctionDef):
            continue
        strings = [
            part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        words = " ".join(strings).split()
        runs = {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}
        if not any(run in tests for run in runs):
            loose.append(node.name)
    assert loose == [], "no test has their words"


def test_nothing_names_a_machine_or_a_registry():
    # Put together here, so that this file does not name what it looks for.
    homes = "|".join(("root", "home"))
    named = [rf"/(?:{homes})/\w", "//" + r"[^ ]*/" + "simple", "--" + "index" + "-url"]
    for path in [*FILES, *(REPOSITORY / "examples").glob("*.py"), REPOSITORY / "constraints.txt"]:
        assert not re.search("|".join(named), path.read_text()), path
