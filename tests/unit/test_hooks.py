"""Hooks: found by the methods they have, called in one order."""

import jax
import optax
import pytest
from tests import models

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.loop import hook as kinds
from plurax.loop.call_hooks import Callbacks, Hooks
from plurax.train import hook_order

DATA = models.data(24)


def fit(callbacks=(), **options):
    given = {"epochs": 2, "batch_size": 8, "evaluation": DATA, "progress": False, **options}
    return px.fit(models.mlp_task(), optax.sgd(0.1), DATA, callbacks=list(callbacks), **given)


class Seen(kinds.CallHook, kinds.RowsHook, kinds.EndHook):
    """Writes down what it is called with."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def on_call(self, run):
        self.events.append((self.name, "call", run))

    def on_rows(self, run, rows):
        self.events.append((self.name, "rows", *rows))

    def on_end(self, run, metrics):
        self.events.append((self.name, "end", metrics))


def test_each_event_comes_to_all_in_the_order_given():
    events = []

    class Plain:
        def on_epoch(self, run, row):
            events.append(("callback", "epoch", row))

    callbacks = Callbacks([Plain()])
    hooks = Hooks([Seen("a", events), callbacks, Seen("b", events)], callbacks)
    hooks.call("run")
    hooks.rows("run", [{"kind": "epoch"}])
    hooks.end("run", None)
    both = [("call", "run"), ("rows", {"kind": "epoch"}), ("end", None)]
    assert events == [(name, *event) for event in both for name in "ab"]
    assert not hooks.saves


def test_a_hook_has_what_its_kind_says():
    class Half(kinds.StateHook):
        def get_state(self):
            return 1

    with pytest.raises(TypeError, match="set_state"):
        Half()
    names = [name for name in vars(kinds) if name.endswith("Hook")]
    listens = [name for name in names if isinstance(px.callbacks.Ema(), getattr(kinds, name))]
    assert listens == ["EvaluationHook", "OptimizerHook"]


def test_the_order_of_a_run_is_the_one_that_is_declared(tmp_path, monkeypatch):
    orders = []

    class Watched(Hooks):
        def __init__(self, order, callbacks):
            orders.append([type(hook).__name__ for hook in order])
            super().__init__(order, callbacks)

    monkeypatch.setattr(hook_order, "Hooks", Watched)
    fit(output=tmp_path, machine=px.Machine.preset("A100-80GB"), epochs=1)
    fit(epochs=1)
    assert orders == [
        [
            "WatchedCalls", "ReplicaGuard", "Measurements", "Callbacks", "ProgressHook",
            "MeasuredLine", "NotFiniteGuard", "MetricsLog", "RollbackHook", "Saving",
            "CompiledNote",
        ],
        ["WatchedCalls", "ReplicaGuard", "Callbacks", "ProgressHook", "NotFiniteGuard"],
    ]  # fmt: skip


def test_a_run_that_ends_at_an_evaluation_is_reported_and_saved(tmp_path):
    """An evaluation within an epoch has no row of an epoch: the call after it has, and is saved."""

    class Stops:
        def on_evaluation(self, run, row):
            if row["step"] == 2:
                run.stop("seen enough")

    result = fit([Stops()], output=tmp_path, evaluate_every=2, resident=False)
    assert (result.stopped, result.state.steps_taken) == ("seen enough", 3)
    assert [row["step"] for row in result.history] == [3]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [3]
    again = fit(output=tmp_path, evaluate_every=2, resident=False, resume=True)
    whole = fit(evaluate_every=2, resident=False)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), again.state.params, whole.state.params)
    assert all(jax.tree.leaves(same))
