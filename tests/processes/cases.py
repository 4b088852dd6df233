"""What the processes of a gang do in tests: `python -m tests.processes.cases CASE,CASE FOLDER ...`.

Each process writes what the cases return to `FOLDER/found.INDEX.json`.
"""

import dataclasses
import json
import os
import sys
import unittest.mock
import warnings
from pathlib import Path

import plurax as px

# Together in a test's process, this module is imported for its tables alone.
if __name__ == "__main__":
    px.initialize()

import jax
import numpy as np
import optax

from plurax.checkpoint.manager import state_fingerprints
from plurax.distributed.global_arrays import fetch
from tests import models
from tests.zoo import by_hand
from tests.zoo.test_zoo import MODELS, task

SIZES = (7, 4)

STEPS = {
    ("vision transformer", "data=2"): {"data": 2, "microbatches": 2},
    ("gru", "data=8"): {"data": 8},
    ("diffusion", "uneven"): {"data": 4, "microbatches": (3, 1, 2, 1)},
    ("recommender", "zero 3"): {"data": 8, "zero": 3},
    ("unet", "zero 2"): {"data": 4, "zero": 2, "microbatches": 2},
    ("pinn", "tensor across"): {"tensor": 2},
    ("vision transformer", "tensor across"): {"tensor": 2},
    ("vision transformer", "context across"): {
        "context": 2, "context_strategy": "ring", "stream": 1, "zero": 1,
    },
    ("branch", "pipeline across"): {"pipeline": 2, "microbatches": 2},
    ("fourier", "data and tensor"): {"data": 4, "tensor": 2},
    ("autoregressive", "pipeline and tensor"): {
        "pipeline": 2, "tensor": 2, "microbatches": 2, "schedule": "zb-h1",
    },
    ("experts", "data and pipeline"): {"data": 2, "pipeline": 2, "microbatches": 2, "zero": 1},
    ("neural ode", "members across"): {"member": 2, "chunk": 1, "batch_dim": "major"},
    ("graph", "members and zero"): {"member": 2, "data": 2, "zero": 1, "chunk": 1},
}  # fmt: skip
"""Networks of the zoo, each under a plan across processes. Of as few devices as processes, the
plan takes one of each: then `context`, `tensor`, `pipeline` and `member` are across hosts."""

QUICK_STEPS = [("recommender", "zero 3"), ("branch", "pipeline across")]
"""Those of a default run."""

ROWS = models.data(50, dtype=np.float64)
FITS = {
    "resident": {"plan": {"data": 4}},
    "streamed": {"plan": {"data": 4, "microbatches": 2}, "resident": False},
    "uneven": {"plan": {"data": 4, "microbatches": (1, 3, 1, 2)}, "resident": False},
    "zero": {"plan": {"data": 4, "zero": 3}, "batch_size": 14},
    "batches": {"plan": {"data": 4}, "batches": True},
    "members": {"plan": {"member": 4, "batch_dim": "major"}, "members": 6},
    "tuned": {"plan": {"data": 4, "zero": 3}, "tuned": True},
    "spread": {"plan": {"data": 4}, "spread": True},
    "members of one batch": {
        "plan": {"member": 2, "data": 2, "batch_dim": "major"}, "members": 3, "resident": False,
    },
}  # fmt: skip
"""Ways to train 50 rows; batches of 16 leave a ragged last one."""


QUICK_FITS = ["streamed", "spread", "members"]


def fit(name, plan=None, **options):
    """One of the runs, under its plan or another."""
    fields = {"batch_size": 16, **FITS[name]}
    plan = plan or px.Plan(**fields.pop("plan"))
    fields.pop("plan", None)
    if count := fields.pop("members", 0):
        fields["members"] = px.Members(count, resample=resampled(name))
    data = ROWS
    if fields.pop("spread", False) and jax.process_count() > 1:
        options["resident"] = True
        px_fits = "plurax.loop.iterate.fits"
        with unittest.mock.patch(px_fits, lambda program, arrays, parts=1: parts > 1):
            return trained(data, plan, fields, options)
    if fields.pop("batches", False):
        data = [{key: rows[at : at + 16] for key, rows in ROWS.items()} for at in range(0, 50, 16)]
    return trained(data, plan, fields, options)


def confusion(params, batch):
    found = models.logits(params, batch["x"]).argmax(-1)
    return {"confusion": px.metrics.confusion_matrix(found, batch["y"], models.CLASSES)}


def trained(data, plan, fields, options):
    task = dataclasses.replace(models.mlp_task(dtype=np.float64), metrics=confusion)
    if fields.pop("tuned", False):
        start = np.linspace(-1, 1, 5 * 16).reshape(5, 16)
        task = px.freeze(px.start_from(task, {"hidden": start}, strict=False), "hidden")
    return px.fit(
        task, models.optimizer(), data, plan=plan, epochs=3,
        evaluation=ROWS, progress=False, **{**fields, **options},
    )  # fmt: skip


def resampled(name):
    if FITS[name].get("resident") is False:
        return px.Members(1).resample
    return px.ensemble.bootstrap()


def own_batches(index, count):
    """Full batches of 16 rows, of which each process gives its own; one process has one more."""
    share = 16 // count
    starts = [at + share * index for at in range(0, 48, 16)]
    own = [{key: rows[at : at + share] for key, rows in ROWS.items()} for at in starts]
    return own + [models.cut(own[0], share)] * (index == 1)


# --- Cases ------------------------------------------------------------------------------------


def steps(_folder):
    """The difference of each network's steps from steps by hand, on a device of its own."""
    return {"/".join(pair): _apart(*pair) for pair in shared(QUICK_STEPS)}


def shared(pairs):
    """Those under plans that all processes share equally."""
    devices = {pair: px.Plan(**STEPS[pair]).devices for pair in pairs}
    return [pair for pair in pairs if devices[pair] % jax.process_count() == 0]


def more_steps(_folder):
    """The same of the other networks."""
    return {"/".join(pair): _apart(*pair) for pair in shared(STEPS) if pair not in QUICK_STEPS}


def _apart(name, planned):
    model, fields = MODELS[name], STEPS[name, planned]
    plan = px.Plan(**fields, shardings=model.rules if fields.get("tensor", 1) > 1 else ())
    members = px.Members(2) if "members" in planned else None
    batches = model.batches(SIZES)
    program = px.compile(task(model), by_hand.optimizer(), plan, batches[0], members=members)
    state = program.init() if members else program.init(seed=0)
    rows = []
    for batch in batches:
        state, metrics = program.step(state, batch)
        rows.append(fetch(metrics))
    state = program.to_canonical(state)
    got = fetch((state.params, state.opt_state, state.model_state))
    microbatches = plan.microbatches if model.coupled else 1
    worst = 0.0
    for seed in range(2 if members else 1):
        state, expected = by_hand.trainer(model, microbatches)(SIZES, seed)
        mine = jax.tree.map(lambda leaf: leaf[seed], got) if members else got  # noqa: B023
        worst = max(worst, models.max_rel_error(mine, state))
        for row, want in zip(rows, expected, strict=True):
            row = {key: value[seed] for key, value in row.items()} if members else row
            both = [{key: np.asarray(each[key], float) for key in want} for each in (row, want)]
            worst = max(worst, models.max_rel_error(*both))
    return worst


def fits(folder):
    """Runs of `fit`, each with what it predicts and evaluates; nothing but JSON."""
    return {name: outcome(fit(name, output=Path(folder, name))) for name in QUICK_FITS}


def more_fits(folder):
    """The other runs."""
    others = [name for name in FITS if name not in QUICK_FITS]
    return {name: outcome(fit(name, output=Path(folder, name))) for name in others}


def outcome(result):
    """What must be equal however many processes train: history, parameters, outputs."""
    program, state = result.program, result.state
    parts = list(program.predict(state, iter([ROWS, models.cut(ROWS, 3)])))
    return {
        "params": [leaf.ravel().tolist() for leaf in jax.tree.leaves(fetch(state.params))],
        "history": [row["loss"] for row in result.history],
        "evaluation": [row["eval_loss"] for row in result.history],
        "outputs": np.ravel(program.predict(state, ROWS)).tolist(),
        "streamed": np.concatenate([np.ravel(part) for part in parts]).tolist(),
        "own": own_outputs(result),
        "means": np.ravel(program.evaluate(state, [ROWS])["loss"]).tolist(),
        "confusion": np.ravel(program.evaluate(state, [ROWS])["confusion"]).tolist(),
        "steps": state.steps_taken,
    }


def called(folder):
    """A run with callbacks, which one of them ends: the best state, the average, the reason."""
    best, average = px.callbacks.KeepBest("eval_loss"), px.callbacks.Ema(0.9)
    stopping = px.callbacks.EarlyStopping("eval_loss", patience=1, min_delta=1e9)
    result = px.fit(
        models.mlp_task(dtype=np.float64), models.optimizer(), ROWS, batch_size=16, epochs=5,
        plan=px.Plan(data=4, zero=3), evaluation=ROWS, output=Path(folder, "called"),
        callbacks=[stopping, best, average], progress=False,
    )  # fmt: skip
    state = result.program.to_canonical(best.restore(result.program))
    trees = {"best": state.params, "average": average.params(result.state)}
    leaves = {name: jax.tree.leaves(fetch(one)) for name, one in trees.items()}
    return {
        **{name: [leaf.ravel().tolist() for leaf in every] for name, every in leaves.items()},
        "stopped": result.stopped.partition(":")[0],
        "steps": result.state.steps_taken,
        "history": [[row["eval_loss"], row["eval_ema_loss"]] for row in result.history],
    }


def shares(folder):
    """A run of which each process gives its own rows; and what is refused."""
    from plurax.distributed.process_group import open_group

    group = open_group()
    task, rule = models.mlp_task(dtype=np.float64), models.optimizer()
    data = own_batches(group.index, group.count)
    options = {"epochs": 2, "progress": False, "local_batches": True}
    whole = px.fit(task, rule, data, plan=px.Plan(data=4), output=Path(folder, "shares"), **options)
    said = []
    for fields, given in (
        ({"plan": px.Plan(data=4)}, [models.cut(batch, 3 + group.index) for batch in data]),
        ({"plan": px.Plan(data=2, microbatches=3)}, data),
    ):
        try:
            px.fit(task, rule, given, batch_size=16, **fields, **options)
        except px.errors.PluraxError as error:
            said.append(str(error))
    group.close()
    leaves = jax.tree.leaves(fetch(whole.state.params))
    return {"params": [leaf.ravel().tolist() for leaf in leaves], "said": said}


def own_outputs(result):
    """The largest difference of the outputs for a process's own inputs from those of all."""
    program, state = result.program, result.state
    count, index = jax.process_count(), jax.process_index()
    if program.members is not None or count == 1:
        return 0.0
    own = {key: rows[index::count][: 20 + 3 * index] for key, rows in ROWS.items()}
    whole = program.predict(state, ROWS)[index::count][: 20 + 3 * index]
    return float(np.max(np.abs(program.predict(state, own, chunk=8, local=True) - whole)))


def populations(folder):
    """A sweep, halving, members that join a run, and one of them exported."""
    task, rule = models.mlp_task(dtype=np.float64), lambda hyper: optax.adam(hyper["rate"])
    members = px.Members(4, {"rate": [1e-4, 1e-1, 1e-2, 1e-3]})
    plan = px.Plan(member=2, chunk=2, batch_dim="major")
    common = {"plan": plan, "evaluation": ROWS, "progress": False, "batch_size": 16}
    table = px.sweep(
        task, rule, ROWS, members=members, shapes=[{"batch_size": 16}], epochs=2,
        output=Path(folder, "sweep"), **{**common, "batch_size": None},
    )  # fmt: skip
    halved = px.ensemble.successive_halving(
        task, rule, ROWS, members=members, min_epochs=1, epochs=2, reduction=2, **common
    )
    runs = [
        px.fit(
            task, rule, ROWS, members=members.take(range(count)), epochs=2, resume=True,
            output=Path(folder, "grown"), **common,
        )
        for count in (3, 4)
    ]  # fmt: skip
    one = px.ensemble.export_member(runs[1].state, 2)
    said = ""
    try:
        px.sweep(task, rule, ROWS, members=members, shapes=[{}], num_parallel=2, **common)
    except px.errors.PlanError as error:
        said = str(error)
    leaves = jax.tree.leaves(jax.device_get(one.params))
    return {
        "losses": [row["eval_loss"] for row in table.rows],
        "scores": [rung.scores for rung in halved.rungs],
        "grown": np.ravel(runs[1].program.evaluate(runs[1].state, ROWS)["loss"]).tolist(),
        "exported": [np.ravel(leaf).tolist() for leaf in leaves],
        "refused": said,
    }


def verifies(_folder):
    """What `verify` finds."""
    found = px.verify(
        models.mlp_task(dtype=np.float64), models.optimizer(), px.Plan(data=4, zero=1),
        models.cut(ROWS, 16),
    )  # fmt: skip
    return {"ok": bool(found.ok), "text": str(found)}


MATRIX = {
    "data": lambda n: {"data": n},
    "zero": lambda n: {"data": n, "zero": 3},
    "tensor": lambda n: {"tensor": n, "shardings": {"*/hidden": (..., "tensor")}},
    "pipeline": lambda n: {"pipeline": n, "microbatches": 2},
    "members": lambda n: {"member": n, "chunk": 1, "batch_dim": "major"},
}
"""Plans for `n` devices."""


QUICK_MATRIX = ["zero", "pipeline", "members"]
"""Those of a default run."""


def compiled(kind, devices):
    plan = px.Plan(**MATRIX[kind](devices))
    members = px.Members(6) if kind == "members" else None
    stack = models.perceptron_stack(np.float64, depth=6)
    batch = models.cut(ROWS, 12)
    program = px.compile(stack, optax.adam(1e-2), plan, batch, members=members)
    return program, (program.init() if members else program.init(seed=0)), batch


def saves(folder, devices="2", kinds=None):
    """Save the state after two steps under some plans; return its fingerprints."""
    found = {}
    for kind in kinds.split(",") if kinds else QUICK_MATRIX:
        program, state, batch = compiled(kind, int(devices))
        for _ in range(2):
            state, _ = program.step(state, batch)
        state = program.to_canonical(state)
        with px.Checkpoints(Path(folder, kind)) as checkpoints:
            checkpoints.save(state, {"kind": kind})
        found[kind] = state_fingerprints(state)
    return found


def restores(_folder, devices, kinds, *saved):
    """Restore what others saved under each plan that can; return the fingerprints."""
    found = {}
    for kind in kinds.split(","):
        program, _, batch = compiled(kind, int(devices))
        for folder in saved:
            for other in kinds.split(","):
                if (kind == "members") != (other == "members"):
                    continue
                checkpoints = px.Checkpoints(Path(folder, other))
                state, meta = checkpoints.restore(program.canonical_shapes)
                checkpoints.close()
                assert meta == {"kind": other}
                placed = program.place(state)
                prints = state_fingerprints(program.to_canonical(placed))
                program.step(placed, batch)
                found[f"{folder} {other} {kind}"] = prints
    return found


CASES = {
    case.__name__: case
    for case in (
        steps,
        more_steps,
        fits,
        called,
        more_fits,
        shares,
        populations,
        verifies,
        saves,
        restores,
    )
}


def main(cases, folder, *arguments):
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sharding info not provided", UserWarning)
    warnings.simplefilter("ignore", px.errors.ShardingWarning)
    found = {case: CASES[case](folder, *arguments) for case in cases.split(",")}
    index = os.environ["PLURAX_PROCESS"]
    Path(folder, f"found.{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
