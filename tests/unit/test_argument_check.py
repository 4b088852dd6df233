"""Odd values for every public argument: the call works, or says in our words what is wrong."""

import importlib
import inspect
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from tests.draws import draws
from tests.odd_calls import calls
from tests.test_architecture import PUBLIC

import plurax as px
from plurax import errors
from plurax.argument_check import explain
from plurax.user_frames import is_users
from plurax.validate import bytes_of

# What the library alone makes; what has no arguments; what joins processes or starts devices.
UNCALLED = """
    Fit initialize virtual_devices Collective ComparedCollectives CompiledFor CompiledSchedule
    ScheduledCollective Difference FastestBatchSize MaxBatchSize Measured
    Memory Planned PlannedMemory Seconds Verification draw_layer draw_search measure_machine Logger
    Calibration Classification Halving MaxMembers Regression Rung Sweep Tuning bootstrap Metric
    Timeline ParameterInfo ReshardStep apply_moves Gradients ReplicaCheck ReplicaFinding Run
    StepOutput TrainState train_iter"""
SLOW = """
    plurax.search plurax.sweep plurax.verify plurax.analysis.fastest_batch_size
    plurax.analysis.max_batch_size plurax.analysis.draw_estimates plurax.analysis.draw_servers
    plurax.ensemble.draw_confidence plurax.ensemble.draw_parallel plurax.ensemble.draw_reliability
    plurax.ensemble.max_members plurax.ensemble.successive_halving plurax.ensemble.tune
    plurax.pipeline.draw_schedules plurax.train.draw_curves plurax.weights.export_predict"""
# Of these, large numbers are no mistake, and take as long as they say.
LONG = {"steps", "epochs", "seconds", "memory", "max_size", "repeats"}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def without_limit():
    """A call that runs out of memory, where its own limit does not refuse it before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plurax.sharding.spec.MOST_DIMS", 10**13)
        px.sharding.TensorSharding.replicated(10**12)


VALUES = [
    -1, 0, 2, 1.5, 10**12, 10**5000, float("nan"), float("inf"), True, None, 1j,
    "", "x", "a\0b", "y" * 300, "\ud800", b"x", [], (), {}, {"x": 1}, {1: 2}, {1}, [1], ["x"],
    [None], object(), np.float32(2), np.int8(-1), np.zeros(2), np.array(["x"]),
    np.array([None]), lambda *given: None,
]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ODD = st.one_of(
    st.sampled_from(VALUES),
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.dictionaries(st.text(max_size=3), LEAVES, max_size=3),
)


def is_called(package, name):
    value = getattr(importlib.import_module(package), name)
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    return not inspect.ismodule(value) and not is_error and name not in UNCALLED.split()


CALLED = [
    f"{package}.{name}"
    for package, names in PUBLIC.items()
    for name in names.split()
    if package != "plurax.adapters" and is_called(package, name)
]


class TakenError(Exception):
    """A step was taken, or nearly."""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The calls, in a folder where they may write, and where training stops before a step."""

    def taken(*_, **__):
        raise TakenError

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("odd"))
        found = calls()
        found["plurax.Machine.save"].function("machine.toml")
        patch.setattr("plurax.train.fit.train_iter", taken)
        yield found


def test_every_public_name_is_called(table):
    assert [name for name in CALLED if not arguments_of(table, name)] == []
    assert {*SLOW.split()} <= {*CALLED}


def check(table, name, argument, value):
    """Call a function with an odd value for one of its arguments."""
    if argument in LONG and isinstance(value, int | float) and value > 100:
        return
    function, arguments = table[name]
    try:
        function(**{**arguments, argument: value})
    except (errors.PluraxError, TakenError):
        pass
    except (BeartypeCallHintViolation, TypeCheckError):
        pass  # accepted, though no annotation says so
    except Exception as error:
        if not is_users(error):
            raise


def arguments_of(table, public):
    """The calls of a public name and of its methods, with the name of each argument."""
    return [
        (name, argument)
        for name in table
        if name == public or name.startswith((f"{public}.", f"{public}("))
        for argument, parameter in inspect.signature(table[name].function).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("public", [name for name in CALLED if name not in SLOW.split()])
@draws(10)
@given(place=st.integers(0, 999), value=ODD)
def test_an_odd_value_works_or_is_refused_in_our_words(table, public, place, value):
    pairs = arguments_of(table, public)
    check(table, *pairs[place % len(pairs)], value)


@pytest.mark.parametrize("public", SLOW.split())
@draws(2, times=20)
@given(place=st.integers(0, 999), value=ODD)
def test_so_where_a_call_takes_long(table, public, place, value):
    pairs = arguments_of(table, public)
    check(table, *pairs[place % len(pairs)], value)


# Not for those that flatten trees: JAX does not give back the stack that it ran out of.
@pytest.mark.parametrize("public", ["Machine", "Plan", "Rollback", "Servers", "analysis.Level"])
def test_a_value_that_python_cannot_print_is_refused_in_our_words(table, public):
    for name, argument in arguments_of(table, f"plurax.{public}"):
        check(table, name, argument, nested(3000))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")  # a picture's text may have any
@pytest.mark.parametrize("public", CALLED)
def test_every_odd_value_in_every_argument(table, public):
    for name, argument in arguments_of(table, public):
        for value in VALUES:
            check(table, name, argument, value)


def test_half_a_character_is_refused(table):
    function, arguments = table["plurax.train.draw_curves"]
    with pytest.raises(
        errors.ArgumentError, match=r"title='\\ud800'\): title has to be a text of whole"
    ):
        function(**{**arguments, "title": "\ud800"})


# --- What a message says --------------------------------------------------------------------------


def explained(function):
    """A public function as users have it: without the checks of the tests around it."""
    return function.__wrapped__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: px.ensemble.brier("x", np.zeros(2, np.int32)),
            "plurax.ensemble.brier(probabilities='x'): probabilities has to be an array "
            "Float[ndarray, 'N C'].",
        ),
        (
            lambda: px.Plan().padded_size("x"),
            "plurax.Plan.padded_size(batch_size='x'): batch_size has to be a whole number.",
        ),
        (
            lambda: explained(px.ensemble.kfold)(),
            "plurax.ensemble.kfold(...): missing a required argument: 'folds'. "
            "Its arguments are folds, seed.",
        ),
        (
            lambda: explained(px.ensemble.kfold)(3, sede=1),
            "plurax.ensemble.kfold() has no argument 'sede'. Did you mean 'seed'?",
        ),
        (
            lambda: px.Plan().save("no/such/folder/plan.toml"),
            "plurax.Plan.save(path='no/such/folder/plan.toml'): No such file or directory. "
            "Give another path.",
        ),
        (
            without_limit,
            "plurax.sharding.TensorSharding.replicated(rank=1000000000000): rank counts what has "
            "to fit in memory, and must be a whole number of at least 0 that does.",
        ),
    ],
)
def test_the_argument_that_is_to_blame_is_named(call, message):
    with pytest.raises(errors.PluraxError, match=f"^{re.escape(message)}$"):
        call()


def test_a_functions_own_message_comes_first():
    with pytest.raises(errors.PlanError, match="Did you mean 'gpipe'"):
        px.Plan(schedule="gpip")


def test_an_error_of_the_users_own_code_stays_as_it_is():
    def apply(function: Callable[[int], int], by: int) -> int:
        return function(by)

    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        explain("px.apply", apply)(lambda by: by.colour, "x")


@pytest.mark.parametrize("given", ["40GB", "40e9", 40e9, np.float32(40e9), 40_000_000_000])
def test_memory_is_read_as_on_the_command_line(given):
    assert bytes_of(given) == pytest.approx(40e9)


def test_a_public_function_is_pickled_by_its_name():
    function = explained(px.per_example)
    assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(px.Plan(data=2))) == px.Plan(data=2)


@pytest.mark.parametrize("path", ["a.b", "a.\x80", ".", "/"])
def test_a_picture_of_no_format_is_refused(table, path):
    function, arguments = table["plurax.pipeline.draw_schedules"]
    with pytest.raises(errors.ExperimentError, match="not the name of a picture; its ending is"):
        function(**{**arguments, "path": path})
