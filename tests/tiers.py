"""Which command runs a test.

    mark     command           its tests
    (none)   make test         of every contract a case of each kind, as far as it is quick
    ci       make test-ci      further cases, contracts that take long, whole pages, kills
    gangs    make test-gangs   processes, which wait for each other more than they compute
    slow     make test-all     the rest of large tables, and what draws many rounds

`.ci/run` runs the first three, of those with the mark `ci` one third: which one its commit's hash
says, so that a run can be repeated (`takes_turn`). A file marks what it leaves to another command
as a whole, by `pytestmark` or a function's `@pytest.mark.ci`. Of which cases `make test` makes do
is said in `tests/tiers.toml`: a function that is not there runs with all of its cases.
"""

import collections
import itertools
import re
import tomllib
import zlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

Tiers = dict[str, dict[str, dict[str, list[str]]]]

TIERS: Tiers = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def in_turns(*tables: Iterable[object], odd: bool = False, of: int = 2) -> list[Any]:
    """Return all combinations of values of some tables, of which one of two, or of `of`, is quick.

    The others are slow. The quick ones have each value of a table with each second one, of two
    tables, or with each one, of three, of any other.

    >>> [(*case.values, bool(case.marks)) for case in in_turns([1, 2], "ab")]
    [(1, 'a', False), (1, 'b', True), (2, 'a', True), (2, 'b', False)]
    """
    cases = []
    for pairs in itertools.product(*(enumerate(table) for table in tables)):
        quick = sum(place for place, _ in pairs) % of == odd
        values = [value for _, value in pairs]
        cases.append(pytest.param(*values, marks=[] if quick else pytest.mark.slow))
    return cases


def _parts(nodeid: str) -> tuple[str, str, str]:
    """Return file, function and case of `tests/unit/test_a.py::test_b[c]`; "" without a case."""
    path, _, rest = nodeid.removeprefix("tests/").partition("::")
    name, _, case = rest.partition("[")
    return path, name, case.removesuffix("]")


def _matches(case: str, patterns: Iterable[str]) -> bool:
    """Only `*` is special: cases have brackets of their own."""
    return any(fnmatchcase(case, re.sub(r"[\[?]", r"[\g<0>]", pattern)) for pattern in patterns)


def mark(nodeid: str, tiers: Tiers = TIERS) -> str | None:
    """Return the mark that the table gives a test."""
    path, name, case = _parts(nodeid)
    if _matches(case, tiers["slow"].get(path, {}).get(name, ())):
        return "slow"
    return None if _matches(case, tiers["shown"].get(path, {}).get(name, ("*",))) else "ci"


def takes_turn(nodeid: str, turn: str) -> bool:
    """Whether a function's tests are run in a turn such as `2/3`: all of its cases, or none.

    >>> names = [f"tests/unit/test_a.py::test_{letter}[1]" for letter in "abcdef"]
    >>> [sum(takes_turn(name, f"{turn}/3") for name in names) for turn in (1, 2, 3)]
    [3, 1, 2]
    """
    which, of = map(int, turn.split("/"))
    path, name, _ = _parts(nodeid)
    return zlib.crc32(f"{path}::{name}".encode()) % of == which - 1


def unmatched(collected: Iterable[str], shown: Iterable[str], tiers: Tiers = TIERS) -> list[str]:
    """Return what the table says in vain about the files that were collected.

    Args:
        collected: The ids of all tests of some files.
        shown: Those of them that `make test` runs: each case of `[shown]` has to be among these.
        tiers: What `tests/tiers.toml` says.
    """
    files = {_parts(nodeid)[0] for nodeid in collected}
    vain = []
    for table, tests in (("slow", collected), ("shown", shown)):
        cases = collections.defaultdict(list)
        for path, name, case in map(_parts, tests):
            cases[path, name].append(case)
        vain += [
            f"{path}::{name}[{pattern}]"
            for path in sorted(tiers[table].keys() & files)
            for name, patterns in tiers[table][path].items()
            for pattern in patterns or ["no case is named"]
            if not any(_matches(case, [pattern]) for case in cases[path, name])
        ]
    return vain
