"""What an optimizer reads, set by callbacks: as by hand, under every plan, resumed bit for bit."""

import functools

import jax
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.loop.iterate import train_iter
from plurax.loop.log_rows import read_rows

DATA = models.data(24, dtype=np.float64)
RATE, STEPS, BATCH = 1e-2, 3, 8
PLANS = {
    "one device": px.Plan(),
    "data": px.Plan(data=2, microbatches=2),
    "zero 1": px.Plan(data=4, zero=1),
    "zero 3": px.Plan(data=3, zero=3),
    "pipeline": px.Plan(pipeline=2, microbatches=2),
}


def adam(dtype=np.float32):
    return optax.inject_hyperparams(optax.adam, hyperparam_dtype=dtype)(learning_rate=RATE)


class HalveAtEvaluation:
    """Halves the rate after each evaluation, and notes at which steps."""

    def __init__(self):
        self.steps = []

    def on_evaluation(self, run, row):
        self.steps.append(run.step)
        run.set_hyperparams(learning_rate=run.hyperparams["learning_rate"] / 2)
        row["rate"] = run.hyperparams["learning_rate"]


def fit(task, optimizer, data=DATA, **options):
    options = {"epochs": 2, "batch_size": BATCH, "evaluation": data, "progress": False, **options}
    return px.fit(task, optimizer, data, **options)


def by_hand(task, data):
    """Adam whose rate is halved after the steps 2, 3 (an epoch), 4 and 6 (an epoch)."""
    params, rule = task.init(jax.random.split(jax.random.key(0))[0]), optax.adam
    opt_state, rate = rule(RATE).init(params), RATE

    @jax.jit
    def step(params, opt_state, batch, rate):
        keys = jax.random.split(jax.random.key(0), BATCH)  # the losses draw nothing
        mean = lambda params: task.loss(params, batch, keys).mean()  # noqa: E731
        updates, opt_state = rule(rate).update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(6):
        first = number % STEPS * BATCH
        batch = {name: rows[first : first + BATCH] for name, rows in data.items()}
        params, opt_state = step(params, opt_state, batch, rate)
        if number + 1 in (2, 3, 4, 6):
            rate = rate / 2
    return params


def plain_task():
    """A perceptron without dropout, cut into two stages."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "in": jax.random.normal(first, (models.FEATURES, 8), np.float64),
            "out": jax.random.normal(second, (8,), np.float64) / 8,
        }

    def loss(params, batch, keys):
        hidden = px.pipeline.stage_boundary(jax.numpy.tanh(batch["x"] @ params["in"]))
        return (hidden @ params["out"] - batch["x"].sum(1)) ** 2

    return px.Task(init=init, loss=loss)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
def test_a_rate_that_a_callback_sets_trains_as_by_hand(x64, plan, resident):
    halve = HalveAtEvaluation()
    result = fit(
        plain_task(), adam(np.float64), plan=plan, resident=resident, shuffle=False,
        evaluate_every=2, callbacks=[halve],
    )  # fmt: skip
    assert halve.steps == [2, 3, 4, 6]
    assert [row["rate"] for row in result.history] == [RATE / 4, RATE / 16]
    expected = by_hand(plain_task(), DATA)
    assert models.max_rel_error(result.state.params, expected) < 1e-10


def plateau():
    return px.callbacks.ReduceOnPlateau("eval_loss", 0.5, 1, min_delta=0.05)


class Crash:
    """Ends training once a step is saved."""

    def __init__(self, step):
        self.step = step

    def on_save(self, run, step):
        if step == self.step:
            raise RuntimeError("crash")


@functools.cache
def trained():
    """The task and the optimizer of all runs that are resumed: their program is compiled once."""
    return models.mlp_task(), optax.sgd(RATE)


def run(output, *callbacks, **options):
    return fit(
        *trained(), models.data(24), output=output, epochs=3,
        evaluate_every=2, callbacks=[plateau(), *callbacks], checkpoint_every=1, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """The folder of a run that nothing stopped, and its result."""
    folder = tmp_path_factory.mktemp("uncut")
    return folder, run(folder)


@pytest.mark.ci
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_run_that_is_resumed_at_any_step_goes_on_with_its_scale(tmp_path, uncut, stop):
    folder, whole = uncut
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "cut", Crash(stop))
    resumed = run(tmp_path / "cut", resume=True)
    for part in ("params", "opt_state"):
        assert models.same_bits(getattr(whole.state, part), getattr(resumed.state, part))
    outputs = (folder, tmp_path / "cut")
    rows = [list(read_rows(output / "metrics.jsonl")) for output in outputs]
    scales = [[row.get("learning_rate_scale") for row in r if row["kind"] == "epoch"] for r in rows]
    assert scales[0][-1] == scales[1][-1] < 1
    steps = [row["step"] for row in rows[0] if row["kind"] == "evaluation"]
    assert steps == [2, 4, 8]  # 6 and 9 end an epoch


def test_the_scale_falls_after_patience_values_without_improvement():
    losses = iter([3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 2.0])

    class Losses:
        """Gives the losses to look at."""

        def on_evaluation(self, run, row):
            row["eval_loss"] = next(losses)

    reduce = px.callbacks.ReduceOnPlateau("eval_loss", factor=0.1, patience=2)
    result = fit(
        models.mlp_task(), optax.adam(RATE), models.data(24), epochs=8, callbacks=[Losses(), reduce]
    )
    scales = [row["learning_rate_scale"] for row in result.history]
    np.testing.assert_allclose(scales, [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01], rtol=1e-6)


def test_a_metric_of_training_is_followed_from_epoch_to_epoch():
    reduce = px.callbacks.ReduceOnPlateau("loss", patience=1, min_delta=1e9)
    result = fit(
        models.mlp_task(), optax.adam(RATE), models.data(24), epochs=3, evaluation=None,
        callbacks=[reduce],
    )  # fmt: skip
    assert [row["learning_rate_scale"] for row in result.history] == [1, 0.5, 0.25]


@pytest.mark.ci
@pytest.mark.parametrize("plan", [px.Plan(chunk=3), px.Plan(member=2)], ids=["alone", "devices"])
def test_each_member_has_a_rate_of_its_own(plan):
    class Rates:
        def on_epoch(self, run, row):
            assert run.hyperparams["learning_rate"].shape == (3,)
            run.set_hyperparams(learning_rate=[0.0, 1e-3, 1e-2])

    result = fit(
        models.mlp_task(), lambda hyper: adam(), models.data(24), members=px.Members(3), plan=plan,
        callbacks=[Rates(), plateau()],
    )  # fmt: skip
    first = fit(
        models.mlp_task(), lambda hyper: adam(), models.data(24), members=px.Members(3), plan=plan,
        epochs=1, callbacks=[plateau()],
    )  # fmt: skip
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).reshape(3, -1).max(axis=1),
        result.state.params, first.state.params,
    )  # fmt: skip
    moved = np.stack(jax.tree.leaves(moved)).max(axis=0)
    assert moved[0] == 0 < moved[1] < moved[2]
    assert len(result.history[-1]["members"]["learning_rate_scale"]) == 3


@pytest.mark.parametrize("make", [plateau, lambda: px.callbacks.Ema(0.9)], ids=["plateau", "ema"])
@pytest.mark.parametrize("many", [False, True], ids=["one network", "members"])
def test_a_callback_that_wraps_the_optimizer_compiles_once(make, many):
    """`fit` again, with another callback of the same arguments: the program is there."""
    task, inner = models.mlp_task(), adam()
    optimizer = (lambda hyper: inner) if many else inner
    members = px.Members(2) if many else None
    plan = px.Plan(chunk=2, batch_dim="major") if many else px.Plan()

    def train():
        fit(
            task, optimizer, models.data(24), members=members, plan=plan, epochs=1,
            callbacks=[make()],
        )  # fmt: skip

    train()
    assert models.compilations(train) == 0


def test_a_state_that_is_sent_back_takes_the_place_of_the_one_that_was_yielded():
    task = models.mlp_task()
    source = px.train.ArrayData(models.data(24), BATCH)
    program = px.compile(task, adam(), px.Plan(), source.example_batch())
    calls = train_iter(program, program.init(), source, epochs=2, next_stop=lambda step: step + 1)
    steps = next(calls)
    before = jax.device_get(steps.state.params)
    steps = calls.send(program.hyperparams.set(steps.state, {"learning_rate": 0.0}))
    assert models.same_bits(before, jax.device_get(steps.state.params))
    assert program.hyperparams.read(steps.state)["learning_rate"] == 0


def test_a_schedule_does_not_keep_others_of_its_name_from_being_set():
    inject = optax.inject_hyperparams(optax.sgd)
    rule = optax.chain(
        inject(learning_rate=optax.linear_schedule(1, 0, 9)), inject(learning_rate=1.0)
    )
    batch = models.data(BATCH)
    program = px.compile(models.mlp_task(), rule, px.Plan(), batch)
    path = "opt_state/1/hyperparams/learning_rate"
    state = program.hyperparams.set(program.init(), {path: 0.5})
    assert program.hyperparams.read(state)[path] == 0.5
    with pytest.raises(px.errors.TaskError, match="follows a schedule"):
        program.hyperparams.set(state, {path.replace("1", "0"): 0.5})


REFUSED = {
    "unknown": (adam, {"rate": 1.0}, r"keeps no hyperparameter 'rate'; it keeps .*learning_rate"),
    "none": (lambda: optax.adam(RATE), {"learning_rate": 1.0}, "nor any other. Write optax.inject"),
    "no number": (adam, {"learning_rate": "x"}, "learning_rate='x': give a finite number"),
    "not finite": (adam, {"learning_rate": np.inf}, "learning_rate=inf: give a finite number"),
    "an array": (adam, {"learning_rate": [1.0, 2.0]}, "give a finite number"),
    "a schedule": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1, 0, 9)),
        {"learning_rate": 1.0},
        "'learning_rate' follows a schedule",
    ),
    "several": (
        lambda: optax.chain(adam(), adam()),
        {"learning_rate": 1.0},
        "several hyperparameters of the optimizer are named 'learning_rate'. Give the path",
    ),
}


@pytest.mark.parametrize(("optimizer", "values", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_set_is_refused(optimizer, values, text):
    class Set:
        def on_start(self, run):
            run.set_hyperparams(**values)

    with pytest.raises(px.errors.TaskError, match=text):
        fit(models.mlp_task(), optimizer(), models.data(24), callbacks=[Set()])


def test_one_of_several_is_set_by_its_path():
    class Set:
        def on_start(self, run):
            first, second = (path for path in run.hyperparams if path.endswith("learning_rate"))
            run.set_hyperparams(**{second: 0.5})
            assert run.hyperparams[first] == np.float32(RATE)
            assert run.hyperparams[second] == 0.5

    optimizer = optax.chain(adam(), adam())
    fit(models.mlp_task(), optimizer, models.data(24), epochs=1, callbacks=[Set()])


def test_a_step_is_no_place_to_set_a_rate():
    class Set:
        def on_step(self, run, row):
            run.set_hyperparams(learning_rate=1.0)

    with pytest.raises(px.errors.TaskError, match="on_step is called some steps late"):
        fit(models.mlp_task(), adam(), models.data(24), callbacks=[Set()])


def test_servers_keep_the_state_of_the_optimizer():
    servers = px.Servers(shards=1, workers=1, transport="threads")
    with pytest.raises(
        px.errors.TaskError, match="with servers= the optimizer's state is on the servers"
    ):
        fit(
            models.mlp_task(), optax.sgd(RATE), models.data(24), servers=servers,
            callbacks=[plateau()],
        )  # fmt: skip


@pytest.mark.parametrize("factor", [0, 1, -0.5, True, "half", float("nan")])
def test_a_factor_that_reduces_nothing_is_refused(factor):
    with pytest.raises(px.errors.TaskError, match=r"give a number > 0 and < 1, such as 0\.5"):
        px.callbacks.ReduceOnPlateau("loss", factor)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_evaluate_every_is_a_number_of_steps(every):
    with pytest.raises(px.errors.BatchError, match="give the number of steps between evaluations"):
        fit(models.mlp_task(), adam(), models.data(24), evaluate_every=every)


def test_evaluate_every_needs_data():
    with pytest.raises(px.errors.BatchError, match="evaluate_every=2 needs data to evaluate on"):
        fit(models.mlp_task(), adam(), models.data(24), evaluate_every=2, evaluation=None)


NAMES = {
    "max_epochs": r"has no argument 'max_epochs'\. Write epochs=\.",
    "validation_data": r"Write evaluation=\.",
    "val_check_interval": r"Write evaluate_every=, in steps\.",
    "gradient_clip_val": r"Write optax\.chain\(optax\.clip_by_global_norm\(\.\.\.\), \.\.\.\)",
    "epoch": r"has no argument 'epoch'\. Did you mean 'epochs'\?",
    "zzz": r"has no argument 'zzz'\.$",
}


@pytest.mark.parametrize(("name", "text"), NAMES.items(), ids=NAMES)
def test_names_of_other_libraries_are_answered(name, text):
    fit = px.fit.__wrapped__  # tests check annotations around it
    with pytest.raises(px.errors.TaskError, match=text):
        fit(models.mlp_task(), adam(), models.data(24), **{name: 1})
    with pytest.raises(px.errors.ExperimentError, match=text.rstrip("$")):
        px.Experiment(models.mlp_task(), adam(), models.data(24), **{name: 1})
