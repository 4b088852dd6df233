"""Every test has one command, and `tests/tiers.toml` speaks of tests that are there."""

import itertools
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.tiers import TIERS, in_turns, mark, takes_turn, unmatched

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted({*TIERS["shown"], *TIERS["slow"]}))
def test_what_waits_for_ci_is_there(path):
    """A renamed file or function takes its line in `tests/tiers.toml` along."""
    text = (REPOSITORY / "tests" / path).read_text()
    for name in (*TIERS["shown"].get(path, ()), *TIERS["slow"].get(path, ())):
        owner, _, method = name.partition("::")  # a method may be inherited
        assert f"class {owner}(" in text if method else f"def {name}(" in text


TABLE = {
    "shown": {"unit/test_a.py": {"test_b": ["f32-[2]", "*-topk"], "Test::test_c": ["one"]}},
    "slow": {"unit/test_a.py": {"test_b": ["f64-*"]}},
}


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("unit/test_a.py::test_a", None),
        ("unit/test_a.py::test_a[case]", None),
        ("unit/test_a.py::test_b[f32-[2]]", None),
        ("unit/test_a.py::test_b[f32-2]", "ci"),
        ("unit/test_a.py::test_b[f16-topk]", None),
        ("unit/test_a.py::test_b[f64-topk]", "slow"),
        ("unit/test_a.py::Test::test_c[one]", None),
        ("unit/test_a.py::Test::test_c[one more]", "ci"),
        ("unit/test_a.py::Other::test_c[one more]", None),
        ("unit/test_z.py::test_b[f64-topk]", None),
    ],
)
def test_a_case_has_its_mark(test, expected):
    assert mark(f"tests/{test}", TABLE) == expected


def test_a_line_of_the_tiers_that_says_nothing_is_named():
    """Every run asks this of the files that it collects (`tests/conftest.py`)."""
    shown = [f"tests/unit/test_a.py::{name}" for name in ("test_b[f32-[2]]", "Test::test_c[one]")]
    every = [*shown, "tests/unit/test_a.py::test_a", "tests/unit/test_a.py::test_b[f64-topk]"]
    assert unmatched(every, shown, TABLE) == ["unit/test_a.py::test_b[*-topk]"]
    assert unmatched(every[:2], shown[:1], TABLE) == [
        "unit/test_a.py::test_b[f64-*]",
        "unit/test_a.py::test_b[*-topk]",
        "unit/test_a.py::Test::test_c[one]",
    ]
    nothing = {**TABLE, "shown": {"unit/test_a.py": {"test_b": []}}}
    assert unmatched(every, shown, nothing) == ["unit/test_a.py::test_b[no case is named]"]
    assert unmatched(["tests/unit/test_z.py::test_b"], [], TABLE) == []


def test_in_three_turns_each_function_runs_once_with_all_its_cases():
    names = [f"tests/unit/test_a.py::test_{number}" for number in range(300)]
    turns = [[name for name in names if takes_turn(name, f"{turn}/3")] for turn in (1, 2, 3)]
    assert sorted(itertools.chain(*turns)) == sorted(names)
    assert all(len(turn) > 80 for turn in turns)
    assert all(takes_turn(f"{turns[1][0]}[case {case}]", "2/3") for case in range(9))


class Item:
    """A test that pytest has collected."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, {*marks}

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, name):
        self.marks.add(name)


@pytest.mark.parametrize("turn", ["", "1/2", "2/2"])
def test_in_a_turn_all_tests_run_but_those_of_ci_that_wait(monkeypatch, turn):
    names = [f"tests/unit/test_a.py::test_{letter}" for letter in "abcdefgh"]
    items = [Item("tests/unit/test_z.py::test_shown"), *(Item(name, "ci") for name in names)]
    items += [Item(f"{name}_of_a_gang", "ci", "gangs") for name in names]
    every, waiting = list(items), []
    hook = SimpleNamespace(pytest_deselected=lambda items: waiting.extend(items))
    monkeypatch.setenv("PLURAX_TEST_TURN", turn)
    pytest_collection_modifyitems(SimpleNamespace(args=["a::b"], hook=hook), items)
    assert [one.nodeid for one in waiting] == [
        name for name in names if turn and not takes_turn(name, turn)
    ]
    assert items == [one for one in every if one not in waiting]


def test_each_tier_has_one_command_and_ci_runs_all_but_the_slow():
    """`make test` of some files, as in `.ci/run`, runs what `make test-ci` does as well."""
    makefile = (REPOSITORY / "Makefile").read_text()
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]
    usual = re.search(r"-m '([^']+)'", options["ini_options"]["addopts"])[1]
    of_files, ci, gangs = re.findall(r"-m '([^']+)'", makefile)[:3]
    marks = {"slow": False, "gangs": False, "ci": False}
    for name in ("test", "gangs", "ci", "slow"):
        marked = {**marks, name: True} if name in marks else marks
        chosen = [eval(expression, {}, dict(marked)) for expression in (usual, ci, gangs)]
        assert chosen == [name == one for one in ("test", "ci", "gangs")]
        assert eval(of_files, {}, dict(marked)) == (name in ("test", "ci"))


def test_the_files_for_the_newest_jax_are_there():
    """With one that is not, pytest runs none of them."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "--just-print", "test-newest", "NEWEST=python3.12"],
        cwd=REPOSITORY, env=outside, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = re.findall(r"\S+\.py(?=[\s;])", printed.stdout.split("-m pytest")[1])
    assert len(files) > 10
    assert [name for name in files if not (REPOSITORY / name).is_file()] == []


@pytest.mark.parametrize("odd", [False, True])
def test_in_turns_every_two_values_of_three_tables_meet(odd):
    tables = ["ab", "cde", "fghi"]
    cases = in_turns(*tables, odd=odd)
    quick = [set(case.values) for case in cases if not case.marks]
    assert (len(cases), len(quick)) == (24, 12)
    for one, other in itertools.combinations(tables, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= case for case in quick), pair


def test_in_turns_one_of_three():
    tables = ["abcd", "efg", "hij"]
    quick = [set(case.values) for case in in_turns(*tables, odd=True, of=3) if not case.marks]
    assert len(quick) == 12
    for one, other in itertools.combinations(tables, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= case for case in quick), pair


def test_in_turns_each_value_of_two_tables_meets_each_second_one():
    quick = [case.values for case in in_turns("ab", "cdef") if not case.marks]
    assert quick == [("a", "c"), ("a", "e"), ("b", "d"), ("b", "f")]
