"""The rules of the house: who imports whom, what is public, how large things may grow."""

import ast
import collections
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Float, Int, TypeCheckError

import plurax as px
from tests.messages import all_messages
from tests.parts import PARTS, paths
from tests.typecheck import checked

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "plurax"
FILES = sorted(SOURCE.rglob("*.py"))

# Each floor may import from those above it in this list. Within a floor, a room may import from the
# rooms before it.
FLOORS = [
    [
        "notebook",
        "tree",
        "errors",
        "exit_codes",
        "timeouts",
        "disk",
        "event_file",
        "user_frames",
        "argument_check",
        "lazy",
        "reading",
        "toml_writer",
        "validate",
        "whole_batch",
        "locked_folder",
        "reaper",
        "terminal",
        "console",
    ],
    [
        "metrics",
        "resample",
        "strategies",
        "plan_text",
        "plan",
        "machine_fields",
        "machine",
        "state",
        "task",
        "freezing",
        "members",
        "sources",
    ],
    ["distributed", "collective", "targets", "mesh", "hlo", "fingerprint", "jaxpr", "weights"],
    ["sharding", "partition", "pipeline"],
    ["trace", "execute"],
    ["adapters", "ensemble", "loop"],
    [
        "analysis",
        "planner",
        "checkpoint",
        "run_folder",
        "guards",
        "server",
        "launch",
        "progress",
        "loggers",
    ],
    ["callbacks", "train", "sweeps", "experiment", "report", "cli", "__main__"],
]
ORDER = [name for rooms in FLOORS for name in rooms]

# Beside the engine stand four neighbours. The engine imports none of them, and they never import
# each other: whoever owns one can change it without knowing the rest. `callbacks`, `train`,
# `sweeps`, `experiment` and `cli` stand above, and put them together.
NEIGHBOURS = {
    "planning": {"analysis", "planner"},
    "running": {"checkpoint", "run_folder", "guards", "server", "launch"},
    "showing": {"progress", "loggers", "report"},
    "data": {"sources"},
}
ABOVE = {"callbacks", "train", "sweeps", "experiment", "cli", "__main__"}

# Doors that are still open. `report` draws plans and reads the folders of runs; the engine reads
# data of other libraries where users pass them.
DOORS = {
    ("report", "analysis"),
    ("report", "planner"),
    ("report", "checkpoint"),
    ("report", "run_folder"),
    ("report", "server"),
    ("report", "sweeps"),
    ("execute", "sources"),
    ("loop", "sources"),
}
PUBLIC = {
    "plurax": """
        Checkpoints Experiment Machine Members Plan Program Servers Task compile
        estimate fit freeze initialize longest over_batch per_example search stack start_from sweep
        topology verify virtual_devices adapters analysis callbacks ensemble errors metrics pipeline
        sharding train weights""",
    "plurax.adapters": "equinox haiku keras linen nnx",
    "plurax.analysis": """
        Collective ComparedCollectives Comparison CompiledFor
        CompiledSchedule Difference Estimate FastestBatchSize Level MaxBatchSize
        Measured Memory Planned PlannedMemory ScheduledCollective Seconds Verification
        compiled_for draw_estimates draw_layer draw_search draw_servers draw_workers
        fastest_batch_size max_batch_size measure_machine planned write_report""",
    "plurax.callbacks": """
        Csv EarlyStopping Ema JsonLines KeepBest LearningRate Logger Mlflow Profile
        ReduceOnPlateau TensorBoard Wandb""",
    "plurax.ensemble": """
        Calibration Classification Halving MaxMembers Regression Rung Sweep Tuning
        accuracy bootstrap brier calibration combine_classification combine_regression
        draw_confidence draw_parallel draw_reliability export_member fit_temperature
        grid join_members kfold log_uniform max_members nll save_calibration subsample
        successive_halving take_members tune uniform""",
    "plurax.errors": """
        ArgumentError BatchError CheckpointError DamagedCheckpointWarning
        DamagedLogWarning DiskError ExperimentError MachineError MaskWarning
        MembersError MissingPackageError NonFiniteWarning OutOfMemoryError PeerError
        PlanError PluraxError ProcessError ReplicaError RollbackWarning RunStoppedError
        SaveFailedWarning SavingStoppedError ShardingWarning StreamWarning TaskError""",
    "plurax.metrics": """
        Metric accuracy auc confusion_matrix f1 mean perplexity precision r2 recall""",
    "plurax.pipeline": """
        Action LayerAssignment Schedule Timeline check_schedule draw_schedules gpipe
        eager_one_f_one_b interleaved make_schedule one_f_one_b simulate stage_boundary zb_h1""",
    "plurax.sharding": """
        Axes ParameterInfo ReshardStep TensorSharding apply_moves megatron name
        plan_reshard shard""",
    "plurax.train": """
        ArrayData Fit Gradients Position ReplicaCheck ReplicaFinding Rollback Run
        StepOutput StreamData TrainState draw_curves replay train_iter""",
    "plurax.weights": "export_predict labels load save",
}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path):
    """All nodes of a file, which is parsed once for all rules."""
    return [*ast.walk(ast.parse(path.read_text()))]


@pytest.fixture(scope="module", autouse=True)
def nodes_forgotten():
    yield
    nodes.cache_clear()


def imports(path):
    for node in nodes(path):
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


def test_neighbours_do_not_import_each_other():
    part = {name: neighbour for neighbour, rooms in NEIGHBOURS.items() for name in rooms}
    part |= dict.fromkeys(ABOVE, "above")
    through = set()
    for path in FILES:
        own = room(path)
        for module in imports(path) if own not in ABOVE else ():
            other = module.split(".")[1] if module.startswith("plurax.") else own
            if part.get(other, part.get(own)) != part.get(own):
                through.add((own, other))
    assert through == DOORS, "a wall has a new door, or one that is listed is closed"


def test_no_modules_import_each_other():
    """Not in a function either, nor for annotations alone: one of the two is in the wrong place."""
    modules = {
        ".".join(("plurax", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in FILES
        if path.stem != "__init__"
    }
    needed = {
        name: {other for other in imports(path) if other in modules and other != name}
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(needed).prepare()  # raises CycleError, with the circle


def test_one_room_knows_which_process_this_is():
    """What differs between one process and many is in `distributed`; others call its functions."""
    of_processes = r"jax\.(process_|distributed)"
    for path in FILES:
        code = path.read_text()
        if room(path) not in ("distributed", "errors") and re.search(of_processes, code):
            code = ast.unparse(ast.parse(code))  # without comments
            assert not re.search(of_processes, code), path


def test_there_are_at_most_eight_floors():
    assert len(FLOORS) <= 8
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms == set(ORDER)


def budgets():
    """The rows of the table in CONTRIBUTING.md: the rooms of a part, and its lines at most."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().split("## Budgets")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\w ,`]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    return {tuple(re.findall(r"\w+", rooms)): int(most.replace(",", "")) for rooms, most in rows}


def test_each_part_keeps_to_its_budget_of_lines():
    """A part that has to grow makes room first, or says in the table by how much."""
    lines = collections.Counter()
    for path in FILES:
        folder = room(path) if path.parent != SOURCE else "top"
        lines[folder] += len(path.read_text().splitlines())
    parts = budgets()
    assert sorted(name for rooms in parts for name in rooms) == sorted(lines)
    over = {
        rooms: (spent, most)
        for rooms, most in parts.items()
        if (spent := sum(lines[name] for name in rooms)) > most
    }
    assert not over, f"lines, and lines at most: {over}"


def test_no_two_modules_have_one_name():
    names = [path.stem for path in FILES if path.stem not in ("__init__", "__main__")]
    names += [
        path.parent.name for path in FILES if path.stem == "__init__" and path.parent != SOURCE
    ]
    assert sorted(names) == sorted(set(names))


def test_no_two_classes_have_one_name():
    names = [
        node.name.lstrip("_")
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(names) == sorted(set(names))


# Concrete methods that are overridden, and concrete classes that have subclasses: until the parts
# they are in are reworked. Nothing may be added.
OVERRIDDEN = {
    "Csv._flush", "JsonLines._flush",
    "NotebookProgress.__enter__", "NotebookProgress.__exit__",
    "NotebookProgress._print", "NotebookProgress.advance", "NotebookProgress.compiling",
    "NotebookProgress.epoch",
    "TensorBoard._flush",
}  # fmt: skip
SUBCLASSED = {
    "Common", "Resharder", "StepLogger", "TrainingProgress",
}  # fmt: skip


def methods(node):
    """The methods of a class, and whether each is abstract."""
    return {
        item.name: any("abstractmethod" in ast.unparse(mark) for mark in item.decorator_list)
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }


def test_a_class_is_abstract_or_final_and_no_concrete_method_is_overridden():
    """Where a method comes from is then seen in the class itself. Kinds of errors have subclasses,
    for which `except` is written."""
    classes = {
        node.name: node
        for path in FILES
        if path != SOURCE / "errors" / "kinds.py"
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(node):
        for text in map(ast.unparse, node.bases):
            if text in classes:
                yield classes[text]
                yield from ancestors(classes[text])

    subclassed, overridden = set(), set()
    for name, node in classes.items():
        for base in ancestors(node):
            if not any(methods(base).values()):
                subclassed.add(base.name)
            # A class's `__init__` calls its base's.
            concrete = {method for method, abstract in methods(base).items() if not abstract}
            again = concrete & {*methods(node)} - {"__init__"}
            overridden |= {f"{name}.{method}" for method in again}
    assert overridden <= OVERRIDDEN
    assert subclassed <= SUBCLASSED


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 600, "perhaps two rooms"
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            documented = ast.get_docstring(node, clean=False)
            size = node.end_lineno - node.lineno - (documented or "").count("\n")
            # fit is the training loop: read top to bottom, it may be longer.
            assert size <= (110 if node.name == "fit" else 60), f"{node.name} has {size} lines"


FILLERS = {"one", "found", "given", "made", "that", "it", "thing"}
ARGUMENTS = {"draw_layer.found", "draw_search.found", "make_schedule.given"}  # of public functions
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (ast.FunctionDef, ast.Lambda, *COMPREHENSIONS)


def within(scope):
    """The nodes of a function or a comprehension, without what is inside another one in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from within(child)


def bound(scope):
    """The fillers that a function or a comprehension binds: its arguments, and what it assigns."""
    targets = [node for node in within(scope) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.id for node in targets if isinstance(node, ast.Name)}
    return FILLERS & (names | {node.arg for node in within(scope) if isinstance(node, ast.arg)})


def lines_of(name, node):
    """The lines in which a name is bound or read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, SCOPES) and name in bound(child)):
            if name in (getattr(child, "id", None), isinstance(child, ast.arg) and child.arg):
                yield child.lineno
            yield from lines_of(name, child)


@pytest.mark.ci
def test_names_say_what_they_are():
    """A name that says nothing is read within three lines of where it is bound, no later."""
    lasting = set()
    for path in FILES:
        for scope in [node for node in nodes(path) if isinstance(node, SCOPES)]:
            for name in bound(scope):
                lines = [*lines_of(name, scope)]
                if max(lines) - min(lines) > 3:
                    lasting.add(f"{getattr(scope, 'name', path.stem)}.{name}")
    assert lasting == ARGUMENTS


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_loads_nothing_of_its_own():
    code = "import sys; import plurax; print(*sys.modules)"
    assert {name for name in run(code) if name.startswith("plurax")} == {"plurax", "plurax.lazy"}


@pytest.mark.ci
def test_public_names_load_nothing_slow():
    """What only some features need is imported where it is used."""
    slow = {"equinox", "flax", "grain", "matplotlib", "orbax", "pandas", "scipy", "tensorboardX"}
    # A process of its own for each package, begun once what all of them load is loaded.
    code = """
import importlib, os, sys
import jax, optax
for name in sys.argv[1:]:
    if not os.fork():
        package = importlib.import_module(name)
        for public in dir(package):
            getattr(package, public)
        print(name, *sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    packages = sorted(set(PUBLIC) - {"plurax.adapters"})
    done = subprocess.run(
        [sys.executable, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    found = {line.split()[0]: {*line.split()[1:]} for line in done.stdout.splitlines()}
    assert sorted(found) == packages
    assert not found["plurax"] & {*slow, "rich", "tyro"}
    for package, modules in found.items():
        assert not modules & slow, package


def test_there_is_no_module_level_state():
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                assert all(name.isupper() or name.startswith("_") for name in names), path


def test_values_are_frozen():
    for path in FILES:
        for node in nodes(path):
            marks = getattr(node, "decorator_list", [])
            made = [mark for mark in map(ast.unparse, marks) if "dataclasses" in mark]
            assert all("frozen=True" in mark for mark in made), f"{path}: {node.name}"


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(PUBLIC[package].split()) == module.__all__
    here = set(PUBLIC[package].split()) - {"keras"}  # tests/integrations has Keras
    assert all(getattr(module, name) is not None for name in here)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("package", PUBLIC)
def test_no_module_shadows_a_public_name(package):
    """Importing a module sets an attribute of its package; a public name is another object."""
    directory = SOURCE.joinpath(*package.split(".")[1:])
    modules = {path.stem for path in directory.glob("*.py")}
    assert package == "plurax.adapters" or not modules & set(PUBLIC[package].split())


def test_plan_imports_no_jax():
    assert not [module for module in imports(SOURCE / "plan.py") if module.startswith("jax")]


@pytest.mark.ci
def test_every_message_is_pinned_by_a_test():
    """Some words of each message stand in a test: `match=` or an assertion on its text."""
    tests = " ".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    tests = re.sub(r"\\(.)", r"\1", tests)
    loose = []
    for message in all_messages():
        literals = [text.split() for text in message.words if " " in text.strip()]
        runs = {
            " ".join(words[i : i + 3]) for words in literals for i in range(max(1, len(words) - 2))
        }
        if runs and not any(run in tests for run in runs):
            loose.append(f"{message.where}: {message.text}")
    assert loose == [], "no test has their words"


def test_a_message_of_one_place_stands_there():
    """A builder is for several places, or has forms to choose from; a file may be too full."""
    builders = {
        node.name: node
        for path in (SOURCE / "errors").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and len(node.body) == 1
    }
    raised = collections.defaultdict(list)
    for path in FILES:
        code = path.read_text()
        for name in re.findall(r"(?<=\berrors\.)[a-z_]+", code):
            raised[name].append((path, f"raise errors.{name}(" in code))
    once = {name: places[0] for name, places in raised.items() if len(places) == 1}
    assert not [
        name
        for name, (path, by_raise) in once.items()
        if name in builders and by_raise and len(path.read_text().splitlines()) < 560
    ]


def test_nothing_names_a_machine_or_a_registry():
    # Put together here, so that this file does not name what it looks for.
    homes = "|".join(("root", "home"))
    named = [rf"/(?:{homes})/\w", "//" + r"[^ ]*/" + "simple", "--" + "index" + "-url"]
    for path in [*FILES, *(REPOSITORY / "examples").glob("*.py"), REPOSITORY / "constraints.txt"]:
        assert not re.search("|".join(named), path.read_text()), path


def test_public_functions_are_checked_against_their_annotations():
    @checked
    def mean(rows: Float[np.ndarray, "N C"], labels: Int[np.ndarray, " N"]) -> float:
        if not len(rows):
            raise px.errors.BatchError("no rows")
        return float(rows.mean()) if labels.all() else "none"

    rows, labels = np.ones((2, 3)), np.ones(2, int)
    assert mean(rows, labels) == 1
    for wrong in ((rows, np.ones(3, int)), (rows, labels * 1.0), (rows, labels * 0)):
        with pytest.raises(TypeCheckError):
            mean(*wrong)
    with pytest.raises(px.errors.BatchError, match="no rows"):  # refused in our own words
        mean(np.ones((0, 2), int), labels)
    assert all(hasattr(one, "__wrapped__") for one in (px.fit, px.Plan.load, px.Members.take))


def test_a_name_that_is_elsewhere_is_pointed_at():
    with pytest.raises(AttributeError, match=r"'bootstrap'; it is plurax\.ensemble\.bootstrap$"):
        px.bootstrap  # noqa: B018
    with pytest.raises(AttributeError, match=r"'PlanError'; it is plurax\.errors\.PlanError$"):
        px.PlanError  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        px.nothing  # noqa: B018


def test_the_page_for_those_who_come_from_0_2_names_what_there_is():
    text = (REPOSITORY / "docs" / "coming-from" / "plurax-0.2.md").read_text()
    rows = re.findall(r"^\| `px\.(\w+)` \| `px\.(\w+)\.(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == 25
    for old, package, name in rows:
        assert old not in dir(px)
        assert name in dir(getattr(px, package))


def test_no_dtype_or_rank_is_promoted_implicitly():
    """In the library and in the tests' models; optax does as it does."""
    half, row, rows = jnp.ones(2, jnp.bfloat16), jnp.ones(2), jnp.ones((2, 2))
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        half + row
    with pytest.raises(ValueError, match="rank_promotion"):
        row + rows
    adam = optax.adam(optax.linear_schedule(1.0, 0.0, 9))
    jax.jit(adam.update)(row, adam.init(row))
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        half + row  # optax's rules end with it


def test_every_test_belongs_to_one_part():
    """A change to one part runs that part's tests: `make test PART=showing`."""
    owned = collections.Counter()
    for part in PARTS:
        for name in paths(part):
            path = REPOSITORY / name
            owned.update(path.rglob("test_*.py") if path.is_dir() else [path])
    every = (REPOSITORY / "tests").rglob("test_*.py")
    assert owned == collections.Counter(every)
