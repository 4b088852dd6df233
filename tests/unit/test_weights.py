"""Weights in files, and training that starts from them, under every kind of plan."""

import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from safetensors.numpy import save_file
from tests import models

import plurax as px
from plurax import tree

BATCH = models.data(16)
OPTIONS = {"batch_size": 16, "progress": False}


def some(seed=7):
    """Parameters that no seed of the tests gives."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) + 0.25, models.init(jax.random.key(seed)))


def same(got, want):
    assert set(got) == set(tree.named_leaves(want))
    for name, leaf in tree.named_leaves(want).items():
        np.testing.assert_array_equal(got[name], np.asarray(leaf))


def nested():
    return {"a": [np.arange(3.0), {"b": np.ones((2, 2), ml_dtypes.bfloat16)}], "c": np.int32(4)}


# --- Files ------------------------------------------------------------------------------------


def test_safetensors(tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    px.weights.save(nested(), path)
    same(px.weights.load(path), nested())
    assert px.weights.load(path)["a/1/b"].dtype == ml_dtypes.bfloat16
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_names_with_dots_are_paths(tmp_path):
    save_file({"layers.0.weight": np.ones(2)}, tmp_path / "a.safetensors")
    assert list(px.weights.load(tmp_path / "a.safetensors")) == ["layers/0/weight"]


def test_msgpack_of_flax(tmp_path):
    path = tmp_path / "model.msgpack"
    path.write_bytes(serialization.to_bytes(some()))
    same(px.weights.load(path), some())


def test_orbax(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", some())
    same(px.weights.load(tmp_path / "own"), some())


@pytest.mark.parametrize("count", [None, 2])
def test_the_newest_checkpoint_of_a_run(tmp_path, count, monkeypatch, caplog):
    members = px.Members(count) if count else None
    run = px.fit(
        models.mlp_task(), optax.adam(0.1), models.data(32), members=members, epochs=2,
        output=tmp_path, **OPTIONS,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "checkpoints", "checkpoints/4"):
        same(px.weights.load(folder), run.state.params)
    assert not caplog.records


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_a_damaged_checkpoint_is_named(tmp_path, name):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", some())
    (tmp_path / "own" / name).write_bytes(b"{")
    with pytest.raises(px.errors.CheckpointError, match="own: the weights cannot be read: "):
        px.weights.load(tmp_path / "own")


def test_saved_from_shards(tmp_path):
    program = px.compile(models.mlp_task(), optax.adam(0.1), px.Plan(data=4, zero=3), BATCH)
    state = program.to_canonical(program.init(seed=3))
    px.weights.save(state.params, tmp_path / "a.safetensors")
    same(px.weights.load(tmp_path / "a.safetensors"), state.params)


def test_what_is_no_file_of_weights(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"")
    (tmp_path / "a.safetensors").write_bytes(b"no")
    (tmp_path / "a.msgpack").write_bytes(b"\xc1")
    for name, said in (
        ("nowhere", "there are no weights; no such file or folder"),
        ("a.npy", "is neither a .safetensors nor a .msgpack file, nor a folder"),
        ("", "is neither a .safetensors nor a .msgpack file, nor a folder"),
        ("a.safetensors", "a.safetensors: the weights cannot be read: "),
        ("a.msgpack", "a.msgpack: the weights cannot be read: "),
    ):
        with pytest.raises(px.errors.CheckpointError, match=re.escape(said)):
            px.weights.load(tmp_path / name)
    with pytest.raises(px.errors.CheckpointError, match="file; name it so"):
        px.weights.save(some(), tmp_path / "a.bin")


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(px.errors.MissingPackageError, match="safetensors"):
        px.weights.save(some(), tmp_path / "a.safetensors")


# --- Starting ---------------------------------------------------------------------------------

PLANS = {
    "one device": px.Plan(),
    "data": px.Plan(data=4),
    "zero 1": px.Plan(data=4, zero=1),
    "zero 3": px.Plan(data=4, zero=3),
    "padded": px.Plan(data=3, zero=3),
    "tensor": px.Plan(tensor=2, shardings={"hidden": (None, "tensor")}),
}


@pytest.mark.parametrize("name", PLANS)
def test_under_every_plan(name):
    """The state is that of `init(params=...)`, which is whole on a device."""
    program = px.compile(
        px.start_from(models.mlp_task(), some()), optax.adam(0.1), PLANS[name], BATCH
    )
    plain = px.compile(models.mlp_task(), optax.adam(0.1), PLANS[name], BATCH)
    got, want = program.init(seed=0), plain.init(seed=0, params=some())
    assert models.same_bits(got.params, want.params)
    assert models.same_bits(got.opt_state, want.opt_state)
    for leaf, like in zip(jax.tree.leaves(got), jax.tree.leaves(program.state_shapes), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


@pytest.mark.parametrize("make", [models.perceptron_stack, models.marked_task])
def test_in_stages(make):
    task = make()
    params = jax.tree.map(lambda a: np.asarray(a) * 2 + 1, task.init(jax.random.key(5)))
    plan = px.Plan(data=2, pipeline=2, microbatches=2)
    program = px.compile(px.start_from(task, params), optax.adam(0.1), plan, BATCH)
    assert models.same_bits(program.to_canonical(program.init(seed=0)).params, params)


def test_no_device_has_what_it_does_not_need():
    """A weight goes to each device in its shard, and creating the state moves nothing."""
    task = px.start_from(models.mlp_task(), some())
    program = px.compile(task, optax.adam(0.1), px.Plan(data=4, zero=3), BATCH)
    start = program._start
    shards = program.state_shapes.params["hidden"].sharding.shard_shape((5, 16))
    assert [one.data.shape for one in start["hidden"].addressable_shards] == [shards] * 4
    text = program._compiled.init.lower(jax.random.key(0), start).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_no_program_has_weights_as_constants(monkeypatch):
    """The engine takes the weights as arguments, and never calls the task's own `init`."""
    task = px.start_from(models.mlp_task(), some())
    monkeypatch.setattr(type(task.init), "__call__", None)
    for members in (None, px.Members(2)):
        program = px.compile(task, optax.adam(0.1), px.Plan(), BATCH, members=members)
        program.step(program.init(), BATCH)


@pytest.mark.parametrize("plan", [px.Plan(), px.Plan(member=2, data=2, zero=1)])
def test_every_member_starts_there(plan):
    task = px.start_from(models.mlp_task(), {"hidden": some()["hidden"]}, strict=False)
    members = px.Members(3)
    program = px.compile(task, optax.adam(0.1), plan, BATCH, members=members)
    params = program.to_canonical(program.init()).params
    plain = px.compile(models.mlp_task(), optax.adam(0.1), plan, BATCH, members=members)
    fresh = plain.to_canonical(plain.init()).params
    for member in range(3):
        np.testing.assert_array_equal(params["hidden"][member], some()["hidden"])
        np.testing.assert_array_equal(params["out"][member], fresh["out"][member])


def test_fit_from_a_run(tmp_path):
    """A second run starts where the first ended, with a fresh optimizer, and resumes."""
    task, rows = models.mlp_task(), models.data(32)
    first = px.fit(task, optax.adam(0.1), rows, output=tmp_path / "a", **OPTIONS)
    task = px.start_from(task, tmp_path / "a")
    same(tree.named_leaves(task.init(jax.random.key(0))), first.state.params)
    options = {**OPTIONS, "output": tmp_path / "b"}
    second = px.fit(task, optax.sgd(0.0), rows, **options)
    assert models.same_bits(second.state.params, first.state.params)
    third = px.fit(task, optax.sgd(0.0), rows, epochs=2, resume=True, **options)
    assert third.state.steps_taken == 4


def test_a_stateful_task_starts_with_its_parameters():
    task = models.normed_task()
    program = px.compile(px.start_from(task, some()), optax.sgd(0.1), px.Plan(), BATCH)
    state = program.init()
    assert models.same_bits(state.params, some())
    assert float(state.model_state["seen"]) == 0


def test_names_that_differ():
    theirs = {"net.body.hidden": some()["hidden"], "net.body.bias": some()["bias"],
              "lm_head": some()["out"], "step": np.zeros(())}  # fmt: skip
    by_dict = {"net.body": "", "lm_head": "out"}
    task = px.start_from(models.mlp_task(), theirs, rename=by_dict, strict=False)
    assert models.same_bits(task.init(jax.random.key(0)), some())

    def rename(name):
        return None if name == "step" else {"lm_head": "out"}.get(name, name.split("/")[-1])

    task = px.start_from(models.mlp_task(), theirs, rename=rename)
    assert models.same_bits(task.init(jax.random.key(0)), some())


def test_starts_add_up_and_are_converted():
    wide = {"hidden": some()["hidden"].astype(np.float64)}
    task = px.start_from(models.mlp_task(), wide, strict=False)
    task = px.start_from(task, {"bias": some()["bias"], "out": some()["out"]})
    params = task.init(jax.random.key(0))
    assert models.same_bits(params, some())
    assert params["hidden"].dtype == jnp.float32


def test_only_what_differs_is_shown():
    given = {"hidden": np.zeros((5, 4)), "bias": some()["bias"], "other": np.zeros(2)}
    with pytest.raises(px.errors.CheckpointError) as caught:
        px.start_from(models.mlp_task(), given)
    assert str(caught.value).splitlines() == [
        "the weights differ from the task's parameters:",
        "  hidden: the parameter has shape (5, 16), the weight (5, 4)",
        "  out: no weight of this name",
        "  other: no parameter of this name",
        "rename= changes names; strict=False starts the others as the task's init has them.",
    ]
    with pytest.raises(px.errors.CheckpointError) as caught:
        px.start_from(models.mlp_task(), given, strict=False)
    assert "out" not in str(caught.value)
    with pytest.raises(px.errors.CheckpointError, match="no weight has the name of a parameter"):
        px.start_from(models.mlp_task(), {"x": np.zeros(2)}, strict=False)


# --- Learning rates by path -------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"data": 4}, {"data": 4, "zero": 1}, {"data": 2, "zero": 3},
        {"tensor": 2, "shardings": {"hidden": (None, "tensor")}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [(), ("bias",)])
def test_learning_rates_by_path(x64, fields, frozen):
    """Under every plan as an optimizer for each part, by hand."""
    patterns = {"h*": "slow", "out": "fast"}
    rule = optax.partition(
        {"slow": optax.adam(1e-3), "fast": optax.adam(1e-1), "rest": optax.sgd(0.0)},
        px.weights.labels(patterns, default="rest"),
    )
    batch = models.data(16, dtype=np.float64)
    task = px.Task(
        init=lambda key: models.init(key, jnp.float64),
        loss=lambda p, b, k: models.evaluate(p, b)[0],
    )
    program = px.compile(px.freeze(task, *frozen), rule, px.Plan(**fields), batch)
    state = program.init(seed=0)
    whole = px.compile(task, optax.sgd(0.0), px.Plan(), batch)
    params = jax.device_get(whole.init(seed=0).params)
    rules = {"hidden": optax.adam(1e-3), "out": optax.adam(1e-1)}
    states = {name: one.init(params[name]) for name, one in rules.items()}
    gradient = jax.jit(jax.grad(lambda p: models.evaluate(p, batch)[0].mean()))
    for _ in range(3):
        state, _ = program.step(state, batch)
        grads = gradient(params)
        for name, one in rules.items():
            updates, states[name] = one.update(grads[name], states[name])
            params = {**params, name: params[name] + updates}
    got = jax.device_get(program.to_canonical(state).params)
    assert models.max_rel_error(got, jax.device_get(params)) < 1e-10


def test_labels_name_what_they_miss():
    params = some()
    with pytest.raises(
        px.errors.TaskError, match="labels: the pattern 'hiden' matches no parameter"
    ):
        px.weights.labels({"hiden": "a"}, default="b")(params)
    with pytest.raises(
        px.errors.TaskError, match="labels: no pattern matches the parameter 'bias'"
    ):
        px.weights.labels({"hidden": "a", "out": "b"})(params)
    first = px.weights.labels({"h*": "a", "*": "b"})(params)
    assert first == {"hidden": "a", "bias": "b", "out": "b"}
