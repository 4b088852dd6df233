"""Options of XLA's compiler: they reach all that a program compiles, and wrong ones are refused."""

import contextlib
import re
import tomllib

import jax
import numpy as np
import optax
import pytest
from tests import models
from tests.command import run

import plurax as px
from plurax.execute.array_data import ArrayData

TASK, OPTIMIZER = models.mlp_task(), optax.adam(1e-2)
DATA = models.data(32)
ROWS = models.cut(DATA, 8)
UNFUSED = {"xla_disable_hlo_passes": "fusion"}
"""An option whose effect is in the text: what is not fused on CPU is a kernel of its own."""

MEMBERS = px.Members(2)


def kernels(compiled):
    return len(re.findall(r" fusion\(", compiled.as_text()))


def compiled(**more):
    return px.compile(TASK, OPTIMIZER, px.Plan(), ROWS, **more)


@contextlib.contextmanager
def without_cache():
    """JAX leaves what says where to dump out of the key of its cache."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def run_all(program):
    """Call every function of a program of one network."""
    program.step(program.init(0), ROWS)
    order = program.place_epoch(*ArrayData(DATA, 8).epoch_order(0))
    program.loop(program.init(0), program.place_data(DATA), order, 0, 4)
    state = program.init(0)
    program.apply(state, program.gradients(state, ROWS))
    program.evaluate(program.init(0), DATA)
    program.predict(program.init(0), {"x": DATA["x"]})


def test_all_functions_are_compiled_with_the_options(tmp_path):
    with without_cache():
        run_all(compiled(compiler_options={"xla_dump_to": str(tmp_path)}))
    dumped = {path.name.split(".")[1] for path in tmp_path.iterdir()}
    wanted = {"init", "step", "loop", "gradients", "apply", "evaluate", "predict"}
    assert {f"jit_{name}" for name in wanted} <= dumped


@pytest.mark.ci
def test_members_are_compiled_with_the_options(tmp_path):
    arrays = ArrayData(DATA, 8)
    options = {"xla_dump_to": str(tmp_path)}
    with without_cache():
        program = compiled(members=MEMBERS, data=arrays, compiler_options=options)
        program.of(px.Members(3)).init()
    dumped = [path.name.split(".")[1] for path in tmp_path.glob("*after_optimizations.txt")]
    assert dumped.count("jit_loop") == 2  # that of two members, and that of three
    assert dumped.count("jit_init") == 1


@pytest.mark.ci
def test_an_option_changes_the_compiled_step(uncached):
    if not uncached:
        return
    plain, unfused = compiled(), compiled(compiler_options=UNFUSED)
    assert kernels(unfused.compiled_step) > kernels(plain.compiled_step)
    assert plain.compiler_options == {}
    assert unfused.compiler_options == UNFUSED
    rows = {"x": ROWS["x"]}
    for trace in (
        px.Program.trace_evaluate,
        px.Program.trace_gradients,
        lambda program: program.trace_predict(rows),
    ):
        before, after = (kernels(trace(one).lower().compile()) for one in (plain, unfused))
        assert after > before


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::plurax.errors.MaskWarning")
def test_sizes_that_are_not_padded_have_the_options_too(uncached):
    """A coupled loss that does not read its mask: each size has a program of its own."""
    if not uncached:
        return

    def loss(params, batch, keys, mask):
        out = batch["x"] @ params["hidden"]
        return ((out - out.mean(0, keepdims=True)) ** 2).sum(1)

    task = px.Task(init=TASK.init, loss=loss, coupled=True)
    few, counts = models.cut(DATA, 5), []
    for options in ({}, UNFUSED):
        program = px.compile(task, OPTIMIZER, px.Plan(), ROWS, compiler_options=options)
        counts.append(kernels(program.trace_gradients(few).lower().compile()))
        program.step(program.init(0), few)
    assert counts[1] > counts[0]


def test_numbers_of_numpy_are_numbers():
    options = {"xla_cpu_prefer_vector_width": np.int32(256), "xla_cpu_enable_fast_math": np.False_}
    program = compiled(compiler_options=options)
    assert program.compiler_options == {
        "xla_cpu_enable_fast_math": False,
        "xla_cpu_prefer_vector_width": 256,
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"xla_nope": True},
            r"compiler_options=\{'xla_nope': True\}: XLA's compiler for cpu has no such option\. A "
            r"name is that of a flag .* Correct the name",
        ),
        (
            {"xla_tpu_scoped_vmem_limit_kib": 98304},
            r"for cpu has no such option.*the compiler for TPUs alone knows",
        ),
        (
            {"xla_cpu_enable_fast_math": "true", "xla_embed_ir_in_executable": True},
            r"\{'xla_cpu_enable_fast_math': 'true'\}: .* does not take this value, and says: .*"
            r"'true' is not a valid bool value\. Give a switch True or False",
        ),
        ({"xla_backend_optimization_level": 0.5}, "'0.5' is not a valid int32 value"),
        ({"xla_dump_to": ["x"]}, "a list is no value of an option"),
        ({"xla_dump_to": None}, "a NoneType is no value of an option"),
        ({3: True}, r"compiler_options=\{3: True\}: give a dict"),
        ("xla_dump_to", "compiler_options='xla_dump_to': give a dict from names"),
        ([("xla_dump_to", "x")], "give a dict from names"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_traced(options, text):
    def loss(params, batch, keys):
        raise AssertionError("traced")

    task = px.Task(init=TASK.init, loss=loss)
    with pytest.raises(px.errors.ArgumentError, match=text):
        px.compile(task, OPTIMIZER, px.Plan(), ROWS, compiler_options=options)
    with pytest.raises(px.errors.ArgumentError, match=text):
        px.fit(task, OPTIMIZER, DATA, batch_size=8, compiler_options=options, progress=False)


@pytest.mark.ci
def test_fit_keeps_a_program_for_each_set_of_options():
    def fit(**options):
        given = {"batch_size": 8, "progress": False}
        return px.fit(TASK, OPTIMIZER, DATA, **given, **options).program

    plain, unfused = fit(), fit(compiler_options=UNFUSED)
    assert plain.compiler_options == {}
    assert unfused.compiler_options == UNFUSED
    assert fit() is plain
    assert fit(compiler_options=dict(UNFUSED)) is unfused
    two = {**UNFUSED, "xla_embed_ir_in_executable": False}
    assert fit(compiler_options=two) is fit(compiler_options=dict(reversed(two.items())))


@pytest.mark.ci
def test_fit_of_members_keeps_a_program_for_each_set_of_options():
    def fit(**options):
        given = {"batch_size": 8, "progress": False, "members": MEMBERS}
        return px.fit(TASK, OPTIMIZER, DATA, **given, **options).program

    assert fit().compiler_options == {}
    assert fit(compiler_options=UNFUSED).compiler_options == UNFUSED


FILE = """
import optax, plurax as px
from tests import models

def experiment(option: str = "xla_embed_ir_in_executable"):
    return px.Experiment(
        task=models.mlp_task(), optimizer=optax.adam(1e-2), data=models.data(32), batch_size=8,
        compiler_options={option: True},
    )
"""


def test_options_of_an_experiment(tmp_path, monkeypatch, capsys):
    """A file gives them, for training, for its plan and for predictions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(FILE)
    code, _, err = run(capsys, "train", "small.py", "--no-progress", "--output", "run")
    assert (code, err) == (0, "")
    table = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["compiled"]
    assert table["options"] == {"xla_embed_ir_in_executable": True}
    for command in ("train", "plan"):
        code, _, err = run(capsys, command, "small.py", "--experiment.option", "xla_nope")
        assert code == 2
        assert "compiler for cpu has no such option" in err


@pytest.mark.ci
def test_workers_compile_with_the_options(tmp_path):
    with without_cache():
        px.fit(
            TASK, OPTIMIZER, DATA, batch_size=8, progress=False,
            servers=px.Servers(workers=1, transport="threads"),
            compiler_options={"xla_dump_to": str(tmp_path)},
        )  # fmt: skip
    assert any("jit_gradients" in path.name for path in tmp_path.iterdir())
