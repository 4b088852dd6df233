"""Folders of runs as `fit` writes them, without training."""

import csv
import json
import math

import plurax as px


def write_run(folder, *, steps=40, epochs=4, members=0, start=2.0, plan=None, **more):
    """Write a run whose loss falls from `start`; `more` goes into `run.toml`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(1, steps + 1):
        loss = start * math.exp(-3 * step / steps)
        epoch = -(-step * epochs // steps)
        row = {"kind": "step", "step": step, "epoch": epoch, "loss": loss, "skipped": 0}
        rows.append(row | {"examples": 16, "weight": 16.0, "grad_norm": loss / 2})
        if step * epochs % steps == 0:
            rows.append(epoch_row(step, epoch, loss, members))
    write_rows(folder, rows)
    (folder / "plan.toml").write_text((plan or px.Plan()).to_toml())
    if more:
        lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
        (folder / "run.toml").write_text("\n".join(lines) + "\n")
    return folder


def epoch_row(step, epoch, loss, members=0):
    """The row of an epoch."""
    row = {"kind": "epoch", "step": step, "epoch": epoch, "loss": loss, "eval_loss": loss * 1.1,
           "eval_accuracy": 1 - loss / 10, "examples": 160, "skipped": 0, "seconds": 0.5,
           "examples_per_second": 320.0}  # fmt: skip
    if members:
        spread = [loss * (1 + 0.1 * one) for one in range(members)]
        row["loss_best"], row["loss_worst"] = spread[0], spread[-1]
        accuracy = [1 - one / 10 for one in spread]
        row["members"] = {"loss": spread, "eval_loss": spread, "eval_accuracy": accuracy}
    return row


def write_rows(folder, rows):
    """Write `metrics.jsonl`."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sweep(path, count=60):
    """Write the table of a sweep, in which the accuracy depends on the learning rate alone."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["bucket", "width", "member", "seed", "learning_rate", "dropout", "loss",
                         "eval_accuracy", "frozen", "seconds"])  # fmt: skip
        for index in range(count):
            rate = 10 ** (-4 + 3 * index / count)
            dropout = (index * 7 % count) / count
            writer.writerow([index % 2, 16 * (1 + index % 2), index, index, rate, dropout,
                             1 - index / count, index / count, False, 0.1])  # fmt: skip
