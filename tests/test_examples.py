"""The examples learn: each in a size that takes seconds."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import plurax as px
from tests.pictures import panels

pytestmark = pytest.mark.ci

EXAMPLES = Path(__file__).parents[1] / "examples"


def experiment(name, **arguments):
    return runpy.run_path(str(EXAMPLES / name))["experiment"](**arguments)


def train(made, **changes):
    options = {**vars(made), "progress": False, **changes}
    return px.fit(**options)


@pytest.mark.slow
def test_digits_reach_97_percent():
    """What `make demo` promises."""
    result = train(experiment("digits.py"))
    assert result.history[-1]["eval_accuracy"] >= 0.97


@pytest.mark.slow
def test_the_residual_net_learns_digits():
    made = experiment("digits.py", model="conv", epochs=2)
    result = train(made, plan=px.Plan(data=2, microbatches=2))
    assert result.history[-1]["eval_accuracy"] >= 0.6


def test_the_language_model_learns():
    made = experiment("language_model.py", width=32, depth=2, heads=2, window=32, epochs=1)
    small = {name: values[:1024] for name, values in made.data.items()}
    held_out = {name: values[-64:] for name, values in made.evaluation.items()}
    result = train(made, data=small, evaluation=held_out, batch_size=32)
    assert result.history[-1]["eval_bits_per_byte"] < 7.0  # before training: 8


def test_the_language_model_writes_on():
    functions = runpy.run_path(str(EXAMPLES / "language_model.py"))
    import jax

    params = functions["make_task"](width=32, depth=1, heads=2, window=16).init(jax.random.key(0))
    text = functions["sample"](params, "The for", 20, jax.random.key(1))
    assert text.startswith("The for")


def test_the_windows_of_the_text_lose_no_byte():
    windows = runpy.run_path(str(EXAMPLES / "language_model.py"))["windows"]
    text = bytes(range(100))
    made = windows(text, 8)
    predicted = [row[1 : 1 + n] for row, n in zip(made["bytes"], made["count"], strict=True)]
    assert bytes(np.concatenate(predicted)) == text[1:]


def test_lora_trains_adapters_alone(tmp_path):
    functions = runpy.run_path(str(EXAMPLES / "lora.py"))
    from plurax import tree

    path = tmp_path / "base.safetensors"
    px.weights.save(functions["train_base"](epochs=3), path)
    made = functions["experiment"](base=str(path), epochs=6)
    result = train(made, plan=px.Plan(data=2, zero=1))
    after = tree.named_leaves(result.program.to_canonical(result.state).params["base"])
    before = px.weights.load(path)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert result.history[-1]["eval_accuracy"] > 0.5  # the base alone: 0.1
    assert tree.parameter_count(result.state.opt_state) < 0.05 * tree.parameter_count(after)


@pytest.fixture(scope="module")
def ground():
    return runpy.run_path(str(EXAMPLES / "domains.py"))


def test_the_domains_network_learns_held_out_holes(ground):
    made = ground["experiment"](width=64, holes=60, epochs=6, batch_size=512, learning_rate=5e-3)
    result = train(made, plan=px.Plan(data=2))
    assert result.history[-1]["eval_accuracy"] > 0.6
    blocks = {"xyz_cm": np.random.default_rng(0).integers(0, 40_000, (1000, 3)).astype(np.int32)}
    predicted = result.program.predict(result.state, blocks)
    right = predicted["domain"] == ground["rock_domain"](blocks["xyz_cm"] / 100)
    assert right.mean() > 0.6


def test_the_domains_network_has_ten_million_parameters(ground):
    from plurax import tree

    made = ground["experiment"](holes=4)
    import jax

    params = jax.eval_shape(made.task.init, jax.random.key(0))
    assert 9.5e6 < tree.parameter_count(params) < 10.5e6


def test_the_geology_has_all_its_domains_and_holds_out_whole_holes(ground):
    made = ground["experiment"](holes=60)
    assert set(np.unique(made.data["domain"])) == set(range(len(ground["DOMAINS"])))
    assert not set(made.data["hole"]) & set(made.evaluation["hole"])
    assert len(made.data["hole"]) > 5 * len(made.evaluation["hole"])


def test_the_spirals_are_learnt_and_drawn(tmp_path, drawn):
    functions = runpy.run_path(str(EXAMPLES / "spirals.py"))
    made = functions["experiment"](steps=300)
    plan = px.Plan(member=2, chunk=4, batch_dim="minor")
    result = train(made, plan=plan, members=px.Members(8, resample=px.ensemble.bootstrap()))
    assert result.history[-1]["accuracy"] > 0.95
    pictures = list(functions["report"](made, result, tmp_path))
    assert [path.name for path in pictures] == ["confidence.png"]
    first, other, together, doubt, *scales = panels(drawn["confidence.png"])
    assert doubt.title == "what they do not know"
    assert [scale.y for scale in scales] == ["mutual information (nats)", "probability of class 1"]
    assert (first.title, together.title) == ("one network, seed 0", "8 bootstrapped networks")
    assert other.title in {f"one network, seed {seed}" for seed in range(1, 8)}
    # Probabilities, the line between them, and a cloud for each class.
    assert [panel.areas for panel in (first, other, together)] == [4, 4, 4]
    assert doubt.areas == 3  # no line: half is of no meaning there


def test_the_digits_ensemble_reports_and_sweeps(tmp_path, capsys):
    functions = runpy.run_path(str(EXAMPLES / "digits_ensemble.py"))
    made = functions["experiment"](epochs=30)
    members = px.Members(4, made.members.hyper, px.ensemble.bootstrap())
    plan = px.Plan(member=2, chunk=2, batch_dim="major")
    result = train(made, plan=plan, members=members)
    assert result.history[-1]["eval_accuracy"] > 0.7
    wrote = [path.name for path in functions["report"](made, result, tmp_path)]
    assert wrote == ["reliability.png", "calibration.json", "sweep.csv", "sweep.png"]
    printed = capsys.readouterr().out
    assert "4 bootstrapped" in printed
    assert "best setting" in printed
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 9


def test_optuna_proposes_a_population():
    functions = runpy.run_path(str(EXAMPLES / "optuna_digits.py"))
    plan = px.Plan(chunk=3, batch_dim="major")
    study = functions["search"](rounds=2, members=3, epochs=1, plan=plan)
    assert len(study.trials) == 6
    assert all(trial.value is not None for trial in study.trials)


def test_recall_needs_whole_sequences(capsys):
    main = runpy.run_path(str(EXAMPLES / "recall.py"))["main"]
    main(tokens=512, window=64, epochs=4, block=64)
    verified, shares, costs = capsys.readouterr().out.rsplit("\n\n", 2)
    assert "computes what one device computes" in verified
    in_pieces, in_whole = (numbers(line) for line in shares.splitlines()[1:])
    assert in_whole[0] > 90
    assert min(in_pieces[1], in_whole[2]) > 50
    assert in_pieces[2] < 12  # a sixteenth is guessed
    as_written, in_blocks, ring = (numbers(line) for line in costs.splitlines()[1:])
    assert as_written[0] > in_blocks[0] > ring[0]
    assert as_written[1] == in_blocks[1] == 0 < ring[1]


def numbers(line):
    """Those of the columns that follow the name of a row."""
    return [float(column.strip(" %")) for column in line[28:].split()]


def test_a_mixture_beats_the_dense_network_of_equal_work(capsys, monkeypatch):
    functions = runpy.run_path(str(EXAMPLES / "mixture.py"))
    import jax

    monkeypatch.setattr(jax, "device_count", lambda: 4)  # of the eight that tests have
    functions["main"](size=24_576, seeds=2, virtual=0)
    table, shares, plans = capsys.readouterr().out.split("\n\n")
    dense, mixture = (numbers(line) for line in table.splitlines()[1:])
    assert mixture[0] < dense[0] - 0.03 < 3.0  # before training: 7 bits
    assert all(low < 12.5 < high for low, high in map(percents, shares.splitlines()[1:]))
    here, there = plans.splitlines()[::2]
    assert here.partition(":")[2] == there.partition(":")[2]
    assert "a device has 2 experts" in plans
    assert "all-to-all" in plans


def test_both_networks_of_the_mixture_do_equal_work():
    """Multiply-adds of a byte in the perceptron: those of two experts and of the router."""
    functions = runpy.run_path(str(EXAMPLES / "mixture.py"))
    import jax

    dense, mixture = (
        jax.eval_shape(functions["experiment"](kind, 4096).task.init, jax.random.key(0))
        for kind in ("dense", "mixture")
    )
    work = dense["up"].size + dense["down"].size
    experts = mixture["up"].size + mixture["down"].size
    assert experts * functions["CHOSEN"] / functions["EXPERTS"] + mixture["router"].size == work
    assert experts > 3.8 * work


def percents(line):
    return [float(share) for share in re.findall(r"([\d.]+)%", line)]
