"""Batches and states that do not fit are refused with what was expected and what was given."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px

ROWS = models.data(8)


@functools.cache
def compiled(plan, weights=False):
    rows = models.data(8, weights=weights)
    return px.compile(models.mlp_task(weights=weights), models.optimizer(), plan, rows)


@pytest.fixture(scope="module")
def program():
    return compiled(px.Plan(data=2))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (models.data(9), r"has 9 examples and the program was compiled for at most 8"),
        ({**ROWS, "x": ROWS["x"][:, :4]}, r"(?s)expected:.*x: float32\[B,5\].*given:.*\[8,4\]"),
        ({**ROWS, "x": ROWS["x"].astype(np.float16)}, r"(?s)expected:.*float32.*given:.*float16"),
        ({"x": ROWS["x"]}, r"(?s)expected:.*x: .*y: int32\[B\].*given:\s+x: float32\[8,5\]$"),
        ([ROWS["x"], ROWS["y"]], r"(?s)expected:.*given:.*0: float32\[8,5\]"),
        ({**ROWS, "y": ROWS["y"][:3]}, r"same leading dim; given x: 8, y: 3"),
        (models.cut(ROWS, 0), r"has no arrays, or no examples"),
    ],
)
def test_a_batch_that_does_not_fit(program, batch, message):
    with pytest.raises(px.errors.BatchError, match=message):
        program.step(program.init(), batch)


def test_a_scalar_is_no_batch():
    with pytest.raises(px.errors.BatchError, match=r"batch\[scale\] is a scalar"):
        px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(), {**ROWS, "scale": np.float32(1)})


def test_an_empty_tree_is_no_batch():
    with pytest.raises(px.errors.BatchError, match=r"no arrays"):
        px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(), {})


def test_a_used_state_is_named(program):
    state = program.init()
    program.step(state, ROWS)
    with pytest.raises(px.errors.BatchError, match=r"given to an earlier step.*state, metrics ="):
        program.step(state, ROWS)


def test_a_loop_without_its_order_is_refused(program):
    placed = program.place_data(ROWS)
    with pytest.raises(
        px.errors.BatchError, match=r"one network needs the order of an epoch: order = pr"
    ):
        program.loop(program.init(), placed, (), 0, 1)
    order = program.place_epoch(np.arange(8)[None], np.array([8]))
    many = px.compile(
        models.mlp_task(), models.optimizer(), px.Plan(), ROWS, members=px.Members(seeds=range(2))
    )
    for given, words in ((order, "an order of 2 arrays"), ((), "a program compiled without data")):
        with pytest.raises(
            px.errors.BatchError, match=rf"own order, and program\.loop was given {words}"
        ):
            many.loop(many.init(), placed, given, 0, 1)


def test_a_foreign_state_is_named(program):
    other = px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(), ROWS)
    with pytest.raises(
        px.errors.BatchError, match=r"(?s)does not belong to this program.*opt_state"
    ):
        program.step(other.init(), ROWS)


def test_a_state_moves_between_plans(program):
    one = px.compile(models.mlp_task(), models.optimizer(), px.Plan(), ROWS)
    state = program.place(one.init(seed=3))
    assert models.same_bits(state.params, program.init(seed=3).params)
    state, _ = program.step(state, ROWS)
    assert int(state.step) == 1


def test_what_is_placed_or_given_stays_the_callers(program):
    one = px.compile(models.mlp_task(), models.optimizer(), px.Plan(data=2), ROWS)
    mine = one.init(seed=3)
    program.step(program.place(mine), ROWS)
    program.step(program.init(params=mine.params), ROWS)
    assert np.isfinite(np.asarray(mine.params["hidden"])).all()


def test_evaluation_goes_by_microbatches():
    """So that it fits in memory where training does."""
    seen = []

    def evaluate(params, batch):
        seen.append(batch["x"].shape[0])
        return models.evaluate(params, batch)

    task = px.Task(init=models.init, loss=lambda p, b, k: models.evaluate(p, b), evaluate=evaluate)
    program = px.compile(task, optax.sgd(0.1), px.Plan(data=2, microbatches=2), ROWS)
    program.evaluate(program.init(), ROWS)
    assert seen[-1] == 8 // (2 * 2)


def test_a_state_of_another_plan_must_be_placed(program):
    with pytest.raises(px.errors.BatchError, match=r"is on other devices.*program\.place\(state\)"):
        program.step(compiled(px.Plan()).init(), ROWS)


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=3), px.Plan(data=8, microbatches=2)])
def test_a_non_finite_step_changes_nothing_and_is_counted(plan):
    program = compiled(plan)
    state, _ = program.step(program.init(), ROWS)
    before = jax.device_get(state)
    for poison in (np.nan, np.inf):
        bad = {**ROWS, "x": np.where(np.arange(8)[:, None] == 5, poison, ROWS["x"])}
        state, metrics = program.step(state, bad)
        assert int(metrics["skipped"]) == 1
        assert not np.isfinite(metrics["loss"])
    after = jax.device_get(state)
    assert models.same_bits((after.params, after.opt_state), (before.params, before.opt_state))
    assert int(after.skipped) == 2
    assert int(after.step) == 3
    state, metrics = program.step(state, ROWS)
    assert int(metrics["skipped"]) == 0
    assert not models.same_bits(state.params, before.params)


def test_filled_rows_never_bring_in_a_nan():
    """A loss that is NaN for zeros (the usual filling) stays finite: real examples fill up."""

    def loss(params, batch, keys):
        return jnp.log(batch["x"]).sum(1) * params

    task = px.Task(init=lambda key: jnp.ones(()), loss=loss)
    rows = {"x": np.full((8, 2), 2.0, np.float32)}
    program = px.compile(task, optax.sgd(0.1), px.Plan(data=3, microbatches=2), rows)
    for count in range(1, 9):
        state, metrics = program.step(program.init(), models.cut(rows, count))
        np.testing.assert_allclose(state.params, 1 - 0.1 * 2 * np.log(2), rtol=1e-6)
        assert int(metrics["examples"]) == count


def test_jax_arrays_and_numpy_arrays_are_the_same(program):
    for count in (8, 5):
        rows = models.cut(ROWS, count)
        a, _ = program.step(program.init(), rows)
        b, _ = program.step(program.init(), jax.tree.map(jnp.asarray, rows))
        assert models.same_bits(a.params, b.params)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 50])
@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=3)])
def test_predict_takes_any_number(plan, count):
    program = compiled(plan)
    state = program.init()
    inputs = {"x": models.data(count)["x"]}
    want = models.logits(state.params, inputs["x"])
    got = program.predict(state, inputs)
    assert isinstance(got, np.ndarray)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_array_equal(program.predict(state, inputs, chunk=3).shape, got.shape)


def test_predict_takes_an_iterator_and_keeps_its_lengths(program):
    state = program.init()
    sizes = [3, 20, 1, 8]
    batches = [{"x": models.data(size, seed=size)["x"]} for size in sizes]
    outputs = program.predict(state, iter(batches))
    for batch, output in zip(batches, outputs, strict=True):
        np.testing.assert_allclose(output, models.logits(state.params, batch["x"]), atol=1e-6)


def test_predict_of_nothing_is_refused(program):
    with pytest.raises(px.errors.BatchError, match="no examples"):
        program.predict(program.init(), {"x": np.zeros((0, 5), np.float32)})


@pytest.mark.parametrize("count", [1, 5, 8, 9, 100])
def test_evaluate_is_exact_over_all_examples(count):
    program = compiled(px.Plan(data=3), weights=True)
    state = program.init()
    rows = models.data(count, weights=True)
    losses, metrics = models.evaluate(state.params, rows)
    got = program.evaluate(state, rows)
    np.testing.assert_allclose(got["loss"], np.average(losses, weights=rows["w"]), rtol=1e-5)
    np.testing.assert_allclose(
        got["accuracy"], np.average(metrics["accuracy"], weights=rows["w"]), rtol=1e-5
    )
    batches = [models.cut(rows, 8), jax.tree.map(lambda x: x[8:], rows)] if count > 8 else [rows]
    if count <= 16:
        np.testing.assert_allclose(program.evaluate(state, batches)["loss"], got["loss"], rtol=1e-6)


def test_evaluate_of_nothing_is_refused(program):
    with pytest.raises(px.errors.BatchError, match="no examples"):
        program.evaluate(program.init(), [])


def test_a_later_batch_that_does_not_fit_is_said_to_be_of_the_evaluation(program):
    broken = {**ROWS, "x": ROWS["x"][:, :1]}
    with pytest.raises(px.errors.BatchError, match="a batch of the evaluation does not fit"):
        program.evaluate(program.init(), [ROWS, broken])


def test_too_few_devices_for_a_plan():
    with pytest.raises(
        px.errors.PlanError, match=r"needs 9 devices \(data=9\) and 8 are available"
    ):
        px.compile(models.mlp_task(), optax.sgd(0.1), px.Plan(data=9), ROWS)


def test_virtual_devices_too_late():
    with pytest.raises(px.errors.PlanError, match=r"virtual_devices\(5\) came too late.*8 device"):
        px.virtual_devices(5)
    px.virtual_devices(8)  # what is there already is fine
    with pytest.raises(px.errors.PlanError, match=r"0 virtual devices: give a whole number"):
        px.virtual_devices(0)


def test_many_steps_without_waiting_do_not_stall():
    """XLA aborts a process with more than 32 reductions under way on virtual CPU devices."""

    def loss(params, batch, keys):
        return jnp.tanh(batch @ params).mean(1)

    task = px.Task(init=lambda key: jax.random.normal(key, (256, 256)), loss=loss)
    rows = np.ones((512, 256), np.float32)
    program = px.compile(task, optax.sgd(0.1), px.Plan(data=4), rows)
    state, placed = program.init(), program.place_batch(rows)
    for _ in range(100):
        state, _ = program.step_placed(state, placed)
    assert int(state.step) == 100
    assert np.isfinite(program.evaluate(state, [rows] * 60)["loss"])


def test_wider_numpy_dtypes_are_taken_as_jax_takes_them():
    wide = {"x": ROWS["x"].astype(np.float64), "y": ROWS["y"].astype(np.int64)}
    program = px.compile(models.mlp_task(), models.optimizer(), px.Plan(data=2), wide)
    state, _ = program.step(program.init(), wide)
    other, _ = program.step(program.init(), ROWS)
    assert models.same_bits(state.params, other.params)


@pytest.mark.parametrize("options", [{}, {"resident": False}, {"members": px.Members(2)}])
def test_bytes_in_the_order_of_another_machine_are_the_same_numbers(options):
    """As in files of FITS, NetCDF and IDX."""
    swapped = {name: leaf.astype(leaf.dtype.newbyteorder()) for name, leaf in ROWS.items()}
    plan = px.Plan(chunk=1, batch_dim="major") if "members" in options else px.Plan(data=2)
    found, expected = (
        px.fit(models.mlp_task(), models.optimizer(), rows, evaluation=rows, plan=plan,
               batch_size=4, progress=False, **options)
        for rows in (swapped, ROWS)
    )  # fmt: skip
    assert models.same_bits(found.state.params, expected.state.params)
    assert found.history[0]["eval_loss"] == expected.history[0]["eval_loss"]


SUM = px.Task(
    init=lambda key: {"w": jnp.zeros(())},
    loss=lambda params, batch, keys: params["w"] * 0 + batch["n"].astype(params["w"].dtype),
    predict=lambda params, inputs: inputs["n"],
)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1, 2**33 + 5]), "holds 8589934597 as int64, and JAX computes in int32"),
        (np.array([-(2**31) - 1, 7]), "holds -2147483649 as int64"),
        (np.array([1, 2**33], np.uint64), "holds 8589934592 as uint64, and JAX computes in u"),
        (
            np.array([1.0, np.inf, -1e300]),
            r"holds -1e\+300 as float64, and JAX computes in float32",
        ),
    ],
)
def test_a_value_that_would_become_another_is_refused_by_name(values, message, resident):
    with pytest.raises(px.errors.BatchError, match=rf"batch\[n\] {message}.*jax_enable_x64"):
        px.fit(SUM, optax.sgd(0.0), {"n": values}, batch_size=2, resident=resident, progress=False)
    program = px.compile(SUM, optax.sgd(0.0), px.Plan(), {"n": values})
    with pytest.raises(px.errors.BatchError, match=message):
        program.predict(program.init(), {"n": values})
    with pytest.raises(px.errors.BatchError, match=message):
        program.evaluate(program.init(), {"n": values})
    with pytest.raises(px.errors.BatchError, match=message):
        program.step(program.init(), {"n": values[-2:]})


@pytest.mark.parametrize("resident", [True, False])
def test_members_are_given_no_wrapped_integers_either(resident):
    plan = px.Plan(chunk=1, batch_dim="major")
    with pytest.raises(px.errors.BatchError, match=r"batch\[n\] holds 8589934597 as int64"):
        px.fit(SUM, optax.sgd(0.0), {"n": np.array([1, 2**33 + 5])}, members=px.Members(2),
               plan=plan, batch_size=2, resident=resident, progress=False)  # fmt: skip
    with pytest.raises(
        px.errors.MembersError, match="hyperparameter 'n' holds 8589934597 as int64"
    ):
        px.Members(1, {"n": [2**33 + 5]}).arrays(1)


def test_values_that_fit_in_32_bits_are_exact():
    for values in (np.array([-(2**31), 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64)):
        program = px.compile(SUM, optax.sgd(0.0), px.Plan(), {"n": values})
        assert program.predict(program.init(), {"n": values}).tolist() == values.tolist()
    floats = np.array([0.1, np.inf, np.nan])
    program = px.compile(SUM, optax.sgd(0.0), px.Plan(), {"n": floats})
    np.testing.assert_array_equal(
        program.predict(program.init(), {"n": floats}), floats.astype(np.float32)
    )


def test_with_64_bits_a_large_integer_is_itself(x64):
    values = np.array([1, 2**33 + 5])
    program = px.compile(SUM, optax.sgd(0.0), px.Plan(), {"n": values})
    assert program.predict(program.init(), {"n": values}).tolist() == values.tolist()


class Column:
    """An array of another library: a pandas column, a tensor."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = values.shape, "theirs"

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        return Column(self.values[rows])

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize("resident", [True, False])
def test_arrays_of_other_libraries_are_taken(resident):
    values = np.arange(5.0, dtype=np.float32)
    data = {"n": Column(values)}
    options = {"batch_size": 2, "resident": resident, "progress": False, "shuffle": False}
    result = px.fit(SUM, optax.sgd(0.0), data, evaluation=data, **options)
    assert result.history[0]["loss"] == result.history[0]["eval_loss"] == 2.0
    assert result.program.predict(result.state, data).tolist() == values.tolist()
    batches = [{"n": Column(values[:2])}, {"n": Column(values[2:4])}]
    result = px.fit(SUM, optax.sgd(0.0), batches, progress=False)
    assert result.history[0]["loss"] == 1.5


class Table:
    """As a pandas DataFrame looks from outside."""

    shape, columns, iloc = (3, 2), ["x", "y"], None

    def __iter__(self):
        return iter(self.columns)


class Dataset:
    """As a data set of Hugging Face looks from outside."""

    shape, features = (3, 2), {}

    def with_format(self, kind):
        return self

    def __iter__(self):
        return iter([{"x": [1.0], "y": 2}])


DATES = np.array(["2020-01-01", "2020-01-02"], "M8[D]")
MISTAKEN = [
    (Table(), "is a table (Table), and the loss takes arrays; give a dict of arrays"),
    (
        [np.ones((2, 3)), np.ones(2)],
        "is a list of 2 arrays whose examples have different shapes, (), (3,), and a",
    ),
    (Dataset(), "is a data set of single examples (Dataset); give its columns as arrays"),
    ({"n": [1, 2, "x"]}, "['n'] is a list that holds 'x', and a device holds numbers."),
    ({"n": np.ones(2), "m": 3}, "['m'] is a int, and a dict of data holds arrays"),
    ("data.csv", "='data.csv' is no file that plurax reads: .npy, .npz, .parquet"),
    ({"n": np.array(["a", "b"])}, "batch[n] has dtype <U1, which no device can hold. Number"),
    ({"n": np.array([b"a", b"b"])}, "batch[n] has dtype |S1, which no device can hold."),
    (
        {"n": np.array([[1], [2, 3]], object)},
        "dtype object, which no device can hold. Python",
    ),
    ({"n": DATES}, "dtype datetime64[D], which no device can hold. Convert times to"),
    ({"n": DATES - DATES[0]}, "dtype timedelta64[D], which no device can hold. Convert dur"),
    ({"n": np.zeros(2, [("a", "f4")])}, "which no device can hold. Give each field of a"),
    (np.array(["a", "b"]), "the batch has dtype <U1, which no device can hold."),
    (
        {"n": np.ma.masked_greater(np.array([1.0, 2.0], np.float32), 1)},
        "batch[n] is a masked array, and no device has its mask: fill in what is masked",
    ),
    (
        {"n": np.ones(2, jnp.uint4)},
        "batch[n] has dtype uint4, and JAX gives no arrays of less than a byte",
    ),
]


@pytest.mark.parametrize(("data", "message"), MISTAKEN, ids=range(len(MISTAKEN)))
def test_data_that_are_no_arrays_of_numbers_are_refused_by_name(data, message):
    """As data, as an evaluation, as inputs: before anything is compiled or trained."""
    good = {"n": np.ones(2, np.float32)}
    for options in ({"data": data}, {"data": good, "evaluation": data}):
        with pytest.raises(px.errors.BatchError) as raised:
            px.fit(SUM, optax.sgd(0.0), batch_size=2, progress=False, **options)
        assert message in str(raised.value)
    program = px.compile(SUM, optax.sgd(0.0), px.Plan(), good)
    with pytest.raises(px.errors.BatchError) as raised:
        program.predict(program.init(), data)
    assert message in str(raised.value)


# Before a step looked at every leaf, the first of these calls ended the process.
PARTLY_USED = """
import dataclasses, sys, tempfile
import jax, jax.numpy as jnp, numpy as np, optax, plurax as px
from plurax.checkpoint.manager import Checkpoints

px.virtual_devices(2)
task = px.Task(
    init=lambda key: {name: jax.random.normal(key, (3, 3)) for name in "ab"},
    loss=lambda params, batch, keys: ((batch["x"] @ params["a"] @ params["b"]) ** 2).sum(1),
    predict=lambda params, inputs: inputs["x"] @ params["a"],
)
batch = {"x": np.ones((4, 3), np.float32)}
many = {"members": px.Members(2)}
for plan, members in [
    (px.Plan(data=2), {}), (px.Plan(data=2, zero=3), {}), (px.Plan(), {}), (px.Plan(member=2), many)
]:
    program = px.compile(task, optax.adam(0.1), plan, batch, **members)
    start = (lambda: program.init()) if members else (lambda: program.init(1))

    def part(other):
        return dataclasses.replace(start(), params={**start().params, "a": other.params["a"]})

    # Calls after the first take JAX's way in C++, which did not look.
    for _ in range(3):
        fresh, _ = program.step(start(), batch)
        program.evaluate(fresh, batch), program.predict(fresh, batch)
        sums = program.gradients(fresh, batch)
        program.apply(fresh, sums)
    used = start()
    program.step(used, batch)
    saved = Checkpoints(tempfile.mkdtemp())
    twice = start()
    for what, call in {
        "step": lambda: program.step(part(used), batch),
        "gradients": lambda: program.gradients(part(used), batch),
        "apply": lambda: program.apply(part(used), sums),
        "evaluate": lambda: program.evaluate(part(used), batch),
        "predict": lambda: program.predict(part(used), batch),
        "stream": lambda: next(program.predict(part(used), iter([batch]))),
        "to_canonical": lambda: program.to_canonical(part(used)),
        "place": lambda: program.place(part(used)),
        "replicas": lambda: program.replicas.check(part(used)),
        "save": lambda: saved.save(part(used), {}),
        "twice": lambda: program.step(
            dataclasses.replace(twice, params=dict.fromkeys("ab", twice.params["a"])), batch
        ),
    }.items():
        try:
            call()
        except px.errors.BatchError as error:
            print(what, "twice in" in str(error), "given to an earlier step" in str(error))
"""


@pytest.mark.ci
def test_a_state_used_in_part_is_named_by_all_that_read_it():
    run = subprocess.run([sys.executable, "-c", PARTLY_USED], capture_output=True, text=True)
    reads = ["step", "gradients", "apply", "evaluate", "predict", "stream", "to_canonical", "place"]
    said = [f"{what} False True" for what in [*reads, "replicas", "save"]] + ["twice True False"]
    assert (run.returncode, run.stdout.split("\n")) == (0, [*said * 4, ""]), run.stderr


def test_a_state_of_numpy_arrays_is_a_state(program):
    """As a checkpoint is read by other libraries; the key is JAX's own."""
    state = program.init()
    host = dataclasses.replace(jax.device_get(dataclasses.replace(state, key=0)), key=state.key)
    assert isinstance(host.step, np.ndarray)
    assert int(program.step(host, ROWS)[0].step) == 1


def test_a_batch_that_was_deleted_is_named(program):
    rows = jax.tree.map(jnp.asarray, ROWS)
    rows["x"].delete()
    with pytest.raises(
        px.errors.BatchError, match=r"batch\[x\] was given to a function that reused"
    ):
        program.step(program.init(), rows)


PLANS = [px.Plan(), px.Plan(data=2, microbatches=2), px.Plan(data=2, zero=3)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("coupled", [False, True])
def test_arrays_without_elements_change_nothing(plan, coupled):
    def loss(params, batch, keys, *mask):
        return (batch["x"] @ params["w"]) ** 2 + (mask[0].sum(dtype=jnp.float32) if mask else 0.0)

    task = px.Task(
        init=lambda key: {"w": jnp.ones(5)},
        loss=loss,
        coupled=coupled,
        evaluate=lambda p, b: b["x"] @ p["w"],
    )
    losses = []
    for rows in {"x": ROWS["x"]}, {"x": ROWS["x"], "none": np.zeros((8, 0, 2), np.float32)}:
        program = px.compile(task, optax.sgd(0.1), plan, rows)
        state = program.init()
        for size in 8, 3:
            state, metrics = program.step(state, models.cut(rows, size))
        losses.append((float(metrics["loss"]), program.evaluate(state, rows)["loss"]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_random_keys_are_padded_as_other_rows(plan):
    keys = jax.random.split(jax.random.key(1), 8)
    noise = np.asarray(jax.vmap(jax.random.normal)(keys))

    def trained(loss, rows):
        task = px.Task(init=lambda key: {"w": jnp.ones(5)}, loss=loss)
        program = px.compile(task, optax.sgd(0.1), plan, rows)
        state, first = program.step(program.init(), models.cut(rows, 3))
        placed = program.place_batch(models.cut(rows, 5))
        state, second = program.step_placed(state, placed)
        streamed = px.fit(task, optax.sgd(0.1), [rows, models.cut(rows, 3)], plan=plan, epochs=1)
        resident = px.fit(task, optax.sgd(0.1), rows, plan=plan, epochs=1, batch_size=3)
        last = [run.history[-1]["loss"] for run in (streamed, resident)]
        return [first["loss"], second["loss"], program.evaluate(state, rows)["loss"], *last]

    drawn = trained(
        lambda p, b, k: (b["x"] @ p["w"]) ** 2 + jax.vmap(jax.random.normal)(b["key"]),
        {"x": ROWS["x"], "key": keys},
    )
    read = trained(
        lambda p, b, k: (b["x"] @ p["w"]) ** 2 + b["noise"], {"x": ROWS["x"], "noise": noise}
    )
    np.testing.assert_allclose(drawn, read, rtol=1e-5)


@pytest.mark.parametrize(("value", "kind"), [(1.5, "float"), (2, "int"), ("relu", "str")])
@pytest.mark.parametrize("members", [None, px.Members(2)])
def test_a_parameter_that_is_no_array_is_named(value, kind, members):
    task = px.Task(
        init=lambda key: {"w": jnp.ones(5), "s": value},
        loss=lambda params, batch, keys: batch["x"] @ params["w"],
    )
    with pytest.raises(
        px.errors.TaskError, match=f"parameter 's' is a Python {kind}, and parameters are"
    ):
        px.compile(task, optax.sgd(0.1), px.Plan(), ROWS, members=members)


def test_numbers_in_place_of_parameters_are_no_state(program):
    params = jax.tree.map(lambda leaf: 1.0, program.init().params)
    with pytest.raises(px.errors.BatchError, match=r"does not belong to this program"):
        program.init(params=params)


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=2)], ids=str)
def test_a_placed_batch_has_memory_of_its_own(plan):
    """A loader may write its next batch into the same array; on CPU `step` may read that."""
    rows = {"x": np.zeros((4096, 64), np.float32)}  # aligned, as JAX does not copy it
    task = px.Task(
        init=lambda key: {"w": jnp.zeros(())},
        loss=lambda params, batch, keys: batch["x"].sum(1) + params["w"],
    )
    program = px.compile(task, optax.sgd(0.0), plan, rows)
    state, losses = program.init(), []
    for number in range(20):
        rows["x"][:] = number
        placed = program.place_batch(rows)
        rows["x"][:] = -1
        state, metrics = program.step_placed(state, placed)
        losses.append(metrics["loss"])
    np.testing.assert_array_equal(losses, np.arange(20.0) * 64)


@pytest.mark.parametrize(
    ("plan", "members"),
    [(px.Plan(), None), (px.Plan(data=2), None), (px.Plan(), 3), (px.Plan(member=2), 4)],
    ids=str,
)
def test_a_call_puts_nothing_that_is_there(plan, members):
    """Rows, the count and the metrics of a full batch stay on the devices from call to call."""
    members = members and px.Members(seeds=members)
    program = px.compile(models.mlp_task(), models.optimizer(), plan, ROWS, members=members)
    rows = program.place_batch(ROWS).rows
    state, _ = program.step(program.init(), rows)
    with jax.transfer_guard("disallow_explicit"):
        state, metrics = program.step(state, rows)
        program.gradients(state, rows)
    first, _ = program.step(program.init(), ROWS)
    assert models.same_bits(metrics, program.step(first, ROWS)[1])


def test_batches_of_many_sizes_are_counted():
    """The counts of a few sizes stay on the devices; here are more."""
    program = px.compile(models.mlp_task(), models.optimizer(), px.Plan(data=2), models.data(12))
    state = program.init()
    for count in (*range(1, 13), 12, 1):
        state, metrics = program.step(state, models.data(count))
        assert int(metrics["examples"]) == count


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("width", [4, 2**17])
def test_many_inputs_are_predicted_in_few_calls_of_bounded_size(plan, width):
    """A row of the wider model is half a megabyte: there the rows of a call stay few."""
    rows = {"x": np.arange(6400, dtype=np.float32).reshape(1600, 4)}
    task = px.Task(
        init=lambda key: {"w": jnp.ones((1, width))},
        loss=lambda params, batch, keys: batch["x"].sum(1),
        predict=lambda params, inputs: (inputs["x"][:, :1] * params["w"]).max(1),
    )
    program = px.compile(task, optax.sgd(0.1), plan, models.cut(rows, 4))
    few = models.cut(rows, 1600 if width == 4 else 64)
    sizes, run = [], jax.stages.Compiled.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.stages.Compiled,
            "__call__",
            lambda self, *args: sizes.append(args[-1]["x"].shape[0]) or run(self, *args),
        )
        outputs = program.predict(program.init(), few)
    np.testing.assert_array_equal(outputs, program.predict(program.init(), few, chunk=4))
    assert set(sizes) == {256 if width == 4 else 8 * plan.data}
