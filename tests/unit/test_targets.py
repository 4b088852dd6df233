"""Machines that are not here: their names, what their compilers need, and who lacks it."""

import importlib.util

import jax
import numpy as np
import optax
import pytest
from tests import models

import plurax as px
from plurax.checkpoint import Checkpoints
from plurax.checkpoint.restore import restore
from plurax.distributed import global_arrays
from plurax.distributed.global_arrays import is_absent, put
from plurax.execute.rows import Chunk
from plurax.machine import Machine, published
from plurax.mesh import replicated
from plurax.targets import Target, _gpu_description, targets

NAMES = {
    "v5p:2x2x4": ("16xTPU-v5p", 1, 16),
    "TPU-v5e:4x4": ("16xTPU-v5e", 1, 16),
    "v6e:4x4*2": ("16xTPU-v6e", 2, 32),
    "7x:2x2x1": ("8xTPU-7x", 1, 8),  # of two devices each
    "tpu7x:2x2x1": ("8xTPU-7x", 1, 8),
    "H100": ("1xH100-80GB", 1, 1),
    "8xH100": ("8xH100-80GB", 1, 8),
    "2x8xB200": ("8xB200-180GB", 2, 16),
    "4xA100-40GB": ("4xA100-40GB", 1, 4),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_machine(name):
    preset, nodes, devices = NAMES[name]
    target = Target.of(name)
    assert target.machine == Machine.preset(preset, nodes)
    assert target.machine.devices == devices
    assert (target.clock is None) == (target.compiler["platform"] == "cuda")


@pytest.mark.parametrize("name", targets())
def test_every_example_of_a_name_is_one(name):
    assert Target.of(name).name == name


def test_every_kind_with_a_compiler_has_an_example():
    kinds = [kind for kind, device in published().items() if "compiler" in device]
    assert len(targets()) == len(kinds) >= 11


@pytest.mark.parametrize("name", ["v9p:2x2", "8xH10", "v5e", "", "8x", "v5e:4x4*", "AMD:4x4"])
def test_names_of_no_machine(name):
    with pytest.raises(px.errors.MachineError, match=r"no machine .* to compile for") as caught:
        px.topology(name)
    assert "8xH100-80GB" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("8xMI300X", "MI300X-192GB"), ("2x8xMI300X-192GB", "MI300X-192GB"),
                       ("8xV100-32GB", "V100-32GB")],
)  # fmt: skip
def test_a_machine_that_is_known_without_its_compiler(name, kind):
    said = rf"of a {kind} plurax knows rates and links, and not what XLA's compiler has to know"
    with pytest.raises(px.errors.MachineError, match=said) as caught:
        px.topology(name)
    assert f"px.Machine.preset('8x{kind}')" in str(caught.value)
    assert Machine.preset(f"8x{kind}").devices == 8


def test_a_name_of_two_kinds():
    with pytest.raises(
        px.errors.MachineError, match=r"A100-80GB: write the memory too, '8xA100-40GB'"
    ):
        px.topology("8xA100")


@pytest.mark.parametrize(("name", "extra"), [("v5p:2x2x1", "tpu"), ("8xH100", "cuda")])
def test_without_the_package_of_the_compiler(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(px.errors.MissingPackageError, match=rf"plurax\[{extra}\]"):
        px.topology(name)


def test_the_description_of_a_gpu():
    text = _gpu_description(Target.of("8xH100"))
    # CUDA's programming guide, compute capability 9.0: 228 KiB of a core, 227 of a block.
    assert "shared_memory_per_core: 233472" in text
    assert "shared_memory_per_block_optin: 232448" in text
    assert "cuda_compute_capability { major: 9 }" in text
    assert "memory_bandwidth: 3350000000000" in text


def test_devices_that_are_here_are_not_absent():
    device = jax.devices()[0]
    assert not is_absent(device)
    mesh = jax.make_mesh((1,), ("data",), devices=[device])
    assert put(1.0, replicated(mesh)).devices() == {device}


# --- Functions of a program, compiled to be read --------------------------------------------------


def arguments():
    return models.mlp_task(), optax.sgd(0.1), px.Plan(data=2), models.data(8)


WRONG = {
    "epoch of nothing": ({"function": "epoch"}, "compiles the loop over data that are on the"),
    "gradients of data": ({"function": "gradients", "data": 1}, "reads the batch alone, and data="),
    "an epoch of larger steps": (
        {"function": "epoch", "data": px.train.ArrayData({"x": np.zeros((32, 2))}, 16)},
        "compiled_for: the steps of .*batch_size=16.* have 16 examples, and batch has 8, the most",
    ),
    "a step of data": ({"data": 1}, r"'predict' \(inputs\). Leave data out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_a_function_does_not_read(name):
    wrong, message = WRONG[name]
    with pytest.raises(px.errors.BatchError, match=message):
        px.analysis.compiled_for(*arguments(), "8xH100", **wrong)


def test_a_function_that_there_is_not():
    with pytest.raises(px.errors.ArgumentError, match="has to be one of 'step', 'epoch', 'grad"):
        px.analysis.compiled_for(*arguments(), "8xH100", function="train")


@pytest.mark.ci
@pytest.mark.parametrize("members", [None, px.Members(3)])
def test_what_is_traced_is_what_runs(members):
    """The programs that are read compute what `gradients`, `evaluate` and `predict` return."""
    task, optimizer, plan, batch = arguments()
    program = px.compile(task, optimizer, plan, batch, members=members)
    state = program.init()
    states = (state.params, state.model_state)
    inputs = {"x": batch["x"]}
    own = program._functions.arguments

    part = () if members else (np.int32(0),)
    gradients = program.trace_gradients().lower().compile()
    sums = gradients(state, *own, batch, np.int32(8), *part)
    equal(sums, program.gradients(state, batch, first=None if members else 0))

    predict = program.trace_predict(inputs).lower().compile()
    outputs = program._functions.outputs(jax.device_get(predict(*states, *own, inputs)))
    equal(outputs, program.predict(state, inputs))

    evaluate = program.trace_evaluate().lower().compile()
    totals = evaluate(*states, *own, batch, Chunk(np.int32(0), np.int32(8)))
    loss = np.float64(totals.loss) / np.float64(totals.weight)
    np.testing.assert_array_equal(
        program._functions.trim(loss), program.evaluate(state, batch)["loss"]
    )


def test_rows_of_a_traced_call():
    program = px.compile(*arguments())
    rows = {"x": jax.ShapeDtypeStruct((100, models.FEATURES), np.float32)}
    for chunk, count in ((None, 8), (20, 20), (19, 20)):  # two devices share them
        (traced,) = jax.tree.leaves(program.trace_predict(rows, chunk=chunk).out_info)
        assert traced.shape == (count, models.CLASSES)


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


# --- Nothing is placed on devices that are not here -----------------------------------------------

REFUSED = r"^2 x cpu are described for their compiler .* To run, leave devices= out\.$"


@pytest.mark.parametrize("members", [None, px.Members(3)])
def test_every_method_that_places_or_runs_refuses(members, monkeypatch):
    task, optimizer, plan, batch = arguments()
    program = px.compile(task, optimizer, plan, batch, members=members)
    state = program.init()
    placed, sums = program.place_batch(batch), program.gradients(state, batch)
    monkeypatch.setattr(program, "_absent", True)
    calls = {
        "init": (), "place": (state,), "step": (state, batch), "gradients": (state, batch),
        "apply": (state, sums), "place_batch": (batch,), "step_placed": (state, placed),
        "loop": (state, batch, (), 0, 1), "predict": (state, batch), "evaluate": (state, batch),
    }  # fmt: skip
    for name, values in calls.items():
        with pytest.raises(px.errors.PlanError, match=REFUSED):
            getattr(program, name)(*values)
    assert program.memory().peak
    assert program.hlo()


def test_a_run_is_not_moved_away_for_devices_that_are_not_here(tmp_path, monkeypatch):
    task, optimizer, plan, batch = arguments()
    run = {"batch_size": 8, "plan": plan, "output": tmp_path / "run", "progress": False}
    trained = px.fit(task, optimizer, batch, **run)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    monkeypatch.setattr(global_arrays, "is_absent", lambda device: True)
    for choice in ({"restart": True}, {"resume": True}, {"output": tmp_path / "new"}):
        with pytest.raises(px.errors.PlanError, match=REFUSED):
            px.fit(task, optimizer, batch, **{**run, **choice}, devices=jax.devices()[:2])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert not (tmp_path / "new").exists()
    with (
        Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints,
        pytest.raises(px.errors.PlanError, match=REFUSED),
    ):
        restore(trained.program, checkpoints)
