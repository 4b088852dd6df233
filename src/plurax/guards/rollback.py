"""Roll a run back to a good checkpoint after bad steps in a row, and skip their data.

The decision is a function of the losses alone, so a run that is killed and resumed decides alike.
Example, `Rollback(after=3)`, checkpoints every 4 steps, batches numbered from 1:

    step      1 2 3 4 5 6 7 8 9 10 11 12        bad: 10, 11 and 12
    batch     1 2 3 4 5 6 7 8 9 10 11 12        checkpoints: 4 and 8
    step 9    good; it is the 9th in a row, so the checkpoints up to step 9 - 3 = 6 are proven good
    step 12   the third bad one in a row: back to the state of step 4, on to batch 13
    step      1 2 3 4 5  6  7
    batch     1 2 3 4 13 14 15                  batches 5 to 12 are skipped

What was decided is kept in `rollbacks.jsonl`, written before anything else changes; a checkpoint
records how many of them lie behind it. A kill at any moment therefore leaves a folder from which
the run goes on as if it had not been killed:

    checkpoint of a step after the target, with fewer rollbacks     abandoned: removed
    checkpoint of the target itself, with fewer rollbacks           its data go on after the window
    checkpoint of an earlier step (the target was damaged)          the rollback is found again

Rolling back past a spike and skipping its data is what Chowdhery et al. did for PaLM (2022, 5.1).
"""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from plurax import errors
from plurax.checkpoint import Checkpoints
from plurax.disk import log_errors, replace_file, sync_folder
from plurax.distributed.process_group import ProcessGroup
from plurax.execute.array_data import Position
from plurax.loop.hook import FetchedHook, RewindHook
from plurax.loop.iterate import StepOutput
from plurax.loop.log_rows import Row
from plurax.loop.run import Run
from plurax.reading import parse_json, refusing
from plurax.run_folder.log import MetricsLog
from plurax.user_frames import warn
from plurax.validate import whole_number

WINDOW = 128
"""Good losses to which the next one is compared."""

FEWEST = 32
"""Good losses before any loss can be a spike."""

FILE = "rollbacks.jsonl"


@dataclasses.dataclass(frozen=True)
class Rollback:
    """When bad steps roll a run back to a checkpoint before them, and how often.

    A step is bad if its update was left out, because its loss or gradient was not finite. With
    `spike` it is bad, too, if its loss is far above the losses before it.

    **Arguments:**

    - `after`: bad steps in a row that roll the run back; 0 for never. As many good steps in a row
      prove the checkpoints before them good, and only to a proven one a run is rolled back.
    - `spike`: a loss is a spike if it is this many standard deviations above the mean of the last
      128 good ones; None for no spikes.
    - `limit`: rollbacks of a run; instead of the next one it stops.

    Raises `BatchError` for other values.
    """

    after: int = 10
    spike: float | None = None
    limit: int = 3

    def __post_init__(self) -> None:
        for name in ("after", "limit"):
            number = whole_number(getattr(self, name), least=0)
            if number is None:
                what = "the number of rollbacks before a run stops"
                if name == "after":
                    what = "the number of bad steps in a row that roll a run back, 0 for never"
                raise errors.BatchError(
                    f"Rollback({name}={getattr(self, name)!r}): give {what}, a whole number ≥ 0."
                )
            object.__setattr__(self, name, number)
        if self.spike is not None and not (
            isinstance(self.spike, int | float) and 0 < self.spike < math.inf
        ):
            raise errors.BatchError(
                f"Rollback(spike={self.spike!r}): give the standard deviations above the mean from "
                "which a loss is a spike, a number above 0 such as 6.0, or None to look for no "
                "spikes."
            )


@dataclasses.dataclass(frozen=True)
class Watch:
    """What the steps so far say.

    **Fields:** `bad` and `good`, steps in a row up to the last one; `proven`, the last step whose
    checkpoint is good; `losses`, the last good ones, where spikes are looked for.
    """

    bad: int = 0
    good: int = 0
    proven: int = -1
    losses: tuple[float, ...] = ()


def observe(rule: Rollback, watch: Watch, step: int, loss: float, *, left_out: bool) -> Watch:
    """Return what is known after one more step."""
    if left_out or is_spike(rule, watch.losses, loss):
        return dataclasses.replace(watch, bad=watch.bad + 1, good=0)
    good = watch.good + 1
    proven = step - rule.after if good >= rule.after else watch.proven
    losses = watch.losses if rule.spike is None else (*watch.losses[1 - WINDOW :], loss)
    return Watch(0, good, proven, losses)


def is_spike(rule: Rollback, losses: tuple[float, ...], loss: float) -> bool:
    """Return whether a loss is a spike after those `losses`."""
    if rule.spike is None or len(losses) < FEWEST:
        return False
    mean = statistics.fmean(losses)
    spread = math.sqrt(statistics.fmean((one - mean) ** 2 for one in losses))
    return loss > mean + rule.spike * spread


def target(checkpoints: Iterable[int], watch: Watch) -> int | None:
    """Return the checkpoint to go back to, by its step; None if none is proven good."""
    return max((step for step in checkpoints if step <= watch.proven), default=None)


class Rollbacks:
    """The rollbacks of a run.

    **Arguments:** `rule`, or None where a run cannot be rolled back; `checkpoints`, None for a run
    that has none, which is never rolled back; `group`, the processes, which all decide alike.

    Raises `CheckpointError` where those of an earlier process cannot be read.
    """

    def __init__(
        self, rule: Rollback | None, checkpoints: Checkpoints | None, group: ProcessGroup
    ) -> None:
        self._rule = rule if rule is not None and rule.after and checkpoints is not None else None
        self._checkpoints, self._group = checkpoints, group
        self._records: list[Row] = []
        self._count = 0  # of those that the state has behind it
        self._watch = Watch()

    # --- While training -----------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them."""
        return {"count": self._count, "watch": dataclasses.asdict(self._watch)}

    def due(
        self,
        fetched: list[StepOutput],
        batches_per_epoch: int | None,
        wait: Callable[[int], None],
    ) -> bool:
        """Return whether the run has to go back; `opening.start` then finds from where.

        **Arguments:** `fetched`, steps whose metrics are on the host; `wait(step)`, which waits
        for the save under way.

        Raises `RunStoppedError` instead of one rollback too many.
        """
        if self._rule is None:
            return False
        assert self._checkpoints is not None
        for output in fetched:
            losses, skipped = (np.atleast_1d(output.metrics[name]) for name in ("loss", "skipped"))
            step = output.step - len(losses)
            for loss, left_out in zip(losses.tolist(), skipped.tolist(), strict=True):
                step += 1
                self._watch = observe(self._rule, self._watch, step, loss, left_out=bool(left_out))
                if self._watch.bad >= self._rule.after:
                    wait(step)
                    back = self._roll_back(step, _position(output, step, batches_per_epoch))
                    if back is not None:
                        return True
        self._checkpoints.proven = self._watch.proven
        return False

    def _roll_back(self, step: int, position: Position) -> int | None:
        """Record a rollback; return its target, None where the run goes on without one."""
        assert self._rule is not None
        assert self._checkpoints is not None
        if len(self._records) >= self._rule.limit:
            listed = "".join(
                f"\n  - at step {one['to']} it went back to step {one['from']}"
                if one["from"] is not None
                else f"\n  - at step {one['to']} no checkpoint was proven good to go back to"
                for one in self._records
            )
            raise errors.RunStoppedError(
                f"training stopped at step {step}, batch {position.batch} of epoch "
                f"{position.epoch + 1}: the last {self._rule.after} steps were bad (their loss or "
                f"gradient was not finite, or a spike), and that was so before:{listed}\nTry a "
                "smaller learning rate, or optax.clip_by_global_norm; look at the data before that "
                "batch. Rollback(limit=...) allows more rollbacks and Rollback(after=0) none; "
                "resume goes on from the newest checkpoint."
            )
        back = target(self._group.on_primary(self._checkpoints.steps), self._watch)
        self._write([*self._records, {"from": back, "to": step, "position": position.to_json()}])
        what = f"the last {self._rule.after} steps up to {step} were bad (a loss that is not finite"
        what += ", or a spike)" if self._rule.spike else ")"
        if back is None:
            self._count += 1
            self._watch = dataclasses.replace(self._watch, bad=0)
            what += ", and no checkpoint before them is proven good yet; training goes on"
        else:
            self._checkpoints.remove_after(back)
            what += f"; training goes back to step {back}, and skips the data of the steps after it"
        warn(
            f"{what}. It stops after {self._rule.limit - len(self._records)} more such times.",
            errors.RollbackWarning,
        )
        return back

    def write(self, log: MetricsLog | None, step: int) -> None:
        """Write to the log, which ends at a step, those that went back to it."""
        for one in self._records:
            if log and one["from"] == step:
                event = {"kind": "event", "event": "rollback", "step": step + 1}
                log.write({**event, "from": step, "to": one["to"]})

    # --- Resuming -----------------------------------------------------------------------------

    def read(self) -> None:
        """Read those of an earlier process, and remove the checkpoints that they abandoned."""
        if self._checkpoints is None:
            return
        self._records = self._group.on_primary(self._read)
        abandoned = self._group.on_primary(self._abandoned)
        if abandoned:
            self._checkpoints.remove_after(min(abandoned))

    def _read(self) -> list[Row]:
        if not self._path.exists():
            return []
        with refusing(lambda reason: errors.record_unreadable(str(self._path), reason)):
            rows = [parse_json(line) for line in self._path.read_bytes().splitlines()]
            if not all(isinstance(row, dict) and "from" in row for row in rows):
                raise ValueError("its rows are not those that were written")
            return rows

    def _abandoned(self) -> list[int]:
        """Return the targets of rollbacks of which a later checkpoint, saved before, is left."""
        assert self._checkpoints is not None
        abandoned = []
        for step in self._checkpoints.steps():
            meta = self._checkpoints.run_meta(step)
            if meta is not None:  # else it is damaged, as restoring will say
                count = meta.get("rollbacks", {}).get("count", 0)
                targets = [one["from"] for one in self._records[count:]]
                abandoned += [one for one in targets if one is not None and step > one]
        return abandoned

    def go_on(self, step: int, meta: dict[str, Any]) -> tuple[Position, dict[str, Any] | None]:
        """Return where in the data a run goes on from a checkpoint, and its sums of the epoch.

        The sums are None where the data skipped reach into another epoch.
        """
        saved = meta.get("rollbacks", {"count": 0, "watch": {}})
        self._count = saved["count"]
        self._watch = Watch(**{**saved["watch"], "losses": tuple(saved["watch"].get("losses", ()))})
        position, tally = Position.from_json(meta["position"]), meta["tally"]
        for number, record in enumerate(self._records):
            if number >= self._count and record["from"] == step:
                after = Position.from_json(record["position"])
                tally = tally if after.epoch == position.epoch else None
                position, self._count = after, number + 1
        if self._count < len(self._records):
            self._write(self._records[: self._count])
        return position, tally

    def forget(self) -> None:
        """Forget those of a run before, of which there is no checkpoint."""
        self._records = []
        if self._checkpoints is not None:
            self._group.on_primary(self._remove)

    @property
    def _path(self) -> Path:
        assert self._checkpoints is not None
        return self._checkpoints.directory.parent / FILE

    def _remove(self) -> None:
        if self._path.exists():
            self._path.unlink()
            sync_folder(self._path.parent)

    def _write(self, records: list[Row]) -> None:
        self._records = records
        self._group.on_primary(functools.partial(self._replace, records))

    def _replace(self, records: list[Row]) -> None:
        text = "".join(f"{json.dumps(one)}\n" for one in records)
        with log_errors(self._path):
            replace_file(self._path, text.encode())


class RollbackHook(FetchedHook, RewindHook):
    """Goes back after bad steps in a row.

    **Arguments:** `rollbacks`, of the run; `batches_per_epoch`, of its data; `log`, None in
    processes that write none; `wait(step)`, which waits for the save under way.
    """

    def __init__(
        self,
        rollbacks: Rollbacks,
        batches_per_epoch: int | None,
        log: MetricsLog | None,
        wait: Callable[[int], None],
    ) -> None:
        self._rollbacks, self._log, self._wait = rollbacks, log, wait
        self._batches_per_epoch = batches_per_epoch

    def on_fetched(self, run: Run, calls: list[StepOutput]) -> None:
        """Judge the steps of these calls."""
        run.rewinding = self._rollbacks.due(calls, self._batches_per_epoch, self._wait)

    def on_rewind(self, run: Run) -> None:
        """Say so in the log, which ends at the step to which the run went back."""
        self._rollbacks.write(self._log, run.step)


def check_rollback(rule: Rollback, members: object, servers: object) -> Rollback | None:
    """Return the rule, or None for members and servers, which are never rolled back.

    Raises `BatchError` where it is given for them, or is no `Rollback`.
    """
    if not isinstance(rule, Rollback):
        raise errors.BatchError(
            f"rollback is {rule!r}, and must be a plurax.train.Rollback. Write "
            "rollback=plurax.train.Rollback(after=10), or plurax.train.Rollback(after=0) for no "
            "rollbacks."
        )
    for what, given in (("members", members), ("servers", servers)):
        if given is not None:
            if rule != Rollback():
                why = "workers and servers leave a bad gradient out and go on"
                if members is not None:
                    why = "a member with a step that is not finite is frozen while the others go on"
                raise errors.BatchError(
                    f"rollback= is for one network without servers, and {what}= is given: "
                    f"{why}. Leave rollback= out."
                )
            return None
    return rule


def _position(output: StepOutput, step: int, batches_per_epoch: int | None) -> Position:
    """Return the position after one step of an output."""
    back = output.step - step
    if not back:
        return output.position
    if output.positions is not None:
        return output.positions[-1 - back]
    assert batches_per_epoch is not None, "a call of several steps reads arrays"
    at = output.position.epoch * batches_per_epoch + output.position.batch - back
    return Position(*divmod(at, batches_per_epoch))
