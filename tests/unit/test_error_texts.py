"""Every message word for word: each builder of `plurax.errors` is called and its text compared.

After a change that is meant, write the texts anew and read what changed in the diff:

    python -m tests.unit.test_error_texts
"""

import collections.abc
import inspect
import types
import typing
from pathlib import Path

import pytest

from plurax import errors
from plurax.errors import PluraxError

TEXTS = Path(__file__).with_name("error_texts.txt")

# What a builder is given where its annotations do not say enough, or its text has several forms.
GIVEN: dict[str, list[dict[str, object]]] = {
    "checkpoint_mismatch": [
        {
            "differ": {
                "params/w": ("float32[3,4]", "float32[3,8]"),
                "params/b": ("float32[8]", None),
            }
        },
        {"differ": {f"params/{i}": (None, "float32[]") for i in range(14)}},
    ],
    "column_has_nulls": [{"library": name} for name in ("pandas", "polars", "Arrow", "a file")],
    "column_not_numbers": [
        {"kind": kind, "library": library}
        for kind, library in [
            ("texts", "pandas"),
            ("times", "polars"),
            ("lists", "Arrow"),
            ("objects", "Hugging Face"),
            ("texts", "a file"),
        ]
    ],
    "folder_in_use": [{"owner": None}, {"owner": {"host": "node7", "pid": 4711}}],
    "layers_wrong_sum": [
        {"layers": (3, 2), "found": 4, "model": "stack", "even": (2, 2)},
        {"layers": (3, 2), "found": 1, "model": "boundaries", "even": (1, 0)},
    ],
    "machine_not_a_number": [
        {"where": "Level('node')", "field": "latency", "value": -1.0, "positive": False},
        {"where": "Level('node')", "field": "bandwidth", "value": 0.0, "positive": True},
    ],
    "machine_preset_unknown": [
        {"name": "8xA100", "known": ["8xA100-80GB"]},
        {"name": "abacus", "known": ["8xA100-80GB"]},
    ],
    "members_not_grown": [{"before": 2, "now": 3}, {"before": 0, "now": 3}],
    "plan_field_not_positive": [
        {"field": "data", "value": 0},
        {"field": "chunk", "value": -1},
        {"field": "bucket_bytes", "value": 25e6},
    ],
    "plan_needs_devices": [
        {"axes": {"data": 4, "tensor": 2}, "needed": 8, "available": 6, "fits": "data=3"},
        {"axes": {"data": 4, "tensor": 1}, "needed": 4, "available": 1, "fits": "data=1"},
    ],
    "plan_schedule_unknown": [
        {"value": "1f2b", "names": ["gpipe", "1f1b"]},
        {"value": 7, "names": ["gpipe", "1f1b"]},
    ],
    "plan_unknown_key": [
        {"key": "dta", "known": ["data", "tensor"]},
        {"key": "x", "known": ["data", "tensor"]},
    ],
    "plan_rule_unused": [
        {"pattern": "*/hiden", "paths": ["in/hidden"], "names": []},
        {"pattern": "z", "paths": [], "names": ["residual"]},
    ],
    "search_nothing_fits": [
        {"memory": 2.0, "least": [("data=2", 4.0, "memory"), ("data=4", 5.0, "a reason")]},
        {"memory": 2.0, "least": [("data=4", 5.0, "a reason")]},
    ],
    "replicas_differ": [
        {"devices": ["device 2 of process 0"], "leaves": ["a", "b", "c", "d"], "certain": True},
        {"certain": False},
    ],
    "rollback_not_a_count": [{"name": "after", "given": 2.5}, {"name": "limit", "given": -1}],
    "rollback_one_network": [{"what": "members"}, {"what": "servers"}],
    "rollbacks_exhausted": [{"step": 60, "before": [(20, 40), (None, 50)]}],
    "saving_given_up": [{"saved": 20, "step": 60}, {"saved": None, "step": 60}],
    "schedule_of_other_sizes": [{"found": (2, 4, 1), "wanted": (2, 8, 1)}],
    "sharding_indivisible": [{"shape": (6, 7), "dim": 1, "num_shards": 2}],
    "strategy_of_another_model": [
        {"equation": "14/3 add", "where": "model.py:3 (f)", "found": "mul"},
        {"equation": "14/3 add", "where": "", "found": None},
    ],
    "strategy_indivisible": [
        {"strategy": ((None, 2), (2, None)), "place": 1, "shape": (7, 3), "dim": 0}
    ],
}


def builders():
    """Every builder by name."""
    return {
        name: value
        for name, value in sorted(vars(errors).items())
        if inspect.isfunction(value)
        and value.__module__.startswith("plurax.errors.")
        and not name.startswith("_")
    }


def example(name, annotation, number):
    """Something a parameter of this name and annotation may be."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return example(name, typing.get_args(annotation)[0], number)
    if origin is typing.Literal:
        return typing.get_args(annotation)[0]
    if origin is tuple:
        kinds = typing.get_args(annotation)
        kinds = (kinds[0], kinds[0]) if len(kinds) == 2 and kinds[1] is ... else kinds
        return tuple(example(name, kind, number + n) for n, kind in enumerate(kinds))
    if origin in (collections.abc.Mapping, dict):
        keys, values = typing.get_args(annotation)
        return {
            example(f"{name}_{n}", keys, n + 1): example(f"{name}_{n}", values, number + n)
            for n in range(2)
        }
    if origin is not None and issubclass(origin, collections.abc.Iterable):
        (kind,) = typing.get_args(annotation)
        return [example(f"{name}_{n}", kind, number + n) for n in range(2)]
    if annotation in (int, float, bool):
        return annotation(number)
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return annotation(f"a/{name}")
    if isinstance(annotation, type) and issubclass(annotation, BaseException):
        return annotation(f"<{name}>")
    return f"<{name}>"


def called(name, builder):
    """Calls of a builder, and what it made of each, as they stand in the file."""
    parameters = inspect.signature(builder).parameters
    texts = {}
    for told in GIVEN.get(name, [{}]):
        assert told.keys() <= parameters.keys(), (
            f"{name} takes no {told.keys() - parameters.keys()}"
        )
        given = {
            key: told.get(key, example(key, parameter.annotation, number))
            for number, (key, parameter) in enumerate(parameters.items(), 2)
        }
        error = builder(**given)
        assert isinstance(error, PluraxError | ImportError | str), f"{name} made a {type(error)}"
        said = ", ".join(f"{key}={value!r}" for key, value in given.items())
        texts[f"{name}({said})"] = f"{type(error).__name__}: {error}".rstrip()
    return texts


def all_texts():
    """Of every builder, all calls."""
    return {
        call: text for name, one in builders().items() for call, text in called(name, one).items()
    }


def written():
    """The file's entries, call: text."""
    parts = TEXTS.read_text(encoding="utf-8").split("\n== ")[1:]
    return dict(part.rstrip("\n").split("\n", 1) for part in parts)


@pytest.mark.parametrize("name", builders())
def test_a_message_is_what_was_written(name):
    for call, text in called(name, builders()[name]).items():
        assert call in written(), (
            f"{TEXTS.name} has no entry for it: see the docstring of this test"
        )
        assert written()[call] == text


def test_no_message_is_left_of_a_builder_that_is_gone():
    assert written().keys() == all_texts().keys()
    assert GIVEN.keys() <= builders().keys()


if __name__ == "__main__":
    TEXTS.write_text(
        "The message of every builder of plurax.errors; written by test_error_texts.py.\n"
        + "".join(f"\n== {call}\n{text}\n" for call, text in all_texts().items()),
        encoding="utf-8",
    )
