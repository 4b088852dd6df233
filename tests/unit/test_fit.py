"""fit: the same training from every kind of data, logs, stops cleanly, resumes bit for bit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.distributed.global_arrays import fetch
from plurax.errors import DamagedCheckpointWarning, NonFiniteWarning
from plurax.execute.array_data import ArrayData, Position
from plurax.loop.data import StreamData
from plurax.loop.epoch_metrics import NetworkMetrics
from plurax.loop.iterate import StepOutput, train_iter
from plurax.loop.log_rows import read_rows
from plurax.progress.console_progress import ConsoleProgress

ROWS = models.data(50)
TASK, OPTIMIZER = models.mlp_task(), models.optimizer()  # programs are compiled once for both
PLAN = px.Plan(data=2, microbatches=2)


def fit(data=ROWS, task=TASK, **options):
    options = {"plan": PLAN, "epochs": 3, "batch_size": 16, "progress": False, **options}
    return px.fit(task, OPTIMIZER, data, **options)


@pytest.fixture(scope="module")
def reference():
    """An uninterrupted run on resident data."""
    return fit(evaluation=ROWS)


class Batches:
    """The batches of `ArrayData`, as a user's own iterable: anew on each pass."""

    def __init__(self, seed=0, at=lambda epoch, batch: None):
        self.data = ArrayData(ROWS, 16, seed)
        self.epoch = -1
        self.at = at

    def __iter__(self):
        self.epoch += 1
        for index, (batch, _) in enumerate(self.data.batches(Position(0))):
            self.at(self.epoch, index)
            yield batch


def test_it_learns_and_reports(reference):
    losses = [row["loss"] for row in reference.history]
    assert losses[-1] < losses[0]
    assert [row["epoch"] for row in reference.history] == [1, 2, 3]
    assert all(row["examples"] == 50 for row in reference.history)
    assert reference.history[-1]["eval_loss"] == pytest.approx(
        reference.program.evaluate(reference.state, ROWS)["loss"]
    )
    assert int(reference.state.step) == 12
    assert reference.interrupted is None


def test_two_runs_are_bit_equal(reference):
    again = fit(evaluation=ROWS)
    assert models.same_bits(again.state.params, reference.state.params)
    assert models.same_bits(again.state.opt_state, reference.state.opt_state)
    assert not models.same_bits(fit(seed=1).state.params, reference.state.params)


def test_streamed_equals_resident(reference):
    streamed = fit(resident=False)
    assert models.max_rel_error(streamed.state.params, reference.state.params) < 1e-5
    for a, b in zip(streamed.history, reference.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=3), px.Plan(data=8, microbatches=3)])
def test_every_plan_trains_alike(reference, plan):
    assert models.max_rel_error(fit(plan=plan).state.params, reference.state.params) < 1e-4


def test_epoch_means_are_weighted_by_example():
    """With a learning rate of zero, the mean of an epoch is the mean over its examples."""
    task = px.Task(
        init=models.init,
        loss=lambda p, b, k: models.evaluate(p, b),
        evaluate=models.evaluate,
    )
    result = px.fit(
        task, optax_zero(), ROWS, plan=PLAN, batch_size=16, evaluation=ROWS, progress=False
    )
    row = result.history[0]
    assert row["loss"] == pytest.approx(row["eval_loss"], rel=1e-5)
    assert row["accuracy"] == pytest.approx(row["eval_accuracy"], rel=1e-5)


def optax_zero():
    import optax

    return optax.sgd(0.0)


# --- Kinds of data ----------------------------------------------------------------------------


def test_what_a_checkpoint_keeps_of_an_epoch_is_a_snapshot():
    """It is written in the background while training goes on."""
    metrics = {name: np.ones(2) for name in ("loss", "weight", "examples")}
    steps = StepOutput(None, 2, metrics | {"skipped": np.zeros(2)}, 0.1, Position(0, 2), False)
    epoch_metrics = NetworkMetrics()
    epoch_metrics.add(steps, fetch_all=True)
    saved = epoch_metrics.to_json()
    before = json.dumps(saved)
    epoch_metrics.add(steps, fetch_all=True)
    NetworkMetrics(saved).add(steps, fetch_all=True)
    assert json.dumps(saved) == before


def test_an_iterable_of_batches_gives_the_same():
    listed = [batch for batch, _ in ArrayData(ROWS, 16).batches(Position(0))]
    a = fit(listed, batch_size=None, epochs=1)
    b = fit(epochs=1, resident=False)
    assert models.same_bits(a.state.params, b.state.params)


def test_a_grain_dataset_gives_the_same():
    source = grain.MapDataset.source(range(50)).map(
        lambda i: jax.tree.map(lambda leaf: leaf[i], ROWS)
    )
    a = fit(source.to_iter_dataset().batch(16), batch_size=None, epochs=2)
    b = fit(epochs=2, resident=False, shuffle=False)
    assert models.same_bits(a.state.params, b.state.params)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (ROWS, {"batch_size": None}, r"needs batch_size"),
        (ROWS, {"batch_size": 0}, r"batch_size=0: give the number of examples"),
        (ROWS, {"epochs": 0}, r"epochs=0: give the number of passes"),
        (ROWS, {"ragged": "cut"}, r"ragged='cut': choose 'pad', 'drop' or 'error'"),
        (ROWS, {"ragged": "error"}, r"a batch has 2 examples where 16 were asked for"),
        (iter([ROWS]), {}, r"the data are an iterator, which can be read only once"),
        ([], {}, r"the data give no batch: the iterable is empty"),
        (3, {}, r"data of type int are not supported"),
        ([ROWS], {"ragged": "error"}, r"has 50 examples and the program was compiled for at most"),
        ({"x": ROWS["x"], "y": ROWS["y"][:9]}, {}, r"same leading dim; given x: 50, y: 9"),
    ],
)
def test_data_that_cannot_be_trained_on(data, options, message):
    with pytest.raises(px.errors.BatchError, match=message):
        fit(data, **options)


def test_an_evaluation_that_can_be_read_only_once_is_refused():
    with pytest.raises(px.errors.BatchError, match="read only once"):
        fit(evaluation=iter([ROWS]))


def test_dropping_everything_is_refused():
    with pytest.raises(px.errors.BatchError, match=r"fewer than batch_size"):
        ArrayData(ROWS, 64, ragged="drop")


@pytest.mark.parametrize("resident", [True, False])
def test_ragged_policies(resident):
    assert int(fit(epochs=1, ragged="pad", resident=resident).state.step) == 4
    dropped = fit(epochs=1, ragged="drop", resident=resident)
    assert int(dropped.state.step) == 3
    assert dropped.history[0]["examples"] == 48


def test_stream_policies():
    batches = [ROWS, models.cut(ROWS, 20)]
    assert [b["y"].shape[0] for b, _ in StreamData(batches, 50).batches(Position())] == [50, 20]
    dropped = StreamData(batches, 50, "drop")
    assert [b["y"].shape[0] for b, _ in dropped.batches(Position())] == [50]
    with pytest.raises(px.errors.BatchError, match="a batch has 20 examples where 50"):
        list(StreamData(batches, 50, "error").batches(Position()))


def test_every_epoch_holds_every_example_once_in_a_new_order():
    data = ArrayData(ROWS, 16)
    orders = []
    for epoch in range(3):
        rows, counts = data.epoch_order(epoch)
        taken = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
        assert sorted(taken) == list(range(50))
        orders.append(tuple(taken))
    assert len(set(orders)) == 3


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(data=4)], ids=str)
def test_batches_may_be_written_over_once_they_were_given(plan):
    """As loaders do that read each batch into the same memory, of which JAX on CPU has a view."""

    class Reader:
        def __init__(self, *, one_memory):
            self.one_memory = one_memory

        def __iter__(self):
            batch = aligned(models.cut(ROWS, 8))
            for number in range(6):
                batch = batch if self.one_memory else aligned(batch)
                for name, rows in ROWS.items():
                    batch[name][:] = rows[8 * number : 8 * number + 8]
                yield batch

    def losses(*, one_memory):
        batches = Reader(one_memory=one_memory)
        history = fit(batches, plan=plan, batch_size=None, evaluation=batches).history
        return [(row["loss"], row["eval_loss"]) for row in history]

    assert losses(one_memory=True) == losses(one_memory=False)


def aligned(batch):
    """Return a copy in memory that begins at a multiple of 64 bytes, of which JAX takes a view."""

    def copy(rows):
        memory = np.empty(rows.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        found = memory[start : start + rows.nbytes].view(rows.dtype).reshape(rows.shape)
        found[:] = rows
        return found

    return {name: copy(rows) for name, rows in batch.items()}


# --- Non-finite values ------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
def test_a_nan_in_the_data_is_skipped_counted_and_said(resident):
    bad = {**ROWS, "x": np.where(np.arange(50)[:, None] == 7, np.nan, ROWS["x"])}
    with pytest.warns(NonFiniteWarning, match=r"the update was left out on all devices"):
        result = fit(bad, resident=resident)
    assert int(result.state.skipped) == 3
    assert [row["skipped"] for row in result.history] == [1, 1, 1]
    assert all(np.isfinite(row["loss"]) for row in result.history)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.params))


@pytest.mark.parametrize("plan", [PLAN, px.Plan(chunk=1, batch_dim="minor")], ids=["data", "minor"])
def test_a_batch_without_weight_freezes_no_member(plan):
    """It is left out as of the network alone, of which the warning says why."""
    rows = {**ROWS, "w": (np.arange(50) >= 16).astype(np.float32)}
    options = {"shuffle": False, "resident": False, "epochs": 2}
    task = models.mlp_task(weights=True)
    result = fit(rows, task=task, members=px.Members(2), plan=plan, **options)
    assert result.state.skipped.tolist() == [0, 0]
    with pytest.warns(NonFiniteWarning, match="weights of all examples of a step were zero"):
        alone = fit(rows, task=task, seed=1, **options)
    assert int(alone.state.skipped) == 2
    member = px.ensemble.export_member(result.state, 1).params
    assert models.max_rel_error(jax.device_get(member), jax.device_get(alone.state.params)) < 1e-5
    for now, before in zip(result.history, alone.history, strict=True):
        assert now["members"]["loss"][1] == pytest.approx(before["loss"], rel=1e-5)


def classify(logits=4, learning_rate=0.1, **columns):
    """Train a linear classifier for three epochs; return what was said of values not finite."""

    def predict(params, inputs):
        return inputs["x"].astype(jnp.float32) @ params["w"]

    def loss(params, batch, keys):
        return optax.softmax_cross_entropy_with_integer_labels(predict(params, batch), batch["y"])

    def squares(params, batch, keys):
        return ((predict(params, batch) - batch["y"].astype(jnp.float32)[:, None]) ** 2).mean(1)

    rows = {"x": ROWS["x"], "y": np.arange(50) % 4, **columns}
    task = px.Task(
        init=lambda key: {"w": jnp.zeros((rows["x"].shape[1], logits))},
        loss=loss if logits > 1 else squares, predict=predict,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        px.fit(task, optax.sgd(learning_rate), rows, batch_size=10, epochs=40, progress=False)
    return [str(one.message) for one in told if one.category is NonFiniteWarning]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"y": np.arange(50) % 5}, "y has values from 0 to 4, and predict has 4 outputs: labels"),
        ({"y": np.arange(50) % 4 - 1, "x": np.full((50, 3), np.inf, np.float32)}, "from -1 to 2"),
        ({"x": np.where(np.arange(50)[:, None] == 7, np.nan, ROWS["x"])},
         "x has NaN or infinite values in 1 of 50 rows, the first is row 7"),
        ({"x": np.full((50, 3), 255, np.uint8), "logits": 1, "learning_rate": 1.0},
         "x is uint8, with values up to 255: scale it, such as x.astype(np.float32) / 255."),
        ({"logits": 1, "learning_rate": 1e3}, "before: training diverges."),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_said_once_with_its_cause(given, said):
    (message,) = classify(**given)
    assert said in message
    assert message.startswith("at or before step ")


# --- Output, resume, signals ------------------------------------------------------------------


def test_output_holds_metrics_plan_and_checkpoints(tmp_path):
    result = fit(output=tmp_path / "run", evaluation=ROWS)
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["epoch"] for row in steps] == [1] * 4 + [2] * 4 + [3] * 4
    assert [row for row in rows if row["kind"] == "epoch"] == result.history
    assert px.Plan.load(tmp_path / "run" / "plan.toml") == PLAN
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents*"))
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4, 8, 12]
        state, meta = checkpoints.restore(result.program.state_shapes)
    assert models.same_bits(state.params, result.state.params)
    assert meta["position"] == {"epoch": 3, "batch": 0, "iterator": None}


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    fit(output=tmp_path, epochs=1)
    with pytest.raises(
        px.errors.CheckpointError, match=r"already holds a run, saved at step 4.*resume"
    ):
        fit(output=tmp_path)


@pytest.mark.parametrize("resident", [True, False])
def test_resume_after_an_epoch_is_bit_equal(tmp_path, reference, resident):
    fit(output=tmp_path, epochs=1, evaluation=ROWS, resident=resident)
    result = fit(output=tmp_path, resume=True, evaluation=ROWS, resident=resident)
    whole = reference if resident else fit(resident=False, evaluation=ROWS)
    assert models.same_bits(result.state.params, whole.state.params)
    assert models.same_bits(result.state.opt_state, whole.state.opt_state)
    drop = {"seconds", "examples_per_second"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in result.history] == [
        {k: v for k, v in row.items() if k not in drop} for row in whole.history
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_is_bit_equal(tmp_path, number):
    def strike(epoch, batch):
        # The first pass only looks at one batch; training starts with the second.
        if (epoch, batch) == (2, 2):
            os.kill(os.getpid(), number)

    # Inherited as ignored, as by a job in the background, it would stay so.
    def handler(*_):
        seen.extend(Checkpoints(tmp_path / "checkpoints").steps())

    seen = []
    before = signal.signal(number, handler)
    stopped = fit(Batches(at=strike), output=tmp_path, evaluation=ROWS)
    assert stopped.interrupted == signal.Signals(number).name
    taken = int(stopped.state.step)
    assert 4 <= taken < 12
    assert signal.signal(number, before) is handler
    assert seen[-1:] == [taken], "the caller's handler is called once all is saved"
    resumed = fit(Batches(), output=tmp_path, resume=True, evaluation=ROWS)
    whole = fit(Batches(), evaluation=ROWS)
    assert models.same_bits(resumed.state.params, whole.state.params)
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, 13))


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    done = fit(output=tmp_path)
    again = fit(output=tmp_path, resume=True)
    assert models.same_bits(again.state.params, done.state.params)
    assert again.history == done.history


@pytest.mark.parametrize(("field", "value"), [("seed", 1), ("batch_size", 8), ("shuffle", False)])
def test_resuming_another_training_is_refused(tmp_path, field, value):
    fit(output=tmp_path, epochs=1)
    with pytest.raises(
        px.errors.CheckpointError, match=rf"has {field}=.* and this one {field}={value}"
    ):
        fit(output=tmp_path, resume=True, **{field: value})


def test_resuming_under_another_plan_goes_on(tmp_path, reference):
    fit(output=tmp_path, epochs=1)
    result = fit(output=tmp_path, resume=True, plan=px.Plan(data=3))
    assert models.max_rel_error(result.state.params, reference.state.params) < 1e-4


def test_resuming_another_optimizer_is_refused(tmp_path):
    import optax

    fit(output=tmp_path, epochs=1)
    refused = r"(?s)another task or optimizer.*opt_state.*: nothing in the program, float32"
    with pytest.raises(px.errors.CheckpointError, match=refused) as raised:
        px.fit(
            TASK, optax.sgd(0.1), ROWS, plan=PLAN, epochs=2, batch_size=16, output=tmp_path,
            resume=True, progress=False,
        )  # fmt: skip
    assert "params/" not in str(raised.value).replace("opt_state", "")  # what fits is not listed


@pytest.mark.ci
def test_resume_at_every_step_of_a_grain_dataset(tmp_path):
    """Stop after each step, restore in a new program, and compare the tail."""
    dataset = (
        grain.MapDataset.source(range(50))
        .seed(3)
        .shuffle()
        .map(lambda i: jax.tree.map(lambda leaf: leaf[i], ROWS))
        .to_iter_dataset()
        .batch(16)
    )
    source = StreamData(dataset, 16)
    like = models.cut(ROWS, 16)
    program = px.compile(TASK, models.optimizer(), PLAN, like)
    whole = []
    with Checkpoints(tmp_path, keep=20) as checkpoints:
        for steps in train_iter(program, program.init(), source, epochs=2, checkpoint_every=1):
            checkpoints.save(steps.state, {"position": steps.position.to_json()})
            whole.append(jax.device_get(steps.state.params))
        checkpoints.wait()
        assert checkpoints.steps() == list(range(1, 9))
    for step in (8, 7, 6, 5, 4, 3, 2, 1):
        with Checkpoints(tmp_path, keep=20) as checkpoints:
            state, meta = checkpoints.restore(program.state_shapes)
        start = Position.from_json(json.loads(json.dumps(meta["position"])))
        assert int(state.step) == step
        tail = [
            jax.device_get(steps.state.params)
            for steps in train_iter(
                program, state, source, start=start, epochs=2, checkpoint_every=1
            )
        ]
        assert models.same_bits(tail, whole[step:])
        (tmp_path / str(step)).rename(tmp_path / f"taken-{step}")


# --- Damaged checkpoints ----------------------------------------------------------------------


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def damage(directory, change):
    """Change every data file of a checkpoint."""
    files = [file for file in (directory / "state").rglob("d/*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "change", [flip, lambda content: content[: len(content) // 2], lambda _: b""]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(tmp_path, reference, change):
    fit(output=tmp_path, epochs=2)
    damage(tmp_path / "checkpoints" / "8", change)
    with pytest.warns(DamagedCheckpointWarning, match=r"the checkpoint of step 8: .*8.damaged"):
        result = fit(output=tmp_path, resume=True)
    assert models.same_bits(result.state.params, reference.state.params)
    assert (tmp_path / "checkpoints" / "8.damaged").is_dir()


def test_an_empty_directory_of_that_name_is_no_checkpoint(tmp_path, reference):
    fit(output=tmp_path, epochs=2)
    (tmp_path / "checkpoints" / "11").mkdir()
    with pytest.warns(DamagedCheckpointWarning, match="step 11"):
        result = fit(output=tmp_path, resume=True)
    assert models.same_bits(result.state.params, reference.state.params)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("not a directory")
    with pytest.raises(
        px.errors.CheckpointError, match=r"run could not be written to: .*run is a file"
    ):
        fit(output=tmp_path / "run")


def test_metrics_cut_short_by_a_kill_are_read_up_to_there(tmp_path):
    fit(output=tmp_path, epochs=1)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]


def test_no_warning_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(epochs=1)


# --- Time, signals, memory ------------------------------------------------------------------------


def test_throughput_is_by_the_wall_clock_without_the_first_call(monkeypatch):
    """What a streamed step takes is seen when its metrics arrive, not when it was started."""
    now = [0.0]
    monkeypatch.setattr("plurax.loop.epoch_metrics.time.monotonic", lambda: now[0])

    class Late:
        """Metrics that take ten seconds to arrive."""

        def __array__(self, dtype=None, copy=None):
            now[0] += 10.0
            return np.array(16.0, np.float32)

    metrics = {name: np.float32(1.0) for name in ("loss", "weight")} | {"skipped": np.int32(0)}
    monkeypatch.setattr("jax.device_get", lambda tree: {k: np.asarray(v) for k, v in tree.items()})

    def turn(step, done=False):
        return StepOutput(
            None, step, {**metrics, "examples": Late()}, 0.001, Position(0, step), done
        )

    epoch_metrics = NetworkMetrics()
    epoch_metrics.add(turn(1), fetch_all=False)
    assert epoch_metrics.examples_per_second == pytest.approx(16 / 10.001)
    now[0] += 5.0  # the log, the user's own loop
    for step in (2, 3, 4):
        epoch_metrics.add(turn(step), fetch_all=step == 4)
    assert epoch_metrics.examples_per_second == pytest.approx(3 * 16 / 35.0)
    assert epoch_metrics.timed_steps == 3
    row = epoch_metrics.epoch_row(4, 1, None)
    assert row["seconds"] == pytest.approx(45.001)
    resumed = NetworkMetrics(json.loads(json.dumps(epoch_metrics.to_json())))
    resumed.add(turn(5), fetch_all=True)
    assert (resumed.timed_steps, resumed.seconds) == (3, 35.0)  # the first call is not timed
    assert resumed.examples_per_second == pytest.approx(3 * 16 / 35.0)


def test_of_a_long_epoch_only_a_window_of_metrics_is_copied(monkeypatch):
    data = {name: value[:40] for name, value in ROWS.items()}
    whole = fit(data, batch_size=1, epochs=2, plan=px.Plan())
    monkeypatch.setattr("plurax.loop.iterate.WINDOW", 8)
    copied = []

    def fetched(metrics):
        copied.extend(value.shape for value in metrics.values())
        return fetch(metrics)

    monkeypatch.setattr("plurax.loop.iterate.fetch", fetched)
    cut = fit(data, batch_size=1, epochs=2, plan=px.Plan())
    assert models.same_bits(cut.state.params, whole.state.params)
    assert [row["loss"] for row in cut.history] == [row["loss"] for row in whole.history]
    assert set(copied) == {(8,)}


BLOCKED = """
import os, signal, threading
import plurax as px
from tests import models

class Source:
    passes = 0
    def __iter__(self):
        Source.passes += 1
        yield models.data(8)
        if Source.passes > 1:
            threading.Thread(target=strike).start()
            threading.Event().wait()

usual, noted = signal.signal, threading.Event()

def watched(number, handler):
    before = usual(number, handler)
    if handler is signal.SIG_DFL:
        noted.set()
    return before

def strike():
    os.kill(os.getpid(), signal.SIGINT)
    noted.wait()
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal = watched
px.fit(models.mlp_task(), models.optimizer(), Source(), progress=False)
"""


def test_a_second_signal_ends_a_run_whose_data_block():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=Path(__file__).parents[2], capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "SIGINT: stopping after this step; once more ends at once" in done.stderr
    assert "Traceback" not in done.stderr


def test_when_nobody_reads_what_is_printed_the_epoch_is_saved(tmp_path, monkeypatch):
    class Closed(ConsoleProgress):
        def epoch(self, row):
            super().epoch(row)
            self.closed = True

    monkeypatch.setattr("plurax.train.opening.ConsoleProgress", Closed)
    stopped = fit(output=tmp_path)
    assert stopped.interrupted == "SIGPIPE"
    monkeypatch.undo()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == int(stopped.state.step) >= 4


def test_out_of_memory_says_which_plans_need_less(tmp_path, monkeypatch):
    fit(output=tmp_path, epochs=1)
    message = "RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes."

    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError(message)
        yield

    monkeypatch.setattr("plurax.train.fit.train_iter", exhausted)
    with pytest.raises(px.errors.PlanError) as raised:
        fit(output=tmp_path, resume=True)
    said = str(raised.value)
    assert "out of memory under Plan(data=2, microbatches=2), whose step needs " in said
    for way in ("microbatches=4: half", "remat='full'", "zero=1: splits", "on more devices"):
        assert way in said
    assert "The checkpoint of step 4 is saved; resume under another plan goes on there." in said
    assert message in said


@pytest.mark.slow
@pytest.mark.parametrize("resident", [True, False])
def test_memory_stays_flat_over_many_steps(resident):
    """200,000 steps; what is kept of each would show."""
    taken, bytes_used = 0, []

    class Rows:
        def __iter__(self):
            for _ in range(2000):
                yield models.cut(ROWS, 2)

    data, size = (models.data(2000), 2) if resident else (Rows(), None)
    program = px.compile(TASK, models.optimizer(), px.Plan(), models.cut(ROWS, 2))
    source = ArrayData(data, size) if resident else StreamData(data, 2)
    epoch_metrics = NetworkMetrics()
    epochs = 200 if resident else 100
    for steps in train_iter(program, program.init(), source, epochs=epochs):
        epoch_metrics.step_rows(epoch_metrics.add(steps, fetch_all=True)[-1])
        taken = steps.step
        if steps.epoch_done:
            epoch_metrics = epoch_metrics.fresh()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            bytes_used.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert taken == 200_000
    early, late = bytes_used[len(bytes_used) // 4], bytes_used[-1]
    assert late - early < 16 * 2**20


def test_the_loop_over_an_epoch_traces_its_step_once():
    traced, data = [], px.train.ArrayData(ROWS, 16)

    def loss(params, batch, keys):
        traced.append(True)
        return TASK.loss(params, batch, keys)

    task, plan = dataclasses.replace(TASK, loss=loss), px.Plan(data=2, zero=1)
    program = px.compile(task, OPTIMIZER, plan, models.data(16))
    before = len(traced)
    program.compile_loop(program.place_data(data.arrays), program.place_epoch(*data.epoch_order(0)))
    assert len(traced) == before + 1
