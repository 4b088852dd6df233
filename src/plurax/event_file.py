"""TensorBoard events, appended by the training process itself. Imports no JAX.

A writer with a thread and a queue of its own would block the training loop once its thread has met
a full disk. The format: https://www.tensorflow.org/tutorials/load_data/tfrecord, each record a
serialized `Event`.
"""

import socket
import struct
import time
from pathlib import Path

from plurax.disk import AppendFile, make_folder


class EventFile:
    """A file of TensorBoard events in a folder; `file` is where they are appended.

    **Arguments:** `purge_step`, from which TensorBoard hides what earlier files of the folder hold.

    Raises `OSError` where the file cannot be created.
    """

    def __init__(self, directory: Path, purge_step: int | None) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # slow to import

        make_folder(directory)
        # The name orders the files of a folder, of which the last may be a second old.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self.file = AppendFile(directory / name)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Append scalars by tag. A full disk is no error here; see `AppendFile.trouble`."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        now = time.time()
        for tag, value in values.items():
            self._append(Event(wall_time=now, step=step, summary=scalar(tag, value)))

    def _append(self, event: object) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()  # type: ignore[attr-defined]
        header = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (header, data))
        self.file.write(header + next(sums) + data + next(sums))
