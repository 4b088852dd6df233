"""The benchmark harness works: one measurement in a tiny size, from the command to the file."""

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from benchmarks import charts, maxtext
from benchmarks.absent_memory import allocated
from benchmarks.harness import Worker
from benchmarks.planning import ranking
from benchmarks.recovery import Recovery, recovered
from benchmarks.report import ROOT, TITLES, newest, table
from benchmarks.uneven import epochs_to

from tests.promotion import promotion

REPOSITORY = Path(__file__).parents[1]
MACHINE = {"cpu": "A processor", "cores": 2, "gpus": []}


def quick(group, output):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", group, "--quick", "--output", str(output)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (written,) = output.glob("quick-*.json")
    return json.loads(written.read_text())["rows"]


@pytest.mark.slow
def test_a_quick_measurement_writes_both_sides(tmp_path):
    rows = quick("accumulation", tmp_path)
    assert rows
    for row in rows:
        assert row["plurax"]["median"] > 0
        assert row["other"]["median"] > 0
        assert row["against"] == "optax.MultiSteps"


@pytest.mark.slow
def test_data_sources_are_measured_beside_their_own_loops(tmp_path):
    rows = quick("sources", tmp_path)
    compared = {row["name"]: row for row in rows if row["row"] == "comparison"}
    assert {"NumPy arrays, tiny", "NumPy arrays, streamed, tiny"} < set(compared)
    assert all(row["facts"]["rows"] == 400 for row in compared.values())
    checks = [row for row in rows if row["row"] == "check"]
    assert all(row["facts"]["processor_seconds_of_a_million"]["fit"] > 0 for row in checks)
    (skipped,) = [row for row in rows if row["row"] == "skipped"]
    assert skipped["reason"].startswith("tensorflow is not installed here")


@pytest.mark.slow
def test_members_are_measured_beside_jax_by_hand(tmp_path):
    rows = quick("members", tmp_path)
    compared = [row for row in rows if "plurax" in row and "other" in row]
    assert compared
    assert all(row["plurax"]["median"] > 0 and row["other"]["median"] > 0 for row in compared)
    assert sum(row["row"] == "check" for row in rows) >= 2  # what was chosen, and the roofline


@pytest.mark.slow
def test_a_divided_network_is_measured_beside_jax_by_hand(tmp_path):
    rows = quick("divided", tmp_path)
    compared = [row for row in rows if row["row"] == "comparison"]
    assert {row["against"] for row in compared} == {
        "JAX by hand",
        "JAX by hand, gathering again",
    }
    assert all(row["plurax"]["median"] > 0 and row["other"]["median"] > 0 for row in compared)
    checks = [row for row in rows if row["row"] == "check"]
    assert len(checks) == len(compared)
    assert all(row["facts"]["by hand"]["collective_bytes"] > 0 for row in checks)


@pytest.mark.slow
def test_the_rows_of_a_gpu_are_measured_by_one_command(tmp_path):
    rows = quick("gpu", tmp_path)
    compared = [row for row in rows if row["row"] == "comparison"]
    assert {row["against"] for row in compared} == {
        "JAX by hand",
        "JAX by hand, its blocks by hand",
        "JAX by hand, as written",
        "JAX by hand, vmap of a scan",
    }
    assert all(row["plurax"]["median"] > 0 and row["other"]["median"] > 0 for row in compared)
    parity, *steps, machine, _, deepest = [row for row in rows if row["row"] == "check"]
    assert parity["reached"]
    assert deepest["reached"]
    assert {side for row in steps for side in row["facts"]["losses"]} > {"plurax", "JAX by hand"}
    assert machine["facts"]["memory_bandwidth"] > 0
    (skipped,) = [row for row in rows if row["row"] == "skipped"]
    assert skipped["name"].endswith("PyTorch torch.compile")


@pytest.mark.slow
def test_pipelines_are_measured_beside_one_device_and_jax_by_hand(tmp_path):
    rows = quick("pipelines", tmp_path)
    compared = {row["against"]: row for row in rows if row["row"] == "comparison"}
    assert "one device, the same cores" in compared
    assert any(against.startswith("the fastest by hand: JAX, data=") for against in compared)
    assert all(
        row["plurax"]["median"] > 0 and row["other"]["median"] > 0 for row in compared.values()
    )
    checks = {row["name"]: row for row in rows if row["row"] == "check"}
    (bubble,) = [row for name, row in checks.items() if name.endswith("bubble")]
    assert bubble["facts"]["bubble"] == pytest.approx(3 / 7)  # (p - 1) / (m + p - 1)
    assert bubble["facts"]["processor_seconds"] > 0
    (compiling,) = [row for name, row in checks.items() if name.startswith("time to compile")]
    assert compiling["facts"]["ratio"] > 0
    (skipped,) = [row for row in rows if row["row"] == "skipped"]
    assert skipped["name"].endswith("PyTorch pipelining")


@pytest.mark.slow
def test_compiling_is_measured_beside_jax_by_hand(tmp_path):
    rows = quick("compile", tmp_path)
    (compared,) = [row for row in rows if row["row"] == "comparison"]
    assert compared["name"] == "2 unrolled layers, data=2, zero=1"
    assert compared["plurax"]["median"] > 0
    assert compared["other"]["median"] > 0
    assert all(compared["facts"]["processor_seconds"][side] > 0 for side in ("plurax", "by hand"))
    (host,) = [row for row in rows if row["row"] == "check"]
    assert host["name"] == "host time of a step, 3 arrays of parameters, data=2, zero=1"
    assert all(seconds > 0 for seconds in host["facts"]["seconds"].values())


@pytest.mark.slow
def test_searches_and_estimates_stand_beside_what_is_published(tmp_path):
    rows = {row["name"]: row for row in quick("planning", tmp_path)}
    searched = rows["GPT, tiny, on 1 × 2xA100-80GB"]["facts"]
    assert searched["fits"]
    assert searched["ratio"] == pytest.approx(searched["step"] * 1600 / 16)  # published: 1 s
    large = rows["GPT, too large, on 1 × 2xA100-80GB"]
    assert not large["facts"]["fits"]
    assert "no plan fits" in large["found"]
    assert large["reached"] is False
    given = rows["GPT, tiny, a plan, on 1 × 2xA100-80GB"]
    assert given["facts"]["plan"] == "precision='bfloat16', tensor=2"
    assert given["reached"] is None  # stands beside what is published, nothing was wanted
    (skipped,) = [row for row in rows.values() if row["row"] == "skipped"]
    assert skipped["name"].endswith("meta-pytorch/autoparallel")


@pytest.mark.slow
def test_plans_are_ranked_by_their_estimates(tmp_path):
    (row,) = quick("ranked", tmp_path)
    measured = row["facts"]["measured"]
    assert row["facts"]["predicted"].keys() == measured.keys() == {"one device", "microbatches=2"}
    for plan in measured.values():
        assert plan["bytes"] > 0
        assert len(plan["turns"]) == len(plan["alone"]) == 1
        assert plan["turns"][0] > 0
    assert -1 <= row["facts"]["ranking"] <= 1
    assert "page_bandwidth" in row["facts"]["machine"]


@pytest.mark.slow
def test_servers_are_measured_beside_the_store_that_carries_their_bytes(tmp_path):
    rows = {row["name"]: row for row in quick("servers", tmp_path)}
    assert "TensorFlow" in next(name for name, row in rows.items() if row["row"] == "skipped")
    raw = rows["tiny, batch 8, Ray's object store used raw"]["facts"]
    p50, p95, p99 = raw["exchange"]["latencies"]["exchange"]
    assert 0 < p50 <= p95 <= p99
    assert raw["parameters"] == 9 * 300 + 301 * 300 + 301 * 4
    median = statistics.median(raw["exchange"]["seconds"])
    assert raw["exchange"]["bytes_per_second"] == pytest.approx(8 * raw["parameters"] / median)
    ours = rows["tiny, batch 8, plurax"]["facts"]
    assert ours["parameters"] == raw["parameters"]
    assert set(ours["update"]["latencies"]) == {"push", "pull"}
    assert rows["tiny, batch 8, exchange"]["target"] == 0.8


@pytest.mark.slow
def test_uneven_workers_train_to_a_loss(tmp_path):
    alone, asynchronous = quick("uneven", tmp_path)
    goal = alone["facts"]["goal"]
    assert alone["name"] == f"digits, all-reduce, to a held-out loss of {goal:g}"
    # What one device reaches in an epoch, all-reduce reaches in an epoch; rounded up.
    assert alone["facts"]["losses"][0] == pytest.approx(goal - 0.005, abs=0.006)
    assert alone["facts"]["account"] is None
    # 1,437 examples in batches of 512, each of which waits for the slow worker.
    assert alone["facts"]["epochs"][1] >= 3 * 4 * 0.01
    assert asynchronous["facts"]["account"]["updates"] == 4 * 12
    assert asynchronous["facts"]["seconds"] > 0


def test_a_loss_is_reached_within_an_epoch():
    assert epochs_to(0.2, [0.8, 0.4, 0.1]) == pytest.approx(2.5)
    assert epochs_to(0.8, [0.8, 0.4]) == 1.0
    assert epochs_to(0.05, [0.8, 0.1]) == math.inf


@pytest.mark.slow
def test_recovery_from_a_death_is_measured(tmp_path):
    (row,) = quick("recovery", tmp_path)
    assert row["name"] == "digits, bounded 3: a worker killed"
    (sample,) = row["facts"]["samples"]
    # The other worker goes on; a process takes a while to start.
    assert 0 < sample["update"] < sample["work"]
    assert sample["gap"] >= sample["update"]
    result = json.loads(next(tmp_path.glob("quick-*.json")).read_text())
    assert f"| {row['name']} | {sample['update']:.2f} | {sample['work']:.2f} |" in table(result)


@pytest.mark.slow
def test_the_cost_of_watching_a_run_is_measured(tmp_path):
    (row,) = quick("reliability", tmp_path)
    assert row["name"] == "digits, data=2"
    facts = row["facts"]
    assert facts["every"] == 200
    assert 0 < facts["copies_share"] == pytest.approx(facts["compare"] / 200 / facts["step"])
    assert 0 < facts["watchdog"] < facts["step"]


@pytest.mark.slow
def test_several_processes_are_measured_beside_jax_by_hand(tmp_path):
    rows = quick("hosts", tmp_path)
    name = "tiny, data=8, zero=3, 2 processes × 4 devices"
    compared = {row["against"]: row for row in rows if row["row"] == "comparison"}
    assert {*compared} == {
        "JAX by hand",
        "plurax, 1 process × 8 devices",
        "JAX by hand, 1 process × 8 devices",
    }
    assert all(row["name"] == name and row["plurax"]["median"] > 0 for row in compared.values())
    *_, killed = [row for row in rows if row["row"] == "check"]
    (sample,), (seconds,) = killed["facts"]["samples"], killed["facts"]["seconds"]
    assert all(part >= 0 for part in sample.values())
    assert sum(sample.values()) == pytest.approx(seconds)
    assert sample["backoff"] >= 0.99  # rounded times


def struck(*processes, committed=None):
    return {"event": "struck", "processes": [*processes], "committed": committed, "at": 10.0}


def gradient(event, worker, life, sequence, at):
    return {"event": event, "worker": worker, "life": life, "sequence": sequence, "at": at}


def test_recovery_from_a_worker_s_death_is_read_from_the_record():
    events = [
        struck("worker 1"),
        gradient("push", 0, 0, 7, 10.1),  # pulled before the signal
        gradient("pull", 0, 0, 8, 10.2),
        {"event": "worker lost", "worker": 1, "life": 0, "at": 10.3},
        gradient("push", 0, 0, 8, 10.5),
        gradient("pull", 1, 1, 9, 13.0),
        gradient("push", 1, 1, 9, 14.0),
    ]
    assert recovered(events) == pytest.approx(Recovery(update=0.5, work=4.0, gap=3.5))
    assert recovered(events[:-1]) is None


def test_recovery_from_a_server_s_death_counts_no_batch_twice():
    events = [
        struck("server 0", committed=5),
        gradient("pull", 0, 0, 7, 10.1),
        {"event": "server lost", "server": 0, "version": 6, "restored": 4, "at": 10.3},
        gradient("pull", 0, 0, 8, 10.4),
        gradient("push", 0, 0, 8, 12.5),
        {"event": "commit", "step": 5, "parts": [0, 1], "at": 12.75},
        gradient("pull", 0, 0, 9, 12.8),
        gradient("push", 0, 0, 9, 12.9),
        {"event": "commit", "step": 6, "parts": [0, 1], "at": 13.0},
    ]
    assert recovered(events) == pytest.approx(Recovery(update=3.0, work=2.5, gap=3.0))
    assert recovered(events[:-1]) is None


@pytest.mark.slow
def test_a_block_is_searched_anew_in_each_turn():
    settings = {"width": 64, "heads": 2, "tokens": 64, "batch": 64, "mesh": [2], "devices": 2}
    with Worker(sys.executable, "jax_search_block", settings | {"nodes": 1}) as worker:
        assert worker.facts["plans"]["mesh given"] == "tensor=2"
        assert all(worker.run(side) > 0 for side in ("mesh given", "search"))


def test_plans_are_ranked_by_medians_and_by_single_turns():
    predicted = {name: {"seconds": seconds} for name, seconds in zip("abc", (1, 2, 3), strict=True)}
    turns = {"a": [10, 10, 99], "b": [20, 40, 20], "c": [30, 30, 30]}
    measured = {name: {"turns": own} for name, own in turns.items()}
    assert ranking(predicted, measured) == (1.0, [1.0, 0.5, -0.5])


def test_every_group_that_is_compared_is_in_a_picture():
    results = newest(ROOT / "benchmarks" / "results")
    rows = [row for result in results for row in result["rows"] if row["row"] == "comparison"]
    drawn = [group for _, groups in charts.CHARTS.values() for group in groups]
    assert set(drawn) | {"members"} == set(TITLES)
    assert {row["group"] for row in rows} <= {*drawn, "members"}


def test_words_of_pictures_of_speeds_stay_in_their_columns(tmp_path):
    row = {
        "row": "comparison", "name": "a thing", "against": "a peer of many words " * 4,
        "group": "step", "speed": 123.0, "spread": [80.0, 130.0], "target": 0.5, "reached": True,
    }  # fmt: skip
    slow = {**row, "speed": 0.011, "spread": [0.01, 0.012], "reached": False}
    lines = list(charts._lines([{"rows": [row, slow], "machine": MACHINE}], "step", "A step"))
    figure = charts._draw_lines("Steps", lines)
    figure.canvas.draw()
    (axis,) = figure.axes
    inside = axis.get_window_extent()
    words, speeds = axis.texts[-2:]
    assert 0 <= words.get_window_extent().x0 < words.get_window_extent().x1 <= inside.x0
    assert inside.x1 <= speeds.get_window_extent().x0
    assert speeds.get_window_extent().x1 <= figure.bbox.x1
    assert speeds.get_text() == "0.01 to 123 ×"
    written = charts.draw_speeds([{"rows": [row], "machine": MACHINE}], TITLES, tmp_path)
    assert [path.name for path in written] == ["benchmarks.png"]


def test_without_maxtext_the_comparison_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        maxtext.main([])
    assert stopped.value.code == 2
    assert "`make bench-maxtext` installs it for Python 3.12" in capsys.readouterr().err


@pytest.mark.parametrize("name", maxtext.PLANS)
def test_maxtext_is_told_the_same_sizes(name):
    fields, told = maxtext.PLANS[name]
    plan = maxtext.make_plan(fields, 8)
    for machine in maxtext.SIZES:
        model = maxtext.model_of(machine, name)
        arguments = maxtext.maxtext_settings(machine, model, told)
        settings = dict(setting.split("=") for setting in arguments)
        rows = int(settings["per_device_batch_size"]) * int(settings["gradient_accumulation_steps"])
        assert rows == model.rows == model.batch(8)["inputs"].shape[0] / 8
        assert int(settings["gradient_accumulation_steps"]) == plan.microbatches
        mesh = {axis: int(settings[f"ici_{axis}_parallelism"]) for axis in maxtext.AXES}
        assert math.prod(mesh.values()) == plan.devices == 8
        assert (mesh["tensor"], mesh["context"]) == (plan.tensor, plan.context)
        assert (settings["shard_optimizer_over_data"] == "True") == (plan.zero == 1)


@pytest.mark.ci
@pytest.mark.parametrize("experts", [1, 4])
def test_a_token_changes_nothing_before_it_nor_in_another_segment(experts):
    model = maxtext.Llama(
        width=16, hidden=24, depth=2, heads=2, words=11, tokens=6, rows=1, experts=experts
    )
    params = model.init(jax.random.key(0))
    # Two segments in a row; the last token is padding.
    row = {
        "inputs": jnp.array([[1, 2, 3, 4, 5, 0]]),
        "inputs_position": jnp.array([[0, 1, 2, 0, 1, 0]]),
        "inputs_segmentation": jnp.array([[1, 1, 1, 2, 2, 0]]),
        "targets": jnp.array([[2, 3, 4, 5, 6, 0]]),
        "targets_segmentation": jnp.array([[1, 1, 1, 2, 2, 0]]),
    }

    def changes(position, only):
        """Whether the loss of some tokens changes with the token at a position."""
        weights = jnp.array([[int(at in only) for at in range(6)]])
        batch = {**row, "targets_segmentation": weights}
        other = {**batch, "inputs": row["inputs"].at[0, position].set(9)}
        before, after = (model.loss(params, one, None) for one in (batch, other))
        return not jnp.allclose(before, after, rtol=1e-3)

    with promotion():
        assert changes(1, {1, 2})
        assert not changes(1, {0, 3, 4})
        assert changes(3, {4})
        assert not changes(4, {0, 1, 2, 3})
        assert not changes(5, {0, 1, 2, 3, 4})


def test_the_table_beside_maxtext_has_each_figure_of_each_side():
    figures = {"temporaries_mib": 1234.5, "sent_mib": 10.0, "hidden": 0.5, "step_ms": 2.0}
    row = {side: {**figures, "sent_mib": 10.0 + at} for at, side in enumerate(maxtext.SIDES)}
    stored = {
        "rows": {"v5e:2x4": {"data": row, "tensor": row}},
        "dates": {"v5e:2x4": {"data": "2026-01-03", "tensor": "2026-01-02"}},
        "versions": {"jax": "1.2"},
    }
    line, written = maxtext.table(stored).splitlines()[2], maxtext.table(stored).splitlines()[-1]
    assert line.split(" | ")[2:4] == ["1,234 / 1,234 / 1,234", "10 / 11 / 12"]
    assert written == "Compiled on 2026-01-02 to 2026-01-03 with jax 1.2."


def test_only_the_large_memory_of_a_table_of_buffers_is_counted():
    table = """allocation 0: size 512, thread-local:
 value: <1 x @0> (size=512,offset=0): f32[]
allocation 250: size 1024, preallocated-temp:
allocation 254: size 2048, color 1, preallocated-temp:
"""
    assert allocated(table) == 1024
