"""Metrics over a data set: as scikit-learn's of all rows, however these rows are computed."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.loop.log_rows import read_rows

ROWS = models.data(53, dtype=np.float64, weights=True)
NAMES = ("macro", "micro", "none")


def all_metrics(out, labels):
    """One metric of each kind, from logits."""
    predicted = jnp.argmax(out, -1)
    first = jnp.equal(labels, jnp.asarray(1, labels.dtype))
    target = jnp.sum(out * out, -1) + jnp.asarray(3, out.dtype)
    found = {
        "share": px.metrics.accuracy(predicted, labels),
        "confusion": px.metrics.confusion_matrix(predicted, labels, 3),
        "auc": px.metrics.auc(score(out), first, bins=64),
        "perplexity": px.metrics.perplexity(loss_of(out, labels)),
        "r2": px.metrics.r2(out[:, 0], target, center=3.0),
        "size": px.metrics.mean(jnp.abs(out)),
        "binary": px.metrics.f1(jnp.equal(predicted, 1), first),
    }
    for name in NAMES:
        for kind in ("precision", "recall", "f1"):
            build = getattr(px.metrics, kind)
            found[f"{kind}_{name}"] = build(predicted, labels, 3, average=name)
    return found


def score(out):
    """In steps of 1/64, so that a bin of the histogram holds equal scores alone."""
    return jnp.floor(jax.nn.softmax(out)[:, 1] * 64) / 64


def loss_of(out, labels):
    return optax.softmax_cross_entropy_with_integer_labels(out, labels)


def expected(out, labels, weight=None):
    """The same by scikit-learn, of all rows at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that were never predicted
        return _expected(np.asarray(out), np.asarray(labels), weight)


def _expected(out, labels, weight):
    import sklearn.metrics as sk  # takes seconds: not in every process that collects this file

    predicted, first, by = out.argmax(-1), labels == 1, {"sample_weight": weight}
    found = {
        "share": sk.accuracy_score(labels, predicted, **by),
        "confusion": sk.confusion_matrix(labels, predicted, labels=range(3), **by),
        "auc": sk.roc_auc_score(first, np.asarray(score(jnp.asarray(out))), **by),
        "perplexity": np.exp(np.average(np.asarray(loss_of(out, labels)), weights=weight)),
        "r2": sk.r2_score((out * out).sum(-1) + 3, out[:, 0], **by),
        "size": np.average(np.abs(out).mean(1), weights=weight),
        "binary": sk.f1_score(first, predicted == 1, **by),
    }
    for name in NAMES:
        for kind in ("precision", "recall", "f1"):
            how = {"average": None if name == "none" else name, "labels": range(3)}
            found[f"{kind}_{name}"] = getattr(sk, f"{kind}_score")(labels, predicted, **how, **by)
    return found


def mlp(weights=False):
    """The network of other tests, with every metric."""
    task = models.mlp_task(weights=weights, dtype=np.float64)
    return px.Task(
        init=task.init, loss=task.loss, evaluate=task.evaluate, weight=task.weight,
        metrics=lambda params, batch: all_metrics(models.logits(params, batch["x"]), batch["y"]),
    )  # fmt: skip


PLANS = {
    "one device": px.Plan(),
    "data": px.Plan(data=4, microbatches=2),
    "zero 3": px.Plan(data=4, zero=3),
    "tensor": px.Plan(data=2, tensor=3, shardings={"out": (..., "tensor")}),
}


def evaluated(task, plan, data, **options):
    program = px.compile(task, optax.sgd(0.1), plan, models.cut(ROWS, 16), **options)
    state = program.init() if options else program.init(seed=1)
    return program.evaluate(state, data)


def close(got, want):
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("weights", [False, True])
def test_as_scikit_learn_of_all_rows(x64, name, weights):
    """53 rows in batches of 16, of which the last is ragged."""
    if weights and name not in ("one device", "tensor"):
        return
    task = mlp(weights)
    params = task.init(jax.random.split(jax.random.key(1))[0])
    out = models.logits(params, ROWS["x"])
    got = evaluated(task, PLANS[name], ROWS)
    close(got, expected(out, ROWS["y"], ROWS["w"] if weights else None))
    assert got["confusion"].sum() == (ROWS["w"].sum() if weights else 53)


def test_the_network_runs_once():
    """XLA finds what the loss and the metrics both compute."""
    plain = models.mlp_task()
    measured = px.Task(
        init=plain.init, loss=plain.loss, evaluate=plain.evaluate,
        metrics=lambda p, batch: all_metrics(models.logits(p, batch["x"]), batch["y"]),
    )  # fmt: skip
    products = []
    for task in (plain, measured):
        program = px.compile(task, optax.sgd(0.1), px.Plan(), models.data(16))
        text = program.trace_evaluate().lower().compile().as_text()
        products.append(len(re.findall(r" dot\(|custom-call\(", text)))
    assert products[0] == products[1] > 0


def test_sums_that_are_computed_in_shards_are_put_together(x64):
    """Under `tensor=3` each device has the outputs of one class."""

    def metrics(params, batch):
        return {"sum": px.metrics.Metric(models.logits(params, batch["x"]), lambda sums: sums)}

    task = models.mlp_task(dtype=np.float64)
    task = px.Task(init=task.init, loss=task.loss, evaluate=task.evaluate, metrics=metrics)
    one, got = (evaluated(task, PLANS[name], ROWS) for name in ("one device", "tensor"))
    close(got, one)
    assert got["sum"].shape == (3,)


def test_batches_of_any_size_give_one_result(x64):
    """The mean over batches of an AUC would be another."""
    parts = [{k: v[a:b] for k, v in ROWS.items()} for a, b in ((0, 3), (3, 4), (4, 41), (41, 53))]
    whole, streamed = (evaluated(mlp(), px.Plan(data=2), data) for data in (ROWS, parts))
    assert whole.keys() == streamed.keys()
    close(streamed, whole)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["parts", "loss"])
def test_a_stack_in_stages(x64, kind):
    """In a pipeline the last stage computes metrics of the head's output."""

    def loss(w, x, batch, keys):
        out = x @ w
        return loss_of(out, batch["y"]), (all_metrics(out, batch["y"]) if kind == "loss" else {})

    stack = models.perceptron_stack(np.float64, depth=4).stack
    task = px.stack(
        stack.embed, stack.block, (stack.head.init, loss), 4,
        metrics=(lambda w, x, batch: all_metrics(x @ w, batch["y"])) if kind == "parts" else None,
    )  # fmt: skip
    one = evaluated(task, px.Plan(), ROWS)
    got = evaluated(task, px.Plan(data=2, pipeline=2, microbatches=2), ROWS)
    close(got, one)
    assert one["confusion"].sum() == 53
    program = px.compile(task, optax.sgd(0.1), px.Plan(pipeline=2, microbatches=2), ROWS)
    _, metrics = program.step(program.init(), ROWS)
    assert set(metrics) == {"loss", "grad_norm", "weight", "examples", "skipped"}


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["task", "evaluate"])
def test_a_cut_network_in_stages(x64, kind):
    task = models.marked_task(np.float64)

    def metrics(params, batch):
        return all_metrics(task.predict(params, {"x": batch["x"]}), batch["y"])

    def evaluate(params, batch):
        out = task.predict(params, {"x": batch["x"]})
        return loss_of(out, batch["y"]), all_metrics(out, batch["y"])

    more = {"metrics": metrics} if kind == "task" else {"evaluate": evaluate}
    if kind == "task":
        more["evaluate"] = task.evaluate
    measured = px.Task(init=task.init, loss=task.loss, **more)
    one, got = (
        evaluated(measured, plan, ROWS) for plan in (px.Plan(), px.Plan(pipeline=2, microbatches=2))
    )
    close(got, one)


@pytest.mark.ci
def test_members(x64):
    """Each member has its own numbers and arrays, however members fill the devices."""
    task = mlp()
    plan = px.Plan(member=2, chunk=1)
    members = px.Members([4, 1, 7])
    got = evaluated(task, plan, ROWS, members=members)
    assert got["confusion"].shape == (3, 3, 3)
    assert got["auc"].shape == (3,)
    alone = evaluated(task, px.Plan(), ROWS)
    close({name: value[1] for name, value in got.items()}, alone)


@pytest.mark.ci
def test_rows_of_a_run(tmp_path):
    """Numbers stand under `eval_NAME`, arrays as lists; TensorBoard gets numbers alone."""
    rows = models.data(20)
    task = mlp()
    options = {"evaluation": rows, "batch_size": 16, "epochs": 2, "progress": False}
    wide = px.Task(init=models.init, loss=lambda p, b, k: models.evaluate(p, b),
                   metrics=task.metrics)  # fmt: skip
    found = px.fit(wide, optax.sgd(0.1), rows, output=tmp_path / "one", **options)
    row = list(read_rows(tmp_path / "one" / "metrics.jsonl"))[-1]
    assert row == json.loads(json.dumps(found.history[-1]))
    assert np.sum(row["eval_confusion"]) == 20
    assert isinstance(row["eval_auc"], float)
    assert len(row["eval_f1_none"]) == 3
    found = px.fit(wide, optax.sgd(0.1), rows, members=px.Members(2), **options)
    row = found.history[-1]
    assert np.shape(row["members"]["eval_confusion"]) == (2, 3, 3)
    assert row["eval_auc"] == np.median(row["members"]["eval_auc"])
    assert "eval_confusion" not in row


def test_your_own():
    """A dict of numbers and arrays takes the metric's name and theirs."""

    def metrics(params, batch):
        ones = jnp.ones(batch["y"].shape[0])
        sums = {"count": ones, "x": batch["x"]}
        return {
            "all": px.metrics.Metric(sums, lambda s: {"mean": s["x"] / s["count"], "n": s["count"]})
        }

    rows = models.data(20)
    task = px.Task(init=models.init, loss=lambda p, b, k: models.evaluate(p, b)[0], metrics=metrics)
    program = px.compile(task, optax.sgd(0.1), px.Plan(microbatches=2), models.cut(rows, 8))
    got = program.evaluate(program.init(), rows)
    assert set(got) == {"loss", "all_mean", "all_n"}
    assert got["all_n"] == 20
    np.testing.assert_allclose(got["all_mean"], rows["x"].mean(0), rtol=1e-5)


def test_counts_stay_exact():
    """Sums of counts that float32 could not hold are exact over batches."""

    def metrics(params, batch):
        return {"n": px.metrics.Metric(batch["n"], lambda total: total)}

    rows = {**models.data(30), "n": np.full(30, 2**22 + 1, np.int32)}
    task = px.Task(init=models.init, loss=lambda p, b, k: models.evaluate(p, b)[0], metrics=metrics)
    program = px.compile(task, optax.sgd(0.1), px.Plan(), models.cut(rows, 2))
    assert program.evaluate(program.init(), rows)["n"] == 30 * (2**22 + 1)


def test_nothing_to_measure_is_nan():
    ones = jnp.ones((4, 2), jnp.int32)
    for metric in (
        px.metrics.mean(ones, where=ones > 5),
        px.metrics.recall(ones[:, 0], 0 * ones[:, 0]),
        px.metrics.auc(ones[:, 0].astype(jnp.float32), ones[:, 0]),
        px.metrics.r2(ones.astype(jnp.float32), ones.astype(jnp.float32)),
    ):
        sums = jax.tree.map(lambda leaf: np.sum(np.asarray(leaf, float), 0), metric.contributions)
        assert np.isnan(metric.finish(sums))


def test_positions_that_count():
    """Tokens of padding are left out of accuracy, perplexity and the confusion matrix."""
    predicted = jnp.asarray([[1, 2, 0], [1, 0, 0]])
    labels = jnp.asarray([[1, 1, 0], [1, 2, 2]])
    where = jnp.asarray([[True, True, False], [True, False, False]])
    for metric, want in (
        (px.metrics.accuracy(predicted, labels, where), 2 / 3),
        (px.metrics.perplexity(labels.astype(jnp.float32), where), np.e),
        (px.metrics.confusion_matrix(predicted, labels, 3, where), [[0, 0, 0], [0, 2, 1], [0] * 3]),
    ):
        sums = jax.tree.map(lambda leaf: np.sum(np.asarray(leaf, float), 0), metric.contributions)
        np.testing.assert_allclose(metric.finish(sums), want, rtol=1e-6)


MISTAKES = {
    "no dict": (lambda p, b: px.metrics.mean(b["x"]), "returned a Metric; it must return a dict"),
    "no metric": (lambda p, b: {"a": b["x"]}, "metric 'a': it is a"),
    "no function": (
        lambda p, b: {"a": px.metrics.Metric(b["x"], 3)}, "whose `finish` is a function",
    ),
    "a sum": (
        lambda p, b: {"a": px.metrics.Metric({"n": b["x"].sum(0)}, float)},
        "metric 'a': its contribution 'n' has shape (5,); it must have the leading dim 8",
    ),
    "taken": (lambda p, b: {"accuracy": px.metrics.mean(b["x"])}, "the name 'accuracy' is taken"),
    "reserved": (lambda p, b: {"loss": px.metrics.mean(b["x"])}, "the name 'loss' is taken"),
    "no number": (
        lambda p, b: {"a": px.metrics.Metric(b["x"], lambda sums: "high")},
        "the metric 'a': `finish` returned a str; it must return a number, an array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    metrics, said = MISTAKES[name]
    task = px.Task(
        init=models.init, loss=lambda p, b, k: models.evaluate(p, b), metrics=metrics
    )  # fmt: skip
    program = px.compile(task, optax.sgd(0.1), px.Plan(), models.data(8))
    if name != "no number":
        with pytest.raises(px.errors.TaskError, match=re.escape(said)):
            program.check_evaluation(models.data(8))
    state = program.init()
    with pytest.raises(px.errors.TaskError, match=re.escape(said)):
        program.evaluate(state, models.data(8))


def test_the_function_takes_params_and_batch():
    with pytest.raises(px.errors.TaskError, match="called with"):
        px.Task(init=models.init, loss=lambda p, b, k: 0, metrics=lambda params: {})
