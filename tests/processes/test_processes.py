"""Several processes train what one trains: steps, `fit`, predict, evaluate, checkpoints.

Real processes, connected by JAX's own collectives between CPUs (Gloo) over loopback.
"""

import itertools

import jax
import numpy as np
import pytest

import plurax as px
from plurax.loop.log_rows import read_rows
from tests import models
from tests.processes import cases, gang

pytestmark = pytest.mark.gangs


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each of two processes with four devices found, by case, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("ran")
    return gang.run(2, 4, "steps,fits,shares,saves", folder), folder


@pytest.fixture(scope="module", params=[(2, 4), (4, 2)], ids=lambda sizes: "{}x{}".format(*sizes))
def ran_more(request, tmp_path_factory):
    """What each process of two layouts found."""
    folder = tmp_path_factory.mktemp("ran")
    cases_ = "steps,more_steps,fits,more_fits,verifies"
    return gang.run(*request.param, cases_, folder), folder


def check_steps(found, pair):
    name = "/".join(pair)
    ran = [{**each.get("more_steps", {}), **each["steps"]} for each in found]
    if px.Plan(**cases.STEPS[pair]).devices % len(found):
        assert not any(name in each for each in ran), "not a plan for so many processes"
        return
    apart = [each[name] for each in ran]
    assert all(each < 1e-10 for each in apart), apart


@pytest.mark.parametrize("pair", cases.QUICK_STEPS, ids="-".join)
def test_steps_as_by_hand(ran, pair):
    """To 1e-10 of steps written by hand, in every process."""
    check_steps(ran[0], pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", cases.STEPS, ids="-".join)
def test_all_steps_as_by_hand(ran_more, pair):
    check_steps(ran_more[0], pair)


def check_fit(found, folder, name, tmp_path):
    plan = px.Plan(batch_dim="major", chunk=1) if "members" in name else px.Plan()
    alone = cases.outcome(cases.fit(name, plan, output=tmp_path / name))
    found = [{**each.get("more_fits", {}), **each["fits"]}[name] for each in found]
    for got in found:
        assert got["steps"] == alone["steps"]
        assert got.pop("own") < 1e-12
        for key, want in alone.items():
            if key == "own":
                continue
            leaves = (got[key], want) if key == "params" else ([got[key]], [want])
            both = [[np.asarray(leaf) for leaf in each] for each in leaves]
            assert models.max_rel_error(*both) < 1e-10, key
    assert all(each == found[0] for each in found), "the processes differ"
    logged, wanted = (
        [(row["kind"], row["step"]) for row in read_rows(path / name / "metrics.jsonl")]
        for path in (folder, tmp_path)
    )
    assert logged == wanted, "one process logs, once"


@pytest.mark.parametrize("name", cases.QUICK_FITS)
def test_fit_as_in_one_process(ran, x64, name, tmp_path):
    """To 1e-10 of the same run on one device; every process has the whole result."""
    check_fit(*ran, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.FITS)
def test_every_fit_as_in_one_process(ran_more, x64, name, tmp_path):
    check_fit(*ran_more, name, tmp_path)


def test_each_process_gives_its_own_rows(ran, x64):
    """The batch is theirs in the order of the processes; the shortest of them ends an epoch."""
    batches = [{key: rows[at : at + 16] for key, rows in cases.ROWS.items()} for at in (0, 16, 32)]
    alone = px.fit(
        models.mlp_task(dtype=np.float64), models.optimizer(), batches, epochs=2, progress=False
    )
    wanted = [np.ravel(leaf) for leaf in jax.tree.leaves(alone.state.params)]
    for each in [each["shares"] for each in ran[0]]:
        assert models.max_rel_error([np.asarray(leaf) for leaf in each["params"]], wanted) < 1e-10
        refused, shared = each["said"]
        assert "and its share is 8. With local_batches=True" in refused
        assert "rows of its own need rows that each of the 2 processes has" in shared


@pytest.mark.slow
def test_callbacks_as_in_one_process(tmp_path, x64):
    """All processes call them; one of them ends the run in all, and all find the best state."""
    (tmp_path / "alone").mkdir()
    found = [each["called"] for each in gang.run(2, 2, "called", tmp_path)]
    alone = cases.called(tmp_path / "alone")
    assert (alone["steps"], alone["stopped"]) == (
        8, "EarlyStopping('eval_loss', patience=1)",
    )  # fmt: skip
    assert found[0] == found[1]
    for name in ("best", "average", "history"):
        for got, want in zip(found[0][name], alone[name], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10)
    assert (found[0]["steps"], found[0]["stopped"]) == (alone["steps"], alone["stopped"])


@pytest.mark.slow
def test_populations_as_in_one_process(tmp_path, x64):
    """A sweep, halving, members that join a run, and one of them exported."""
    (tmp_path / "alone").mkdir()
    found = gang.run(2, 2, "populations", tmp_path)
    alone = cases.populations(tmp_path / "alone")
    for each in [each["populations"] for each in found]:
        assert "num_parallel=2 is for one process, and there are 2" in each["refused"]
        for name in ("losses", "grown"):
            np.testing.assert_allclose(each[name], alone[name], rtol=1e-10)
        for name in ("scores", "exported"):
            for got, want in zip(each[name], alone[name], strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.slow
def test_verify_runs_there_too(ran_more):
    found = [each["verifies"] for each in ran_more[0]]
    assert all(each["ok"] for each in found), found[0]["text"]


# --- Checkpoints ------------------------------------------------------------------------------


def pairs(kinds):
    """Plans of which one restores what the other has saved: members from members alone."""
    every = itertools.product(kinds, kinds)
    return {pair for pair in every if ("members" in pair) == (pair == ("members", "members"))}


def test_one_process_restores_what_several_saved(ran, x64):
    found, folder = ran
    prints = found[0]["saves"]
    assert all(each["saves"] == prints for each in found), "fingerprints depend on the process"
    got = cases.restores(None, 2, ",".join(cases.QUICK_MATRIX), str(folder))
    assert {tuple(name.rsplit(" ", 2)[1:]) for name in got} == pairs(cases.QUICK_MATRIX)
    for name, restored in got.items():
        assert restored == prints[name.rsplit(" ", 2)[1]], name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders that 1, 2 and 3 processes saved into, and the fingerprints of what they saved."""
    found = {}
    for count in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"saved{count}")
        devices = 2 if count == 1 else count
        arguments = (devices, ",".join(cases.MATRIX))
        each = gang.run(count, devices // count, "saves", folder, *arguments)
        assert all(one == each[0] for one in each), "fingerprints depend on the process"
        found[str(folder)] = each[0]["saves"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_restore_matrix(saved, tmp_path, count):
    """What any number of processes saved under any plan, any number restores under any other."""
    devices = 2 if count == 1 else count
    arguments = (devices, ",".join(cases.MATRIX), *saved)
    found = gang.run(count, devices // count, "restores", tmp_path, *arguments)
    for each in [one["restores"] for one in found]:
        assert len(each) == 17 * len(saved) == len(pairs(cases.MATRIX)) * len(saved)
        for name, prints in each.items():
            folder, other, _ = name.rsplit(" ", 2)
            assert prints == saved[folder][other], name


def test_the_tables_have_plans_across_processes():
    """Of each parallelism one whose axis has exactly as many devices as there are processes."""
    plans = [px.Plan(**fields) for fields in cases.STEPS.values()]
    across = {axis for plan in plans if plan.devices == 2 for axis, n in plan.axes.items() if n > 1}
    assert across == {"member", "data", "pipeline", "context", "tensor"}
