"""The hooks of a run, in the order in which each event reaches them.

    watchdog        nearest to the calls: what hangs in one of them is seen
    replicas        before a state with a fault in it is logged or saved
    measurements    add to the row of an epoch before callbacks, which see a whole row
    servers         likewise
    callbacks       the user's, in the user's order; the last that may add to a row
    progress        a row is shown before it is logged, as a disk may be slow
    measured        below the line of its epoch
    not finite      what is wrong is said after what has been reached
    log             before any decision that would cut it: it has every step that was taken
    rollback        judges the steps that are logged; of a run that goes back, the log is cut first
    saving          no checkpoint is ahead of what those before it have written
    compiled        the last: reading the compiled program takes a moment, once

No hook knows another's place: what one needs of another it is given. To add a hook: a line here
that says why it has its place, and its place in the list of `ordered_hooks`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from plurax.checkpoint import Checkpoints
from plurax.distributed.process_group import ProcessGroup
from plurax.guards.not_finite import NotFiniteGuard
from plurax.guards.replica_guard import ReplicaGuard
from plurax.guards.rollback import RollbackHook, Rollbacks
from plurax.guards.saving import Saving
from plurax.guards.watchdog import Watchdog, WatchedCalls
from plurax.loop.call_hooks import Callbacks, Hooks
from plurax.loop.data import Data
from plurax.progress.progress_hook import ProgressHook
from plurax.progress.training_progress import TrainingProgress
from plurax.run_folder.log import MetricsLog
from plurax.server.coordinator import Coordinator
from plurax.train.measurements import CompiledNote, MeasuredLine, Measurements
from plurax.train.serve import ServersHook


def ordered_hooks(
    callbacks: Callbacks,
    watchdog: Watchdog,
    guard: ReplicaGuard,
    measurements: Measurements | None,
    coordinator: Coordinator | None,
    bar: TrainingProgress,
    source: Data,
    log: MetricsLog | None,
    rollbacks: Rollbacks,
    checkpoints: Checkpoints | None,
    group: ProcessGroup,
) -> Hooks:
    """Return the hooks of a run. See the module.

    **Arguments:** `measurements`, `coordinator`, `log`, `checkpoints`: None for a run without.
    """
    saving: Sequence[Any] = ()
    newest: Callable[[], int | None] = _nothing
    if checkpoints is not None:
        save = Saving(checkpoints, rollbacks, log, bar.note, group)
        rollback = RollbackHook(rollbacks, source.batches_per_epoch, log, save.wait)
        saving, newest = (rollback, save), save.newest
    order: list[Any] = [
        WatchedCalls(watchdog, newest),
        guard,
        *((measurements,) if measurements else ()),
        *((ServersHook(coordinator),) if coordinator else ()),
        callbacks,
        ProgressHook(bar, coordinator.summary if coordinator else _no_text),
        *((MeasuredLine(measurements),) if measurements else ()),
        NotFiniteGuard(source),
        *((log,) if log else ()),
        *saving,
        *((CompiledNote(log.path.parent),) if log else ()),
    ]
    return Hooks(order, callbacks)


def _nothing() -> None:
    """Return that nothing is saved."""


def _no_text() -> str:
    return ""
