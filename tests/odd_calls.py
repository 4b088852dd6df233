"""Every public function and class with arguments that work, into which odd values are put."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plurax as px
from plurax.train import ArrayData, StreamData


class Call(NamedTuple):
    """A public function, with arguments that work."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


def call(function, /, **arguments):
    return Call(function, arguments)


def init(key):
    return {"w": jax.random.normal(key, (3,))}


def loss(params, batch, keys):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def predict(params, inputs):
    return inputs["x"] @ params["w"]


def calls() -> dict[str, Call]:
    """Return the public functions, the classes that users make, and their methods."""
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    data = {"x": x, "y": x.sum(axis=1)}
    task = px.Task(init=init, loss=loss, predict=predict)
    optimizer = optax.sgd(0.1)
    plan = px.Plan()
    program = px.compile(task, optimizer, plan, data)
    state = program.init()
    machine = px.Machine.preset("8xA100-80GB")
    members = px.Members(2)
    many = px.compile(task, optimizer, plan, data, members=members)
    population = many.init()
    probabilities = np.full((4, 3), 1 / 3, np.float32)
    labels = np.zeros(4, np.int32)
    estimate = px.estimate(task, optimizer, plan, data, machine)
    rows = [
        {"kind": "epoch", "step": n, "epoch": n, "loss": 1.0 / n, "lr": 0.1 * n} for n in (1, 2)
    ]
    schedule = px.pipeline.gpipe(2, 2)
    sharding = px.sharding.TensorSharding.of("data", None)
    axes = px.sharding.Axes({"data": 2})
    calibrations = {"a": px.ensemble.calibration(probabilities, labels)}
    common = {"task": task, "optimizer": optimizer, "plan": plan}
    fit = {"task": task, "optimizer": optimizer, "data": data, "batch_size": 8, "progress": False}
    level = px.analysis.Level("node", 8, 1e9)
    return {
        "plurax.Checkpoints": call(px.Checkpoints, directory="saved", keep=3),
        "plurax.Experiment": call(px.Experiment, task=task, optimizer=optimizer, data=data),
        "plurax.Machine": call(
            px.Machine,
            name="m",
            flops={"float32": 1e12},
            memory=1e9,
            memory_bandwidth=1e11,
            levels=[level],
        ),
        "plurax.Machine.product_seconds": call(
            machine.product_seconds, m=1, n=2, k=3, dtype="float32", batch=1
        ),
        "plurax.Machine.traffic_seconds": call(machine.traffic_seconds, bytes=1.0),
        "plurax.Machine.collective_seconds": call(
            machine.collective_seconds, kind="all-reduce", bytes_sent=1.0, group_size=2, stride=1
        ),
        "plurax.Machine.uneven": call(
            px.Machine.uneven,
            name="u",
            groups=[(4, px.Machine.preset("A100-80GB")), (4, px.Machine.preset("A100-80GB"))],
            levels=[level],
        ),
        "plurax.Machine.rates_of": call(machine.rates_of, devices=[0, 1]),
        "plurax.Machine.from_toml": call(px.Machine.from_toml, text=machine.to_toml(), source="m"),
        "plurax.Machine.save": call(machine.save, path="machine.toml"),
        "plurax.Machine.load": call(px.Machine.load, path="machine.toml"),
        "plurax.Machine.preset": call(px.Machine.preset, name="8xA100-80GB", nodes=1),
        "plurax.Members": call(px.Members, seeds=3, hyper={"a": [1.0, 2.0, 3.0]}),
        "plurax.Members.take": call(members.take, indices=[0]),
        "plurax.Members.hyper_of": call(members.hyper_of, member=0),
        "plurax.Members.seed_of": call(members.seed_of, member=0),
        "plurax.Members.epoch_length": call(members.epoch_length, rows=4),
        "plurax.Members.arrays": call(members.arrays, rows=4),
        "plurax.Plan": call(px.Plan),
        "plurax.Plan.check_devices": call(plan.check_devices, available=8),
        "plurax.Plan.explain": call(plan.explain, batch_size=8),
        "plurax.Plan.padded_size": call(plan.padded_size, batch_size=8),
        "plurax.Plan.from_toml": call(px.Plan.from_toml, text="data = 2", source="p"),
        "plurax.Plan.save": call(plan.save, path="plan.toml"),
        "plurax.Plan.load": call(px.Plan.load, path="plan.toml"),
        "plurax.Program.of": call(many.of, members=members),
        "plurax.Program.init": call(program.init, seed=0),
        "plurax.Program.place": call(program.place, state=state),
        "plurax.Program.to_canonical": call(program.to_canonical, state=state),
        "plurax.Program.from_canonical": call(
            program.from_canonical, state=program.to_canonical(state)
        ),
        "plurax.Program.step": call(
            lambda state=None, batch=None: program.step(
                program.init() if state is None else state, batch
            ),
            batch=data,
        ),
        "plurax.Program.step(state)": call(
            lambda state: program.step(state, data), state=program.init()
        ),
        "plurax.Program.gradients": call(program.gradients, state=state, batch=data, first=0),
        "plurax.Program.apply": call(
            lambda gradients: program.apply(program.init(), gradients),
            gradients=program.gradients(state, data),
        ),
        "plurax.Program.place_batch": call(program.place_batch, batch=data, local=False),
        "plurax.Program.place_data": call(program.place_data, data=data, spread=False),
        "plurax.Program.predict": call(program.predict, state=state, inputs=data, chunk=8),
        "plurax.Program.evaluate": call(program.evaluate, state=state, data=data),
        "plurax.Program.check_evaluation": call(program.check_evaluation, data=data),
        "plurax.train.Rollback": call(px.train.Rollback),
        "plurax.Servers": call(px.Servers),
        "plurax.Task": call(px.Task, init=init, loss=loss),
        "plurax.compile": call(px.compile, **common, batch=data),
        "plurax.estimate": call(px.estimate, **common, batch=data, machine=machine),
        "plurax.weights.export_predict": call(
            px.weights.export_predict, program=program, state=state, inputs=data, path="out.jax"
        ),
        "plurax.analysis.fastest_batch_size": call(
            px.analysis.fastest_batch_size, **common, example=data, max_size=2, repeats=1
        ),
        "plurax.fit": call(px.fit, **fit),
        "plurax.longest": call(
            px.longest,
            task=px.Task(init=init, loss=lambda params, batch, keys: batch["x"].mean(1)),
            optimizer=optimizer,
            batch={"x": jax.ShapeDtypeStruct((2, 8), "float32")},
            machine=machine,
            plan=plan,
            memory=1000,
        ),
        "plurax.freeze": call(
            lambda task, patterns: px.freeze(task, patterns), task=task, patterns="w"
        ),
        "plurax.analysis.max_batch_size": call(
            px.analysis.max_batch_size, **common, example=data, memory=10**6
        ),
        "plurax.sharding.name": call(px.sharding.name, x=x, text="name"),
        "plurax.over_batch": call(
            px.over_batch,
            outputs=lambda params, batch, keys: batch,
            losses=lambda outputs, batch, mask: 0.0,
        ),
        "plurax.per_example": call(px.per_example, f=lambda params, example, key: 0.0),
        "plurax.train.replay": call(
            px.train.replay, task=task, optimizer=optimizer, data=data, output="served"
        ),
        "plurax.search": call(
            px.search,
            task=task,
            optimizer=optimizer,
            batch=data,
            machine=machine,
            count=1,
            seconds=0.1,
        ),
        "plurax.sharding.shard": call(px.sharding.shard, f=jnp.matmul, strategy=((1, 1), (1, 1))),
        "plurax.stack": call(
            px.stack,
            embed=(init, predict),
            block=(init, lambda p, x, k: x),
            head=(init, lambda p, x, b: x),
            depth=2,
        ),
        "plurax.pipeline.stage_boundary": call(px.pipeline.stage_boundary, x=x),
        "plurax.start_from": call(px.start_from, task=task, weights={"w": x[0]}),
        "plurax.sweep": call(
            px.sweep,
            task=lambda width: task,
            optimizer=optimizer,
            data=data,
            members=members,
            shapes=[{"width": 1}],
            batch_size=8,
            progress=False,
        ),
        "plurax.verify": call(px.verify, **common, batch=data, steps=1, seed=0),
        "plurax.analysis.Level": call(px.analysis.Level, name="node", devices=8, bandwidth=1e9),
        "plurax.analysis.Comparison": call(px.analysis.Comparison, first=estimate, second=estimate),
        "plurax.analysis.Estimate.seconds_for": call(estimate.seconds_for, examples=1.0),
        "plurax.analysis.Estimate.device_hours": call(estimate.device_hours, examples=1.0),
        "plurax.analysis.draw_estimates": call(
            px.analysis.draw_estimates, estimates={"a": estimate}, path="a.png"
        ),
        "plurax.analysis.draw_servers": call(
            px.analysis.draw_servers, runs={"a": []}, path="a.png"
        ),
        "plurax.analysis.draw_workers": call(
            px.analysis.draw_workers, output="served", path="a.png"
        ),
        "plurax.topology": call(px.topology, name="8xH10"),
        "plurax.analysis.compiled_for": call(
            px.analysis.compiled_for, **common, batch=data, machine="8xH10"
        ),
        "plurax.analysis.planned": call(px.analysis.planned, **common, batch=data),
        "plurax.analysis.write_report": call(
            px.analysis.write_report, runs="run", output="report.html"
        ),
        "plurax.callbacks.Csv": call(px.callbacks.Csv, path="a.csv"),
        "plurax.callbacks.EarlyStopping": call(px.callbacks.EarlyStopping, metric="loss"),
        "plurax.callbacks.Ema": call(px.callbacks.Ema),
        "plurax.callbacks.JsonLines": call(px.callbacks.JsonLines, path="a.jsonl"),
        "plurax.callbacks.KeepBest": call(px.callbacks.KeepBest),
        "plurax.callbacks.LearningRate": call(px.callbacks.LearningRate),
        "plurax.callbacks.Mlflow": call(px.callbacks.Mlflow),
        "plurax.callbacks.Profile": call(px.callbacks.Profile),
        "plurax.callbacks.ReduceOnPlateau": call(px.callbacks.ReduceOnPlateau, metric="eval_loss"),
        "plurax.callbacks.TensorBoard": call(px.callbacks.TensorBoard, directory="tb"),
        "plurax.callbacks.Wandb": call(px.callbacks.Wandb),
        "plurax.ensemble.accuracy": call(
            px.ensemble.accuracy, probabilities=probabilities, labels=labels
        ),
        "plurax.ensemble.brier": call(
            px.ensemble.brier, probabilities=probabilities, labels=labels
        ),
        "plurax.ensemble.calibration": call(
            px.ensemble.calibration, probabilities=probabilities, labels=labels
        ),
        "plurax.ensemble.combine_classification": call(
            px.ensemble.combine_classification, outputs=probabilities[None]
        ),
        "plurax.ensemble.combine_regression": call(
            px.ensemble.combine_regression, means=probabilities[None]
        ),
        "plurax.ensemble.draw_confidence": call(
            px.ensemble.draw_confidence,
            panels={"a": np.ones((2, 2), np.float32)},
            extent=(0.0, 1.0, 0.0, 1.0),
            points=np.ones((2, 2), np.float32),
            labels=labels[:2],
            path="a.png",
        ),
        "plurax.ensemble.draw_parallel": call(
            px.ensemble.draw_parallel, rows=rows, names=["lr"], metric="loss", path="a.png"
        ),
        "plurax.ensemble.draw_reliability": call(
            px.ensemble.draw_reliability, calibrations=calibrations, path="a.png"
        ),
        "plurax.ensemble.export_member": call(px.ensemble.export_member, state=population, index=0),
        "plurax.ensemble.fit_temperature": call(
            px.ensemble.fit_temperature, logits=probabilities, labels=labels
        ),
        "plurax.ensemble.grid": call(lambda width: px.ensemble.grid(width=width), width=[1]),
        "plurax.ensemble.join_members": call(
            lambda states: px.ensemble.join_members(states), states=population
        ),
        "plurax.ensemble.kfold": call(px.ensemble.kfold, folds=3),
        "plurax.ensemble.log_uniform": call(px.ensemble.log_uniform, low=1, high=2),
        "plurax.ensemble.uniform": call(px.ensemble.uniform, low=1, high=2),
        "plurax.ensemble.max_members": call(
            px.ensemble.max_members, **common, batch=data, memory=10**6
        ),
        "plurax.ensemble.nll": call(px.ensemble.nll, probabilities=probabilities, labels=labels),
        "plurax.ensemble.save_calibration": call(
            px.ensemble.save_calibration, directory="cal", calibrations=calibrations
        ),
        "plurax.ensemble.subsample": call(px.ensemble.subsample, sizes=0.5),
        "plurax.ensemble.successive_halving": call(
            px.ensemble.successive_halving,
            task=task,
            optimizer=optimizer,
            data=data,
            members=members,
            batch_size=8,
            epochs=2,
            progress=False,
        ),
        "plurax.ensemble.take_members": call(
            px.ensemble.take_members, state=population, indices=[0]
        ),
        "plurax.ensemble.tune": call(
            px.ensemble.tune,
            task=task,
            optimizer=optimizer,
            data=data,
            members=members,
            batch_size=8,
        ),
        "plurax.metrics.accuracy": call(
            px.metrics.accuracy, predicted=jnp.asarray(labels), labels=jnp.asarray(labels)
        ),
        "plurax.metrics.auc": call(
            px.metrics.auc, scores=jnp.asarray(probabilities[:, 0]), labels=labels
        ),
        "plurax.metrics.confusion_matrix": call(
            px.metrics.confusion_matrix,
            predicted=jnp.asarray(labels),
            labels=jnp.asarray(labels),
            classes=3,
        ),
        "plurax.metrics.f1": call(
            px.metrics.f1, predicted=jnp.asarray(probabilities[:, 0]), labels=labels
        ),
        "plurax.metrics.mean": call(px.metrics.mean, values=jnp.asarray(probabilities[:, 0])),
        "plurax.metrics.perplexity": call(
            px.metrics.perplexity, losses=jnp.asarray(probabilities[:, 0])
        ),
        "plurax.metrics.precision": call(
            px.metrics.precision, predicted=jnp.asarray(probabilities[:, 0]), labels=labels
        ),
        "plurax.metrics.r2": call(
            px.metrics.r2,
            predicted=jnp.asarray(probabilities[:, 0]),
            targets=jnp.asarray(probabilities[:, 0]),
        ),
        "plurax.metrics.recall": call(
            px.metrics.recall, predicted=jnp.asarray(probabilities[:, 0]), labels=labels
        ),
        "plurax.pipeline.Action.parse": call(px.pipeline.Action.parse, text="F0"),
        "plurax.pipeline.LayerAssignment": call(
            px.pipeline.LayerAssignment, counts=(1, 1), devices=2
        ),
        "plurax.pipeline.Schedule.parse": call(
            px.pipeline.Schedule.parse, lines=["F0 B0"], name="a"
        ),
        "plurax.pipeline.check_schedule": call(
            px.pipeline.check_schedule, schedule=schedule, stored=2
        ),
        "plurax.pipeline.draw_schedules": call(
            px.pipeline.draw_schedules, schedules=[schedule], path="a.png"
        ),
        **{
            f"plurax.pipeline.{name}": call(
                getattr(px.pipeline, name), devices=2, microbatches=2, chunks=chunks
            )
            for name, chunks in (
                ("gpipe", 1),
                ("interleaved", 2),
                ("one_f_one_b", 1),
                ("zb_h1", 1),
                ("eager_one_f_one_b", 1),
            )
        },
        "plurax.pipeline.make_schedule": call(
            px.pipeline.make_schedule, given="gpipe", devices=2, microbatches=2
        ),
        "plurax.pipeline.simulate": call(px.pipeline.simulate, schedule=schedule),
        "plurax.sharding.Axes": call(px.sharding.Axes, sizes={"data": 2}),
        "plurax.sharding.TensorSharding": call(px.sharding.TensorSharding, dims=(("data",), ())),
        "plurax.sharding.TensorSharding.of": call(
            lambda entry, partial=(): px.sharding.TensorSharding.of(entry, partial=partial),
            entry="data",
        ),
        "plurax.sharding.TensorSharding.replicated": call(
            px.sharding.TensorSharding.replicated, rank=2
        ),
        "plurax.sharding.TensorSharding.from_spec": call(
            px.sharding.TensorSharding.from_spec, spec=jax.P("data"), rank=2
        ),
        "plurax.sharding.TensorSharding.num_shards": call(
            sharding.num_shards, dim=0, axes={"data": 2}
        ),
        "plurax.sharding.TensorSharding.shard_shape": call(
            sharding.shard_shape, shape=(4, 4), axes={"data": 2}
        ),
        "plurax.sharding.TensorSharding.shard_bytes": call(
            sharding.shard_bytes, shape=(4, 4), itemsize=4, axes={"data": 2}
        ),
        "plurax.sharding.TensorSharding.check": call(
            sharding.check, shape=(4, 4), axes={"data": 2}
        ),
        "plurax.sharding.megatron": call(px.sharding.megatron, column=["a"], row=["b"]),
        "plurax.sharding.plan_reshard": call(
            px.sharding.plan_reshard,
            source=sharding,
            target=px.sharding.TensorSharding.of(None, "data"),
            shape=(4, 4),
            itemsize=4,
            axes=axes,
        ),
        "plurax.train.ArrayData": call(ArrayData, arrays=data, batch_size=8),
        "plurax.train.ArrayData.epoch_order": call(ArrayData(data, 8).epoch_order, epoch=0),
        "plurax.train.Position": call(px.train.Position),
        "plurax.train.Position.from_json": call(
            px.train.Position.from_json, values={"epoch": 0, "batch": 0, "iterator": None}
        ),
        "plurax.train.StreamData": call(StreamData, source=[data], batch_size=8),
        "plurax.train.draw_curves": call(px.train.draw_curves, rows=rows, path="a.png"),
        "plurax.weights.labels": call(px.weights.labels, patterns={"*": "a"}),
        "plurax.weights.load": call(px.weights.load, path="a.safetensors"),
        "plurax.weights.save": call(px.weights.save, params={"w": x}, path="a.safetensors"),
    }
