"""The barriers of a save by several processes, which end at once where one of them failed.

Orbax's own wait, until their time is over, for a process that could not write its part. Example,
process 1 has met a full disk:

    process 0    written, raises          end of the save    both at the end: the save has failed
    process 1    end of the save, waits   end of the save
"""

from pathlib import Path

from plurax.disk import sync_file
from plurax.distributed.process_group import ProcessGroup

STAGES = ("async_write_complete", "async_commit_complete")
"""Orbax's names of the barriers that only a process reaches whose part succeeded so far."""


class SaveBarrier:
    """Orbax's `barrier_sync_fn`; all processes call it from one thread at a time.

    **Arguments:** `group`, which nothing else uses; `directory`, of the checkpoints.
    """

    def __init__(self, group: ProcessGroup, directory: Path) -> None:
        self._group, self._directory = group, directory

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Return when all processes are here. Raises `OSError` where one failed before it."""
        del timeout_ms  # the group has a limit of its own
        stage = next((one for one in STAGES if one in key), key)
        if stage == STAGES[0]:
            # Process 0 syncs the checkpoint before it is renamed, but no other host's memory.
            own = f"*.orbax-checkpoint-tmp/*/array_metadatas/process_{self._group.index}"
            for path in self._directory.glob(own):
                sync_file(path)
        while True:
            stages = self._group.all_gather(stage)
            if all(one == stage for one in stages):
                return
            if stage in STAGES:
                late = [index for index, one in enumerate(stages) if one not in STAGES]
                named = ", ".join(map(self._group.named, late)) or "a process"
                raise OSError(f"{named} could not write its part")

    def close(self) -> None:
        """Close the connections."""
        self._group.close()
